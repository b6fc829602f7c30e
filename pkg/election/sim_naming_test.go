// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package election

import (
	"sync"
	"testing"
	"time"
)

// TestSimulatedLateNameIsNotStored lets a leader name itself again by patches that wait in an API server,
// between admission and store, until its successor has named itself and writes. The leader is cut off
// meanwhile. When it comes back, it still believes in its term, so nothing but the condition on the version
// keeps its name from being written, and then its writes from being admitted.
func TestSimulatedLateNameIsNotStored(t *testing.T) {
	for seed := range uint64(20) {
		runPlan(t, ours, simFences{client: true, server: true}, 1, seed, func(s *simulation) {
			s.install()
			s.launchReplicas(2)
			pass(time.Minute)
			former := s.leader()
			admitted, stored := make(chan struct{}, 100), make(chan struct{})
			store := sync.OnceFunc(func() { close(stored) })
			defer store()
			former.mu.Lock()
			former.hold = func() { admitted <- struct{}{}; <-stored }
			former.mu.Unlock()
			s.store.wipeName("admin")
			if !passUntil(time.Millisecond, func() bool { return len(admitted) > 0 }) {
				s.audit.violate(ruleSomeoneLeads, "%s does not name itself again", former.identity)
				return
			}
			former.link.set(func(l *simLink) { l.lost = loseAll })
			s.store.background.Go(func() { former.separate(time.Minute) })
			isReplaced := func() bool {
				successor := s.find(s.store.holder())
				return successor != nil && successor != former && successor.isLeading()
			}
			if !passUntil(10*time.Millisecond, isReplaced) {
				s.audit.violate(ruleSomeoneLeads, "%s is cut off and not replaced", former.identity)
				return
			}
			rng := s.rng("late name", 0)
			pass(time.Duration(rng.Int64N(int64(s.cfg.RetryPeriod.Duration / 2))))
			store()
			pass(10 * time.Millisecond) // until the API server would see it
			former.link.set(func(l *simLink) { l.lost = loseNothing })
			pass(s.cfg.LeaseDuration.Duration)
		})
	}
}

// TestSimulatedBarredHoldersGiveUp keeps every holder from naming itself. Each gives the Lease up after a
// lease duration, by rule 12, and somebody leads soon after the webhook is back.
func TestSimulatedBarredHoldersGiveUp(t *testing.T) {
	for seed := range uint64(5) {
		runPlan(t, ours, simFences{client: true, server: true}, 2, seed, func(s *simulation) {
			s.install()
			s.store.setWebhook(true)
			s.launchReplicas(2)
			for range 4 {
				if !passUntil(10*time.Millisecond, func() bool { return s.store.holder() != "" }) {
					s.audit.violate(ruleSomeoneLeads, "nobody tries to")
					return
				}
				holder := s.store.holder()
				pass(s.claimTime(1))
				if s.store.holder() == holder {
					s.audit.violate(ruleGivesUp, "%s has held the Lease for %s", holder, s.claimTime(1))
					return
				}
				for _, r := range s.replicas {
					s.revive(r)
				}
			}
			s.store.setWebhook(false)
			s.awaitLeader("when the webhook is back", s.requestTime(), false)
		})
	}
}
