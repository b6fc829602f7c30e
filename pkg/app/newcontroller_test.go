// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr/funcr"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	corev1ac "k8s.io/client-go/applyconfigurations/core/v1"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"
	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/testutil"
	"k8s.io/klog/v2"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/internal/lifetime"
	"github.com/quartermaster-dev/quartermaster/internal/loopmetrics"
	"github.com/quartermaster-dev/quartermaster/internal/panics"
	"github.com/quartermaster-dev/quartermaster/internal/subtest"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/election"
	"github.com/quartermaster-dev/quartermaster/pkg/informers"
)

// gadget and gizmo are custom resources of one group as Go types.
type (
	gadget     struct{ metav1.PartialObjectMetadata }
	gadgetList struct {
		metav1.PartialObjectMetadataList
	}
	gizmo     struct{ metav1.PartialObjectMetadata }
	gizmoList struct {
		metav1.PartialObjectMetadataList
	}
)

var gadgets = schema.GroupVersionResource{Group: "example.com", Version: "v1", Resource: "gadgets"}

// addTypes returns an AddToScheme.
func addTypes(kinds map[string]runtime.Object) func(*runtime.Scheme) error {
	return func(s *runtime.Scheme) error {
		for kind, object := range kinds {
			s.AddKnownTypeWithName(gadgets.GroupVersion().WithKind(kind), object)
		}
		return nil
	}
}

// informer asks a host for an informer of Ts.
func informer[T metav1.Object](resource schema.GroupVersionResource) func(controllers.Host) error {
	return func(h controllers.Host) error { informers.For[T](h, resource); return nil }
}

func TestHostNamesTheControllerOfAMistake(t *testing.T) {
	complete := addTypes(map[string]runtime.Object{"Gadget": &gadget{}, "GadgetList": &gadgetList{}})
	twoKinds := addTypes(map[string]runtime.Object{"Gadget": &gadget{}, "GadgetList": &gadgetList{}, "Gizmo": &gizmo{}, "GizmoList": &gizmoList{}})
	oddPlural := schema.GroupVersionResource{Group: "example.com", Version: "v1", Resource: "oddities"}
	typed := []informers.Need{{Resource: gadgets, Form: informers.Typed}}
	for name, tc := range map[string]struct {
		add   func(*runtime.Scheme) error
		needs []informers.Need
		ask   func(controllers.Host) error
		want  string // empty: it is built
	}{
		"everything fits": {complete, typed, func(h controllers.Host) error {
			informers.For[*gadget](h, gadgets)
			informers.For[metav1.Object](h, gadgets)
			controllers.ClientFor[*gadget](h, gadgets)
			h.Handle(http.NotFoundHandler())
			return nil
		}, ""},
		"the need is missing":             {complete, nil, informer[*gadget](gadgets), "asks for the informer of gadgets.example.com, which its entry does not declare in Needs"},
		"the need is of the reduced form": {complete, []informers.Need{{Resource: gadgets}}, informer[*gadget](gadgets), "asks for gadgets.example.com as *app.gadget, but its need has another Form than informers.Typed"},
		"the type is missing in the scheme": {addTypes(map[string]runtime.Object{"GadgetList": &gadgetList{}}), typed, informer[*gadget](gadgets),
			"asks for gadgets.example.com as *app.gadget, which AddToScheme has not added to the scheme"},
		"the type of the list is missing in the scheme": {addTypes(map[string]runtime.Object{"Gadget": &gadget{}}), typed, informer[*gadget](gadgets),
			"asks for gadgets.example.com as *app.gadget, but AddToScheme has not added GadgetList to the scheme"},
		"the type is of another group": {complete, typed, informer[*corev1.Pod](gadgets), "asks for gadgets.example.com as *v1.Pod, but that is a type of v1, not of example.com/v1"},
		"the version is another":       {complete, typed, informer[*gadget](gadgets.GroupResource().WithVersion("v2")), `asks for version "v2" of gadgets.example.com, but needs version "v1"`},
		"a client of a type of two versions": {func(s *runtime.Scheme) error {
			s.AddKnownTypes(schema.GroupVersion{Group: "example.com", Version: "v1beta1"}, &gadget{})
			return complete(s)
		}, nil, func(h controllers.Host) error { controllers.ClientFor[*gadget](h, gadgets); return nil }, ""},
		"the type is of another resource of the group": {twoKinds, typed, informer[*gizmo](gadgets), "asks for gadgets.example.com as *app.gizmo, but these are of the kind Gadget"},
		"a resource whose plural nobody can guess": {twoKinds, []informers.Need{{Resource: oddPlural, Form: informers.Typed}}, func(h controllers.Host) error {
			informers.For[*gizmo](h, oddPlural)
			controllers.ClientFor[*gizmo](h, oddPlural)
			return nil
		}, ""},
		"two indexes of one name": {complete, typed, func(h controllers.Host) error {
			informers.For[*gadget](h, gadgets).AddIndex("owner", nil)
			informers.For[*gadget](h, gadgets).AddIndex("owner", nil)
			return nil
		}, "adds the index owner of gadgets.example.com twice"},
		"two handlers": {nil, nil, func(h controllers.Host) error {
			h.Handle(http.NotFoundHandler())
			h.Handle(http.NotFoundHandler())
			return nil
		}, "calls Host.Handle with nil, twice or after New"},
		"owners that the cache holds": {nil, []informers.Need{{Resource: informers.Deployments, Fields: informers.OwnerReferences}}, func(h controllers.Host) error {
			deployments := informers.For[metav1.Object](h, informers.Deployments)
			_, err := controllers.NewLoop(h.LoopOptions, nothing, controllers.WatchOwner(deployments, deployments, schema.GroupKind{Kind: "Gadget"}))
			return err
		}, ""},
		"New panics":            {nil, nil, func(controllers.Host) error { panic("no") }, "New: panic: no"},
		"a cluster in New":      {nil, nil, func(h controllers.Host) error { _, err := h.Cluster("far", &rest.Config{Host: "x"}); return err }, "calls Host.Cluster in New; call it in Run or in a reconcile"},
		"a handler that is nil": {nil, nil, func(h controllers.Host) error { h.Handle(nil); return nil }, "calls Host.Handle with nil, twice or after New"},
	} {
		t.Run(name, func(t *testing.T) {
			entry := withFunctions(controllers.Entry{Name: "one", AddToScheme: tc.add, Needs: needing(tc.needs...)})
			var host controllers.Host
			entry.New = func(h controllers.Host) (controllers.Controller, error) { host = h; return &scripted{}, tc.ask(h) }
			err := buildAll(t, entry)
			if tc.want == "" {
				assert.NoError(t, err)
				if _, err := panics.Recover(func() error { host.Handle(http.NotFoundHandler()); return nil }); err == nil {
					t.Error("a handler after New was accepted")
				}
			} else if err == nil || strings.Split(err.Error(), "\n")[0] != "controller one: "+tc.want {
				t.Errorf("the error is %v, want controller one: %s", err, tc.want)
			}
		})
	}
}

