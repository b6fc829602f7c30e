// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package election

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	"k8s.io/utils/ptr"

	"github.com/quartermaster-dev/quartermaster/pkg/election/protocol"
)

// This file plays plans in the simulation where simulation_test.go draws faults: what must
// follow from one event, within a bound.

// TestSimulatedStaleWrites runs the simulation without one fence or both. The judge that finds nothing with
// both must find stale writes without. See docs/adr/0003-leader-election.md for what each promises.
func TestSimulatedStaleWrites(t *testing.T) {
	tests := map[string]struct {
		fences simFences
		want   func(*simCount) bool
	}{
		"without a fence, a replaced leader goes on writing": {
			simFences{}, func(c *simCount) bool { return c.overtaken > 20 && c.refused == 0 }},
		"with the client's fence alone, writes under way are late": {
			simFences{client: true}, func(c *simCount) bool { return c.overtaken > 0 && c.overtaken < 20 && c.refused == 0 }},
		"with the API server's fence alone, only writes that were admitted before the name was seen are late": {
			simFences{server: true}, func(c *simCount) bool { return c.refused > 20 && c.overtaken < 40 }},
		"with both fences, few writes are late": {
			simFences{client: true, server: true}, func(c *simCount) bool { return c.refused > 0 && c.overtaken < 8 }},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			const enough = 100
			count := runSeeds(t, 1, enough, ours, testMetrics(), func(*rand.Rand) simFences { return tc.fences }).count[tc.fences]
			t.Logf("%s", count)
			if !tc.want(count) {
				t.Errorf("in %d seeds: %s", enough, count)
			}
		})
	}
}

// TestSimulatedFreezeNeedsTheServersFence freezes the leader as a hypervisor does, so that its clock does not
// move, until another leads. Its own fence then believes in its term; only the API server's refuses its
// writes.
func TestSimulatedFreezeNeedsTheServersFence(t *testing.T) {
	for name, fences := range map[string]simFences{
		"the frozen leader writes where the API server has no fence": {client: true},
		"the fence in the API server refuses the frozen leader":      {client: true, server: true},
	} {
		t.Run(name, func(t *testing.T) {
			s := runPlan(t, ours, fences, 1, 1, func(s *simulation) {
				s.launchReplicas(2)
				pass(time.Minute)
				frozen := s.leader()
				frozen.freeze(time.Minute)
				pass(time.Minute)
				if s.leader() == nil || s.leader() == frozen {
					s.audit.violate(ruleSomeoneLeads, "the frozen one still leads")
				}
			})
			count := &s.audit.count
			if (count.clock > 0) == fences.server || (count.refused > 0) != fences.server || count.overtaken != count.clock {
				t.Errorf("%s\n%s", count, s.audit.report())
			}
		})
	}
}

// TestSimulatedLateNamingIsRefused freezes a replica which has taken the Lease and has not named itself yet,
// until another leads. When it goes on, its own fence believes in its term, and it tries to name itself.
func TestSimulatedLateNamingIsRefused(t *testing.T) {
	late := 0
	for seed := range uint64(20) {
		runPlan(t, ours, simFences{client: true, server: true}, 2, seed, func(s *simulation) {
			s.install()
			s.launchReplicas(3)
			pass(time.Minute)
			first := s.leader()
			first.kill()
			if !s.awaitOtherHolder(50*time.Microsecond, first) {
				return
			}
			frozen := s.find(s.store.holder())
			pass(time.Duration(seed) * 300 * time.Microsecond)
			frozen.freeze(time.Minute)
			pass(time.Second)
			leader := s.leader()
			if frozen.isLeading() || leader == nil || leader == frozen {
				return // it had named itself in time
			}
			late++
			for _, seen := range s.servers[0].seen {
				if at := seen.naming.written; seen.naming.writer == frozen.identity && at.After(s.audit.reignOf(leader).began) {
					s.audit.violate(ruleNamesInOrder, "%s has named itself after %s", frozen.identity, leader.identity)
				}
			}
		})
	}
	if late < 5 {
		t.Errorf("%d replicas were frozen before they had named themselves: the plan is too weak", late)
	}
}

// TestSimulatedIdleStandbySendsFewRequests checks how many requests a standby makes in an hour in which
// nothing happens.
func TestSimulatedIdleStandbySendsFewRequests(t *testing.T) {
	for name, fences := range map[string]simFences{
		"it reads the Lease": {client: true}, "it asks for the fence in the API server": {client: true, server: true},
	} {
		t.Run(name, func(t *testing.T) {
			runPlan(t, ours, fences, 1, 1, func(s *simulation) {
				s.install()
				s.launchReplicas(2)
				pass(time.Minute)
				begin := time.Since(s.start)
				pass(time.Hour)
				standby := s.others(s.leader())[0]
				const most = 60*60/70 + 2*60/5 // the latter are watches, each with a read
				if all, _ := s.audit.requestsBetween(standby, begin, begin+time.Hour); all > most {
					s.audit.violate(ruleFewRequests, "%s makes %d requests in an hour, want %d at most", standby.identity, all, most)
				}
			})
		})
	}
}

