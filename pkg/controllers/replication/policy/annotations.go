// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"encoding/json"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/types"
)

const (
	nativePrefix     = "quartermaster.dev/"
	reflectorPrefix  = "reflector.v1.k8s.emberstack.com/"
	replicatorPrefix = "replicator.v1.mittwald.de/"
)

// The annotations. Users write the first group of each dialect, and controllers the second.
const (
	PushTo    = nativePrefix + "push-to"
	AllowPull = nativePrefix + "allow-pull"
	PullFrom  = nativePrefix + "pull-from"
	Marker    = nativePrefix + "source"

	reflectionAllowed            = reflectorPrefix + "reflection-allowed"
	allowedNamespaces            = reflectorPrefix + "reflection-allowed-namespaces"
	allowedSelector              = reflectorPrefix + "reflection-allowed-namespaces-selector"
	autoEnabled                  = reflectorPrefix + "reflection-auto-enabled"
	autoNamespaces               = reflectorPrefix + "reflection-auto-namespaces"
	autoSelector                 = reflectorPrefix + "reflection-auto-namespaces-selector"
	reflects                     = reflectorPrefix + "reflects"
	autoReflects                 = reflectorPrefix + "auto-reflects"
	reflectedVersion             = reflectorPrefix + "reflected-version"
	reflectedAt                  = reflectorPrefix + "reflected-at"
	replicateTo                  = replicatorPrefix + "replicate-to"
	replicateToMatching          = replicatorPrefix + "replicate-to-matching"
	replicationAllowed           = replicatorPrefix + "replication-allowed"
	replicationAllowedNamespaces = replicatorPrefix + "replication-allowed-namespaces"
	replicateFrom                = replicatorPrefix + "replicate-from"
	stripLabels                  = replicatorPrefix + "strip-labels"
	keepOwners                   = replicatorPrefix + "keep-owner-references"
	replicatedAt                 = replicatorPrefix + "replicated-at"
	replicatedFrom               = replicatorPrefix + "replicated-from-version"
	replicatedKeys               = replicatorPrefix + "replicated-keys"
)

// annotations are all keys that decisions depend on.
var annotations = []string{
	Marker, PushTo, AllowPull, PullFrom,
	reflectionAllowed, allowedNamespaces, allowedSelector, autoEnabled, autoNamespaces, autoSelector, reflects, autoReflects,
	replicateTo, replicateToMatching, replicationAllowed, replicationAllowedNamespaces, replicateFrom, stripLabels, keepOwners,
	replicatedFrom, replicatedKeys,
}

// copyAnnotations are the annotations that a controller of each dialect writes to a copy. A pull target
// keeps its user's annotations.
var copyAnnotations = map[Dialect][]string{
	Native:     {Marker},
	Reflector:  {reflects, autoReflects, reflectedVersion, reflectedAt},
	Replicator: {replicatedAt, replicatedFrom, replicatedKeys},
}

// marker is the value of the annotation Marker. It names the source of the object's data.
type marker struct {
	Copy    string   `json:"copy"`
	Dialect Dialect  `json:"dialect"`
	Labels  []string `json:"labels,omitempty"`
	Mode    Mode     `json:"mode"`
	Source  string   `json:"source"`
	UID     string   `json:"uid"`

	sourceName types.NamespacedName // Source, parsed
}

func (m *marker) text() string {
	text, _ := json.Marshal(m) // strings only
	return string(text)
}

// parseMarker returns the marker of the object, or nil if none counts: a marker that was pasted or
// restored elsewhere does not count.
func parseMarker(obj *Object) *marker {
	text, has := obj.Annotations[Marker]
	var m marker
	if !has || json.Unmarshal([]byte(text), &m) != nil || m.Copy != obj.NamespacedName.String() || !slices.Contains(Dialects, m.Dialect) {
		return nil
	}
	var ok bool
	m.sourceName, ok = parseReference(m.Source)
	switch {
	case !ok || m.Mode != Push && m.Mode != Pull:
		return nil
	case m.Mode == Push && (m.sourceName.Name != obj.Name || m.sourceName.Namespace == obj.Namespace):
		return nil
	}
	return &m
}

// parseReference parses namespace/name.
func parseReference(text string) (types.NamespacedName, bool) {
	namespace, name, _ := strings.Cut(text, "/")
	namespace, name = strings.TrimSpace(namespace), strings.TrimSpace(name)
	return types.NamespacedName{Namespace: namespace, Name: name}, namespace != "" && name != "" && !strings.Contains(name, "/")
}

// parseKeys parses the annotation replicated-keys. An empty one has no key.
func parseKeys(text string) []string {
	return strings.FieldsFunc(text, func(r rune) bool { return r == ',' })
}
