// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package election

import (
	"context"
	"time"

	"github.com/quartermaster-dev/quartermaster/pkg/election/protocol"
)

// simWitness is the connection of one process to the leader's. As pkg/election/witness, it says that a
// process has ended if the kernel closed the connection and nobody answers at the address. In some
// simulations it is wrong.
type simWitness struct {
	proc *simProc
}

// Watch implements Witness. The address of a process is its identity.
func (w *simWitness) Watch(ctx context.Context, process protocol.LeaderProcess, report func(protocol.LeaderState)) {
	p := w.proc
	leader := p.sim.find(process.Address)
	seen, beat := protocol.LeaderUnknown, p.sim.cfg.LeaseDuration.Duration/15
	tell := func(state protocol.LeaderState) {
		if state == seen {
			return
		}
		seen = state
		p.gate()
		p.sim.log(p.identity, "sees of %s: %s", leader.identity, state)
		p.mu.Lock()
		p.evidence[leader] = state == protocol.LeaderGone
		p.mu.Unlock()
		report(state)
	}
	p.gate()
	if leader.pod == p.pod {
		tell(protocol.LeaderGone)
		return
	}
	ended, maligned := leader.hangsUp(), (<-chan struct{})(leader.maligned)
	for ctx.Err() == nil {
		switch {
		case p.reaches(leader) && leader.answers():
			tell(protocol.LeaderAnswers)
		case seen == protocol.LeaderUnknown:
			tell(protocol.LeaderUnreachable)
		}
		if seen == protocol.LeaderAnswers && p.sim.wrongHints && !p.sim.calm.Load() && p.nextRNG("wrong hint").IntN(40) == 0 {
			tell(protocol.LeaderGone) // a proxy in the Pods closes the connection and refuses another
			return
		}
		isGone := false
		select {
		case <-ctx.Done():
			return
		case <-maligned:
			maligned, isGone = nil, true // once, also if this replica has not seen the process
		case <-ended: // the kernel closes the connection
			ended = nil
			pause := time.Duration(p.nextRNG("redial").Int64N(int64(10 * time.Millisecond)))
			isGone = pauseFor(ctx, pause) && p.reaches(leader)
		case <-time.After(beat):
		}
		if seen == protocol.LeaderAnswers && isGone {
			tell(protocol.LeaderGone)
			return
		}
		p.gate()
	}
}

// malign makes every standby that has seen the process take it for one that has ended, once.
func (p *simProc) malign() { close(p.maligned) }

// answers reports whether the process beats.
func (p *simProc) answers() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return !p.gone && !time.Now().Before(p.paused)
}

// reaches reports whether the network between two processes works.
func (p *simProc) reaches(other *simProc) bool {
	now := time.Now()
	for _, end := range []*simProc{p, other} {
		end.mu.Lock()
		apart := now.Before(end.apart)
		end.mu.Unlock()
		if apart {
			return false
		}
	}
	return true
}

// separate cuts the process off from the other replicas for d, but not from the API servers.
func (p *simProc) separate(d time.Duration) {
	p.mu.Lock()
	p.apart = latest(p.apart, time.Now().Add(d))
	p.mu.Unlock()
	pass(d)
}

// hangsUp returns what is closed when the process is killed, nil if that closes no connection.
func (p *simProc) hangsUp() <-chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.ended
}

// losePower ends the process as a power failure does, which closes no connection.
func (p *simProc) losePower() {
	p.mu.Lock()
	p.ended = nil
	p.mu.Unlock()
	p.kill()
}

// hasEvidence reports whether the process may take the Lease early from a holder.
func (p *simProc) hasEvidence(holder *simProc) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.evidence[holder]
}
