// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package protocol decides what a replica does in an election, by the rules of
// docs/adr/0003-leader-election.md. It makes no request and reads no clock: callers pass in the
// times of the replica's own clock.
//
// State has everything that the rules depend on. State.Decide says what to do next, and the methods
// named On... record what has happened. state.go has Decide, and the methods On... of requests;
// term.go has those of this replica's term, evidence.go those of the leader's process. learn.go has
// what follows from a version of the Lease, lease.go the record on the wire, timing.go durations
// and failures.
package protocol

import (
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
)

// ActionKind is a kind of Action.
type ActionKind string

// What a replica may do next.
const (
	ActWait    ActionKind = "wait"    // wait for an event or for the time Until
	ActRead    ActionKind = "read"    // read the Lease
	ActWatch   ActionKind = "watch"   // watch the Lease
	ActCreate  ActionKind = "create"  // create the Lease; only a later ActAcquire begins a term
	ActAcquire ActionKind = "acquire" // take the Lease from the last holder
	ActRenew   ActionKind = "renew"   // renew the Lease
	ActRelease ActionKind = "release" // release the Lease
	ActLook    ActionKind = "look"    // look at another process
	ActLead    ActionKind = "lead"    // start lead
	ActGiveUp  ActionKind = "give up" // give up the attempt to lead
	ActEnd     ActionKind = "end"     // return from Run
)

// Action is what a replica does next.
type Action struct {
	Kind   ActionKind
	Until  time.Duration // of ActWait
	Reason Reason        // of ActEnd
	// ProofUntil is the end of the predecessors' last claim, if an ActAcquire takes the Lease before that end;
	// otherwise 0. Until then the term may not write unless every API server has refused the predecessors,
	// and may not be released: the next holder would not wait for the predecessors.
	ProofUntil time.Duration
}

// Reason says why a term ended or why a replica did not get the Lease.
type Reason string

// The reasons why a term ends.
const (
	ReasonReleased      Reason = "Released"      // after the drain
	ReasonRenewDeadline Reason = "RenewDeadline" // no renewal succeeded in time
	ReasonHolderChanged Reason = "HolderChanged" // the Lease names somebody else
	ReasonLeaseReplaced Reason = "LeaseReplaced" // the Lease was deleted and created anew
	ReasonLeaseDeleted  Reason = "LeaseDeleted"  // the Lease was deleted
	ReasonDrainTimeout  Reason = "DrainTimeout"  // lead or its writes did not end in time
	ReasonReleaseFailed Reason = "ReleaseFailed" // lead returned, but the release failed
	ReasonUnauthorized  Reason = "Unauthorized"  // the API server does not accept the replica's credentials any more
	ReasonStoreRestored Reason = "StoreRestored" // the API server shows an earlier version of the Lease than before
	ReasonCannotLead    Reason = "CannotLead"    // the API server's fence did not admit this replica
	ReasonNeverLed      Reason = "NeverLed"      // the replica was stopped before it led
)

// EndReasons are the reasons why a term ends.
var EndReasons = []Reason{ReasonReleased, ReasonRenewDeadline, ReasonHolderChanged, ReasonLeaseReplaced, ReasonLeaseDeleted,
	ReasonDrainTimeout, ReasonReleaseFailed, ReasonUnauthorized, ReasonStoreRestored, ReasonCannotLead}

// View shows the state to people.
type View struct {
	Lease    *coordinationv1.Lease // the newest version, nil if there is none or none is known
	Watching bool

	Holding    bool
	Term       Term
	Deadline   time.Duration // when the term ends
	Expires    time.Duration // when others may take over
	ProofUntil time.Duration // as in Action
	Leading    bool          // lead has started and may write
	Stopping   bool

	Leader LeaderState // what a standby sees of the leader's process
}

// View returns what is shown of the state.
func (s *State) View() View {
	v := View{
		Lease: s.lease, Watching: s.watchUp, Holding: s.holding, ProofUntil: s.proofUntil,
		Leading: s.leading && !s.leadReturned, Stopping: s.stopping || s.leadReturned, Leader: LeaderUnknown,
	}
	if s.holding {
		v.Term, v.Deadline, v.Expires = s.term, s.Deadline(), s.sent+s.timing.Lease
	} else if s.leader != "" {
		v.Leader = s.leader
	}
	return v
}
