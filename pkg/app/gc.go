// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"os"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
)

// The heap may grow by gcPercent before garbage is collected: with Go's default of 100, garbage takes
// as much memory as the cache. A small heap may grow by gcHeadroom, though, up to gcPercentMax: it
// would be collected again and again for the garbage of a few hundred events.
const (
	gcPercent    = 25
	gcPercentMax = 60
	gcHeadroom   = 4 << 20
)

// gcPacer sets how much the heap may grow, after each collection, by what that has left.
type gcPacer struct {
	live    []metrics.Sample
	percent int
}

// paceGC paces the garbage collector of the process, unless the environment variable GOGC does.
func paceGC() {
	if os.Getenv("GOGC") == "" {
		p := &gcPacer{live: []metrics.Sample{{Name: "/gc/heap/live:bytes"}}}
		p.collected()
	}
}

// collected is called after each collection, as the finalizer of p.
func (p *gcPacer) collected() {
	metrics.Read(p.live)
	if percent := gcPercentFor(p.live[0].Value.Uint64()); percent != p.percent {
		p.percent = percent
		debug.SetGCPercent(percent)
	}
	runtime.SetFinalizer(p, (*gcPacer).collected)
}

// gcPercentFor returns the percentage for a heap with so many bytes that are alive, in steps, since each
// change stops the process for a moment.
func gcPercentFor(live uint64) int {
	percent := min(gcHeadroom*100/max(live, 1), gcPercentMax)
	return max(int(percent)/5*5, gcPercent)
}
