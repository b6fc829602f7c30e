// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	goruntime "runtime"
	"runtime/debug"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
	"weak"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/testutil"
	"k8s.io/utils/ptr"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/internal/panics"
	"github.com/quartermaster-dev/quartermaster/internal/served"
	"github.com/quartermaster-dev/quartermaster/internal/subtest"
)

// newClusterCache starts a cache on real clients, and waits until it has synced.
func newClusterCache(t testing.TB, config *rest.Config, needs ...Need) (*ClusterCache, metrics.KubeRegistry) {
	t.Helper()
	reg := metrics.NewKubeRegistry()
	caches, err := NewCaches(reg)
	assert.NoError(t, err)
	f, err := caches.AddCluster(CacheConfig{Scheme: scheme.Scheme, needs: needs}, config, func(string) {})
	assert.NoError(t, err)
	t.Cleanup(f.Shutdown)
	f.Start(t.Context())
	for _, i := range f.informers {
		<-i.lists.synced
	}
	return f, reg
}

// eventually waits until a condition holds that depends on other goroutines and the network.
func eventually(t *testing.T, what string, done func() bool) {
	t.Helper()
	poll := func(context.Context) (bool, error) { return done(), nil }
	if err := wait.PollUntilContextTimeout(t.Context(), 10*time.Millisecond, 2*time.Minute, true, poll); err != nil {
		t.Fatalf("waited in vain: %s", what)
	}
}

func TestClientsOfTwoClustersHaveTwoCaches(t *testing.T) {
	config := serve(t, newCluster(named("a", "1")))
	f, reg := newClusterCache(t, config, reloadNeed)
	for range 2 {
		other, err := f.caches.AddCluster(CacheConfig{Cluster: "c1", Scheme: scheme.Scheme}, config, func(string) {})
		assert.NoError(t, err)
		names := other.ForController("names")
		if _, err := panics.Recover(func() error { For[*Object](names, Secrets); return nil }); err == nil || !strings.Contains(err.Error(), "use informers.Follow") {
			t.Errorf("error %v for what is declared nowhere", err)
		}
		followed, err := Follow[*Object](names, Need{Resource: Secrets})
		assert.NoError(t, err)
		<-followed.Synced()
		assert.Equal(t, "list slots of another cluster", 2, cap(followed.informer.feeds[0].listSlots))
		assert.NoError(t, testutil.GatherAndCompare(reg, strings.NewReader(`
			# HELP quartermaster_informer_objects [ALPHA] Number of objects in the cache.
			# TYPE quartermaster_informer_objects gauge
			quartermaster_informer_objects{cluster="",group="",resource="secrets"} 1
			quartermaster_informer_objects{cluster="c1",group="",resource="secrets"} 1
			# HELP quartermaster_informer_synced [ALPHA] 1 if the cache has been filled once.
			# TYPE quartermaster_informer_synced gauge
			quartermaster_informer_synced{cluster="",group="",resource="secrets"} 1
			quartermaster_informer_synced{cluster="c1",group="",resource="secrets"} 1
		`), "quartermaster_informer_objects", "quartermaster_informer_synced"))
		if all := f.caches.Status().Resources; !slices.ContainsFunc(all, func(r ResourceStatus) bool { return r.Cluster == "c1" }) {
			t.Errorf("the other cluster is missing in %+v", all)
		}
		closed := weak.Make(other)
		followed.Stop()
		other.Shutdown()
		eventually(t, "a cache that was closed is garbage", func() bool { goruntime.GC(); return closed.Value() == nil })
	}
}

func TestClustersOfOneNameCountTogether(t *testing.T) {
	config := serve(t, newCluster(named("a", "1")))
	f, _ := newClusterCache(t, config, reloadNeed)
	var clusters []*ClusterCache
	for _, controller := range []string{"one", "two"} {
		cluster, err := f.caches.AddCluster(CacheConfig{Cluster: "c1", Scheme: scheme.Scheme}, config, func(string) {})
		assert.NoError(t, err)
		followed, err := Follow[*Object](cluster.ForController(controller), Need{Resource: Secrets})
		assert.NoError(t, err)
		<-followed.Synced()
		clusters = append(clusters, cluster)
	}
	counts := func() ResourceStatus { return *f.caches.sums()[seriesLabels{"c1", "", "secrets"}] }
	assert.Equal(t, "objects and lists of both", []int64{2, 2}, []int64{int64(counts().Objects), counts().Lists})
	clusters[0].Shutdown()
	assert.Equal(t, "objects of one, and lists, which never sink", []int64{1, 2}, []int64{int64(counts().Objects), counts().Lists})
	clusters[1].Shutdown()
	assert.Equal(t, "counts of a cluster that nobody has open", 0, len(f.caches.ended))
}

// connection is a connection to a server.
type connection func(*http.Request) (*http.Response, error)

func (c connection) RoundTrip(r *http.Request) (*http.Response, error) { return c(r) }

