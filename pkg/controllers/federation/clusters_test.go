// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package federation_test

import (
	"encoding/base64"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/dynamic"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/controllertest"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/federation"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/federation/policy"
)

const namespace = "kube-federation-system"

func secret(name, token string) *corev1.Secret {
	return &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}, Data: map[string][]byte{"token": []byte(token)}}
}

// newKubeFedCluster returns the KubeFedCluster of a cluster, with a Secret of its own name.
func newKubeFedCluster(name string, spec policy.ClusterSpec) *unstructured.Unstructured {
	u := &unstructured.Unstructured{Object: map[string]any{"spec": map[string]any{
		"apiEndpoint": spec.APIEndpoint, "caBundle": base64.StdEncoding.EncodeToString(spec.CABundle), "secretRef": map[string]any{"name": name}}}}
	u.SetGroupVersionKind(federation.KubeFedClusters.GroupVersion().WithKind("KubeFedCluster"))
	u.SetNamespace(namespace)
	u.SetName(name)
	return u
}

// host is a manager that probes clusters.
type host struct {
	*controllertest.Host
	*testing.T
}

func newHost(t *testing.T, unsafe bool, objects ...runtime.Object) host {
	t.Helper()
	setup := controllertest.Setup{Entries: []controllers.Entry{federation.Entry()}}
	if unsafe {
		setup.Flags = []string{"--federation-unsafe-endpoints"}
	}
	return host{setup.NewHost(t, append(controllertest.ReadYAML(t, "../../../deploy/federation/crds/core.yaml"), objects...)...), t}
}

func (h host) get(name string) *unstructured.Unstructured {
	h.Helper()
	client, err := dynamic.NewForConfig(h.RESTConfig())
	assert.NoError(h, err)
	u, err := client.Resource(federation.KubeFedClusters).Namespace(namespace).Get(h.Context(), name, metav1.GetOptions{})
	assert.NoError(h, err)
	return u
}

// conditions returns the conditions of a KubeFedCluster, such as "Ready=True".
func (h host) conditions(name string) string {
	h.Helper()
	u := h.get(name)
	var texts []string
	for _, c := range policy.ReadCluster(u).Status.Conditions {
		texts = append(texts, c.Type+"="+c.Status+" "+c.Reason)
	}
	return strings.Join(texts, ", ")
}

func (h host) expectConditions(name, want string) {
	h.Helper()
	if got := h.conditions(name); got != want {
		h.Errorf("%s is %q, want %q", name, got, want)
	}
	ready, _ := federation.Ready(h.Controller("federation"), name)
	if ready != strings.HasPrefix(want, "Ready=True") {
		h.Errorf("%s is ready: %t", name, ready)
	}
}

func (h host) expectWrites(want ...string) {
	h.Helper()
	if got := h.Writes(); !slices.Equal(got, want) {
		h.Errorf("wrote %q, want %q", got, want)
	}
}

const (
	readyConditions     = "Ready=True ClusterReady"
	notReadyConditions  = "Ready=False ClusterNotReady, Offline=False ClusterReachable"
	malformedConditions = "ConfigMalformed=True ClusterConfigMalformed, Ready=False ClusterConfigMalformed"
	offlineConditions   = "Offline=True ClusterNotReachable, Ready=False ClusterNotReachable"
	statusPatch         = "patch kubefedclusters.core.kubefed.io/status " + namespace + "/"
)

