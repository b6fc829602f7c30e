// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package reload

import (
	"encoding/hex"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/configreload/policy"
	"github.com/quartermaster-dev/quartermaster/test/internal/faultproxy"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// burst is a number of ConfigMaps cfg-0, cfg-1, ..., each of which rolls one of the Deployments
// app-0, app-1, ... Every other one is marked by annotation, which contains the time, so that a
// repetition is a rollout even with the same hash.
type burst struct {
	testNamespace
	size int
}

const (
	burstSize   = 30
	roundPeriod = 300 * time.Millisecond
)

func newBurst(t *testing.T, size int) burst {
	t.Helper()
	b := burst{newTestNamespace(t, nil), size}
	for i := range b.size {
		b.configMap(b.source(i), "round 0")
		annotations := annotated(auto, "true")
		if i%2 == 1 {
			annotations = annotated(fleet.ReloadAnnotation, "auto")
		}
		b.create(newDeployment(fmt.Sprintf("app-%d", i), annotations, uses("configmap/"+b.source(i))))
	}
	return b
}

func (b burst) source(i int) string { return fmt.Sprintf("cfg-%d", i) }
func (b burst) object(i int) string { return fmt.Sprintf("deployments/app-%d", i) }

// content returns the content of a round.
func content(round int) string { return fmt.Sprintf("round %d", round) }

// hashOf returns the hash of a ConfigMap with the content.
func hashOf(content string) string {
	return hex.EncodeToString(policy.DigestConfigMap(newConfigMap("", content)))
}

// changeAll gives all ConfigMaps the content of the round.
func (b burst) changeAll(round int) {
	b.t.Helper()
	for i := range b.size {
		b.changeOne(i, round)
	}
}

func (b burst) changeOne(i, round int) {
	b.t.Helper()
	b.patch("configmaps/"+b.source(i), fmt.Sprintf(`{"data":{"content":%q}}`, content(round)))
}

// waitForRound waits until the last rollout of each Deployment is for that round.
func (b burst) waitForRound(round int) {
	b.t.Helper()
	b.eventually(func() error {
		var errs []error
		for i := range b.size {
			if got := hashesOf(marks(b.template(b.object(i)))); !slices.Equal(got, []string{hashOf(content(round))}) {
				errs = append(errs, fmt.Errorf("%s is marked with %v", b.object(i), got))
			}
		}
		return errors.Join(errs...)
	})
}

// startChanging changes all ConfigMaps again and again until the returned function is called, which changes
// them once more and returns how often they were changed.
func (b burst) startChanging() (end func() (rounds int)) {
	b.t.Helper()
	done := make(chan struct{})
	rounds := 0
	var running sync.WaitGroup
	running.Go(func() {
		tick := time.NewTicker(roundPeriod)
		defer tick.Stop()
		for last := false; !last; {
			select {
			case <-done:
				last = true
			case <-tick.C:
			}
			rounds++
			b.changeAll(rounds)
		}
	})
	return func() int {
		close(done)
		running.Wait()
		return rounds
	}
}

// checkRolled returns nil once at least n Deployments have been rolled.
func (b burst) checkRolled(n int) error {
	got := 0
	for i := range b.size {
		if len(rollouts.Find(objectName("deployments", b.namespace, fmt.Sprintf("app-%d", i)))) > 0 {
			got++
		}
	}
	if got < n {
		return fmt.Errorf("%d Deployments rolled, want %d", got, n)
	}
	return nil
}

func hashesOf(marks map[string]string) []string {
	var list []string
	for _, hash := range marks {
		list = append(list, hash)
	}
	return list
}

// roundOf returns the round for which a Deployment with these marks has been rolled, or -1.
func roundOf(hashes []string, rounds int) int {
	for round := range rounds + 1 {
		if slices.Equal(hashes, []string{hashOf(content(round))}) {
			return round
		}
	}
	return -1
}

// judgeRounds checks that the rollouts of each Deployment are for increasing rounds, none twice, and the
// last for the last round. It returns the number of rollouts for each manager's
// Pod; those that only a watch has shown are under the empty name.
func (b burst) judgeRounds(rounds int) map[string]int {
	b.t.Helper()
	rolloutsByPod := map[string]int{}
	for i := range b.size {
		last := 0
		for _, v := range b.rollouts(b.object(i)) {
			rolloutsByPod[v.Writer]++
			hashes := hashesOf(marks(v.PodTemplateSpec))
			round := roundOf(hashes, rounds)
			if round <= last {
				b.t.Errorf("%s was rolled at revision %d by %s for round %d (%v), after round %d", b.object(i), v.Revision, v.Writer, round, hashes, last)
			}
			last = round
		}
		if last != rounds {
			b.t.Errorf("the last rollout of %s was for round %d, not %d: a change is lost", b.object(i), last, rounds)
		}
	}
	return rolloutsByPod
}

// TestHandoverInABurstRepeatsNothing checks that nothing is lost and nothing rolled twice.
func TestHandoverInABurstRepeatsNothing(t *testing.T) {
	for name, tc := range map[string]struct {
		signal syscall.Signal
		args   []string
	}{
		"when the leader is told to stop": {syscall.SIGTERM, nil},
		"when the leader is killed":       {syscall.SIGKILL, fleet.ShortTimings},
	} {
		t.Run(name, func(t *testing.T) {
			ctx := fleet.Context(t)
			begin := time.Now()
			b := newBurst(t, burstSize)
			old := shared.RunLeader(ctx, t, immediateArgs(tc.args...)...)
			next := shared.RunStandby(ctx, t, immediateArgs(tc.args...)...)
			for i := range b.size {
				b.waitForState(b.object(i), "configmap/"+b.source(i))
			}

			end := sync.OnceValue(b.startChanging())
			defer end()
			b.eventually(func() error { return b.checkRolled(b.size / 3) })
			assert.NoError(t, old.Signal(tc.signal))
			shared.WaitForLeader(ctx, t, next)
			rounds := end()
			b.waitForRound(rounds)
			readAuditLog(t, begin)
			rolloutsByPod := b.judgeRounds(rounds)
			if rolloutsByPod[old.Pod] == 0 || rolloutsByPod[next.Pod] == 0 {
				t.Errorf("rollouts by Pod: %v, want some by %s and some by %s", rolloutsByPod, old.Pod, next.Pod)
			}
			t.Logf("rollouts by Pod: %v", rolloutsByPod)
		})
	}
}

// Each ConfigMap changes once, and each new Deployment is created once, one after the other while the
// leadership is handed on: no later event repairs what a new leader misses as it begins.
func TestLongHandoverMissesNothing(t *testing.T) {
	const handovers, each = 3, 60
	ctx := fleet.Context(t)
	begin := time.Now()
	b := newBurst(t, handovers*each)
	managers := []*cluster.Manager{shared.RunLeader(ctx, t, immediateArgs()...)}
	for i := range b.size {
		b.waitForState(b.object(i), "configmap/"+b.source(i))
	}
	for n := range handovers {
		old := managers[n]
		next := shared.RunStandby(ctx, t, immediateArgs()...)
		for i := n * each; i < (n+1)*each; i++ {
			if i == n*each+each/4 {
				assert.NoError(t, old.Signal(syscall.SIGTERM))
			}
			b.changeOne(i, 1)
			b.create(newDeployment(fmt.Sprintf("new-%d", i), annotated(fleet.ReloadAnnotation, "auto"), uses("configmap/"+b.source(i))))
		}
		shared.WaitForLeader(ctx, t, next)
		managers = append(managers, next)
	}
	b.waitForRound(1)
	for i := range b.size {
		b.waitForState(fmt.Sprintf("deployments/new-%d", i), "configmap/"+b.source(i))
	}
	readAuditLog(t, begin)
	rolloutsByPod := b.judgeRounds(1)
	for _, m := range managers {
		if rolloutsByPod[m.Pod] == 0 {
			t.Errorf("%s has rolled nothing", m.Pod)
		}
	}
	t.Logf("rollouts by Pod: %v", rolloutsByPod)
}

// What the new leader's caches have is from before the change that the old one rolled for, and stays
// so for a while.
func TestLeaderWithAnOldCacheRollsNothingBack(t *testing.T) {
	const configMaps, deployments = "configmaps", "deployments"
	for name, staleResources := range map[string][]string{ // which become new in this order
		"the cache of ConfigMaps is old":                 {configMaps},
		"the cache of Deployments is old":                {deployments},
		"both caches are old, and ConfigMaps come last":  {deployments, configMaps},
		"both caches are old, and Deployments come last": {configMaps, deployments},
	} {
		t.Run(name, func(t *testing.T) { takeoverWithOldCaches(t, staleResources) })
	}
}

func takeoverWithOldCaches(t *testing.T, staleResources []string) {
	t.Helper()
	const other = "configmap/other"
	ctx := fleet.Context(t)
	begin := time.Now()
	s := newTestNamespace(t, nil)
	s.configMap("app-config", "blue")
	s.configMap("other", "blue")
	// A mark by annotation contains the time, so that each rollout is one more.
	s.create(newDeployment("web", annotated(fleet.ReloadAnnotation, "auto"), uses(cm)))
	leader := shared.RunLeader(ctx, t, immediateArgs()...)
	replica, proxy := shared.NewReplicaBehindProxy(ctx, t)
	next := shared.Run(t, replica, cluster.ManagerOptions{Args: immediateArgs()})
	fleet.Eventually(ctx, t, func() error { return fleet.Ready(next) })
	s.waitForState(web, cm)

	releases, watches := map[string]chan struct{}{}, []*faultproxy.ActiveRule{}
	for resource, path := range map[string]string{
		"configmaps": "/api/v1/configmaps", "deployments": "/apis/apps/v1/deployments", "statefulsets": "/apis/apps/v1/statefulsets",
	} {
		rule := faultproxy.Rule{Match: func(r *http.Request) bool { return r.URL.Path == path }}
		if slices.Contains(staleResources, resource) {
			releases[resource] = make(chan struct{})
			rule.Hold = releases[resource]
		}
		watches = append(watches, proxy.Add(rule))
	}
	proxy.Partition(faultproxy.Reset)
	proxy.Heal()
	for _, watch := range watches {
		assert.NoError(t, watch.WaitHits(ctx, 1))
	}
	changeColor(s, "red")
	// It asks the API server for what it has only an old version of.
	last := staleResources[len(staleResources)-1]
	matchesLast := s.requestsTo(map[string]string{"configmaps": "configmaps", "deployments": web}[last])
	reads := proxy.Add(faultproxy.Rule{Match: func(r *http.Request) bool { return r.Method == http.MethodGet && matchesLast(r) }})
	assert.NoError(t, leader.Signal(syscall.SIGTERM))
	shared.WaitForLeader(ctx, t, next)
	// When the controller records a workload that comes later, it has looked at all earlier workloads.
	s.create(newStatefulSet("later", annotated(fleet.ReloadAnnotation, "auto"), uses(other)))
	s.waitForState("statefulsets/later", other)
	for _, resource := range staleResources {
		if resource == last {
			if err := reads.WaitHits(ctx, 1); err != nil {
				t.Error(err)
			}
		}
		close(releases[resource])
	}
	changeColor(s, "green")
	s.expectRollouts(begin, 2, map[string]string{web: cm})
}
