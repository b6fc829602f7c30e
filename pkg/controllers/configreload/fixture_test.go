// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package configreload

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/dynamic/dynamicinformer"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"
	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/testutil"
	"k8s.io/utils/clock"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	clientgo "github.com/quartermaster-dev/quartermaster/pkg/controllers/internal/fixture"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fixture is a namespace with one running controller, in a bubble of fake time.
type fixture struct {
	t        *testing.T
	cfg      Config
	client   *fake.Clientset
	dynamic  dynamic.Interface // nil: no Argo Rollouts
	live     liveReads
	versions *versions
	recorder *record.FakeRecorder
	registry metrics.KubeRegistry
	c        *Controller
	standby  bool   // the controller is not run at the start
	resign   func() // ends the run
	stop     func()
}

// newFixture creates the objects and starts the controller.
func newFixture(t *testing.T, configure func(*Config), objects ...runtime.Object) *fixture {
	t.Helper()
	return newLaggingFixture(t, nil, configure, objects...)
}

// newLaggingFixture returns a fixture whose watch events arrive late, by resource.
func newLaggingFixture(t *testing.T, lags map[string]time.Duration, configure func(*Config), objects ...runtime.Object) *fixture {
	t.Helper()
	w := &fixture{t: t, cfg: NewConfig(), client: fake.NewClientset(), recorder: record.NewFakeRecorder(1000)}
	w.cfg.Compat = true
	w.begin(lags, configure, objects)
	return w
}

func (w *fixture) begin(lags map[string]time.Duration, configure func(*Config), objects []runtime.Object) {
	w.t.Helper()
	if configure != nil {
		configure(&w.cfg)
	}
	w.versions = newVersions(w.client)
	for resource, lag := range lags {
		delayWatches(w.client, resource, lag)
	}
	w.put(objects...)
	w.start()
	w.t.Cleanup(func() { w.stop() })
}

// start starts a controller like a new process, with empty caches and no memory.
func (w *fixture) start() {
	w.t.Helper()
	digest, err := SourceDigest(w.cfg)
	if err != nil {
		w.t.Fatal(err)
	}
	factory := informers.NewSharedInformerFactory(w.client, 0)
	with := func(i cache.SharedIndexInformer, f cache.TransformFunc) cache.SharedIndexInformer {
		if err := i.SetTransform(f); err != nil {
			w.t.Fatal(err)
		}
		return i
	}
	source := reduceAs(Name, SourceAnnotations(w.cfg), digest, w.versions.Last())
	workload := reduceAs(Name, WorkloadAnnotations(w.cfg), WorkloadDigest(w.cfg), w.versions.Last())
	core, apps, batch := factory.Core().V1(), factory.Apps().V1(), factory.Batch().V1()
	in := Informers{
		ConfigMaps:   clientgo.Informer[Source](with(core.ConfigMaps().Informer(), source)),
		Secrets:      clientgo.Informer[Source](with(core.Secrets().Informer(), source)),
		Deployments:  clientgo.Informer[metav1.Object](with(apps.Deployments().Informer(), workload)),
		StatefulSets: clientgo.Informer[metav1.Object](with(apps.StatefulSets().Informer(), workload)),
		DaemonSets:   clientgo.Informer[metav1.Object](with(apps.DaemonSets().Informer(), workload)),
		CronJobs:     clientgo.Informer[metav1.Object](with(batch.CronJobs().Informer(), workload)),
		Jobs:         clientgo.Informer[metav1.Object](with(batch.Jobs().Informer(), workload)),
		Namespaces:   clientgo.Informer[metav1.Object](core.Namespaces().Informer()),
		LiveVersion:  w.liveVersion,
	}
	w.registry = metrics.NewKubeRegistry()
	var dynamicFactory dynamicinformer.DynamicSharedInformerFactory
	if w.dynamic != nil {
		dynamicFactory = dynamicinformer.NewDynamicSharedInformerFactory(w.dynamic, 0)
		in.Rollouts = clientgo.Informer[metav1.Object](with(dynamicFactory.ForResource(RolloutsResource).Informer(), workload))
	}
	loop := controllers.Options{Name: Name, Metrics: controllers.NewMetrics(w.registry), Clock: clock.RealClock{}}
	w.c, err = New(w.cfg, in, w.client, w.dynamic, w.recorder, loop, w.registry)
	if err != nil {
		w.t.Fatal(err)
	}
	informersDone := make(chan struct{})
	factory.Start(informersDone)
	if dynamicFactory != nil {
		dynamicFactory.Start(informersDone)
	}
	w.resign = func() {}
	if !w.standby {
		w.lead()
	}
	var once sync.Once
	w.stop = func() {
		once.Do(func() {
			w.resign()
			close(informersDone)
			factory.Shutdown()
			if dynamicFactory != nil {
				dynamicFactory.Shutdown()
			}
		})
	}
	synctest.Wait()
}

// lead runs the controller until resign. The caches stay.
func (w *fixture) lead() {
	ctx, cancel := context.WithCancel(w.t.Context())
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := w.c.Run(ctx); err != nil {
			w.t.Errorf("Run: %v", err)
		}
	})
	w.resign = func() {
		cancel()
		wg.Wait()
	}
	synctest.Wait()
}

// liveReads counts the requests for versions of sources.
type liveReads struct {
	mu       sync.Mutex
	count    int
	failures int    // this many fail first
	gone     bool   // nothing exists any more, which the cache does not know yet
	newer    string // this version exists, which the cache does not know yet
}