func TestClusterIsProbedWhileItIsJoined(t *testing.T) {
	server := federation.NewServer(t)
	synctest.Test(t, func(t *testing.T) {
		h := newHost(t, true, newKubeFedCluster("c1", server.Spec()), secret("c1", "good"))
		h.expectConditions("c1", readyConditions)
		h.expectWrites(statusPatch + "c1")
		h.Sleep(4 * time.Minute)
		h.expectWrites()
		if n := server.Probes(); n != 2*25+1 {
			t.Errorf("%d requests, want two for each of 25 probes, and one for its UID", n)
		}
		h.Sleep(time.Minute + time.Second)
		h.expectWrites(statusPatch + "c1") // since the status was five minutes old
		server.SetAnswer(500)
		h.Sleep(20 * time.Second)
		h.expectConditions("c1", readyConditions)
		h.Sleep(10 * time.Second)
		h.expectConditions("c1", notReadyConditions)
		h.expectWrites(statusPatch + "c1")
		server.SetAnswer(200)
		h.Sleep(10 * time.Second)
		h.expectConditions("c1", readyConditions)
		h.expectWrites(statusPatch + "c1")
		if _, since := federation.Ready(h.Controller("federation"), "c1"); time.Since(since) > 10*time.Second {
			t.Errorf("ready since %v", since)
		}
		h.Delete(newKubeFedCluster("c1", server.Spec()))
		h.Settle()
		if ready, _ := federation.Ready(h.Controller("federation"), "c1"); ready {
			t.Error("a cluster without a KubeFedCluster is ready")
		}
		before := server.Probes()
		h.Sleep(time.Minute)
		if server.Probes() != before {
			t.Error("it is probed nevertheless")
		}
	})
}

func TestNewLeaderStartsFromTheStatusOfClusters(t *testing.T) {
	server := federation.NewServer(t)
	synctest.Test(t, func(t *testing.T) {
		h := newHost(t, true, newKubeFedCluster("c1", server.Spec()), secret("c1", "good"))
		h.expectConditions("c1", readyConditions)
		server.SetAnswer(500)
		h.Restart()
		h.Settle()
		h.expectConditions("c1", readyConditions)
		h.Sleep(20 * time.Second)
		h.expectConditions("c1", notReadyConditions)
	})
}

func TestMalformedClusterStopsNoOther(t *testing.T) {
	server, stopped := federation.NewServer(t), federation.NewServer(t)
	stopped.Close()
	synctest.Test(t, func(t *testing.T) {
		insecureSpec := server.Spec()
		insecureSpec.APIEndpoint = strings.Replace(insecureSpec.APIEndpoint, "https", "http", 1)
		h := newHost(t, true, newKubeFedCluster("well", server.Spec()), secret("well", "good"), newKubeFedCluster("without", server.Spec()), newKubeFedCluster("blank", server.Spec()), secret("blank", " "),
			newKubeFedCluster("gone", stopped.Spec()), secret("gone", "good"), newKubeFedCluster("ca", policy.ClusterSpec{APIEndpoint: server.URL, CABundle: []byte("x")}), secret("ca", "good"))
		h.expectConditions("well", readyConditions)
		h.expectConditions("without", malformedConditions)
		h.expectConditions("blank", malformedConditions)
		h.expectConditions("ca", malformedConditions)
		h.expectConditions("gone", offlineConditions)
		events := h.Events()
		slices.Sort(events)
		var reasons []string
		for _, event := range events {
			event, _, _ = strings.Cut(event, " the cluster does not answer")
			reasons = append(reasons, event)
		}
		if want := []string{"Warning MalformedClusterConfig " + namespace + "/blank: the Secret has no token", "Warning MalformedClusterConfig " + namespace + "/ca: caBundle: must have a certificate",
			"Warning MalformedClusterConfig " + namespace + "/without: there is no such Secret", "Warning RetrievingClusterHealthFailed " + namespace + "/gone:"}; !slices.Equal(reasons, want) {
			t.Errorf("Events %q, want %q", reasons, want)
		}
		h.Put(secret("without", "good"))
		h.Settle() // at once
		h.expectConditions("without", readyConditions)
		h.Delete(secret("well", "good"))
		h.Settle()
		h.expectConditions("well", malformedConditions)
		h.expectConditions("without", readyConditions)
	})
}

