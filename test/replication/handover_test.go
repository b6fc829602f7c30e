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
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// A fan-out of fanSources to fanTargets namespaces.
const (
	fanSources = 50
	fanTargets = 20
)

// fan is a namespace with sources, and those that they push to.
type fan struct{ *world }

func newFan(t *testing.T) fan {
	t.Helper()
	f := fan{newWorld(t, "a")}
	for i := range fanTargets {
		f.namespace(fmt.Sprintf("t%d", i))
	}
	return f
}

// each does something for all sources, several at a time.
func (f fan) each(do func(name string)) {
	f.Helper()
	var running sync.WaitGroup
	next := make(chan int)
	for range 8 {
		running.Go(func() {
			for i := range next {
				do(fmt.Sprintf("s%d", i))
			}
		})
	}
	for i := range fanSources {
		next <- i
	}
	close(next)
	running.Wait()
}

// copies counts the copies with that content.
func (f fan) copies(value string) int {
	f.Helper()
	list, err := shared.Admin.CoreV1().Secrets("").List(f.ctx, metav1.ListOptions{})
	if err != nil {
		f.Fatal(err)
	}
	n := 0
	for i := range list.Items {
		s := &list.Items[i]
		if strings.HasPrefix(s.Name, "s") && s.Namespace != f.namespaces["a"] && f.has(s.Namespace) && (value == "" || string(s.Data["k"]) == value) {
			n++
		}
	}
	return n
}

func (f fan) has(namespace string) bool {
	for _, real := range f.namespaces {
		if real == namespace {
			return true
		}
	}
	return false
}

func (f fan) awaitCopies(value string, enough func(int) bool) {
	f.Helper()
	fleet.Eventually(f.ctx, f, func() error {
		if n := f.copies(value); !enough(n) {
			return fmt.Errorf("%d copies with %q", n, value)
		}
		return nil
	})
}

// TestAHandoverInAFanOut stops or kills the leader while it creates, updates or deletes 1,000
// copies. The next leader does the rest, and nothing twice.
func TestAHandoverInAFanOut(t *testing.T) {
	all := fanSources * fanTargets
	for name, tc := range map[string]struct {
		signal syscall.Signal
		args   []string
	}{
		"when the leader is told to stop": {syscall.SIGTERM, nil},
		"when the leader is killed":       {syscall.SIGKILL, fleet.ShortTimings},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFan(t)
			f.ctx = fleet.Within(t.Context(), t, 3*fleet.Patience)
			var leader, standby *cluster.Manager
			handOver := func(during func() bool) {
				t.Helper()
				fleet.Eventually(f.ctx, t, func() error {
					if !during() {
						return fmt.Errorf("not begun")
					}
					return nil
				})
				if err := leader.Signal(tc.signal); err != nil {
					t.Fatal(err)
				}
				shared.WaitForLeader(f.ctx, t, standby)
				leader, standby = standby, shared.RunStandby(f.ctx, t, args(tc.args...)...)
			}
			leader = shared.RunLeader(f.ctx, t, args(tc.args...)...)
			standby = shared.RunStandby(f.ctx, t, args(tc.args...)...)

			f.each(func(name string) {
				f.secret("a/"+name, "k=v", f.with("Q:push-to=labels: world={id},name!=a"))
			})
			handOver(func() bool { n := f.copies("v"); return n > all/10 })
			f.awaitCopies("v", func(n int) bool { return n == all })

			f.each(func(name string) { f.edit("a/"+name, holding("k=w")) })
			handOver(func() bool { n := f.copies("w"); return n > all/10 })
			f.awaitCopies("w", func(n int) bool { return n == all })

			f.each(func(name string) { f.remove("a/" + name) })
			handOver(func() bool { n := f.copies(""); return n < all*9/10 })
			f.awaitCopies("", func(n int) bool { return n == 0 })

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
			// each of the 4 workers, in each of the 3 hand-overs.
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
