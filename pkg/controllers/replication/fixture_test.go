// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package replication_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/controllertest"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/replication"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/replication/policy"
)

// fixture is a cluster with a manager that runs replication, in a bubble of fake time.
type fixture struct {
	*controllertest.Host
	t     *testing.T
	cfg   *replication.Config
	heard map[types.UID]int // how often each Event was told at the last call of told

	mu       sync.Mutex
	requests []controllertest.Request
	hooks    []func(controllertest.Request) error
}

// newFixture creates the namespaces a, b, c and kube-system and the objects, and starts the manager.
func newFixture(t *testing.T, configure func(*replication.Config), flags []string, objects ...runtime.Object) *fixture {
	t.Helper()
	entry := replication.Entry()
	f := &fixture{t: t, cfg: entry.Config.(*replication.Config), heard: map[types.UID]int{}}
	f.cfg.PushNamespaces = "*"
	if configure != nil {
		configure(f.cfg)
	}
	for _, name := range []string{"a", "b", "c", "kube-system"} {
		objects = append(objects, namespace(name))
	}
	flags = append(flags, "--compat=reflector,replicator")
	controllertest.Setup{Entries: []controllers.Entry{entry}, Flags: flags, Prepare: func(h *controllertest.Host) {
		f.Host = h
		h.OnRead(f.request)
		h.OnWrite(f.request)
	}}.NewHost(t, objects...)
	return f
}

func namespace(name string) *corev1.Namespace {
	return &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}
}

func disabled(name string) *corev1.Namespace {
	n := namespace(name)
	n.Labels = map[string]string{policy.NamespaceLabel: "disabled"}
	return n
}

// manyNamespaces returns the namespaces n-0, n-1, ... and more objects.
func manyNamespaces(n int, more ...runtime.Object) []runtime.Object {
	for i := range n {
		more = append(more, namespace(fmt.Sprintf("n-%d", i)))
	}
	return more
}

// reconcileCase is one row: the objects at the start, and what then happens.
type reconcileCase struct {
	lag       time.Duration
	configure func(*replication.Config)
	flags     []string
	objects   []runtime.Object
	run       func(f *fixture)
}

// given returns a row with what happens, and the objects at the start.
func given(run func(f *fixture), objects ...runtime.Object) reconcileCase {
	return reconcileCase{objects: objects, run: run}
}

func runCases(t *testing.T, cases map[string]reconcileCase) {
	t.Helper()
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFixture(t, tc.configure, tc.flags, tc.objects...)
				f.Lag(tc.lag, "secrets")
				tc.run(f)
			})
		})
	}
}

// request is called for requests of the controller, one at a time. It records those for Secrets, but
// no creation of what is there already, which the cache did not show yet.
func (f *fixture) request(r controllertest.Request) error {
	f.mu.Lock()
	hooks := slices.Clone(f.hooks)
	f.mu.Unlock()
	if r.Resource == "secrets" && (r.Verb != "create" || r.DryRun || f.secret(r.Namespace+"/"+r.Name) == nil) {
		f.mu.Lock()
		f.requests = append(f.requests, r)
		f.mu.Unlock()
	}
	if body := string(r.Body); r.Verb == "delete" && (!strings.Contains(body, `"uid":`) || !strings.Contains(body, `"resourceVersion":`)) {
		f.t.Errorf("deletion of %s without preconditions", r.Name)
	}
	for _, hook := range hooks {
		if err := hook(r); err != nil {
			return err
		}
	}
	return nil
}

// refusal is the refusal of a write by something in the API server.
func refusal(text string) *apierrors.StatusError {
	return apierrors.NewForbidden(schema.GroupResource{Resource: "secrets"}, "s", errors.New(text))
}

// before calls hook before each request for a Secret with that verb, dry runs included. It may refuse
// the request.
func (f *fixture) before(verb string, hook func(controllertest.Request) error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.hooks = append(f.hooks, func(r controllertest.Request) error {
		if r.Verb != verb || r.Resource != "secrets" {
			return nil
		}
		return hook(r)
	})
}

// once calls hook before the first request for a Secret with that verb.
func (f *fixture) once(verb string, hook func() error) {
	done := false
	f.before(verb, func(controllertest.Request) error {
		if done {
			return nil
		}
		done = true
		return hook()
	})
}

// pass lets time pass, with everything that happens in it.
func (f *fixture) pass(d time.Duration) {
	<-time.After(d)
	synctest.Wait()
}

// restart hands over to a manager that knows nothing, after meanwhile. Earlier requests are forgotten.
func (f *fixture) restart(meanwhile ...func()) *fixture {
	f.t.Helper()
	f.Restart(append(meanwhile, func() { f.asked() })...)
	return f
}

