// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package federation_test

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/yaml"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/controllertest"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/federation"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/federation/policy"
)

// fed is a host with two clusters, c1 and c2, the ten types, and the FederatedNamespace shop in both.
type fed struct {
	*controllertest.Host
	t       *testing.T
	clients map[apiServer]dynamic.Interface
	c1, c2  *controllertest.Cluster
}

// apiServer is the host's API server or a cluster's.
type apiServer interface {
	Put(objects ...runtime.Object)
	Writes() []string
	RESTConfig() *rest.Config
}

// settleTime is longer than availableDelay, after which placement may delete.
const settleTime = 30 * time.Second

// object reads an object from YAML.
func object(t *testing.T, text string) *unstructured.Unstructured {
	t.Helper()
	data, err := yaml.YAMLToJSON([]byte(text))
	if err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	u := &unstructured.Unstructured{}
	if err := u.UnmarshalJSON(data); err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	return u
}

// federated is an object of a federated type in the namespace shop; spec is YAML in one line.
func federated(t *testing.T, kind, name, spec string) *unstructured.Unstructured {
	t.Helper()
	return object(t, fmt.Sprintf("{apiVersion: types.kubefed.io/v1beta1, kind: Federated%s, metadata: {namespace: shop, name: %s}, spec: %s}", kind, name, spec))
}

const bothClusters = "placement: {clusters: [{name: c1}, {name: c2}]}"

// configMap is the federated object of most rows.
func configMap(t *testing.T) *unstructured.Unstructured {
	t.Helper()
	return federated(t, "ConfigMap", "f", "{template: {data: {a: b}}, "+bothClusters+"}")
}

func kubeFedCluster(c *controllertest.Cluster, name string) *unstructured.Unstructured {
	spec := policy.ClusterSpec{APIEndpoint: c.Address}
	u := newKubeFedCluster(name, spec)
	u.SetLabels(map[string]string{"name": name})
	return u
}

func newFed(t *testing.T, objects ...runtime.Object) *fed {
	t.Helper()
	return newFedWith(t, nil, objects...)
}

// newFedWith is newFed with flags.
func newFedWith(t *testing.T, flags []string, objects ...runtime.Object) *fed {
	t.Helper()
	const deploy = "../../../deploy/federation/"
	host := controllertest.Setup{Entries: []controllers.Entry{federation.Entry()}, Flags: append(flags, "--federation-unsafe-endpoints")}.NewHost(t,
		controllertest.ReadYAML(t, deploy+"crds/core.yaml", deploy+"crds/federated.yaml", deploy+"crds/scheduling.yaml", deploy+"crds/dns.yaml", "testdata/dnsendpoint.yaml", deploy+"types.yaml")...)
	f := &fed{Host: host, t: t, clients: map[apiServer]dynamic.Interface{}}
	f.c1, f.c2 = host.AddCluster("c1"), host.AddCluster("c2")
	f.Put(secret("c1", "one"), secret("c2", "two"))
	f.Settle()
	f.Put(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop"}}, federated(t, "Namespace", "shop", "{"+bothClusters+"}"),
		kubeFedCluster(f.c1, "c1"), kubeFedCluster(f.c2, "c2"))
	f.Put(objects...)
	f.Sleep(settleTime)
	return f
}

// runWithConfigMap runs a test with the federated object in both clusters.
func runWithConfigMap(t *testing.T, test func(f *fed)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		f := newFed(t, configMap(t))
		for _, c := range []*controllertest.Cluster{f.c1, f.c2} {
			writes := c.Writes()
			if slices.Sort(writes); !slices.Equal(writes, []string{configMapCreate, "create namespaces shop"}) {
				t.Errorf("wrote %q", writes)
			}
		}
		f.Writes()
		test(f)
	})
}

// expectWrites checks what was written since the last call.
func (f *fed) expectWrites(server apiServer, want ...string) {
	f.t.Helper()
	if got := server.Writes(); !slices.Equal(got, want) {
		f.t.Errorf("wrote %q, want %q", got, want)
	}
}

// resources are those that tests read.
var resources = map[string]schema.GroupVersionResource{
	"FederatedConfigMap":   {Group: "types.kubefed.io", Version: "v1beta1", Resource: "federatedconfigmaps"},
	"FederatedNamespace":   {Group: "types.kubefed.io", Version: "v1beta1", Resource: "federatednamespaces"},
	"FederatedDeployment":  {Group: "types.kubefed.io", Version: "v1beta1", Resource: "federateddeployments"},
	"FederatedReplicaSet":  {Group: "types.kubefed.io", Version: "v1beta1", Resource: "federatedreplicasets"},
	"FederatedClusterRole": {Group: "types.kubefed.io", Version: "v1beta1", Resource: "federatedclusterroles"},
	"PropagatedVersion":    federation.PropagatedVersions, "KubeFedCluster": federation.KubeFedClusters, "FederatedTypeConfig": federation.FederatedTypeConfigs,
	"CustomResourceDefinition": federation.CustomResourceDefinitions,
	"FederatedJob":             {Group: "types.kubefed.io", Version: "v1beta1", Resource: "federatedjobs"},
	"Job":                      {Group: "batch", Version: "v1", Resource: "jobs"},
	"ConfigMap":                {Version: "v1", Resource: "configmaps"},
	"Namespace":                {Version: "v1", Resource: "namespaces"},
	"Deployment":               {Group: "apps", Version: "v1", Resource: "deployments"},
	"ClusterRole":              {Group: "rbac.authorization.k8s.io", Version: "v1", Resource: "clusterroles"},
}

