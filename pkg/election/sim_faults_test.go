// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package election

import (
	"math"
	"math/rand/v2"
	"slices"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/quartermaster-dev/quartermaster/pkg/election/protocol"
)

// simFault is one kind of fault. It is injected on the process p, for about the duration, and
// inject returns when it is over.
type simFault struct {
	what   string
	weight int
	// lawless says that the fences cannot hold after this, see the limits in
	// docs/adr/0003-leader-election.md.
	lawless bool
	inject  func(s *simulation, rng *rand.Rand, p *simProc, duration time.Duration)
}

// simFaults are the faults of a simulation. Their effect depends only on the seed.
var simFaults = []simFault{
	{"a partition", 4, false, func(s *simulation, _ *rand.Rand, p *simProc, d time.Duration) { s.lossy(p, loseAll, d) }},
	{"responses are lost", 2, false, func(s *simulation, _ *rand.Rand, p *simProc, d time.Duration) { s.lossy(p, loseResponses, d) }},
	{"a slow network", 2, false, func(s *simulation, _ *rand.Rand, p *simProc, d time.Duration) {
		p.link.set(func(l *simLink) { l.slow = s.cfg.RenewDeadline.Duration / 2 })
		pass(d)
		p.link.set(func(l *simLink) { l.slow = 0 })
	}},
	{"slow responses, then none", 2, false, func(s *simulation, _ *rand.Rand, p *simProc, d time.Duration) {
		p.link.set(func(l *simLink) { l.slowAnswers = s.cfg.RenewDeadline.Duration / 2 })
		pass(d / 2)
		s.lossy(p, loseAll, d)
		p.link.set(func(l *simLink) { l.slowAnswers = 0 })
	}},
	{"a pause", 6, false, func(_ *simulation, _ *rand.Rand, p *simProc, d time.Duration) { p.pause(d) }},
	{"a freeze, in which the clock stands still", 1, true, func(_ *simulation, _ *rand.Rand, p *simProc, d time.Duration) { p.freeze(d) }},
	{"a kill", 2, false, func(_ *simulation, _ *rand.Rand, p *simProc, d time.Duration) {
		p.kill()
		pass(d)
	}},
	{"a power failure", 2, false, func(_ *simulation, _ *rand.Rand, p *simProc, d time.Duration) {
		p.losePower()
		pass(d)
	}},
	{"replicas do not reach each other", 3, false, func(_ *simulation, _ *rand.Rand, p *simProc, d time.Duration) { p.separate(d) }},
	{"a Pod without a network", 3, false, func(_ *simulation, _ *rand.Rand, p *simProc, d time.Duration) {
		p.lose(loseAll)
		p.separate(d)
		p.lose(loseNothing)
	}},
	{"a stop in good order", 2, false, func(s *simulation, _ *rand.Rand, p *simProc, _ time.Duration) {
		p.stop()
		s.mustEnd(p.done, p.identity)
	}},
	{"the Lease is tampered with", 2, false, func(s *simulation, rng *rand.Rand, _ *simProc, _ time.Duration) { s.tamper(rng) }},
	{"the Lease is tampered with twice", 2, false, func(s *simulation, rng *rand.Rand, _ *simProc, _ time.Duration) {
		s.tamper(rng)
		pass(time.Duration(rng.Int64N(int64(time.Second))))
		s.tamper(rng)
	}},
	{"the leader is cut off, the Lease tampered with, and another replica starts", 2, false, (*simulation).cutOffAndTamper},
	{"watches end or show nothing more", 2, false, func(s *simulation, rng *rand.Rand, _ *simProc, _ time.Duration) {
		s.store.stallWatches(func() bool { return rng.IntN(2) == 0 })
	}},
	{"the API servers fail", 1, false, func(s *simulation, _ *rand.Rand, _ *simProc, d time.Duration) { s.suffer(internal, d/2) }},
	{"the API servers are overloaded", 1, false, func(s *simulation, _ *rand.Rand, _ *simProc, d time.Duration) { s.suffer(overload, d) }},
	{"writing the Lease is forbidden", 1, false, func(s *simulation, _ *rand.Rand, _ *simProc, d time.Duration) { s.suffer(forbidden, d) }},
	{"the namespace of the Lease is gone", 1, false, func(s *simulation, _ *rand.Rand, _ *simProc, d time.Duration) {
		s.store.delete("admin")
		s.suffer(noNamespace, d)
	}},
	{"the watches of an API server lag", 2, false, func(s *simulation, rng *rand.Rand, _ *simProc, d time.Duration) {
		s.servers[rng.IntN(len(s.servers))].stall(d / 4)
		pass(d / 4)
	}},
	{"requests queue in an API server", 2, false, func(s *simulation, rng *rand.Rand, _ *simProc, d time.Duration) {
		s.servers[rng.IntN(len(s.servers))].clog(d)
		pass(d)
	}},
	{"an API server stands still and keeps the requests", 2, false, func(s *simulation, rng *rand.Rand, _ *simProc, d time.Duration) {
		s.servers[rng.IntN(len(s.servers))].standStill(d/2, time.Duration(rng.Int64N(int64(time.Second))))
		pass(d)
	}},
	{"an API server's connections for Leases and Namespaces stand still", 2, false, func(s *simulation, rng *rand.Rand, _ *simProc, d time.Duration) {
		s.servers[rng.IntN(len(s.servers))].lagBehind(d/2, time.Duration(rng.Int64N(int64(time.Second))))
		pass(d)
	}},
	{"a leader and its API server are cut off from the others", 3, false, func(s *simulation, rng *rand.Rand, p *simProc, d time.Duration) {
		s.audit.mayPoll()
		s.isolate(p, d, time.Duration(rng.Int64N(int64(time.Second))))
		pass(d)
		s.audit.mayPoll()
	}},
	{"a replica does not reach one of the API servers", 2, false, func(s *simulation, rng *rand.Rand, p *simProc, d time.Duration) {
		s.audit.mayPoll()
		p.separateFrom(s.servers[rng.IntN(len(s.servers))], d)
		pass(d)
		s.audit.mayPoll()
	}},
	{"a webhook on Namespaces is away", 1, false, func(s *simulation, _ *rand.Rand, _ *simProc, d time.Duration) {
		s.store.setWebhook(true)
		pass(d)
		s.store.setWebhook(false)
	}},
	{"the fence's policy is deleted for a while", 1, true, func(s *simulation, _ *rand.Rand, _ *simProc, d time.Duration) {
		s.audit.noFence(d)
		s.store.setPolicyGone(true)
		pass(d)
		s.store.setPolicyGone(false)
	}},
	{"the fence's Namespace is deleted for a while", 1, true, func(s *simulation, _ *rand.Rand, _ *simProc, d time.Duration) {
		s.audit.noFence(d)
		s.store.deleteNamespace("admin")
		pass(d)
		s.store.createNamespace("admin")
	}},
	{"the name of the leader is wiped", 1, false, func(s *simulation, _ *rand.Rand, _ *simProc, _ time.Duration) { s.store.wipeName("admin") }},
	{"etcd is restored from a snapshot", 2, true, (*simulation).restore},
}

