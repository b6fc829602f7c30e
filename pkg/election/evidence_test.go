// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package election

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	coordinationv1 "k8s.io/api/coordination/v1"
)

// noted adds the note of a holder.
func noted(note holderNote) func(*coordinationv1.Lease) {
	note.Address = "10.0.0.1:10357"
	return func(l *coordinationv1.Lease) { setNote(l, note) }
}

func TestEarlyAt(t *testing.T) {
	const s = time.Second
	byA := noted(holderNote{Holder: "a"})
	tests := map[string]struct {
		happens func(p *protocol)
		want    time.Duration
	}{
		"without evidence, never": {func(*protocol) {}, never},
		"at once after a process that has ended": {func(p *protocol) {
			p.onLeader(LeaderGone, 2*s)
		}, 2 * s},
		"after silence when a renewal is overdue": {func(p *protocol) {
			p.onLeader(LeaderSilent, 2*s)
		}, 3500 * time.Millisecond},
		"after silence that begins later": {func(p *protocol) {
			p.onLeader(LeaderSilent, 5*s)
		}, 5 * s},
		"not if it answers again": {func(p *protocol) {
			p.onLeader(LeaderSilent, 2*s)
			p.onLeader(LeaderAnswers, 3*s)
		}, never},
		"not if it could never be reached": {func(p *protocol) {
			p.onLeader(LeaderUnreachable, 2*s)
		}, never},
		"not after a renewal during silence": {func(p *protocol) {
			p.onLeader(LeaderSilent, 2*s)
			p.learn(testLease("2", 1, "a", byA, renewed), 3*s, true)
		}, never},
		"an edit is no renewal, but postpones it": {func(p *protocol) {
			p.onLeader(LeaderSilent, 2*s)
			p.learn(testLease("2", 1, "a", byA), 3*s, true)
		}, 6500 * time.Millisecond},
		"a renewal that was under way when the process ended refutes nothing": {func(p *protocol) {
			p.onLeader(LeaderGone, 2*s)
			p.learn(testLease("2", 1, "a", byA, renewed), 2*s+settleTime, true)
		}, 2 * s},
		"a later one does": {func(p *protocol) {
			p.onLeader(LeaderGone, 2*s)
			p.learn(testLease("2", 1, "a", byA, renewed), 2*s+settleTime+1, true)
		}, never},
		"not by the old look when the renewal has taken the note away": {func(p *protocol) {
			p.onLeader(LeaderSilent, 2*s)
			p.learn(testLease("2", 1, "a", renewed), 3*s, true)
			p.onLeader(LeaderGone, 4*s)
		}, never},
		"not without the fence in the API server": {func(p *protocol) {
			p.onLeader(LeaderGone, 2*s)
			p.onServerFence(false)
		}, never},
		"not against the next holder": {func(p *protocol) {
			p.onLeader(LeaderGone, 2*s)
			p.learn(testLease("2", 2, "b", noted(holderNote{Holder: "b"})), 3*s, true)
		}, never},
		"not while an earlier holder may act": {func(p *protocol) {
			p.onLeader(LeaderGone, 2*s)
			p.distrust = 9 * s
		}, 9 * s},
		"not for a lease duration after a mistake": {func(p *protocol) {
			p.learn(testLease("2", 1, "a", noted(holderNote{Holder: "a", Mistaken: true})), 2*s, true)
			p.onLeader(LeaderGone, 3*s)
		}, 17 * s},
		"which begins once": {func(p *protocol) {
			p.learn(testLease("2", 1, "a", noted(holderNote{Holder: "a", Mistaken: true})), 2*s, true)
			p.learn(testLease("3", 1, "a", noted(holderNote{Holder: "a", Mistaken: true}), renewed), 4*s, true)
			p.onLeader(LeaderGone, 5*s)
		}, 17 * s},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			p := newProtocol("me", testTiming)
			p.witness = true
			p.onServerFence(true)
			p.learn(testLease("1", 1, "a", byA), 0, true)
			p.onLook()
			test.happens(p)
			if got := p.earlyAt(); got != test.want {
				t.Errorf("got %s, want %s", got, test.want)
			}
		})
	}
}

