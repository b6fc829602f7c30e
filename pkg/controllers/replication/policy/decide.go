// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"fmt"
	"maps"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/internal/glob"
)

// View is what a decision sees.
type View interface {
	// Namespace returns nil for a namespace that does not exist.
	Namespace(name string) *Namespace
	// Get returns nil for an object that does not exist.
	Get(Key) *Object
	// Sources returns all objects of a kind and name with a push key.
	Sources(kind Kind, name string) []*Object
	// Spread returns for how many namespaces a source counts, see [Survey].
	Spread(source *Object, now time.Time) int
	// Maker returns the source from which the replicator made a target, as an earlier decision found, or the
	// zero Key.
	Maker(target Key) Key
	// UnwantedSince returns since when every decision has found a target unwanted for this reason; now if
	// the latest decision did not.
	UnwantedSince(target Key, reason Unwanted, now time.Time) time.Time
}

// Unwanted is why a target is to lose its data, or empty. Each reason has its own grace.
type Unwanted string

// Reasons why a target is unwanted.
const (
	Withdrawn Unwanted = "withdrawn" // its source is gone, or does not ask for it any more
	Homeless  Unwanted = "homeless"  // the namespace of its source does not exist
)

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

// States of a target.
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

// Plan is a decision. Without a State, the object is not a target.
type Plan struct {
	Action
	State
	// Source is whose data is written, or whose copy is removed.
	Source   Key
	Dialect  Dialect
	Mode     Mode
	Problems []Problem
	// Adopted says that the replicator made the target from Source.
	Adopted bool
	// Unwanted says why the target loses its data, now or after its grace.
	Unwanted Unwanted
	// RequeueAfter is when to decide again; 0 means at the next event.
	RequeueAfter time.Duration
}

func (p *Plan) addProblem(object Key, reason, format string, args ...any) {
	p.Problems = append(p.Problems, Problem{object, reason, fmt.Sprintf(format, args...)})
}

// addHeld reports why a claim is held, to the source.
func (p *Plan) addHeld(object Key, v Verdict) {
	if v.Reason == PatternTimeout {
		p.RequeueAfter = timeoutPause
	}
	if v.Reason != "" {
		p.Problems = append(p.Problems, Problem{object, v.Reason, v.Text})
	}
}

// Decide returns what is to be done with one target, which may not exist.
func (e *Evaluator) Decide(view View, key Key, now time.Time) Plan {
	target := view.Get(key)
	role := e.roleOf(target)
	plan := Plan{Dialect: role.dialect, Mode: Push}
	if role.kind == pullTarget {
		plan.Mode = Pull
	}
	if role.kind == pullTarget || role.kind == pushCopy {
		plan.State, plan.Source = OnHold, Key{key.Kind, role.source}
	}
	ns := view.Namespace(key.Namespace)
	if ns == nil || ns.Terminating || ns.isLabelled(labelDisabled) || target != nil && target.Deleting {
		return plan
	}
	if plan.Mode == Pull {
		e.decidePull(&plan, view, target, role, ns, now)
	} else {
		e.decidePush(&plan, view, key, target, role, ns, now)
	}
	switch {
	case plan.Action != Nothing:
		plan.State = Due
	case plan.State == Refused && plan.RequeueAfter == 0:
		plan.RequeueAfter = refusedRecheckInterval // nothing refers to its source, so no event tells when the source stops asking
	}
	return plan
}

// decidePush decides on a target that is not a pull target.
func (e *Evaluator) decidePush(plan *Plan, view View, key Key, target *Object, role role, ns *Namespace, now time.Time) {
	claims := e.claims(view, key, ns, now)
	if role.kind == unmarkedCopy {
		if maker := e.makerOf(target, view.Maker(key), claims, ns, now); maker != nil {
			role.kind, role.source = pushCopy, maker.source.NamespacedName
			plan.Source, plan.Adopted = maker.source.Key, true
		} else {
			plan.State = Unclaimed
		}
	}
	owner := Key{key.Kind, role.source}
	winner := strongestClaim(claims, owner)
	switch {
	case role.kind == pushCopy && copyVerdict(target).Answer != Yes:
		plan.State = OnHold // nothing tells which of the target's keys are its own
		return
	case winner == nil && role.kind != pushCopy:
		return
	case ns.isLabelled(labelPullOnly) || glob.MatchAny(e.ProtectedNamespaces, ns.Name) || glob.MatchAny(e.ProtectedNames, key.Name):
		if winner != nil && winner.Answer == Yes {
			plan.refuse(winner, NamespaceProtected, "nothing is pushed to %s", key.NamespacedName)
		}
		return
	case winner == nil:
		e.releaseCopy(plan, view, target, role, false, now)
		return
	case winner.Answer == Held:
		plan.State, plan.Dialect, plan.Source = OnHold, winner.dialect, winner.source.Key
		plan.addHeld(winner.source.Key, winner.Verdict)
		return
	}
	for i := range claims {
		if c := &claims[i]; c.Answer == Yes && c != winner {
			plan.addProblem(c.source.Key, TargetClaimed, "%s belongs to another source of that name", key.NamespacedName)
		}
	}
	switch {
	case target != nil && role.kind != pushCopy:
		plan.refuse(winner, TargetExists, "%s exists and was not made by a push", key.NamespacedName)
	case target != nil && winner.source.Key != owner:
		e.yieldCopy(plan, view, target, role, claims, winner, now)
	case target == nil:
		plan.State, plan.Dialect, plan.Source, plan.Action = InSync, winner.dialect, winner.source.Key, Create
	default:
		plan.State, plan.Dialect, plan.Source = InSync, winner.dialect, winner.source.Key
		e.compareCopy(plan, winner.source, target, role)
	}
}

