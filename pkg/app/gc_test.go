// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"runtime"
	"runtime/debug"
	"sync/atomic"
	"testing"
)

func TestGCPercentFor(t *testing.T) {
	for name, tc := range map[string]struct {
		live    uint64
		filling bool
		want    int
	}{
		"before the first collection nothing is known":       {0, false, gcPercentMax},
		"a small heap may grow by more than a large one":     {5 << 20, false, gcPercentMax},
		"between them it may grow by the headroom":           {10 << 20, false, 40},
		"a large heap grows by no more than a quarter":       {60 << 20, false, gcPercent},
		"the heap of a million Secrets grows as a large one": {400 << 20, false, gcPercent},
		"a small heap that is filled grows as any":           {7 << 20, true, 55},
		"a heap that is filled is soon not a small one":      {8 << 20, true, 300},
		"a heap that is filled may grow by more":             {24 << 20, true, 100},
		"a large heap that is filled grows as any":           {100 << 20, true, gcPercent},
	} {
		t.Run(name, func(t *testing.T) {
			if got := gcPercentFor(tc.live, tc.filling); got != tc.want {
				t.Errorf("%d, want %d", got, tc.want)
			}
		})
	}
}

func TestTheGCIsPacedByWhatIsAlive(t *testing.T) {
	t.Setenv("GOGC", "")
	before := debug.SetGCPercent(100)
	defer debug.SetGCPercent(before)
	paceGC(&atomic.Pointer[func() bool]{})
	ballast := make([]byte, 100<<20)
	for range 5 { // the finalizer runs some time after a collection
		runtime.GC()
		runtime.Gosched()
	}
	percent := 0
	for range 1000 {
		if percent = debug.SetGCPercent(100); percent == gcPercent {
			break
		}
		debug.SetGCPercent(percent)
		runtime.GC()
	}
	if percent != gcPercent {
		t.Errorf("%d %% with a heap of 100 MiB", percent)
	}
	runtime.KeepAlive(ballast)
}
