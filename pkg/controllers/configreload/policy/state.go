// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"encoding/json"
	"fmt"
	"strings"
)

// stateDigits is how many digits of a source's hash are recorded; 64 bits distinguish its versions.
const stateDigits = 16

// The fields of a state besides the sources.
const (
	ownerField   = "workload" // the owner of the state
	versionField = "version"  // the version of the workload on which the state was recorded
)

// State is what was last known of the sources that a workload watches: the first digits of each
// hash, or the empty string for a source known to be absent.
type State map[SourceKey]string

// ParseState reads the state of a workload from an annotation. It returns nil if the text is empty
// or copied from another workload.
func ParseState(text string, owner QueueKey) (State, error) {
	if text == "" {
		return nil, nil
	}
	var raw map[string]string
	if err := json.Unmarshal([]byte(text), &raw); err != nil {
		return nil, fmt.Errorf("not a JSON object of strings: %w", err)
	}
	// The states of the first release have no owner field.
	if stateOwner, ok := raw[ownerField]; ok && stateOwner != owner.String() {
		return nil, nil
	}
	delete(raw, ownerField)
	delete(raw, versionField)
	s := make(State, len(raw))
	for name, value := range raw {
		key, ok := parseSourceKey(name)
		if !ok {
			return nil, fmt.Errorf("%q is not TYPE/NAME of a source", name)
		}
		if value != "" && (len(value) != stateDigits || strings.Trim(value, "0123456789abcdef") != "") {
			return nil, fmt.Errorf("value of %s is not %d hex digits", key, stateDigits)
		}
		s[key] = value
	}
	return s, nil
}

// Text returns the annotation of a workload, as recorded on a version of it.
func (s State) Text(owner QueueKey, version string) string {
	raw := make(map[string]string, len(s)+2)
	for key, value := range s {
		raw[key.String()] = value
	}
	raw[ownerField] = owner.String()
	if version != "" {
		raw[versionField] = version
	}
	text, _ := json.Marshal(raw) // a map of strings always marshals, with sorted keys
	return string(text)
}

// recordedVersion returns the version of a workload on which a text was recorded; empty if the text has no
// version, or belongs to another workload.
func recordedVersion(text string, owner QueueKey) string {
	var raw map[string]string
	if err := json.Unmarshal([]byte(text), &raw); err != nil || raw[ownerField] != owner.String() {
		return ""
	}
	return raw[versionField]
}

// LatestState returns the later of two states: runState, which a run remembers and may be empty, and the
// annotation of the workload. An older annotation that somebody writes back has its older version in it. The
// write of a predecessor that the cache learns of late has the version from which runState was read, or a
// later one.
func (w *Workload) LatestState(runState string) string {
	if w.Kind.Stateless {
		return runState
	}
	annotation := w.Annotations[StateKey]
	if runState == "" {
		return annotation
	}
	version := recordedVersion(annotation, w.QueueKey)
	if Newer(w.Version, version) && !Newer(recordedVersion(runState, w.QueueKey), version) {
		return annotation
	}
	return runState
}

// IsRecordedOn reports whether the workload's annotation is this state; an empty state has no annotation.
func (s State) IsRecordedOn(workload *Workload) bool {
	annotation, annotated := workload.Annotations[StateKey]
	if len(s) == 0 {
		return !annotated
	}
	return annotation == s.Text(workload.QueueKey, recordedVersion(annotation, workload.QueueKey))
}

// StateProblem reports an annotation that ParseState could not read.
func StateProblem(err error) Problem { return Problem{StateKey, err.Error()} }
