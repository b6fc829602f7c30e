// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package election

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/klog/v2"

	"github.com/quartermaster-dev/quartermaster/pkg/election/display"
)

// simulation has everything of one seed: replicas on their networks, API servers over one store, the
// faults, and the auditor who sees everything.
type simulation struct {
	seed    uint64
	cfg     Config
	fences  simFences
	elect   simElector
	metrics *display.Metrics
	start   time.Time
	store   *simStore
	servers []*simServer
	audit   *auditor
	calm    atomic.Bool // the faults are over
	sparse  atomic.Bool // leaders write seldom

	waitInsteadOfProof bool // a new leader waits two seconds and asks no API server
	hiddenServers      int  // how many addresses of API servers nobody can find out
	wrongHints         bool // standbys may take a process that answers for one that has ended
	delays             int  // how many random delays the plan has drawn

	launching     sync.Mutex
	noLaunchUntil time.Time
	mu            sync.Mutex
	replicas      []*simReplica
	procs         []*simProc // including ended ones
}

// simFences says which fences there are. The elector always has the client's; without it the
// leader's writes go around it.
type simFences struct{ client, server bool }

// simElector is an elector in the simulation.
type simElector struct {
	run    func(ctx context.Context, p *simProc) error // one process' part, until it ends
	faulty bool                                        // it is the control: it breaks rules
}

// simReplica is a replica. It runs one process after another, in the same Pod or in a new one.
type simReplica struct {
	index, pods, lives int
	proc               *simProc
}

func newSimulation(seed uint64, elect simElector, m *display.Metrics) *simulation {
	s := &simulation{seed: seed, elect: elect, metrics: m, store: newSimStore(), start: time.Now()}
	s.audit = newAuditor(s)
	s.store.onChange = s.audit.leaseChanged
	return s
}

func (s *simulation) addServers(n int) {
	for i := range n {
		s.servers = append(s.servers, newSimServer(s, i))
	}
	s.store.onPolicy = func(gone bool) {
		for _, server := range s.servers {
			server.willSeePolicy(gone)
		}
	}
	s.store.onNaming = func(v *simNaming) {
		s.audit.namingChanged(v)
		for _, server := range s.servers {
			server.willSee(v)
		}
	}
}

// rng returns a source of random numbers for one purpose. Each use has its own, so that the numbers
// do not depend on the order in which goroutines run.
func (s *simulation) rng(purpose string, n uint64) *rand.Rand {
	h := uint64(14695981039346656037)
	for _, b := range []byte(purpose) {
		h = (h ^ uint64(b)) * 1099511628211
	}
	return rand.New(rand.NewPCG(s.seed, h+n*0x9e3779b97f4a7c15))
}

// launch starts a process on the replica.
func (s *simulation) launch(r *simReplica) {
	rng := s.rng(fmt.Sprintf("launch %d", r.index), uint64(r.lives))
	if r.lives++; r.lives == 1 || rng.IntN(2) == 0 {
		r.pods++ // else the container restarts in its Pod
	}
	s.runIn(r, fmt.Sprintf("r%d-%d", r.index, r.pods), rng)
}

// launchIn starts a process on the replica, in the Pod of the previous process.
func (s *simulation) launchIn(r *simReplica, pod string) {
	r.lives++
	s.runIn(r, pod, s.rng(fmt.Sprintf("launch %d", r.index), uint64(r.lives)))
}

func (s *simulation) runIn(r *simReplica, pod string, rng *rand.Rand) {
	ctx, stop := context.WithCancel(klog.NewContext(context.Background(), logr.Discard()))
	p := &simProc{
		sim: s, replica: r, pod: pod, identity: fmt.Sprintf("%s_%d", pod, r.lives), link: newSimLink(), stop: stop,
		rate:     1 + 0.01*(2*rng.Float64()-1),
		home:     s.servers[rng.IntN(len(s.servers))],
		offset:   time.Duration(rng.Int64N(int64(1000 * time.Hour))),
		done:     make(chan struct{}),
		draws:    map[string]uint64{},
		evidence: map[*simProc]bool{},
		maligned: make(chan struct{}),
		ended:    make(chan struct{}),
		resumed:  make(chan struct{}),
	}
	s.mu.Lock()
	r.proc = p
	s.procs = append(s.procs, p)
	s.mu.Unlock()
	s.log(p.identity, "starts")
	go func() {
		defer close(p.done)
		defer stop()
		err := s.elect.run(ctx, p)
		p.returned(err)
	}()
}

