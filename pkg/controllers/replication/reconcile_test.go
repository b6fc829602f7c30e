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

// TestReconcileSendsTheDocumentedRequests has the rules of docs/controllers/replication.md that are about
// requests, time and crashes. Package policy has the others.
func TestReconcileSendsTheDocumentedRequests(t *testing.T) {
	// fight changes a target for ten minutes.
	fight := func(f *fixture, target string) {
		for range 600 {
			f.edit(target, holding("placeholder")).advance(time.Second)
		}
		if n := len(f.takeRequests("update")); n < 5 || n > 12 {
			f.t.Errorf("%d updates, want at most 12", n)
		}
	}
	// disable has the namespace a disabled, and then its source deleted.
	disable := func(f *fixture) {
		f.Put(disabled("a"))
		f.advance(time.Second)
		f.remove("a/s").expectAfter(time.Hour, "create b/s")
	}
	runCases(t, map[string]reconcileCase{
		"an automatic source reaches every namespace that is not protected": newCase(func(f *fixture) {
			f.expectRequests("create b/s, create c/s")
			f.expectEvents("NamespaceProtected Replicated")
			f.expectMetric(2, "targets", "dialect", "reflector", "state", "in_sync")
		}, secret("a/s", "v", "R:reflection-allowed=true", "R:reflection-auto-enabled=true")),
		"a namespace that is created gets its copies": newCase(func(f *fixture) { f.Put(namespace("new-1")); f.expectAfter(time.Second, "create new-1/s") },
			secret("a/s", "v", "Q:push-to=new-*")),
		"an orphan is found after a restart": newCase(func(f *fixture) { f.restart(func() { f.remove("a/s") }); f.expectAfter(6*time.Second, "delete b/s") },
			secret("a/s", "v", "Q:push-to=b")),
		"markers are added a few per second": newCase(func(f *fixture) {
			for i := range 20 {
				name := fmt.Sprintf("s%d", i)
				f.Put(secret("b/"+name, "v", "M:replicated-keys=k", "M:replicated-at=x"), secret("a/"+name, "v", "M:replicate-to=b"))
				f.edit("b/"+name, annotate("M:replicated-from-version="+f.secret("a/"+name).ResourceVersion))
			}
			f.advance(2 * time.Second)
			f.expectCopies(8, 17)
			f.edit("a/s19", holding("w"))
			f.edit("a/s18", holding("w")).advance(time.Millisecond)
			f.expectValue("b/s19", "w") // an update does not wait for the turn of a marker
			f.expectValue("b/s18", "w")
			f.advance(3 * time.Second)
			f.expectCopies(20, 20)
		}),
		"a source that goes during a fan-out leaves what was made, which is deleted": newCase(func(f *fixture) {
			created := 0
			f.beforeRequest("create", func(_ controllertest.Request) error {
				if created++; created == 100 {
					f.remove("a/s")
				}
				return nil
			})
			f.Put(secret("a/s", "v", "M:replicate-to=n-.*"))
			f.advance(10 * time.Second)
			if created < 100 || created > 200 {
				f.t.Errorf("%d creations, want about 100", created)
			}
			f.expectCopies(0, 0)
		}, manyNamespaces(500)...),
		"a refused write is tried again, and told once, without the quota of its namespace": newCase(func(f *fixture) {
			remaining := 5
			f.beforeRequest("create", func(r controllertest.Request) error {
				if r.Namespace != "b" || remaining == 0 {
					return nil
				}
				remaining--
				return refusal("exceeded quota: q, requested: secrets=1, used: secrets=41, limited: secrets=41")
			})
			f.Put(secret("a/s", "v", "Q:push-to=b,c"))
			f.expectAfter(30*time.Second, "create b/s, create b/s, create b/s, create b/s, create b/s, create c/s")
			f.expectEvents("Replicated WriteRejected")
			// Whoever pushes is not shown another namespace's quota.
			f.expectEvent("Warning WriteRejected a/s: create Secret b/s: Forbidden")
			f.expectAfter(time.Minute, "create b/s")
			f.expectMetric(5, "writes_total", "result", "error")
		}),
		"a target that appears while the source is read is not written as if it were a new copy": newCase(func(f *fixture) {
			f.beforeFirst("get", func() error {
				target := secret("b/s", "", "Q:pull-from=a/s")
				target.Labels = map[string]string{"theirs": "yes"}
				f.Put(target)
				<-time.After(time.Second) // until the cache has it
				return nil
			})
			f.Put(secret("a/s", "v", "Q:push-to=b", "Q:allow-pull=b"))
			f.advance(10 * time.Second)
			got := f.secret("b/s")
			if got.Labels["theirs"] != "yes" || got.Annotations["quartermaster.dev/pull-from"] != "a/s" || string(got.Data["k"]) != "v" {
				f.t.Errorf("labels %v, annotations %v, keys %d", got.Labels, got.Annotations, len(got.Data))
			}
		}),
		"a namespace that terminates before the cache knows is no error": newCase(func(f *fixture) {
			f.beforeRequest("create", func(r controllertest.Request) error {
				if r.Namespace == "c" {
					return nil
				}
				err := refusal("is being terminated")
				err.ErrStatus.Details.Causes = []metav1.StatusCause{{Type: corev1.NamespaceTerminatingCause}}
				return err
			})
			f.Put(secret("a/s", "v", "Q:push-to=b,c"))
			f.expectAfter(9*time.Minute, "create b/s, create b/s, create c/s") // again after namespaceRetryDelay
			f.expectMetric(0, "writes_total", "result", "error")
		}),
		"a conflict is decided on again": newCase(func(f *fixture) {
			f.expectAfter(time.Second, "create b/s")
			f.beforeFirst("update", func() error { return apierrors.NewConflict(corev1.Resource("secrets"), "s", errors.New("changed")) })
			f.edit("a/s", holding("w")).expectAfter(500*time.Millisecond, "get a/s, get a/s, get b/s, get b/s, update b/s, update b/s", allVerbs...)
		}, secret("a/s", "v", "Q:push-to=b")),
		"a creation that comes too late is decided on again": newCase(func(f *fixture) {
			f.Lag(10*time.Second, "secrets")
			f.expectAfter(time.Minute, "create c/s")
			f.Put(secret("b/s", "own"))
			f.edit("a/s", annotate("Q:push-to=b,c")).advance(time.Minute)
			f.expectValue("b/s", "own")
		}, secret("a/s", "v", "Q:push-to=c")),
		"a dry run persists nothing": newCase(func(f *fixture) { f.expectRequests("dry run: create b/s, dry run: create c/s"); f.expectEvents("") },
			secret("a/s", "v", "R:reflection-allowed=true", "R:reflection-auto-enabled=true")).withConfig(dryRun),
		"the live source decides, whatever the cache says": newCase(func(f *fixture) {
			f.Lag(time.Minute, "secrets")
			f.edit("b/t", annotate("Q:pull-from=a/s")).advance(30 * time.Second)
			f.edit("a/s", annotate("Q:allow-pull")).expectAfter(10*time.Minute, "")
		}, secret("a/s", "v", "Q:allow-pull=b"), secret("b/t", "old", "Q:pull-from=a/none")),
		"a copy is not deleted if the live source wants it": newCase(func(f *fixture) {
			f.Lag(time.Minute, "secrets")
			f.expectAfter(5*time.Minute, "create b/s")
			f.edit("a/s", annotate("Q:push-to")).advance(30 * time.Second)
			f.edit("a/s", annotate("Q:push-to=b")).expectAfter(10*time.Minute, "get a/s, get b/s", allVerbs...)
		}, secret("a/s", "v", "Q:push-to=b")),
		"a source that went while its namespace was disabled is missed when the label goes": newCase(func(f *fixture) { disable(f); f.Put(namespace("a")); f.expectAfter(6*time.Second, "delete b/s") },
			secret("a/s", "v", "Q:push-to=b")),
		"a source that went while its namespace was disabled is missed when the namespace goes": newCase(func(f *fixture) {
			disable(f)
			f.Delete(disabled("a"))
			f.expectAfter(9*time.Minute, "")
			f.expectAfter(2*time.Minute, "delete b/s")
		}, secret("a/s", "v", "Q:push-to=b")),
		"with namespaces a source that cannot be read is not gone": newCase(func(f *fixture) { f.expectAfter(time.Hour, "", allVerbs...) },
			secret("b/t", "v", "M:replicate-from=a/s", "M:replicated-from-version=1", "M:replicated-keys=k",
				`Q:source={"copy":"b/t","dialect":"replicator","mode":"pull","source":"a/s","uid":"1"}`),
			secret("b/s", "v", "R:reflects=a/s", "R:auto-reflects=True")).withConfig(nil, "--namespaces=b"),
		"what is in sync costs no request": newCase(func(f *fixture) {
			f.advance(time.Minute)
			f.expectCopies(300, 300)
			f.restart()
			f.edit("a/s", annotate("x=y")).expectAfter(time.Minute, "", allVerbs...)
		}, manyNamespaces(300, secret("a/s", "v", "Q:push-to=n-*"))...),
		"a repair that does not last is made ever more seldom": newCase(func(f *fixture) {
			f.expectAfter(time.Second, "create b/s")
			fight(f, "b/s")
			f.expectEvent("Warning DriftFight a/s: b/s is changed again and again, at last by test; it is repaired ever more seldom")
		}, secret("a/s", "v", "Q:push-to=b")),
		"a repair of a dry run that does not last is made ever more seldom": newCase(func(f *fixture) { fight(f, "b/t") },
			secret("a/s", "v", "Q:allow-pull=b"), secret("b/t", "", "Q:pull-from=a/s")).withConfig(dryRun),
		"a drift is reported, and the next one again after ten minutes": newCase(func(f *fixture) {
			f.remove("b/s").advance(11 * time.Minute)
			f.remove("c/s").advance(time.Second)
			f.expectEvent("Normal DriftRepaired a/s: repaired c/s")
		}, secret("a/s", "v", "Q:push-to=*")),
		"with namespaces no Namespace is read": newCase(func(f *fixture) { f.expectRequests("create b/s") },
			secret("a/s", "v", "Q:push-to=*")).withConfig(nil, "--namespaces=a,b"),
	})
}

