// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package policy decides what the controller ttl may delete, and when. It is pure: it has no clock
// and sends no requests.
package policy

import (
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/internal/glob"
)

// Options are the rules that flags set.
type Options struct {
	// Families are the families whose annotations count.
	Families []Family
	// Include and Exclude select types: plural, plural.group, *.group or *. Exclude wins.
	Include, Exclude []string
	// IncludeNamespaces and ExcludeNamespaces are names or globs with *; no IncludeNamespaces means
	// all. They apply to the objects inside and to the Namespace itself.
	IncludeNamespaces, ExcludeNamespaces []string
	// ClusterScoped permits types without namespaces.
	ClusterScoped bool
	// JanitorClusterScoped lets kube-janitor's annotations count on types without namespaces. On
	// Namespaces they always count.
	JanitorClusterScoped bool
	// AllowProtected lifts protections: nodes, persistentvolumes, customresourcedefinitions,
	// in:NAMESPACE for the objects in it, namespace:NAME for the Namespace.
	AllowProtected []string
	// OwnNamespaces are the namespace that the manager runs in, and others on which it depends.
	OwnNamespaces []string
}

// Type is a type of objects.
type Type struct {
	schema.GroupVersionResource
	Kind       string
	Namespaced bool
}

var (
	namespaces  = schema.GroupResource{Resource: "namespaces"}
	replicaSets = schema.GroupResource{Group: "apps", Resource: "replicasets"}
	// revisions, like some ReplicaSets, have copies of their owner's annotations.
	revisions = schema.GroupResource{Group: "apps", Resource: "controllerrevisions"}
	pods      = schema.GroupResource{Resource: "pods"}
)

// protectedTypes are not even watched unless allowed by their name.
var protectedTypes = []schema.GroupResource{
	{Resource: "nodes"}, {Resource: "persistentvolumes"}, {Group: "apiextensions.k8s.io", Resource: "customresourcedefinitions"},
}

var protectedNamespaces = []string{metav1.NamespaceSystem, metav1.NamespacePublic, "kube-node-lease"}

const (
	allowInside    = "in:"
	allowNamespace = "namespace:"
)

// Validate calls bad with every mistake, and with the name of the flag without the prefix.
func (o *Options) Validate(bad func(flag, format string, args ...any)) {
	for _, family := range o.Families {
		if !slices.Contains(Families, family) {
			bad("annotations", "must be one of native, ttl-controller, janitor, got %q", family)
		}
	}
	for flag, items := range map[string][]string{"include-resources": o.Include, "exclude-resources": o.Exclude} {
		for _, item := range items {
			if plural, _, _ := strings.Cut(item, "."); plural == "" || plural != "*" && strings.Contains(item, "*") || strings.ContainsAny(item, " /") {
				bad(flag, "%q must be one of plural, plural.group, *.group, *", item)
			}
		}
	}
	for flag, items := range map[string][]string{"include-namespaces": o.IncludeNamespaces, "exclude-namespaces": o.ExcludeNamespaces} {
		for _, item := range items {
			if why := glob.Check(item, glob.MaxNamespace); why != "" {
				bad(flag, "%q %s", item, why)
			} else if strings.Trim(item, "abcdefghijklmnopqrstuvwxyz0123456789-*") != "" {
				bad(flag, "%q is not the name of a namespace, in which * stands for anything", item)
			}
		}
	}
	for _, item := range o.AllowProtected {
		known := slices.ContainsFunc(protectedTypes, func(t schema.GroupResource) bool { return t.Resource == item })
		for _, prefix := range []string{allowInside, allowNamespace} {
			known = known || strings.HasPrefix(item, prefix) && len(item) > len(prefix)
		}
		if !known {
			bad("allow-protected", "%q must be one of nodes, persistentvolumes, customresourcedefinitions, in:NAMESPACE, namespace:NAME", item)
		}
	}
}

// Watches reports whether objects of a type may be deleted at all.
func (o *Options) Watches(t Type) bool {
	gr := t.GroupResource()
	matches := func(item string) bool { return itemMatches(item, gr) }
	switch {
	case gr == revisions, !t.Namespaced && !o.ClusterScoped, slices.ContainsFunc(o.Exclude, matches):
		return false
	case slices.Contains(protectedTypes, gr) && !slices.Contains(o.AllowProtected, gr.Resource):
		return false
	}
	return slices.ContainsFunc(o.Include, matches)
}

// Unmatched returns the items of Include that name none of the types.
func (o *Options) Unmatched(types []Type) (items []string) {
	for _, item := range o.Include {
		if !slices.ContainsFunc(types, func(t Type) bool { return itemMatches(item, t.GroupResource()) }) {
			items = append(items, item)
		}
	}
	return items
}

// itemMatches reports whether an item of Include or Exclude names a type.
func itemMatches(item string, t schema.GroupResource) bool {
	plural, group, qualified := strings.Cut(item, ".")
	return (plural == "*" || plural == t.Resource) && (!qualified || group == t.Group)
}

// IsCopyOrMirror reports whether the object only has another object's annotations, or the API server cannot
// delete it. It is left alone without an Event.
func IsCopyOrMirror(t Type, obj metav1.Object) bool {
	switch t.GroupResource() {
	case replicaSets:
		owner := metav1.GetControllerOfNoCopy(obj)
		return owner != nil && (owner.Kind == "Deployment" || owner.Kind == "Rollout")
	case pods:
		_, mirror := obj.GetAnnotations()[corev1.MirrorPodAnnotationKey]
		return mirror
	}
	return false
}

