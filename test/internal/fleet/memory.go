// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
)

// Memory is how much memory a manager takes, in MiB.
type Memory struct {
	// Resident is the memory of the process, of which Anonymous is what is no page of a file, such as the
	// program.
	Resident, Anonymous float64
	// Live is the heap right after a collection of garbage, which Memory asks for after it has read the
	// others: what Anonymous has besides is garbage, and room for it.
	Live float64
}

// MemoryOf returns how much memory a manager takes.
func (f *Fleet) MemoryOf(ctx context.Context, t testing.TB, m *cluster.Manager) (memory Memory) {
	t.Helper()
	if runtime.GOOS != "linux" {
		t.Skip("the memory of a process is read from /proc")
	}
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", m.PID()))
	if err != nil {
		t.Fatal(err) // the manager has ended
	}
	number := func(text, prefix string, unit float64) (n float64) {
		_, rest, _ := strings.Cut(text, prefix)
		if _, err := fmt.Sscan(rest, &n); err != nil {
			t.Fatalf("no %q: %v", prefix, err)
		}
		return n * unit / (1 << 20)
	}
	memory.Resident, memory.Anonymous = number(string(status), "VmRSS:", 1<<10), number(string(status), "RssAnon:", 1<<10)
	token, err := f.AdminToken(ctx)
	if err != nil {
		t.Fatal(err)
	}
	_, profile, err := Get(m.SecureURL+"/debug/pprof/heap?gc=1&debug=1", token)
	if err != nil {
		t.Fatal(err)
	}
	memory.Live = number(profile, "# HeapAlloc =", 1)
	return memory
}

// String returns the figures for a log.
func (m Memory) String() string {
	return fmt.Sprintf("%.1f MiB resident, %.1f of its own, %.2f of live heap", m.Resident, m.Anonymous, m.Live)
}

// Minus returns by how much it is more than another.
func (m Memory) Minus(other Memory) Memory {
	return Memory{m.Resident - other.Resident, m.Anonymous - other.Anonymous, m.Live - other.Live}
}

// MedianMemory measures three times, logs each, and returns the one with the middle resident memory.
func MedianMemory(t testing.TB, measure func() Memory) Memory {
	t.Helper()
	var all []Memory
	for range 3 {
		all = append(all, measure())
		t.Log(all[len(all)-1])
	}
	slices.SortFunc(all, func(a, b Memory) int { return cmp.Compare(a.Resident, b.Resident) })
	return all[1]
}
