// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package ttl

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/test/internal/faultproxy"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// matchDelete selects the deletions of a ConfigMap.
func matchDelete(name string) func(*http.Request) bool {
	return func(r *http.Request) bool {
		return r.Method == http.MethodDelete && strings.HasSuffix(r.URL.Path, "/configmaps/"+name)
	}
}

// TestLeaderDiesBetweenItsRequests crashes after the live read. Meanwhile the object is replaced
// by one of the same name that nobody has given a TTL.
func TestLeaderDiesBetweenItsRequests(t *testing.T) {
	f := newFixture(t)
	replica, proxy := shared.NewReplicaBehindProxy(f.ctx, t)
	never := make(chan struct{})
	defer close(never)
	replaced := proxy.Add(faultproxy.Rule{Match: matchDelete("replaced"), Hold: never})
	kept := proxy.Add(faultproxy.Rule{Match: matchDelete("kept"), Hold: never})
	m := shared.Run(t, replica, cluster.ManagerOptions{Args: args(fleet.ShortTimings...)})
	shared.WaitForLeader(f.ctx, t, m)
	old := f.createConfigMap("replaced", expiresIn(0))
	f.createConfigMap("kept", expiresIn(0))
	for _, rule := range []*faultproxy.ActiveRule{replaced, kept} {
		assert.NoError(t, rule.WaitHits(f.ctx, 1))
	}
	maps := shared.Admin.CoreV1().ConfigMaps(f.namespace)
	assert.NoError(t, maps.Delete(f.ctx, "replaced", metav1.DeleteOptions{}))
	successor := f.createConfigMap("replaced", nil)
	if successor.UID == old.UID {
		t.Fatal("it is the same object")
	}
	m.Kill()
	shared.RunLeader(f.ctx, t, args(fleet.ShortTimings...)...)
	f.waitUntilGone("kept")
	f.settle()
	if now, err := maps.Get(f.ctx, "replaced", metav1.GetOptions{}); err != nil || now.UID != successor.UID || now.DeletionTimestamp != nil {
		t.Errorf("%v, %v", now, err)
	}
	f.expectDeleted("configmaps/kept")
}

// TestFailuresAreRetriedToTheEnd answers the first deletions of an object in other ways, and replaces one
// while the answer is on its way.
func TestFailuresAreRetriedToTheEnd(t *testing.T) {
	f := newFixture(t)
	replica, proxy := shared.NewReplicaBehindProxy(f.ctx, t)
	faults := map[string][]faultproxy.Rule{
		"conflict": {{Times: 2, Status: 409}}, "told-to-wait": {{Times: 2, Status: 429, RetryAfter: time.Second}}, "internal-error": {{Times: 2, Status: 500}},
		"unavailable": {{Times: 2, Status: 503}}, "slow": {{Times: 1, Delay: 2 * time.Second}}, "not-answered": {{Times: 1, DropResponse: true}}, "nothing": nil,
	}
	for name, rules := range faults {
		for _, rule := range rules {
			rule.Match = matchDelete(name)
			proxy.Add(rule)
		}
	}
	hold := make(chan struct{})
	held := proxy.Add(faultproxy.Rule{Match: matchDelete("replaced"), Hold: hold, Times: 1})
	m := shared.Run(t, replica, cluster.ManagerOptions{Args: args("--ttl-concurrent-syncs=4")})
	shared.WaitForLeader(f.ctx, t, m)
	f.createConfigMap("replaced", expiresIn(0))
	assert.NoError(t, held.WaitHits(f.ctx, 1))
	maps := shared.Admin.CoreV1().ConfigMaps(f.namespace)
	assert.NoError(t, maps.Delete(f.ctx, "replaced", metav1.DeleteOptions{}))
	f.createConfigMap("replaced", nil)
	close(hold) // the request that names the old object arrives now
	var want []string
	for name := range faults {
		f.createConfigMap(name, expiresIn(0))
		want = append(want, "configmaps/"+name)
	}
	for name := range faults {
		f.waitUntilGone(name)
	}
	f.settle()
	if _, err := maps.Get(f.ctx, "replaced", metav1.GetOptions{}); err != nil {
		t.Error(err)
	}
	f.expectDeleted(want...)
}

