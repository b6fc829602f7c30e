// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"os"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"go.uber.org/goleak"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func TestMain(m *testing.M) {
	switch os.Getenv(serverEnv) {
	case "planted":
		servePlanted()
	case "types":
		serveTypes()
	default:
		goleak.VerifyTestMain(m)
	}
}

var reloadNeed = Need{For: "reload", Resource: Secrets, FieldSelector: NotHelm, Annotations: []string{"match"}, Digest: DigestOf(digestSHA1), History: true}

func named(name, value string) *corev1.Secret {
	return &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name}, Data: map[string][]byte{"value": []byte(value)}}
}

// names returns the keys in the first cache.
func names(f *ClusterCache) []string {
	keys := f.informers[0].objects.ListKeys()
	slices.Sort(keys)
	return keys
}

// cached returns a Secret of the namespace shop in the first cache, or nil.
func cached(f *ClusterCache, name string) *Object { return f.informers[0].get("shop/" + name) }

func wantNames(t *testing.T, f *ClusterCache, want ...string) {
	t.Helper()
	synctest.Wait()
	if diff := cmp.Diff(want, names(f), cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("cached Secrets (-want +got):\n%s", diff)
	}
}

func secretsStatus(f *ClusterCache) ResourceStatus { return f.Status().Resources[0] }

func startSynced(t *testing.T, f *ClusterCache) {
	t.Helper()
	f.Start(t.Context())
	for _, i := range f.informers {
		<-i.synced
	}
}

// hasSynced reports whether all informers of the controller have.
func hasSynced(f *ClusterCache, controller string) bool {
	return !slices.ContainsFunc(f.informers, func(i *informer) bool { return i.plan.need(controller) != nil && !i.hasSynced() })
}

// pass waits in a synctest bubble until d has passed and all goroutines are blocked again.
func pass(d time.Duration) {
	<-time.After(d)
	synctest.Wait()
}

// verbs returns the verbs of the recorded requests.
func verbs(c *cluster) []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	var vs []string
	for _, r := range c.requests {
		vs = append(vs, strings.Fields(r)[0])
	}
	return vs
}

func TestListWithoutStreamsIsPaged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster()
		for i := range 2*pageSize + 1 {
			c.put(secret(i, 1))
		}
		c.noStreams = true
		f := newTestCache(t, c, reloadNeed)
		startSynced(t, f)
		if got := len(names(f)); got != 2*pageSize+1 {
			t.Errorf("%d objects in the cache", got)
		}
		c.breakWatches(true)
		pass(2 * time.Minute)
		for i, v := range c.requests {
			if strings.HasPrefix(v, "list") && !strings.Contains(v, "limit=250") || strings.Contains(v, "rv=0 ") {
				t.Errorf("request %d may be answered at once: %s", i, v)
			}
		}
		if s := secretsStatus(f); s.Lists != 2 || s.Relists != 1 || s.Failures != 0 {
			t.Errorf("lists %d, relists %d, failures %d", s.Lists, s.Relists, s.Failures)
		}
	})
}

func TestCacheAgeShowsASilentServer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(named("a", "1"))
		f := newTestCache(t, c, reloadNeed)
		if s := secretsStatus(f); s.LastActivityAge != nil {
			t.Errorf("age before the start: %v", s.LastActivityAge)
		}
		startSynced(t, f)
		c.put(named("b", "1"))
		pass(time.Minute)
		c.bookmark()
		pass(30 * time.Second)
		s := secretsStatus(f)
		if s.LastActivityAge.Duration != 30*time.Second {
			t.Errorf("age of activity %v", s.LastActivityAge)
		}
		if s.ResourceVersion != "103" {
			t.Errorf("resourceVersion %s, want the bookmark's", s.ResourceVersion)
		}
	})
}

func TestCacheNotStartedShutsDown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newTestCache(t, newCluster(), reloadNeed)
		if f.CheckSync(nil) == nil {
			t.Error("ready without having been started")
		}
		if err := f.Problem("reload"); err != nil {
			t.Errorf("a problem of the controller though nobody has tried: %v", err)
		}
		f.Shutdown()
		f.Start(t.Context()) // after Shutdown: nothing
		if hasSynced(f, "reload") {
			t.Error("synced after Shutdown")
		}
	})
}
