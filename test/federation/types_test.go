// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package federation tests deploy/federation and the controller federation on real API servers, and runs
// KubeFed's own tests against the controller.
package federation

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"
	"k8s.io/client-go/dynamic"
	"sigs.k8s.io/yaml"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/federation/policy"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

const namespace = "kube-federation-system"

var (
	definitions = schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"}
	typeConfigs = schema.GroupVersionResource{Group: policy.CoreGroup, Version: "v1beta1", Resource: "federatedtypeconfigs"}
)

// auditPolicy lets the logs of the host and of members have the contents of ConfigMaps and federated objects.
const auditPolicy = `apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
omitManagedFields: true
rules:
- {level: None, nonResourceURLs: ["/healthz*", "/livez*", "/readyz*"]}
- level: RequestResponse
  verbs: [create, update, patch, delete]
  resources: [{resources: [configmaps]}, {group: types.kubefed.io}, {group: coordination.k8s.io, resources: [leases]}]
- level: Metadata
`

var shared *fleet.Fleet

func TestMain(m *testing.M) {
	os.Exit(fleet.Main(m, &shared, fleet.Options{Cluster: cluster.Options{AuditPolicy: auditPolicy}}, func(ctx context.Context) error {
		crds := "../../deploy/federation/crds/"
		const dnsEndpoint = "../../../pkg/controllers/federation/testdata/dnsendpoint.yaml" // external-dns's own
		if err := errors.Join(shared.ApplyDir(ctx, crds), shared.ApplyDir(ctx, crds+dnsEndpoint)); err != nil {
			return err
		}
		for _, file := range []string{"core.yaml", "federated.yaml", "scheduling.yaml", "dns.yaml", dnsEndpoint} {
			if err := shared.WaitForCRDs(ctx, crds+file); err != nil {
				return err
			}
		}
		return shared.ApplyDir(ctx, "../../deploy/federation")
	}))
}

// object reads YAML without an apiVersion, whose kind has it.
func object(t *testing.T, text string) *unstructured.Unstructured {
	t.Helper()
	data, err := yaml.YAMLToJSON([]byte("{" + text + "}"))
	if err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	u := &unstructured.Unstructured{}
	if err := u.UnmarshalJSON(data); err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	u.SetAPIVersion("core.kubefed.io/v1beta1")
	switch kind := u.GetKind(); {
	case strings.HasPrefix(kind, "Federated") && kind != "FederatedTypeConfig":
		u.SetAPIVersion("types.kubefed.io/v1beta1")
	case strings.HasSuffix(kind, "DNSRecord") || kind == "Domain":
		u.SetAPIVersion("multiclusterdns.kubefed.io/v1alpha1")
	case kind == "ReplicaSchedulingPreference":
		u.SetAPIVersion("scheduling.kubefed.io/v1alpha1")
	case strings.HasSuffix(kind, "PropagatedVersion"):
		u.SetAPIVersion("core.kubefed.io/v1alpha1")
	}
	if u.GetName() == "" {
		u.SetName("f")
	}
	if u.GetKind() != "ClusterPropagatedVersion" && u.GetKind() != "FederatedClusterRole" {
		u.SetNamespace(namespace)
	}
	return u
}

func client(u *unstructured.Unstructured) dynamic.ResourceInterface {
	gvk := u.GroupVersionKind()
	plural := strings.ToLower(gvk.Kind) + "s"
	if strings.HasSuffix(gvk.Kind, "s") {
		plural = strings.ToLower(gvk.Kind) + "es"
	}
	return shared.Objects.Resource(gvk.GroupVersion().WithResource(plural)).Namespace(u.GetNamespace())
}

