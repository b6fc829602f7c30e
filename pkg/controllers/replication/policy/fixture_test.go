// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"maps"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
)

// fixture is a cluster in memory. It decides on every possible target until nothing is left to do,
// and notes what is written.
type fixture struct {
	t        testing.TB
	rules    *Rules
	digester *Digester
	ns       map[string]*Namespace
	objects  map[Key]*Body
	unwanted map[Key]unwanted
	makers   map[Key]Key
	now      time.Time
	version  int
	writes   []string
	problems []string
}

func newFixture(t testing.TB, configure func(*Options)) *fixture {
	t.Helper()
	o := Options{
		Reflector: true, Replicator: true, MarkAdopted: true, DeletionGrace: 5 * time.Second, PushNamespaces: "*", MaxSpread: 64 << 20,
		ProtectedNamespaces: []string{"kube-system"}, ProtectedNames: []string{"kube-root-ca.crt", "sh.helm.release.*", "bootstrap-token-*"},
		DeniedLabels: []string{"argocd.argoproj.io/*", "sealedsecrets.bitnami.com/*", "kustomize.toolkit.fluxcd.io/*", "app.kubernetes.io/managed-by"},
	}
	if configure != nil {
		configure(&o)
	}
	w := &fixture{
		t: t, digester: NewDigester(o, NewDigesterKey()), ns: map[string]*Namespace{}, objects: map[Key]*Body{}, unwanted: map[Key]unwanted{}, makers: map[Key]Key{},
		now: time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC),
	}
	w.rules = NewRules(o)
	w.namespaces("a", "b", "c", "kube-system")
	return w
}

func (w *fixture) namespaces(names ...string) {
	for _, name := range names {
		w.ns[name] = &Namespace{Name: name, Created: w.now, Labels: map[string]string{}}
		w.now = w.now.Add(time.Second)
	}
}

func (w *fixture) label(namespace, key, value string) {
	w.ns[namespace].Labels[key] = value
	if value == "" {
		delete(w.ns[namespace].Labels, key)
	}
}

// put creates or replaces objects, each with a new version.
func (w *fixture) put(bodies ...*Body) {
	for _, b := range bodies {
		w.putOne(b)
	}
}

func (w *fixture) putOne(b *Body) {
	old := w.objects[b.Key()]
	w.version++
	b.ResourceVersion = strconv.Itoa(w.version)
	switch {
	case old != nil:
		b.UID, b.CreationTimestamp = old.UID, old.CreationTimestamp
	case b.UID == "":
		b.UID, b.CreationTimestamp = types.UID("uid-"+b.ResourceVersion), metav1.NewTime(w.now)
		w.now = w.now.Add(time.Second)
	}
	w.objects[b.Key()] = b
}

func (w *fixture) remove(name string) {
	for _, kind := range []Kind{Secret, ConfigMap} {
		key := Key{kind, named(name)}
		if w.objects[key] != nil {
			delete(w.objects, key)
		}
	}
}

// get returns the Secret, or else the ConfigMap, of that name.
func (w *fixture) get(name string) *Body {
	if b := w.objects[Key{Secret, named(name)}]; b != nil {
		return b
	}
	return w.objects[Key{ConfigMap, named(name)}]
}

// edit changes an object.
func (w *fixture) edit(name string, changes ...func(*Body)) {
	w.t.Helper()
	b := w.get(name)
	if b == nil {
		w.t.Fatalf("there is no %s", name)
	}
	c := *b
	c.ObjectMeta = *b.DeepCopy()
	c.Content = maps.Clone(b.Content)
	for _, change := range changes {
		change(&c)
	}
	w.put(&c)
}

func named(text string) types.NamespacedName {
	n, _ := parseReference(text)
	return n
}

// The fixture is a View.
func (w *fixture) Namespace(name string) *Namespace { return w.ns[name] }

func (w *fixture) Get(key Key) *Object {
	b := w.objects[key]
	if b == nil {
		return nil
	}
	// What the cache holds must decide like the object itself.
	return Decode(key.Kind, cached{b, w.digester.Digest(asObject(b))}, "")
}

