// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package protocol

import (
	"encoding/json"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// A standby may take the Lease before the holder's claim ends if the holder's process seems to have ended
// (rule 11). This evidence only says when to try: until when the term needs a proof does not depend on it.
// pkg/election/witness looks at the process.

// ProcessAnnotation is the annotation of the Lease in which the holder says how standbys reach its
// process. Its value is a holderNote.
const ProcessAnnotation = "quartermaster.dev/leader-process"

// LeaderState is what a standby sees of the leader's process.
type LeaderState string

// What a standby may see.
const (
	LeaderUnknown     LeaderState = "Unknown"     // nothing yet, or there is no process to look at
	LeaderAnswers     LeaderState = "Answers"     // it answers, or has answered before and nothing proves that it ended
	LeaderGone        LeaderState = "Gone"        // it has answered, and seems to have ended
	LeaderUnreachable LeaderState = "Unreachable" // it has never answered this replica
)

// LeaderStates are all the states.
var LeaderStates = []LeaderState{LeaderUnknown, LeaderAnswers, LeaderGone, LeaderUnreachable}

// holderNote is what the holder of the Lease says of itself. It counts only for the holder that it
// names, since other electors leave it in place.
type holderNote struct {
	Holder  string `json:"holder"`
	Address string `json:"address"` // IP and port of its process
	// Early says that the holder took the Lease before its predecessor's claim had ended, so that its own
	// claim covers the predecessor's.
	Early bool `json:"early,omitempty"`
}

// noteOf returns the note of the Lease's holder, empty if there is none.
func noteOf(lease *coordinationv1.Lease) holderNote {
	var note holderNote
	if lease == nil || json.Unmarshal([]byte(lease.Annotations[ProcessAnnotation]), &note) != nil || note.Holder != HolderOf(lease) {
		return holderNote{}
	}
	return note
}

// setNote replaces the note of the last holder, and leaves none if the process cannot be reached.
func setNote(lease *coordinationv1.Lease, note holderNote) {
	delete(lease.Annotations, ProcessAnnotation)
	if note.Address != "" {
		value, _ := json.Marshal(note) // never fails: the note has strings and a flag
		metav1.SetMetaDataAnnotation(&lease.ObjectMeta, ProcessAnnotation, string(value))
	}
}

// LeaderProcess is a process at which a standby looks. The zero LeaderProcess is none.
type LeaderProcess struct{ Holder, Address string }

// targetProcess returns the process at which a standby should look.
func (s *State) targetProcess() LeaderProcess {
	if n := s.note; s.witness && !s.holding && n.Address != "" && n.Holder != s.identity {
		return LeaderProcess{n.Holder, n.Address}
	}
	return LeaderProcess{}
}

// OnLook begins to look at the target process, if any, and returns it.
func (s *State) OnLook() LeaderProcess {
	s.process, s.leader = s.targetProcess(), LeaderUnknown
	return s.process
}

// OnLeaderState processes what is seen of the leader's process.
func (s *State) OnLeaderState(state LeaderState, now time.Duration) {
	s.leader, s.leaderSince = state, now
}

// isLeaderGone reports whether the holder's process seems to have ended.
func (s *State) isLeaderGone() bool {
	return s.leader == LeaderGone && s.process != (LeaderProcess{}) && s.process == s.targetProcess()
}

// weighEvidence processes a later version of the Lease. A renewal shows that the process has not ended,
// unless the renewal was under way when the process seemed to end. The witness, which has stopped looking
// at the process, then looks at it again.
func (s *State) weighEvidence(lease *coordinationv1.Lease, now time.Duration) {
	if lease != nil && s.lease != nil && !lease.Spec.RenewTime.Equal(s.lease.Spec.RenewTime) &&
		s.leader == LeaderGone && now-s.leaderSince > SettleTime {
		s.process, s.leader = LeaderProcess{}, LeaderUnknown
	}
}
