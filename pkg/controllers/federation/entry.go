// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package federation

import (
	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/rest"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/federation/policy"
	"github.com/quartermaster-dev/quartermaster/pkg/informers"
)

// Name is the controller's name. The names of its loops begin with it.
const Name = "federation"

// Entry describes the controller to the host. It is off by default: it writes in other clusters.
func Entry() controllers.Entry {
	flags := NewConfig()
	return controllers.Entry{
		Name:         Name,
		Summary:      "propagates objects to other clusters, as KubeFed does",
		OffByDefault: true,
		Config:       &flags,
		Needs:        func(controllers.Settings) ([]informers.Need, error) { return flags.needs(), nil },
		Permissions:  func(controllers.Settings) []rbacv1.PolicyRule { return flags.permissions() },
		NamespacePermissions: func(controllers.Settings) map[string][]rbacv1.PolicyRule {
			return map[string][]rbacv1.PolicyRule{flags.Namespace: flags.namespacePermissions()}
		},
		Command: func(connect func() (controllers.Settings, *rest.Config, error)) *cobra.Command {
			return newCommand(&flags, connect)
		},
		New: func(h controllers.Host) (controllers.Controller, error) {
			cfg := flags
			cfg.ProtectedNamespaces = append([]string{cfg.Namespace}, h.Settings.OwnNamespaces...)
			return newController(cfg, h)
		},
	}
}

// needs returns the resources that do not depend on a FederatedTypeConfig: a federated type is followed while
// it runs.
func (c *Config) needs() []informers.Need {
	whole := func(n informers.Need) informers.Need {
		n.Namespace, n.Form = c.Namespace, informers.Unstructured
		return n
	}
	versions := informers.DigestOf(policy.SummarizePropagated)
	needs := []informers.Need{
		whole(informers.Need{Resource: kubeFedClusters}), whole(informers.Need{Resource: kubeFedConfigs}),
		whole(informers.Need{Resource: federatedTypeConfigs}),
		{Resource: informers.Secrets, Namespace: c.Namespace, FieldSelector: informers.NotHelm},
		{Resource: informers.ConfigMaps, Namespace: c.Namespace, LabelSelector: policy.WriteOffLabel + "=true", Form: informers.Typed, Content: true},
		{Resource: informers.Namespaces, ClusterScoped: true},
		{Resource: customResourceDefinitions, ClusterScoped: true},
		{Resource: propagatedVersions, Digest: versions},
		{Resource: clusterPropagatedVersions, ClusterScoped: true, Digest: versions},
		{Resource: replicaSchedulingPreferences, Form: informers.Unstructured, Optional: true},
	}
	if c.DNS {
		needs = append(needs, whole(informers.Need{Resource: domains}))
		for _, resource := range []schema.GroupVersionResource{serviceDNSRecords, ingressDNSRecords, c.dnsEndpoints()} {
			needs = append(needs, informers.Need{Resource: resource, Form: informers.Unstructured})
		}
	}
	return needs
}

func policyRule(group string, resources []string, verbs ...string) rbacv1.PolicyRule {
	return rbacv1.PolicyRule{APIGroups: []string{group}, Resources: resources, Verbs: verbs}
}

// permissions holds for the types that deploy/federation installs. For federated types of another group, the
// administrator has to grant such rules.
func (c *Config) permissions() []rbacv1.PolicyRule {
	rules := []rbacv1.PolicyRule{
		policyRule("types.kubefed.io", []string{"*"}, "get", "list", "watch", "update", "patch"),
		policyRule(policy.CoreGroup, []string{"propagatedversions", "clusterpropagatedversions"}, "get", "create", "delete"),
		policyRule(policy.CoreGroup, []string{"propagatedversions/status", "clusterpropagatedversions/status"}, "patch"),
		policyRule("apiextensions.k8s.io", []string{"customresourcedefinitions"}, "get"),
	}
	if c.DNS {
		rules = append(rules, policyRule(policy.DNSGroup, []string{serviceDNSRecords.Resource + "/status", ingressDNSRecords.Resource + "/status"}, "patch"),
			policyRule(c.DNSEndpointGroup, []string{"dnsendpoints"}, "create", "patch"))
	}
	return rules
}

// namespacePermissions holds in the federation namespace, where the tokens of all clusters are.
func (c *Config) namespacePermissions() []rbacv1.PolicyRule {
	kubefed := policyRule("", []string{"endpoints"}, "get")
	kubefed.ResourceNames = []string{kubeFedLock}
	return []rbacv1.PolicyRule{
		policyRule("", []string{"secrets"}, "get"),
		policyRule("", []string{"configmaps"}, "get", "create", "update", "delete"),
		policyRule(policy.CoreGroup, []string{"kubefedclusters", "federatedtypeconfigs"}, "patch"),
		policyRule(policy.CoreGroup, []string{"kubefedclusters/status", "federatedtypeconfigs/status"}, "patch"),
		kubefed,
	}
}

// informerSet holds the informers of the needs.
type informerSet struct {
	clusters, configs, types, preferences *informers.Informer[*unstructured.Unstructured]
	secrets, namespaces, definitions      *informers.Informer[metav1.Object]
	propagated, clusterPropagated         *informers.Informer[*informers.Object]
	writeOffs                             *informers.Informer[*corev1.ConfigMap]
}

// all returns the caches for which all loops wait. Those of DNS are missing: only the loop that watches them
// waits until their types exist.
func (i informerSet) all() []controllers.Awaited {
	return []controllers.Awaited{i.clusters, i.configs, i.types, i.preferences, i.secrets, i.namespaces, i.definitions,
		i.propagated, i.clusterPropagated, i.writeOffs}
}

func newInformerSet(h controllers.Host) informerSet {
	return informerSet{
		informers.For[*unstructured.Unstructured](h, kubeFedClusters), informers.For[*unstructured.Unstructured](h, kubeFedConfigs),
		informers.For[*unstructured.Unstructured](h, federatedTypeConfigs), informers.For[*unstructured.Unstructured](h, replicaSchedulingPreferences),
		informers.For[metav1.Object](h, informers.Secrets), informers.For[metav1.Object](h, informers.Namespaces),
		informers.For[metav1.Object](h, customResourceDefinitions),
		informers.For[*informers.Object](h, propagatedVersions), informers.For[*informers.Object](h, clusterPropagatedVersions),
		informers.For[*corev1.ConfigMap](h, informers.ConfigMaps),
	}
}