func TestRefutedEvidenceIsLookedAtAnew(t *testing.T) {
	const s = time.Second
	for _, state := range []LeaderState{LeaderGone, LeaderSilent} {
		p := newProtocol("me", testTiming)
		p.witness = true
		p.onServerFence(true)
		byA := noted(holderNote{Holder: "a"})
		p.learn(testLease("1", 1, "a", byA), 0, true)
		p.onLook()
		if act := p.decide(s); act.kind == actLook {
			t.Errorf("it looks twice before anything is seen")
		}
		p.onLeader(state, s)
		p.learn(testLease("2", 1, "a", byA, renewed), 3*s, true)
		if act := p.decide(3 * s); act.kind != actLook {
			t.Errorf("after %s was refuted, it decides to %s", state, act.kind)
		}
	}
}

func TestNoteOf(t *testing.T) {
	tests := map[string]struct {
		lease *coordinationv1.Lease
		want  string // the holder
	}{
		"of the holder": {testLease("1", 1, "a", noted(holderNote{Holder: "a"})), "a"},
		"of the holder before, which another elector has left in place": {testLease("1", 1, "b", noted(holderNote{Holder: "a"})), ""},
		"after a release": {testLease("1", 1, "a", noted(holderNote{Holder: "a"}), released), ""},
		"that is not JSON": {testLease("1", 1, "a", func(l *coordinationv1.Lease) {
			l.Annotations = map[string]string{ProcessAnnotation: "?"}
		}), ""},
		"none":     {testLease("1", 1, "a"), ""},
		"no lease": {nil, ""},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			if got := noteOf(test.lease).Holder; got != test.want {
				t.Errorf("got %q, want %q", got, test.want)
			}
		})
	}
}

func TestTrustInATakeover(t *testing.T) {
	const s = time.Second
	for evidence, want := range map[LeaderState]time.Duration{LeaderGone: 0, LeaderSilent: 17 * s, "": 17 * s} {
		p := newProtocol("me", testTiming)
		p.learn(testLease("1", 1, "a", noted(holderNote{Holder: "a"})), 0, true)
		p.learn(testLease("2", 2, "b", noted(holderNote{Holder: "b", Evidence: evidence})), 2*s, true)
		if p.distrust != want {
			t.Errorf("after a take-over on %q, it distrusts until %s, want %s", evidence, p.distrust, want)
		}
	}
}

// TestAttemptRemembersEvidence resumes an early acquisition whose answer was lost.
func TestAttemptRemembersEvidence(t *testing.T) {
	const s = time.Second
	p := newProtocol("me", testTiming)
	p.process = Process{Address: "10.0.0.2:10357"}
	p.learn(testLease("1", 1, "a"), 0, true)
	early := takeover{evidence: LeaderSilent, claim: 15 * s}
	act := action{kind: actAcquire, early: early}
	wrote := p.proposal(act, time.Unix(1000, 0))
	stored := func(version string) *coordinationv1.Lease {
		lease := wrote.DeepCopy()
		lease.ResourceVersion = version
		return lease
	}
	if got := noteOf(wrote); got.Evidence != LeaderSilent || got.Process != p.process {
		t.Errorf("the note is %+v", got)
	}
	p.onSent(act, wrote)
	p.onWriteFailed(p.lease, failure{kind: failUnanswered}, 5*s)
	p.learn(stored("2"), 6*s, true)
	p.onSent(action{kind: actResume}, stored("2"))
	p.onAcquired(stored("3"), 7*s, 8*s)
	if diff := cmp.Diff(early, p.early, cmp.AllowUnexported(takeover{})); diff != "" {
		t.Error(diff)
	}
}