func TestEntryMustBuildAController(t *testing.T) {
	none := func(name string) controllers.Entry {
		return withFunctions(controllers.Entry{Name: name, New: func(controllers.Host) (controllers.Controller, error) { return nil, nil }})
	}
	var host controllers.Host
	fine := func(h controllers.Host) (controllers.Controller, error) { host = h; return &scripted{}, nil }
	err := buildAll(t, none("one"), controllers.Entry{Name: "fine", New: fine}, none("two"))
	lines(t, err, "controller one: no controller was returned by New", "controller two: no controller was returned by New")
	// Nothing that one of them follows goes on.
	_, err = informers.Follow[metav1.Object](host, informers.Need{Resource: informers.Secrets})
	lines(t, err, "the informers have been shut down")
}

func TestFunctionOfAnEntryThatHangsIsLogged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		defer klog.CaptureState().Restore()
		var named atomic.Int32
		klog.SetLogger(funcr.New(func(_, line string) { named.Add(int32(strings.Count(line, `"controller"="one" "function"="New"`))) }, funcr.Options{}))
		for _, takes := range []time.Duration{time.Second, time.Minute} {
			assert.NoError(t, recovered("one", "New", func() error { <-time.After(takes); return nil }))
		}
		assert.Equal(t, "lines of the log that name the function", int32(1), named.Load())
	})
}

func nothing(context.Context, cache.ObjectName) (time.Duration, error) { return 0, nil }

// builtProcess builds a process as Run does.
func builtProcess(t *testing.T, o *Options) (*process, error) {
	t.Helper()
	o.Secure.BindPort = 0 // authentication starts queues that nobody stops
	p, err := build(t.Context(), o)
	if err == nil {
		t.Cleanup(func() { p.events.stop(0) }) // the API server is not there
		t.Cleanup(p.cache.Shutdown)
	}
	return p, err
}