func TestDiscoveryFindsNothingAbsentWhereNoAPIServerAnswers(t *testing.T) {
	for name, tc := range map[string]struct {
		server connection
		takes  time.Duration
	}{
		"a proxy answers that nothing is there": {func(r *http.Request) (*http.Response, error) {
			w := httptest.NewRecorder()
			http.NotFound(w, r)
			return w.Result(), nil
		}, 0},
		"a server that hangs is given up in time": {func(r *http.Request) (*http.Response, error) {
			<-r.Context().Done()
			return nil, r.Context().Err()
		}, served.Timeout},
	} {
		subtest.InBubble(t, name, func(t *testing.T) {
			start := time.Now()
			clients, err := newReaders(&rest.Config{Host: "http://api", Transport: tc.server}, scheme.Scheme)
			assert.NoError(t, err)
			_, err = clients.discovery.Version(t.Context(), Secrets.GroupResource())
			if err == nil || apierrors.IsNotFound(err) {
				t.Errorf("error %v, want one that does not say that the resource is absent", err)
			}
			assert.Equal(t, "it took", tc.takes, time.Since(start))
		})
	}
}

func TestVersionIsAskedForOnce(t *testing.T) {
	answers := map[string]string{
		"/apis":         `{"kind":"APIGroupList","groups":[{"name":"apps","preferredVersion":{"groupVersion":"apps/v1","version":"v1"}}]}`,
		"/apis/apps/v1": `{"kind":"APIResourceList","groupVersion":"apps/v1","resources":[{"name":"deployments","kind":"Deployment"}]}`,
		"/apis/apps/v1/namespaces/shop/deployments": `{"kind":"PartialObjectMetadataList","apiVersion":"meta.k8s.io/v1"}`,
	}
	asked := 0
	config := &rest.Config{Host: "http://api", Transport: connection(func(r *http.Request) (*http.Response, error) {
		asked++
		w := httptest.NewRecorder()
		w.Header().Set("Content-Type", runtime.ContentTypeJSON)
		_, found := answers[r.URL.Path]
		if !found {
			w.WriteHeader(http.StatusNotFound)
		}
		_, _ = w.WriteString(answers[r.URL.Path])
		return w.Result(), nil
	})}
	clients, err := newReaders(config, scheme.Scheme)
	assert.NoError(t, err)
	src, err := clients.sourceFor(mustPlan(t, Need{controller: "any", Resource: schema.GroupVersionResource{Group: "apps", Resource: "deployments"}}), "shop")
	assert.NoError(t, err)
	for _, want := range []int{4, 5, 6} { // at first with /api, /apis and the version
		_, err := src.list(t.Context(), metav1.ListOptions{})
		assert.NoError(t, err)
		assert.Equal(t, "requests", want, asked)
	}
}

func TestForbiddenNamespaceHidesNoOthersAge(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newCluster()
		b.failWith(func(string) error { return forbidden })
		f := inNamespaces(t, map[string]*cluster{"a": newCluster(in("a", "x", "1")), "b": b})
		f.caches.all, f.caches.metrics = []*ClusterCache{f}, resourceMetrics()
		registry := metrics.NewKubeRegistry()
		registry.CustomMustRegister(f.caches)
		f.Start(t.Context())
		pass(time.Second)
		assert.NoError(t, testutil.GatherAndCompare(registry, strings.NewReader(`
			# HELP quartermaster_informer_last_activity_age_seconds [ALPHA] Seconds since the last event, bookmark or list. A healthy watch gets a bookmark about once a minute.
			# TYPE quartermaster_informer_last_activity_age_seconds gauge
			quartermaster_informer_last_activity_age_seconds{cluster="",group="",resource="secrets"} 1
		`), "quartermaster_informer_last_activity_age_seconds"))
	})
}

func TestStatusShowsTheNeed(t *testing.T) {
	f, _ := newClusterCache(t, serve(t, newCluster(named("a", "1"), named("b", "1"))), reloadNeed)
	got := f.caches.Status().Resources[0]
	assert.Equal(t, "the age is there", true, got.LastActivityAge != nil)
	got.LastActivityAge = nil
	want := ResourceStatus{Version: "v1", Resource: "secrets", For: []string{"reload"}, Form: "content digest", FieldSelector: got.FieldSelector,
		Synced: true, Objects: 2, ResourceVersion: "102", Lists: 1, Watches: 1}
	assert.Equal(t, "status", want, got)
}

// ServeHTTP serves the Secrets in JSON. Clients that ask for metadata alone leave the rest out.
func (c *cluster) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	var opts metav1.ListOptions
	if err := metav1.Convert_url_Values_To_v1_ListOptions(ptr.To(req.URL.Query()), &opts, nil); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	w.Header().Set("Content-Type", runtime.ContentTypeJSON)
	if !opts.Watch {
		list, err := c.list(req.Context(), opts)
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		list.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("SecretList"))
		_ = json.NewEncoder(w).Encode(list)
		return
	}
	events, err := c.watch(req.Context(), opts)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	defer events.Stop()
	w.(http.Flusher).Flush()
	for e := range events.ResultChan() {
		e.Object.GetObjectKind().SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("Secret"))
		if err := json.NewEncoder(w).Encode(metav1.WatchEvent{Type: string(e.Type), Object: runtime.RawExtension{Object: e.Object}}); err != nil {
			return
		}
		w.(http.Flusher).Flush()
	}
}

