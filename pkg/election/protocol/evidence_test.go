// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package protocol

import (
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
)

// withNote adds the note of a holder.
func withNote(note holderNote) func(*coordinationv1.Lease) {
	note.Address = "10.0.0.1:10357"
	return func(l *coordinationv1.Lease) { setNote(l, note) }
}

func TestEvidenceForATakeover(t *testing.T) {
	const s = time.Second
	noteOfA := withNote(holderNote{Holder: "a"})
	tests := map[string]struct {
		happens func(state *State)
		want    bool
	}{
		"no evidence frees no Lease":                                               {func(*State) {}, false},
		"a process that has ended frees the Lease":                                 {func(state *State) { state.OnLeaderState(LeaderGone, 2*s) }, true},
		"a process that could never be reached keeps the Lease":                    {func(state *State) { state.OnLeaderState(LeaderUnreachable, 2*s) }, false},
		"a process at which nobody looks keeps the Lease":                          {func(state *State) { state.OnLeaderState(LeaderGone, 2*s); state.witness = false }, false},
		"a process that has ended frees the Lease while an earlier holder may act": {func(state *State) { state.OnLeaderState(LeaderGone, 2*s); state.distrustUntil = 9 * s }, true},
		"a renewal that was under way when the process ended keeps the evidence": {func(state *State) {
			state.OnLeaderState(LeaderGone, 2*s)
			state.learn(testLease("2", 1, "a", noteOfA, renewed), 2*s+SettleTime, true)
		}, true},
		"a later renewal refutes the evidence": {func(state *State) {
			state.OnLeaderState(LeaderGone, 2*s)
			state.learn(testLease("2", 1, "a", noteOfA, renewed), 2*s+SettleTime+1, true)
		}, false},
		"an edit of the Lease keeps the evidence": {func(state *State) {
			state.OnLeaderState(LeaderGone, 2*s)
			state.learn(testLease("2", 1, "a", noteOfA), 3*s, true)
		}, true},
		"a renewal without a note ends the look at the process": {func(state *State) {
			state.OnLeaderState(LeaderGone, 2*s)
			state.learn(testLease("2", 1, "a", renewed), 3*s, true)
			state.OnLeaderState(LeaderGone, 4*s)
		}, false},
		"evidence against one holder does not count against the next": {func(state *State) {
			state.OnLeaderState(LeaderGone, 2*s)
			state.learn(testLease("2", 2, "b", withNote(holderNote{Holder: "b"})), 3*s, true)
		}, false},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			state := New("me", testTiming, "10.0.0.2:10357", true)
			state.learn(testLease("1", 1, "a", noteOfA), 0, true)
			state.watching, state.readAt = true, never
			state.OnLook()
			tc.happens(state)
			free := state.freeAt()
			act := state.Decide(4 * s)
			if got := act.Kind == ActAcquire; got != tc.want || got && act.ProofUntil != free {
				t.Errorf("it decides to %s, and needs a proof until %s, want %s", act.Kind, act.ProofUntil, free)
			}
		})
	}
}

func TestEvidenceRefutedIsLookedAtAgain(t *testing.T) {
	const s = time.Second
	state := New("me", testTiming, "10.0.0.2:10357", true)
	noteOfA := withNote(holderNote{Holder: "a"})
	state.learn(testLease("1", 1, "a", noteOfA), 0, true)
	state.OnLook()
	if act := state.Decide(s); act.Kind == ActLook {
		t.Errorf("it looks twice before anything is seen")
	}
	state.OnLeaderState(LeaderGone, s)
	state.learn(testLease("2", 1, "a", noteOfA, renewed), 3*s, true)
	if act := state.Decide(3 * s); act.Kind != ActLook {
		t.Errorf("after it was refuted, it decides to %s", act.Kind)
	}
}

func TestNoteCountsForItsHolderOnly(t *testing.T) {
	tests := map[string]struct {
		lease *coordinationv1.Lease
		want  string // the holder
	}{
		"a note of the holder": {testLease("1", 1, "a", withNote(holderNote{Holder: "a"})), "a"},
		"a note of the previous holder, which another elector has left in place": {testLease("1", 1, "b", withNote(holderNote{Holder: "a"})), ""},
		"after a release": {testLease("1", 1, "a", withNote(holderNote{Holder: "a"}), released), ""},
		"that is not JSON": {testLease("1", 1, "a", func(l *coordinationv1.Lease) {
			l.Annotations = map[string]string{ProcessAnnotation: "?"}
		}), ""},
		"a Lease without evidence": {testLease("1", 1, "a"), ""},
		"no Lease":                 {nil, ""},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			if got := noteOf(tc.lease).Holder; got != tc.want {
				t.Errorf("got %q, want %q", got, tc.want)
			}
		})
	}
}

func TestEarlyTakeoverKeepsTrust(t *testing.T) {
	const s = time.Second
	for early, want := range map[bool]time.Duration{true: 0, false: 17 * s} {
		state := New("me", testTiming, "", true)
		state.learn(testLease("1", 1, "a", withNote(holderNote{Holder: "a"})), 0, true)
		state.learn(testLease("2", 2, "b", withNote(holderNote{Holder: "b", Early: early})), 2*s, true)
		if state.distrustUntil != want || state.freeAt() != 17*s {
			t.Errorf("after a takeover, early %t, it distrusts until %s, want %s, and waits until %s", early, state.distrustUntil, want, state.freeAt())
		}
	}
}