// secret returns the Secret of that name, namespace/name, in the API server; nil if there is none.
func (f *fixture) secret(name string) *corev1.Secret {
	namespace, name, _ := strings.Cut(name, "/")
	return controllertest.Get[corev1.Secret](f.Host, namespace, name)
}

// edit changes a Secret behind the controller's back. It, remove and restart return the fixture, so that what
// follows can be said after it.
func (f *fixture) edit(name string, changes ...func(*corev1.Secret)) *fixture {
	f.t.Helper()
	s := f.secret(name)
	if s == nil {
		f.t.Fatalf("there is no %s", name)
	}
	for _, change := range changes {
		change(s)
	}
	f.Put(s)
	return f
}

func (f *fixture) remove(name string) *fixture {
	f.t.Helper()
	f.Delete(secret(name, ""))
	return f
}

// asked returns the requests for Secrets with these verbs since the last call, sorted.
func (f *fixture) asked(verbs ...string) (list []string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, r := range f.requests {
		if slices.Contains(verbs, r.Verb) {
			list = append(list, strings.ReplaceAll(r.String(), " secrets ", " "))
		}
	}
	slices.Sort(list)
	f.requests = nil
	return list
}

var allVerbs = []string{"get", "create", "update", "delete"}

// after lets time pass, and then is expect.
func (f *fixture) after(d time.Duration, want string, verbs ...string) {
	f.t.Helper()
	f.pass(d)
	f.expect(want, verbs...)
}

// expect compares the requests for Secrets with the given verbs since the last call, or those that
// write.
func (f *fixture) expect(want string, verbs ...string) {
	f.t.Helper()
	if len(verbs) == 0 {
		verbs = []string{"create", "update", "delete", "patch"}
	}
	if got := strings.Join(f.asked(verbs...), ", "); got != want {
		f.t.Errorf("requests %q, want %q", got, want)
	}
}

// told compares the reasons of the Events since the last call, sorted.
func (f *fixture) told(want string) {
	f.t.Helper()
	f.pass(10 * time.Millisecond)
	var list []string
	for _, e := range controllertest.List[corev1.Event](f.Host) {
		for range int(e.Count) - f.heard[e.UID] {
			list = append(list, e.Reason)
		}
		f.heard[e.UID] = int(e.Count)
	}
	slices.Sort(list)
	if got := strings.Join(list, " "); got != want {
		f.t.Errorf("Events %s, want %s", got, want)
	}
}

// says looks for an Event.
func (f *fixture) says(want string) {
	f.t.Helper()
	if all := f.Events(); !slices.Contains(all, want) {
		f.t.Errorf("no Event %q in %q", want, all)
	}
}

// count compares the sum of a metric over the series with these labels.
func (f *fixture) count(want float64, name string, labels ...string) {
	f.t.Helper()
	if got := f.Metric("quartermaster_replication_"+name, labels...); got != want {
		f.t.Errorf("%s is %v, want %v", name, got, want)
	}
}

// holds compares the value of a Secret.
func (f *fixture) holds(name, want string) {
	f.t.Helper()
	if s := f.secret(name); s == nil || string(s.Data["k"]) != want {
		f.t.Errorf("%s is %v, want one with the value %s", name, s, want)
	}
}

// copies compares the number of Secrets with a marker, from least to most.
func (f *fixture) copies(least, most int) {
	f.t.Helper()
	n := 0
	for _, s := range controllertest.List[corev1.Secret](f.Host) {
		if s.Annotations[policy.Marker] != "" {
			n++
		}
	}
	if n < least || n > most {
		f.t.Errorf("%d copies, want %d to %d", n, least, most)
	}
}

// secret returns an Opaque Secret with k=value and annotations key=value, in which Q: and R: and M:
// stand for the prefixes.
func secret(name, value string, annotations ...string) *corev1.Secret {
	namespace, name, _ := strings.Cut(name, "/")
	s := &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, Annotations: map[string]string{}},
		Type:       corev1.SecretTypeOpaque, Data: map[string][]byte{"k": []byte(value)},
	}
	annotate(annotations...)(s)
	return s
}

func annotate(pairs ...string) func(*corev1.Secret) {
	return func(s *corev1.Secret) {
		if s.Annotations == nil {
			s.Annotations = map[string]string{}
		}
		for _, pair := range pairs {
			key, value, has := strings.Cut(pair, "=")
			key = strings.NewReplacer("Q:", "quartermaster.dev/", "R:", "reflector.v1.k8s.emberstack.com/", "M:", "replicator.v1.mittwald.de/").Replace(key)
			if has {
				s.Annotations[key] = value
			} else {
				delete(s.Annotations, key)
			}
		}
	}
}

func holding(value string) func(*corev1.Secret) {
	return func(s *corev1.Secret) { s.Data = map[string][]byte{"k": []byte(value)} }
}