// TestSimulatedRefusedStandbySendsFewRequests checks how many requests a standby makes while the API servers
// refuse it for long, and that somebody leads soon after.
func TestSimulatedRefusedStandbySendsFewRequests(t *testing.T) {
	tests := map[string]struct {
		trouble          simTrouble
		writes, requests int // a minute
	}{
		"429 to everything":                 {overload, 0, 6},
		"403 to writes of the Lease":        {forbidden, 6, 6},
		"404: the namespace does not exist": {noNamespace, 6, 6},
		"500 to everything":                 {internal, 0, 40}, // which need not last
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			runPlan(t, ours, simFences{client: true}, 3, 1, func(s *simulation) {
				s.store.suffer(tc.trouble)
				if tc.trouble != noNamespace {
					s.install()
				}
				s.launchReplicas(3)
				pass(10 * time.Minute)
				for minute := 2; minute < 10; minute++ {
					for _, p := range s.procs {
						all, written := s.audit.requestsBetween(p, time.Duration(minute)*time.Minute, time.Duration(minute+1)*time.Minute)
						if written > tc.writes || all > tc.requests {
							s.audit.violate(ruleFewRequests, "%s makes %d writes and %d requests in minute %d", p.identity, written, all, minute)
						}
					}
				}
				s.store.suffer(noTrouble)
				s.awaitLeader("after the refusals", time.Minute+s.claimTime(1), false)
			})
		})
	}
}

// TestSimulatedRestoreEndsTheProcesses restores etcd from a snapshot under running replicas, so that versions
// go back. All of them know a later version than the snapshot's, so the clients' fences must hold. They end,
// and their next lives lead.
func TestSimulatedRestoreEndsTheProcesses(t *testing.T) {
	const requests = 100 // of a replica in the minute after
	tests := map[string]struct {
		first bool // the snapshot is of the time before the first leader
		since func(*simulation)
	}{
		"with the same leader":                         {since: func(*simulation) {}},
		"with a leader that has gone since":            {since: func(s *simulation) { s.leader().kill() }},
		"with a leader that has left since":            {since: func(s *simulation) { s.leader().stop() }},
		"with a Lease that has been deleted since":     {since: func(s *simulation) { s.store.delete("admin") }},
		"with a Lease that was free":                   {first: true, since: func(*simulation) {}},
		"with a Lease that was free and deleted since": {first: true, since: func(s *simulation) { s.store.delete("admin") }},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for seed := range uint64(5) {
				runPlan(t, ours, simFences{client: true, server: true}, 2, seed, func(s *simulation) {
					s.install()
					snapshot := s.store.snapshot()
					s.launchReplicas(3)
					pass(time.Minute)
					if !tc.first {
						snapshot = s.store.snapshot()
					}
					tc.since(s)
					s.restartLost() // those that have lost start again
					pass(30*time.Second + 700*time.Millisecond)
					s.audit.newEra()
					restored := time.Since(s.start)
					s.store.restore(snapshot)
					s.awaitRule(time.Minute, 3*s.takeoverTime())
					for _, p := range s.procs {
						if all, _ := s.audit.requestsBetween(p, restored, restored+time.Minute); all > requests {
							s.audit.violate(ruleFewRequests, "%s makes %d requests in a minute", p.identity, all)
						}
					}
				})
			}
		})
	}
}

// TestSimulatedLossClosesTheFence takes the Lease from the leader and checks that its fence closes at once,
// or with the next renewal if its watch is dead.
func TestSimulatedLossClosesTheFence(t *testing.T) {
	for name, lose := range map[string]func(*simulation){
		"the Lease is deleted": func(s *simulation) { s.store.delete("admin") },
		"the Lease is deleted and installed anew": func(s *simulation) {
			s.store.delete("admin")
			s.install()
		},
		"the Lease is deleted and taken by another": func(s *simulation) {
			s.store.delete("admin")
			_, _ = s.store.create("thief", protocol.NewLease(leaseName, "thief", s.cfg.LeaseDuration.Duration, time.Now()))
		},
		"another takes the Lease": func(s *simulation) {
			s.store.edit("thief", func(l *coordinationv1.Lease) {
				*l = *protocol.AcquiredLease(l, "thief", s.cfg.LeaseDuration.Duration, time.Now())
			})
		},
		"the holder is edited away": func(s *simulation) {
			s.store.edit("admin", func(l *coordinationv1.Lease) { l.Spec.HolderIdentity = ptr.To("") })
		},
		"the transitions are edited": func(s *simulation) {
			s.store.edit("admin", func(l *coordinationv1.Lease) { l.Spec.LeaseTransitions = ptr.To[int32](7) })
		},
	} {
		for _, dead := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, dead watch %t", name, dead), func(t *testing.T) {
				runPlan(t, ours, simFences{client: true}, 1, 1, func(s *simulation) {
					s.install()
					s.launchReplicas(2)
					pass(time.Minute)
					leader, bound := s.leader(), 500*time.Millisecond
					if dead {
						bound += s.cfg.RetryPeriod.Duration
						s.store.stallWatches(func() bool { return true })
					}
					lose(s)
					pass(bound)
					if leader.wouldPass() {
						s.audit.violate(ruleLostCloses, "%s after it was lost", bound)
					}
				})
			})
		}
	}
}

