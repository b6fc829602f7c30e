// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/types"
)

// roleKind is what an object is to this controller.
type roleKind int

const (
	// foreign objects are never written to.
	foreign roleKind = iota
	// pushSource says where its copies go.
	pushSource
	// pullTarget names its source. A write may be due for pullTarget and the kinds below.
	pullTarget
	// pushCopy was made by a push.
	pushCopy
	// unmarkedCopy was made by the replicator, which leaves no trace of the source. It is a copy
	// only if a push of that dialect covers it.
	unmarkedCopy
)

type role struct {
	kind    roleKind
	dialect Dialect
	source  types.NamespacedName // the source of a pullTarget or pushCopy
	marker  *marker              // the valid marker, if any
	problem *Problem             // the problem of a pullTarget whose annotations cannot be followed
}

// roleOf returns the role of an object, which may be nil. The first rule that fits decides.
func (o *Options) roleOf(obj *Object) role {
	if obj == nil || len(obj.Annotations) == 0 {
		return role{}
	}
	a := obj.Annotations
	m := parseMarker(obj)
	automatic := isTrue(a[autoReflects])
	pull, pulls := o.pullRole(obj, automatic)
	source, ok := parseReference(a[reflects])
	reflected := ok && automatic && o.Reflector && source.Name == obj.Name && source.Namespace != obj.Namespace
	switch {
	case pulls:
		pull.marker = m
		return pull
	case m != nil && m.Mode == Push:
		return role{kind: pushCopy, dialect: m.Dialect, source: m.sourceName, marker: m}
	case reflected && obj.UserMade: // a mirror that the reflector took over
		return role{kind: pullTarget, dialect: Reflector, source: source}
	case reflected:
		return role{kind: pushCopy, dialect: Reflector, source: source}
	case o.hasAnyPushKey(obj):
		return role{kind: pushSource}
	case m == nil && o.Replicator && obj.hasAnnotation(replicatedFrom) && obj.hasAnnotation(replicatedKeys):
		// With a marker, it would be a pull target that was detached.
		return role{kind: unmarkedCopy, dialect: Replicator}
	}
	return role{kind: foreign}
}

// pullRole returns the role that the pull keys of obj ask for. It returns false if there are none.
func (o *Options) pullRole(obj *Object, automatic bool) (pull role, found bool) {
	for _, p := range []struct {
		dialect Dialect
		key     string
	}{{Native, PullFrom}, {Reflector, reflects}, {Replicator, replicateFrom}} {
		text, has := obj.Annotations[p.key]
		if !has || !o.enabled(p.dialect) || p.dialect == Reflector && (automatic || strings.TrimSpace(text) == "") {
			continue
		}
		source, ok := parseReference(text)
		switch {
		case !ok:
			pull.problem = &Problem{obj.Key, InvalidAnnotation, p.key + " is not namespace/name"}
		case found && source != pull.source && pull.problem == nil:
			pull.problem = &Problem{obj.Key, ConflictingAnnotations, p.key + " names another source than an annotation of another dialect"}
		}
		if !found {
			pull.kind, pull.dialect, pull.source = pullTarget, p.dialect, source
		}
		found = true
	}
	return pull, found
}

func (o *Options) hasAnyPushKey(obj *Object) bool {
	return slices.ContainsFunc(Dialects, func(dialect Dialect) bool { return o.hasPushKey(obj, dialect) })
}

// hasPushKey reports whether an object has a push key of a dialect that is switched on.
func (o *Options) hasPushKey(obj *Object, dialect Dialect) bool {
	switch {
	case !o.enabled(dialect):
		return false
	case dialect == Reflector:
		return isTrue(obj.Annotations[autoEnabled])
	case dialect == Replicator:
		return obj.hasAnnotation(replicateTo) || obj.hasAnnotation(replicateToMatching)
	}
	return obj.hasAnnotation(PushTo)
}

// isTrue is how the reflector reads a boolean.
func isTrue(text string) bool { return strings.EqualFold(strings.TrimSpace(text), "true") }

// SourceOf returns the source that an object refers to, for an index, and how: as the source of a copy,
// or of a pull target. The mode is empty if the object refers to no source.
func (o *Options) SourceOf(obj *Object) (source types.NamespacedName, mode Mode) {
	switch r := o.roleOf(obj); r.kind {
	case pullTarget:
		return r.source, Pull
	case pushCopy:
		return r.source, Push
	}
	return source, ""
}

// Pushes reports whether an object is a source that pushes.
func (o *Options) Pushes(obj *Object) bool { return o.roleOf(obj).kind == pushSource }
