// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"bytes"
	"fmt"
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
	t         testing.TB
	evaluator *Evaluator
	digester  *Digester
	ns        map[string]*Namespace
	objects   map[Key]*Body
	unwanted  map[Key]unwanted
	makers    map[Key]Key
	now       time.Time
	version   int
	writes    []string
	problems  []string
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
	f := &fixture{
		t: t, digester: NewDigester(o, NewDigesterKey()), ns: map[string]*Namespace{}, objects: map[Key]*Body{}, unwanted: map[Key]unwanted{}, makers: map[Key]Key{},
		now: time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC),
	}
	f.evaluator = NewEvaluator(o)
	f.addNamespaces("a", "b", "c", "kube-system")
	return f
}

// row is a row of a table: options, which may be nil, and what happens.
type row struct {
	configure func(*Options)
	run       func(f *fixture)
}

func runCases(t *testing.T, rows map[string]row) {
	t.Helper()
	for name, tc := range rows {
		t.Run(name, func(t *testing.T) { tc.run(newFixture(t, tc.configure)) })
	}
}

func (f *fixture) addNamespaces(names ...string) {
	for _, name := range names {
		f.ns[name] = &Namespace{Name: name, Created: f.now, Labels: map[string]string{}}
		f.now = f.now.Add(time.Second)
	}
}

// label sets a label of a namespace, or removes it if the value is empty. It and what changes objects return
// the fixture, so that calls can be chained.
func (f *fixture) label(namespace, key, value string) *fixture {
	f.ns[namespace].Labels[key] = value
	if value == "" {
		delete(f.ns[namespace].Labels, key)
	}
	return f
}

// put creates or replaces objects, each with a new version.
func (f *fixture) put(bodies ...*Body) *fixture {
	for _, b := range bodies {
		f.version++
		b.ResourceVersion = strconv.Itoa(f.version)
		if old := f.objects[b.Key()]; old != nil {
			b.UID, b.CreationTimestamp = old.UID, old.CreationTimestamp
		} else if b.UID == "" {
			b.UID, b.CreationTimestamp = types.UID("uid-"+b.ResourceVersion), metav1.NewTime(f.now)
			f.now = f.now.Add(time.Second)
		}
		f.objects[b.Key()] = b
	}
	return f
}

func (f *fixture) remove(name string) *fixture {
	for _, kind := range Kinds {
		delete(f.objects, Key{kind, parseName(name)})
	}
	return f
}

// get returns the Secret, or else the ConfigMap, of that name.
func (f *fixture) get(name string) *Body {
	if b := f.objects[Key{Secret, parseName(name)}]; b != nil {
		return b
	}
	return f.objects[Key{ConfigMap, parseName(name)}]
}

// edit changes an object.
func (f *fixture) edit(name string, changes ...func(*Body)) *fixture {
	f.t.Helper()
	b := f.get(name)
	if b == nil {
		f.t.Fatalf("there is no %s", name)
	}
	c := *b
	c.ObjectMeta = *b.DeepCopy()
	c.Content = maps.Clone(b.Content)
	for _, change := range changes {
		change(&c)
	}
	return f.put(&c)
}

func parseName(text string) types.NamespacedName {
	n, _ := parseReference(text)
	return n
}

// The fixture is a View.
func (f *fixture) Namespace(name string) *Namespace { return f.ns[name] }

func (f *fixture) Get(key Key) *Object {
	b := f.objects[key]
	if b == nil {
		return nil
	}
	// What the cache holds must decide like the object itself.
	return Decode(key.Kind, cached{b, f.digester.Digest(asObject(b))}, "")
}

func (f *fixture) Sources(kind Kind, name string) (list []*Object) {
	for key := range f.objects {
		if key.Kind == kind && key.Name == name {
			if o := f.Get(key); f.evaluator.Pushes(o) {
				list = append(list, o)
			}
		}
	}
	return list
}

func (f *fixture) Spread(source *Object, now time.Time) int { return f.survey(source, now).Spread }

func (f *fixture) survey(source *Object, now time.Time) Survey {
	return f.evaluator.Survey(f, source, slices.Collect(maps.Values(f.ns)), now)
}

func (f *fixture) Maker(key Key) Key { return f.makers[key] }

func (f *fixture) UnwantedSince(key Key, reason Unwanted, now time.Time) time.Time {
	if u := f.unwanted[key]; u.reason == reason {
		return u.since
	}
	return now
}

type unwanted struct {
	reason Unwanted
	since  time.Time
}

type cached struct {
	*Body
	digest []byte
}

func (c cached) Digest(string) []byte { return c.digest }

// settle decides until nothing is left to do. The graces pass, but for missingGrace.
func (f *fixture) settle() {
	f.t.Helper()
	f.step()
	f.now = f.now.Add(time.Minute)
	f.step()
}

// expectSettled settles, and compares what was written and reported since the last comparison.
func (f *fixture) expectSettled(writes string, problems ...string) {
	f.t.Helper()
	f.settle()
	f.expect(writes, problems...)
}

// step is settle without a grace.
func (f *fixture) step() {
	f.t.Helper()
	for range 20 {
		if !f.runRound() {
			return
		}
	}
	f.t.Fatalf("the writes do not end: %v", f.writes)
}