// TestLongThousandDueAtOnceAreDeleted has as many objects of a namespace due in the same second as the
// breaker permits, and then one more. It logs how long they took, and how long requests of somebody else took
// before and meanwhile.
func TestLongThousandDueAtOnceAreDeleted(t *testing.T) {
	const objects = 1000
	f := newFixture(t)
	f.ctx = fleet.Within(t.Context(), t, 2*fleet.Patience)
	m := shared.RunLeader(f.ctx, t, args(fmt.Sprintf("--ttl-max-deletions-per-minute=%d", objects))...)
	annotations := expiresIn(time.Minute)
	deadline, err := time.Parse(time.RFC3339Nano, annotations["quartermaster.dev/expires"])
	assert.NoError(t, err)
	var creating sync.WaitGroup
	for part := range 10 {
		creating.Go(func() {
			for i := range objects / 10 {
				f.createConfigMap(fmt.Sprintf("cm-%d-%d", part, i), annotations)
			}
		})
	}
	creating.Wait()
	begin := time.Now()
	if deadline.Sub(begin) < 5*time.Second {
		t.Fatalf("creating %d objects took until %v before the deadline", objects, deadline.Sub(begin))
	}
	stop := f.startProbes()
	maps := shared.Admin.CoreV1().ConfigMaps(f.namespace)
	fleet.Eventually(f.ctx, t, func() error {
		list, err := maps.List(f.ctx, metav1.ListOptions{Limit: 3}) // all of them would be a load of its own
		if err == nil && len(list.Items) > 2 {                      // kube-root-ca.crt, and the probe's
			err = errors.New("some are left")
		}
		return err
	})
	probes := stop()
	var last time.Time
	for _, d := range f.deletions() {
		if d.StageTimestamp.After(last) {
			last = d.StageTimestamp.Time
		}
	}
	t.Logf("all gone %v after the deadline", last.Sub(deadline))
	t.Logf("a read and a write of somebody else before:    %s", latencies(probes, begin, deadline))
	t.Logf("a read and a write of somebody else meanwhile: %s", latencies(probes, deadline, last))
	f.createConfigMap("one-more", expiresIn(0))
	fleet.Eventually(f.ctx, t, func() error {
		return fleet.Answers(m.InsecureURL+"/metrics", "", 200, "quartermaster_ttl_breaker_open 0", "quartermaster_ttl_stopped_namespaces 1",
			`quartermaster_ttl_breaker_trips_total{scope="namespace"} 1`, "quartermaster_ttl_overdue_objects 1")
	})
	f.waitForEvent(metav1.NamespaceSystem, m.Pod, "TTLBreakerOpen")
	other := newFixture(t)
	other.settle() // another namespace's
	if _, err := maps.Get(f.ctx, "one-more", metav1.GetOptions{}); err != nil {
		t.Error(err)
	}
}

// probe is a read and a write of somebody else, of an object without an annotation.
type probe struct {
	begin time.Time
	took  time.Duration
}

// startProbes sends probes, 20 a second if they take no time, until it is stopped.
func (f *fixture) startProbes() (stop func() []probe) {
	f.createConfigMap("somebody-elses", nil)
	maps := shared.Admin.CoreV1().ConfigMaps(f.namespace)
	ctx, cancel := context.WithCancel(f.ctx)
	result := make(chan []probe)
	go func() {
		var probes []probe
		for n := 0; ctx.Err() == nil; n++ {
			begin := time.Now()
			_, err := maps.Get(ctx, "somebody-elses", metav1.GetOptions{})
			if err == nil {
				_, err = maps.Patch(ctx, "somebody-elses", types.MergePatchType, fmt.Appendf(nil, `{"data":{"n":"%d"}}`, n), metav1.PatchOptions{})
			}
			if err == nil {
				probes = append(probes, probe{begin, time.Since(begin)})
			} else if ctx.Err() == nil {
				f.Error(err)
			}
			select {
			case <-ctx.Done():
			case <-time.After(50 * time.Millisecond):
			}
		}
		result <- probes
	}()
	return func() []probe { cancel(); return <-result }
}

// latencies describes the probes that began between two times.
func latencies(probes []probe, begin, end time.Time) string {
	var took []time.Duration
	for _, p := range probes {
		if p.begin.After(begin) && p.begin.Before(end) {
			took = append(took, p.took)
		}
	}
	if len(took) == 0 {
		return "none"
	}
	slices.Sort(took)
	percentile := func(part int) time.Duration { return took[(len(took)-1)*part/100].Round(10 * time.Microsecond) }
	return fmt.Sprintf("median %v, 90%% within %v, 99%% within %v, of %d", percentile(50), percentile(90), percentile(99), len(took))
}
