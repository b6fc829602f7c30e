// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package election

import (
	"strconv"
	"testing"
	"time"
)

// planSeeds returns how many seeds each plan with a former leader runs.
func planSeeds(t *testing.T) int {
	t.Helper()
	return setting(t, "PLAN_SEEDS", 20)
}

// strictPlan is a plan in which a former leader, which standbys take for one that has ended, goes on while
// its fence is open. No write of it may be stored after the first one of its successor, but within the two
// limits that simLimit names.
type strictPlan struct {
	servers int
	play    func(s *simulation, leader *simProc)
}

// strictPlans are the ways in which a second writer got in when the leader waited two seconds instead of
// asking every API server.
var strictPlans = map[string]strictPlan{
	"a successor that may not write yet is stopped, and the next one takes the Lease": {1, func(s *simulation, leader *simProc) {
		s.store.setPolicyGone(true)  // so that nothing can be proved
		pass(100 * time.Millisecond) // until each API server knows it
		second := s.replace(leader, 8*time.Second)
		if second == nil {
			return
		}
		pass(s.randomDelay(3500 * time.Millisecond))
		second.stop()
		pass(200*time.Millisecond + s.randomDelay(time.Second)) // the third leads and writes if the Lease is released
		leader.resume()
	}},
	"a replica starts after a takeover, and the new leader is killed before it may write": {3, func(s *simulation, leader *simProc) {
		leader.pin(s.servers[0])
		s.servers[0].lagBehind(14*time.Second, 0)
		second := s.replace(leader, 9*time.Second)
		if second == nil {
			return
		}
		third := s.add()
		for _, other := range s.others(leader) { // the newcomer is the only one left
			if other != second && other != third {
				other.kill()
			}
		}
		pass(100*time.Millisecond + s.randomDelay(time.Second))
		second.kill()
		pass(time.Second)
		leader.resume()
	}},
	"the leader and its API server are cut off, which catches up at once": {3, func(s *simulation, leader *simProc) {
		s.isolate(leader, 7*time.Second+s.randomDelay(time.Second), 20*time.Millisecond)
		leader.malign()
	}},
	"the leader and its API server are cut off, which needs a second to catch up": {3, func(s *simulation, leader *simProc) {
		s.isolate(leader, 7*time.Second+s.randomDelay(time.Second), time.Second)
		leader.malign()
	}},
	"the leader is stopped while its API server lags": {2, func(s *simulation, leader *simProc) {
		leader.pin(s.servers[0])
		s.servers[0].lagBehind(9*time.Second, 30*time.Second)
		if s.replace(leader, time.Minute) == nil {
			return
		}
		pass(2*time.Second + s.randomDelay(time.Second))
		leader.resume()
	}},
	"the address of the leader's API server, which lags, is not known": {3, func(s *simulation, leader *simProc) {
		s.hiddenServers = 1
		leader.pin(s.servers[2])
		s.servers[2].lagBehind(9*time.Second, 30*time.Second)
		if s.replace(leader, time.Minute) == nil {
			return
		}
		pass(2*time.Second + s.randomDelay(time.Second))
		leader.resume()
	}},
	"the leader's API server stands still and keeps its requests": {3, func(s *simulation, leader *simProc) {
		leader.pin(s.servers[0])
		s.servers[0].standStill(6*time.Second+s.randomDelay(2*time.Second), 500*time.Millisecond)
		leader.malign()
	}},
	"the policy disappears on the leader's API server first": {2, func(s *simulation, leader *simProc) {
		leader.pin(s.servers[0])
		s.servers[0].losePolicy()
		if s.replace(leader, time.Minute) == nil {
			return
		}
		pass(2*time.Second + s.randomDelay(time.Second))
		leader.resume()
	}},
}

// TestSimulatedFormerLeadersWriteNothing plays the plans.
func TestSimulatedFormerLeadersWriteNothing(t *testing.T) {
	for name, plan := range strictPlans {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			sum, seeds := simCount{}, planSeeds(t)
			for seed := range uint64(seeds) {
				sum.add(playStrict(t, plan, seed, false).audit.count)
			}
			t.Logf("%d stale writes in %d seeds: %d judged before the successor led, %d under way for long", sum.overtaken, seeds, sum.judged, sum.waited)
		})
	}
}

// TestSimulatedStrictPlansAreStrong plays the plans with two seconds in place of the proof: each of them
// must find stale writes.
func TestSimulatedStrictPlansAreStrong(t *testing.T) {
	for name, plan := range strictPlans {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			found, seeds := 0, planSeeds(t)
			for seed := range uint64(seeds) {
				if c := playStrict(t, plan, seed, true).audit.count; c.overtaken > c.judged+c.waited {
					found++
				}
			}
			t.Logf("found in %d of %d seeds", found, seeds)
			if found == 0 {
				t.Error("the plan is too weak")
			}
		})
	}
}

func playStrict(t *testing.T, plan strictPlan, seed uint64, waitInsteadOfProof bool) *simulation {
	t.Helper()
	return runPlan(t, ours, simFences{client: true, server: true}, plan.servers, seed, func(s *simulation) {
		s.waitInsteadOfProof, s.audit.strict = waitInsteadOfProof, !waitInsteadOfProof
		s.install()
		s.launchReplicas(3)
		pass(time.Minute)
		leader := s.leader()
		if !passUntil(500*time.Microsecond, leader.isDialing) {
			s.audit.violate(ruleSomeoneLeads, "%s does not write", leader.identity)
			return
		}
		plan.play(s, leader)
		pass(70 * time.Second)
		s.awaitLeader("in the end", s.claimTime(3), true)
	})
}

// replace stops a leader for d, lets the standbys take it for one that has ended, and returns the replica
// that takes its Lease.
func (s *simulation) replace(leader *simProc, d time.Duration) *simProc {
	leader.malign()
	s.store.background.Go(func() { leader.pause(d) })
	if !s.awaitOtherHolder(time.Millisecond, leader) {
		return nil
	}
	return s.find(s.store.holder())
}

// add launches another replica.
func (s *simulation) add() *simProc {
	r := &simReplica{index: len(s.replicas)}
	s.mu.Lock()
	s.replicas = append(s.replicas, r)
	s.mu.Unlock()
	s.launch(r)
	return r.proc
}

// randomDelay returns a random duration of less than d.
func (s *simulation) randomDelay(d time.Duration) time.Duration {
	s.delays++
	return time.Duration(s.rng("around"+strconv.Itoa(s.delays), 0).Int64N(int64(d)))
}