// revive starts a new process if the last one is gone.
func (s *simulation) revive(r *simReplica) {
	s.launching.Lock()
	defer s.launching.Unlock()
	if s.current(r).isGone() && !time.Now().Before(s.noLaunchUntil) {
		s.launch(r)
	}
}

// allAware reports whether every process knows the term of the Lease. New ones then wait for two lease
// durations, those included that somebody has written into the Lease. A process that knows nothing of
// the past is not safe from an edit that hides it; see the limits in docs/adr/0003-leader-election.md.
func (s *simulation) allAware() bool {
	s.launching.Lock()
	defer s.launching.Unlock()
	for _, r := range s.replicas {
		if p := s.current(r); !p.isAware() {
			return false
		}
	}
	s.noLaunchUntil = time.Now().Add(max(2*s.cfg.LeaseDuration.Duration, s.audit.patience()))
	return true
}

// current returns the process that the replica runs now.
func (s *simulation) current(r *simReplica) *simProc {
	s.mu.Lock()
	defer s.mu.Unlock()
	return r.proc
}

// others returns the current processes but p.
func (s *simulation) others(p *simProc) []*simProc {
	s.mu.Lock()
	defer s.mu.Unlock()
	var others []*simProc
	for _, r := range s.replicas {
		if r.proc != p {
			others = append(others, r.proc)
		}
	}
	return others
}

// find returns the process called identity, nil if it is not one of ours.
func (s *simulation) find(identity string) *simProc {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range s.procs {
		if p.identity == identity {
			return p
		}
	}
	return nil
}

// leader returns the process whose writes would pass the client's fence.
func (s *simulation) leader() *simProc {
	for _, p := range s.others(nil) {
		if p.wouldPass() {
			return p
		}
	}
	return nil
}

func (s *simulation) log(who, what string, args ...any) { s.audit.log(who, what, args...) }

// pauseFor waits for d and reports whether it passed before ctx ended.
func pauseFor(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// pass lets virtual time pass, in a bubble. A time that is over already needs no timer: goroutines of a
// bubble that receive from expired timers crash the race detector of Go 1.26.
func pass(d time.Duration) {
	if d > 0 {
		<-time.After(d)
	}
}

// passUntil lets time pass in steps until done returns true, but a minute at most, and reports whether
// it did.
func passUntil(step time.Duration, done func() bool) bool {
	for end := time.Now().Add(time.Minute); !done(); pass(step) {
		if time.Now().After(end) {
			return false
		}
	}
	return true
}

// awaitReturn checks that Run returns in a process that was stopped or killed.
func (s *simulation) awaitReturn(p *simProc) {
	bound := s.cfg.DrainTimeout + s.cfg.LeaseDuration.Duration + 2*s.cfg.RenewDeadline.Duration
	if !ends(p.done, bound) {
		s.audit.violate(ruleReturns, "%s has not returned %s after it was stopped", p.identity, bound)
		p.kill()
		s.mustEnd(p.done, p.identity)
	}
}

// mustEnd waits for what only a fault of the elector can keep from ending. The simulation would not end
// either then, so it panics, with the rule that is broken.
func (s *simulation) mustEnd(done <-chan struct{}, what string) {
	const bound = 3 * time.Hour // longer than all faults and plans
	if !ends(done, bound) {
		panic(fmt.Sprintf("seed %d: %s: %s has not ended after %s", s.seed, ruleReturns, what, bound))
	}
}

// ends reports whether the channel is closed within the bound.
func ends(done <-chan struct{}, bound time.Duration) bool {
	select {
	case <-done:
		return true
	case <-time.After(bound):
		return false
	}
}
