// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package ttl_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/controllertest"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/ttl"
)

const ttlController = "k8s-ttl-controller.twin.sh/"

// kind is a type, as objects have it. Its plural is the usual one.
type kind struct{ apiVersion, kind string }

var (
	pod        = kind{"v1", "Pod"}
	configMap  = kind{"v1", "ConfigMap"}
	replicaSet = kind{"apps/v1", "ReplicaSet"}
	widget     = kind{"example.com/v1", "Widget"}

	clusterRole = kind{"rbac.authorization.k8s.io/v1", "ClusterRole"}
)

// fixture is a cluster with a manager that runs ttl, in a bubble of fake time.
type fixture struct {
	*testing.T
	*controllertest.Host
	entry controllers.Entry
	cfg   *ttl.Config
	flags []string

	objects        []runtime.Object // until start
	comparedEvents int              // Events that were compared

	mu       sync.Mutex
	requests []string
	// requestHook is called before a get or delete is executed. It may refuse it.
	requestHook func(controllertest.Request) error
}

// row is a row of a table: the configuration, rules if there are any, and what happens.
type row struct {
	configure func(*ttl.Config)
	rules     string
	run       func(f *fixture)
}

func runCases(t *testing.T, rows map[string]row) {
	t.Helper()
	for name, r := range rows {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { r.run(newFixture(t, r)) })
		})
	}
}

func newFixture(t *testing.T, r row) *fixture {
	t.Helper()
	t.Setenv("POD_NAME", "manager-0")
	f := &fixture{T: t, entry: ttl.Entry(), flags: []string{"--compat=ttl-controller,janitor"}}
	f.cfg = f.entry.Config.(*ttl.Config)
	f.cfg.Grace = 0 // most tests begin with something that is due; TestGraceDelaysTheFirstDeletion has the rest
	f.cfg.Include = []string{"pods", "configmaps", "widgets.example.com"}
	if r.rules != "" {
		f.cfg.Include = append(f.cfg.Include, "jobs.batch", "persistentvolumeclaims", "secrets")
		f.writeRules(r.rules)
	}
	if r.configure != nil {
		r.configure(f.cfg)
	}
	return f
}

func (f *fixture) writeRules(rules string) {
	f.Helper()
	f.cfg.RulesFile = filepath.Join(f.TempDir(), "rules.yaml")
	assert.NoError(f, os.WriteFile(f.cfg.RulesFile, []byte("rules:"+rules), 0o600))
}

// start starts the manager on what was put before, and these objects. It and what changes objects return the
// fixture, so that calls can be chained.
func (f *fixture) start(objects ...runtime.Object) *fixture {
	f.Helper()
	f.objects = append(f.objects, objects...)
	controllertest.Setup{Entries: []controllers.Entry{f.entry}, Flags: f.flags, Prepare: func(h *controllertest.Host) {
		f.Host = h
		h.OnRead(f.request)
		h.OnWrite(f.request)
	}}.NewHost(f.T, f.objects...)
	return f
}