// TestTypesRunOnARealControlPlane reads what is installed as the controller reads it.
func TestTypesRunOnARealControlPlane(t *testing.T) {
	ctx := fleet.Within(t.Context(), t, fleet.Patience)
	list, err := shared.Objects.Resource(typeConfigs).Namespace(namespace).List(ctx, metav1.ListOptions{})
	assert.NoError(t, err)
	var configs []policy.TypeConfig
	for i := range list.Items {
		configs = append(configs, policy.ReadTypeConfig(&list.Items[i]))
	}
	if len(configs) != 10 {
		t.Errorf("%d types, want 10", len(configs))
	}
	for _, c := range configs {
		runs, warning := c.Runs(configs, policy.DefaultConfig(), func(gr schema.GroupResource) bool {
			_, err := shared.Objects.Resource(definitions).Get(ctx, gr.String(), metav1.GetOptions{})
			return err == nil
		})
		if !runs {
			t.Errorf("%s does not run: %v", c.Name, warning)
		}
		// What the FederatedTypeConfig says of the two types is what the API server serves.
		for _, r := range []policy.Resource{c.Target, c.Federated} {
			served, err := shared.Admin.Discovery().ServerResourcesForGroupVersion(r.APIVersion())
			assert.NoError(t, err)
			if !slices.ContainsFunc(served.APIResources, func(api metav1.APIResource) bool {
				return api.Name == r.PluralName && api.Kind == r.Kind && api.Namespaced == r.Namespaced()
			}) {
				t.Errorf("%s: the API server does not serve %+v", c.Name, r)
			}
		}
	}
	config, err := shared.Objects.Resource(schema.GroupVersionResource{Group: policy.CoreGroup, Version: "v1beta1", Resource: "kubefedconfigs"}).
		Namespace(namespace).Get(ctx, policy.ConfigName, metav1.GetOptions{})
	assert.NoError(t, err)
	if got, err := policy.ReadConfig(config.Object); err != nil || got != policy.DefaultConfig() {
		t.Errorf("%+v, %v", got, err)
	}
}

func TestManagerWithoutFederationReadsNothingOfIt(t *testing.T) {
	ctx, begin := fleet.Context(t), time.Now()
	m := shared.RunLeader(ctx, t)
	fleet.Eventually(ctx, t, func() error { return fleet.Ready(m) })
	requests := shared.AuditSince(t, begin, func(e auditv1.Event) bool { return cluster.AuditPod(e) == m.Pod && e.ObjectRef != nil })
	if len(requests) == 0 {
		t.Error("the log has no request of the manager")
	}
	for _, e := range requests {
		if strings.Contains(e.ObjectRef.APIGroup, "kubefed.io") || e.ObjectRef.APIGroup == definitions.Group || e.ObjectRef.Namespace == namespace {
			t.Errorf("%s %s", e.Verb, e.RequestURI)
		}
	}
}

