// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package ttl

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"
	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/testutil"
	"k8s.io/utils/clock"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/ttl/policy"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const T = "k8s-ttl-controller.twin.sh/"

var (
	pods        = schema.GroupVersionResource{Version: "v1", Resource: "pods"}
	configMaps  = schema.GroupVersionResource{Version: "v1", Resource: "configmaps"}
	replicaSets = schema.GroupVersionResource{Group: "apps", Version: "v1", Resource: "replicasets"}
	widgets     = schema.GroupVersionResource{Group: "example.com", Version: "v1", Resource: "widgets"}
)

// object names an object.
type object struct {
	schema.GroupResource
	cache.ObjectName
}

func (o object) String() string { return o.GroupResource.String() + "/" + o.ObjectName.String() }

// world is a cluster with one running controller, in a bubble of fake time. It implements objects.
type world struct {
	*testing.T
	cfg      Config
	client   *fake.Clientset
	recorder *record.FakeRecorder
	registry metrics.KubeRegistry
	stop     func()

	mu        sync.Mutex
	version   int
	stored    map[object]*metav1.PartialObjectMetadata
	followers map[schema.GroupResource][]*follow
	requests  []string
	// before is called before a request is executed: get or delete, and the object. It may fail it.
	before func(verb string, live *metav1.PartialObjectMetadata) error
	skew   time.Duration // of the API server's clock
	skewed string        // the type for which alone its clock is wrong; empty is all
	// unfollowable is a type that cannot be followed.
	unfollowable string
}

type follow struct {
	world   *world
	of      policy.Type
	when    func(metav1.Object) bool
	handler cache.ResourceEventHandler
	problem string
}

func newWorld(t *testing.T, configure func(*Config)) *world {
	t.Helper()
	w := &world{T: t, cfg: NewConfig(), client: fake.NewClientset(), recorder: record.NewFakeRecorder(10000),
		stored: map[object]*metav1.PartialObjectMetadata{}, followers: map[schema.GroupResource][]*follow{}}
	w.cfg.Compat = []policy.Family{policy.Twin, policy.Janitor}
	w.cfg.OwnNamespaces, w.cfg.Pod = []string{"manager"}, cache.ObjectName{Namespace: "manager", Name: "manager-0"}
	w.cfg.Grace = 0 // most tests begin with something that is due; TestGrace has the rest
	if configure != nil {
		configure(&w.cfg)
	}
	w.serve(pods, configMaps)
	return w
}

// serve makes the API server serve these types.
func (w *world) serve(resources ...schema.GroupVersionResource) {
	w.client.Lock() // discovery reads them after a request to the fake
	defer w.client.Unlock()
	lists := map[string]*metav1.APIResourceList{}
	for _, r := range resources {
		gv := r.GroupVersion().String()
		if lists[gv] == nil {
			lists[gv] = &metav1.APIResourceList{GroupVersion: gv}
			w.client.Resources = append(w.client.Resources, lists[gv])
		}
		verbs := metav1.Verbs{"get", "list", "watch", "delete", "create"}
		lists[gv].APIResources = append(lists[gv].APIResources,
			metav1.APIResource{Name: r.Resource, Kind: "K", Namespaced: true, Verbs: verbs},
			metav1.APIResource{Name: r.Resource + "/status", Kind: "K", Namespaced: true, Verbs: verbs},
			metav1.APIResource{Name: r.Resource + "reviews", Kind: "K", Verbs: metav1.Verbs{"create", "deletecollection", "list", "watch", "get"}})
	}
}

// start starts a controller like a new process.
func (w *world) start() {
	w.Helper()
	w.registry = metrics.NewKubeRegistry()
	c, err := New(w.cfg, w.follow, w.client, &rest.Config{}, w.recorder,
		controllers.Options{Name: Name, Clock: clock.RealClock{}, Metrics: controllers.NewMetrics(w.registry)}, w.registry)
	if err != nil {
		w.Fatal(err)
	}
	c.objects = w
	ctx, cancel := context.WithCancel(w.Context())
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := c.Run(ctx); err != nil {
			w.Error(err)
		}
	})
	w.stop = sync.OnceFunc(func() {
		cancel()
		wg.Wait()
		for gr, list := range w.followers {
			if len(list) > 0 {
				w.Errorf("%s is still followed", gr)
			}
		}
	})
	w.Cleanup(func() { w.stop() })
	synctest.Wait()
}

func (w *world) follow(_ context.Context, t policy.Type, when func(metav1.Object) bool, handler cache.ResourceEventHandler) (Following, error) {
	f := &follow{world: w, of: t, when: when, handler: handler}
	w.mu.Lock()
	if t.Resource == w.unfollowable {
		w.mu.Unlock()
		return nil, errors.New("cannot be followed")
	}
	gr := t.GroupResource()
	w.followers[gr] = append(w.followers[gr], f)
	var list []*metav1.PartialObjectMetadata
	for k, o := range w.stored {
		if k.GroupResource == gr && when(o) {
			list = append(list, o)
		}
	}
	w.mu.Unlock()
	for _, o := range list {
		handler.OnAdd(o, true)
	}
	return f, nil
}

func (f *follow) Stop() {
	f.world.mu.Lock()
	defer f.world.mu.Unlock()
	gr := f.of.GroupResource()
	f.world.followers[gr] = slices.DeleteFunc(f.world.followers[gr], func(other *follow) bool { return other == f })
}

func (f *follow) Status() (bool, string) {
	f.world.mu.Lock()
	defer f.world.mu.Unlock()
	return f.problem == "", f.problem
}

