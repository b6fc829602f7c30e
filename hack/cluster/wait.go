// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"fmt"
	"time"

	"github.com/quartermaster-dev/quartermaster/hack/cluster/sandbox"
)

// Sleep waits for d or until ctx ends, and then returns the cause.
func Sleep(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// Poll calls check every interval until it returns nil. If ctx ends before, Poll returns the cause
// and the last error of check.
func Poll(ctx context.Context, interval time.Duration, check func(context.Context) error) error {
	var lastErr error
	for {
		err := check(ctx)
		if err == nil {
			return nil
		}
		if ctx.Err() == nil || lastErr == nil { // an error from before ctx ended says more
			lastErr = err
		}
		if err := Sleep(ctx, interval); err != nil {
			return fmt.Errorf("%w: %w", err, lastErr)
		}
	}
}

// awaitReady calls ready until it returns nil. It fails if the process or ctx ends before.
func awaitReady(ctx context.Context, p *sandbox.Process, ready func(context.Context) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	go func() {
		select {
		case <-p.Done():
			cancel(fmt.Errorf("it ended with code %d", p.ExitCode()))
		case <-ctx.Done():
		}
	}()
	err := Poll(ctx, pollInterval, func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
		defer cancel()
		return ready(ctx)
	})
	if err != nil {
		return fmt.Errorf("%s is not ready: %w; its last lines:\n%s", p.Name, err, p.Tail(15))
	}
	return nil
}
