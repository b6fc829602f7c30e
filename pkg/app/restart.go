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

	"github.com/quartermaster-dev/quartermaster/internal/errtree"
	"github.com/quartermaster-dev/quartermaster/internal/loopmetrics"
	"github.com/quartermaster-dev/quartermaster/internal/panics"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
)

// A controller whose Run returns on its own is started again after restartDelay. After a run of healthyRun,
// the controller counts as healthy again.
const (
	restartDelay = 10 * time.Second
	healthyRun   = 5 * time.Minute
)

// restarts records how the runs of one controller, or of its loop in another cluster, ended.
type restarts struct {
	mu      sync.Mutex
	count   uint64
	running bool      // run has not returned
	began   time.Time // when the last run began; zero after an unexpected end
	lastErr *controllers.LastError
}

// keepRunning calls run, the Run of a controller or of its loop in another cluster, until ctx ends. If run
// returns earlier, or panics outside of a reconcile, keepRunning calls ended, and run again after
// restartDelay: one controller must not stop the others. It returns the error of the run during which ctx
// ended.
func (r *restarts) keepRunning(
	ctx context.Context, m *loopmetrics.Metrics, controller string,
	run func(context.Context) error, ended func(err error, stack []byte),
) error {
	for {
		r.begin()
		stack, err := panics.Recover(func() error {
			runCtx, cancel := context.WithCancel(ctx)
			defer cancel() // what run has started and left behind ends
			err := run(runCtx)
			if ctx.Err() != nil && errtree.Every(err, func(err error) bool { return isEndOf(ctx, err) }) {
				return nil // run ended because it was told to
			}
			return err
		})
		r.returned()
		if stack != nil {
			m.Panicked(controller)
		}
		if ctx.Err() != nil {
			if stack != nil {
				klog.FromContext(ctx).Error(err, "Controller panicked while it was stopping",
					"controller", controller, "stack", string(stack))
			}
			return err
		}
		if err == nil {
			err = errors.New("Run returned before its context ended")
		}
		m.Restarted(controller)
		r.end(err)
		ended(err, stack)
		select {
		case <-time.After(restartDelay):
		case <-ctx.Done():
			return nil
		}
	}
}

// isEndOf reports whether err is what ctx has ended with.
func isEndOf(ctx context.Context, err error) bool {
	return any(err) == any(ctx.Err()) || any(err) == any(context.Cause(ctx))
}

func (r *restarts) begin() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.began, r.running = time.Now(), true
}

func (r *restarts) returned() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.running = false
}

func (r *restarts) isRunning() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.running
}

// end records an unexpected end.
func (r *restarts) end(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.count++
	r.began = time.Time{}
	r.lastErr = &controllers.LastError{Key: "Run", Text: err.Error(), Time: time.Now()}
}

// problem returns an error after an unexpected end, until a run has lasted healthyRun. The log has the
// causes.
func (r *restarts) problem() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.count > 0 && (r.began.IsZero() || time.Since(r.began) < healthyRun) {
		return fmt.Errorf("stopped unexpectedly, %d times so far; it is restarted after %s", r.count, restartDelay)
	}
	return nil
}

// report adds the restarts to s and, if it is the most recent, the error of the last one.
func (r *restarts) report(s *controllers.Status) {
	r.mu.Lock()
	defer r.mu.Unlock()
	s.Restarts = r.count
	if r.lastErr != nil && (s.LastError == nil || s.LastError.Time.Before(r.lastErr.Time)) {
		s.LastError = r.lastErr
	}
}