func TestSchemasOfKubeFedRefuseMistakes(t *testing.T) {
	const (
		widgets       = "kind: FederatedTypeConfig, metadata: {name: widgets.example.com}, spec: {propagation: Enabled, "
		target        = "targetType: {group: example.com, version: v1, kind: Widget, pluralName: widgets, scope: Namespaced}"
		federatedType = "federatedType: {group: types.kubefed.io, version: v1beta1, kind: FederatedWidget, scope: Namespaced}"
		cluster       = "kind: KubeFedCluster, spec: {apiEndpoint: 'https://c1', secretRef: {name: s}"
	)
	tests := map[string]struct {
		object string
		// problem is a part of the message.
		problem string
	}{
		"a cluster":                 {object: cluster + "}"},
		"a cluster with everything": {object: cluster + ", caBundle: Y2E=, disabledTLSValidations: [SubjectName, ValidityPeriod], proxyURL: 'socks5://p:1080'}"},
		"an empty apiEndpoint":      {object: "kind: KubeFedCluster, spec: {apiEndpoint: '', secretRef: {name: s}}", problem: "spec.apiEndpoint"},
		"no apiEndpoint":            {object: "kind: KubeFedCluster, spec: {secretRef: {name: s}}", problem: "spec.apiEndpoint"},
		"no Secret":                 {object: "kind: KubeFedCluster, spec: {apiEndpoint: 'https://c1'}", problem: "spec.secretRef"},
		"a Secret without a name":   {object: "kind: KubeFedCluster, spec: {apiEndpoint: 'https://c1', secretRef: {name: ''}}", problem: "spec.secretRef.name"},
		"* alone":                   {object: cluster + ", disabledTLSValidations: ['*']}"},
		"* and something else":      {object: cluster + ", disabledTLSValidations: ['*', SubjectName]}", problem: "stands alone"},
		"an unknown check":          {object: cluster + ", disabledTLSValidations: [Revocation]}", problem: "disabledTLSValidations"},
		"a proxy of another scheme": {object: cluster + ", proxyURL: 'ftp://p'}", problem: "proxyURL"},
		"an empty proxy":            {object: cluster + ", proxyURL: ''}"},
		"a type":                    {object: widgets + target + ", " + federatedType + "}"},
		"a type that takes plural and group from its name": {object: widgets + "targetType: {version: v1, kind: Widget, scope: Namespaced}, " + federatedType + "}"},
		"a type of another plural":                         {object: strings.Replace(widgets, "widgets", "gadgets", 1) + target + ", " + federatedType + "}", problem: "target's plural"},
		"a type of another group":                          {object: strings.Replace(widgets, "example.com", "example.org", 1) + target + ", " + federatedType + "}", problem: "target's group"},
		"a type whose name lacks the group":                {object: strings.Replace(widgets, ".example.com", "", 1) + target + ", " + federatedType + "}", problem: "target's group"},
		"a federated group without a dot":                  {object: widgets + target + ", " + strings.Replace(federatedType, "types.kubefed.io", "types", 1) + "}", problem: "has a dot"},
		"a target without a kind":                          {object: widgets + "targetType: {version: v1, scope: Namespaced}, " + federatedType + "}", problem: "targetType.kind"},
		"a target of an unknown scope":                     {object: widgets + "targetType: {version: v1, kind: Widget, scope: Wide}, " + federatedType + "}", problem: "targetType.scope"},
		"a type without a federated type":                  {object: widgets + target + "}", problem: "federatedType"},
		"propagation that is neither on nor off":           {object: strings.Replace(widgets, "Enabled", "Perhaps", 1) + target + ", " + federatedType + "}", problem: "propagation"},
		"status collection that is neither on nor off":     {object: widgets + "statusCollection: Perhaps, " + target + ", " + federatedType + "}", problem: "statusCollection"},
		"a configuration with what KubeFed alone reads": {object: "kind: KubeFedConfig, spec: {scope: Namespaced, leaderElect: {resourceLock: configmaps}, controllerDuration: {cacheSyncTimeout: 5m}, " +
			"syncController: {maxConcurrentReconciles: 1}, statusController: {maxConcurrentReconciles: 1}}"},
		"a configuration of an unknown scope":          {object: "kind: KubeFedConfig, spec: {scope: Galaxy}", problem: "spec.scope"},
		"a configuration without a scope":              {object: "kind: KubeFedConfig, spec: {}", problem: "spec.scope"},
		"a threshold of 0":                             {object: "kind: KubeFedConfig, spec: {scope: Cluster, clusterHealthCheck: {failureThreshold: 0}}", problem: "failureThreshold"},
		"a gate that is neither on nor off":            {object: "kind: KubeFedConfig, spec: {scope: Cluster, featureGates: [{name: PushReconciler, configuration: Perhaps}]}", problem: "configuration"},
		"adoption that is neither on nor off":          {object: "kind: KubeFedConfig, spec: {scope: Cluster, syncController: {adoptResources: Perhaps}}", problem: "adoptResources"},
		"a federated object with an unknown operation": {object: "kind: FederatedConfigMap, spec: {overrides: [{clusterName: c, clusterOverrides: [{op: move, path: /x}]}]}", problem: "op"},
		"an operation without a path":                  {object: "kind: FederatedConfigMap, spec: {overrides: [{clusterName: c, clusterOverrides: [{op: add}]}]}", problem: "path"},
		"a preference with everything": {object: "kind: ReplicaSchedulingPreference, spec: {targetKind: FederatedReplicaSet, totalReplicas: 9, rebalance: true, intersectWithClusterSelector: true, " +
			"clusters: {c: {minReplicas: 1, maxReplicas: 2, weight: 3}, '*': {}}}"},
		"a preference without a total":            {object: "kind: ReplicaSchedulingPreference, spec: {targetKind: FederatedDeployment}", problem: "totalReplicas"},
		"a preference of a type without replicas": {object: "kind: ReplicaSchedulingPreference, spec: {targetKind: FederatedConfigMap, totalReplicas: 1}", problem: "targetKind"},
		"a negative weight":                       {object: "kind: ReplicaSchedulingPreference, spec: {targetKind: FederatedDeployment, totalReplicas: 1, clusters: {c: {weight: -1}}}", problem: "weight"},
		"replicas that are retained":              {object: "kind: FederatedDeployment, spec: {retainReplicas: true}"},
		"a federated object without a spec":       {object: "kind: FederatedClusterRole"},
		"what was written where, in a namespace":  {object: "kind: PropagatedVersion"},
		"what was written where, in none":         {object: "kind: ClusterPropagatedVersion"},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			u := object(t, tc.object)
			_, err := client(u).Create(t.Context(), u, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}, FieldValidation: metav1.FieldValidationStrict})
			if tc.problem == "" && err != nil || tc.problem != "" && (err == nil || !strings.Contains(err.Error(), tc.problem)) {
				t.Errorf("%v, want %q", err, tc.problem)
			}
		})
	}
}