// makerOf returns the claim of the source from which the replicator made a copy, or nil. A later pusher of
// the same name is not the maker, and equal data prove nothing, since much data is public. The copy must name
// the source's present version, or must have named it when this run first looked: markers are written slowly.
func (e *Evaluator) makerOf(target *Object, knownMaker Key, claims []claim, ns *Namespace, now time.Time) *claim {
	i := slices.IndexFunc(claims, func(c claim) bool {
		isMaker := c.source.Version == target.Annotations[replicatedFrom] || c.source.Key == knownMaker
		return isMaker && evaluation{e, c.source, ns, now}.replicatorPushes().Answer != No
	})
	if i < 0 {
		return nil
	}
	return &claims[i]
}

// yieldCopy decides on the copy of a source that has no claim, or a weaker claim than another source. The
// data of one namespace is never replaced by another's: the copy is deleted, and then the other source's
// copy is created.
func (e *Evaluator) yieldCopy(plan *Plan, view View, target *Object, role role, claims []claim, winner *claim, now time.Time) {
	claimed := slices.ContainsFunc(claims, func(c claim) bool { return c.source.NamespacedName == role.source })
	if !claimed {
		e.releaseCopy(plan, view, target, role, true, now)
		return
	}
	plan.State, plan.Source = InSync, winner.source.Key
	e.removeCopy(plan, target, role)
}

func (p *Plan) refuse(c *claim, reason, format string, args ...any) {
	p.State, p.Dialect, p.Source = Refused, c.dialect, c.source.Key
	p.addProblem(c.source.Key, reason, format, args...)
}

// strongestClaim returns the claim that decides, or nil: the first claim that is yes, or that is held and
// belongs to the owner of the copy. A held claim protects no other source's copy.
func strongestClaim(claims []claim, owner Key) *claim {
	i := slices.IndexFunc(claims, func(c claim) bool { return c.Answer == Yes || c.source.Key == owner })
	if i < 0 {
		return nil
	}
	return &claims[i]
}

// refusedRecheckInterval is how soon a target in the state Refused is decided on again.
const refusedRecheckInterval = 30 * time.Minute

// missingGrace is the grace of a target whose source's namespace does not exist: a backup may be
// restored in any order.
const missingGrace = 10 * time.Minute

// mustWait reports whether it is too early to conclude that nobody wants the target's data: during the
// grace, or because its source's namespace is disabled or not known.
func (e *Evaluator) mustWait(plan *Plan, view View, target *Object, now time.Time) bool {
	home := view.Namespace(plan.Source.Namespace)
	switch {
	case home.isLabelled(labelDisabled):
		return true // a change of the Namespace enqueues the target again
	case e.NoNamespaces && home == nil:
		return true // --namespaces leaves the source's namespace out
	}
	grace := e.DeletionGrace
	plan.Unwanted = Withdrawn
	if home == nil {
		plan.Unwanted, grace = Homeless, max(grace, missingGrace)
	}
	plan.RequeueAfter = max(view.UnwantedSince(target.Key, plan.Unwanted, now).Add(grace).Sub(now), 0)
	return plan.RequeueAfter > 0
}

// releaseCopy removes a copy that its source does not want. contested says that another source wants its
// name.
func (e *Evaluator) releaseCopy(plan *Plan, view View, target *Object, role role, contested bool, now time.Time) {
	plan.State = OnHold
	source := view.Get(plan.Source)
	switch {
	case !e.enabled(role.dialect), source != nil && source.Deleting:
	case !contested && role.dialect == Native && e.PushNamespaces == "" && source != nil && source.hasAnnotation(PushTo):
		// The flag was never set, so nobody has forbidden this source to push.
		plan.Problems = append(plan.Problems, Problem{source.Key, PushForbidden, forbiddenPush.Text})
	case !e.mustWait(plan, view, target, now):
		e.removeCopy(plan, target, role)
	}
}

// removeCopy deletes a copy, or strips a copy that has keys of its own.
func (e *Evaluator) removeCopy(plan *Plan, target *Object, role role) {
	if role.dialect != Replicator || len(withoutKeys(target.Content, copiedKeys(target, role))) == 0 {
		plan.Action = Delete
	} else if !plan.mustKeepKeys(target) {
		plan.Action = Strip
	}
}

