// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"fmt"
	"maps"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// View is what a decision sees.
type View interface {
	// Namespace returns nil for a namespace that does not exist.
	Namespace(name string) *Namespace
	// Get returns nil for an object that does not exist.
	Get(Key) *Object
	// Sources returns all objects of a kind and name with a push key.
	Sources(kind Kind, name string) []*Object
	// GoneSince returns since when an object has been known to be gone.
	GoneSince(Key) time.Time
}

// Action is what is to be done with a target.
type Action string

// The actions. All but Create and Delete are updates; Recreate is a deletion and a creation.
const (
	Nothing  Action = ""
	Create   Action = "create"
	Update   Action = "update"
	Recreate Action = "recreate"
	Mark     Action = "mark"  // add the marker to a copy whose content is right
	Strip    Action = "strip" // remove what was replicated and keep the object
	Empty    Action = "empty" // remove the replicated keys of a pull target whose source is gone
	Delete   Action = "delete"
)

// State is how a target stands, for the metric.
type State string

// The states.
const (
	InSync    State = "in_sync"
	Due       State = "due"       // an action is planned
	OnHold    State = "held"      // nothing is done until something else changes
	Frozen    State = "frozen"    // left as it is: its source is gone or does not permit it
	Refused   State = "refused"   // wanted, but something that is not ours is in the way
	Unclaimed State = "unclaimed" // made by the replicator, and no push covers it
)

// States are all states.
var States = []State{InSync, Due, OnHold, Frozen, Refused, Unclaimed}

// Plan is a decision. Without a State, the object is no target.
type Plan struct {
	Action
	State
	// Source is whose data is written, or whose copy is removed.
	Source   Key
	Dialect  Dialect
	Mode     Mode
	Problems []Problem
	// After is when to decide again; 0 is at the next event.
	After time.Duration
}

func (p *Plan) problem(about Key, reason, format string, args ...any) {
	p.Problems = append(p.Problems, Problem{about, reason, fmt.Sprintf(format, args...)})
}

// held reports why a claim is held, to the source.
func (p *Plan) held(about Key, v Verdict) {
	if v.Reason == PatternTimeout {
		p.After = timeoutPause
	}
	if v.Reason != "" {
		p.Problems = append(p.Problems, Problem{about, v.Reason, v.Text})
	}
}

// Decide returns what is to be done with one target, which may not exist.
func (r *Rules) Decide(v View, key Key, now time.Time) Plan {
	target := v.Get(key)
	role := r.roleOf(target)
	p := Plan{Dialect: role.dialect, Mode: Push}
	if role.kind == pullTarget {
		p.Mode = Pull
	}
	if role.kind == pullTarget || role.kind == pushCopy {
		p.State, p.Source = OnHold, Key{key.Kind, role.from}
	}
	ns := v.Namespace(key.Namespace)
	if ns == nil || ns.Terminating || ns.is(labelDisabled) || target != nil && target.Deleting {
		return p
	}
	if p.Mode == Pull {
		r.pull(&p, v, target, role, ns, now)
	} else {
		r.push(&p, v, key, target, role, ns, now)
	}
	if p.Action != Nothing {
		p.State = Due
	}
	return p
}

// push decides on a target that is no pull target.
func (r *Rules) push(p *Plan, v View, key Key, target *Object, role role, ns *Namespace, now time.Time) {
	claims := r.claims(v, key, ns, now)
	if role.kind == unmarkedCopy {
		// The strongest claimant of its dialect is its source.
		i := slices.IndexFunc(claims, func(c claim) bool { return asked{r, c.source, ns, now, true}.replicates().Claim != No })
		if i < 0 {
			p.State = Unclaimed
		} else {
			role.kind, role.from = pushCopy, claims[i].source.NamespacedName
		}
	}
	winner := strongest(claims, Key{key.Kind, role.from})
	switch {
	case winner == nil && role.kind != pushCopy:
		return
	case ns.is(labelPullOnly) || r.protectedNamespace(ns.Name) || r.protectedName(key.Name):
		if winner != nil && winner.Claim == Yes {
			p.refuse(winner, NamespaceProtected, "nothing is pushed to %s", key.NamespacedName)
		}
		return
	case winner == nil:
		r.release(p, v, target, role, now)
		return
	case winner.Claim == Held:
		p.State, p.Dialect, p.Source = OnHold, winner.dialect, winner.source.Key
		p.held(winner.source.Key, winner.Verdict)
		return
	}
	for i := range claims {
		if c := &claims[i]; c.Claim == Yes && c != winner {
			p.problem(c.source.Key, TargetClaimed, "%s has its data from %s", key.NamespacedName, winner.source.NamespacedName)
		}
	}
	if target != nil && role.kind != pushCopy {
		p.refuse(winner, TargetExists, "%s exists and was not made by a push", key.NamespacedName)
		return
	}
	if role.kind == pushCopy && role.from != winner.source.NamespacedName && r.mayReturn(p, v, Key{key.Kind, role.from}, now) {
		return
	}
	p.State, p.Dialect, p.Source = InSync, winner.dialect, winner.source.Key
	if target == nil {
		p.Action = Create
		return
	}
	r.compare(p, winner.source, target, role)
}

func (p *Plan) refuse(c *claim, reason, format string, args ...any) {
	p.State, p.Dialect, p.Source = Refused, c.dialect, c.source.Key
	p.problem(c.source.Key, reason, format, args...)
}

// strongest returns the claim that decides, or nil: that of the owner of the copy, or the first that
// is yes, or the first that is held.
func strongest(claims []claim, owner Key) *claim {
	for _, decides := range []func(claim) bool{
		func(c claim) bool { return c.source.Key == owner },
		func(c claim) bool { return c.Claim == Yes },
		func(claim) bool { return true },
	} {
		if i := slices.IndexFunc(claims, decides); i >= 0 {
			return &claims[i]
		}
	}
	return nil
}