// buildAll builds the controllers of entries as Run does.
func buildAll(t *testing.T, entries ...controllers.Entry) error {
	t.Helper()
	o := newOptions(t, With(entries...))
	o.Client.Master = newAPIServer(t).URL
	_, err := builtProcess(t, o)
	return err
}

func TestApplyMistakesAreErrors(t *testing.T) {
	c := controllers.Clients{Mapping: knownKinds} // without a client: nothing is sent
	a := corev1ac.ConfigMap("a", "shop")
	for name, tc := range map[string]struct {
		configs []runtime.ApplyConfiguration
		want    string
	}{
		"an object without a name":                    {[]runtime.ApplyConfiguration{a, corev1ac.ConfigMap("", "shop")}, "apply a *v1.ConfigMapApplyConfiguration: its apiVersion, kind or name is missing"},
		"an object of a kind that nobody knows":       {[]runtime.ApplyConfiguration{corev1ac.Secret("x", "shop")}, `apply Secret shop/x: no matches for kind "Secret" in version "v1"`},
		"an object without the namespace of its kind": {[]runtime.ApplyConfiguration{corev1ac.ConfigMap("x", "")}, "apply ConfigMap x: its namespace is missing"},
		"an object in a namespace that cannot be":     {[]runtime.ApplyConfiguration{corev1ac.Namespace("x").WithNamespace("shop")}, "apply Namespace shop/x: objects of this kind have no namespace"},
		"an object with a path for its name":          {[]runtime.ApplyConfiguration{corev1ac.ConfigMap("../a", "shop")}, `apply ConfigMap shop/../a: the name "../a" may not contain '/'`},
		"an object twice":                             {[]runtime.ApplyConfiguration{a, corev1ac.ConfigMap("a", "bar"), a}, "apply ConfigMap shop/a: it is among the objects twice"},
	} {
		t.Run(name, func(t *testing.T) {
			if err := c.Apply(t.Context(), tc.configs...); err == nil || err.Error() != tc.want {
				t.Errorf("the error is %v, want %s", err, tc.want)
			}
		})
	}
}

func TestApplyHasTenRequestsOnTheWay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		applies, err := metadata.NewForConfig(&rest.Config{Host: "http://api", QPS: -1, Transport: roundTripper(func(r *http.Request) (*http.Response, error) {
			<-time.After(time.Second)
			status := map[bool]int{true: http.StatusForbidden, false: http.StatusNotFound}[strings.HasSuffix(r.URL.Path, "/status")]
			return &http.Response{StatusCode: status, Header: http.Header{}, Body: http.NoBody}, nil
		})})
		assert.NoError(t, err)
		var all []runtime.ApplyConfiguration
		for i := range 30 {
			all = append(all, corev1ac.ConfigMap(fmt.Sprint(i), "shop"))
		}
		begun := time.Now()
		err = controllers.Clients{Mapping: knownKinds, Metadata: applies}.ApplyStatus(t.Context(), all...)
		if took := time.Since(begun); !apierrors.IsForbidden(err) || took != 3*time.Second || strings.Count(err.Error(), "apply ConfigMap shop/") != 30 {
			t.Errorf("30 requests of 1 s have taken %s, with the error %v", took, err)
		}
	})
}

func TestHandlersAreServedUnderTheirName(t *testing.T) {
	h, _, registry := host(t, untilTheEnd)
	handler := h.withoutPanics(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/poison" {
			panic("hunter2")
		}
		fmt.Fprint(w, r.URL.Path)
	}))
	for path, want := range map[string]string{"/": "/", "/things": "/things", "/poison": "the controller's handler panicked\n"} {
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/controllers/x"+path, nil))
		assert.Equal(t, path, want, w.Body.String())
	}
	series(t, registry, "quartermaster_controller_panics_total", 1)
}

func TestEveryReplicaThatHasDrainedIsNotLate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		stop := hostedControllers{}.start(ctx, time.Second)
		cancel()
		<-time.After(time.Minute)
		assert.NoError(t, stop())
	})
}

