// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"context"
	"fmt"
	"net/http"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/test/internal/faultproxy"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// proxiedConfig returns the configuration of a new replica that goes through the proxy.
func proxiedConfig(ctx context.Context, t *testing.T, proxy *faultproxy.Proxy) *rest.Config {
	t.Helper()
	config := shared.NewReplica(ctx, t).Config()
	config.Host, config.CAData = proxy.URL(), proxy.CA()
	return config
}

// changeSample adds, changes and removes a Secret, and changes a ConfigMap.
func changeSample(ctx context.Context, t *testing.T, s fleet.Sample) {
	t.Helper()
	s.CreateSecret(ctx, t, "added", "", "1")
	s.SetSecret(ctx, t, "second")
	assert.NoError(t, shared.Admin.CoreV1().Secrets(s.Namespace).Delete(ctx, "removed", metav1.DeleteOptions{}))
	s.Paint(ctx, t, "red")
}

// newChangeableSample returns a sample for changeSample.
func newChangeableSample(ctx context.Context, t *testing.T) fleet.Sample {
	t.Helper()
	s := shared.NewSample(ctx, t)
	s.CreateSecret(ctx, t, "removed", "", "1")
	return s
}

// isResumed reports whether a request is a watch that continues another one.
func isResumed(r *http.Request) bool {
	q := r.URL.Query()
	return q.Get("watch") == "true" && q.Get("resourceVersion") != ""
}

// resetConnections ends all connections. New ones are accepted.
func resetConnections(proxy *faultproxy.Proxy) {
	proxy.Partition(faultproxy.Reset)
	proxy.Heal()
}

// outagePatience is enough for an outage that is reported after a minute, or shows in two, and for the
// back-off after it.
const outagePatience = 10 * time.Minute

// TestLongCacheIsCurrentAfterAnOutage checks that the cache shows the outage, and equals the server after it.
func TestLongCacheIsCurrentAfterAnOutage(t *testing.T) {
	t.Parallel()
	refuseReads := func(status int, retryAfter time.Duration) func(*testing.T, *faultproxy.Proxy) func() {
		return func(_ *testing.T, proxy *faultproxy.Proxy) func() {
			rule := proxy.Add(faultproxy.Rule{Match: faultproxy.Path(http.MethodGet, "/"), Status: status, RetryAfter: retryAfter})
			resetConnections(proxy)
			return rule.Remove
		}
	}
	waitForFailure := func(verb, text string) func(context.Context, *testing.T, *cache) {
		return func(ctx context.Context, t *testing.T, c *cache) {
			t.Helper()
			for _, resource := range []string{"secrets", "configmaps", "deployments.apps"} {
				c.waitForProblem(ctx, t, "test", "cannot "+verb+" "+resource, text)
			}
			if n := c.metric(t, "quartermaster_informer_failures_total", "secrets"); n == 0 {
				t.Error("quartermaster_informer_failures_total is 0")
			}
		}
	}
	for name, tc := range map[string]struct {
		// begin starts the outage and returns a function that ends it.
		begin func(*testing.T, *faultproxy.Proxy) (heal func())
		// waitForOutage waits until the outage is visible.
		waitForOutage func(context.Context, *testing.T, *cache)
		relists       bool // all objects must be read again
	}{
		"connections are closed, and none is accepted for a while": {
			begin: func(_ *testing.T, proxy *faultproxy.Proxy) func() {
				proxy.Partition(faultproxy.Reset)
				return proxy.Heal
			},
			waitForOutage: waitForFailure("watch", "no usable answer"),
		},
		"nothing arrives, no bookmark either": {
			begin: func(_ *testing.T, proxy *faultproxy.Proxy) func() {
				proxy.Partition(faultproxy.Hang)
				return proxy.Heal
			},
			waitForOutage: func(ctx context.Context, t *testing.T, c *cache) {
				t.Helper()
				fleet.Eventually(ctx, t, func() error {
					s := c.resourceStatus(t, "secrets")
					metric := c.metric(t, "quartermaster_informer_last_activity_age_seconds", "secrets")
					if s.LastActivityAge.Duration < 2*time.Minute || metric < 120 {
						return fmt.Errorf("the last activity was %s ago, by the metric %v s", s.LastActivityAge, metric)
					}
					return nil
				})
			},
		},
		"the server returns 429": {begin: refuseReads(http.StatusTooManyRequests, time.Second), waitForOutage: waitForFailure("list", "TooManyRequests")},
		"the server returns 500": {begin: refuseReads(http.StatusInternalServerError, 0), waitForOutage: waitForFailure("watch", "InternalError")},
		"the version has expired, as when bookmarks are lost": {
			begin: func(_ *testing.T, proxy *faultproxy.Proxy) func() {
				rule := proxy.Add(faultproxy.Rule{Match: isResumed, Status: http.StatusGone})
				resetConnections(proxy)
				return rule.Remove
			},
			waitForOutage: func(ctx context.Context, t *testing.T, c *cache) {
				t.Helper()
				fleet.Eventually(ctx, t, func() error {
					if n := c.metric(t, "quartermaster_informer_relists_total", "secrets"); n == 0 {
						return fmt.Errorf("no relists")
					}
					return nil
				})
				if f := c.resourceStatus(t, "secrets").LastFailure; f == nil || f.Verb != "watch" {
					t.Errorf("the last failure is %v", f)
				}
			},
			relists: true,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx := fleet.Within(t.Context(), t, outagePatience)
			s := newChangeableSample(ctx, t)
			proxy := shared.NewProxy(t)
			c := newCache(t, proxiedConfig(ctx, t, proxy), sourceNeeds()...)
			c.waitUntilHealthy(ctx, t, "test")
			fleet.Eventually(ctx, t, func() error { return c.checkCurrent(ctx) })

			heal := tc.begin(t, proxy)
			changeSample(ctx, t, s)
			tc.waitForOutage(ctx, t, c)
			if err := c.CheckSync(nil); err != nil {
				t.Errorf("a replica that had synced becomes unready: %v", err)
			}
			heal()
			fleet.Eventually(ctx, t, func() error { return c.checkCurrent(ctx) })
			c.waitUntilHealthy(ctx, t, "test")
			if n := c.resourceStatus(t, "secrets").Relists; tc.relists && n == 0 {
				t.Error("no relist")
			}
		})
	}
}

