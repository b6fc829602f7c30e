// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	clientscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	toolscache "k8s.io/client-go/tools/cache"
	"k8s.io/component-base/metrics"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/pkg/informers"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// cache is a ClusterCache with its metrics.
type cache struct {
	*informers.ClusterCache
	metrics metrics.KubeRegistry
}

// newCache returns a cache with the needs of a controller called test.
func newCache(t *testing.T, config *rest.Config, needs ...informers.Need) *cache {
	t.Helper()
	cfg := informers.CacheConfig{Scheme: clientscheme.Scheme}
	cfg.Declare("test", needs...)
	return newCacheWith(t, config, cfg)
}

func newCacheWith(t *testing.T, config *rest.Config, cfg informers.CacheConfig) *cache {
	t.Helper()
	c := &cache{metrics: metrics.NewKubeRegistry()}
	caches, err := informers.NewCaches(c.metrics)
	assert.NoError(t, err)
	c.ClusterCache, err = caches.AddCluster(cfg, config, func(string) {})
	assert.NoError(t, err)
	c.Start(t.Context())
	t.Cleanup(c.Shutdown)
	return c
}

// waitUntilHealthy waits until all informers of the controller have synced and none has a problem.
func (c *cache) waitUntilHealthy(ctx context.Context, t *testing.T, controller string) {
	t.Helper()
	fleet.Eventually(ctx, t, func() error { return c.Problem(controller) })
}

// waitForProblem waits for a problem that contains all parts.
func (c *cache) waitForProblem(ctx context.Context, t *testing.T, controller string, parts ...string) {
	t.Helper()
	fleet.Eventually(ctx, t, func() error {
		problem := fmt.Sprint(c.Problem(controller))
		for _, part := range parts {
			if !strings.Contains(problem, part) {
				return fmt.Errorf("the problem of %s is %q, without %q", controller, problem, part)
			}
		}
		return nil
	})
}

func (c *cache) resourceStatus(t *testing.T, resource string) informers.ResourceStatus {
	t.Helper()
	for _, r := range c.Status().Resources {
		if r.Resource == resource {
			return r
		}
	}
	t.Fatalf("no informer of %s", resource)
	return informers.ResourceStatus{}
}

// metric returns the value of a metric of the resource; 0 if there is none.
func (c *cache) metric(t *testing.T, name, resource string) float64 {
	t.Helper()
	families, err := c.metrics.Gather()
	assert.NoError(t, err)
	for _, family := range families {
		for _, m := range family.GetMetric() {
			for _, label := range m.GetLabel() {
				if family.GetName() == name && label.GetName() == "resource" && label.GetValue() == resource {
					return m.GetCounter().GetValue() + m.GetGauge().GetValue()
				}
			}
		}
	}
	return 0
}

// checkObjects returns an error unless the cache of the resource has exactly the given objects, each as
// "NAMESPACE/NAME VERSION".
func (c *cache) checkObjects(gvr schema.GroupVersionResource, want []string) error {
	var got []string
	for _, obj := range informers.For[metav1.Object](c.ForController("test"), gvr).List("", nil) {
		got = append(got, describe(obj))
	}
	slices.Sort(got)
	slices.Sort(want)
	if diff := cmp.Diff(want, got); diff != "" {
		return fmt.Errorf("cached %s (-want +got):\n%s", gvr.Resource, diff)
	}
	return nil
}

func describe(obj metav1.Object) string {
	return obj.GetNamespace() + "/" + obj.GetName() + " " + obj.GetResourceVersion()
}

// sourceNeeds returns needs of ConfigMaps, Secrets and Deployments.
func sourceNeeds() []informers.Need {
	return []informers.Need{
		{Resource: informers.Secrets, FieldSelector: informers.NotHelm, Digest: informers.DigestOf(digest)},
		{Resource: informers.ConfigMaps, Digest: informers.DigestOf(digest)},
		{Resource: informers.Deployments, Form: informers.Typed},
	}
}

func digest(obj runtime.Object) []byte {
	h := sha256.New()
	switch o := obj.(type) {
	case *corev1.Secret:
		for _, key := range slices.Sorted(maps.Keys(o.Data)) {
			_, _ = fmt.Fprintf(h, "%q %q ", key, o.Data[key])
		}
	case *corev1.ConfigMap:
		for _, key := range slices.Sorted(maps.Keys(o.Data)) {
			_, _ = io.WriteString(h, key+" "+o.Data[key]+" ")
		}
	}
	return h.Sum(nil)
}

// checkCurrent returns an error unless the cache of sourceNeeds equals the server's objects.
func (c *cache) checkCurrent(ctx context.Context) error {
	secrets, err := shared.Admin.CoreV1().Secrets("").List(ctx, metav1.ListOptions{FieldSelector: informers.NotHelm})
	if err != nil {
		return err
	}
	cached := informers.For[*informers.Object](c.ForController("test"), informers.Secrets)
	var want []string
	for i := range secrets.Items {
		s := &secrets.Items[i]
		want = append(want, describe(s))
		if o, ok := cached.Get(toolscache.MetaObjectToName(s)); ok && string(o.Digest("test")) != string(digest(s)) {
			return fmt.Errorf("the digest of Secret %s/%s is that of other content", s.Namespace, s.Name)
		}
	}
	if err := c.checkObjects(informers.Secrets, want); err != nil {
		return err
	}
	configMaps, err := shared.Admin.CoreV1().ConfigMaps("").List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	want = nil
	for i := range configMaps.Items {
		want = append(want, describe(&configMaps.Items[i]))
	}
	if err := c.checkObjects(informers.ConfigMaps, want); err != nil {
		return err
	}
	deployments, err := shared.Admin.AppsV1().Deployments("").List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	want = nil
	for i := range deployments.Items {
		want = append(want, describe(&deployments.Items[i]))
	}
	return c.checkObjects(informers.Deployments, want)
}