// fault injects one fault and waits until it is over.
func (s *simulation) fault(rng *rand.Rand) {
	lease := s.cfg.LeaseDuration.Duration
	s.mu.Lock()
	p := s.replicas[rng.IntN(len(s.replicas))].proc
	s.mu.Unlock()
	if holder := s.find(s.store.holder()); holder != nil && s.current(holder.replica) == holder && rng.IntN(2) == 0 {
		p = holder // faults matter most on the leader
	}
	duration := time.Duration(rng.Int64N(int64(2 * lease)))
	f := drawFault(rng)
	for s.audit.strict && f.lawless {
		f = drawFault(rng)
	}
	s.log("fault", "%s; on %s for %s", f.what, p.identity, duration)
	f.inject(s, rng, p, duration)
	s.revive(p.replica)
}

func drawFault(rng *rand.Rand) simFault {
	sum := 0
	for _, f := range simFaults {
		sum += f.weight
	}
	n := rng.IntN(sum)
	return simFaults[slices.IndexFunc(simFaults, func(f simFault) bool {
		n -= f.weight
		return n < 0
	})]
}

// isolate puts a process and the API server that it is connected to on the minority's side of a partition:
// the API server keeps what it gets, and shows nothing new for a while afterwards.
func (s *simulation) isolate(p *simProc, d, catchUp time.Duration) {
	p.mu.Lock()
	home := p.home
	p.mu.Unlock()
	for _, server := range s.servers {
		if server != home {
			p.separateFrom(server, d)
		}
	}
	for _, other := range s.others(p) {
		other.separateFrom(home, d)
	}
	home.standStill(d, catchUp)
	s.store.background.Go(func() { p.separate(d) })
}

func (s *simulation) lossy(p *simProc, loss linkLoss, duration time.Duration) {
	p.lose(loss)
	pass(duration)
	p.lose(loseNothing)
}

