// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package election

import (
	"context"
	"errors"
	"flag"
	"os"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr"
	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/testutil"
	"k8s.io/klog/v2"
)

// configMapServer responds to a probe.
type configMapServer func(probe *corev1.ConfigMap, opts metav1.UpdateOptions) error

func (f configMapServer) Update(_ context.Context, probe *corev1.ConfigMap, opts metav1.UpdateOptions) (*corev1.ConfigMap, error) {
	return probe, f(probe, opts)
}

func refusal(text string) error {
	return apierrors.NewForbidden(corev1.Resource("configmaps"), ServerFenceName, errors.New(text))
}

func TestServerFence(t *testing.T) {
	verdict := func(text string) error {
		return refusal("ValidatingAdmissionPolicy 'quartermaster-fence' with binding 'quartermaster-fence' denied request: quartermaster-fence: probe: " + text)
	}
	byHolder := func(store *simStore) error {
		if store.holder() == "r" {
			return verdict("admits writes of Pod r")
		}
		return verdict("refuses writes of Pod r")
	}
	asked := 0
	tests := map[string]struct {
		answer func(*simStore) error
		want   ServerFence // of the leader
	}{
		"a policy that is applied later than the replica": {func(s *simStore) error {
			if asked++; asked < 5 {
				return nil
			}
			return byHolder(s)
		}, ServerFenceEnforced},
		"a policy that judges rightly":          {byHolder, ServerFenceEnforced},
		"no policy":                             {func(*simStore) error { return nil }, ServerFenceAbsent},
		"no permission, which comes with it":    {func(*simStore) error { return refusal("User r cannot update resource") }, ServerFenceAbsent},
		"no ConfigMap, which comes with it":     {func(*simStore) error { return apierrors.NewNotFound(corev1.Resource("configmaps"), ServerFenceName) }, ServerFenceAbsent},
		"a token that is not bound to a Pod":    {func(*simStore) error { return verdict("cannot judge a token without a Pod") }, ServerFenceMisconfigured},
		"a policy that goes by another lease":   {func(*simStore) error { return verdict("refuses writes of Pod r") }, ServerFenceMisconfigured},
		"an API server that does not answer it": {func(*simStore) error { return errors.New("network is down") }, ServerFenceUnknown},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				store := freeStore()
				lock := must(NewLock(testConfig(), Candidate{Identity: "r", Client: newStoreClient(store, "r"), Clock: NewMonotonicClock()}))
				var mu sync.Mutex
				lock.ProbeServerFence(configMapServer(func(probe *corev1.ConfigMap, opts metav1.UpdateOptions) error {
					mu.Lock()
					defer mu.Unlock()
					if len(opts.DryRun) != 1 || probe.Name != ServerFenceName || probe.Namespace != "ns" {
						t.Errorf("probe of %s/%s, dry run %v", probe.Namespace, probe.Name, opts.DryRun)
					}
					return test.answer(store)
				}))
				ctx, stop := context.WithCancel(klog.NewContext(t.Context(), logr.Discard()))
				done := make(chan error, 1)
				go func() {
					done <- lock.Run(ctx, func(ctx context.Context) error { <-ctx.Done(); return nil })
				}()
				pass(2 * time.Minute)
				if got := lock.shown.snapshot().ServerFence; got != test.want {
					t.Errorf("got %s, want %s", got, test.want)
				}
				stop()
				if err := <-done; err != nil {
					t.Error(err)
				}
				store.background.Wait()
			})
		})
	}
	t.Run("a policy that admits a standby", func(t *testing.T) {
		lock := must(NewLock(testConfig(), Candidate{Identity: "r"}))
		lock.ProbeServerFence(configMapServer(func(*corev1.ConfigMap, metav1.UpdateOptions) error { return verdict("admits writes of Pod r") }))
		lock.shown.status.Holder = "another"
		if got, err := lock.askServerFence(t.Context()); got != ServerFenceMisconfigured {
			t.Errorf("got %s, %v", got, err)
		}
	})
}

func TestSetServerFence(t *testing.T) {
	registry := metrics.NewKubeRegistry()
	lock := must(NewLock(testConfig(), Candidate{Identity: "r", Metrics: must(NewMetrics(registry, "quartermaster"))}))
	lock.SetServerFence(klog.NewContext(t.Context(), logr.Discard()), ServerFenceCannotJudge)
	want := `
		# HELP quartermaster_leader_election_server_fence [ALPHA] Whether the API server refuses writes of replicas that do not hold the Lease: 1 for the state that was found, 0 for the others.
		# TYPE quartermaster_leader_election_server_fence gauge
		quartermaster_leader_election_server_fence{lease_namespace="ns",name="lease",state="Absent"} 0
		quartermaster_leader_election_server_fence{lease_namespace="ns",name="lease",state="CannotJudge"} 1
		quartermaster_leader_election_server_fence{lease_namespace="ns",name="lease",state="Enforced"} 0
		quartermaster_leader_election_server_fence{lease_namespace="ns",name="lease",state="Misconfigured"} 0
		quartermaster_leader_election_server_fence{lease_namespace="ns",name="lease",state="Unknown"} 0
	`
	if err := testutil.GatherAndCompare(registry, strings.NewReader(want), "quartermaster_leader_election_server_fence"); err != nil {
		t.Error(err)
	}
}

var update = flag.Bool("update", false, "write the golden files")

// TestMetricNamesGolden pins the names that dashboards and alerts depend on.
func TestMetricNamesGolden(t *testing.T) {
	const golden = "testdata/metrics.golden"
	registry := metrics.NewKubeRegistry()
	m := must(NewMetrics(registry, "quartermaster"))
	m.of(leaseName)
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	var names strings.Builder
	for _, family := range families {
		labels := map[string]bool{}
		for _, metric := range family.GetMetric() {
			var keys []string
			for _, label := range metric.GetLabel() {
				keys = append(keys, label.GetName())
			}
			labels[strings.Join(keys, ",")] = true
		}
		for keys := range labels {
			names.WriteString(family.GetName() + "{" + keys + "} " + strings.ToLower(family.GetType().String()) + "\n")
		}
	}
	if *update {
		if err := os.WriteFile(golden, []byte(names.String()), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), names.String()); diff != "" {
		t.Errorf("run with -update if this is intended:\n%s", diff)
	}
	if _, err := NewMetrics(registry, "quartermaster"); err == nil {
		t.Error("the metrics were registered twice")
	}
}
