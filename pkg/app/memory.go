// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"os"
	"runtime"
	"runtime/debug"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
)

// gcPercent is by how much the heap may grow before garbage is collected. With Go's default of 100,
// garbage takes as much memory as the cache; with less than 60, collecting takes a third of the CPU time.
const gcPercent = 60

// tuneMemory keeps garbage to gcPercent, and every minute collects it and returns free memory, until ctx
// ends. A start, a new list or the boundary of many schedules leaves free memory that Go would otherwise keep
// as room for garbage. What a sync.Pool holds is freed a minute later, by the next collection.
func tuneMemory(ctx context.Context) {
	if os.Getenv("GOGC") != "" {
		return // somebody else tunes it
	}
	debug.SetGCPercent(gcPercent)
	if os.Getenv("GOMEMLIMIT") != "" {
		return // Go returns memory when it nears the limit
	}
	wait.UntilWithContext(ctx, func(context.Context) {
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		if isWorthCollecting(&m) {
			debug.FreeOSMemory()
		}
	}, time.Minute)
}

// isWorthCollecting reports whether the heap is small or much of it is free: to collect a heap of several
// GiB takes seconds of CPU time.
func isWorthCollecting(m *runtime.MemStats) bool {
	return m.HeapInuse < 256<<20 || m.HeapIdle-m.HeapReleased > m.HeapInuse/4
}
