// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package protocol

import (
	"testing"
	"time"

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
		happens func(p *State)
		want    time.Duration
	}{
		"without evidence, never": {func(*State) {}, never},
		"at once after a process that has ended": {func(p *State) {
			p.OnLeader(LeaderGone, 2*s)
		}, 2 * s},
		"after silence when a renewal is overdue": {func(p *State) {
			p.OnLeader(LeaderSilent, 2*s)
		}, 3500 * time.Millisecond},
		"after silence that begins later": {func(p *State) {
			p.OnLeader(LeaderSilent, 5*s)
		}, 5 * s},
		"not if it answers again": {func(p *State) {
			p.OnLeader(LeaderSilent, 2*s)
			p.OnLeader(LeaderAnswers, 3*s)
		}, never},
		"not if it could never be reached": {func(p *State) {
			p.OnLeader(LeaderUnreachable, 2*s)
		}, never},
		"not after a renewal during silence": {func(p *State) {
			p.OnLeader(LeaderSilent, 2*s)
			p.learn(testLease("2", 1, "a", byA, renewed), 3*s, true)
		}, never},
		"an edit is no renewal, but postpones it": {func(p *State) {
			p.OnLeader(LeaderSilent, 2*s)
			p.learn(testLease("2", 1, "a", byA), 3*s, true)
		}, 6500 * time.Millisecond},
		"a renewal that was under way when the process ended refutes nothing": {func(p *State) {
			p.OnLeader(LeaderGone, 2*s)
			p.learn(testLease("2", 1, "a", byA, renewed), 2*s+SettleTime, true)
		}, 2 * s},
		"a later one does": {func(p *State) {
			p.OnLeader(LeaderGone, 2*s)
			p.learn(testLease("2", 1, "a", byA, renewed), 2*s+SettleTime+1, true)
		}, never},
		"not by the old look when the renewal has taken the note away": {func(p *State) {
			p.OnLeader(LeaderSilent, 2*s)
			p.learn(testLease("2", 1, "a", renewed), 3*s, true)
			p.OnLeader(LeaderGone, 4*s)
		}, never},
		"not without the fence in the API server": {func(p *State) {
			p.OnLeader(LeaderGone, 2*s)
			p.OnServerFence(false)
		}, never},
		"not against the next holder": {func(p *State) {
			p.OnLeader(LeaderGone, 2*s)
			p.learn(testLease("2", 2, "b", noted(holderNote{Holder: "b"})), 3*s, true)
		}, never},
		"also while an earlier holder may act: the term owes more": {func(p *State) {
			p.OnLeader(LeaderGone, 2*s)
			p.distrust = 9 * s
		}, 2 * s},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			p := New("me", testTiming, Process{Address: "10.0.0.2:10357"}, true, false)
			p.OnServerFence(true)
			p.learn(testLease("1", 1, "a", byA), 0, true)
			p.OnLook()
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
		p := New("me", testTiming, Process{Address: "10.0.0.2:10357"}, true, false)
		p.OnServerFence(true)
		byA := noted(holderNote{Holder: "a"})
		p.learn(testLease("1", 1, "a", byA), 0, true)
		p.OnLook()
		if act := p.Decide(s); act.Kind == ActLook {
			t.Errorf("it looks twice before anything is seen")
		}
		p.OnLeader(state, s)
		p.learn(testLease("2", 1, "a", byA, renewed), 3*s, true)
		if act := p.Decide(3 * s); act.Kind != ActLook {
			t.Errorf("after %s was refuted, it decides to %s", state, act.Kind)
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
	for evidence, want := range map[LeaderState]time.Duration{LeaderGone: 0, LeaderSilent: 0, "": 17 * s} {
		p := New("me", testTiming, Process{}, true, false)
		p.learn(testLease("1", 1, "a", noted(holderNote{Holder: "a"})), 0, true)
		p.learn(testLease("2", 2, "b", noted(holderNote{Holder: "b", Early: evidence})), 2*s, true)
		if p.distrust != want || p.freeAt() != 17*s {
			t.Errorf("after a take-over on %q, it distrusts until %s, want %s, and waits until %s", evidence, p.distrust, want, p.freeAt())
		}
	}
}