// mayReturn reports whether nothing may be concluded yet from the source's absence: it has not been
// gone for the grace, or its namespace is disabled or not known.
func (r *Rules) mayReturn(p *Plan, v View, source Key, now time.Time) bool {
	home := v.Namespace(source.Namespace)
	switch {
	case home.is(labelDisabled):
		return true // the event of its label or its end decides again
	case v.Get(source) != nil:
		return false
	case r.NoNamespaces && home == nil:
		return true // --namespaces leaves it out
	}
	p.After = max(v.GoneSince(source).Add(r.DeletionGrace).Sub(now), 0)
	return p.After > 0
}

// release removes a copy that no source wants.
func (r *Rules) release(p *Plan, v View, target *Object, role role, now time.Time) {
	p.State = OnHold
	source := v.Get(p.Source)
	switch {
	case !r.enabled(role.dialect) || source != nil && source.Deleting || r.mayReturn(p, v, p.Source, now):
	case role.dialect != Mittwald || len(without(target.Content, replicated(target, role))) == 0:
		p.Action = Delete
	case !p.keepsKeys(target):
		p.Action = Strip
	}
}

// typesWithKeys are the types of Secrets that demand keys.
var typesWithKeys = []corev1.SecretType{
	corev1.SecretTypeTLS, corev1.SecretTypeDockercfg, corev1.SecretTypeDockerConfigJson, corev1.SecretTypeBasicAuth, corev1.SecretTypeSSHAuth,
}

// keepsKeys freezes a target of which the API server lets nobody remove keys.
func (p *Plan) keepsKeys(target *Object) bool {
	if !slices.Contains(typesWithKeys, corev1.SecretType(target.Type)) && !target.Immutable {
		return false
	}
	p.State = Frozen
	p.problem(target.Key, SourceDeleted,
		"has no source any more; it keeps its keys, since it is immutable or its type demands them")
	return true
}

// pull decides on a pull target.
func (r *Rules) pull(p *Plan, v View, target *Object, role role, ns *Namespace, now time.Time) {
	if role.problem != nil {
		p.Problems = append(p.Problems, *role.problem)
		return
	}
	if r.cyclic(v, target.Key, p.Source) {
		p.problem(target.Key, ReplicationCycle, "its source %s has its data from it, or from too far", role.from)
		return
	}
	source := v.Get(p.Source)
	permission := no
	if source != nil {
		permission = r.permitted(v, source, ns, role.dialect, now)
	}
	if permission.Claim != Yes {
		p.State = Frozen
		if source != nil {
			p.held(source.Key, permission) // only its owner is told what is wrong with it
		} else if r.empties(p, v, target, role, now) {
			return
		}
		p.problem(target.Key, PermissionDenied, "source %s does not exist or does not allow namespace %s", role.from, ns.Name)
		return
	}
	for _, o := range []*Object{source, target} {
		if v := unsupported(o); v.Claim != Yes {
			p.held(target.Key, v)
			return
		}
	}
	switch differs := !maps.Equal(desired(role.dialect, source.Content, target.Content, replicated(target, role)), target.Content); {
	case !differs && (target.has(replicatedKeys) || role.dialect != Mittwald) && (role.marker == nil || role.marker.from == role.from):
		p.State = InSync
	case target.Immutable:
		p.State = Refused
		p.problem(target.Key, TargetImmutable, "is immutable and has other data than its source")
	default:
		p.Action = Update
	}
}

// empties decides on a pull target whose source does not exist. It reports whether that is all
// there is to say. Only a target with a marker had data of the source for certain; to the author of
// any other, a missing source must look like a forbidden one.
func (r *Rules) empties(p *Plan, v View, target *Object, role role, now time.Time) bool {
	mine := role.marker != nil && role.marker.from == role.from
	if role.dialect != Mittwald || !mine || len(keyList(target.Annotations[replicatedKeys])) == 0 {
		return false
	}
	if !r.mayReturn(p, v, p.Source, now) && !p.keepsKeys(target) {
		p.Action = Empty
	}
	return true
}

// maxChain is how many pulls may follow one another.
const maxChain = 8

// cyclic reports whether the data of source comes from key, or from farther than maxChain.
func (r *Rules) cyclic(v View, key, source Key) bool {
	for range maxChain {
		if source == key {
			return true
		}
		role := r.roleOf(v.Get(source))
		if role.kind != pullTarget || role.problem != nil {
			return false
		}
		source.NamespacedName = role.from
	}
	return true
}

// compare decides what a push does with its copy.
func (r *Rules) compare(p *Plan, source, target *Object, role role) {
	keys := replicated(target, role)
	same := maps.Equal(desired(p.Dialect, source.Content, target.Content, keys), target.Content)
	marked := role.marker != nil
	retyped := marked && source.Type != target.Type
	if retyped || !same && target.Immutable {
		p.Action = Recreate
		if p.Dialect == Mittwald && len(without(target.Content, keys)) > 0 {
			p.Action, p.State = Nothing, Refused
			p.problem(source.Key, TypeConflict, "%s has another type or is immutable, and has keys of its own", target.NamespacedName)
		}
		return
	}
	differs := !same || role.from != source.NamespacedName
	if p.Dialect == Mittwald {
		labels := overlaid(target.Labels, role.marker, r.copiedLabels(source.Annotations, source.Labels))
		differs = differs || !target.has(replicatedKeys) || !maps.Equal(labels, target.Labels)
	}
	switch {
	case differs:
		p.Action = Update
	case p.Dialect == Mittwald && !marked && r.MarkAdopted:
		p.Action = Mark
	}
}
