// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package election

import (
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// TestSimulatedLateAnswerDoesNotOpenTheFence pauses a leader between two steps of processing the answer to a
// renewal, at one of the next readings of its clock. It goes on after the term that it had without this
// answer, but within the term that it would have by it. Once its fence has refused a write, it must not open
// again: rule 2.
func TestSimulatedLateAnswerDoesNotOpenTheFence(t *testing.T) {
	const steps = 4 // of these, all but the last precede the extension of the term
	late := 0
	for seed := range uint64(10 * steps) {
		runPlan(t, ours, simFences{client: true}, 1, seed, func(s *simulation) {
			s.install()
			s.launchReplicas(2)
			pass(time.Minute)
			leader := s.leader()
			var left atomic.Int64 // readings until the pause
			paused := make(chan struct{})
			leader.mu.Lock()
			leader.answered = sync.OnceFunc(func() { left.Store(1 + int64(seed%steps)) })
			leader.reads = func() {
				if left.Load() > 0 && left.Add(-1) == 0 {
					leader.beginPause(s.cfg.RenewDeadline.Duration - s.cfg.RetryPeriod.Duration/2)
					close(paused)
				}
			}
			leader.mu.Unlock()
			if !ends(paused, time.Minute) {
				s.audit.violate(ruleSomeoneLeads, "%s does not renew the Lease", leader.identity)
				return
			}
			pass(s.cfg.RenewDeadline.Duration) // it goes on before
			leader.mu.Lock()
			refused := leader.refused > 0
			leader.mu.Unlock()
			if refused {
				late++
			}
			if refused && leader.wouldPass() {
				s.audit.violate(ruleLostCloses, "%s goes on after its fence has refused a write", leader.identity)
			}
		})
	}
	if late == 0 {
		t.Error("no leader went on after its term: the plan is too weak")
	}
}

// TestSimulatedLateBodyIsNotSent pauses a leader while a write that its fence has admitted waits for a
// connection, until another has taken the Lease. When it goes on, the fence must look again before
// the end of the body: rule 7.
func TestSimulatedLateBodyIsNotSent(t *testing.T) {
	for seed := range uint64(10) {
		runPlan(t, ours, simFences{client: true}, 1, seed, func(s *simulation) {
			s.install()
			s.launchReplicas(2)
			pass(time.Minute)
			former := s.leader()
			if !passUntil(500*time.Microsecond, former.isDialing) {
				s.audit.violate(ruleSomeoneLeads, "%s does not write", former.identity)
				return
			}
			former.pause(2 * s.cfg.LeaseDuration.Duration)
			pass(time.Second)
			if s.leader() == former {
				s.audit.violate(ruleReplaced, "%s leads after a pause of two leases", former.identity)
			}
		})
	}
}
