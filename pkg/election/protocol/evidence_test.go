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

func TestEvidenceForATakeover(t *testing.T) {
	const s = time.Second
	byA := noted(holderNote{Holder: "a"})
	tests := map[string]struct {
		happens func(p *State)
		want    bool
	}{
		"no evidence frees no Lease":                                               {func(*State) {}, false},
		"a process that has ended frees the Lease":                                 {func(p *State) { p.OnLeaderState(LeaderGone, 2*s) }, true},
		"a process that could never be reached keeps the Lease":                    {func(p *State) { p.OnLeaderState(LeaderUnreachable, 2*s) }, false},
		"a process at which nobody looks keeps the Lease":                          {func(p *State) { p.OnLeaderState(LeaderGone, 2*s); p.witness = false }, false},
		"a process that has ended frees the Lease while an earlier holder may act": {func(p *State) { p.OnLeaderState(LeaderGone, 2*s); p.distrustUntil = 9 * s }, true},
		"a renewal that was under way when the process ended keeps the evidence": {func(p *State) {
			p.OnLeaderState(LeaderGone, 2*s)
			p.learn(testLease("2", 1, "a", byA, renewed), 2*s+SettleTime, true)
		}, true},
		"a later renewal refutes the evidence": {func(p *State) {
			p.OnLeaderState(LeaderGone, 2*s)
			p.learn(testLease("2", 1, "a", byA, renewed), 2*s+SettleTime+1, true)
		}, false},
		"an edit of the Lease keeps the evidence": {func(p *State) { p.OnLeaderState(LeaderGone, 2*s); p.learn(testLease("2", 1, "a", byA), 3*s, true) }, true},
		"a renewal without a note ends the look at the process": {func(p *State) {
			p.OnLeaderState(LeaderGone, 2*s)
			p.learn(testLease("2", 1, "a", renewed), 3*s, true)
			p.OnLeaderState(LeaderGone, 4*s)
		}, false},
		"evidence against one holder does not count against the next": {func(p *State) {
			p.OnLeaderState(LeaderGone, 2*s)
			p.learn(testLease("2", 2, "b", noted(holderNote{Holder: "b"})), 3*s, true)
		}, false},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			p := New("me", testTiming, "10.0.0.2:10357", true)
			p.learn(testLease("1", 1, "a", byA), 0, true)
			p.watching, p.readAt = true, never
			p.OnLook()
			test.happens(p)
			free := p.freeAt()
			act := p.Decide(4 * s)
			if got := act.Kind == ActAcquire; got != test.want || got && act.OwesUntil != free {
				t.Errorf("it decides to %s, and owes until %s, want %s", act.Kind, act.OwesUntil, free)
			}
		})
	}
}

func TestEvidenceRefutedIsLookedAtAgain(t *testing.T) {
	const s = time.Second
	p := New("me", testTiming, "10.0.0.2:10357", true)
	byA := noted(holderNote{Holder: "a"})
	p.learn(testLease("1", 1, "a", byA), 0, true)
	p.OnLook()
	if act := p.Decide(s); act.Kind == ActLook {
		t.Errorf("it looks twice before anything is seen")
	}
	p.OnLeaderState(LeaderGone, s)
	p.learn(testLease("2", 1, "a", byA, renewed), 3*s, true)
	if act := p.Decide(3 * s); act.Kind != ActLook {
		t.Errorf("after it was refuted, it decides to %s", act.Kind)
	}
}

func TestNoteOf(t *testing.T) {
	tests := map[string]struct {
		lease *coordinationv1.Lease
		want  string // the holder
	}{
		"a note of the holder": {testLease("1", 1, "a", noted(holderNote{Holder: "a"})), "a"},
		"a note of the previous holder, which another elector has left in place": {testLease("1", 1, "b", noted(holderNote{Holder: "a"})), ""},
		"after a release": {testLease("1", 1, "a", noted(holderNote{Holder: "a"}), released), ""},
		"that is not JSON": {testLease("1", 1, "a", func(l *coordinationv1.Lease) {
			l.Annotations = map[string]string{ProcessAnnotation: "?"}
		}), ""},
		"a Lease without evidence": {testLease("1", 1, "a"), ""},
		"no Lease":                 {nil, ""},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			if got := noteOf(test.lease).Holder; got != test.want {
				t.Errorf("got %q, want %q", got, test.want)
			}
		})
	}
}

func TestEarlyTakeoverKeepsTrust(t *testing.T) {
	const s = time.Second
	for early, want := range map[bool]time.Duration{true: 0, false: 17 * s} {
		p := New("me", testTiming, "", true)
		p.learn(testLease("1", 1, "a", noted(holderNote{Holder: "a"})), 0, true)
		p.learn(testLease("2", 2, "b", noted(holderNote{Holder: "b", Early: early})), 2*s, true)
		if p.distrustUntil != want || p.freeAt() != 17*s {
			t.Errorf("after a takeover, early %t, it distrusts until %s, want %s, and waits until %s", early, p.distrustUntil, want, p.freeAt())
		}
	}
}