// get returns an object, or nil.
func (f *fed) get(server apiServer, kind, namespace, name string) *unstructured.Unstructured {
	f.t.Helper()
	client := f.clients[server]
	if client == nil {
		var err error
		if client, err = dynamic.NewForConfig(server.RESTConfig()); err != nil {
			f.t.Fatal(err)
		}
		f.clients[server] = client
	}
	u, err := client.Resource(resources[kind]).Namespace(namespace).Get(f.t.Context(), name, metav1.GetOptions{})
	if err != nil {
		return nil
	}
	return u
}

// change changes an object by a function, as somebody else does.
func (f *fed) change(server apiServer, kind, namespace, name string, mutate func(*unstructured.Unstructured)) {
	f.t.Helper()
	u := f.get(server, kind, namespace, name)
	if u == nil {
		f.t.Fatalf("there is no %s %s/%s", kind, namespace, name)
	}
	mutate(u)
	server.Put(u)
}

// set changes a field, whose value is YAML; "" removes it.
func (f *fed) set(server apiServer, kind, namespace, name, value string, path ...string) {
	f.t.Helper()
	f.change(server, kind, namespace, name, func(u *unstructured.Unstructured) {
		if value == "" {
			unstructured.RemoveNestedField(u.Object, path...)
			return
		}
		assert.NoError(f.t, unstructured.SetNestedField(u.Object, object(f.t, "{apiVersion: v1, kind: V, x: "+value+"}").Object["x"], path...))
	})
}

// setSpec changes a field of the spec of the federated object.
func (f *fed) setSpec(value string, path ...string) {
	f.t.Helper()
	f.set(f.Host, "FederatedConfigMap", "shop", "f", value, append([]string{"spec"}, path...)...)
}

// expectStatus checks the status of the federated object, such as "CheckClusters c1=APINotAvailable c2=".
func (f *fed) expectStatus(kind, name, want string) {
	f.t.Helper()
	u := f.get(f.Host, kind, "shop", name)
	if u == nil {
		if want != "gone" {
			f.t.Errorf("%s %s is gone, want %q", kind, name, want)
		}
		return
	}
	s := policy.ReadFederated(u).Status
	var parts []string
	for _, c := range s.Conditions {
		if c.Reason != "" {
			parts = append(parts, c.Reason)
		}
	}
	for _, c := range s.Clusters {
		parts = append(parts, c.Name+"="+c.Status)
	}
	if got := strings.Join(parts, " "); got != want {
		f.t.Errorf("%s %s has the status %q, want %q", kind, name, got, want)
	}
}

// expectPropagated checks which clusters the PropagatedVersion of the federated object has.
func (f *fed) expectPropagated(want ...string) {
	f.t.Helper()
	var got []string
	if u := f.get(f.Host, "PropagatedVersion", "shop", "configmap-f"); u != nil {
		got = slices.Sorted(maps.Keys(policy.ReadPropagated(u).Clusters))
	}
	if !slices.Equal(got, want) {
		f.t.Errorf("the PropagatedVersion has the clusters %q, want %q", got, want)
	}
}

// expectWarnings checks the reasons of all Warnings so far, without repetitions.
func (f *fed) expectWarnings(want ...string) {
	f.t.Helper()
	var got []string
	for _, event := range f.Events() {
		if words := strings.Fields(event); words[0] == "Warning" && !slices.Contains(got, words[1]) {
			got = append(got, words[1])
		}
	}
	slices.Sort(got)
	if !slices.Equal(got, want) {
		f.t.Errorf("Warnings %q, want %q", got, want)
	}
}

// expectConfigMap checks whether a cluster has the federated object's ConfigMap, and whether it is managed.
func (f *fed) expectConfigMap(cluster *controllertest.Cluster, want string) {
	f.t.Helper()
	got := "gone"
	if u := f.get(cluster, "ConfigMap", "shop", "f"); u != nil {
		got = "unlabelled"
		if u.GetLabels()[policy.ManagedLabel] == "true" {
			got = "managed"
		}
	}
	if got != want {
		f.t.Errorf("%s is %s, want %s", cluster.Address, got, want)
	}
}
