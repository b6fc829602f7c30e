// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package election

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"time"
)

// simServer is one of several API servers over the store. Reads and conditional writes go to the
// store, as kube-apiserver's do. But it shows watches, and judges by the fence's parameter, what its
// own watch of the store has shown it, which is the past. And a write that it has admitted is in the
// store only a while later.
type simServer struct {
	sim   *simulation
	index int

	mu                sync.Mutex
	behindSince       time.Time // time from which its watch of the store shows nothing new
	stalledUntil      time.Time // time until which that lasts
	busyUntil         time.Time // time until which requests wait in its queue
	seen              []simView // every version of the parameter and when this server sees it
	policy            []simPolicy
	stoppedUntil      time.Time // time until which it does nothing, and keeps the requests
	leaseStoppedUntil time.Time // time until which it keeps the requests for the Lease
}

// simPolicy is a state of the policy and when a server sees it.
type simPolicy struct {
	gone bool
	at   time.Time
}

type simView struct {
	naming *simNaming
	at     time.Time
}

func newSimServer(s *simulation, index int) *simServer {
	server := &simServer{sim: s, index: index}
	server.seen = []simView{{naming: s.store.naming, at: s.start}}
	return server
}

// lag returns how late the server's watch of the store is: mostly a few milliseconds.
func lag(rng *rand.Rand) time.Duration {
	d := 100*time.Microsecond + time.Duration(rng.Int64N(int64(3*time.Millisecond)))
	if rng.IntN(50) == 0 {
		d += time.Duration(rng.Int64N(int64(50 * time.Millisecond)))
	}
	return d
}

// willSee is called under the store's mu when the parameter changes.
func (a *simServer) willSee(n *simNaming) {
	a.mu.Lock()
	defer a.mu.Unlock()
	at := time.Now().Add(lag(a.sim.rng("lag", uint64(100*len(a.seen)+a.index))))
	a.seen = append(a.seen, simView{naming: n, at: latest(at, a.stalledUntil, a.seen[len(a.seen)-1].at)})
}

// willSeePolicy is called under the store's mu when the policy is deleted or installed.
func (a *simServer) willSeePolicy(gone bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	at := time.Now().Add(lag(a.sim.rng("policy lag", uint64(100*len(a.policy)+a.index))))
	if n := len(a.policy); n > 0 {
		at = latest(at, a.policy[n-1].at)
	}
	a.policy = append(a.policy, simPolicy{gone: gone, at: latest(at, a.stalledUntil)})
}

// losePolicy lets this server see that the policy was deleted before others do.
func (a *simServer) losePolicy() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.policy = append(a.policy, simPolicy{gone: true, at: time.Now()})
}

// hasPolicy reports whether the server goes by the policy.
func (a *simServer) hasPolicy() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	now := time.Now()
	for i := len(a.policy) - 1; i >= 0; i-- {
		if !a.policy[i].at.After(now) {
			return !a.policy[i].gone
		}
	}
	return true
}

// standStill keeps every request for d, unjudged, and shows nothing new for that time and catchUp.
func (a *simServer) standStill(d, catchUp time.Duration) {
	a.stall(d + catchUp)
	a.mu.Lock()
	defer a.mu.Unlock()
	a.stoppedUntil = latest(a.stoppedUntil, time.Now().Add(d))
}

// lagBehind keeps the requests for the Lease for d, and shows nothing new of the leader's name for
// that time and catchUp: its connections to etcd for these two stand still, and no others.
func (a *simServer) lagBehind(d, catchUp time.Duration) {
	a.stall(d + catchUp)
	a.mu.Lock()
	defer a.mu.Unlock()
	a.leaseStoppedUntil = latest(a.leaseStoppedUntil, time.Now().Add(d))
}

// keepTime returns how long a request is kept.
func (a *simServer) keepTime(verb string) time.Duration {
	a.mu.Lock()
	defer a.mu.Unlock()
	until := a.stoppedUntil
	if verb == "get" || verb == "update" || verb == "create" {
		until = latest(until, a.leaseStoppedUntil)
	}
	return time.Until(until)
}

