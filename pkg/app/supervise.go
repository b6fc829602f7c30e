// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
)

// A controller whose Run returned on its own is started again after restartDelay, twice as long each time. When it has
// then run for healthyRun, that is forgotten.
const (
	restartDelay    = time.Second
	restartDelayMax = time.Minute
	healthyRun      = 5 * time.Minute
)

// supervise runs one controller until ctx ends. One that returns before, or panics outside of a reconcile, is started
// again: it must not take the others down.
func (h *hosted) supervise(ctx context.Context) error {
	logger := klog.LoggerWithName(klog.FromContext(ctx), h.name)
	ctx = klog.NewContext(ctx, logger)
	for {
		h.runs.began()
		stack, err := h.runRecovered(ctx)
		if ctx.Err() != nil {
			return err
		}
		if err == nil {
			err = errors.New("Run returned though its context had not ended")
		}
		h.loops.Restarted(h.name)
		delay := h.runs.ended(err)
		failure := logger.WithValues("delay", delay)
		if stack != nil {
			failure = failure.WithValues("stack", string(stack))
		}
		failure.Error(err, "Controller stopped unexpectedly, restarting")
		if !sleep(ctx, delay) {
			return nil
		}
	}
}

func (h *hosted) runRecovered(ctx context.Context) (stack []byte, err error) {
	defer func() {
		if r := recover(); r != nil {
			h.loops.Panicked(h.name)
			stack, err = debug.Stack(), fmt.Errorf("panic: %v", r)
		}
	}()
	return nil, h.Run(ctx)
}

// runs is what became of the runs of one controller.
type runs struct {
	mu       sync.Mutex
	restarts uint64
	inARow   int       // runs that ended unexpectedly, without a long healthy one in between
	since    time.Time // when the last run began, or ended
	lastErr  *controllers.LastError
}

func (r *runs) began() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.since = time.Now()
}

// ended notes an unexpected end and returns how long to wait before the next run.
func (r *runs) ended(err error) time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := time.Now()
	if now.Sub(r.since) >= healthyRun {
		r.inARow = 0
	}
	delay := restartDelayMax
	if r.inARow < 6 {
		delay = restartDelay << r.inARow
	}
	r.restarts++
	r.inARow++
	r.since = now
	r.lastErr = &controllers.LastError{Key: "Run", Text: err.Error(), Time: now}
	return delay
}

// problem tells of runs that ended unexpectedly, until one has lasted. The log has their errors.
func (r *runs) problem() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.inARow == 0 || time.Since(r.since) >= healthyRun {
		return nil
	}
	return fmt.Errorf("stopped unexpectedly, %d times in a row; it is restarted with back-off", r.inARow)
}

// report adds the restarts to the status of the controller.
func (r *runs) report(s *controllers.Status) {
	r.mu.Lock()
	defer r.mu.Unlock()
	s.Restarts = r.restarts
	if r.lastErr != nil && (s.LastError == nil || s.LastError.Time.Before(r.lastErr.Time)) {
		s.LastError = r.lastErr
	}
}

// sleep waits for d and answers true, or false when ctx ended first.
func sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return ctx.Err() == nil
	case <-ctx.Done():
		return false
	}
}