func TestEveryReplicaStopsWithTheProcess(t *testing.T) {
	stuck := func(ctx context.Context) error {
		<-lifetime.FromContext(ctx).Run.Done() // by which loops in other clusters learn of it
		<-time.After(time.Hour)
		return nil
	}
	reconciling := controllers.Status{InFlight: []controllers.InFlight{{Key: "shop/a", Since: time.Now()}}}
	for name, tc := range map[string]struct {
		run    func(context.Context) error
		status controllers.Status
		took   time.Duration
		want   string // in the error
	}{
		"a controller that drains":                 {func(ctx context.Context) error { <-ctx.Done(); <-time.After(3 * time.Second); return nil }, reconciling, 3 * time.Second, ""},
		"a controller that does not drain in time": {stuck, reconciling, 20 * time.Second, "controller x has been reconciling shop/a for "},
		"a controller whose Background goes on":    {stuck, controllers.Status{Phase: controllers.PhaseDraining}, 20 * time.Second, "controller x did not stop, although it reconciles nothing"},
	} {
		subtest.InBubble(t, name, func(t *testing.T) {
			here, c, _ := host(t, tc.run)
			here.everyReplica = true
			c.status = tc.status
			leaders, other, _ := host(t, untilTheEnd)
			all := hostedControllers{leaders, here}
			stop := all.withEveryReplica(true).start(lifetime.NewContext(t.Context(), t.Context(), nil), 20*time.Second)
			<-time.After(time.Minute)
			synctest.Wait()
			if len(c.starts) != 1 || len(other.starts) != 0 {
				t.Errorf("%d runs of the one for every replica and %d of the other, want 1 and 0", len(c.starts), len(other.starts))
			}
			begun := time.Now()
			err := stop()
			if took := time.Since(begun); took != tc.took || errors.Is(err, election.ErrUnfinished) != (tc.want != "") || !strings.Contains(fmt.Sprint(err), tc.want) {
				t.Errorf("it stopped after %s with %v; want %s and %s", took, err, tc.took, tc.want)
			}
			<-time.After(2 * time.Hour) // until the one that does not drain has returned
			assert.Equal(t, "a Run goes on", false, here.restarts.isRunning())
		})
	}
}

func TestEveryReplicaNeedsAWarmStandby(t *testing.T) {
	o := newOptions(t, With(withFunctions(controllers.Entry{Name: "one", EveryReplica: true}), withFunctions(controllers.Entry{Name: "two"})))
	assert.NoError(t, o.Check())
	o.Informers.Standby = standbyCold
	lines(t, o.Check(), "--standby: one runs on every replica, which needs the cache of a warm standby")
}

// scripted is a controller whose nth run calls the nth function. Further runs call the last one.
type scripted struct {
	runs  []func(context.Context) error
	begun time.Time

	mu     sync.Mutex
	starts []time.Duration // since begun
	status controllers.Status
	panics bool          // in Status
	locked chan struct{} // Status waits until it is closed, if it is set
}

func (s *scripted) Run(ctx context.Context) error {
	s.mu.Lock()
	run := s.runs[min(len(s.starts), len(s.runs)-1)]
	s.starts = append(s.starts, time.Since(s.begun))
	s.mu.Unlock()
	return run(ctx)
}

func (s *scripted) Status() controllers.Status {
	if s.panics {
		panic("hunter2")
	}
	if s.locked != nil {
		<-s.locked
	}
	return s.status
}

func (*scripted) Close() {} // as a loop of another cluster

func untilTheEnd(ctx context.Context) error { <-ctx.Done(); return nil }

func fails(context.Context) error { return errors.New("out of luck") }

// host returns a hosted controller with an empty cache.
func host(t *testing.T, runs ...func(context.Context) error) (*hostedController, *scripted, metrics.KubeRegistry) {
	t.Helper()
	registry := metrics.NewKubeRegistry()
	c := &scripted{runs: runs, begun: time.Now()}
	h := newHosted("x", &informers.ClusterCache{}, &openClusters{}, loopmetrics.New(registry), time.Minute)
	h.controller = c
	return h, c, registry
}

// series compares a metric of the controller with want.
func series(t *testing.T, registry metrics.KubeRegistry, name string, want float64) {
	t.Helper()
	families, err := registry.Gather()
	assert.NoError(t, err)
	for _, family := range families {
		if family.GetName() != name {
			continue
		}
		for _, m := range family.GetMetric() {
			if got := m.GetCounter().GetValue() + m.GetGauge().GetValue(); testutil.LabelsMatch(m, map[string]string{"controller": "x"}) && got != want {
				t.Errorf("%s is %v, want %v", name, got, want)
			}
		}
		return
	}
	t.Errorf("there is no metric %s", name)
}