// TestTenantDelaysNoOther has attacks by a writer of objects in one namespace that take time and requests;
// package policy has the others.
func TestTenantDelaysNoOther(t *testing.T) {
	runCases(t, map[string]reconcileCase{
		"a copy does not change hands while its source is away for a moment, and comes back": newCase(func(f *fixture) {
			f.remove("a/s").advance(4 * time.Second)
			f.Put(secret("a/s", "v", "Q:push-to=b"))
			f.expectAfter(time.Minute, "create b/s")
			f.remove("a/s").expectAfter(time.Minute, "create b/s, delete b/s")
			f.Put(secret("a/s", "v", "Q:push-to=b"))
			f.expectAfter(time.Second, "create b/s, delete b/s")
			f.expectValue("b/s", "v")
		}, secret("a/s", "v", "Q:push-to=b"), secret("c/s", "attack", "Q:push-to=b")),
		"a restored backup loses no copy while its source's namespace is not there yet": newCase(func(f *fixture) {
			f.Put(secret("b/s", "v", `Q:source={"copy":"b/s","dialect":"native","mode":"push","source":"later/s","uid":"1"}`))
			f.advance(9 * time.Minute)
			f.Put(namespace("later"), secret("later/s", "v", "Q:push-to=b"))
			f.expectAfter(time.Hour, "")
		}),
		"a replacement that has no annotations for a moment deletes nothing": newCase(func(f *fixture) {
			f.edit("a/s", annotate("Q:push-to")).advance(4 * time.Second)
			f.edit("a/s", annotate("Q:push-to=b,c")).expectAfter(time.Hour, "create b/s, create c/s")
			f.edit("a/s", annotate("Q:push-to=b")).expectAfter(4*time.Second, "")
			f.expectAfter(2*time.Second, "delete c/s")
		}, secret("a/s", "v", "Q:push-to=b,c")),
		"a copy that cannot be created again is not deleted": newCase(func(f *fixture) {
			f.edit("b/s", func(s *corev1.Secret) { s.Immutable = new(true) }).expectAfter(time.Second, "create b/s")
			f.beforeRequest("create", func(controllertest.Request) error { return refusal("denied by a policy") })
			f.edit("a/s", holding("w")).expectAfter(100*time.Millisecond, "dry run: create b/s")
			f.expectValue("b/s", "v")
		}, secret("a/s", "v", "Q:push-to=b")),
		"a source that grows too large in too many namespaces keeps its copies as they are": newCase(func(f *fixture) {
			f.advance(time.Minute)
			f.takeRequests()
			f.edit("a/s", holding(strings.Repeat("v", 1<<20))).expectAfter(time.Minute, "")
			f.expectCopies(100, 100)
		}, manyNamespaces(100, secret("a/s", "v", "Q:push-to=n-*"))...),
		"without the flag a native push counts nowhere, and copies that exist stay until their source goes": newCase(func(f *fixture) {
			f.cfg.PushNamespaces = ""
			f.restart()
			f.edit("a/s", holding("w"), annotate("Q:push-to=b,c")).expectAfter(time.Hour, "")
			f.expectEvents("PushForbidden Replicated")
			f.remove("a/s").expectAfter(time.Minute, "delete b/s")
		}, secret("a/s", "v", "Q:push-to=b")),
		"a source with 400 targets, which take 3 s, takes turns with others": newCase(func(f *fixture) {
			f.advance(time.Second)
			f.Put(secret("a/wide", "v", "Q:push-to=n-*"))
			f.advance(time.Second)
			f.expectCopies(100, 200)
			f.edit("c/s", holding("w")).advance(100 * time.Millisecond)
			f.expectValue("b/t", "w")
			f.advance(time.Minute)
			f.expectCopies(401, 401)
		}, manyNamespaces(400, secret("c/s", "v", "Q:allow-pull=b"), secret("b/t", "", "Q:pull-from=c/s"))...),
	})
}

