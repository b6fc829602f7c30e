// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package replication

import (
	"fmt"
	"strings"
	"sync"
	"syscall"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// fan is a namespace with sources, and those that they push to.
type fan struct {
	*fixture
	sources, targets int
	pushedTo         map[string]bool
}

func newFan(t *testing.T, sources, targets int) fan {
	t.Helper()
	f := fan{newFixture(t, "a"), sources, targets, map[string]bool{}}
	f.ctx = fleet.Within(t.Context(), t, 3*fleet.Patience)
	var mu sync.Mutex
	parallel(targets, func(i int) {
		namespace := shared.NewNamespace(f.ctx, t, map[string]string{"group": f.id, "fan": "yes"})
		mu.Lock()
		defer mu.Unlock()
		f.namespaces[fmt.Sprintf("t%d", i)], f.pushedTo[namespace] = namespace, true
	})
	return f
}

// parallel calls do for 0 to n-1, 16 at a time.
func parallel(n int, do func(i int)) {
	var running sync.WaitGroup
	next := make(chan int)
	for range 16 {
		running.Go(func() {
			for i := range next {
				do(i)
			}
		})
	}
	for i := range n {
		next <- i
	}
	close(next)
	running.Wait()
}

// forEachSource does something for all sources, several at a time.
func (f fan) forEachSource(do func(name string)) {
	f.Helper()
	parallel(f.sources, func(i int) { do(fmt.Sprintf("s%d", i)) })
}

// countCopies counts the copies with that content.
func (f fan) countCopies(value string) int {
	f.Helper()
	list, err := shared.Admin.CoreV1().Secrets("").List(f.ctx, metav1.ListOptions{})
	assert.NoError(f, err)
	n := 0
	for i := range list.Items {
		s := &list.Items[i]
		if f.pushedTo[s.Namespace] && strings.HasPrefix(s.Name, "s") && (value == "" || string(s.Data["k"]) == value) {
			n++
		}
	}
	return n
}

func (f fan) waitForCopies(value string, enough func(int) bool) {
	f.Helper()
	fleet.Eventually(f.ctx, f, func() error {
		if n := f.countCopies(value); !enough(n) {
			return fmt.Errorf("%d copies with %q", n, value)
		}
		return nil
	})
}

// TestLongHandoverInAFanOut stops or kills the leader while it creates, updates or deletes 1,000
// copies. The next leader does the rest, and nothing twice.
func TestLongHandoverInAFanOut(t *testing.T) {
	const sources, targets, all = 4, 250, 1000
	for name, tc := range map[string]struct {
		signal syscall.Signal
		args   []string
	}{
		"when the leader is told to stop": {syscall.SIGTERM, nil},
		"when the leader is killed":       {syscall.SIGKILL, fleet.ShortTimings},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFan(t, sources, targets)
			var leader, standby *cluster.Manager
			handover := func(during func() bool) {
				t.Helper()
				fleet.Eventually(f.ctx, t, func() error {
					if !during() {
						return fmt.Errorf("not begun")
					}
					return nil
				})
				assert.NoError(t, leader.Signal(tc.signal))
				shared.WaitForLeader(f.ctx, t, standby)
				leader, standby = standby, shared.RunStandby(f.ctx, t, args(tc.args...)...)
			}
			leader = shared.RunLeader(f.ctx, t, args(tc.args...)...)
			standby = shared.RunStandby(f.ctx, t, args(tc.args...)...)

			f.forEachSource(func(name string) {
				f.secret("a/"+name, "k=v", f.annotated("Q:push-to=labels: group={id},fan=yes"))
			})
			handover(func() bool { n := f.countCopies("v"); return n > all/10 })
			f.waitForCopies("v", func(n int) bool { return n == all })

			f.forEachSource(func(name string) { f.edit("a/"+name, holding("k=w")) })
			handover(func() bool { n := f.countCopies("w"); return n > all/10 })
			f.waitForCopies("w", func(n int) bool { return n == all })

			f.forEachSource(func(name string) { f.remove("a/" + name) })
			handover(func() bool { n := f.countCopies(""); return n < all*9/10 })
			f.waitForCopies("", func(n int) bool { return n == 0 })

			counts := map[string]int{}
			for _, write := range f.writes() {
				counts[write]++
			}
			for write, n := range counts {
				if n != 1 {
					t.Errorf("%s: %d times", write, n)
				}
			}
			// The audit log has no answer to what was in flight when a leader was killed: one request of
			// each of the 4 workers, in each of the 3 handovers.
			unanswered := 0
			if tc.signal == syscall.SIGKILL {
				unanswered = 3 * 4
			}
			if n := len(counts); n > 3*all || n < 3*all-unanswered {
				t.Errorf("%d different writes, want %d", n, 3*all)
			}
		})
	}
}
