// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"os"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"sync/atomic"
)

// The heap may grow by gcPercent before garbage is collected: with Go's default of 100, garbage takes
// as much memory as the cache. A small heap may grow by gcHeadroom, though, up to gcPercentMax: it
// would be collected again and again for the garbage of a few hundred events. While the caches fill, a
// heap of gcFillFrom may grow by gcFillHeadroom: it will be larger than that in the end. A smaller one
// may be that of a small cluster, where the pages that it once took are not all given back.
const (
	gcPercent      = 25
	gcPercentMax   = 60
	gcHeadroom     = 4 << 20
	gcFillHeadroom = 24 << 20
	gcFillFrom     = 8 << 20
)

// gcPacer sets how much the heap may grow, after each collection, by what that has left.
type gcPacer struct {
	filling *atomic.Pointer[func() bool]
	live    []metrics.Sample
	percent int
}

// paceGC paces the garbage collector of the process, unless the environment variable GOGC does. The
// function in filling, if any, reports whether the caches fill.
func paceGC(filling *atomic.Pointer[func() bool]) {
	if os.Getenv("GOGC") == "" {
		p := &gcPacer{filling: filling, live: []metrics.Sample{{Name: "/gc/heap/live:bytes"}}}
		p.collected()
	}
}

// collected is called after each collection, as the finalizer of p.
func (p *gcPacer) collected() {
	metrics.Read(p.live)
	filling := p.filling.Load()
	percent := gcPercentFor(p.live[0].Value.Uint64(), filling != nil && (*filling)())
	if percent != p.percent {
		p.percent = percent
		debug.SetGCPercent(percent)
	}
	runtime.SetFinalizer(p, (*gcPacer).collected)
}

// gcPercentFor returns the percentage for a heap with so many bytes that are alive, in steps, since each
// change stops the process for a moment.
func gcPercentFor(live uint64, filling bool) int {
	percent := min(gcHeadroom*100/max(live, 1), gcPercentMax)
	if filling && live >= gcFillFrom {
		percent = gcFillHeadroom * 100 / live
	}
	return max(int(percent)/5*5, gcPercent)
}
