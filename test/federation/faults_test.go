// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package federation

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/test/internal/faultproxy"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// campaign is a federation with two managers under load, into which faults are injected.
type campaign struct {
	*load
	rand     *rand.Rand
	replicas [2]*cluster.Replica
	managers [2]*cluster.Manager
	lives    int
	record   *record
}

func newCampaign(t *testing.T) *campaign {
	t.Helper()
	seed := uint64(fleet.Setting(t, "SEED", 1))
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("SEED=%d", seed)
	m := newMembers(t, time.Hour, cluster.Options{WithoutControllerManager: true})
	m.useProxy()
	// Removals and the health of members must not take longer than a fault.
	m.configure(`{"controllerDuration":{"availableDelay":"1s"},"clusterHealthCheck":{"period":"1s","timeout":"1s","failureThreshold":2}}`)
	c := &campaign{load: m.newLoad(40), rand: rand.New(rand.NewPCG(seed, 0)), record: m.newRecord()}
	t.Cleanup(func() {
		for _, m := range c.managers {
			shared.FreeLease(t, m)
		}
	})
	for i := range c.replicas {
		c.replicas[i] = shared.NewReplica(m.ctx, t)
		c.startReplica(i)
	}
	c.settle()
	return c
}

// startReplica begins a life of a replica, with additional arguments.
func (c *campaign) startReplica(i int, more ...string) {
	c.Helper()
	c.lives++
	var err error
	c.managers[i], err = shared.StartLife(c.replicas[i], c.lives, cluster.ManagerOptions{Args: slices.Concat([]string{"--controllers=federation",
		"--federation-unsafe-endpoints", "--federation-removal-guard=100"}, fleet.ShortTimings, more)})
	assert.NoError(c, err)
	fleet.StopAtEnd(c.T, c.managers[i])
}

// awaitLeader waits until a replica other than the given one leads.
func (c *campaign) awaitLeader(except int) (leader int) {
	c.Helper()
	fleet.Eventually(fleet.Within(c.ctx, c.T, fleet.Patience), c.T, func() error {
		holder := shared.HolderPod(c.ctx, c.T)
		leader = slices.IndexFunc(c.replicas[:], func(r *cluster.Replica) bool { return r.Pod == holder })
		if leader < 0 || leader == except {
			return fmt.Errorf("the Lease is held by %q", holder)
		}
		return nil
	})
	return leader
}

// applyRule adds a rule to the member's proxy for a while.
func (c *campaign) applyRule(rule faultproxy.Rule) {
	active := c.proxy.Add(rule)
	fleet.Wait(c.ctx, 3*time.Second)
	active.Remove()
}

const stoppedLeader = "the leader is stopped until another leads"

