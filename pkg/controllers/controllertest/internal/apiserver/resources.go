// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"cmp"
	"fmt"
	"reflect"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	clientscheme "k8s.io/client-go/kubernetes/scheme"
)

// resource is a resource in one version, as discovery describes it.
type resource struct {
	schema.GroupVersionResource
	kind       string
	namespaced bool
	custom     bool // by a CRD
	status     bool // the status is a subresource
}

func (r *resource) gvk() schema.GroupVersionKind { return r.GroupVersion().WithKind(r.kind) }

// generations reports whether objects have a metadata.generation.
func (r *resource) generations() bool { return r.custom || r.status && r.Group != "" }

// clusterScoped are the built-in kinds without a namespace. The Go types do not say which have one.
var clusterScoped = map[string]bool{
	"APIService": true, "CertificateSigningRequest": true, "ClusterRole": true, "ClusterRoleBinding": true,
	"ClusterTrustBundle": true, "CSIDriver": true, "CSINode": true, "CustomResourceDefinition": true, "DeviceClass": true,
	"FlowSchema": true, "IngressClass": true, "IPAddress": true, "MutatingAdmissionPolicy": true,
	"MutatingAdmissionPolicyBinding": true, "MutatingWebhookConfiguration": true, "Namespace": true, "Node": true,
	"PersistentVolume": true, "PriorityClass": true, "PriorityLevelConfiguration": true, "ResourceSlice": true,
	"RuntimeClass": true, "SelfSubjectAccessReview": true, "SelfSubjectReview": true, "SelfSubjectRulesReview": true,
	"ServiceCIDR": true, "StorageClass": true, "StorageVersion": true, "StorageVersionMigration": true,
	"SubjectAccessReview": true, "TokenReview": true, "ValidatingAdmissionPolicy": true,
	"ValidatingAdmissionPolicyBinding": true, "ValidatingWebhookConfiguration": true, "VolumeAttachment": true,
	"VolumeAttributesClass": true,
}

