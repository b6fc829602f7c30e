// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package replication_test

import (
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
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

// pass lets time pass, with everything that happens in it.
func (f *fixture) pass(d time.Duration) {
	<-time.After(d)
	synctest.Wait()
}

// restart hands over to a manager that knows nothing, after meanwhile. Earlier requests are forgotten.
func (f *fixture) restart(meanwhile ...func()) {
	f.t.Helper()
	f.Restart(append(meanwhile, func() { f.asked() })...)
}

// secret returns the Secret of that name, namespace/name, in the API server; nil if there is none.
func (f *fixture) secret(name string) *corev1.Secret {
	namespace, name, _ := strings.Cut(name, "/")
	return controllertest.Get[corev1.Secret](f.Host, namespace, name)
}

// edit changes a Secret behind the controller's back.
func (f *fixture) edit(name string, changes ...func(*corev1.Secret)) {
	f.t.Helper()
	s := f.secret(name)
	if s == nil {
		f.t.Fatalf("there is no %s", name)
	}
	for _, change := range changes {
		change(s)
	}
	f.Put(s)
}

func (f *fixture) remove(name string) {
	f.t.Helper()
	f.Delete(secret(name, ""))
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

// told returns the reasons of the Events since the last call, sorted.
func (f *fixture) told() string {
	f.pass(10 * time.Millisecond)
	var list []string
	for _, e := range controllertest.List[corev1.Event](f.Host) {
		for range int(e.Count) - f.heard[e.UID] {
			list = append(list, e.Reason)
		}
		f.heard[e.UID] = int(e.Count)
	}
	slices.Sort(list)
	return strings.Join(list, " ")
}

// count returns the sum of a metric over the series with these labels.
func (f *fixture) count(name string, labels ...string) float64 {
	f.t.Helper()
	return f.Metric("quartermaster_replication_"+name, labels...)
}

// copies counts the Secrets with a marker.
func (f *fixture) copies() (n int) {
	for _, s := range controllertest.List[corev1.Secret](f.Host) {
		if s.Annotations[policy.Marker] != "" {
			n++
		}
	}
	return n
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
