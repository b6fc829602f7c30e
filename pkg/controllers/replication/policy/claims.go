// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/internal/patternlock"
)

// Evaluator evaluates annotations and decides on targets. It caches parsed patterns. It is safe for
// concurrent use. Build it with [NewEvaluator].
type Evaluator struct {
	Options
	matchers *matchers
	surveys  sync.Mutex
}

// NewEvaluator returns the evaluator for the options, with an empty cache.
func NewEvaluator(o Options) *Evaluator {
	return &Evaluator{Options: o, matchers: newMatchers(o.NoNamespaces)}
}

// CheckNamespaces returns why a value in the grammar of push-to is invalid, or "" if it is valid.
func CheckNamespaces(text string) string {
	return newMatchers(false).clauses(text)(&Namespace{Name: "x"}, dotNetForbidden).Text
}

// evaluation is the evaluation of the annotations of a source for a namespace.
type evaluation struct {
	*Evaluator
	source *Object
	ns     *Namespace
	now    time.Time
}

// match evaluates an annotation. Only a held verdict has a text, which names the annotation.
func (e evaluation) match(key, grammar string, parse func(string) matcher, dotNetDeadline time.Time) Verdict {
	text := e.source.Annotations[key]
	if text == tooLongValue {
		return held(InvalidAnnotation, key+": "+tooLongText)
	}
	v := e.matchers.get(grammar, text, parse)(e.ns, dotNetDeadline)
	if v.Text != "" {
		v.Text = key + ": " + v.Text
	}
	return v
}

// matchNative returns whether push-to or allow-pull names the namespace.
func (e evaluation) matchNative(key string) Verdict {
	if !e.source.hasAnnotation(key) {
		return no
	}
	return e.match(key, "clauses", e.matchers.clauses, dotNetForbidden)
}

// reflectorAllows returns the reflector's permission.
func (e evaluation) reflectorAllows() Verdict {
	if !isTrue(e.source.Annotations[reflectionAllowed]) {
		return no
	}
	return e.matchReflectorList(allowedNamespaces, allowedSelector)
}

// reflectorPushes returns the reflector's push.
func (e evaluation) reflectorPushes() Verdict {
	if !isTrue(e.source.Annotations[autoEnabled]) {
		return no
	}
	v := e.reflectorAllows()
	if v.Answer == No {
		return no
	}
	return v.and(e.matchReflectorList(autoNamespaces, autoSelector))
}

func (e evaluation) matchReflectorList(key, selector string) Verdict {
	hasList := strings.TrimSpace(e.source.Annotations[key]) != ""
	hasSelector := strings.TrimSpace(e.source.Annotations[selector]) != ""
	if !hasList && !hasSelector {
		return yes
	}
	v := no
	if hasList {
		v = e.matchDotNetList(key)
	}
	if hasSelector && v.Answer != Yes {
		v = v.or(e.match(selector, "strict", e.matchers.strictSelector, dotNetForbidden))
	}
	return v
}

// replicatorPushes returns the replicator's push.
func (e evaluation) replicatorPushes() Verdict {
	v := e.match(replicateTo, "go", goRegexList, dotNetForbidden)
	if e.source.hasAnnotation(replicateToMatching) && v.Answer != Yes {
		v = v.or(e.match(replicateToMatching, "selector", e.matchers.selector, dotNetForbidden))
	}
	return v
}

// replicatorAllows returns the replicator's permission to pull.
func (e evaluation) replicatorAllows() Verdict {
	permitted, _ := strconv.ParseBool(e.source.Annotations[replicationAllowed])
	switch {
	case e.AllowAll, e.AllowConfigMaps && e.source.Kind == ConfigMap:
		return yes
	case !permitted:
		return no
	}
	return e.match(replicationAllowedNamespaces, "go", goRegexList, dotNetForbidden)
}

// claim is what one source wants of a target.
type claim struct {
	Verdict
	source  *Object
	dialect Dialect // the dialect that says yes, else the first that is held
	since   time.Time
}

// pushClaim returns what the source wants in a namespace by its annotations, in the dialects in which its
// namespace may push. home is nil if the source's Namespace is not known.
func (e *Evaluator) pushClaim(source *Object, home, ns *Namespace, now time.Time) claim {
	eval := evaluation{e, source, ns, now}
	best := claim{source: source}
	for _, next := range []struct {
		Dialect
		evaluate func() Verdict
	}{{Native, func() Verdict { return eval.matchNative(PushTo) }}, {Reflector, eval.reflectorPushes}, {Replicator, eval.replicatorPushes}} {
		if best.Answer == Yes || !e.hasPushKey(source, next.Dialect) || !e.mayPush(next.Dialect, source, home) {
			continue
		}
		if v := next.evaluate(); v.Answer > best.Answer {
			best.Verdict, best.dialect = v, next.Dialect
		}
	}
	return best
}

// mayPush reports whether a push in the dialect counts in the source's namespace. It is asked before the
// source's own patterns. Without the flag, a push in an original's dialect counts everywhere, as in the
// original, and a native push nowhere.
func (e *Evaluator) mayPush(dialect Dialect, source *Object, home *Namespace) bool {
	if e.PushNamespaces == "" {
		return dialect != Native
	}
	if home == nil {
		home = &Namespace{Name: source.Namespace}
	}
	return e.matchers.get("clauses", e.PushNamespaces, e.matchers.clauses)(home, dotNetForbidden).Answer == Yes
}