// lose begins or ends a loss between the process and the API servers. Its watch may be away for longer.
func (p *simProc) lose(loss linkLoss) {
	p.sim.audit.mayPoll()
	p.link.set(func(l *simLink) { l.lost = loss })
}

func (s *simulation) suffer(trouble simTrouble, duration time.Duration) {
	s.store.suffer(trouble)
	pass(duration)
	s.store.suffer(noTrouble)
}

func (s *simulation) cutOffAndTamper(rng *rand.Rand, p *simProc, duration time.Duration) {
	p.lose(loseAll)
	s.tamper(rng)
	if other := s.replicas[rng.IntN(len(s.replicas))]; other != p.replica {
		old := s.current(other)
		old.kill()
		s.mustEnd(old.done, old.identity)
		s.revive(other)
	}
	pass(duration)
	p.lose(loseNothing)
}

// restore takes a snapshot of etcd and restores it after a while. What has been acknowledged in
// between is gone, and no client can tell: a Lease that was free in the snapshot is taken at once.
func (s *simulation) restore(_ *rand.Rand, _ *simProc, duration time.Duration) {
	snapshot := s.store.snapshot()
	pass(duration)
	s.audit.suspend()
	s.audit.newEra()
	s.log("fault", "etcd is restored to version %d", snapshot.rv)
	s.store.restore(snapshot)
}

// simTampering is one way to change the Lease without the electors. It does nothing and returns
// false where the client's fences could not stand it and no fence in the API server is there.
type simTampering struct {
	what string
	do   func(s *simulation, rng *rand.Rand)
}

var simTamperings = []simTampering{
	{"deleted", func(s *simulation, _ *rand.Rand) { s.store.delete("admin") }},
	{"deleted and installed anew without a holder", func(s *simulation, _ *rand.Rand) {
		if s.undetectable() {
			s.store.delete("admin")
			s.install()
		}
	}},
	{"taken by a thief", func(s *simulation, _ *rand.Rand) {
		duration := s.cfg.LeaseDuration.Duration
		if s.allAware() {
			duration = time.Second
		}
		s.store.edit("thief", func(l *coordinationv1.Lease) { *l = *protocol.AcquiredLease(l, "thief", duration, time.Now()) })
	}},
	{"given to another holder", func(s *simulation, rng *rand.Rand) {
		name := []string{"", "somebody", s.current(s.replicas[rng.IntN(len(s.replicas))]).identity}[rng.IntN(3)]
		s.store.edit("admin", func(l *coordinationv1.Lease) { l.Spec.HolderIdentity = ptr.To(name) })
	}},
	{"given a shorter duration", func(s *simulation, _ *rand.Rand) {
		if s.undetectable() {
			s.store.edit("admin", func(l *coordinationv1.Lease) { l.Spec.LeaseDurationSeconds = ptr.To[int32](1) })
		}
	}},
	{"given a longer duration", func(s *simulation, rng *rand.Rand) {
		longer := int32(rng.IntN(5)+2) * int32(s.cfg.LeaseDuration.Duration/time.Second)
		s.store.edit("admin", func(l *coordinationv1.Lease) {
			// Longer than after an earlier edit, too: a shorter one is the fault above.
			l.Spec.LeaseDurationSeconds = ptr.To(max(longer, ptr.Deref(l.Spec.LeaseDurationSeconds, 0)))
		})
	}},
	{"given other transitions", func(s *simulation, rng *rand.Rand) {
		s.audit.newEra()
		n := []int32{0, math.MaxInt32}[rng.IntN(2)]
		s.store.edit("admin", func(l *coordinationv1.Lease) { l.Spec.LeaseTransitions = ptr.To(n) })
	}},
	{"annotated", func(s *simulation, _ *rand.Rand) {
		s.store.edit("admin", func(l *coordinationv1.Lease) { metav1.SetMetaDataAnnotation(&l.ObjectMeta, "a", "b") })
	}},
}

// tamper changes the Lease without the electors.
func (s *simulation) tamper(rng *rand.Rand) {
	t := simTamperings[rng.IntN(len(simTamperings))]
	s.log("fault", "the Lease is %s", t.what)
	t.do(s, rng)
}

// undetectable reports whether something may happen that a process which starts soon could not tell
// from a regular event. With the fence in the API server it may, and the client's are not judged.
// Without, it may if every process knows the Lease.
func (s *simulation) undetectable() bool {
	if s.audit.strict {
		return false
	}
	if s.fences.server {
		s.audit.suspend()
		return true
	}
	return s.allAware()
}