// isRecreated reports whether Kubernetes makes the object again as soon as it is deleted.
func isRecreated(t Type, obj metav1.Object) bool {
	switch t.GroupResource() {
	case schema.GroupResource{Resource: "configmaps"}:
		return obj.GetName() == "kube-root-ca.crt"
	case schema.GroupResource{Resource: "serviceaccounts"}:
		return obj.GetName() == "default"
	}
	return false
}

// MayRulesDecide reports whether rules may decide on the object: no annotation does, and it may be deleted.
func (o *Options) MayRulesDecide(t Type, obj metav1.Object) bool {
	return obj.GetDeletionTimestamp() == nil && !o.Annotated(obj) && !IsCopyOrMirror(t, obj) && !isRecreated(t, obj) && o.protection(t, obj) == ""
}

// protection returns why the object must not be deleted, or "".
func (o *Options) protection(typ Type, obj metav1.Object) string {
	namespace := obj.GetNamespace()
	if typ.GroupResource() == namespaces {
		namespace = obj.GetName()
		if (strings.HasPrefix(namespace, "kube-") || namespace == metav1.NamespaceDefault || slices.Contains(o.OwnNamespaces, namespace)) &&
			!slices.Contains(o.AllowProtected, allowNamespace+namespace) {
			return "the namespace is protected"
		}
	} else if (slices.Contains(protectedNamespaces, namespace) || slices.Contains(o.OwnNamespaces, namespace)) &&
		!slices.Contains(o.AllowProtected, allowInside+namespace) {
		return "its namespace is protected"
	}
	switch {
	case namespace == "":
	case glob.MatchAny(o.ExcludeNamespaces, namespace):
		return "its namespace is excluded"
	case len(o.IncludeNamespaces) > 0 && !glob.MatchAny(o.IncludeNamespaces, namespace):
		return "its namespace is not included"
	}
	return ""
}

// The reasons of problems.
const (
	InvalidTTL     = "InvalidTTL"
	ConflictingTTL = "ConflictingTTL"
	TTLProtected   = "TTLProtected"
)

// Problem is something that the owner of an object should know.
type Problem struct{ Reason, Key, Text string }

// Decision says what becomes of an object.
type Decision struct {
	// Deadline is when the object is due. Key and Value are the annotation that wins.
	Deadline   time.Time
	Key, Value string
	// Rule is the name of the rule that decides in place of an annotation. Since is when the rule's time begins,
	// DryRun says that the rule deletes nothing.
	Rule     string
	Since    time.Time
	DryRun   bool
	Problems []Problem
}

// Due reports whether the deadline has come. A decision that neither an annotation nor a rule has
// won is never due.
func (d *Decision) Due(now time.Time) bool {
	return (d.Key != "" || d.Rule != "") && !now.Before(d.Deadline)
}

// Explanation returns why the object is due.
func (d *Decision) Explanation() string {
	due := d.Deadline.UTC().Format(time.RFC3339)
	if d.Rule == "" {
		return fmt.Sprintf("%s=%s, due at %s", d.Key, d.Value, due)
	}
	return fmt.Sprintf("rule %s, since %s, ttl %s, due at %s", d.Rule, d.Since.UTC().Format(time.RFC3339), d.Value, due)
}

// conflictTolerance is how far apart two deadlines may be and still count as the same.
const conflictTolerance = time.Second

// Decide returns what becomes of an object. The latest deadline wins. An invalid value must not delete.
func (o *Options) Decide(typ Type, obj metav1.Object, now time.Time) Decision {
	decision := Decision{Deadline: Never}
	if obj.GetDeletionTimestamp() != nil || IsCopyOrMirror(typ, obj) {
		return decision
	}
	addProblem := func(reason, key, format string, args ...any) {
		decision.Problems = append(decision.Problems, Problem{reason, key, fmt.Sprintf(format, args...)})
	}
	type claim struct {
		key, value string
		deadline   time.Time
	}
	var claims []claim
	var pairs []string
	for _, annotation := range annotations {
		value, found := obj.GetAnnotations()[annotation.key]
		if !found || !o.familyCounts(annotation.family, typ) {
			continue
		}
		if len(value) > MaxValue {
			addProblem(InvalidTTL, annotation.key, "%s: the value %v; the object is not deleted", annotation.key, errTooLong)
			continue
		}
		deadline, err := annotation.deadline(value, obj)
		if err != nil {
			addProblem(InvalidTTL, annotation.key, "%s: %q %v; the object is not deleted", annotation.key, value, err)
		}
		claims = append(claims, claim{annotation.key, value, deadline})
		pairs = append(pairs, annotation.key+"="+value)
	}
	if len(claims) == 0 || len(decision.Problems) > 0 {
		return decision
	}
	byDeadline := func(a, b claim) int { return a.deadline.Compare(b.deadline) }
	first, last := slices.MinFunc(claims, byDeadline), slices.MaxFunc(claims, byDeadline)
	decision.Deadline, decision.Key, decision.Value = last.deadline, last.key, last.value
	if last.deadline.Sub(first.deadline) > conflictTolerance {
		addProblem(ConflictingTTL, decision.Key, "%s give different deadlines; the latest counts, %s", strings.Join(pairs, ", "), decision.Key)
	}
	if protection := o.protection(typ, obj); protection != "" && decision.Due(now) {
		addProblem(TTLProtected, decision.Key, "%s=%s has passed, but %s", decision.Key, decision.Value, protection)
		decision.Deadline = Never
	}
	return decision
}

// familyCounts reports whether annotations of a family count on a type.
func (o *Options) familyCounts(f Family, t Type) bool {
	return slices.Contains(o.Families, f) &&
		(f != Janitor || t.Namespaced || t.GroupResource() == namespaces || o.JanitorClusterScoped)
}