func TestRestartsShowUntilARunHasLasted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var h *hostedController
		follows := func(context.Context) error {
			_, err := informers.Follow[metav1.Object](h.cache.ForController("x"), informers.Need{Resource: informers.Secrets})
			return err
		}
		panicsWith := func(context.Context) error { panic(panics.Mistake("asks for secrets")) }
		h, c, registry := host(t, fails, follows, panicsWith, untilTheEnd)
		caches, err := informers.NewCaches(registry)
		assert.NoError(t, err)
		h.cache, err = caches.AddCluster(informers.CacheConfig{Scheme: scheme.Scheme}, &rest.Config{Transport: transport{send: func(*http.Request) (*http.Response, error) {
			return nil, errors.New("away")
		}}}, func(string) {})
		assert.NoError(t, err)
		h.cache.Start(t.Context())
		closed, drained := []int{}, false // how many runs had begun when a cluster was closed
		open := func(all ...*otherCluster) { h.clusters.mu.Lock(); h.clusters.all = all; h.clusters.mu.Unlock() }
		late := &otherCluster{openClusters: h.clusters, cache: &informers.ClusterCache{}, end: func() {}, release: func() { closed = append(closed, len(c.starts)); open() }}
		far := &otherCluster{openClusters: h.clusters, cache: &informers.ClusterCache{}, end: func() {}, release: func() { closed = append(closed, len(c.starts)); open(late) }}
		open(far)
		const closing = healthyRun + time.Minute
		far.running.Go(func() { <-time.After(closing) })
		var named atomic.Int32 // lines that name the controller as the lines of a Loop do
		logger := funcr.New(func(_, line string) { named.Add(int32(strings.Count(line, `"controller"="x"`))) }, funcr.Options{})
		ctx, cancel := context.WithCancel(klog.NewContext(t.Context(), logger))
		done := make(chan error)
		go func() { done <- h.supervise(ctx) }()
		pass := func(d time.Duration) { <-time.After(d); synctest.Wait() }
		is := func(when string, healthy bool) {
			t.Helper()
			err := h.health.Check(nil)
			if (err == nil) != healthy {
				t.Errorf("%s: %v", when, err)
			}
			if err != nil && !strings.Contains(err.Error(), "stopped unexpectedly") {
				t.Errorf("%s: the reason is %v", when, err)
			}
			if shown := h.Status().Problem; (shown == "") != healthy {
				t.Errorf("%s: the status shows %q", when, shown)
			}
			series(t, registry, "quartermaster_controller_problem", map[bool]float64{true: 0, false: 1}[healthy])
		}
		pass(500 * time.Millisecond)
		is("while it waits for the first restart", false)
		pass(healthyRun)
		is("while it waits for a loop in another cluster, for as long as a healthy run", false)
		pass(2 * time.Minute)
		is("a minute after the last restart", false)
		if e := h.Status().LastError; e == nil || e.Key != "Run" || e.Text != "panic: asks for secrets" {
			t.Errorf("last error %+v", e)
		}
		pass(healthyRun)
		is("when it has run for a while", true)
		assert.Equal(t, "starts", []time.Duration{0, closing + restartDelay, closing + 2*restartDelay, closing + 3*restartDelay}, c.starts)
		assert.Equal(t, "restarts in the status", 3, h.Status().Restarts)
		assert.Equal(t, "runs before the clusters were closed, the second of which was opened late", []int{1, 1}, closed)
		open(far)
		assert.Equal(t, "followed resources", 0, len(caches.Status().Resources))
		series(t, registry, "quartermaster_controller_restarts_total", 3)
		series(t, registry, "quartermaster_controller_panics_total", 1)
		far.running.Go(func() { <-ctx.Done(); <-time.After(time.Second); drained = true })
		cancel()
		assert.NoError(t, <-done)
		assert.Equal(t, "a loop in a cluster that was left open has drained", true, drained)
		assert.Equal(t, "lines of the log that name the controller, one of each restart", int32(3), named.Load())
	})
}

