// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package configreload

import (
	"encoding/json"
	"fmt"
	"strings"
)

// stateDigits is how many digits of a source's hash are recorded; 64 bits distinguish its versions.
const stateDigits = 16

// maxStateBytes is the maximum length of the annotation. The API server accepts 256 KiB of
// annotations per object, and others need room too.
const maxStateBytes = 64 << 10

// state is what was last known of the sources that a workload watches: the first digits of each
// hash, or the empty string for a source known to be absent.
type state map[sourceKey]string

// parseState reads a state annotation.
func parseState(text string) (state, error) {
	var raw map[string]string
	if err := json.Unmarshal([]byte(text), &raw); err != nil {
		return nil, fmt.Errorf("not a JSON object of strings: %w", err)
	}
	s := make(state, len(raw))
	for name, value := range raw {
		key, ok := parseSourceKey(name)
		if !ok {
			return nil, fmt.Errorf("%q is not configmap/NAME or secret/NAME", name)
		}
		if value != "" && (len(value) != stateDigits || strings.Trim(value, "0123456789abcdef") != "") {
			return nil, fmt.Errorf("value of %s is not %d hex digits", key, stateDigits)
		}
		s[key] = value
	}
	return s, nil
}

// String returns the text of the annotation. It is empty if nothing is watched; then there is no
// annotation.
func (s state) String() string {
	if len(s) == 0 {
		return ""
	}
	raw := make(map[string]string, len(s))
	for key, value := range s {
		raw[key.String()] = value
	}
	text, _ := json.Marshal(raw) // a map of strings always marshals, with sorted keys
	return string(text)
}

// annotation returns String, or the empty string for a state that is too large and is kept in
// memory.
func (s state) annotation() string {
	if text := s.String(); len(text) <= maxStateBytes {
		return text
	}
	return ""
}

func (s state) tooLarge() bool { return len(s) > 0 && s.annotation() == "" }

// mark is the value of the annotation that marks a template, with the fields in the order in which
// the original writes them.
type mark struct {
	Type          string   `json:"type"`
	Name          string   `json:"name"`
	Namespace     string   `json:"namespace"`
	Hash          string   `json:"hash"`
	ContainerRefs []string `json:"containerRefs"`
	ObservedAt    int64    `json:"observedAt"`
}

// marksSource reports whether the annotation's text is a mark of this source at this hash.
func marksSource(text, namespace string, key sourceKey, hash string) bool {
	var m mark
	if text == "" || json.Unmarshal([]byte(text), &m) != nil {
		return false
	}
	return m.Type == key.typ.mark() && m.Name == key.name && m.Namespace == namespace && m.Hash == hash
}
