// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package policy decides which Secrets and ConfigMaps are copied, and what a copy holds. It is
// pure: it reads a [View], which is the cache, with or without live objects laid over it, and returns a
// [Plan].
//
//	annotations.go  the keys of the three dialects, and the marker
//	patterns.go     the grammars in which annotations name namespaces
//	object.go       what is known of an object: hashes in place of values
//	roles.go        what an object is: a source, a pull target, a copy, or foreign
//	claims.go       which namespaces a source wants or allows
//	decide.go       the decision on one target
//	content.go      what a target holds afterwards
//
// An annotation that does not parse, or cannot be evaluated, makes a claim held: nothing is created,
// updated or deleted because of the claim.
package policy

import (
	"time"

	"k8s.io/apimachinery/pkg/types"
)

// Kind is a kind of object. The kinds never mix.
type Kind string

// Kinds of objects that are copied.
const (
	Secret    Kind = "Secret"
	ConfigMap Kind = "ConfigMap"
)

// Kinds are all kinds.
var Kinds = []Kind{Secret, ConfigMap}

// Key names an object.
type Key struct {
	Kind Kind
	types.NamespacedName
}

// NewKey returns the key of an object.
func NewKey(kind Kind, namespace, name string) Key {
	return Key{kind, types.NamespacedName{Namespace: namespace, Name: name}}
}

func (k Key) String() string { return string(k.Kind) + " " + k.NamespacedName.String() }

// Dialect is a set of annotations. The dialects are sorted by precedence.
type Dialect string

// The dialects. Reflector is emberstack/kubernetes-reflector's, Replicator mittwald/kubernetes-replicator's.
const (
	Native     Dialect = "native"
	Reflector  Dialect = "reflector"
	Replicator Dialect = "replicator"
)

// Dialects are all dialects, by precedence.
var Dialects = []Dialect{Native, Reflector, Replicator}

// Mode is who asks for data to be copied: the source, or the target.
type Mode string

// Modes of a claim: by the source or by the target.
const (
	Push Mode = "push"
	Pull Mode = "pull"
)

// Options are the flags that decisions depend on.
type Options struct {
	// Reflector and Replicator switch on the dialects of the originals.
	Reflector, Replicator bool
	// AllowAll makes every object a permitted source of replicator pulls, and AllowConfigMaps every
	// ConfigMap.
	AllowAll, AllowConfigMaps bool
	// MarkAdopted adds a marker to a replicator push copy that has none.
	MarkAdopted bool
	// DeletionGrace is how long a copy must be unwanted before it is deleted.
	DeletionGrace time.Duration
	// PushNamespaces says in which namespaces a push counts, in the grammar of push-to. If it is empty,
	// a native push counts nowhere, and a push in another dialect everywhere.
	PushNamespaces string
	// MaxSpread limits the bytes of a source times the namespaces that it is pushed to; 0 is no limit.
	MaxSpread int64
	// ProtectedNamespaces and ProtectedNames are globs of namespaces and names that no push writes
	// to. DeniedLabels are globs of the keys of labels that are not copied.
	ProtectedNamespaces, ProtectedNames, DeniedLabels []string
	// NoNamespaces says that Namespaces cannot be read, so that selectors of their labels are held.
	NoNamespaces bool
}

func (o *Options) enabled(dialect Dialect) bool {
	return dialect == Native || dialect == Reflector && o.Reflector || dialect == Replicator && o.Replicator
}

// Namespace is what is known of a namespace.
type Namespace struct {
	Name        string
	Created     time.Time // zero if it is not known
	Labels      map[string]string
	Terminating bool
}

// The label of a namespace, and its values.
const (
	NamespaceLabel = "quartermaster.dev/replication"
	labelDisabled  = "disabled"
	labelPullOnly  = "pull-only"
)

func (n *Namespace) isLabelled(value string) bool {
	return n != nil && n.Labels[NamespaceLabel] == value
}

// Problem is what the owner of an object should know.
type Problem struct {
	Object       Key
	Reason, Text string
}

// The reasons of problems.
const (
	InvalidAnnotation      = "InvalidAnnotation"
	InvalidPattern         = "InvalidPattern"
	PatternTimeout         = "PatternTimeout"
	AmbiguousPattern       = "AmbiguousPattern"
	UnsupportedType        = "UnsupportedType"
	ConflictingAnnotations = "ConflictingAnnotations"
	PermissionDenied       = "PermissionDenied"
	PushForbidden          = "PushForbidden"
	NamespaceProtected     = "NamespaceProtected"
	TargetExists           = "TargetExists"
	TargetClaimed          = "TargetClaimed"
	TargetImmutable        = "TargetImmutable"
	TypeConflict           = "TypeConflict"
	SourceDeleted          = "SourceDeleted"
	ReplicationCycle       = "ReplicationCycle"
	SpreadExceeded         = "SpreadExceeded"
	TooManyKeys            = "TooManyKeys"
	OwnerReferenceDropped  = "OwnerReferenceDropped"
)

// Answer is whether a source wants a target, or permits it the source's data.
type Answer int

// Answers of a source.
const (
	No Answer = iota
	Held
	Yes
)

// Verdict is an answer and, if it is held, why.
type Verdict struct {
	Answer
	Reason, Text string
}

var (
	yes = Verdict{Answer: Yes}
	no  = Verdict{Answer: No}
)

func held(reason, text string) Verdict { return Verdict{Held, reason, text} }

func verdict(wanted bool) Verdict {
	if wanted {
		return yes
	}
	return no
}

// or returns yes if one of the two verdicts is yes, else held if one is held.
func (v Verdict) or(other Verdict) Verdict {
	if other.Answer > v.Answer {
		return other
	}
	return v
}

// and returns no if one of the two verdicts is no, else held if one is held.
func (v Verdict) and(other Verdict) Verdict {
	if other.Answer < v.Answer {
		return other
	}
	return v
}
