// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"cmp"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// Rules decide. Build them with [NewRules].
type Rules struct {
	Options
	matchers *matchers
	// The flags of these names, as functions.
	protectedNamespace, protectedName, deniedLabel func(name string) bool
}

// NewRules returns rules.
func NewRules(o Options) *Rules {
	return &Rules{
		Options: o, matchers: newMatchers(o.NoNamespaces),
		protectedNamespace: globs(o.ProtectedNamespaces), protectedName: globs(o.ProtectedNames), deniedLabel: globs(o.DeniedLabels),
	}
}

// CheckNamespaces returns why a value in the grammar of push-to is invalid, or "" if it is valid.
func CheckNamespaces(text string) string {
	return newMatchers(false).clauses(text)(&Namespace{Name: "x"}, time.Time{}, false).Text
}

// asked is one evaluation of the annotations of a source for a namespace.
type asked struct {
	*Rules
	source *Object
	ns     *Namespace
	now    time.Time
	run    bool // whether to run what may take long
}

// match evaluates an annotation. Only what is held has a text, which then names the annotation.
func (a asked) match(key, grammar string, parse func(string) matcher) Verdict {
	v := a.matchers.get(grammar, a.source.Annotations[key], parse)(a.ns, a.now, a.run)
	if v.Text != "" {
		v.Text = key + ": " + v.Text
	}
	return v
}

// native returns whether push-to or allow-pull names the namespace.
func (a asked) native(key string) Verdict {
	if !a.source.has(key) {
		return no
	}
	return a.match(key, "clauses", a.matchers.clauses)
}

// allowed is the reflector's permission.
func (a asked) allowed() Verdict {
	if !isTrue(a.source.Annotations[reflectionAllowed]) {
		return no
	}
	return a.reflectorList(allowedNamespaces, allowedSelector)
}

// auto is the reflector's push.
func (a asked) auto() Verdict {
	if !isTrue(a.source.Annotations[autoEnabled]) {
		return no
	}
	v := a.allowed()
	if v.Claim == No {
		return no
	}
	return v.and(a.reflectorList(autoNamespaces, autoSelector))
}

func (a asked) reflectorList(key, selector string) Verdict {
	hasList := strings.TrimSpace(a.source.Annotations[key]) != ""
	hasSelector := strings.TrimSpace(a.source.Annotations[selector]) != ""
	if !hasList && !hasSelector {
		return yes
	}
	v := no
	if hasList {
		v = a.match(key, "net", a.matchers.netList)
	}
	if hasSelector && v.Claim != Yes {
		v = v.or(a.match(selector, "strict", a.matchers.strictSelector))
	}
	return v
}

// replicates is the replicator's push.
func (a asked) replicates() Verdict {
	v := a.match(replicateTo, "go", goList)
	if a.source.has(replicateToMatching) && v.Claim != Yes {
		v = v.or(a.match(replicateToMatching, "selector", a.matchers.selector))
	}
	return v
}

// permits is the replicator's permission to pull.
func (a asked) permits() Verdict {
	permitted, _ := strconv.ParseBool(a.source.Annotations[replicationAllowed])
	switch {
	case a.AllowAll:
		return yes
	case !permitted:
		return no
	}
	return a.match(replicationAllowedN, "go", goList)
}

// claim is what one source wants of a target.
type claim struct {
	Verdict
	source  *Object
	dialect Dialect // that says yes, or else the first that is held
}

// pushes returns what the source wants in a namespace by its annotations alone.
func (r *Rules) pushes(source *Object, ns *Namespace, now time.Time, run bool) claim {
	a := asked{r, source, ns, now, run}
	best := claim{source: source}
	for _, next := range []struct {
		Dialect
		ask func() Verdict
	}{{Native, func() Verdict { return a.native(PushTo) }}, {Reflector, a.auto}, {Mittwald, a.replicates}} {
		if best.Claim == Yes || !r.enabled(next.Dialect) {
			continue
		}
		if v := next.ask(); v.Claim > best.Claim {
			best.Verdict, best.dialect = v, next.Dialect
		}
	}
	return best
}

// MayPush reports whether the source may want a copy in the namespace. It takes little time: what
// would take long counts as a want.
func (r *Rules) MayPush(source *Object, ns *Namespace) bool {
	return source.Namespace != ns.Name && r.pushes(source, ns, time.Time{}, false).Claim != No
}

// claims returns the claims on a target other than no, the strongest first: by creation, then by
// name.
func (r *Rules) claims(v View, key Key, ns *Namespace, now time.Time) (list []claim) {
	for _, source := range v.Sources(key.Kind, key.Name) {
		if source.Namespace == key.Namespace || !r.Pushes(source) {
			continue
		}
		c := r.pushes(source, ns, now, true)
		if c.Claim == No {
			continue
		}
		c.Verdict = r.holds(v, source, now).and(c.Verdict)
		list = append(list, c)
	}
	slices.SortFunc(list, func(a, b claim) int {
		return cmp.Or(a.source.Created.Compare(b.source.Created), cmp.Compare(a.source.NamespacedName.String(), b.source.NamespacedName.String()))
	})
	return list
}

// holds returns a held verdict if none of the source's pushes counts for now.
func (r *Rules) holds(v View, source *Object, now time.Time) Verdict {
	home := v.Namespace(source.Namespace)
	if source.Deleting || home.is(labelDisabled) {
		return Verdict{Claim: Held}
	}
	if home == nil {
		home = &Namespace{Name: source.Namespace}
	}
	permitted := r.matchers.get("clauses", r.PushNamespaces, r.matchers.clauses)(home, now, true)
	if permitted.Claim != Yes {
		return held(PushForbidden, "--replication-push-namespaces does not allow a push from this namespace")
	}
	return unsupported(source)
}

// unsupported returns a held verdict for a type of Secret that is never copied.
func unsupported(source *Object) Verdict {
	switch t := corev1.SecretType(source.Type); {
	case strings.HasPrefix(source.Type, "helm.sh"):
		return Verdict{Claim: Held}
	case t == corev1.SecretTypeServiceAccountToken || t == "bootstrap.kubernetes.io/token":
		return held(UnsupportedType, "Secrets of type "+source.Type+" are not copied")
	}
	return yes
}

// permitted returns whether the source lets a pull target in ns have its data. The dialect is that
// of the target.
func (r *Rules) permitted(v View, source *Object, ns *Namespace, d Dialect, now time.Time) Verdict {
	a := asked{r, source, ns, now, true}
	verdict := a.native(AllowPull)
	switch d {
	case Reflector:
		verdict = verdict.or(a.allowed())
	case Mittwald:
		verdict = verdict.or(a.permits())
	}
	if source.Deleting || v.Namespace(source.Namespace).is(labelDisabled) {
		verdict = verdict.and(Verdict{Claim: Held})
	}
	return verdict
}