func TestScopeIsImmutable(t *testing.T) {
	configs := shared.Objects.Resource(schema.GroupVersionResource{Group: policy.CoreGroup, Version: "v1beta1", Resource: "kubefedconfigs"}).Namespace(namespace)
	u, err := configs.Get(t.Context(), policy.ConfigName, metav1.GetOptions{})
	assert.NoError(t, err)
	assert.NoError(t, unstructured.SetNestedField(u.Object, "Namespaced", "spec", "scope"))
	if _, err := configs.Update(t.Context(), u, metav1.UpdateOptions{}); err == nil || !strings.Contains(err.Error(), "cannot change") {
		t.Error(err)
	}
}

// TestFederatedObjectIsStored has what a schema may prune or default: nulls, unknown fields, a
// number that a float64 cannot hold.
func TestFederatedObjectIsStored(t *testing.T) {
	u := object(t, "kind: FederatedConfigMap, spec: {template: {metadata: {creationTimestamp: null, labels: {a: b}}, data: {a: b}, x: [1.5, 9007199254740993, null]}, "+
		"placement: {clusterSelector: {matchExpressions: [{key: a, operator: Near}]}}, overrides: [{clusterName: c, clusterOverrides: ["+
		"{path: /data/a, value: null}, {path: /data/b, value: ''}, {path: /x, value: {a: [1, null]}}, {op: '', path: /y, value: 7}]}]}")
	stored, err := client(u).Create(t.Context(), u, metav1.CreateOptions{})
	assert.NoError(t, err)
	u.SetGeneration(stored.GetGeneration())
	if got, want := string(policy.SummarizeFederated(stored)), string(policy.SummarizeFederated(u)); got != want {
		t.Errorf("stored as %s, sent as %s", got, want)
	}
}

// TestStatusIsStored writes each status that the controller writes.
func TestStatusIsStored(t *testing.T) {
	now := time.Now().Truncate(time.Second)
	cluster, _ := policy.ClusterStatus{}.Next(policy.Health{State: policy.NoAnswer, Error: "refused"}, "v1.36.3", now)
	federated, _ := policy.FederatedStatus{}.Next(policy.Conclusion{Generation: 1, Clusters: []policy.ClusterResult{{Name: "c", Status: policy.CreationFailed}}}, now)
	propagated := policy.Propagated{Versions: policy.Versions{Template: "t", Overrides: "o"}, Clusters: map[string]string{"c": "gen:1"}}
	runs, _ := (&policy.TypeConfig{Generation: 1}).NextStatus(true, policy.DefaultConfig())
	tests := map[string]struct {
		object   string
		status   any
		isStored func(*unstructured.Unstructured) bool
	}{
		"the status of a KubeFedCluster": {"kind: KubeFedCluster, spec: {apiEndpoint: 'https://c1', secretRef: {name: s}}", cluster, func(u *unstructured.Unstructured) bool {
			_, write := policy.ReadCluster(u).Status.Next(policy.Health{State: policy.NoAnswer}, "", now)
			return !write
		}},
		"the status of a federated object": {"kind: FederatedSecret", federated, func(u *unstructured.Unstructured) bool {
			return policy.ReadFederated(u).Status.Hash() == federated.Hash()
		}},
		"the status of a PropagatedVersion":        {"kind: PropagatedVersion", propagated.Status(), func(u *unstructured.Unstructured) bool { return policy.ReadPropagated(u).Equal(propagated) }},
		"the status of a ClusterPropagatedVersion": {"kind: ClusterPropagatedVersion", propagated.Status(), func(u *unstructured.Unstructured) bool { return policy.ReadPropagated(u).Equal(propagated) }},
		"the status of a FederatedTypeConfig": {"kind: FederatedTypeConfig, metadata: {name: widgets}, spec: {propagation: Disabled, targetType: {version: v1, kind: Widget, scope: Namespaced}, " +
			"federatedType: {group: types.kubefed.io, version: v1beta1, kind: FederatedWidget, scope: Namespaced}}", runs,
			func(u *unstructured.Unstructured) bool { return policy.ReadTypeConfig(u).Status == runs }},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			u := object(t, tc.object)
			if _, err := client(u).Create(t.Context(), u, metav1.CreateOptions{}); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				if err := client(u).Delete(context.Background(), u.GetName(), metav1.DeleteOptions{}); err != nil {
					t.Error(err)
				}
			})
			patch, err := json.Marshal(map[string]any{"status": tc.status})
			assert.NoError(t, err)
			stored, err := client(u).Patch(t.Context(), u.GetName(), types.MergePatchType, patch, metav1.PatchOptions{}, "status")
			assert.NoError(t, err)
			if !tc.isStored(stored) {
				t.Errorf("stored as %v", stored.Object["status"])
			}
		})
	}
}