func (w *fixture) liveVersion(_ context.Context, resource schema.GroupVersionResource, name cache.ObjectName) (string, error) {
	w.live.mu.Lock()
	defer w.live.mu.Unlock()
	w.live.count++
	if w.live.count <= w.live.failures {
		return "", apierrors.NewTooManyRequests("later", 1)
	}
	if w.live.newer != "" {
		return w.live.newer, nil
	}
	obj, err := w.client.Tracker().Get(resource, name.Namespace, name.Name)
	if w.live.gone || apierrors.IsNotFound(err) {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	m, err := meta.Accessor(obj)
	if err != nil {
		return "", err
	}
	return m.GetResourceVersion(), nil
}

// version returns the version of a ConfigMap in the API server.
func (w *fixture) version(of *corev1.ConfigMap) string {
	w.t.Helper()
	obj, err := w.client.Tracker().Get(corev1.SchemeGroupVersion.WithResource("configmaps"), of.Namespace, of.Name)
	if err != nil {
		w.t.Fatal(err)
	}
	return obj.(*corev1.ConfigMap).ResourceVersion
}

func (w *fixture) stopped() bool { return w.c.Status().Phase == controllers.PhaseStopped }

func (w *fixture) restart() {
	w.t.Helper()
	w.stop()
	w.start()
}

func (w *fixture) put(objects ...runtime.Object) {
	w.t.Helper()
	for _, obj := range objects {
		w.versions.Put(w.t, obj)
	}
}

func (w *fixture) remove(obj runtime.Object) {
	w.t.Helper()
	w.versions.Remove(w.t, obj)
}

// pass lets time pass, with everything that happens in it.
func (w *fixture) pass(d time.Duration) {
	<-time.After(d)
	synctest.Wait()
}

// failPatches refuses the next n patches of Deployments; it counts down.
func (w *fixture) failPatches(n int) *int {
	w.client.PrependReactor("patch", "deployments", func(clienttesting.Action) (bool, runtime.Object, error) {
		if n == 0 {
			return false, nil, nil
		}
		n--
		return true, nil, apierrors.NewInternalError(errors.New("try again"))
	})
	return &n
}

// deployment returns the Deployment in the API server.
func (w *fixture) deployment(name string) *appsv1.Deployment {
	w.t.Helper()
	obj, err := w.client.Tracker().Get(deploymentResource, "shop", name)
	if err != nil {
		w.t.Fatal(err)
	}
	return obj.(*appsv1.Deployment).DeepCopy()
}

// runSuffix is the part of a name that distinguishes the Jobs of a CronJob.
var runSuffix = regexp.MustCompile("-[0-9a-f]{8}$")

// state returns what is recorded on a Deployment in the API server.
func (w *fixture) state(name string) string {
	w.t.Helper()
	state, _ := withoutVersion(w.deployment(name).Annotations[nativeState])
	return state
}

// writes returns the controller's writes so far: verb, resource/name and body. Every patch must
// carry a resourceVersion, and a state that version. Both are left out of the result.
func (w *fixture) writes() []string {
	w.t.Helper()
	var list []string
	for _, action := range w.client.Actions() {
		resource := action.GetResource().Resource
		switch a := action.(type) {
		case clienttesting.PatchActionImpl:
			list = append(list, fmt.Sprintf("patch %s/%s %s", resource, a.Name, w.body(a.Patch)))
		case clienttesting.CreateActionImpl:
			name := "?"
			if m, err := meta.Accessor(a.Object); err == nil {
				name = runSuffix.ReplaceAllString(m.GetName(), "-RUN") + m.GetGenerateName()
			}
			dry := ""
			if len(a.CreateOptions.DryRun) > 0 {
				dry = "dry run: "
			}
			list = append(list, fmt.Sprintf("%screate %s/%s", dry, resource, name))
		case clienttesting.DeleteActionImpl:
			p := a.DeleteOptions.Preconditions
			if p == nil || p.UID == nil {
				w.t.Errorf("deletion of %s without its UID", a.Name)
			}
			list = append(list, fmt.Sprintf("delete %s/%s", resource, a.Name))
		case clienttesting.UpdateActionImpl:
			list = append(list, "update "+resource)
		}
	}
	return list
}

func (w *fixture) body(patch []byte) string {
	w.t.Helper()
	var body map[string]any
	if err := json.Unmarshal(patch, &body); err != nil {
		w.t.Fatal(err)
	}
	m, _ := body["metadata"].(map[string]any)
	if m["resourceVersion"] == nil || m["resourceVersion"] == "" {
		w.t.Errorf("patch without a resourceVersion: %s", patch)
	}
	a, _ := m["annotations"].(map[string]any)
	if recorded, ok := a[nativeState].(string); ok {
		state, on := withoutVersion(recorded)
		if on != m["resourceVersion"] {
			w.t.Errorf("state %s is not recorded on the version of the patch: %s", recorded, patch)
		}
		a[nativeState] = state
	}
	if a != nil && len(a) == 0 {
		delete(m, "annotations")
	}
	delete(m, "resourceVersion")
	if len(m) == 0 {
		delete(body, "metadata")
	}
	return toJSON(body)
}

// events returns the Events recorded since the last call.
func (w *fixture) events() []string {
	var list []string
	for {
		select {
		case e := <-w.recorder.Events:
			list = append(list, e)
		default:
			slices.Sort(list)
			return list
		}
	}
}

// count returns the sum of a metric over the series with these labels.
func (w *fixture) count(name string, labels map[string]string) float64 {
	w.t.Helper()
	families, err := w.registry.Gather()
	if err != nil {
		w.t.Fatal(err)
	}
	var sum float64
	found := false
	for _, family := range families {
		if family.GetName() != metricPrefix+name {
			continue
		}
		for _, m := range family.GetMetric() {
			if testutil.LabelsMatch(m, labels) {
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

func toJSON(v any) string {
	data, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return string(data)
}
