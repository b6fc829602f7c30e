// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package scaleschedule

import (
	"slices"

	autoscalingv2 "k8s.io/api/autoscaling/v2"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/tools/cache"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/scaleschedule/policy"
	"github.com/quartermaster-dev/quartermaster/pkg/informers"
)

// kind is a kind of workload, or Namespaces.
type kind struct {
	policy.Kind
	// plural is the name in the flag.
	plural   string
	resource schema.GroupVersionResource
	// optional says that the cluster need not have the resource.
	optional bool
	informer *informers.Informer[*informers.Object]
}

// kinds returns all kinds in the order of the documentation.
func kinds() []*kind {
	return []*kind{
		{Kind: policy.Deployment, plural: "deployments", resource: informers.Deployments},
		{Kind: policy.StatefulSet, plural: "statefulsets", resource: informers.StatefulSets},
		{Kind: policy.CronJob, plural: "cronjobs", resource: informers.CronJobs},
		{Kind: policy.Autoscaler, plural: "horizontalpodautoscalers", resource: autoscalingv2.SchemeGroupVersion.WithResource("horizontalpodautoscalers")},
		{Kind: policy.Rollout, plural: "rollouts.argoproj.io", optional: true,
			resource: schema.GroupVersionResource{Group: "argoproj.io", Version: "v1alpha1", Resource: "rollouts"}},
		{Kind: policy.ScaledObject, plural: "scaledobjects.keda.sh", optional: true,
			resource: schema.GroupVersionResource{Group: "keda.sh", Version: "v1alpha1", Resource: "scaledobjects"}},
	}
}

// watchedKinds returns the kinds that cfg names, and HorizontalPodAutoscalers, which may scale workloads.
func (c *Config) watchedKinds() []*kind {
	return slices.DeleteFunc(kinds(), func(k *kind) bool { return !c.scales(k) && k.Kind != policy.Autoscaler })
}

// scales reports whether cfg names a kind.
func (c *Config) scales(k *kind) bool { return slices.Contains(c.Kinds, k.plural) }

// needs returns what the cache keeps.
func (c *Config) needs() (needs []informers.Need) {
	evaluator := c.evaluator()
	for _, k := range c.watchedKinds() {
		needs = append(needs, informers.Need{Resource: k.resource, Digest: informers.DigestOf(evaluator.Digest), Optional: k.optional})
	}
	if len(c.Scope) == 0 {
		needs = append(needs, informers.Need{Resource: informers.Namespaces, Form: informers.Metadata, Digest: informers.DigestOf(evaluator.DigestNamespace), ClusterScoped: true})
	}
	return needs
}

// permissions returns exactly what the controller does itself.
func (c *Config) permissions() (rules []rbacv1.PolicyRule) {
	allow := func(resource schema.GroupVersionResource, verbs ...string) {
		rules = append(rules, rbacv1.PolicyRule{APIGroups: []string{resource.Group}, Resources: []string{resource.Resource}, Verbs: verbs})
	}
	for _, k := range c.watchedKinds() {
		if c.scales(k) {
			allow(k.resource, "get", "patch")
		}
	}
	if c.Compat {
		allow(informers.Deployments, "list") // to warn of the originals
	}
	return rules
}

// objectKey names a workload or a Namespace.
type objectKey struct {
	*kind
	cache.ObjectName
}

// String returns deployments/shop/a.
func (k objectKey) String() string { return k.plural + "/" + k.ObjectName.String() }

// Tenant returns the namespace, in whose turn the queue takes the key.
func (k objectKey) Tenant() string {
	if k.Namespace == "" {
		return k.Name // a Namespace
	}
	return k.Namespace
}