// fixture is a cluster with a manager that runs replication, in a bubble of fake time.
type fixture struct {
	*controllertest.Host
	t           *testing.T
	cfg         *replication.Config
	eventCounts map[types.UID]int // how often each Event was told at the last call of expectEvents

	mu       sync.Mutex
	requests []controllertest.Request
	hooks    []func(controllertest.Request) error
}

// newFixture creates the namespaces a, b, c and kube-system and the objects, and starts the manager.
func newFixture(t *testing.T, configure func(*replication.Config), flags []string, objects ...runtime.Object) *fixture {
	t.Helper()
	entry := replication.Entry()
	f := &fixture{t: t, cfg: entry.Config.(*replication.Config), eventCounts: map[types.UID]int{}}
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
		h.OnRead(f.onRequest)
		h.OnWrite(f.onRequest)
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
	configure func(*replication.Config)
	flags     []string
	objects   []runtime.Object
	run       func(f *fixture)
}

// newCase returns a row with what happens, and the objects at the start.
func newCase(run func(f *fixture), objects ...runtime.Object) reconcileCase {
	return reconcileCase{objects: objects, run: run}
}

// withConfig returns the row with a configuration, which may be nil, and flags.
func (tc reconcileCase) withConfig(configure func(*replication.Config), flags ...string) reconcileCase {
	tc.configure, tc.flags = configure, flags
	return tc
}

