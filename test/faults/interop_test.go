// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"context"
	"fmt"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
	"k8s.io/utils/ptr"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/pkg/election"
	"github.com/quartermaster-dev/quartermaster/test/internal/faultproxy"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// Long enough to keep a Lease on a busy machine, which the test asserts.
const interopLease, interopDeadline, interopRetry = 8 * time.Second, 5 * time.Second, 500 * time.Millisecond

// leaseName is the name of the Lease in the namespace of a test.
const leaseName = "contended"

// contender is an elector in this process that competes for a Lease until it is stopped.
type contender struct {
	identity string
	proxy    *faultproxy.Proxy
	stop     context.CancelFunc // stops it gracefully
	done     chan struct{}
}

// runClientGo starts client-go's elector, ours our own. Both reach the API server through a proxy.
func runClientGo(ctx context.Context, t *testing.T, namespace string) *contender {
	t.Helper()
	return startContender(ctx, t, "theirs", func(ctx context.Context, config *rest.Config, identity string) error {
		client, err := kubernetes.NewForConfig(config)
		if err != nil {
			return err
		}
		leaderelection.RunOrDie(ctx, leaderelection.LeaderElectionConfig{
			Lock: &resourcelock.LeaseLock{
				LeaseMeta:  metav1.ObjectMeta{Namespace: namespace, Name: leaseName},
				Client:     client.CoordinationV1(),
				LockConfig: resourcelock.ResourceLockConfig{Identity: identity},
			},
			LeaseDuration: interopLease, RenewDeadline: interopDeadline, RetryPeriod: interopRetry, ReleaseOnCancel: true,
			Callbacks: leaderelection.LeaderCallbacks{OnStartedLeading: func(context.Context) {}, OnStoppedLeading: func() {}},
		})
		return nil
	})
}

func runElector(ctx context.Context, t *testing.T, namespace string) *contender {
	t.Helper()
	return startContender(ctx, t, "ours", func(ctx context.Context, config *rest.Config, identity string) error {
		client, err := kubernetes.NewForConfig(election.ClientConfig(config))
		if err != nil {
			return err
		}
		cfg := election.NewConfig(types.NamespacedName{Namespace: namespace, Name: leaseName})
		cfg.LeaseDuration.Duration, cfg.RenewDeadline.Duration, cfg.RetryPeriod.Duration = interopLease, interopDeadline, interopRetry
		lock, err := election.NewLock(cfg, election.Candidate{Identity: identity, Client: client.CoordinationV1().Leases(namespace)})
		if err != nil {
			return err
		}
		return lock.Run(ctx, func(ctx context.Context) error {
			<-ctx.Done()
			return nil
		})
	})
}

func startContender(ctx context.Context, t *testing.T, name string, run func(context.Context, *rest.Config, string) error) *contender {
	t.Helper()
	token, err := shared.AdminToken(ctx)
	assert.NoError(t, err)
	proxy := shared.NewProxy(t)
	config := &rest.Config{Host: proxy.URL(), TLSClientConfig: rest.TLSClientConfig{CAData: proxy.CA()}, BearerToken: token}
	ctx, stop := context.WithCancel(ctx)
	c := &contender{identity: election.NewIdentity(name), proxy: proxy, stop: stop, done: make(chan struct{})}
	go func() {
		defer close(c.done)
		if err := run(ctx, config, c.identity); err != nil {
			t.Logf("%s: %v", c.identity, err)
		}
	}()
	t.Cleanup(func() {
		stop()
		<-c.done
	})
	return c
}

// TestElectorTakesTurnsWithClientGo hands one Lease back and forth between the two electors, by
// release and by expiry.
func TestElectorTakesTurnsWithClientGo(t *testing.T) {
	kinds := map[string]func(context.Context, *testing.T, string) *contender{"ours": runElector, "theirs": runClientGo}
	release := func(c *contender) { c.stop() }
	die := func(c *contender) { c.proxy.Partition(faultproxy.Hang) } // to the others it looks dead
	for name, tc := range map[string]struct {
		first, second string
		endTerm       func(*contender)
	}{
		"ours releases, theirs takes it": {"ours", "theirs", release},
		"theirs releases, ours takes it": {"theirs", "ours", release},
		"ours expires, theirs takes it":  {"ours", "theirs", die},
		"theirs expires, ours takes it":  {"theirs", "ours", die},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx := fleet.Context(t)
			namespace := shared.NewNamespace(ctx, t, nil)
			leases := shared.Admin.CoordinationV1().Leases(namespace)
			if _, err := leases.Create(ctx, &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: leaseName}}, metav1.CreateOptions{}); err != nil {
				t.Fatal(err)
			}
			lease := func() coordinationv1.LeaseSpec {
				t.Helper()
				l, err := leases.Get(ctx, leaseName, metav1.GetOptions{})
				assert.NoError(t, err)
				return l.Spec
			}
			first := kinds[tc.first](ctx, t, namespace)
			waitForHolder(ctx, t, lease, first)
			second := kinds[tc.second](ctx, t, namespace)
			// A standby does not disturb the holder: after three renewals it is the same, in the
			// same term.
			before := lease()
			fleet.Eventually(ctx, t, func() error {
				if renewed := lease().RenewTime.Sub(before.RenewTime.Time); renewed < 1400*time.Millisecond {
					return fmt.Errorf("renewed for %s", renewed)
				}
				return nil
			})
			now := lease()
			if *now.HolderIdentity != first.identity || *now.LeaseTransitions != *before.LeaseTransitions {
				t.Errorf("the Lease was held by %s in term %d, now by %s in term %d",
					first.identity, *before.LeaseTransitions, *now.HolderIdentity, *now.LeaseTransitions)
			}
			tc.endTerm(first)
			waitForHolder(ctx, t, lease, second)
			if after := lease(); *after.LeaseTransitions != *before.LeaseTransitions+1 {
				t.Errorf("leaseTransitions went from %d to %d", *before.LeaseTransitions, *after.LeaseTransitions)
			}
		})
	}
}

func waitForHolder(ctx context.Context, t *testing.T, lease func() coordinationv1.LeaseSpec, c *contender) {
	t.Helper()
	fleet.Eventually(ctx, t, func() error {
		if holder := ptr.Deref(lease().HolderIdentity, ""); holder != c.identity {
			return fmt.Errorf("the Lease is held by %q, not by %s", holder, c.identity)
		}
		return nil
	})
}
