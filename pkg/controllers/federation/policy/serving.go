// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

// Serving is whether a cluster serves a type.
type Serving string

// States of a type in a cluster. NotListed is the state until the first list is complete.
const (
	NotListed Serving = "NotListed"
	Synced    Serving = "Synced"
	Absent    Serving = "Absent"
	Forbidden Serving = "Forbidden"
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