func TestHealthCheckSaysTheProblem(t *testing.T) {
	in := func(phase controllers.Phase) func(*scripted) {
		return func(c *scripted) { c.status = controllers.Status{Phase: phase, PhaseSince: time.Now()} }
	}
	reconciling := func(c *scripted) { c.status.InFlight = []controllers.InFlight{{Key: "shop/web", Since: time.Now()}} }
	for name, tc := range map[string]struct {
		of    func(*scripted)
		since time.Duration
		want  string // "" for none
	}{
		"no reconcile":                        {func(*scripted) {}, time.Hour, ""},
		"a reconcile within the limit":        {reconciling, 30 * time.Second, ""},
		"a reconcile that is over the limit":  {reconciling, 2 * time.Minute, "reconciling shop/web for 2m0s, longer than --controller-stuck-after=1m0s"},
		"a drain within the limit":            {in(controllers.PhaseDraining), 30 * time.Second, ""},
		"a drain that is over the limit":      {in(controllers.PhaseDraining), 2 * time.Minute, "has been draining for 2m0s, longer than --controller-stuck-after=1m0s"},
		"a loop that waits for its informers": {in(controllers.PhaseSyncing), 2 * time.Minute, "has been waiting for its informers for 2m0s, longer than --controller-stuck-after=1m0s"},
		"a loop that runs":                    {in(controllers.PhaseRunning), 2 * time.Minute, ""},
		"a Run that waits before its loop":    {in(controllers.PhaseStopped), 2 * time.Minute, ""},
		"a problem that the controller knows": {func(c *scripted) { c.status.Problem = "the API server refuses" }, 0, "the API server refuses"},
		"a stuck reconcile and its cause": {func(c *scripted) { reconciling(c); c.status.Problem = "no answer" }, 2 * time.Minute,
			"reconciling shop/web for 2m0s, longer than --controller-stuck-after=1m0s\nno answer"},
		"a status that panics": {func(c *scripted) { c.panics = true }, 0, "Status: panic: a value of type string"},
	} {
		subtest.InBubble(t, name, func(t *testing.T) {
			h, c, registry := host(t, untilTheEnd)
			tc.of(c)
			_ = h.Status() // on a standby, where it does not count
			<-time.After(time.Hour)
			tc.of(c)
			h.restarts.begin()
			<-time.After(tc.since)
			series(t, registry, "quartermaster_controller_problem", map[bool]float64{true: 0, false: 1}[tc.want == ""]) // a scrape
			if err := h.health.Check(nil); (err == nil) != (tc.want == "") || err != nil && err.Error() != tc.want {
				t.Errorf("check: %v", err)
			}
			if got := h.Status(); got.Problem != tc.want || got.Name != "x" {
				t.Errorf("status %+v", got)
			}
			c.panics, c.status = false, controllers.Status{}
			series(t, registry, "quartermaster_controller_problem", 0)
		})
	}
}

func TestStatusThatHangsHoldsNobodyUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h, c, registry := host(t, untilTheEnd)
		c.locked = make(chan struct{})
		h.metrics.AddController("hangs too", func() error { return h.health.Check(nil) })
		began, scraped := time.Now(), make(chan struct{})
		go func() { defer close(scraped); series(t, registry, "quartermaster_controller_problem", 1) }()
		synctest.Wait()
		h.metrics.AddController("another", func() error { return nil })
		if took := time.Since(began); took > 0 {
			t.Errorf("another controller waited for %v", took)
		}
		<-scraped
		for range 3 {
			assert.Equal(t, "problem", "Status did not return within 1s", fmt.Sprint(h.health.Check(nil)))
			_ = hostedControllers{h, h}.unfinished(time.Now())
			_ = h.Status()
			hostedControllers{h}.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest(http.MethodGet, "/debug/controllers/other", nil))
		}
		assert.Equal(t, "time taken", (1+3*3)*statusTimeout, time.Since(began))
		close(c.locked)
		synctest.Wait()
		c.status.Details = t.Log
		assert.Equal(t, "problem", "Status: as JSON, Details: json: unsupported type: func(...interface {})", h.Status().Problem)
		series(t, registry, "quartermaster_controller_problem", 1)
	})
}

