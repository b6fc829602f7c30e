// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
)

// A controller whose Run returns on its own is started again after restartDelay. Each further
// restart waits twice as long, up to restartDelayMax. After a run of healthyRun, the wait starts
// from restartDelay again.
const (
	restartDelay    = time.Second
	restartDelayMax = time.Minute
	healthyRun      = 5 * time.Minute
)

// supervise runs one controller until ctx ends. If Run returns earlier, or panics outside of a
// reconcile, supervise starts it again: one controller must not stop the others. It returns the
// error of the Run during which ctx ended.
func (h *hosted) supervise(ctx context.Context) error {
	logger := klog.LoggerWithName(klog.FromContext(ctx), h.name)
	ctx = klog.NewContext(ctx, logger)
	for {
		h.runs.began()
		stack, err := controllers.Contain(func() error {
			err := h.Run(ctx)
			if ctx.Err() != nil && (errors.Is(err, ctx.Err()) || errors.Is(err, context.Cause(ctx))) {
				return nil // its way to say that it ended because it was told to
			}
			return err
		})
		if stack != nil {
			h.loops.Panicked(h.name)
		}
		if ctx.Err() != nil {
			return err
		}
		if err == nil {
			err = errors.New("Run returned before its context ended")
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

// runs records how the runs of one controller ended.
type runs struct {
	mu       sync.Mutex
	restarts uint64
	inARow   int       // unexpected ends since the last run of healthyRun
	since    time.Time // when the last run began or, later, ended
	lastErr  *controllers.LastError
}

func (r *runs) began() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.since = time.Now()
}

// ended records an unexpected end and returns how long to wait before the next run.
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

// problem returns an error after an unexpected end, until a run has lasted healthyRun. The log has
// the causes.
func (r *runs) problem() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.inARow == 0 || time.Since(r.since) >= healthyRun {
		return nil
	}
	return fmt.Errorf("stopped unexpectedly, %d times in a row; it is restarted with back-off", r.inARow)
}

// report adds the restarts to s and, if it is the most recent, the error of the last one.
func (r *runs) report(s *controllers.Status) {
	r.mu.Lock()
	defer r.mu.Unlock()
	s.Restarts = r.restarts
	if r.lastErr != nil && (s.LastError == nil || s.LastError.Time.Before(r.lastErr.Time)) {
		s.LastError = r.lastErr
	}
}

// sleep waits for d. It returns false if ctx ends first.
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
