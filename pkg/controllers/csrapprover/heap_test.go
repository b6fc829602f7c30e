// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package csrapprover

import (
	"fmt"
	"hash/maphash"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/component-base/metrics"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/csrapprover/policy"
	"github.com/quartermaster-dev/quartermaster/pkg/informers"
)

// What is served: Nodes with long names, whole statuses and two addresses each, and two requests of each.
const (
	servedNodes    = 5000
	servedRequests = 10_000
)

func nodeName(i int) string {
	return fmt.Sprintf("ip-10-%d-%d-%d.eu-central-1.compute.internal", i>>16, i>>8&255, i&255)
}

func meta(i int, name string) string {
	return fmt.Sprintf(`"metadata":{"name":%q,"uid":"6b0c33a2-5c46-4b6c-9b39-%012d","resourceVersion":"%d","creationTimestamp":"2030-01-10T12:00:00Z"}`, name, i, 1000+i)
}

func servedNode(i int) string {
	name := nodeName(i)
	return fmt.Sprintf(`{"kind":"Node","apiVersion":"v1",%s,"status":{"images":[{"names":[%q]}],"addresses":[{"type":"Hostname","address":%q},{"type":"InternalDNS","address":%q},`+
		`{"type":"InternalIP","address":"10.%d.%d.%d"},{"type":"ExternalIP","address":"198.51.%d.%d"}]}}`, meta(i, name), strings.Repeat("x", 8<<10), name, name, i>>16, i>>8&255, i&255, i>>8, i&255)
}

// servedRequest is one that waits, or one that was approved.
func servedRequest(i int) string {
	status := `{}`
	if i%2 == 0 {
		status = `{"conditions":[{"type":"Approved","status":"True","reason":"x","lastUpdateTime":"2030-01-10T12:00:00Z"}],"certificate":"` + strings.Repeat("A", 1<<10) + `"}`
	}
	return fmt.Sprintf(`{"kind":"CertificateSigningRequest","apiVersion":"certificates.k8s.io/v1",%s,"spec":{"request":%q,"signerName":"kubernetes.io/kubelet-serving","username":%q,`+
		`"groups":["system:nodes"],"usages":["server auth"]},"status":%s}`, meta(servedNodes+i, fmt.Sprintf("csr-%05d", i)), strings.Repeat("A", 1<<10), "system:node:"+nodeName(i%servedNodes), status)
}

// TestCacheTakesAtMostTwoAndAHalfMiB has the caches and the indexes of the controller, and its memory of
// requests that wait, empty and full.
func TestCacheTakesAtMostTwoAndAHalfMiB(t *testing.T) {
	empty, _ := newFullCache(t, 0, 0)
	full, c := newFullCache(t, servedNodes, servedRequests)
	waiting := liveHeap()
	for _, obj := range c.requests.List("", nil) {
		if requestOf(obj).state == pending {
			c.memory.recordWait(obj.GetName(), problemsOf(policy.CheckNodeAddresses))
		}
	}
	waiting = liveHeap() - waiting
	growth := full - empty + waiting
	t.Logf("%d Nodes and %d requests, half of which wait, take %d KiB of heap", servedNodes, servedRequests, growth>>10)
	if growth > 5<<19 {
		t.Errorf("%d KiB", growth>>10)
	}
	if got := c.nodesNamed("10.0.1.2"); len(got) != 1 || got[0] != nodeName(258) {
		t.Errorf("nodes %q", got)
	}
	runtime.KeepAlive(c)
}

// newFullCache returns a controller with a full cache, and how much heap that takes.
func newFullCache(t *testing.T, nodes, requests int) (int64, *controller) {
	t.Helper()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		n, object, kind := nodes, servedNode, `"kind":"Node","apiVersion":"v1"`
		if strings.Contains(r.URL.Path, "certificatesigningrequests") {
			n, object, kind = requests, servedRequest, `"kind":"CertificateSigningRequest","apiVersion":"certificates.k8s.io/v1"`
		}
		w.Header().Set("Content-Type", "application/json")
		for i := range n {
			_, _ = fmt.Fprintf(w, "{\"type\":\"ADDED\",\"object\":%s}\n", object(i))
		}
		_, _ = fmt.Fprintf(w, `{"type":"BOOKMARK","object":{%s,"metadata":{"resourceVersion":"50000","annotations":{%q:"true"}}}}`+"\n", kind, metav1.InitialEventsAnnotationKey)
		_ = http.NewResponseController(w).Flush()
		<-r.Context().Done()
	}))
	t.Cleanup(server.Close)
	config := &rest.Config{Host: server.URL, ContentConfig: rest.ContentConfig{ContentType: "application/json"}}
	seed := maphash.MakeSeed()
	cfg := informers.CacheConfig{Scheme: scheme.Scheme}
	cfg.Declare(Name, needs(seed)...)
	caches, err := informers.NewCaches(metrics.NewKubeRegistry())
	assert.NoError(t, err)
	before := liveHeap()
	f, err := caches.AddCluster(cfg, config, func(string) {})
	assert.NoError(t, err)
	t.Cleanup(f.Shutdown)
	c := &controller{seed: seed, requests: informers.For[*informers.Object](f.ForController(Name), requestResource), nodes: informers.For[*informers.Object](f.ForController(Name), nodeResource), memory: newMemory()}
	c.addIndexes()
	f.Start(t.Context())
	for _, synced := range []<-chan struct{}{c.requests.Synced(), c.nodes.Synced()} {
		select {
		case <-synced:
		case <-time.After(2 * time.Minute):
			t.Fatal("the cache has not synced")
		}
	}
	return liveHeap() - before, c
}

func liveHeap() int64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}
