// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package configreload

import (
	"context"
	"slices"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/tools/cache"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/configreload/policy"
	"github.com/quartermaster-dev/quartermaster/pkg/informers"
)

// kindInfo is what is known of a kind without a cluster.
type kindInfo struct {
	policy.Kind
	resource schema.GroupVersionResource
	// writeVerbs are the verbs of a reload, besides get.
	writeVerbs []string
	custom     bool // its resource may be missing, and it has no Go type
}

// RolloutsResource is the resource of Argo Rollouts.
var RolloutsResource = schema.GroupVersionResource{Group: "argoproj.io", Version: "v1alpha1", Resource: "rollouts"}

// PodStatusesResource is where the Secrets Store CSI driver says what each pod has mounted.
var PodStatusesResource = schema.GroupVersionResource{
	Group: "secrets-store.csi.x-k8s.io", Version: "v1", Resource: "secretproviderclasspodstatuses",
}

var (
	jobsResource       = batchv1.SchemeGroupVersion.WithResource("jobs")
	cronJobsResource   = batchv1.SchemeGroupVersion.WithResource("cronjobs")
	namespacesResource = corev1.SchemeGroupVersion.WithResource("namespaces")
)

// kindInfos are the kinds that can be rolled.
var kindInfos = []kindInfo{
	{Kind: policy.Kind{Name: "Deployment", Pauses: true}, resource: appsv1.SchemeGroupVersion.WithResource("deployments"), writeVerbs: []string{"patch"}},
	{Kind: policy.Kind{Name: "StatefulSet"}, resource: appsv1.SchemeGroupVersion.WithResource("statefulsets"), writeVerbs: []string{"patch"}},
	{Kind: policy.Kind{Name: "DaemonSet"}, resource: appsv1.SchemeGroupVersion.WithResource("daemonsets"), writeVerbs: []string{"patch"}},
	{Kind: policy.Kind{Name: "CronJob"}, resource: cronJobsResource, writeVerbs: []string{"patch"}},
	{Kind: policy.Kind{Name: "Job", Stateless: true}, resource: jobsResource, writeVerbs: []string{"create", "delete"}},
	{Kind: policy.Kind{Name: "Rollout", Restarts: true}, resource: RolloutsResource, writeVerbs: []string{"patch"}, custom: true},
}

// pluralNames returns the kinds as the flags name them.
func pluralNames() []string {
	var names []string
	for i := range kindInfos {
		names = append(names, kindInfos[i].resource.Resource)
	}
	return names
}

// fieldManager is this controller's name in managedFields.
const fieldManager = "quartermaster-config-reload"

// informerSet is the caches that the controller reads. Any of them may be nil: a type without an
// informer is not handled.
//
// Sources are stored as [cachedSource]. Workloads are stored as [policy.Cached] with workloadAnnotations
// and the result of workloadDigest, or as the ordinary types, Rollouts as unstructured. Of
// namespaces, only the labels are read.
type informerSet struct {
	ConfigMaps, Secrets, PodStatuses      *informers.Informer[cachedSource]
	Deployments, StatefulSets, DaemonSets *informers.Informer[metav1.Object]
	CronJobs, Jobs, Rollouts              *informers.Informer[metav1.Object]
	// Namespaces is needed only with NamespaceSelector.
	Namespaces *informers.Informer[metav1.Object]
}

func sourceResource(typ policy.SourceType) schema.GroupVersionResource {
	if typ == policy.SecretProviderClass {
		return PodStatusesResource
	}
	return corev1.SchemeGroupVersion.WithResource(typ.String() + "s")
}

// resources returns the resources for which cfg needs an informer.
func resources(cfg Config) []schema.GroupVersionResource {
	var list []schema.GroupVersionResource
	for _, typ := range cfg.watchedTypes() {
		list = append(list, sourceResource(typ))
	}
	for i := range kindInfos {
		if cfg.rollsKind(&kindInfos[i]) {
			list = append(list, kindInfos[i].resource)
		}
	}
	// The Jobs of a CronJob tell whether it runs.
	if slices.Contains(list, cronJobsResource) && !slices.Contains(list, jobsResource) {
		list = append(list, jobsResource)
	}
	if cfg.needsNamespaces() {
		list = append(list, namespacesResource)
	}
	return list
}

// permissions returns exactly what the controller does itself under cfg.
func permissions(cfg Config) []rbacv1.PolicyRule {
	var rules []rbacv1.PolicyRule
	// allow adds to a rule with the same verbs and group, if there is one.
	allow := func(resource schema.GroupVersionResource, verbs ...string) {
		for i := range rules {
			if r := &rules[i]; r.APIGroups[0] == resource.Group && slices.Equal(r.Verbs, verbs) {
				r.Resources = append(r.Resources, resource.Resource)
				return
			}
		}
		rules = append(rules, rbacv1.PolicyRule{APIGroups: []string{resource.Group}, Resources: []string{resource.Resource}, Verbs: verbs})
	}
	verbs := map[schema.GroupVersionResource][]string{}
	for i := range kindInfos {
		k := &kindInfos[i]
		if !cfg.rollsKind(k) {
			continue
		}
		verbs[k.resource] = []string{"get"}
		if !cfg.DryRun {
			verbs[k.resource] = append(verbs[k.resource], k.writeVerbs...)
		}
	}
	if _, cronJobs := verbs[cronJobsResource]; cronJobs && verbs[jobsResource] == nil && !cfg.DryRun {
		verbs[jobsResource] = []string{"get", "create"}
	}
	for _, resource := range resources(cfg) {
		if v, ok := verbs[resource]; ok {
			allow(resource, v...)
		}
	}
	if cfg.Compat {
		allow(appsv1.SchemeGroupVersion.WithResource("deployments"), "list") // to warn of the original
	}
	return rules
}

