// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package ttl

import (
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"
	"k8s.io/utils/ptr"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// TestLongGrowth compares managers with and without ttl, as they are released, in a cluster with 5,000
// ConfigMaps and 5,000 Secrets of 4 KiB and 500 Deployments, none of them annotated. The second one asks
// for nothing while nothing happens.
func TestLongGrowth(t *testing.T) {
	w := newWorld(t)
	w.ctx = fleet.Within(t.Context(), t, 15*time.Minute)
	binary, err := cluster.BuildProgram(w.ctx, "cmd/manager", false)
	if err != nil {
		t.Fatal(err)
	}
	data := strings.Repeat("x", 4096)
	var creating sync.WaitGroup
	for part := range 10 {
		creating.Go(func() {
			for i := range 500 {
				name := metav1.ObjectMeta{Name: fmt.Sprintf("o-%d-%d", part, i)}
				if _, err := shared.Admin.CoreV1().ConfigMaps(w.namespace).Create(w.ctx, &corev1.ConfigMap{ObjectMeta: name, Data: map[string]string{"k": data}}, metav1.CreateOptions{}); err != nil {
					t.Error(err)
				}
				if _, err := shared.Admin.CoreV1().Secrets(w.namespace).Create(w.ctx, &corev1.Secret{ObjectMeta: name, StringData: map[string]string{"k": data}}, metav1.CreateOptions{}); err != nil {
					t.Error(err)
				}
				if i%10 == 0 {
					template := podTemplate()
					template.Spec.RestartPolicy = corev1.RestartPolicyAlways
					if _, err := shared.Admin.AppsV1().Deployments(w.namespace).Create(w.ctx, &appsv1.Deployment{ObjectMeta: name,
						Spec: appsv1.DeploymentSpec{Replicas: ptr.To[int32](0), Selector: &metav1.LabelSelector{MatchLabels: template.Labels}, Template: template}}, metav1.CreateOptions{}); err != nil {
						t.Error(err)
					}
				}
			}
		})
	}
	creating.Wait()
	run := func(t *testing.T, args ...string) (mib float64) {
		t.Helper()
		m, err := shared.StartManager(shared.NewReplica(w.ctx, t), cluster.ManagerOptions{Binary: binary, Args: append([]string{"--insecure-metrics"}, args...)})
		if err != nil {
			t.Fatal(err)
		}
		defer shared.FreeLease(t, m)
		defer m.Kill()
		fleet.Eventually(w.ctx, t, func() error { return fleet.Ready(m) })
		<-time.After(30 * time.Second)
		begin := time.Now()
		<-time.After(70 * time.Second)
		idle := map[string]int{}
		for _, e := range shared.AuditSince(t, begin, func(e auditv1.Event) bool { return cluster.AuditPod(e) == m.Pod && e.Verb != "watch" }) {
			// The host renews its Lease, and asks for the fence in the API server.
			if e.ObjectRef == nil || e.ObjectRef.Resource != "leases" && e.ObjectRef.Name != "quartermaster-leader" {
				idle[e.Verb+" "+e.RequestURI]++
			}
		}
		t.Logf("requests in 70 s: %v", idle)
		if len(idle) > 0 {
			t.Error("it asks while nothing happens")
		}
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", m.PID()))
		if err != nil {
			t.Fatal(err)
		}
		var rss, peak int
		_, rest, _ := strings.Cut(string(text), "VmRSS:")
		_, high, _ := strings.Cut(string(text), "VmHWM:")
		if _, err := fmt.Sscan(rest, &rss); err != nil {
			t.Fatal(err)
		}
		if _, err := fmt.Sscan(high, &peak); err != nil {
			t.Fatal(err)
		}
		t.Logf("%.1f MiB, %.1f at the peak", float64(rss)/1024, float64(peak)/1024)
		return float64(rss) / 1024
	}
	without := run(t, "--controllers=-ttl")
	with := run(t)
	t.Logf("growth: %.1f MiB", with-without)
	if with-without > 5 {
		t.Error("more than 5 MiB")
	}
}