func dryRun(c *replication.Config) { c.DryRun = true }

func runCases(t *testing.T, cases map[string]reconcileCase) {
	t.Helper()
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { tc.run(newFixture(t, tc.configure, tc.flags, tc.objects...)) })
		})
	}
}

// onRequest is called for requests of the controller, one at a time. It records those for Secrets, but
// no creation of what is there already, which the cache did not show yet.
func (f *fixture) onRequest(r controllertest.Request) error {
	f.mu.Lock()
	if r.Resource == "secrets" && (r.Verb != "create" || r.DryRun || f.secret(r.Namespace+"/"+r.Name) == nil) {
		f.requests = append(f.requests, r)
	}
	hooks := slices.Clone(f.hooks)
	f.mu.Unlock()
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

// beforeRequest calls hook before each request for a Secret with that verb, dry runs included. It may refuse
// the request.
func (f *fixture) beforeRequest(verb string, hook func(controllertest.Request) error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.hooks = append(f.hooks, func(r controllertest.Request) error {
		if r.Verb != verb || r.Resource != "secrets" {
			return nil
		}
		return hook(r)
	})
}

// beforeFirst calls hook before the first request for a Secret with that verb.
func (f *fixture) beforeFirst(verb string, hook func() error) {
	var once sync.Once
	f.beforeRequest(verb, func(controllertest.Request) (err error) {
		once.Do(func() { err = hook() })
		return err
	})
}

// advance lets time pass, with everything that happens in it.
func (f *fixture) advance(d time.Duration) {
	<-time.After(d)
	synctest.Wait()
}

// restart hands over to a manager that knows nothing, after meanwhile. Earlier requests are forgotten.
func (f *fixture) restart(meanwhile ...func()) *fixture {
	f.t.Helper()
	f.Restart(append(meanwhile, func() { f.takeRequests() })...)
	return f
}

// secret returns the Secret of that name, namespace/name, in the API server; nil if there is none.
func (f *fixture) secret(name string) *corev1.Secret {
	namespace, name, _ := strings.Cut(name, "/")
	return controllertest.Get[corev1.Secret](f.Host, namespace, name)
}

// edit changes a Secret behind the controller's back. It, remove and restart return the fixture, so that
// calls can be chained.
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

// takeRequests returns the requests for Secrets with these verbs since the last call, sorted.
func (f *fixture) takeRequests(verbs ...string) (list []string) {
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

// expectAfter lets time pass, and then is expectRequests.
func (f *fixture) expectAfter(d time.Duration, want string, verbs ...string) {
	f.t.Helper()
	f.advance(d)
	f.expectRequests(want, verbs...)
}

// expectRequests compares the requests for Secrets with the given verbs since the last call, or those that
// write.
func (f *fixture) expectRequests(want string, verbs ...string) {
	f.t.Helper()
	if len(verbs) == 0 {
		verbs = []string{"create", "update", "delete", "patch"}
	}
	if got := strings.Join(f.takeRequests(verbs...), ", "); got != want {
		f.t.Errorf("requests %q, want %q", got, want)
	}
}

// expectEvents compares the reasons of the Events since the last call, sorted.
func (f *fixture) expectEvents(want string) {
	f.t.Helper()
	f.advance(10 * time.Millisecond)
	var list []string
	for _, e := range controllertest.List[corev1.Event](f.Host) {
		for range int(e.Count) - f.eventCounts[e.UID] {
			list = append(list, e.Reason)
		}
		f.eventCounts[e.UID] = int(e.Count)
	}
	slices.Sort(list)
	if got := strings.Join(list, " "); got != want {
		f.t.Errorf("Events %s, want %s", got, want)
	}
}

func (f *fixture) expectEvent(want string) {
	f.t.Helper()
	if all := f.Events(); !slices.Contains(all, want) {
		f.t.Errorf("no Event %q in %q", want, all)
	}
}

// expectMetric compares the sum of a metric over the series with these labels.
func (f *fixture) expectMetric(want float64, name string, labels ...string) {
	f.t.Helper()
	if got := f.Metric("quartermaster_replication_"+name, labels...); got != want {
		f.t.Errorf("%s is %v, want %v", name, got, want)
	}
}

func (f *fixture) expectValue(name, want string) {
	f.t.Helper()
	if s := f.secret(name); s == nil || string(s.Data["k"]) != want {
		f.t.Errorf("%s is %v, want one with the value %s", name, s, want)
	}
}

// expectCopies compares the number of Secrets with a marker, from least to most.
func (f *fixture) expectCopies(least, most int) {
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