// sourceAnnotations returns the keys that the cache must keep of sources.
func sourceAnnotations(cfg Config) []string { return cfg.annotationKeys().SourceKeys() }

// workloadAnnotations returns the keys that the cache must keep of workloads.
func workloadAnnotations(cfg Config) []string { return cfg.annotationKeys().WorkloadKeys() }

// workloadDigest returns the function that the cache calls on a workload. What that function returns
// is kept in place of the content.
func workloadDigest(cfg Config) func(obj runtime.Object) []byte {
	return cfg.annotationKeys().DigestWorkload
}

// sourceDigest returns the function that the cache calls on a source. That function returns nil for
// a source that does not count under cfg, because the source selector does not select it or because
// it holds a Helm release. The controller treats such a source as absent.
func sourceDigest(cfg Config) (func(obj runtime.Object) []byte, error) {
	selector, err := parseSelector(cfg.SourceSelector)
	if err != nil {
		return nil, err
	}
	return func(obj runtime.Object) []byte { return policy.DigestSource(obj, selector) }, nil
}

// kind reads and writes one kind of workload.
type kind struct {
	*kindInfo
	informer *informers.Informer[metav1.Object]
	// get reads from the API server.
	get func(ctx context.Context, name cache.ObjectName) (metav1.Object, error)
	// patch returns the new resourceVersion.
	patch func(ctx context.Context, name cache.ObjectName, patchType types.PatchType, data []byte) (string, error)
	// mergeType is the patch type for everything outside of lists.
	mergeType types.PatchType
	// reload sends the writes of a reload.
	reload func(ctx context.Context, k *kind, facts *policy.Facts, plan *policy.Plan, e *entry) (reloadOutcome, error)
}

// getPatcher is the part of a client for one namespace that is used here.
type getPatcher[T any] interface {
	Get(ctx context.Context, name string, opts metav1.GetOptions) (T, error)
	Patch(ctx context.Context, name string, pt types.PatchType, data []byte, opts metav1.PatchOptions, sub ...string) (T, error)
}

func newKind[T metav1.Object, C getPatcher[T]](informer *informers.Informer[metav1.Object], client func(namespace string) C, mergeType types.PatchType) *kind {
	return &kind{
		informer:  informer,
		mergeType: mergeType,
		get: func(ctx context.Context, name cache.ObjectName) (metav1.Object, error) {
			return client(name.Namespace).Get(ctx, name.Name, metav1.GetOptions{})
		},
		patch: func(ctx context.Context, name cache.ObjectName, patchType types.PatchType, data []byte) (string, error) {
			obj, err := client(name.Namespace).Patch(ctx, name.Name, patchType, data, metav1.PatchOptions{FieldManager: fieldManager})
			if err != nil {
				return "", err
			}
			return obj.GetResourceVersion(), nil
		},
	}
}

// newKinds returns the kinds that the configuration enables and that have an informer.
func (c *controller) newKinds(dyn dynamic.Interface) map[string]*kind {
	const strategic = types.StrategicMergePatchType
	apps, batch := c.client.AppsV1(), c.client.BatchV1()
	all := map[string]*kind{
		"Deployment":  newKind(c.informers.Deployments, apps.Deployments, strategic),
		"StatefulSet": newKind(c.informers.StatefulSets, apps.StatefulSets, strategic),
		"DaemonSet":   newKind(c.informers.DaemonSets, apps.DaemonSets, strategic),
		"CronJob":     newKind(c.informers.CronJobs, batch.CronJobs, strategic),
		"Job":         newKind(c.informers.Jobs, batch.Jobs, strategic),
	}
	for _, k := range all {
		k.reload = c.patchTemplate
	}
	all["CronJob"].reload, all["Job"].reload = c.runCronJob, c.replaceJob
	if dyn != nil {
		all["Rollout"] = newKind(c.informers.Rollouts, func(namespace string) rolloutClient {
			return rolloutClient{dyn.Resource(RolloutsResource).Namespace(namespace)}
		}, types.MergePatchType)
		all["Rollout"].reload = c.patchRollout
	}
	kinds := map[string]*kind{}
	for i := range kindInfos {
		info := &kindInfos[i]
		if k := all[info.Name]; k != nil && k.informer != nil && c.cfg.rollsKind(info) {
			k.kindInfo = info
			kinds[info.Name] = k
		}
	}
	return kinds
}