func (f *fixture) runRound() (wrote bool) {
	keys := map[Key]bool{}
	for key := range f.objects {
		keys[key] = true
		for ns := range f.ns {
			keys[NewKey(key.Kind, ns, key.Name)] = true
		}
	}
	for key := range f.objects {
		if o := f.Get(key); f.evaluator.Pushes(o) {
			f.addProblems(f.survey(o, f.now).Problems)
		}
	}
	for _, key := range slices.SortedFunc(maps.Keys(keys), func(a, b Key) int { return strings.Compare(a.String(), b.String()) }) {
		p := f.evaluator.Decide(f, key, f.now)
		f.addProblems(p.Problems)
		if delete(f.makers, key); p.Adopted {
			f.makers[key] = p.Source
		}
		if p.Unwanted != f.unwanted[key].reason {
			f.unwanted[key] = unwanted{p.Unwanted, f.now}
		}
		if p.Action != Nothing {
			f.apply(key, &p)
			wrote = true
		}
	}
	return wrote
}

func (f *fixture) addProblems(problems []Problem) {
	for _, problem := range problems {
		f.problems = append(f.problems, problem.Reason+" "+problem.Object.NamespacedName.String())
	}
}

func (f *fixture) apply(key Key, plan *Plan) {
	f.writes = append(f.writes, string(plan.Action)+" "+key.NamespacedName.String())
	if plan.Action == Delete {
		f.remove(key.NamespacedName.String())
		return
	}
	source, target := f.objects[plan.Source], f.objects[key]
	b := f.evaluator.Apply(plan, f.digester, key, source, target, f.now)
	if plan.Action == Recreate {
		f.remove(key.NamespacedName.String())
	}
	f.put(b)
}

// expect compares what was written and reported since the last call. Without problems, they are not
// compared.
func (f *fixture) expect(writes string, problems ...string) {
	f.t.Helper()
	slices.Sort(f.writes)
	if got := strings.Join(f.writes, ", "); got != writes {
		f.t.Errorf("writes %q, want %q", got, writes)
	}
	slices.Sort(f.problems)
	got := slices.Compact(f.problems)
	for _, problem := range problems {
		if !slices.Contains(got, problem) {
			f.t.Errorf("no problem %q in %q", problem, got)
		}
	}
	f.writes, f.problems = nil, nil
}

// expectContent compares the content of an object, as k=v pairs, and named annotations.
func (f *fixture) expectContent(name, content string, annotations ...string) {
	f.t.Helper()
	b := f.get(name)
	if b == nil || !maps.EqualFunc(b.Content, contentOf(content), bytes.Equal) {
		f.t.Fatalf("%s is %+v, want one that holds %q", name, b, content)
	}
	for _, a := range annotations {
		key, value, _ := strings.Cut(a, "=")
		if got, has := b.Annotations[fullKey(key)]; has != (value != "(none)") || has && value != "*" && got != value {
			f.t.Errorf("%s has %s=%q, want %q", name, key, got, value)
		}
	}
}

// expectLabels compares the labels of an object, sorted.
func (f *fixture) expectLabels(name, want string) {
	f.t.Helper()
	if got := fmt.Sprint(f.get(name).Labels); got != "map["+want+"]" {
		f.t.Errorf("%s has the labels %s, want %s", name, got, want)
	}
}

// fullKey returns a key of an annotation: R: and M: stand for the prefixes of the originals, Q: for ours.
func fullKey(key string) string {
	return strings.NewReplacer("R:", reflectorPrefix, "M:", replicatorPrefix, "Q:", nativePrefix).Replace(key)
}

// configMap returns a ConfigMap with content k=v.
func configMap(name, content string, changes ...func(*Body)) *Body {
	n := parseName(name)
	b := &Body{ObjectMeta: metav1.ObjectMeta{Namespace: n.Namespace, Name: n.Name, Annotations: map[string]string{}}, Kind: ConfigMap, Content: contentOf(content)}
	for _, change := range changes {
		change(b)
	}
	return b
}

func secret(name, content string, changes ...func(*Body)) *Body {
	return configMap(name, content, append([]func(*Body){func(b *Body) { b.Kind, b.Type = Secret, string(corev1.SecretTypeOpaque) }}, changes...)...)
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

// annotated sets annotations: key=value, or key alone to remove it.
func annotated(pairs ...string) func(*Body) {
	return func(b *Body) {
		for _, pair := range pairs {
			key, value, has := strings.Cut(pair, "=")
			if !has {
				delete(b.Annotations, fullKey(key))
				continue
			}
			b.Annotations[fullKey(key)] = value
		}
	}
}

func holding(text string) func(*Body) { return func(b *Body) { b.Content = contentOf(text) } }

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

// autoPush are the annotations of an automatic source of the reflector with these namespaces.
func autoPush(namespaces ...string) func(*Body) {
	pairs := []string{"R:reflection-allowed=true", "R:reflection-auto-enabled=true"}
	if len(namespaces) > 0 {
		pairs = append(pairs, "R:reflection-auto-namespaces="+strings.Join(namespaces, ","))
	}
	return annotated(pairs...)
}

// reflectorMade are the annotations of a copy that the reflector made.
func reflectorMade(source, version string) func(*Body) {
	return annotated("R:reflects="+source, "R:auto-reflects=True", "R:reflected-version="+version, "R:reflected-at=2026-01-01T00:00:00.1234567+00:00")
}

// replicatorMade are the annotations of what the replicator wrote.
func replicatorMade(version, keys string) func(*Body) {
	return annotated("M:replicated-at=2026-01-01T00:00:00Z", "M:replicated-from-version="+version, "M:replicated-keys="+keys)
}