// resourcesOf returns the resources of the types in scheme, by their usual plurals. A type has a
// status subresource if it has a field Status.
func resourcesOf(scheme *runtime.Scheme) []resource {
	var all []resource
	for gvk, t := range scheme.AllKnownTypes() {
		m, hasMeta := reflect.New(t).Interface().(metav1.ObjectMetaAccessor)
		if gvk.Version == runtime.APIVersionInternal || !hasMeta || m.GetObjectMeta() == nil {
			continue
		}
		plural, _ := meta.UnsafeGuessKindToResource(gvk)
		_, status := t.FieldByName("Status")
		custom := !clientscheme.Scheme.Recognizes(gvk)
		all = append(all, resource{plural, gvk.Kind, custom || !clusterScoped[gvk.Kind], custom, status})
	}
	// Types are defined by objects of types that the scheme does not have.
	all = append(all,
		resource{schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"}, crdKind, false, false, false},
		resource{schema.GroupVersionResource{Group: "apiregistration.k8s.io", Version: "v1", Resource: "apiservices"}, "APIService", false, false, false})
	slices.SortFunc(all, func(a, b resource) int { return cmp.Compare(a.String(), b.String()) })
	return all
}

const crdKind = "CustomResourceDefinition"

// removeCRD removes the resources of a CustomResourceDefinition and their objects.
func (s *Server) removeCRD(crd *unstructured.Unstructured) {
	group, _, _ := unstructured.NestedString(crd.Object, "spec", "group")
	kind, _, _ := unstructured.NestedString(crd.Object, "spec", "names", "kind")
	s.resources = slices.DeleteFunc(slices.Clone(s.resources), func(r resource) bool { return r.Group == group && r.kind == kind })
	for k := range s.objects {
		if k.group == group && k.kind == kind {
			s.commit(k, nil)
		}
	}
}

// addCRD adds or replaces the resources of a CustomResourceDefinition.
func (s *Server) addCRD(crd *unstructured.Unstructured) error {
	group, _, _ := unstructured.NestedString(crd.Object, "spec", "group")
	kind, _, _ := unstructured.NestedString(crd.Object, "spec", "names", "kind")
	plural, _, _ := unstructured.NestedString(crd.Object, "spec", "names", "plural")
	scope, _, _ := unstructured.NestedString(crd.Object, "spec", "scope")
	versions, _, err := unstructured.NestedSlice(crd.Object, "spec", "versions")
	if err != nil || group == "" || kind == "" || plural == "" || len(versions) == 0 {
		return fmt.Errorf("CustomResourceDefinition %s is not complete", crd.GetName())
	}
	s.resources = slices.DeleteFunc(slices.Clone(s.resources), func(r resource) bool { return r.Group == group && r.kind == kind })
	for _, v := range versions {
		version, ok := v.(map[string]any)
		if served, _, _ := unstructured.NestedBool(version, "served"); !ok || !served {
			continue
		}
		name, _, _ := unstructured.NestedString(version, "name")
		_, status, _ := unstructured.NestedMap(version, "subresources", "status")
		s.resources = append(s.resources, resource{
			schema.GroupVersionResource{Group: group, Version: name, Resource: plural}, kind, scope == "Namespaced", true, status,
		})
	}
	return nil
}

func (s *Server) resource(gvr schema.GroupVersionResource) *resource {
	i := slices.IndexFunc(s.resources, func(r resource) bool { return r.GroupVersionResource == gvr })
	if i < 0 {
		return nil
	}
	return &s.resources[i]
}

func (s *Server) resourceOfKind(gvk schema.GroupVersionKind) *resource {
	i := slices.IndexFunc(s.resources, func(r resource) bool { return r.gvk() == gvk })
	if i < 0 {
		return nil
	}
	return &s.resources[i]
}

// apiService returns the APIService of a version of custom resources, which a real API server keeps for each;
// nil if r or the name is another.
func (s *Server) apiService(r *resource, name string) *object {
	if r.Resource != "apiservices" || !slices.ContainsFunc(s.resources, func(r resource) bool { return r.custom && r.Version+"."+r.Group == name }) {
		return nil
	}
	obj := &object{Object: map[string]any{"spec": map[string]any{}}}
	obj.SetGroupVersionKind(r.gvk())
	obj.SetName(name)
	return obj
}

// discover returns the discovery document at the path, or nil if there is none.
func (s *Server) discover(path string) any {
	switch parts := strings.Split(strings.Trim(path, "/"), "/"); {
	case path == "/api":
		return &metav1.APIVersions{TypeMeta: metav1.TypeMeta{Kind: "APIVersions"}, Versions: []string{"v1"}}
	case path == "/apis":
		return s.groups()
	case len(parts) == 2 && parts[0] == "api":
		return s.list(schema.GroupVersion{Version: parts[1]})
	case len(parts) == 3 && parts[0] == "apis":
		return s.list(schema.GroupVersion{Group: parts[1], Version: parts[2]})
	}
	return nil
}

func (s *Server) groups() *metav1.APIGroupList {
	list := &metav1.APIGroupList{TypeMeta: metav1.TypeMeta{Kind: "APIGroupList", APIVersion: "v1"}}
	for _, r := range s.resources {
		if r.Group == "" {
			continue
		}
		at := slices.IndexFunc(list.Groups, func(g metav1.APIGroup) bool { return g.Name == r.Group })
		if at < 0 {
			at = len(list.Groups)
			list.Groups = append(list.Groups, metav1.APIGroup{Name: r.Group})
		}
		group := &list.Groups[at]
		version := metav1.GroupVersionForDiscovery{GroupVersion: r.GroupVersion().String(), Version: r.Version}
		if !slices.Contains(group.Versions, version) {
			group.Versions = append(group.Versions, version)
		}
		// A stable version is preferred, such as v1 to v1beta1.
		if p := group.PreferredVersion.Version; p == "" || strings.HasPrefix(p, r.Version) {
			group.PreferredVersion = version
		}
	}
	return list
}

func (s *Server) list(gv schema.GroupVersion) any {
	list := &metav1.APIResourceList{TypeMeta: metav1.TypeMeta{Kind: "APIResourceList", APIVersion: "v1"}, GroupVersion: gv.String()}
	for _, r := range s.resources {
		if r.GroupVersion() != gv {
			continue
		}
		verbs := metav1.Verbs{"create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"}
		list.APIResources = append(list.APIResources, metav1.APIResource{Name: r.Resource, Namespaced: r.namespaced, Kind: r.kind, Verbs: verbs})
		if r.status {
			list.APIResources = append(list.APIResources, metav1.APIResource{
				Name: r.Resource + "/status", Namespaced: r.namespaced, Kind: r.kind, Verbs: metav1.Verbs{"get", "patch", "update"}})
		}
	}
	if len(list.APIResources) == 0 {
		return nil
	}
	return list
}

// Namespaced reports whether the objects of a resource have a namespace, if the server knows it.
func (s *Server) Namespaced(gvr schema.GroupVersionResource) (namespaced, known bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	r := s.resource(gvr)
	return r != nil && r.namespaced, r != nil
}