func TestCacheIsCurrentAfterTheServerRestarts(t *testing.T) {
	ctx := fleet.Within(t.Context(), t, outagePatience)
	s := newChangeableSample(ctx, t)
	proxy := shared.NewProxy(t)
	direct := newCache(t, shared.NewReplica(ctx, t).Config(), sourceNeeds()...)
	// This one returns when the server has forgotten what happened after its last version.
	partitioned := newCache(t, proxiedConfig(ctx, t, proxy), sourceNeeds()...)
	for _, c := range []*cache{direct, partitioned} {
		c.waitUntilHealthy(ctx, t, "test")
		fleet.Eventually(ctx, t, func() error { return c.checkCurrent(ctx) })
	}
	proxy.Partition(faultproxy.Reset)
	changeSample(ctx, t, s)
	t.Cleanup(func() { // for the other tests, if this one fails
		if err := shared.StartAPIServer(context.Background()); err != nil {
			t.Error(err)
		}
	})
	shared.KillAPIServer()
	assert.NoError(t, shared.StartAPIServer(ctx))
	s.CreateSecret(ctx, t, "added-later", "", "1")
	proxy.Heal()
	for _, c := range []*cache{direct, partitioned} {
		fleet.Eventually(ctx, t, func() error { return c.checkCurrent(ctx) })
		c.waitUntilHealthy(ctx, t, "test")
	}
	if n := partitioned.resourceStatus(t, "secrets").Relists; n == 0 {
		t.Error("no relist: the version had not expired")
	}
}

// TestCacheIsCurrentWithoutBookmarks checks that the cache equals the server, although all bookmarks but
// those that end lists are lost.
func TestCacheIsCurrentWithoutBookmarks(t *testing.T) {
	t.Parallel()
	ctx := fleet.Context(t)
	s := newChangeableSample(ctx, t)
	proxy := shared.NewProxy(t)
	// A streamed list ends with a bookmark.
	watches := func(r *http.Request) bool {
		return r.URL.Query().Get("watch") == "true" && r.URL.Query().Get("sendInitialEvents") != "true"
	}
	proxy.Add(faultproxy.Rule{Match: watches, DropBookmarks: true})
	c := newCache(t, proxiedConfig(ctx, t, proxy), sourceNeeds()...)
	c.waitUntilHealthy(ctx, t, "test")
	fleet.Eventually(ctx, t, func() error { return c.checkCurrent(ctx) })
	changeSample(ctx, t, s)
	fleet.Eventually(ctx, t, func() error { return c.checkCurrent(ctx) })
	resetConnections(proxy)
	s.CreateSecret(ctx, t, "added-later", "", "1")
	fleet.Eventually(ctx, t, func() error { return c.checkCurrent(ctx) })
	if n := c.resourceStatus(t, "secrets").Lists; n == 0 {
		t.Error("no list")
	}
}