// stall keeps the server's watches from showing anything new for d.
func (a *simServer) stall(d time.Duration) {
	a.mu.Lock()
	defer a.mu.Unlock()
	now := time.Now()
	if !a.stalledUntil.After(now) {
		a.behindSince = now
	}
	a.stalledUntil = latest(a.stalledUntil, now.Add(d))
	for i := range a.seen {
		if a.seen[i].at.After(now) {
			a.seen[i].at = latest(a.seen[i].at, a.stalledUntil)
		}
	}
}

// clog lets requests wait in the server's queue for d.
func (a *simServer) clog(d time.Duration) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.busyUntil = latest(a.busyUntil, time.Now().Add(d))
}

// queueTime returns how long a request waits before the server looks at it. Now and then one is
// forgotten in a socket, when the faults are over only a controller's.
func (a *simServer) queueTime(verb string, rng *rand.Rand) time.Duration {
	a.mu.Lock()
	left := time.Until(a.busyUntil)
	a.mu.Unlock()
	forgotten, wait := rng.IntN(100) == 0 && (verb == "write" || !a.sim.calm.Load()), rng.Float64()
	switch {
	case forgotten:
		return time.Duration(wait * 2 * float64(a.sim.cfg.LeaseDuration.Duration))
	case left > 0:
		return time.Duration(wait * float64(left))
	}
	return 0
}

// watchDelay returns how late the server shows an event of the store in a watch.
func (a *simServer) watchDelay(rng *rand.Rand) time.Duration {
	a.mu.Lock()
	defer a.mu.Unlock()
	return max(lag(rng), time.Until(a.stalledUntil))
}

// seenUntil returns the time up to which the server has seen the store.
func (a *simServer) seenUntil() time.Time {
	a.mu.Lock()
	defer a.mu.Unlock()
	if now := time.Now(); !a.stalledUntil.After(now) {
		return now
	}
	return a.behindSince
}

// view returns the version of the parameter that the server knows.
func (a *simServer) view() *simNaming {
	a.mu.Lock()
	defer a.mu.Unlock()
	now := time.Now()
	for i := len(a.seen) - 1; i > 0; i-- {
		if !a.seen[i].at.After(now) {
			return a.seen[i].naming
		}
	}
	return a.seen[0].naming
}

// worstLag returns the longest time after which the server saw a change of the parameter, among
// those from since on. Until it has seen a change, that is how long it has not.
func (a *simServer) worstLag(since time.Time) time.Duration {
	a.mu.Lock()
	defer a.mu.Unlock()
	var worst time.Duration
	now := time.Now()
	for _, v := range a.seen {
		if !v.naming.written.Before(since) {
			seen := v.at
			if seen.After(now) {
				seen = now
			}
			worst = max(worst, seen.Sub(v.naming.written))
		}
	}
	return worst
}

// judge returns the words with which the fence of this server refuses a write of the Pod, or says
// that it admits it; unjudged reports that there is no fence.
func (a *simServer) judge(p *simProc) (words string, admits, unjudged bool) {
	pod := p.pod
	known := a.view()
	if !a.sim.fences.server || !a.hasPolicy() || known.absent {
		return "", true, true
	}
	words = fmt.Sprintf("ValidatingAdmissionPolicy 'quartermaster-fence' with binding 'quartermaster-fence' denied request: quartermaster-fence: "+
		"written by Pod %s, the leader is '%s'", pod, known.leader)
	return words, strings.HasPrefix(known.leader, pod+"_"), false
}

// execute admits the write and, a while later, executes it in the store. It returns the words of a
// refusal.
func (a *simServer) execute(w *simWrite) (refused string, err error) {
	words, admits, unjudged := a.judge(w.proc)
	if !admits {
		a.sim.audit.onRefused(w, a)
		return words, nil
	}
	w.server, w.admitted, w.unjudged = a, time.Now(), unjudged
	passToStore(w.rng)
	a.sim.audit.onExecuted(w)
	return "", nil
}

// passToStore lets the time pass between the admission of a write and the store.
func passToStore(rng *rand.Rand) {
	d := 50*time.Microsecond + time.Duration(rng.Int64N(int64(2*time.Millisecond)))
	if rng.IntN(50) == 0 {
		d += time.Duration(rng.Int64N(int64(200 * time.Millisecond)))
	}
	pass(d)
}

func latest(times ...time.Time) time.Time {
	last := times[0]
	for _, t := range times[1:] {
		if t.After(last) {
			last = t
		}
	}
	return last
}
