// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package election

import (
	"context"
	"encoding/json"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
)

// A standby may take the Lease before the holder's claim ends if it has evidence that the holder's
// process is gone or silent, and the fence in the API server is in force (rule 12). This file has the
// words in which evidence is passed on; pkg/election/witness looks for it.

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
	LeaderGone        LeaderState = "Gone"        // it has answered, and has ended
	LeaderUnreachable LeaderState = "Unreachable" // it has never answered this replica
)

var leaderStates = []LeaderState{LeaderUnknown, LeaderAnswers, LeaderSilent, LeaderGone, LeaderUnreachable}

// Witness looks at the leader's process.
type Witness interface {
	// Watch calls report with what it sees of the process, whenever that changes, until ctx ends.
	// LeaderGone must be certain.
	Watch(ctx context.Context, process Process, report func(LeaderState))
}

// holderNote is what the holder of the Lease says of itself. It counts only for the holder that it
// names, since other electors leave it in place.
type holderNote struct {
	Holder string `json:"holder"`
	Process
	// Evidence is what the holder saw of the one before if it took the Lease before that one's claim
	// ended, else empty.
	Evidence LeaderState `json:"takenOver,omitempty"`
	// Mistaken is set by the holder before if it was alive.
	Mistaken bool `json:"mistaken,omitempty"`
}

// noteOf returns the note of the Lease's holder, empty if it has none.
func noteOf(lease *coordinationv1.Lease) holderNote {
	var note holderNote
	if lease == nil || json.Unmarshal([]byte(lease.Annotations[ProcessAnnotation]), &note) != nil || note.Holder != holderOf(lease) {
		return holderNote{}
	}
	return note
}

// setNote replaces the note of the holder before, and leaves none if the process cannot be reached.
func setNote(lease *coordinationv1.Lease, note holderNote) {
	delete(lease.Annotations, ProcessAnnotation)
	if note.Process == (Process{}) {
		return
	}
	value, _ := json.Marshal(note) // of strings
	metav1.SetMetaDataAnnotation(&lease.ObjectMeta, ProcessAnnotation, string(value))
}

// takeover says how the term of this replica has begun if that was before the claim of the holder
// before had ended.
type takeover struct {
	evidence LeaderState   // empty: the claim had ended
	claim    time.Duration // when it ends
}

// unheardFor returns after which time without a renewal the next one is overdue: not yet the second.
func (t timing) unheardFor() time.Duration {
	return t.retry * 7 / 4
}

// earlyAt returns from when on the evidence lets this replica take the Lease before the holder's claim
// ends (rule 12), or never.
func (p *protocol) earlyAt() time.Duration {
	if !p.fenced || p.watched == (watched{}) || p.watched != p.watchable() {
		return never
	}
	at := never
	switch p.leader {
	case LeaderGone:
		at = p.leaderSince
	case LeaderSilent:
		at = max(p.leaderSince, p.claim-p.duration+p.own.unheardFor())
	}
	return max(at, p.distrust, p.cautious)
}

// watched is a process whose leadership is watched.
type watched struct {
	holder  string
	process Process
}

// watchable returns the process at which a standby looks, empty if there is none.
func (p *protocol) watchable() watched {
	if n := p.note; p.witness && !p.holding && n.Process != (Process{}) && n.Holder != p.identity {
		return watched{holder: n.Holder, process: n.Process}
	}
	return watched{}
}

// onLook begins to look at the process that is watchable now, if any.
func (p *protocol) onLook() {
	p.watched, p.leader = p.watchable(), LeaderUnknown
}

// onLeader processes what is seen of the leader's process.
func (p *protocol) onLeader(state LeaderState, now time.Duration) {
	p.leader, p.leaderSince = state, now
}

// onServerFence processes whether the fence in the API server is in force.
func (p *protocol) onServerFence(enforced bool) {
	p.fenced = enforced
}

// weighEvidence processes a later version of the Lease. A renewal refutes the evidence: silence was
// the connection's. One that was under way when the process ended does not. What is refuted is looked at
// anew: nothing more would be seen of a process that seemed gone, or of a connection that was cut.
func (p *protocol) weighEvidence(lease *coordinationv1.Lease, now time.Duration) {
	if note := noteOf(lease); note.Mistaken && (!p.note.Mistaken || p.note.Holder != note.Holder) {
		p.cautious = now + p.own.lease
	}
	if lease == nil || p.lease == nil || lease.Spec.RenewTime.Equal(p.lease.Spec.RenewTime) {
		return
	}
	if p.leader == LeaderSilent || p.leader == LeaderGone && now-p.leaderSince > settleTime {
		p.watched, p.leader = watched{}, LeaderUnknown
	}
}

// isMistaken reports whether another has taken the Lease before the claim of this replica, which is
// alive, has ended.
func (p *protocol) isMistaken(now time.Duration) bool {
	return p.lost == ReasonHolderChanged && now < p.sent+p.own.deadline && p.note.Evidence != ""
}

// objectionTimeout bounds the last write of a former leader.
const objectionTimeout = time.Second

// objectToTakeover notes in the Lease that this replica was alive when another took it on evidence, so
// that all are cautious for a while. It is the last thing that a former leader does to the Lease, and
// conditional as every write.
func (e *elector) objectToTakeover(ctx context.Context) {
	if !e.protocol.isMistaken(e.now()) {
		return
	}
	klog.FromContext(ctx).Error(nil, "Another replica took this one for dead and has taken the lease", "lease", e.lock.lease,
		"holder", e.protocol.note.Holder, "evidence", e.protocol.note.Evidence)
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), objectionTimeout)
	defer cancel()
	err := e.lock.writeMistaken(ctx)
	for apierrors.IsConflict(err) { // it was renewed
		err = e.lock.writeMistaken(ctx)
	}
	if err != nil {
		klog.FromContext(ctx).Error(err, "Failed to say so in the lease", "lease", e.lock.lease)
	}
}

// writeMistaken notes in the Lease that its holder should not have taken it.
func (l *Lock) writeMistaken(ctx context.Context) error {
	lease, err := l.who.Client.Get(ctx, l.lease.Name, metav1.GetOptions{})
	note := noteOf(lease)
	if err != nil || note.Evidence == "" || note.Holder == l.who.Identity {
		return err
	}
	lease, note.Mistaken = lease.DeepCopy(), true
	setNote(lease, note)
	_, err = l.who.Client.Update(ctx, lease, metav1.UpdateOptions{})
	return err
}