// typesWithKeys are the types of Secrets that demand keys.
var typesWithKeys = []corev1.SecretType{
	corev1.SecretTypeTLS, corev1.SecretTypeDockercfg, corev1.SecretTypeDockerConfigJson, corev1.SecretTypeBasicAuth, corev1.SecretTypeSSHAuth,
}

// mustKeepKeys reports whether the target's type or immutability forbids the removal of keys, and then
// freezes it.
func (p *Plan) mustKeepKeys(target *Object) bool {
	if !slices.Contains(typesWithKeys, corev1.SecretType(target.Type)) && !target.Immutable {
		return false
	}
	p.State = Frozen
	p.addProblem(target.Key, SourceDeleted,
		"has no source any more; it keeps its keys, because it is immutable or its type demands them")
	return true
}

// decidePull decides on a pull target.
func (e *Evaluator) decidePull(plan *Plan, view View, target *Object, role role, ns *Namespace, now time.Time) {
	if role.problem != nil {
		plan.Problems = append(plan.Problems, *role.problem)
		return
	}
	if e.cyclic(view, target.Key, plan.Source) {
		plan.addProblem(target.Key, ReplicationCycle, "its source %s has its data from it, or from too far", role.source)
		return
	}
	source := view.Get(plan.Source)
	permission := no
	if source != nil {
		permission = e.pullVerdict(view, source, ns, role.dialect, now)
	}
	if permission.Answer != Yes {
		plan.State = Frozen
		if source != nil {
			plan.addHeld(source.Key, permission) // only the source's owner is told what is wrong with the source
		} else if e.decideOrphan(plan, view, target, role, now) {
			return
		}
		plan.addProblem(target.Key, PermissionDenied, "source %s does not exist or does not allow namespace %s", role.source, ns.Name)
		return
	}
	for _, o := range []*Object{source, target} {
		if v := copyVerdict(o); v.Answer != Yes {
			plan.addHeld(target.Key, v)
			return
		}
	}
	switch differs := !maps.Equal(desiredContent(role.dialect, source.Content, target.Content, copiedKeys(target, role)), target.Content); {
	case !differs && (target.hasAnnotation(replicatedKeys) || role.dialect != Replicator) && (role.marker == nil || role.marker.sourceName == role.source):
		plan.State = InSync
	case target.Immutable:
		plan.State = Refused
		plan.addProblem(target.Key, TargetImmutable, "is immutable and has other data than its source")
	default:
		plan.Action = Update
	}
}

// decideOrphan decides on a pull target whose source does not exist, and reports whether the decision is
// made. Only a target with a marker certainly had data of the source; for any other, a missing source must
// look like a forbidden source.
func (e *Evaluator) decideOrphan(plan *Plan, view View, target *Object, role role, now time.Time) bool {
	hadData := role.marker != nil && role.marker.sourceName == role.source
	if role.dialect != Replicator || !hadData || len(parseKeys(target.Annotations[replicatedKeys])) == 0 {
		return false
	}
	if !e.mustWait(plan, view, target, now) && !plan.mustKeepKeys(target) {
		plan.Action = Empty
	}
	return true
}

// maxChain is how many pulls may follow one another.
const maxChain = 8

// cyclic reports whether the data of source comes from key, or from farther than maxChain.
func (e *Evaluator) cyclic(view View, key, source Key) bool {
	for range maxChain {
		if source == key {
			return true
		}
		role := e.roleOf(view.Get(source))
		if role.kind != pullTarget || role.problem != nil {
			return false
		}
		source.NamespacedName = role.source
	}
	return true
}

// compareCopy decides what a push does with its copy.
func (e *Evaluator) compareCopy(plan *Plan, source, target *Object, role role) {
	keys := copiedKeys(target, role)
	same := maps.Equal(desiredContent(plan.Dialect, source.Content, target.Content, keys), target.Content)
	marked := role.marker != nil
	retyped := marked && source.Type != target.Type
	if retyped || !same && target.Immutable {
		plan.Action = Recreate
		if plan.Dialect == Replicator && len(withoutKeys(target.Content, keys)) > 0 {
			plan.Action, plan.State = Nothing, Refused
			plan.addProblem(source.Key, TypeConflict, "%s has another type or is immutable, and has keys of its own", target.NamespacedName)
		}
		return
	}
	differs := !same
	if plan.Dialect == Replicator {
		labels := overlayLabels(target.Labels, role.marker, e.copiedLabels(source.Annotations, source.Labels))
		differs = differs || !target.hasAnnotation(replicatedKeys) || !maps.Equal(labels, target.Labels)
	}
	switch {
	case differs:
		plan.Action = Update
	case role.dialect == Replicator && !marked && e.MarkAdopted:
		plan.Action = Mark
	}
}