func TestUnsafeEndpointIsNotAsked(t *testing.T) {
	server := federation.NewServer(t)
	synctest.Test(t, func(t *testing.T) {
		h := newHost(t, false, newKubeFedCluster("c1", server.Spec()), secret("c1", "good"))
		h.expectConditions("c1", malformedConditions)
		if server.Probes() > 0 {
			t.Error("it was asked nevertheless")
		}
	})
}

func TestChangedSpecIsUsedAtOnce(t *testing.T) {
	server, other := federation.NewServer(t), federation.NewServer(t)
	synctest.Test(t, func(t *testing.T) {
		h := newHost(t, true, newKubeFedCluster("c1", server.Spec()), secret("c1", "good"))
		changed := h.get("c1")
		assert.NoError(t, unstructured.SetNestedField(changed.Object, other.URL, "spec", "apiEndpoint"))
		assert.NoError(t, unstructured.SetNestedStringSlice(changed.Object, []string{"*"}, "spec", "disabledTLSValidations"))
		before := server.Probes()
		h.Put(changed)
		h.Settle() // at once, not after the period
		if other.Probes() == 0 || server.Probes() != before {
			t.Errorf("%d requests of the new endpoint, %d of the old one", other.Probes(), server.Probes()-before)
		}
		h.expectConditions("c1", readyConditions)
		h.Sleep(time.Minute)
		if events := h.Events(); len(events) != 1 || !strings.HasPrefix(events[0], "Warning InsecureTLS "+namespace+"/c1: ") {
			t.Errorf("Events %q", events)
		}
		changed = h.get("c1")
		assert.NoError(t, unstructured.SetNestedField(changed.Object, "ftp://c1.example", "spec", "apiEndpoint"))
		h.Put(changed)
		h.Settle()
		h.expectConditions("c1", malformedConditions)
	})
}

// TestRotatedTokenIsUsedAtOnce checks that the next request has the new token.
func TestRotatedTokenIsUsedAtOnce(t *testing.T) {
	server := federation.NewServer(t)
	synctest.Test(t, func(t *testing.T) {
		h := newHost(t, true, newKubeFedCluster("c1", server.Spec()), secret("c1", "good"), newKubeFedCluster("c2", server.Spec()), secret("c2", "other"))
		before := server.Probes()
		h.Put(secret("c1", "new"))
		h.Settle()
		if got, want := server.Tokens()[before:], []string{"new", "new"}; !slices.Equal(got, want) {
			t.Errorf("tokens %q, want %q: no other cluster is asked", got, want)
		}
		h.expectConditions("c1", readyConditions)
		h.expectWrites(statusPatch+"c1", statusPatch+"c2")
	})
}

// TestKubeFedConfigSetsTheProbes has a KubeFedConfig, and a KubeFedCluster and a KubeFedConfig that do not
// count.
func TestKubeFedConfigSetsTheProbes(t *testing.T) {
	server := federation.NewServer(t)
	synctest.Test(t, func(t *testing.T) {
		config := func(configNamespace, period string) *unstructured.Unstructured {
			u := &unstructured.Unstructured{Object: map[string]any{"spec": map[string]any{"scope": "Cluster", "clusterHealthCheck": map[string]any{"period": period, "failureThreshold": int64(1)}}}}
			u.SetGroupVersionKind(federation.KubeFedConfigs.GroupVersion().WithKind("KubeFedConfig"))
			u.SetNamespace(configNamespace)
			u.SetName(policy.ConfigName)
			return u
		}
		elsewhere := newKubeFedCluster("c2", server.Spec())
		elsewhere.SetNamespace("shop")
		h := newHost(t, true, config(namespace, "1s"), config("shop", "1h"), newKubeFedCluster("c1", server.Spec()), secret("c1", "good"), elsewhere)
		h.expectWrites(statusPatch + "c1")
		server.SetAnswer(500)
		h.Sleep(2 * time.Second) // two probes, whatever the first one waits for
		h.expectConditions("c1", notReadyConditions)
		h.expectWrites(statusPatch + "c1")
	})
}
