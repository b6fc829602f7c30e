// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package clusters_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/quartermaster-dev/quartermaster/examples/clusters"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/controllertest"
)

func namespace(name string) *corev1.Namespace {
	return &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}
}

// secret says how to reach a cluster.
func secret(c *controllertest.Cluster, name string) *corev1.Secret {
	return &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: "clusters", Name: name, Labels: map[string]string{"example.com/cluster": "true"}},
		Data:       map[string][]byte{"server": []byte(c.Address), "ca.crt": c.CA, "token": []byte("of " + name)},
	}
}

func TestClustersGetLabels(t *testing.T) {
	const reconciles = "quartermaster_controller_reconciles_total"
	label := []string{"patch namespaces new"}
	for name, do := range map[string]func(t *testing.T, h *controllertest.Host, east, west *controllertest.Cluster){
		"a new Namespace": func(t *testing.T, h *controllertest.Host, east, west *controllertest.Cluster) {
			t.Helper()
			east.Put(namespace("new"))
			h.Settle()
			expect(t, east, label)
			expect(t, west, nil)
			if n := h.Metric(reconciles, "controller", "clusters", "cluster", "east"); n != 4 { // each Namespace when it comes, and when it has the label
				t.Errorf("%v reconciles in east", n)
			}
		},
		"a cluster whose Secret goes": func(t *testing.T, h *controllertest.Host, east, _ *controllertest.Cluster) {
			t.Helper()
			h.Delete(secret(east, "east"))
			h.Settle()
			east.Put(namespace("new"))
			h.Sleep(time.Hour)
			expect(t, east, nil)
			h.Put(secret(east, "east"))
			h.Settle()
			expect(t, east, label)
			if n := h.Metric(reconciles, "cluster", "east"); n != 2 {
				t.Errorf("%v reconciles in east, want those of the second time", n)
			}
		},
		"a cluster that is cut off holds up no other": func(t *testing.T, h *controllertest.Host, east, west *controllertest.Cluster) {
			t.Helper()
			east.Cut()
			east.Put(namespace("new"))
			west.Put(namespace("new"))
			h.Sleep(time.Minute)
			expect(t, east, nil)
			expect(t, west, label)
			east.Restore()
			h.Sleep(time.Hour)
			expect(t, east, label)
		},
		"a token that holds no more": func(t *testing.T, h *controllertest.Host, east, _ *controllertest.Cluster) {
			t.Helper()
			east.SetToken("the next")
			east.Put(namespace("new"))
			h.Sleep(time.Hour)
			expect(t, east, nil)
			next := secret(east, "east")
			next.Data["token"] = []byte("the next")
			h.Put(next)
			h.Settle()
			expect(t, east, label)
		},
		"a new leader goes on": func(t *testing.T, h *controllertest.Host, east, _ *controllertest.Cluster) {
			t.Helper()
			h.Restart()
			east.Put(namespace("new"))
			h.Settle()
			expect(t, east, label)
		},
		"a cluster that hangs does not hold up the handover": func(t *testing.T, h *controllertest.Host, east, west *controllertest.Cluster) {
			t.Helper()
			east.Hang()
			east.Put(namespace("new"))
			<-time.After(100 * time.Millisecond) // the patch is in flight
			begun := time.Now()
			h.Restart()
			if took := time.Since(begun); took > 5*time.Second {
				t.Errorf("the handover took %s", took)
			}
			west.Put(namespace("new"))
			h.Sleep(time.Minute)
			expect(t, west, label)
			east.Restore()
			h.Sleep(time.Hour)
			expect(t, east, label)
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := controllertest.Setup{Entries: []controllers.Entry{clusters.Entry()}, Standby: true}.NewHost(t)
				east, west := h.AddTLSCluster("east", namespace("shop")), h.AddTLSCluster("west", namespace("shop"))
				east.SetToken("of east")
				west.SetToken("of west")
				h.Put(secret(east, "east"), secret(west, "west"))
				h.Settle()
				expect(t, east, []string{"patch namespaces shop"})
				expect(t, west, []string{"patch namespaces shop"})
				expect(t, h, nil)
				do(t, h, east, west)
				expect(t, h, nil)
			})
		})
	}
}

func expect(t *testing.T, server interface{ Writes() []string }, want []string) {
	t.Helper()
	if diff := cmp.Diff(want, server.Writes()); diff != "" {
		t.Errorf("writes (-want +got):\n%s", diff)
	}
}
