// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package election

import (
	"testing"
	"time"
)

// This file plays takeovers on evidence, by rule 11.

// TestSimulatedTakeoverIsInTime ends a leader and checks how soon another holds the Lease and how soon it
// leads.
func TestSimulatedTakeoverIsInTime(t *testing.T) {
	const s = time.Second
	both := simFences{client: true, server: true}
	tests := map[string]struct {
		fences      simFences
		servers     int
		replicas    int
		end         func(s *simulation, leader *simProc)
		holds, lead time.Duration
	}{
		"killed":                      {both, 3, 3, func(_ *simulation, leader *simProc) { leader.kill() }, 100 * time.Millisecond, s / 2},
		"killed, with one API server": {both, 1, 3, func(_ *simulation, leader *simProc) { leader.kill() }, 50 * time.Millisecond, s / 2},
		"killed, and the address of an API server is not known": {both, 3, 3, func(s *simulation, leader *simProc) {
			s.hiddenServers = 1
			leader.kill()
		}, 100 * time.Millisecond, 16 * s},
		"killed, and an API server stands still": {both, 3, 3, func(s *simulation, leader *simProc) {
			s.servers[2].standStill(time.Minute, 0)
			leader.kill()
		}, 5 * s, 16 * s},
		"killed while the policy that was there is gone": {both, 3, 3, func(s *simulation, leader *simProc) {
			s.store.setPolicyGone(true)
			leader.kill()
		}, 100 * time.Millisecond, 16 * s},
		"killed, and no fence in the API server":  {simFences{client: true}, 3, 3, func(_ *simulation, leader *simProc) { leader.kill() }, 100 * time.Millisecond, 16 * s},
		"alive, but taken for one that has ended": {both, 3, 3, func(_ *simulation, leader *simProc) { leader.malign() }, 100 * time.Millisecond, s / 2},
		"without power": {both, 3, 3, func(_ *simulation, leader *simProc) { leader.losePower() }, 16 * s, 16 * s},
		"stopped":       {both, 3, 3, func(s *simulation, leader *simProc) { s.store.background.Go(func() { leader.pause(time.Minute) }) }, 16 * s, 16 * s},
		"without a network": {both, 3, 3, func(s *simulation, leader *simProc) {
			leader.link.set(func(l *simLink) { l.lost = loseAll })
			s.store.background.Go(func() { leader.separate(time.Minute) })
		}, 16 * s, 16 * s},
		"restarted in its Pod": {both, 3, 1, func(s *simulation, leader *simProc) {
			leader.kill()
			s.awaitReturn(leader)
			s.launchIn(leader.replica, leader.pod)
		}, 100 * time.Millisecond, s / 2},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for seed := range uint64(5) {
				runPlan(t, ours, tc.fences, tc.servers, seed, func(s *simulation) {
					s.install()
					s.launchReplicas(tc.replicas)
					pass(time.Minute + time.Duration(seed)*time.Second/3)
					leader := s.leader()
					tc.end(s, leader)
					ended := time.Now()
					if !s.awaitOtherHolder(time.Millisecond, leader) {
						return
					}
					held := time.Since(ended)
					next := s.find(s.store.holder())
					if !passUntil(time.Millisecond, next.isLeading) {
						s.audit.violate(ruleSomeoneLeads, "%s holds the Lease and does not lead", next.identity)
						return
					}
					led := time.Since(ended)
					s.log("plan", "another holds the Lease after %s and leads after %s", held, led)
					if held > tc.holds || led > tc.lead {
						s.audit.violate(ruleSomeoneLeads, "another holds the Lease after %s, want %s, and leads after %s, want %s",
							held, tc.holds, led, tc.lead)
					}
					if s.store.isPolicyGone() && led < 12*time.Second {
						s.audit.violate(ruleNamedFirst, "it leads after %s, though nothing keeps the leader before from writing", led)
					}
					if leader.isGone() {
						return
					}
					leader.kill() // its client may be held up for long
				})
			}
		})
	}
}

// TestSimulatedSeparationMovesNoLeadership cuts the connections between replicas, of which none alone may
// move the leadership.
func TestSimulatedSeparationMovesNoLeadership(t *testing.T) {
	for name, trouble := range map[string]func(s *simulation, leader *simProc){
		"the connections are cut for an hour": func(*simulation, *simProc) { pass(time.Hour) },
		"the connections are cut again and again": func(s *simulation, leader *simProc) {
			rng := s.rng("separations", 0)
			for range 200 {
				leader.separate(time.Duration(rng.Int64N(int64(20 * time.Second))))
				pass(time.Duration(rng.Int64N(int64(5 * time.Second))))
			}
		},
		"the connections are cut, and later the leader's renewals for a few seconds": func(s *simulation, leader *simProc) {
			pass(time.Minute)
			leader.link.set(func(l *simLink) { l.lost = loseAll })
			pass(s.cfg.RenewDeadline.Duration / 2)
			leader.link.set(func(l *simLink) { l.lost = loseNothing })
			pass(time.Minute)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			runPlan(t, ours, simFences{client: true, server: true}, 3, 1, func(s *simulation) {
				s.install()
				s.launchReplicas(3)
				pass(time.Minute)
				leader := s.leader()
				if name != "again and again" {
					s.store.background.Go(func() { leader.separate(2 * time.Hour) })
				}
				trouble(s, leader)
				if s.leader() != leader {
					s.audit.violate(ruleNoEarlySteal, "a partition between the replicas has moved the leadership")
				}
				leader.mu.Lock()
				leader.apart = time.Time{}
				leader.mu.Unlock()
			})
		})
	}
}

// awaitOtherHolder checks that the Lease of a leader gets another holder.
func (s *simulation) awaitOtherHolder(step time.Duration, leader *simProc) bool {
	if !passUntil(step, func() bool { return s.store.holder() != leader.identity }) {
		s.audit.violate(ruleSomeoneLeads, "%s is not replaced", leader.identity)
		return false
	}
	return true
}

func (p *simProc) isDialing() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.dialing > 0
}

func (p *simProc) isLeading() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.leading
}
