// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package configreload

import (
	"context"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
)

// kindNames are the kinds that can be rolled, as the flags name them.
var kindNames = []string{"deployments", "statefulsets", "daemonsets", "cronjobs", "jobs", "rollouts"}

// RolloutsResource is the resource of Argo Rollouts.
var RolloutsResource = schema.GroupVersionResource{Group: "argoproj.io", Version: "v1alpha1", Resource: "rollouts"}

// fieldManager is this controller's name in managedFields.
const fieldManager = "quartermaster-config-reload"

// Informers are the caches that the controller reads. Any of them may be nil: a type without an
// informer is not handled.
//
// Sources are stored as [Source]. Workloads are stored either in the same way, with
// WorkloadAnnotations and the result of WorkloadDigest, or as the ordinary types, Rollouts as
// unstructured. Of namespaces, only the labels are read.
type Informers struct {
	ConfigMaps, Secrets                   cache.SharedIndexInformer
	Deployments, StatefulSets, DaemonSets cache.SharedIndexInformer
	CronJobs, Jobs, Rollouts              cache.SharedIndexInformer
	// Namespaces is needed only with NamespaceSelector.
	Namespaces cache.SharedIndexInformer
	// LiveVersion asks the API server for the resourceVersion of a source; empty if it does not
	// exist.
	LiveVersion func(context.Context, schema.GroupVersionResource, cache.ObjectName) (string, error)
}

// Resources returns the resources for which cfg needs an informer.
func Resources(cfg Config) []schema.GroupVersionResource {
	var list []schema.GroupVersionResource
	for _, t := range sourceTypes {
		if !cfg.sourceIgnored(t) {
			list = append(list, t.resource())
		}
	}
	for _, name := range kindNames {
		if cfg.kindEnabled(name) {
			list = append(list, kindResource(name))
		}
	}
	if cfg.needsNamespaces() {
		list = append(list, corev1.SchemeGroupVersion.WithResource("namespaces"))
	}
	return list
}

func kindResource(plural string) schema.GroupVersionResource {
	switch plural {
	case "cronjobs", "jobs":
		return batchv1.SchemeGroupVersion.WithResource(plural)
	case "rollouts":
		return RolloutsResource
	}
	return appsv1.SchemeGroupVersion.WithResource(plural)
}

// Rules returns exactly the permissions that the controller needs under cfg. The host sends the
// Events.
func Rules(cfg Config) []rbacv1.PolicyRule {
	var rules []rbacv1.PolicyRule
	allow := func(group string, resources []string, verbs ...string) {
		if len(resources) > 0 {
			rules = append(rules, rbacv1.PolicyRule{APIGroups: []string{group}, Resources: resources, Verbs: verbs})
		}
	}
	byGroup := map[string][]string{}
	for _, r := range Resources(cfg) {
		byGroup[r.Group] = append(byGroup[r.Group], r.Resource)
	}
	write := !cfg.DryRun
	verbs := func(writing ...string) []string {
		v := []string{"get", "list", "watch"}
		if write {
			v = append(v, writing...)
		}
		return v
	}
	allow("", byGroup[""], "list", "watch")
	allow(appsv1.GroupName, byGroup[appsv1.GroupName], verbs("patch")...)
	if cfg.kindEnabled("cronjobs") {
		allow(batchv1.GroupName, []string{"cronjobs"}, verbs("patch")...)
	}
	switch jobs := []string{"jobs"}; {
	case cfg.kindEnabled("jobs"):
		allow(batchv1.GroupName, jobs, verbs("create", "delete")...)
	case cfg.kindEnabled("cronjobs") && write:
		allow(batchv1.GroupName, jobs, "list", "create")
	}
	allow(RolloutsResource.Group, byGroup[RolloutsResource.Group], verbs("patch")...)
	if cfg.Compat {
		// This is needed only to warn if the original is still running. A list that selects one
		// name needs no more than this.
		rules = append(rules, rbacv1.PolicyRule{APIGroups: []string{"coordination.k8s.io"}, Resources: []string{"leases"},
			ResourceNames: []string{originalLease}, Verbs: []string{"list"}})
	}
	return rules
}

