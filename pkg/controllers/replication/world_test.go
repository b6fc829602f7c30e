// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package replication

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"
	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/testutil"
	"k8s.io/utils/clock"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/internal/fixture"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/replication/policy"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// world is a cluster with one running controller, in a bubble of fake time.
type world struct {
	t        *testing.T
	cfg      Config
	client   *fake.Clientset
	versions *fixture.Versions
	recorder *record.FakeRecorder
	registry metrics.KubeRegistry
	// late are creations of what was there already, which the cache did not show yet.
	late map[string]int
	c    *Controller
	stop func()
}

// newWorld creates the namespaces a, b, c and kube-system and the objects, and starts the
// controller. Watch events of Secrets are late by lag.
func newWorld(t *testing.T, lag time.Duration, configure func(*Config), objects ...runtime.Object) *world {
	t.Helper()
	w := &world{t: t, cfg: NewConfig(), client: fake.NewClientset(), recorder: record.NewFakeRecorder(1000), late: map[string]int{}}
	w.cfg.Reflector, w.cfg.Mittwald, w.cfg.PushNamespaces = true, true, "*"
	if configure != nil {
		configure(&w.cfg)
	}
	w.versions = fixture.NewVersions(w.client)
	w.client.PrependReactor("create", "secrets", w.create)
	w.client.PrependReactor("update", "*", w.update)
	w.client.PrependReactor("delete", "*", w.delete)
	fixture.Lag(w.client, "secrets", lag)
	for _, name := range []string{"a", "b", "c", "kube-system"} {
		w.put(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}})
	}
	w.put(objects...)
	w.start()
	t.Cleanup(func() { w.stop() })
	return w
}

// create counts what the API server would refuse.
func (w *world) create(action clienttesting.Action) (bool, runtime.Object, error) {
	a := action.(clienttesting.CreateActionImpl)
	if _, err := w.client.Tracker().Get(a.Resource, a.Namespace, nameOf(a.Object)); err == nil && len(a.CreateOptions.DryRun) == 0 {
		w.late["create "+a.Namespace+"/"+nameOf(a.Object)]++
	}
	return false, nil, nil
}

// update refuses another than the current version, and stores no dry run.
func (w *world) update(action clienttesting.Action) (bool, runtime.Object, error) {
	a := action.(clienttesting.UpdateActionImpl)
	sent, err := meta.Accessor(a.Object)
	if err != nil {
		return true, nil, err
	}
	stored, err := w.client.Tracker().Get(a.Resource, a.Namespace, sent.GetName())
	if err != nil {
		return true, nil, err
	}
	if current, err := meta.Accessor(stored); err != nil || current.GetResourceVersion() != sent.GetResourceVersion() {
		return true, nil, apierrors.NewConflict(a.Resource.GroupResource(), sent.GetName(), errors.New("another version"))
	}
	return len(a.UpdateOptions.DryRun) > 0, a.Object, nil
}

func (w *world) delete(action clienttesting.Action) (bool, runtime.Object, error) {
	a := action.(clienttesting.DeleteActionImpl)
	p := a.DeleteOptions.Preconditions
	if p == nil || p.UID == nil || p.ResourceVersion == nil {
		w.t.Errorf("deletion of %s without preconditions", a.Name)
	}
	return len(a.DeleteOptions.DryRun) > 0, nil, nil
}

// start starts a controller like a new process, with empty caches and no memory.
func (w *world) start() {
	w.t.Helper()
	digester := policy.NewDigester(w.cfg.Options, policy.NewDigesterKey())
	factory := informers.NewSharedInformerFactory(w.client, 0)
	in := Informers{Objects: map[policy.Kind]cache.SharedIndexInformer{
		policy.Secret: factory.Core().V1().Secrets().Informer(), policy.ConfigMap: factory.Core().V1().ConfigMaps().Informer(),
	}}
	for _, informer := range in.Objects {
		if err := informer.SetTransform(fixture.Reduce(Name, nil, digester.Digest, w.versions.Last())); err != nil {
			w.t.Fatal(err)
		}
	}
	if len(w.cfg.Scope) == 0 {
		in.Namespaces = factory.Core().V1().Namespaces().Informer()
	}
	w.registry = metrics.NewKubeRegistry()
	var err error
	loop := controllers.Options{Name: Name, Metrics: controllers.NewMetrics(w.registry), Clock: clock.RealClock{}}
	w.c, err = New(w.cfg, digester, in, w.client, w.recorder, loop, w.registry)
	if err != nil {
		w.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(w.t.Context())
	informersDone := make(chan struct{})
	factory.Start(informersDone)
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := w.c.Run(ctx); err != nil {
			w.t.Errorf("Run: %v", err)
		}
	})
	var once sync.Once
	w.stop = func() {
		once.Do(func() {
			cancel()
			wg.Wait()
			close(informersDone)
			factory.Shutdown()
		})
	}
	synctest.Wait()
}

