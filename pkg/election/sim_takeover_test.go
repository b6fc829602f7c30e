// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package election

import (
	"strings"
	"sync"
	"testing"
	"time"
)

// This file plays take-overs on evidence, by rule 12.

// TestSimulatedTakeover ends a leader and checks how soon another holds the Lease and how soon it leads.
func TestSimulatedTakeover(t *testing.T) {
	const s = time.Second
	both := simFences{client: true, server: true}
	tests := map[string]struct {
		fences      simFences
		replicas    int
		end         func(s *simulation, leader *simProc)
		holds, lead time.Duration
	}{
		"killed": {both, 3, func(_ *simulation, leader *simProc) { leader.kill() }, 100 * time.Millisecond, s / 2},
		"killed while the policy that was there is gone": {both, 3, func(s *simulation, leader *simProc) {
			s.store.setPolicyGone(true)
			leader.kill()
		}, 100 * time.Millisecond, 16 * s},
		"killed, and no fence in the API server": {simFences{client: true}, 3, func(_ *simulation, leader *simProc) { leader.kill() }, 16 * s, 16 * s},
		"without power":                          {both, 3, func(_ *simulation, leader *simProc) { leader.losePower() }, 4 * s, 6 * s},
		"stopped":                                {both, 3, func(s *simulation, leader *simProc) { s.store.background.Go(func() { leader.pause(time.Minute) }) }, 4 * s, 6 * s},
		"without a network": {both, 3, func(s *simulation, leader *simProc) {
			leader.link.set(func(l *simLink) { l.lost = loseAll })
			s.store.background.Go(func() { leader.separate(time.Minute) })
		}, 4 * s, 6 * s},
		"stopped, with its connections cut before": {both, 3, func(s *simulation, leader *simProc) {
			s.store.background.Go(func() { leader.separate(2 * time.Minute) })
			pass(time.Minute)
			s.store.background.Go(func() { leader.pause(time.Minute) })
		}, 16 * s, 16 * s},
		"restarted in its Pod": {both, 1, func(s *simulation, leader *simProc) {
			leader.kill()
			s.awaitReturn(leader)
			s.launchIn(leader.replica, leader.pod)
		}, 100 * time.Millisecond, s / 2},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for seed := range uint64(5) {
				runPlan(t, ours, test.fences, 3, seed, func(s *simulation) {
					s.install()
					s.launchReplicas(test.replicas)
					pass(time.Minute + time.Duration(seed)*time.Second/3)
					leader := s.leader()
					test.end(s, leader)
					ended := time.Now()
					if !s.awaitOtherHolder(time.Millisecond, leader) {
						return
					}
					held := time.Since(ended)
					next := s.find(s.store.holder())
					if !passUntil(time.Millisecond, next.isLeading) {
						s.audit.violate(ruleSomeoneLeads, "%s holds the lease and does not lead", next.identity)
						return
					}
					led := time.Since(ended)
					s.log("plan", "another holds the lease after %s and leads after %s", held, led)
					if held > test.holds || led > test.lead {
						s.audit.violate(ruleSomeoneLeads, "another holds the lease after %s, want %s, and leads after %s, want %s",
							held, test.holds, led, test.lead)
					}
					if s.store.isPolicyGone() && led < s.cfg.timing().covered()-s.cfg.RetryPeriod.Duration {
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

// TestSimulatedSeparation cuts the connections between replicas, of which none alone may move the
// leadership.
func TestSimulatedSeparation(t *testing.T) {
	for name, trouble := range map[string]func(s *simulation, leader *simProc){
		"for an hour": func(*simulation, *simProc) { pass(time.Hour) },
		"again and again": func(s *simulation, leader *simProc) {
			rng := s.rng("separations", 0)
			for range 200 {
				leader.separate(time.Duration(rng.Int64N(int64(20 * time.Second))))
				pass(time.Duration(rng.Int64N(int64(5 * time.Second))))
			}
		},
		"and later the leader's renewals for a few seconds": func(s *simulation, leader *simProc) {
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

// TestSimulatedMistake takes the Lease from a leader that stands still for a while, and kills the next
// one: whoever has seen that the evidence was misleading waits for the expiry.
func TestSimulatedMistake(t *testing.T) {
	for _, alive := range []bool{true, false} {
		runPlan(t, ours, simFences{client: true, server: true}, 3, 1, func(s *simulation) {
			s.install()
			s.launchReplicas(3)
			pass(time.Minute)
			first := s.leader()
			if alive {
				first.pause(6 * time.Second) // its term is still valid then
				pass(time.Second)
				first.kill()
				s.launch(first.replica) // it remembers nothing
			} else {
				first.kill()
			}
			pass(2 * time.Second)
			second := s.find(s.store.holder())
			if second == first {
				s.audit.violate(ruleSomeoneLeads, "%s is not replaced", first.identity)
				return
			}
			second.kill()
			pass(s.cfg.LeaseDuration.Duration / 2)
			if (s.store.holder() == second.identity) != alive {
				s.audit.violate(ruleNoEarlySteal, "the first was alive: %t; then %s holds the lease after %s was killed", alive, s.store.holder(), second.identity)
			}
			s.awaitLeader("after the second was killed", s.claim(1), false)
		})
	}
}

// TestSimulatedFalseEnd lets the standbys believe that a leader has ended which is well. The one that takes
// the Lease does not wait as after silence, so the store takes writes of the former leader for as long as
// API servers do not know that another is named, and no longer. The former leader says that it lives.
func TestSimulatedFalseEnd(t *testing.T) {
	between, said := 0, 0
	const seeds = 60
	for seed := range uint64(seeds) {
		s := runPlan(t, ours, simFences{client: true, server: true}, 4, seed, func(s *simulation) {
			s.install()
			s.launchReplicas(3)
			pass(time.Minute)
			former := s.leader()
			if !passUntil(500*time.Microsecond, former.isDialing) {
				s.audit.violate(ruleSomeoneLeads, "%s does not write", former.identity)
				return
			}
			for _, server := range s.servers[1:] {
				server.stall(300 * time.Millisecond)
			}
			former.malign()
			pass(5 * time.Second)
			if leader := s.leader(); leader == nil || leader == former {
				s.audit.violate(ruleSomeoneLeads, "%s is not replaced", former.identity)
			}
		})
		between += s.audit.count.led
		said += s.audit.count.mistakes
	}
	if between == 0 || said < seeds*9/10 {
		t.Errorf("in %d seeds, %d writes of the former leader were executed between those of the next, and %d have said that they live",
			seeds, between, said)
	}
}

// TestSimulatedSilence stops a leader when a write is about to leave it, and lets it go on right after the fence has named
// another, when some API servers do not know that yet.
func TestSimulatedSilence(t *testing.T) {
	admitted := 0
	for seed := range uint64(60) {
		s := runPlan(t, ours, simFences{client: true, server: true}, 4, seed, func(s *simulation) {
			s.install()
			s.launchReplicas(2)
			pass(time.Minute)
			former := s.leader()
			if !passUntil(500*time.Microsecond, former.isDialing) {
				s.audit.violate(ruleSomeoneLeads, "%s does not write", former.identity)
				return
			}
			s.store.background.Go(func() { former.pause(9 * time.Second) })
			if !s.awaitOtherHolder(10*time.Millisecond, former) {
				return
			}
			for _, server := range s.servers[1:] {
				server.stall(serverFenceLag * 3 / 4)
			}
			isReplaced := func() bool { return !strings.HasPrefix(s.store.getNaming().leader, former.pod) }
			if !passUntil(10*time.Millisecond, isReplaced) {
				s.audit.violate(ruleSomeoneLeads, "the fence still names %s", former.identity)
				return
			}
			pass(300 * time.Millisecond)
			former.resume()
			pass(5 * time.Second)
		})
		admitted += s.audit.count.admitted
	}
	if admitted == 0 {
		t.Error("no write of a former leader was admitted: the plan is too weak")
	}
}

// TestSimulatedSuccession stops a leader when a write is about to leave it, and kills the next one, which
// has taken the Lease on that silence, before that one may write. The third sees for certain that the
// second has ended. But of the first it knows nothing more than the second did, and the first goes on when
// some API servers do not know yet that another is named.
func TestSimulatedSuccession(t *testing.T) {
	const seeds = 60
	ended, admitted := 0, 0
	for seed := range uint64(seeds) {
		s := runPlan(t, ours, simFences{client: true, server: true}, 4, seed, func(s *simulation) {
			s.install()
			s.launchReplicas(3)
			pass(time.Minute)
			first := s.leader()
			fallBehind := sync.OnceFunc(func() {
				pass(100 * time.Millisecond) // the third sees meanwhile who holds the Lease
				for _, server := range s.servers[1:] {
					server.stall(serverFenceLag * 3 / 4)
				}
			})
			for _, standby := range s.others(first) {
				standby.mu.Lock()
				standby.hold = fallBehind // before the second is named
				standby.mu.Unlock()
			}
			if !passUntil(500*time.Microsecond, first.isDialing) {
				s.audit.violate(ruleSomeoneLeads, "%s does not write", first.identity)
				return
			}
			s.store.background.Go(func() { first.pause(9 * time.Second) })
			if !s.awaitOtherHolder(time.Millisecond, first) {
				return
			}
			second := s.find(s.store.holder())
			if !passUntil(time.Millisecond, func() bool { return s.store.getNaming().leader == second.identity }) {
				s.audit.violate(ruleSomeoneLeads, "the fence does not name %s", second.identity)
				return
			}
			rng := s.rng("succession", 0)
			pass(time.Duration(rng.Int64N(int64(serverFenceLag / 4))))
			second.kill()
			pass(serverFenceLag/20 + time.Duration(rng.Int64N(int64(serverFenceLag/4))))
			first.resume()
			pass(5 * time.Second)
			for _, third := range s.others(first) {
				if third.sawEnd(second) {
					ended++
				}
			}
		})
		admitted += s.audit.count.admitted
	}
	if ended < seeds/2 || admitted == 0 {
		t.Errorf("in %d seeds, the third saw the second end %d times, and %d writes of the first were admitted: the plan is too weak",
			seeds, ended, admitted)
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

// sawEnd reports whether the process has seen that the other has ended.
func (p *simProc) sawEnd(other *simProc) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.evidence[other] == LeaderGone
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
