// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import "time"

// Serving is whether a cluster serves a type.
type Serving int

// States of a type in a cluster. NotListed is the state until the first list is complete.
const (
	NotListed Serving = iota
	Synced
	Absent
	Forbidden
)

// Status returns what the federated object reports of a cluster in this state, or "" if its cache can be
// used. The cache of a type that is absent counts as empty.
func (s Serving) Status() string {
	switch s {
	case Synced:
		return ""
	case Absent:
		return APINotAvailable
	case Forbidden:
		return RetrievalFailed
	}
	return CachedRetrievalFailed
}

const (
	minAbsent      = time.Second
	maxAbsent      = 5 * time.Minute
	forbiddenRetry = time.Minute
)

// ServingState is the state of a type in a cluster. The zero value is for a cluster that has just
// become ready.
type ServingState struct {
	State Serving
	// Retry is how long after the answer to ask again; 0 is never.
	Retry time.Duration
}

// After returns the state after an answer.
func (s ServingState) After(state Serving) ServingState {
	switch state {
	case Absent:
		if s.State == Absent {
			return ServingState{Absent, min(2*s.Retry, maxAbsent)}
		}
		return ServingState{Absent, minAbsent}
	case Forbidden:
		return ServingState{Forbidden, forbiddenRetry}
	}
	return ServingState{State: state}
}