func (w *world) restart() {
	w.t.Helper()
	w.stop()
	w.client.ClearActions()
	w.start()
}

func (w *world) put(objects ...runtime.Object) {
	w.t.Helper()
	for _, obj := range objects {
		w.versions.Put(w.t, obj)
	}
}

// pass lets time pass, with everything that happens in it.
func (w *world) pass(d time.Duration) {
	<-time.After(d)
	synctest.Wait()
}

// secret returns the Secret of that name, namespace/name, in the API server; nil if there is none.
func (w *world) secret(name string) *corev1.Secret {
	w.t.Helper()
	namespace, name, _ := strings.Cut(name, "/")
	obj, err := w.client.Tracker().Get(ResourceOf(policy.Secret), namespace, name)
	if err != nil {
		return nil
	}
	return obj.(*corev1.Secret).DeepCopy()
}

// edit changes a Secret behind the controller's back.
func (w *world) edit(name string, changes ...func(*corev1.Secret)) {
	w.t.Helper()
	s := w.secret(name)
	if s == nil {
		w.t.Fatalf("there is no %s", name)
	}
	for _, change := range changes {
		change(s)
	}
	w.put(s)
}

func (w *world) remove(name string) {
	w.t.Helper()
	s := w.secret(name)
	if s == nil {
		w.t.Fatalf("there is no %s", name)
	}
	w.versions.Remove(w.t, s)
}

// expect compares the requests for Secrets with the given verbs since the last call, sorted, without
// creations that are late.
func (w *world) expect(want string, verbs ...string) {
	w.t.Helper()
	if len(verbs) == 0 {
		verbs = []string{"create", "update", "delete", "patch"}
	}
	var list []string
	for _, action := range w.client.Actions() {
		if action.GetResource().Resource != "secrets" || !slices.Contains(verbs, action.GetVerb()) {
			continue
		}
		name, dry := "", []string(nil)
		switch a := action.(type) {
		case clienttesting.CreateActionImpl:
			name, dry = nameOf(a.Object), a.CreateOptions.DryRun
		case clienttesting.UpdateActionImpl:
			name, dry = nameOf(a.Object), a.UpdateOptions.DryRun
		case clienttesting.DeleteActionImpl:
			name, dry = a.Name, a.DeleteOptions.DryRun
		case clienttesting.GetActionImpl:
			name = a.Name
		}
		text := action.GetVerb() + " " + action.GetNamespace() + "/" + name
		if w.late[text] > 0 {
			w.late[text]--
			continue
		}
		if len(dry) > 0 {
			text = "dry run: " + text
		}
		list = append(list, text)
	}
	slices.Sort(list)
	if got := strings.Join(list, ", "); got != want {
		w.t.Errorf("requests %q, want %q", got, want)
	}
	w.client.ClearActions()
}

func nameOf(obj runtime.Object) string {
	m, err := meta.Accessor(obj)
	if err != nil {
		return "?"
	}
	return m.GetName()
}

// told returns the reasons of the Events since the last call, sorted.
func (w *world) told() string {
	var list []string
	for {
		select {
		case e := <-w.recorder.Events:
			list = append(list, strings.Fields(e)[1])
		default:
			slices.Sort(list)
			return strings.Join(list, " ")
		}
	}
}

// count returns the sum of a metric over the series with these labels.
func (w *world) count(name string, labels map[string]string) float64 {
	w.t.Helper()
	families, err := w.registry.Gather()
	if err != nil {
		w.t.Fatal(err)
	}
	var sum float64
	found := false
	for _, family := range families {
		for _, m := range family.GetMetric() {
			if family.GetName() == metricPrefix+name && testutil.LabelsMatch(m, labels) {
				found = true
				sum += m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
			}
		}
	}
	if !found {
		w.t.Errorf("no series of %s with %v", name, labels)
	}
	return sum
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
