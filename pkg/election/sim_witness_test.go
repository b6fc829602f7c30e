// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package election

import (
	"context"
	"time"

	"github.com/quartermaster-dev/quartermaster/pkg/election/protocol"
)

// simWitness is the connection of one process to that of the leader. As pkg/election/witness, it says
// that a process has ended only where the connection was closed by the kernel and nobody answers at the
// address; all else is silence.
type simWitness struct {
	proc *simProc
}

// silence returns after how long a process that has answered counts as silent.
func (s *simulation) silence() time.Duration { return s.cfg.LeaseDuration.Duration / 5 }

// Watch implements Witness. The address of a process is its identity.
func (w *simWitness) Watch(ctx context.Context, process protocol.Process, report func(protocol.LeaderState)) {
	p := w.proc
	leader := p.sim.find(process.Address)
	p.gate()
	if leader.pod == p.pod {
		report(protocol.LeaderGone)
		return
	}
	var heard time.Time
	seen := protocol.LeaderUnknown
	tell := func(state protocol.LeaderState) {
		if state == seen {
			return
		}
		seen = state
		p.gate()
		p.sim.log(p.identity, "sees of %s: %s", leader.identity, state)
		if state == protocol.LeaderSilent || state == protocol.LeaderGone {
			p.mu.Lock()
			p.evidence[leader] = state
			p.mu.Unlock()
		}
		report(state)
	}
	for ctx.Err() == nil {
		state := w.look(leader, heard)
		if state == protocol.LeaderAnswers {
			heard = time.Now()
		}
		if state != protocol.LeaderUnknown {
			tell(state)
		}
		if state == protocol.LeaderAnswers && p.sim.wrongHints && !p.sim.calm.Load() && p.nextRNG("wrong hint").IntN(8) == 0 {
			tell(protocol.LeaderGone) // a proxy in the Pods closes the connection and refuses another
			return
		}
		ended := leader.hangsUp()
		if state == protocol.LeaderGone {
			ended = nil
		}
		select {
		case <-ctx.Done():
		case <-ended: // the kernel closes the connection
			pause := time.Duration(p.nextRNG("redial").Int64N(int64(10 * time.Millisecond)))
			if seen == protocol.LeaderAnswers && pauseFor(ctx, pause) && p.reaches(leader) {
				tell(protocol.LeaderGone)
				return
			}
			pauseFor(ctx, p.sim.silence()/3)
		case <-time.After(p.sim.silence() / 3):
		}
		paused := time.Now()
		p.gate()
		if time.Since(paused) > p.sim.silence() && seen == protocol.LeaderAnswers && p.nextRNG("resume").IntN(2) == 0 {
			tell(protocol.LeaderSilent) // its timer has come before what waits in the connection
		}
	}
}

// look returns what is seen of the leader now.
func (w *simWitness) look(leader *simProc, heard time.Time) protocol.LeaderState {
	switch {
	case w.proc.reaches(leader) && leader.answers():
		return protocol.LeaderAnswers
	case heard.IsZero():
		return protocol.LeaderUnreachable
	case time.Since(heard) >= w.proc.sim.silence():
		return protocol.LeaderSilent
	}
	return protocol.LeaderUnknown
}

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

// hasEvidence reports whether the process may take the Lease early from the last holder, which has
// written it last at that time. The request may have been under way since the evidence was seen.
func (p *simProc) hasEvidence(holder *simProc, written time.Time) bool {
	p.mu.Lock()
	evidence := p.evidence[holder]
	p.mu.Unlock()
	overdue := time.Duration(float64(p.sim.cfg.RetryPeriod.Duration) * 1.75 / 1.01)
	return holder.pod == p.pod && holder.isGone() || evidence == protocol.LeaderGone || evidence == protocol.LeaderSilent && time.Since(written) >= overdue
}