func (w *fixture) Sources(kind Kind, name string) (list []*Object) {
	for key := range w.objects {
		if key.Kind == kind && key.Name == name {
			if o := w.Get(key); w.rules.Pushes(o) {
				list = append(list, o)
			}
		}
	}
	return list
}

func (w *fixture) Spread(source *Object, now time.Time) int { return w.survey(source, now).Spread }

func (w *fixture) survey(source *Object, now time.Time) Survey {
	return w.rules.Survey(w, source, slices.Collect(maps.Values(w.ns)), now)
}

func (w *fixture) Maker(key Key) Key { return w.makers[key] }

func (w *fixture) UnwantedSince(key Key, why Unwanted, now time.Time) time.Time {
	if u := w.unwanted[key]; u.why == why {
		return u.since
	}
	return now
}

type unwanted struct {
	why   Unwanted
	since time.Time
}

type cached struct {
	*Body
	digest []byte
}

func (c cached) Digest(string) []byte { return c.digest }

// settle decides until nothing is left to do. The graces pass, but for missingGrace.
func (w *fixture) settle() {
	w.t.Helper()
	w.step()
	w.now = w.now.Add(time.Minute)
	w.step()
}

// settled settles, and compares what was written and reported since the last comparison.
func (w *fixture) settled(writes string, problems ...string) {
	w.t.Helper()
	w.settle()
	w.expect(writes, problems...)
}

// step is settle without a grace.
func (w *fixture) step() {
	w.t.Helper()
	for range 20 {
		if !w.round() {
			return
		}
	}
	w.t.Fatalf("the writes do not end: %v", w.writes)
}

func (w *fixture) round() (wrote bool) {
	keys := map[Key]bool{}
	for key := range w.objects {
		keys[key] = true
		for ns := range w.ns {
			keys[NewKey(key.Kind, ns, key.Name)] = true
		}
	}
	for key := range w.objects {
		if o := w.Get(key); w.rules.Pushes(o) {
			w.report(w.survey(o, w.now).Problems)
		}
	}
	for _, key := range slices.SortedFunc(maps.Keys(keys), func(a, b Key) int { return strings.Compare(a.String(), b.String()) }) {
		p := w.rules.Decide(w, key, w.now)
		w.report(p.Problems)
		if delete(w.makers, key); p.Adopted {
			w.makers[key] = p.Source
		}
		if p.Unwanted != w.unwanted[key].why {
			w.unwanted[key] = unwanted{p.Unwanted, w.now}
		}
		if p.Action != Nothing {
			w.apply(key, &p)
			wrote = true
		}
	}
	return wrote
}

func (w *fixture) report(problems []Problem) {
	for _, problem := range problems {
		w.problems = append(w.problems, problem.Reason+" "+problem.About.NamespacedName.String())
	}
}

func (w *fixture) apply(key Key, p *Plan) {
	w.writes = append(w.writes, string(p.Action)+" "+key.NamespacedName.String())
	if p.Action == Delete {
		w.remove(key.NamespacedName.String())
		return
	}
	source, target := w.objects[p.Source], w.objects[key]
	b := w.rules.Apply(p, w.digester, key, source, target, w.now)
	if p.Action == Recreate {
		w.remove(key.NamespacedName.String())
	}
	w.put(b)
}

// expect compares what was written and reported since the last call. Without problems, they are not
// compared.
func (w *fixture) expect(writes string, problems ...string) {
	w.t.Helper()
	slices.Sort(w.writes)
	if got := strings.Join(w.writes, ", "); got != writes {
		w.t.Errorf("writes %q, want %q", got, writes)
	}
	slices.Sort(w.problems)
	got := slices.Compact(w.problems)
	for _, problem := range problems {
		if !slices.Contains(got, problem) {
			w.t.Errorf("no problem %q in %q", problem, got)
		}
	}
	w.writes, w.problems = nil, nil
}

