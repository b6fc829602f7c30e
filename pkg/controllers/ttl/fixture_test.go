// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package ttl_test

import (
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/controllertest"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/ttl"
)

const T = "k8s-ttl-controller.twin.sh/"

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

	objects []runtime.Object // until start
	told    int              // Events that were compared

	mu       sync.Mutex
	requests []string
	// before is called before a get or delete is executed. It may refuse it.
	before func(controllertest.Request) error
}

func newFixture(t *testing.T, configure func(*ttl.Config)) *fixture {
	t.Helper()
	t.Setenv("POD_NAME", "manager-0")
	w := &fixture{T: t, entry: ttl.Entry(), flags: []string{"--compat=ttl-controller,janitor"}}
	w.cfg = w.entry.Config.(*ttl.Config)
	w.cfg.Grace = 0 // most tests begin with something that is due; TestGrace has the rest
	w.cfg.Include = []string{"pods", "configmaps", "widgets.example.com"}
	if configure != nil {
		configure(w.cfg)
	}
	return w
}

// start starts the manager on what was put before.
func (w *fixture) start() {
	w.Helper()
	controllertest.Setup{Entries: []controllers.Entry{w.entry}, Flags: w.flags, Prepare: func(h *controllertest.Host) {
		w.Host = h
		h.OnRead(w.request)
		h.OnWrite(w.request)
	}}.NewHost(w.T, w.objects...)
}

// request is called for requests of the controller, one at a time.
func (w *fixture) request(r controllertest.Request) error {
	if r.Verb != "get" && r.Verb != "delete" {
		return nil
	}
	w.mu.Lock()
	before := w.before
	w.mu.Unlock()
	text, err := r.String(), error(nil)
	if before != nil {
		if err = before(r); err != nil {
			text += " refused"
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.requests = append(w.requests, text)
	return err
}

// beforeRequests sets before; nil lets all pass.
func (w *fixture) beforeRequests(f func(controllertest.Request) error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.before = f
}

// refuse refuses deletions with the error that f returns, if any.
func (w *fixture) refuse(f func() error) {
	w.beforeRequests(func(r controllertest.Request) error {
		if r.Verb == "delete" {
			return f()
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
	annotated := map[string]string{}
	for i := 0; i < len(annotations); i += 2 {
		annotated[annotations[i]] = annotations[i+1]
	}
	u.SetAnnotations(annotated)
	return u
}

// whenRead changes an object just before the controller reads it live.
func (w *fixture) whenRead(obj runtime.Object) {
	w.beforeRequests(func(controllertest.Request) error {
		w.beforeRequests(nil)
		w.Put(obj)
		return nil
	})
}

// skew sets how far the clock of a resource's API server is ahead, or of every API server without a name.
func (w *fixture) skew(ahead time.Duration, of string) {
	w.SetClock(func(resource string) time.Time {
		if of == "" || of == resource {
			return time.Now().Add(ahead)
		}
		return time.Now()
	})
}

// repeated returns how often an Event was told. Events with the same text are one object.
func (w *fixture) repeated(reason string) (n int) {
	for _, e := range controllertest.List[corev1.Event](w.Host) {
		if e.Reason == reason {
			n += int(e.Count)
		}
	}
	return n
}

// put creates or replaces an object. It is created two hours ago unless it exists.
func (w *fixture) put(k kind, name string, annotations ...string) {
	w.Helper()
	w.add(object(k, name, annotations...))
}

func (w *fixture) add(objects ...runtime.Object) {
	w.Helper()
	if w.Host == nil {
		w.objects = append(w.objects, objects...)
		return
	}
	w.Put(objects...)
	w.Settle()
}

// pass lets time pass.
func (w *fixture) pass(d time.Duration) {
	w.Helper()
	if w.Host == nil {
		<-time.After(d)
		return
	}
	w.Sleep(d)
}

// asked compares the requests since the last time.
func (w *fixture) asked(want ...string) {
	w.Helper()
	if got := w.asks(); !slices.Equal(got, want) {
		w.Errorf("requests %q, want %q", got, want)
	}
}

// asks returns the requests since the last time.
func (w *fixture) asks() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	defer func() { w.requests = nil }()
	return w.requests
}

// events returns the Events since the last time, and their reasons, sorted.
func (w *fixture) events() (texts, reasons []string) {
	w.Helper()
	all := w.Events()
	texts = all[w.told:]
	w.told = len(all)
	for _, text := range texts {
		reasons = append(reasons, strings.Fields(text)[1])
	}
	slices.Sort(reasons)
	return texts, reasons
}

// toldOf compares the reasons of the Events since the last time.
func (w *fixture) toldOf(want ...string) {
	w.Helper()
	if _, got := w.events(); !slices.Equal(got, want) {
		w.Errorf("Events %q, want %q", got, want)
	}
}

// left compares how many Pods and ConfigMaps there are.
func (w *fixture) left(wantPods, wantConfigMaps int) {
	w.Helper()
	pods, configMaps := len(controllertest.List[corev1.Pod](w.Host)), len(controllertest.List[corev1.ConfigMap](w.Host))
	if pods != wantPods || configMaps != wantConfigMaps {
		w.Errorf("%d Pods and %d ConfigMaps are left, want %d and %d", pods, configMaps, wantPods, wantConfigMaps)
	}
}

// metric compares a metric.
func (w *fixture) metric(want float64, name string, labels ...string) {
	w.Helper()
	if got := w.Metric("quartermaster_ttl_"+name, labels...); got != want {
		w.Errorf("%s is %v, want %v", name, got, want)
	}
}
