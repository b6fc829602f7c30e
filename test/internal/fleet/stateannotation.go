// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package fleet

import "encoding/json"

const (
	// ReloadAnnotation with the value auto makes a Deployment roll when its ConfigMap changes.
	ReloadAnnotation = "quartermaster.dev/reload"
	// StateAnnotation is where the manager records on a Deployment what it knows of the ConfigMap.
	StateAnnotation = "quartermaster.dev/reload-state"
)

// ParseState returns the sources in a state annotation, without the version of the workload; nil if the text
// is not a state.
func ParseState(annotation string) map[string]string {
	var state map[string]string
	if err := json.Unmarshal([]byte(annotation), &state); err != nil {
		return nil
	}
	delete(state, "version")
	return state
}