// put stores an object, and shows it to those who follow. It is created two hours ago unless it exists.
func (w *world) put(r schema.GroupVersionResource, name string, annotations ...string) {
	w.mu.Lock()
	old, list := w.stored[named(r, name)], slices.Clone(w.followers[r.GroupResource()])
	w.mu.Unlock()
	k := w.store(r, name, annotations...)
	w.mu.Lock()
	o := w.stored[k]
	w.mu.Unlock()
	for _, f := range list {
		had, has := old != nil && f.when(old), f.when(o)
		switch {
		case had && has:
			f.handler.OnUpdate(old, o)
		case has:
			f.handler.OnAdd(o, false)
		case had:
			f.handler.OnDelete(o)
		}
	}
}

func named(r schema.GroupVersionResource, name string) object {
	namespace, name, _ := strings.Cut(name, "/")
	return object{r.GroupResource(), cache.ObjectName{Namespace: namespace, Name: name}}
}

// store is put, except that nobody is shown the object.
func (w *world) store(r schema.GroupVersionResource, name string, annotations ...string) object {
	k := named(r, name)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.version++
	o := &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{
		Namespace: k.Namespace, Name: k.Name, ResourceVersion: fmt.Sprint(w.version), UID: types.UID(fmt.Sprint("uid", w.version)),
		CreationTimestamp: metav1.NewTime(time.Now().Add(-2 * time.Hour)), Annotations: map[string]string{},
	}}
	if old := w.stored[k]; old != nil {
		o.UID, o.CreationTimestamp = old.UID, old.CreationTimestamp
	}
	for i := 0; i < len(annotations); i += 2 {
		o.Annotations[annotations[i]] = annotations[i+1]
	}
	w.stored[k] = o
	return k
}

func (w *world) remove(k object) {
	w.mu.Lock()
	o, list := w.stored[k], slices.Clone(w.followers[k.GroupResource])
	delete(w.stored, k)
	w.mu.Unlock()
	for _, f := range list {
		f.handler.OnDelete(o)
	}
}

// change changes what requests read, while they run.
func (w *world) change(how func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	how()
}

func (w *world) request(verb string, k object) error {
	w.mu.Lock()
	o, before := w.stored[k], w.before
	w.mu.Unlock()
	if before != nil {
		if err := before(verb, o); err != nil {
			w.note("%s %s refused", verb, k)
			return err
		}
	}
	w.note("%s %s", verb, k)
	return nil
}

func (w *world) note(format string, args ...any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.requests = append(w.requests, fmt.Sprintf(format, args...))
}

func (w *world) get(_ context.Context, t policy.Type, name cache.ObjectName) (*metav1.PartialObjectMetadata, time.Time, error) {
	k := object{t.GroupResource(), name}
	if err := w.request("get", k); err != nil {
		return nil, time.Time{}, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	date := time.Now().Truncate(time.Second)
	if w.skewed == "" || w.skewed == t.Resource {
		date = time.Now().Add(w.skew).Truncate(time.Second)
	}
	if o := w.stored[k]; o != nil {
		return o.DeepCopy(), date, nil
	}
	return nil, date, apierrors.NewNotFound(k.GroupResource, name.Name)
}

func (w *world) delete(_ context.Context, t policy.Type, live *metav1.PartialObjectMetadata) error {
	k := object{t.GroupResource(), cache.MetaObjectToName(live)}
	if err := w.request("delete", k); err != nil {
		return err
	}
	w.mu.Lock()
	o := w.stored[k]
	w.mu.Unlock()
	switch {
	case o == nil:
		return apierrors.NewNotFound(k.GroupResource, live.Name)
	case live.UID != o.UID || live.ResourceVersion != o.ResourceVersion: // see TestAPI
		return apierrors.NewConflict(k.GroupResource, live.Name, fmt.Errorf("precondition"))
	}
	w.remove(k)
	return nil
}

// asked compares the requests since the last time.
func (w *world) asked(want ...string) {
	w.Helper()
	synctest.Wait()
	w.mu.Lock()
	defer w.mu.Unlock()
	if !slices.Equal(w.requests, want) {
		w.Errorf("requests %q, want %q", w.requests, want)
	}
	w.requests = nil
}

// told compares the reasons of the Events since the last time.
func (w *world) told(want ...string) {
	w.Helper()
	synctest.Wait()
	var got []string
	for len(w.recorder.Events) > 0 {
		got = append(got, strings.Fields(<-w.recorder.Events)[1])
	}
	slices.Sort(got)
	if !slices.Equal(got, want) {
		w.Errorf("Events %q, want %q", got, want)
	}
}

// toldTimes checks how many Events there have been since the last time, all of the same reason.
func (w *world) toldTimes(reason string, least, most int) {
	w.Helper()
	n := len(w.recorder.Events)
	for len(w.recorder.Events) > 0 {
		if e := <-w.recorder.Events; !strings.Contains(e, reason) {
			w.Errorf("Event %q", e)
		}
	}
	if n < least || n > most {
		w.Errorf("%d Events %s, want %d to %d", n, reason, least, most)
	}
}

func (w *world) names() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	var names []string
	for k := range maps.Keys(w.stored) {
		names = append(names, k.String())
	}
	slices.Sort(names)
	return names
}

// metric compares series.
func (w *world) metric(want string, names ...string) {
	w.Helper()
	if err := testutil.GatherAndCompare(w.registry, strings.NewReader(want), names...); err != nil {
		w.Error(err)
	}
}

func pass(d time.Duration) {
	<-time.After(d)
	synctest.Wait()
}