func (c *Config) needsNamespaces() bool {
	return len(c.Namespaces) == 0 && len(c.NamespaceSelector) > 0
}

// kind reads and writes one kind of workload.
type kind struct {
	gvk      schema.GroupVersionKind
	informer cache.SharedIndexInformer
	// get reads from the API server.
	get func(ctx context.Context, name cache.ObjectName) (metav1.Object, error)
	// patch returns the new resourceVersion.
	patch func(ctx context.Context, name cache.ObjectName, as types.PatchType, data []byte) (string, error)
	// merge is the patch type for everything outside of lists.
	merge types.PatchType
}

// getPatcher is the part of a typed client for one namespace that is used here.
type getPatcher[T any] interface {
	Get(ctx context.Context, name string, opts metav1.GetOptions) (T, error)
	Patch(ctx context.Context, name string, pt types.PatchType, data []byte, opts metav1.PatchOptions, sub ...string) (T, error)
}

func newKind[T metav1.Object, C getPatcher[T]](gvk schema.GroupVersionKind, informer cache.SharedIndexInformer, client func(namespace string) C) *kind {
	return &kind{
		gvk:      gvk,
		informer: informer,
		merge:    types.StrategicMergePatchType,
		get: func(ctx context.Context, name cache.ObjectName) (metav1.Object, error) {
			return client(name.Namespace).Get(ctx, name.Name, metav1.GetOptions{})
		},
		patch: func(ctx context.Context, name cache.ObjectName, as types.PatchType, data []byte) (string, error) {
			obj, err := client(name.Namespace).Patch(ctx, name.Name, as, data, metav1.PatchOptions{FieldManager: fieldManager})
			if err != nil {
				return "", err
			}
			return obj.GetResourceVersion(), nil
		},
	}
}

// newKinds returns the kinds that cfg enables and that have an informer.
func newKinds(cfg *Config, in Informers, client kubernetes.Interface, dyn dynamic.Interface) map[string]*kind {
	apps := appsv1.SchemeGroupVersion
	kinds := map[string]*kind{}
	add := func(informer cache.SharedIndexInformer, k *kind) {
		if informer != nil && cfg.kindEnabled(strings.ToLower(k.gvk.Kind)+"s") {
			kinds[k.gvk.Kind] = k
		}
	}
	add(in.Deployments, newKind(apps.WithKind("Deployment"), in.Deployments, client.AppsV1().Deployments))
	add(in.StatefulSets, newKind(apps.WithKind("StatefulSet"), in.StatefulSets, client.AppsV1().StatefulSets))
	add(in.DaemonSets, newKind(apps.WithKind("DaemonSet"), in.DaemonSets, client.AppsV1().DaemonSets))
	add(in.CronJobs, newKind(batchv1.SchemeGroupVersion.WithKind("CronJob"), in.CronJobs, client.BatchV1().CronJobs))
	add(in.Jobs, newKind(batchv1.SchemeGroupVersion.WithKind("Job"), in.Jobs, client.BatchV1().Jobs))
	if dyn != nil {
		add(in.Rollouts, newRolloutKind(in.Rollouts, dyn))
	}
	return kinds
}

// newRolloutKind uses the dynamic client, so that no field is lost.
func newRolloutKind(informer cache.SharedIndexInformer, dyn dynamic.Interface) *kind {
	client := dyn.Resource(RolloutsResource)
	return &kind{
		gvk:      RolloutsResource.GroupVersion().WithKind("Rollout"),
		informer: informer,
		merge:    types.MergePatchType,
		get: func(ctx context.Context, name cache.ObjectName) (metav1.Object, error) {
			return client.Namespace(name.Namespace).Get(ctx, name.Name, metav1.GetOptions{})
		},
		patch: func(ctx context.Context, name cache.ObjectName, as types.PatchType, data []byte) (string, error) {
			obj, err := client.Namespace(name.Namespace).Patch(ctx, name.Name, as, data, metav1.PatchOptions{FieldManager: fieldManager})
			if err != nil {
				return "", err
			}
			return obj.GetResourceVersion(), nil
		},
	}
}
