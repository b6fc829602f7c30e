// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package servers

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"strings"
	"syscall"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/pkg/election/apifence"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
	"github.com/quartermaster-dev/quartermaster/test/internal/holdproxy"
)

var flagCount = flag.Bool("count", false, "report writes of former leaders without failing")

// outage is how long a leader is paused or partitioned: shorter than its own renew deadline of 10 s.
const outage = 7 * time.Second

// fault is what happens to the leader. Its API server has begun to lag when inject is called, and
// catches up a lag after inject returns. If reportedDead is set, standbys take it for ended at
// once, though it goes on afterwards.
type fault struct {
	name         string
	reportedDead bool
	inject       func(ctx context.Context, c *managers) error
}

var faults = []fault{
	{"crash", false, func(_ context.Context, c *managers) error { c.leader.Kill(); return nil }},
	{"pause", true, func(ctx context.Context, c *managers) error {
		if err := c.leader.Signal(syscall.SIGSTOP); err != nil {
			return err
		}
		c.proxy.CloseCleanly()
		fleet.Wait(ctx, outage)
		return c.leader.Signal(syscall.SIGCONT)
	}},
	{"partition with its API server", true, func(ctx context.Context, c *managers) error {
		etcdProxy.Hold(holdproxy.Everything)
		defer etcdProxy.Release(holdproxy.Everything)
		c.proxy.CloseCleanly()
		fleet.Wait(ctx, outage)
		return nil
	}},
	{"handover", false, func(_ context.Context, c *managers) error { return c.leader.Signal(syscall.SIGTERM) }},
}

var lags = []time.Duration{300 * time.Millisecond, 3 * time.Second, 30 * time.Second}

// TestLongLaggingServerKeepsTheFence plays each case ROUNDS times.
func TestLongLaggingServerKeepsTheFence(t *testing.T) {
	rounds := fleet.Setting(t, "ROUNDS", 10)
	for _, f := range faults {
		for _, lag := range lags {
			t.Run(fmt.Sprintf("%s, lag %v", f.name, lag), func(t *testing.T) {
				for i := range rounds {
					t.Run(fmt.Sprint("round ", i+1), func(t *testing.T) { playCase(t, f, lag) })
				}
			})
		}
	}
}

// playCase lets one fault happen to a leader whose API server lags.
func playCase(t *testing.T, f fault, lag time.Duration) {
	t.Helper()
	ctx := fleet.Within(t.Context(), t, 2*time.Minute+lag)
	waitForFence(ctx, t)
	w := shared.NewWorkloads(ctx, t, 12)
	history := shared.NewRecorder(t.Context(), t, w)
	c := newManagers(ctx, t, f.reportedDead)
	fleet.Eventually(ctx, t, func() error { return w.Settled(ctx) })
	stop := w.Stream(ctx, 30*time.Millisecond)
	defer stop()

	lagging := []string{"namespaces", "leases"}
	etcdProxy.Hold(lagging...)
	defer etcdProxy.Release(lagging...)
	begin := time.Now()
	assert.NoError(t, f.inject(ctx, c))
	fleet.Wait(ctx, lag)
	etcdProxy.Release(lagging...)
	released := time.Now()

	fleet.Eventually(ctx, t, func() error {
		got, err := history.Judge()
		if err == nil && !got.Last.Done.After(released) {
			err = errors.New("nobody writes")
		}
		return err
	})
	fleet.Wait(ctx, time.Second) // in which any other may write as well
	stop()
	fleet.Eventually(ctx, t, func() error { return w.Settled(ctx) })
	got, err := history.Judge()
	assert.NoError(t, err)
	former := got.Former()
	t.Logf("%s, lag %v: %d writes, %d of former leaders after a successor's, %d refused; %s",
		f.name, lag, got.Writes, len(former), history.Refused(), c.succession(got, begin))
	for i, finding := range former {
		if !*flagCount {
			t.Error(finding)
		} else if i == 0 || i == len(former)-1 {
			t.Log(finding)
		}
	}
}

// waitForFence waits until both API servers enforce the fence: until they answer the probe, which a
// token that is bound to no Pod may send too.
func waitForFence(ctx context.Context, t *testing.T) {
	t.Helper()
	token, err := shared.TokenOf(ctx, metav1.NamespaceSystem, "quartermaster")
	assert.NoError(t, err)
	name := apifence.NamespaceFor(types.NamespacedName{Namespace: metav1.NamespaceSystem, Name: fleet.LeaseName})
	for _, config := range []*rest.Config{shared.AdminConfig(), shared.SecondConfig()} {
		config = rest.AnonymousClientConfig(config)
		config.BearerToken = token
		client, err := kubernetes.NewForConfig(config)
		assert.NoError(t, err)
		fleet.Eventually(ctx, t, func() error {
			_, err := client.CoreV1().Namespaces().Patch(ctx, name, types.MergePatchType, []byte("{}"), metav1.PatchOptions{DryRun: []string{metav1.DryRunAll}})
			if err == nil || !strings.Contains(err.Error(), apifence.PolicyName) {
				return errors.Join(fmt.Errorf("%s does not enforce the fence", config.Host), err)
			}
			return nil
		})
	}
}