// TestSimulatedBlindStandbyWaits cuts a standby off until the claim that it knows has run out. When the
// standby sees the Lease again, the Lease has been deleted and installed anew, free, and now the leader is
// cut off.
func TestSimulatedBlindStandbyWaits(t *testing.T) {
	runPlan(t, ours, simFences{client: true}, 1, 1, func(s *simulation) {
		s.install()
		s.launchReplicas(2)
		pass(time.Minute)
		leader := s.leader()
		standby := s.others(leader)[0]
		standby.link.set(func(l *simLink) { l.lost = loseAll })
		pass(2 * s.cfg.LeaseDuration.Duration)
		leader.link.set(func(l *simLink) { l.lost = loseAll })
		s.store.delete("admin")
		s.install()
		standby.link.set(func(l *simLink) { l.lost = loseNothing })
		pass(s.cfg.LeaseDuration.Duration) // the leader believes in its term for most of it
		s.awaitLeader("after the deletion", s.claimTime(1), true)
	})
}

// TestSimulatedReleaseIsTakenAtOnce stops a leader in good order. The next one does not wait, not even for
// the second that a released Lease has as its duration.
func TestSimulatedReleaseIsTakenAtOnce(t *testing.T) {
	released := 0
	for seed := range uint64(10) {
		runPlan(t, ours, simFences{client: true}, 1, seed, func(s *simulation) {
			s.install()
			s.launchReplicas(2)
			pass(time.Minute)
			leader := s.leader()
			leader.stop()
			s.awaitReturn(leader)
			if s.store.holder() == leader.identity {
				return // it left work behind, or did not drain in time
			}
			released++
			s.awaitLeader("after a release", 800*time.Millisecond, false)
		})
	}
	if released == 0 {
		t.Error("no Lease was released: the plan is too weak")
	}
}

// TestSimulatedPartitionCancelsWrites cuts off a leader that waits for the answer to a write, and checks that
// it waits no longer than its term and the time to cancel the write.
func TestSimulatedPartitionCancelsWrites(t *testing.T) {
	runPlan(t, ours, simFences{client: true}, 1, 1, func(s *simulation) {
		s.install()
		s.launchReplicas(2)
		pass(time.Minute)
		leader := s.leader()
		leader.link.set(func(l *simLink) { l.lost = loseAll })
		if !passUntil(10*time.Millisecond, func() bool { return !leader.wouldPass() }) {
			s.audit.violate(ruleLostCloses, "%s is cut off and its term does not end", leader.identity)
			return
		}
		pass(250 * time.Millisecond)
		leader.mu.Lock()
		waiting := leader.inFlight
		leader.mu.Unlock()
		if waiting > 0 {
			s.audit.violate(ruleCancelled, "250 ms after the term")
		}
	})
}

// TestSimulatedUnansweredAcquisitionsExpire lets a replica take the Lease by requests that get no answer.
func TestSimulatedUnansweredAcquisitionsExpire(t *testing.T) {
	runPlan(t, ours, simFences{client: true}, 1, 1, func(s *simulation) {
		s.install()
		s.launchReplicas(1)
		p := s.replicas[0].proc
		if !passUntil(time.Millisecond, func() bool { return s.audit.writesOf(p) > 0 }) {
			s.audit.violate(ruleSomeoneLeads, "%s does not take a free lease", p.identity)
			return
		}
		p.link.set(func(l *simLink) { l.lost = loseResponses })
		pass(10 * time.Second) // two requests of 4 s, and a retry period
		p.link.set(func(l *simLink) { l.lost = loseNothing })
		s.awaitLeader("after two acquisitions without an answer", 4*time.Second+s.claimTime(1), false)
	})
}

// takeoverTime returns the time after which a standby leads at the latest: the Lease and two seconds.
func (s *simulation) takeoverTime() time.Duration {
	return time.Duration(float64(s.cfg.LeaseDuration.Duration)/0.99) + 2*time.Second
}

// awaitRule checks for a while that nobody leads for no longer than gap. Whoever has lost starts
// again.
func (s *simulation) awaitRule(duration, gap time.Duration) {
	for end := time.Now().Add(duration); time.Now().Before(end); pass(20 * time.Millisecond) {
		if !s.isRuled() {
			s.awaitLeader("", gap, true)
		}
	}
}

// runPlan runs a simulation with the plan's faults alone, with default timings.
func runPlan(t *testing.T, elect simElector, fences simFences, servers int, seed uint64, plan func(*simulation)) *simulation {
	t.Helper()
	var s *simulation
	synctest.Test(t, func(*testing.T) {
		s = newSimulation(seed, elect, testMetrics())
		s.calm.Store(true)
		s.cfg, s.fences = testConfig(), fences
		s.addServers(servers)
		plan(s)
		s.finish()
	})
	for i, v := range s.audit.violations {
		t.Errorf("%s: %s", v.rule, v.text)
		if i == 0 {
			t.Logf("%s", s.audit.report())
		}
	}
	return s
}
