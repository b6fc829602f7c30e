// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"runtime"
	"runtime/debug"
	"testing"
)

func TestGCPercentFor(t *testing.T) {
	for name, tc := range map[string]struct {
		live uint64
		want int
	}{
		"before the first collection nothing is known":       {0, gcPercentMax},
		"a small heap may grow by more than a large one":     {5 << 20, gcPercentMax},
		"between them it may grow by the headroom":           {10 << 20, 40},
		"a large heap grows by no more than a quarter":       {60 << 20, gcPercent},
		"the heap of a million Secrets grows as a large one": {400 << 20, gcPercent},
	} {
		t.Run(name, func(t *testing.T) {
			if got := gcPercentFor(tc.live); got != tc.want {
				t.Errorf("%d, want %d", got, tc.want)
			}
		})
	}
}

func TestTheGCIsPacedByWhatIsAlive(t *testing.T) {
	t.Setenv("GOGC", "")
	before := debug.SetGCPercent(100)
	defer debug.SetGCPercent(before)
	paceGC()
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
