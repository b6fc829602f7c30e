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

// ofField is the field of a state that names the workload that it belongs to.
const ofField = "workload"

// State is what was last known of the sources that a workload watches: the first digits of each
// hash, or the empty string for a source known to be absent.
type State map[SourceKey]string

// ParseState reads the state of a workload from an annotation. It returns nil if the text is empty
// or belongs to another workload, from which somebody copied it.
func ParseState(text string, of Key) (State, error) {
	if text == "" {
		return nil, nil
	}
	var raw map[string]string
	if err := json.Unmarshal([]byte(text), &raw); err != nil {
		return nil, fmt.Errorf("not a JSON object of strings: %w", err)
	}
	// The states of the first release have no such field.
	if owner, ok := raw[ofField]; ok && owner != of.String() {
		return nil, nil
	}
	delete(raw, ofField)
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

// Text returns the annotation of a workload. It is empty if nothing is watched; then there is no
// annotation.
func (s State) Text(of Key) string {
	if len(s) == 0 {
		return ""
	}
	raw := make(map[string]string, len(s)+1)
	for key, value := range s {
		raw[key.String()] = value
	}
	raw[ofField] = of.String()
	text, _ := json.Marshal(raw) // a map of strings always marshals, with sorted keys
	return string(text)
}

// StateProblem reports an annotation that ParseState could not read.
func StateProblem(err error) Problem { return Problem{StateKey, err.Error()} }