// request is called for requests of the controller, one at a time.
func (f *fixture) request(r controllertest.Request) error {
	if r.Verb != "get" && r.Verb != "delete" {
		return nil
	}
	f.mu.Lock()
	hook := f.requestHook
	f.mu.Unlock()
	text, err := r.String(), error(nil)
	if hook != nil {
		if err = hook(r); err != nil {
			text += " refused"
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.requests = append(f.requests, text)
	return err
}

// beforeRequests sets requestHook; nil lets all pass.
func (f *fixture) beforeRequests(hook func(controllertest.Request) error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.requestHook = hook
}

// refuseDeletions refuses deletions with the error that hook returns, if any.
func (f *fixture) refuseDeletions(hook func() error) {
	f.beforeRequests(func(r controllertest.Request) error {
		if r.Verb == "delete" {
			return hook()
		}
		return nil
	})
}

// object returns an object with these annotations that was created two hours ago.
func object(k kind, name string, annotations ...string) *unstructured.Unstructured {
	namespace, name, _ := strings.Cut(name, "/")
	u := &unstructured.Unstructured{Object: map[string]any{"apiVersion": k.apiVersion, "kind": k.kind}}
	u.SetNamespace(namespace)
	u.SetName(name)
	u.SetCreationTimestamp(metav1.NewTime(time.Now().Add(-2 * time.Hour)))
	annotationMap := map[string]string{}
	for i := 0; i < len(annotations); i += 2 {
		annotationMap[annotations[i]] = annotations[i+1]
	}
	u.SetAnnotations(annotationMap)
	return u
}

// expiringPod returns the Pod shop/p with a TTL, and more annotations.
func expiringPod(ttl string, annotations ...string) *unstructured.Unstructured {
	return object(pod, "shop/p", append([]string{ttlController + "ttl", ttl}, annotations...)...)
}

// withOwner returns the object with an owner that controls it.
func withOwner(kind string, u *unstructured.Unstructured) *unstructured.Unstructured {
	u.SetOwnerReferences([]metav1.OwnerReference{{APIVersion: "apps/v1", Kind: kind, Name: "d", UID: "1", Controller: new(true)}})
	return u
}

// putBeforeRead changes an object just before the controller reads it live.
func (f *fixture) putBeforeRead(obj runtime.Object) *fixture {
	f.beforeRequests(func(controllertest.Request) error {
		f.beforeRequests(nil)
		f.Put(obj)
		return nil
	})
	return f
}

// skew sets how far the clock of a resource's API server is ahead, or of every API server without a name.
func (f *fixture) skew(ahead time.Duration, skewedResource string) {
	f.SetClock(func(resource string) time.Time {
		if skewedResource == "" || skewedResource == resource {
			return time.Now().Add(ahead)
		}
		return time.Now()
	})
}

// countEvents returns how often an Event was recorded. Events with the same text are one object.
func (f *fixture) countEvents(reason string) (n int) {
	for _, e := range controllertest.List[corev1.Event](f.Host) {
		if e.Reason == reason {
			n += int(e.Count)
		}
	}
	return n
}

// put creates or replaces an object. It is created two hours ago unless it exists.
func (f *fixture) put(k kind, name string, annotations ...string) *fixture {
	f.Helper()
	return f.add(object(k, name, annotations...))
}

// putMany puts n objects that are due, whose names have their number.
func (f *fixture) putMany(n int, k kind, name string) {
	f.Helper()
	for i := range n {
		f.put(k, fmt.Sprintf(name, i), ttlController+"ttl", "1h")
	}
}

func (f *fixture) add(objects ...runtime.Object) *fixture {
	f.Helper()
	if f.Host == nil {
		f.objects = append(f.objects, objects...)
		return f
	}
	f.Put(objects...)
	f.Settle()
	return f
}

// expectRequests compares the requests since the last time.
func (f *fixture) expectRequests(want ...string) {
	f.Helper()
	if got := f.takeRequests(); !slices.Equal(got, want) {
		f.Errorf("requests %q, want %q", got, want)
	}
}

// expectRequestsAfter lets time pass, and then is expectRequests. In expectRequestsAt there is none before.
func (f *fixture) expectRequestsAfter(d time.Duration, want ...string) {
	f.Helper()
	f.Sleep(d)
	f.expectRequests(want...)
}

func (f *fixture) expectRequestsAt(d time.Duration, want ...string) {
	f.Helper()
	f.expectRequestsAfter(d - time.Second)
	f.expectRequestsAfter(time.Second, want...)
}

// expectRequestCount lets time pass, and then compares how many requests there were since the last time.
func (f *fixture) expectRequestCount(d time.Duration, least, most int) {
	f.Helper()
	f.Sleep(d)
	if n := len(f.takeRequests()); n < least || n > most {
		f.Errorf("%d requests in %v, want %d to %d", n, d, least, most)
	}
}

// takeRequests returns the requests since the last time.
func (f *fixture) takeRequests() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	defer func() { f.requests = nil }()
	return f.requests
}

// takeEvents returns the Events since the last time, and their reasons, sorted.
func (f *fixture) takeEvents() (texts, reasons []string) {
	f.Helper()
	all := f.Events()
	texts = all[f.comparedEvents:]
	f.comparedEvents = len(all)
	for _, text := range texts {
		reasons = append(reasons, strings.Fields(text)[1])
	}
	slices.Sort(reasons)
	return texts, reasons
}

// expectEvents compares the reasons of the Events since the last time.
func (f *fixture) expectEvents(want ...string) {
	f.Helper()
	if _, got := f.takeEvents(); !slices.Equal(got, want) {
		f.Errorf("Events %q, want %q", got, want)
	}
}

// expectLeft compares how many Pods and ConfigMaps there are.
func (f *fixture) expectLeft(wantPods, wantConfigMaps int) {
	f.Helper()
	pods, configMaps := len(controllertest.List[corev1.Pod](f.Host)), len(controllertest.List[corev1.ConfigMap](f.Host))
	if pods != wantPods || configMaps != wantConfigMaps {
		f.Errorf("%d Pods and %d ConfigMaps are left, want %d and %d", pods, configMaps, wantPods, wantConfigMaps)
	}
}

func (f *fixture) expectMetric(want float64, name string, labels ...string) {
	f.Helper()
	if got := f.Metric("quartermaster_ttl_"+name, labels...); got != want {
		f.Errorf("%s is %v, want %v", name, got, want)
	}
}
