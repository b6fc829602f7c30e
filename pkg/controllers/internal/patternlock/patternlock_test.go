// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package patternlock

import (
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
)

// TestDoRunsOneAtATime has a call that panics among others, since a worker's panic is recovered.
func TestDoRunsOneAtATime(t *testing.T) {
	var running, maxRunning atomic.Int32
	var callers sync.WaitGroup
	for i := range 8 {
		callers.Go(func() {
			defer func() { _ = recover() }()
			for range 100 {
				Do(func() bool {
					defer running.Add(-1)
					if now := running.Add(1); now > maxRunning.Load() {
						maxRunning.Store(now)
					}
					runtime.Gosched()
					if i == 0 {
						panic("a pattern")
					}
					return true
				})
			}
		})
	}
	callers.Wait()
	if maxRunning.Load() != 1 {
		t.Errorf("%d calls ran at once", maxRunning.Load())
	}
}