// claims returns the claims on a target other than no, the strongest first: claims from the oldest
// namespace, then by name. The age of a source does not count: it may have been made again.
func (e *Evaluator) claims(view View, key Key, ns *Namespace, now time.Time) (list []claim) {
	for _, source := range view.Sources(key.Kind, key.Name) {
		if source.Namespace == key.Namespace || !e.Pushes(source) {
			continue
		}
		home := view.Namespace(source.Namespace)
		c := e.pushClaim(source, home, ns, now)
		if c.Answer == No {
			continue
		}
		if home != nil {
			c.since = home.Created
		}
		c.Verdict = e.sourceVerdict(view, source, home, now).and(c.Verdict)
		list = append(list, c)
	}
	slices.SortFunc(list, func(a, b claim) int {
		return cmp.Or(a.since.Compare(b.since), cmp.Compare(a.source.NamespacedName.String(), b.source.NamespacedName.String()))
	})
	return list
}

// sourceVerdict returns a held verdict if none of the source's pushes counts for now.
func (e *Evaluator) sourceVerdict(view View, source *Object, home *Namespace, now time.Time) Verdict {
	if source.Deleting || home.isLabelled(labelDisabled) {
		return Verdict{Answer: Held}
	}
	if u := copyVerdict(source); u.Answer != Yes {
		return u
	}
	return e.spreadVerdict(source, view.Spread(source, now))
}

// minCopy is about the least that a copy takes of the API server's store, in bytes.
const minCopy = 1 << 10

// spreadVerdict returns a held verdict if the source asks for too much in all namespaces together.
func (e *Evaluator) spreadVerdict(source *Object, namespaces int) Verdict {
	size := max(int64(source.Size), minCopy)
	if e.MaxSpread > 0 && size*int64(namespaces) > e.MaxSpread {
		return held(SpreadExceeded, fmt.Sprintf("%d bytes for each of %d namespaces are more than --replication-max-spread allows", size, namespaces))
	}
	return yes
}

// Survey is what a source asks for in all namespaces.
type Survey struct {
	// Namespaces are the namespaces that the source's annotations select.
	Namespaces []string
	// Spread is for how many namespaces the source counts: for all if the evaluation took too long.
	Spread   int
	Problems []Problem
	// RequeueAfter is when to ask again; 0 means at the next event.
	RequeueAfter time.Duration
}

// Survey evaluates a pushing source for all namespaces, and reports its problems. There is one survey at a
// time, and it ends soon: else the surveys of one tenant would occupy all workers.
func (e *Evaluator) Survey(view View, source *Object, namespaces []*Namespace, now time.Time) (survey Survey) {
	e.surveys.Lock()
	defer e.surveys.Unlock()
	home := view.Namespace(source.Namespace)
	reported := map[string]bool{}
	addProblem := func(v Verdict) {
		if v.Answer == Held && v.Reason != "" && !reported[v.Reason] {
			reported[v.Reason] = true
			survey.Problems = append(survey.Problems, Problem{source.Key, v.Reason, v.Text})
		}
		if v.Reason == PatternTimeout {
			survey.RequeueAfter = timeoutPause
		}
	}
	for _, dialect := range Dialects {
		if e.hasPushKey(source, dialect) && !e.mayPush(dialect, source, home) {
			addProblem(forbiddenPush)
		}
	}
	if source.Annotations[keepOwners] == "true" && e.Replicator {
		addProblem(held(OwnerReferenceDropped, keepOwners+" has no effect: a copy with an owner in another namespace would be collected as garbage"))
	}
	addProblem(copyVerdict(source))
	var used time.Duration
	for _, ns := range namespaces {
		if ns.Name == source.Namespace {
			continue
		}
		c := patternlock.Do(func() claim {
			defer func(start time.Time) { used += time.Since(start) }(time.Now())
			return e.pushClaim(source, home, ns, now)
		})
		if c.Answer == Yes {
			survey.Namespaces = append(survey.Namespaces, ns.Name)
		}
		addProblem(c.Verdict)
		if used > listTimeout && e.hasPushKey(source, Reflector) {
			e.matchers.pauseNamespace(source.Namespace, now) // the evaluation of the other namespaces then ends at once
		}
	}
	if survey.Spread = len(survey.Namespaces); survey.RequeueAfter > 0 {
		survey.Spread = len(namespaces)
	}
	addProblem(e.spreadVerdict(source, survey.Spread))
	return survey
}

var forbiddenPush = held(PushForbidden, "--replication-push-namespaces does not allow a push from this namespace")

// copyVerdict returns a held verdict for an object that is never copied.
func copyVerdict(obj *Object) Verdict {
	switch t := corev1.SecretType(obj.Type); {
	case strings.HasPrefix(obj.Type, "helm.sh"):
		return Verdict{Answer: Held}
	case t == corev1.SecretTypeServiceAccountToken || t == "bootstrap.kubernetes.io/token":
		return held(UnsupportedType, "Secrets of type "+obj.Type+" are not copied")
	case obj.TooLarge:
		return held(TooManyKeys, fmt.Sprintf("objects with more than %d keys, or of %d bytes together, are not copied", maxKeys, maxKeyText))
	}
	return yes
}

// pullVerdict returns whether the source lets a pull target in ns have its data. dialect is the dialect of
// the target.
func (e *Evaluator) pullVerdict(view View, source *Object, ns *Namespace, dialect Dialect, now time.Time) Verdict {
	eval := evaluation{e, source, ns, now}
	verdict := eval.matchNative(AllowPull)
	switch dialect {
	case Reflector:
		verdict = verdict.or(eval.reflectorAllows())
	case Replicator:
		verdict = verdict.or(eval.replicatorAllows())
	}
	if source.Deleting || view.Namespace(source.Namespace).isLabelled(labelDisabled) {
		verdict = verdict.and(Verdict{Answer: Held})
	}
	return verdict
}