func TestDrainThatFailsSaysSo(t *testing.T) {
	for name, tc := range map[string]struct {
		run  func(context.Context) error
		want bool
	}{
		"a controller that waits for its restart":            {fails, false},
		"a controller that returns the error of its context": {func(ctx context.Context) error { <-ctx.Done(); return fmt.Errorf("run: %w", ctx.Err()) }, false},
		"a controller that returns the cause of its end":     {func(ctx context.Context) error { <-ctx.Done(); return context.Cause(ctx) }, false},
		"a controller that returns an error":                 {func(ctx context.Context) error { <-ctx.Done(); return errors.New("gave up") }, true},
		"a controller with a loop that returns an error":     {func(ctx context.Context) error { <-ctx.Done(); return errors.Join(ctx.Err(), errors.New("gave up")) }, true},
		"a controller that panics as it drains":              {func(ctx context.Context) error { <-ctx.Done(); panic("x") }, true},
	} {
		subtest.InBubble(t, name, func(t *testing.T) {
			h, _, _ := host(t, tc.run)
			fine, _, _ := host(t, untilTheEnd)
			ctx, cancel := context.WithCancelCause(t.Context())
			time.AfterFunc(time.Second, func() { cancel(errors.New("told to end")) })
			err := hostedControllers{fine, h}.run(ctx)
			assert.Equal(t, fmt.Sprintf("whether run returned ErrUnfinished, of %v", err), tc.want, errors.Is(err, election.ErrUnfinished))
		})
	}
}

// slowSink takes two seconds for each Event, or fails at once.
type slowSink struct {
	err      error
	mu       sync.Mutex
	received []string
}

func (s *slowSink) Create(event *corev1.Event) (*corev1.Event, error) {
	if s.err != nil {
		return nil, s.err
	}
	<-time.After(2 * time.Second)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.received = append(s.received, event.Reason)
	return event, nil
}

func (s *slowSink) Update(event *corev1.Event) (*corev1.Event, error)          { return event, nil }
func (s *slowSink) Patch(event *corev1.Event, _ []byte) (*corev1.Event, error) { return event, nil }

func TestEventsAreSentBeforeTheEnd(t *testing.T) {
	for name, tc := range map[string]struct {
		sink  *slowSink
		count int
		want  []string
		takes time.Duration
	}{
		"without any Event nothing is waited for":      {&slowSink{}, 0, nil, 0},
		"what was recorded is sent":                    {&slowSink{}, 1, []string{"R0"}, 2 * time.Second},
		"what takes too long is given up":              {&slowSink{}, 9, []string{"R0", "R1"}, eventsFlushTimeout},
		"an API server that is away is not waited for": {&slowSink{err: errors.New("away")}, 2, nil, eventsFlushTimeout},
	} {
		subtest.InBubble(t, name, func(t *testing.T) {
			scheme, err := NewScheme(nil)
			assert.NoError(t, err)
			e := newEventSenderFor(t.Context(), tc.sink, scheme)
			recorders := []record.EventRecorder{e.recorder("one"), e.recorder("two")} // neither waits for the other
			for i := range tc.count {
				recorders[i%2].Event(&corev1.ConfigMap{}, corev1.EventTypeNormal, fmt.Sprintf("R%d", i), "")
			}
			begin := time.Now()
			e.stop(eventsFlushTimeout)
			assert.Equal(t, "time that the end took", tc.takes, time.Since(begin))
			tc.sink.mu.Lock()
			slices.Sort(tc.sink.received)
			assert.Equal(t, "sent", tc.want, tc.sink.received)
			tc.sink.mu.Unlock()
			<-time.After(time.Minute) // until what was on its way has ended
		})
	}
}

// TestEventWithoutAnAnswerHoldsUpNoOther has an API server that never answers the first Event.
func TestEventWithoutAnAnswerHoldsUpNoOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var sent []string
		base := &rest.Config{Host: "http://api", Transport: roundTripper(func(r *http.Request) (*http.Response, error) {
			body, err := io.ReadAll(r.Body)
			if assert.NoError(t, err); strings.Contains(string(body), "R0") {
				<-r.Context().Done()
				return nil, r.Context().Err()
			}
			sent = append(sent, "R1")
			return &http.Response{StatusCode: http.StatusCreated, Header: http.Header{"Content-Type": {"application/json"}}, Body: io.NopCloser(bytes.NewReader(body))}, nil
		})}
		e, err := startEvents(t.Context(), clientConfigs{base, runtime.ContentTypeJSON}, scheme.Scheme)
		assert.NoError(t, err)
		r := e.recorder("x")
		for _, reason := range []string{"R0", "R1"} {
			r.Event(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: reason}}, corev1.EventTypeNormal, reason, "")
		}
		<-time.After(20 * time.Minute) // 12 attempts, with 10 s between them
		e.stop(eventsFlushTimeout)
		assert.Equal(t, "sent", []string{"R1"}, sent)
	})
}
