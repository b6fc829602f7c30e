// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package election

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr/funcr"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/component-base/metrics"
	"k8s.io/klog/v2"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/pkg/election/display"
	"github.com/quartermaster-dev/quartermaster/pkg/election/protocol"
)

func (c *storeClient) total() int {
	return c.count("get") + c.count("create") + c.count("update") + c.count("watch")
}

// TestLastingRefusalsAreProblems runs a standby that is refused for an hour after its leader has gone.
func TestLastingRefusalsAreProblems(t *testing.T) {
	status := func(err *apierrors.StatusError) error { return err }
	tooMany := status(apierrors.NewTooManyRequests("too many", 1))
	forbidden := status(apierrors.NewForbidden(leaseResource, "lease", errors.New("no")))
	tests := map[string]struct {
		verbs   []string
		err     error
		deleted bool
		problem string
	}{
		"429 to writes":     {[]string{"update"}, tooMany, false, ""},
		"429 to everything": {[]string{"get", "update", "watch"}, tooMany, false, ""},
		"403 to writes":     {[]string{"update"}, forbidden, false, "refuses to update Lease ns/lease"},
		"403 to everything": {[]string{"get", "update", "watch"}, forbidden, false, "refuses to get Lease ns/lease"},
		"403 to a create":   {[]string{"create"}, forbidden, true, "refuses to create Lease ns/lease"},
		"422 to writes":     {[]string{"update"}, status(apierrors.NewInvalid(coordinationv1.SchemeGroupVersion.WithKind("Lease").GroupKind(), "lease", nil)), false, "refuses to update Lease ns/lease"},
		"no namespace":      {[]string{"create"}, status(apierrors.NewNotFound(corev1.Resource("namespaces"), "ns")), true, `namespaces "ns" not found`},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				store := freeStore()
				store.edit("gone", func(l *coordinationv1.Lease) { *l = *protocol.AcquiredLease(l, "gone", 15*time.Second, time.Now()) })
				if tc.deleted {
					store.delete("admin")
				}
				registry, logged := metrics.NewKubeRegistry(), 0
				client := newStoreClient(store, "r")
				lock := assert.Must(NewLock(testConfig(), Candidate{Identity: "r", Client: client, Clock: newBubbleClock(), Metrics: assert.Must(display.NewMetrics(registry))}))
				logger := funcr.New(func(_, args string) {
					if strings.Contains(args, "refuses a request for the Lease") {
						logged++
					}
				}, funcr.Options{})
				ctx, stop := context.WithCancel(klog.NewContext(t.Context(), logger))
				done := make(chan error, 1)
				refuse := func() {
					client.set(func(c *storeClient) {
						for _, verb := range tc.verbs {
							c.fail[verb] = tc.err
						}
					})
				}
				if tc.verbs[0] != "get" {
					refuse()
				}
				go func() {
					done <- lock.Run(ctx, func(ctx context.Context) error { <-ctx.Done(); return nil })
				}()
				pass(10 * time.Second)
				refuse()
				for minute := range 60 {
					before := client.total()
					pass(time.Minute)
					if n := client.total() - before; n > 6 && minute > 0 || n > 10 {
						t.Errorf("%d requests in minute %d", n, minute)
					}
				}
				if err := lock.Problem(); (err == nil) != (tc.problem == "") || err != nil && !strings.Contains(err.Error(), tc.problem) {
					t.Errorf("the problem is %v, want %q", err, tc.problem)
				}
				if logged == 0 || logged > 100*len(tc.verbs) {
					t.Errorf("logged %d times in an hour", logged)
				}
				client.set(func(c *storeClient) { clear(c.fail) })
				pass(4 * time.Minute)
				if !lock.IsLeading() || lock.Problem() != nil {
					t.Errorf("when it is repaired, it leads %t, problem %v", lock.IsLeading(), lock.Problem())
				}
				stop()
				if err := <-done; err != nil {
					t.Error(err)
				}
				store.background.Wait()
			})
		})
	}
}

// TestLeaseCreatedByOthersIsTaken deletes and applies the manifests again, the role after the Lease.
func TestLeaseCreatedByOthersIsTaken(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := freeStore()
		store.delete("admin")
		client := newStoreClient(store, "r")
		client.set(func(c *storeClient) {
			c.fail["create"] = apierrors.NewForbidden(leaseResource, "lease", errors.New("no"))
		})
		lock := assert.Must(NewLock(testConfig(), Candidate{Identity: "r", Client: client, Clock: newBubbleClock()}))
		ctx, stop := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- lock.Run(ctx, func(ctx context.Context) error { <-ctx.Done(); return nil }) }()
		pass(10 * time.Second)
		if lock.Problem() == nil {
			t.Error("no problem while the Lease does not exist and may not be created")
		}
		_, _ = store.create("admin", &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "lease"}})
		pass(40 * time.Second)
		if !lock.IsLeading() || lock.Problem() != nil {
			t.Errorf("when the Lease exists, it leads %t, problem %v", lock.IsLeading(), lock.Problem())
		}
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
		store.background.Wait()
	})
}