// holds compares the content of an object, as k=v pairs that are sorted, and named annotations.
func (w *fixture) holds(name, content string, annotations ...string) {
	w.t.Helper()
	b := w.get(name)
	if b == nil {
		w.t.Errorf("there is no %s", name)
		return
	}
	var list []string
	for slot, value := range b.Content {
		text := slot.key() + "=" + string(value)
		if strings.HasPrefix(string(slot), inBinaryData) {
			text += "(binary)"
		}
		list = append(list, text)
	}
	slices.Sort(list)
	if got := strings.Join(list, " "); got != content {
		w.t.Errorf("%s holds %q, want %q", name, got, content)
	}
	for _, a := range annotations {
		key, value, _ := strings.Cut(a, "=")
		if got, has := b.Annotations[full(key)]; has != (value != "(none)") || has && value != "*" && got != value {
			w.t.Errorf("%s has %s=%q, want %q", name, key, got, value)
		}
	}
}

// full returns a key of an annotation: R: and M: stand for the prefixes of the originals, Q: for ours.
func full(key string) string {
	return strings.NewReplacer("R:", reflectorPrefix, "M:", replicatorPrefix, "Q:", nativePrefix).Replace(key)
}

// newBody returns an object with content k=v and annotations key=value.
func newBody(kind Kind, name, content string, changes ...func(*Body)) *Body {
	n := named(name)
	b := &Body{ObjectMeta: metav1.ObjectMeta{Namespace: n.Namespace, Name: n.Name, Annotations: map[string]string{}}, Kind: kind, Content: contentOf(content)}
	if kind == Secret {
		b.Type = string(corev1.SecretTypeOpaque)
	}
	for _, change := range changes {
		change(b)
	}
	return b
}

func contentOf(text string) map[Slot][]byte {
	content := map[Slot][]byte{}
	for pair := range strings.FieldsSeq(text) {
		key, value, _ := strings.Cut(pair, "=")
		value, binary := strings.CutSuffix(value, "(binary)")
		content[Slot(map[bool]string{false: inData, true: inBinaryData}[binary]+key)] = []byte(value)
	}
	return content
}

func secret(name, content string, changes ...func(*Body)) *Body {
	return newBody(Secret, name, content, changes...)
}

func configMap(name, content string, changes ...func(*Body)) *Body {
	return newBody(ConfigMap, name, content, changes...)
}

// with sets annotations: key=value, or key alone to remove it.
func with(pairs ...string) func(*Body) {
	return func(b *Body) {
		for _, pair := range pairs {
			key, value, has := strings.Cut(pair, "=")
			if !has {
				delete(b.Annotations, full(key))
				continue
			}
			if b.Annotations == nil {
				b.Annotations = map[string]string{}
			}
			b.Annotations[full(key)] = value
		}
	}
}

func data(text string) func(*Body) { return func(b *Body) { b.Content = contentOf(text) } }

func typed(t corev1.SecretType) func(*Body) { return func(b *Body) { b.Type = string(t) } }

func labelled(pairs ...string) func(*Body) {
	return func(b *Body) {
		b.Labels = map[string]string{}
		for _, pair := range pairs {
			key, value, _ := strings.Cut(pair, "=")
			b.Labels[key] = value
		}
	}
}

func immutable(b *Body) { b.Immutable = new(true) }

func asObject(b *Body) interface {
	metav1.Object
	runtime.Object
} {
	if b.Kind == Secret {
		return b.Secret()
	}
	return b.ConfigMap()
}

// auto are the annotations of an automatic source of the reflector; to are its namespaces.
func auto(to ...string) func(*Body) {
	pairs := []string{"R:reflection-allowed=true", "R:reflection-auto-enabled=true"}
	if len(to) > 0 {
		pairs = append(pairs, "R:reflection-auto-namespaces="+strings.Join(to, ","))
	}
	return with(pairs...)
}

// reflectorMade are the annotations of a copy that the reflector made.
func reflectorMade(source, version string) func(*Body) {
	return with("R:reflects="+source, "R:auto-reflects=True", "R:reflected-version="+version, "R:reflected-at=2026-01-01T00:00:00.1234567+00:00")
}

// replicatorMade are the annotations of what the replicator wrote.
func replicatorMade(version, keys string) func(*Body) {
	return with("M:replicated-at=2026-01-01T00:00:00Z", "M:replicated-from-version="+version, "M:replicated-keys="+keys)
}
