// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package protocol

import (
	"encoding/json"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// A standby may take the Lease before the holder's claim ends if it has evidence that the holder's
// process is gone or silent, and the fence in the API server is in force (rule 11). The evidence says when
// to try, and nothing else depends on it: what the term owes then does not. pkg/election/witness looks for
// it.

// ProcessAnnotation is the annotation of the Lease in which the holder says how standbys reach its
// process. Its value is a holderNote.
const ProcessAnnotation = "quartermaster.dev/leader-process"

// Process says how standbys reach a process. The zero Process cannot be reached.
type Process struct {
	Address     string `json:"address"`          // IP and port
	Certificate string `json:"certificate"`      // the SHA-256 of the one that no other process has
	PodUID      string `json:"podUID,omitempty"` // of the Pod that it runs in
}

// LeaderState is what a standby sees of the leader's process.
type LeaderState string

// What a standby may see.
const (
	LeaderUnknown     LeaderState = "Unknown"     // nothing yet, or there is nobody to look at
	LeaderAnswers     LeaderState = "Answers"     //
	LeaderSilent      LeaderState = "Silent"      // it has answered, and does not for a while
	LeaderGone        LeaderState = "Gone"        // it has answered, and seems to have ended
	LeaderUnreachable LeaderState = "Unreachable" // it has never answered this replica
)

// LeaderStates are all of them.
var LeaderStates = []LeaderState{LeaderUnknown, LeaderAnswers, LeaderSilent, LeaderGone, LeaderUnreachable}

// holderNote is what the holder of the Lease says of itself. It counts only for the holder that it
// names, since other electors leave it in place.
type holderNote struct {
	Holder string `json:"holder"`
	Process
	// Early is what the holder saw of its predecessor if it took the Lease before the predecessor's claim
	// ended, else empty. It says that the holder carries the obligation, see Obligation.
	Early LeaderState `json:"early,omitempty"`
}

// noteOf returns the note of the Lease's holder, empty if it has none.
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
	if note.Process == (Process{}) {
		return
	}
	value, _ := json.Marshal(note) // of strings
	metav1.SetMetaDataAnnotation(&lease.ObjectMeta, ProcessAnnotation, string(value))
}

// earlyAt returns from when on the evidence lets this replica try to take the Lease before the holder's
// claim ends (rule 11), or never.
func (p *State) earlyAt() time.Duration {
	if !p.fenced || p.watched == (watched{}) || p.watched != p.watchable() {
		return never
	}
	switch p.leader {
	case LeaderGone:
		return p.leaderSince
	case LeaderSilent:
		return max(p.leaderSince, p.claim-p.duration+p.own.unheardFor())
	}
	return never
}

// watched is a process whose leadership is watched.
type watched struct {
	holder  string
	process Process
}

// watchable returns the process at which a standby looks, empty if there is none.
func (p *State) watchable() watched {
	if n := p.note; p.witness && !p.holding && n.Process != (Process{}) && n.Holder != p.identity {
		return watched{holder: n.Holder, process: n.Process}
	}
	return watched{}
}

// Watched returns the holder and the process that this replica looks at.
func (p *State) Watched() (holder string, process Process) {
	return p.watched.holder, p.watched.process
}

// OnLook begins to look at the process that is watchable now, if any.
func (p *State) OnLook() {
	p.watched, p.leader = p.watchable(), LeaderUnknown
}

// OnLeader processes what is seen of the leader's process.
func (p *State) OnLeader(state LeaderState, now time.Duration) {
	p.leader, p.leaderSince = state, now
}

// OnServerFence processes whether the fence in the API server is in force.
func (p *State) OnServerFence(enforced bool) {
	p.fenced = enforced
}

// weighEvidence processes a later version of the Lease. A renewal refutes the evidence: silence was
// the connection's. One that was under way when the process ended does not. What is refuted is looked at
// anew: nothing more would be seen of a process that seemed gone, or of a connection that was cut. Without
// this, a leader whose connections were cut once loses the Lease by the first renewal that is late.
func (p *State) weighEvidence(lease *coordinationv1.Lease, now time.Duration) {
	if lease == nil || p.lease == nil || lease.Spec.RenewTime.Equal(p.lease.Spec.RenewTime) {
		return
	}
	if p.leader == LeaderSilent || p.leader == LeaderGone && now-p.leaderSince > SettleTime {
		p.watched, p.leader = watched{}, LeaderUnknown
	}
}