func serve(t *testing.T, c *cluster) *rest.Config {
	t.Helper()
	server := httptest.NewServer(c)
	t.Cleanup(func() {
		server.CloseClientConnections()
		server.Close()
	})
	return &rest.Config{Host: server.URL}
}

// What the served types have: plain objects, and one with an annotation.
const (
	servedTypes  = 300
	plainObjects = 666
)

// serveTypes serves the same plain objects, and an annotated one, as every resource.
func serveTypes(t testing.TB) *rest.Config {
	t.Helper()
	object := func(i int) map[string]any {
		annotations := map[string]string{"kubectl.kubernetes.io/last-applied-configuration": strings.Repeat("x", 200)}
		if i == plainObjects {
			annotations["ttl"] = "1h"
		}
		return map[string]any{"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": map[string]any{
			"namespace": fmt.Sprintf("team-%d", i%40), "name": fmt.Sprintf("object-of-some-length-%d", i), "annotations": annotations,
			"uid": fmt.Sprintf("6b0c33a2-5c46-4b6c-9b39-%012d", i), "resourceVersion": fmt.Sprint(1000 + i), "creationTimestamp": "2030-01-10T12:00:00Z",
			"labels": map[string]string{"app.kubernetes.io/name": "shop", "team": "x"},
		}}
	}
	var events []byte
	add := func(kind string, object any) {
		text, _ := json.Marshal(map[string]any{"type": kind, "object": object})
		events = append(events, append(text, '\n')...)
	}
	for i := range plainObjects + 1 {
		add("ADDED", object(i))
	}
	add("BOOKMARK", map[string]any{"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": map[string]any{
		"resourceVersion": "5000", "annotations": map[string]string{metav1.InitialEventsAnnotationKey: "true"}}})
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write(events)
		_ = http.NewResponseController(w).Flush()
		<-r.Context().Done()
	}))
	server.EnableHTTP2 = true
	server.StartTLS()
	t.Cleanup(server.Close)
	return &rest.Config{Host: server.URL, TLSClientConfig: rest.TLSClientConfig{Insecure: true}}
}

// resident returns how much memory Go has from the system.
func resident() int {
	var m goruntime.MemStats
	goruntime.ReadMemStats(&m)
	return int(m.Sys - m.HeapReleased)
}

// raceDetector reports whether the race detector is built in, which takes memory of its own.
func raceDetector() bool {
	info, ok := debug.ReadBuildInfo()
	return ok && slices.Contains(info.Settings, debug.BuildSetting{Key: "-race", Value: "true"})
}

// TestFollowOf300TypesTakesAtMost40MiB follows 300 types with 200,000 plain objects. A manager collects
// garbage as often as this does.
func TestFollowOf300TypesTakesAtMost40MiB(t *testing.T) {
	if testing.Short() || raceDetector() {
		t.Skip("measures memory")
	}
	defer debug.SetGCPercent(debug.SetGCPercent(60))
	f, _ := newClusterCache(t, serveTypes(t))
	debug.FreeOSMemory()
	before := resident()
	var all []*Following[*Object]
	h := &recorder{}
	for i := range servedTypes {
		need := ttlNeed
		need.Resource = schema.GroupVersionResource{Group: fmt.Sprintf("g%d.example.com", i%30), Version: "v1", Resource: fmt.Sprintf("resources%d", i)}
		w, err := Follow[*Object](f.ForController("ttl"), need)
		assert.NoError(t, err)
		w.AddHandler(h.handle)
		all = append(all, w)
	}
	f.Start(t.Context())
	assert.Equal(t, "list slots of the own cluster", 2, cap(all[0].informer.feeds[0].listSlots))
	peak := 0
	eventually(t, "all types to sync", func() bool {
		peak = max(peak, resident()-before)
		return !slices.ContainsFunc(all, func(w *Following[*Object]) bool { return !w.Status().Synced })
	})
	eventually(t, "the handler to be called with each object", func() bool {
		h.mu.Lock()
		defer h.mu.Unlock()
		return len(h.lines) == servedTypes
	})
	synced := resident() - before
	goruntime.GC()
	var m goruntime.MemStats
	goruntime.ReadMemStats(&m)
	goroutines := goruntime.NumGoroutine()
	t.Logf("%d types with %d objects: %d KiB of resident memory once synced, %d at the peak; %d KiB of heap, %d of stacks, %d goroutines",
		servedTypes, servedTypes*(plainObjects+1), synced>>10, peak>>10, m.HeapAlloc>>10, m.StackInuse>>10, goroutines)
	if peak > 40<<20 {
		t.Errorf("it took %d MiB", peak>>20)
	}
	begin := time.Now()
	for _, w := range all {
		w.Stop()
	}
	t.Logf("stopped in %v", time.Since(begin))
	eventually(t, "the goroutines to end", func() bool { return goruntime.NumGoroutine() < 50 })
}
