// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package federation_test

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/controllertest"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/federation/policy"
)

// kubeSystem is the Namespace whose UID a cluster has.
func kubeSystem(uid string) *corev1.Namespace {
	return &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: metav1.NamespaceSystem, UID: types.UID(uid)}}
}

// expectIdentity checks the recorded UID of a cluster, and whether the cluster is ready.
func (f *fed) expectIdentity(name, uid string, ready bool) {
	f.t.Helper()
	u := f.get(f.Host, "KubeFedCluster", namespace, name)
	if got := u.GetAnnotations()[policy.ClusterUIDAnnotation]; got != uid {
		f.t.Errorf("%s has the UID %q, want %q", name, got, uid)
	}
	if got := policy.StartHealth(policy.ReadCluster(u).Status); got.Ready() != ready {
		f.t.Errorf("%s is %v", name, policy.ReadCluster(u).Status.Conditions)
	}
}

// reidentify lets a cluster be asked which one it is, since a probe fails.
func (f *fed) reidentify(change func()) {
	f.t.Helper()
	f.c2.Cut()
	f.Sleep(11 * time.Second)
	change()
	f.c2.Restore()
	f.Sleep(time.Minute)
}

// TestClusterThatIsReplacedLosesNothing begins with the federated object in both clusters, which have the
// UIDs one and two.
func TestClusterThatIsReplacedLosesNothing(t *testing.T) {
	for name, tc := range map[string]func(f *fed){
		"a cluster that is rebuilt behind its endpoint gets everything, and loses nothing": func(f *fed) {
			f.reidentify(func() {
				f.c2.Delete(f.get(f.c2, "ConfigMap", "shop", "f"), f.get(f.c2, "Namespace", "", "shop"), kubeSystem(""))
				f.c2.Put(kubeSystem("three"))
			})
			if w := f.c2.Writes(); len(w) != 2 || !slices.Contains(w, configMapCreate) || !slices.Contains(w, "create namespaces shop") {
				f.t.Errorf("wrote %q", w)
			}
			f.expectWarnings(policy.ClusterReplaced)
			f.expectIdentity("c2", "two", true)
		},
		"placement deletes nothing in a replaced cluster until the annotation is deleted": func(f *fed) {
			f.reidentify(func() {
				f.c2.Delete(kubeSystem(""))
				f.c2.Put(kubeSystem("three"))
			})
			f.setSpec("{clusters: [{name: c1}]}", "placement")
			f.set(f.Host, "KubeFedCluster", namespace, "c2", "{quartermaster.dev/cluster-uid: two, quartermaster.dev/allow-removals: '2100-01-01T00:00:00Z'}", "metadata", "annotations")
			f.c2.Put(object(f.t, "{apiVersion: v1, kind: ConfigMap, metadata: {namespace: shop, name: other, labels: {kubefed.io/managed: 'true'}}}"))
			f.Sleep(20 * time.Minute)
			f.expectWrites(f.c2)
			f.expectStatus("FederatedConfigMap", "f", "CheckClusters c1= c2=RemovalHeld")
			f.set(f.Host, "KubeFedCluster", namespace, "c2", "", "metadata", "annotations")
			f.Sleep(2 * time.Minute)
			f.expectConfigMap(f.c2, "gone")
			f.expectIdentity("c2", "three", true)
		},
		"a deleted F is removed in a replaced cluster": func(f *fed) {
			f.reidentify(func() {
				f.c2.Delete(kubeSystem(""))
				f.c2.Put(kubeSystem("three"))
			})
			f.Delete(configMap(f.t))
			f.Sleep(time.Minute)
			f.expectWrites(f.c2, configMapDelete)
			f.expectStatus("FederatedConfigMap", "f", "gone")
		},
		"what a cluster owes is not removed in its successor": func(f *fed) {
			f.writeOff()
			f.c2.Delete(kubeSystem(""))
			f.c2.Put(kubeSystem("three"))
			f.endOutage()
			f.expectWrites(f.c2)
			f.expectConfigMap(f.c2, "managed")
			f.set(f.Host, "KubeFedCluster", namespace, "c2", "", "metadata", "annotations")
			f.Sleep(2 * time.Minute)
			f.expectWrites(f.c2, configMapDelete)
		},
		"a restart, and an absence, replace nothing": func(f *fed) {
			f.reidentify(func() {})
			f.Restart()
			f.Sleep(time.Minute)
			f.expectWarnings()
			f.expectIdentity("c2", "two", true)
		},
		"a cluster that is joined twice is written once": func(f *fed) {
			f.Put(secret("c3", "two"), kubeFedCluster(f.c2, "c3"))
			f.setSpec("{clusters: [{name: c1}, {name: c3}]}", "placement")
			f.Sleep(20 * time.Minute)
			f.expectIdentity("c3", "", false)
			f.expectIdentity("c2", "two", true)
			f.expectWrites(f.c2, configMapDelete) // by c2
			f.expectWarnings("MalformedClusterConfig")
			f.Delete(kubeFedCluster(f.c2, "c2"))
			f.Sleep(2 * time.Minute)
			f.expectIdentity("c3", "two", true)
		},
		"an older KubeFedCluster that is led to a joined cluster takes nothing from it": func(f *fed) {
			f.Put(secret("c1", "two"))
			f.set(f.Host, "KubeFedCluster", namespace, "c1", f.c2.Address, "spec", "apiEndpoint")
			f.Sleep(time.Minute)
			f.setSpec("{data: {a: c}}", "template")
			f.Sleep(2 * time.Minute)
			f.expectIdentity("c1", "one", false)
			f.expectIdentity("c2", "two", true)
			f.expectWrites(f.c2, configMapUpdate)
			f.expectWarnings(policy.ClusterReplaced, "MalformedClusterConfig")
		},
		"a cluster is joined twice while nobody leads": func(f *fed) {
			f.set(f.Host, "KubeFedCluster", namespace, "c2", "", "metadata", "annotations")
			f.set(f.Host, "FederatedNamespace", "shop", "shop", "{clusters: [{name: c1}, {name: c2}, {name: c3}]}", "spec", "placement")
			f.Sleep(time.Minute)
			f.Restart(func() {
				f.set(f.Host, "KubeFedCluster", namespace, "c2", "", "metadata", "annotations")
				f.set(f.c2, "ConfigMap", "shop", "f", "mine", "data", "a")
				f.Put(secret("c3", "two"), kubeFedCluster(f.c2, "c3"))
				f.setSpec("{clusters: [{name: c1}, {name: c3}]}", "placement")
				f.c2.Writes()
			})
			f.Sleep(time.Minute)
			f.expectWrites(f.c2, configMapDelete) // by c2
			f.expectIdentity("c3", "", false)
		},
		"a UID that may not be read": func(f *fed) {
			f.c2.OnRead(func(r controllertest.Request) error {
				if strings.HasPrefix(r.String(), "get namespaces "+metav1.NamespaceSystem) {
					return apierrors.NewForbidden(schema.GroupResource{Resource: "namespaces"}, "", errors.New("no"))
				}
				return nil
			})
			f.set(f.Host, "KubeFedCluster", namespace, "c2", "", "metadata", "annotations")
			f.Restart()
			f.Sleep(time.Minute)
			f.expectIdentity("c2", "", true)
		},
		"while a cluster does not say which one it is, it is not written": func(f *fed) {
			f.c2.OnRead(func(r controllertest.Request) error {
				if strings.HasPrefix(r.String(), "get namespaces "+metav1.NamespaceSystem) {
					return errors.New("no space left")
				}
				return nil
			})
			f.Restart(func() { f.set(f.c2, "ConfigMap", "shop", "f", "mine", "data", "a") })
			f.Sleep(2 * time.Minute)
			f.expectWrites(f.c2)
			f.expectIdentity("c2", "two", false)
			f.c2.OnRead(nil)
			f.Sleep(time.Minute)
			f.expectWrites(f.c2, configMapUpdate)
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFed(t)
				f.c1.Put(kubeSystem("one"))
				f.c2.Put(kubeSystem("two"))
				f.Restart()
				f.Put(configMap(t))
				f.Sleep(settleTime)
				f.expectIdentity("c1", "one", true)
				f.expectIdentity("c2", "two", true)
				for _, host := range []apiServer{f.Host, f.c1, f.c2} {
					host.Writes()
				}
				f.Events()
				tc(f)
			})
		})
	}
}

func TestOlderClusterIsCreatedEarlier(t *testing.T) {
	cluster := func(name string, second int64) *unstructured.Unstructured {
		u := &unstructured.Unstructured{Object: map[string]any{}}
		u.SetName(name)
		u.SetCreationTimestamp(metav1.Unix(second, 0))
		return u
	}
	for name, tc := range map[string]struct {
		a, b *unstructured.Unstructured
		want bool
	}{
		"an earlier one":                    {cluster("b", 1), cluster("a", 2), true},
		"a later one":                       {cluster("a", 2), cluster("b", 1), false},
		"the first name of the same second": {cluster("a", 1), cluster("b", 1), true},
		"itself":                            {cluster("a", 1), cluster("a", 1), false},
	} {
		t.Run(name, func(t *testing.T) {
			if got := policy.OlderCluster(tc.a, tc.b); got != tc.want {
				t.Errorf("older: %t", got)
			}
		})
	}
}