// faults happen to the leader, or to the member c2. A fault has ended when its function returns.
var faults = map[string]func(*campaign){
	stoppedLeader: func(c *campaign) {
		i := c.awaitLeader(-1)
		assert.NoError(c, c.managers[i].Signal(syscall.SIGSTOP))
		c.awaitLeader(i)
		fleet.Wait(c.ctx, 2*time.Second) // it writes
		assert.NoError(c, c.managers[i].Signal(syscall.SIGCONT))
		if err := c.managers[i].Wait(c.ctx); c.managers[i].ExitCode() != 1 {
			c.Errorf("the former leader ended with %d (%v), want 1", c.managers[i].ExitCode(), err)
		}
		c.startReplica(i)
	},
	"the leader is killed": func(c *campaign) {
		i := c.awaitLeader(-1)
		c.managers[i].Kill()
		c.awaitLeader(i)
		c.startReplica(i)
	},
	"the member is behind a black hole": func(c *campaign) {
		c.proxy.Partition(faultproxy.Hang)
		fleet.Wait(c.ctx, time.Duration(1+c.rand.IntN(12))*time.Second)
		c.proxy.Heal()
	},
	"connections to the member, and watches, are reset": func(c *campaign) {
		c.proxy.Partition(faultproxy.Reset)
		fleet.Wait(c.ctx, time.Duration(c.rand.IntN(4))*time.Second)
		c.proxy.Heal()
	},
	"the member answers 429": func(c *campaign) {
		c.applyRule(faultproxy.Rule{Status: http.StatusTooManyRequests, RetryAfter: time.Second})
	},
	"the member answers 500":     func(c *campaign) { c.applyRule(faultproxy.Rule{Status: http.StatusInternalServerError}) },
	"the member is slow":         func(c *campaign) { c.applyRule(faultproxy.Rule{Delay: time.Second}) },
	"answers to writes are lost": func(c *campaign) { c.applyRule(faultproxy.Rule{Match: isMemberWrite, DropResponse: true}) },
	"the member's API server is stopped": func(c *campaign) {
		assert.NoError(c, c.second.SignalAPIServer(syscall.SIGSTOP))
		fleet.Wait(c.ctx, 5*time.Second)
		assert.NoError(c, c.second.SignalAPIServer(syscall.SIGCONT))
	},
	"the member's API server is killed": func(c *campaign) {
		c.second.KillAPIServer()
		assert.NoError(c, c.second.StartAPIServer(c.ctx))
	},
	"the token is revoked": func(c *campaign) {
		secrets := shared.Admin.CoreV1().Secrets(namespace)
		secret, err := secrets.Get(c.ctx, "c2", metav1.GetOptions{})
		assert.NoError(c, err)
		for _, token := range []string{"revoked", string(secret.Data["token"])} {
			if _, err := secrets.Patch(c.ctx, "c2", types.MergePatchType, fmt.Appendf(nil, `{"stringData":{"token":%q}}`, token), metav1.PatchOptions{}); err != nil {
				c.Fatal(err)
			}
			fleet.Wait(c.ctx, 3*time.Second)
		}
	},
}

func isMemberWrite(r *http.Request) bool { return r.Method != http.MethodGet }

// injectFault injects a fault under load. Then all members must have what the host wants, and nothing that
// happened so far may be wrong.
func (c *campaign) injectFault(name string) {
	c.Helper()
	begin := time.Now()
	for i, m := range c.managers {
		if m.ExitCode() >= 0 {
			c.startReplica(i) // a busy machine can end a term, and a kubelet would start the manager again
		}
	}
	ctx, stop := context.WithCancel(c.ctx)
	done := make(chan error)
	go func() { done <- c.run(ctx) }()
	fleet.Wait(c.ctx, time.Second)
	faults[name](c)
	fleet.Wait(c.ctx, time.Second)
	stop()
	if err := <-done; err != nil {
		c.Fatalf("%s: the load ended: %v", name, err)
	}
	ended := time.Now()
	err := c.waitUntilSettled()
	got := c.record.read().Judge()
	c.Logf("%s: %s, settled after %s; %d writes and of these %d deletions so far", name, ended.Sub(begin).Round(time.Second), time.Since(ended).Round(time.Second), got.Writes, got.Deletions)
	if wrong := got.Findings(); len(wrong) > 0 {
		c.Fatalf("%d deletions of what the host wanted, %d writes after the term, %d writes of an older state:\n%s", len(got.Wrong), len(got.Late), len(got.Older), strings.Join(wrong, "\n"))
	}
	assert.NoError(c, err)
}

// TestLongFaults injects faults in a random order. FAULTS says how many, and SEED how they are chosen; 0 is
// another seed in each run.
func TestLongFaults(t *testing.T) {
	c := newCampaign(t)
	names := slices.Sorted(maps.Keys(faults))
	for i := range fleet.Setting(t, "FAULTS", len(names)) {
		if i%len(names) == 0 {
			c.rand.Shuffle(len(names), func(i, j int) { names[i], names[j] = names[j], names[i] })
		}
		c.injectFault(names[i%len(names)])
	}
	if got := c.record.read().Judge(); got.Deletions == 0 {
		t.Error("nothing was deleted: the load is too weak")
	}
}

// TestLongStoppedLeaders stops the leader again and again until another leads.
func TestLongStoppedLeaders(t *testing.T) {
	c := newCampaign(t)
	for range fleet.Setting(t, "FAULTS", 20) {
		c.injectFault(stoppedLeader)
	}
}
