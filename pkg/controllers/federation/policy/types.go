// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// Resource is a type of objects, as a FederatedTypeConfig names it.
type Resource struct {
	Group      string `json:"group"`
	Version    string `json:"version"`
	Kind       string `json:"kind"`
	PluralName string `json:"pluralName"`
	Scope      string `json:"scope"`
}

// Namespaced reports whether objects of the type are in namespaces.
func (r Resource) Namespaced() bool { return r.Scope == "Namespaced" }

// GroupResource returns the group and the plural.
func (r Resource) GroupResource() schema.GroupResource {
	return schema.GroupResource{Group: r.Group, Resource: r.PluralName}
}

// APIVersion returns the group and the version.
func (r Resource) APIVersion() string {
	return schema.GroupVersion{Group: r.Group, Version: r.Version}.String()
}

// TypeConfig is a FederatedTypeConfig with its defaults.
type TypeConfig struct {
	Name       string
	Generation int64
	Deleting   bool
	TypeSpec
	Status TypeStatus
	// Invalid is what is wrong with the spec.
	Invalid error
}

// TypeSpec is the spec of a FederatedTypeConfig.
type TypeSpec struct {
	Target           Resource  `json:"targetType"`
	Federated        Resource  `json:"federatedType"`
	StatusType       *Resource `json:"statusType"`
	Propagation      string    `json:"propagation"`
	StatusCollection string    `json:"statusCollection"`
}

// TypeStatus is the status of a FederatedTypeConfig.
type TypeStatus struct {
	ObservedGeneration    int64  `json:"observedGeneration"`
	PropagationController string `json:"propagationController"`
	StatusController      string `json:"statusController,omitempty"`
}

// IsNamespace reports whether the target is the type Namespace.
func (t *TypeConfig) IsNamespace() bool {
	return t.Target.GroupResource() == schema.GroupResource{Resource: NamespacesType}
}

// NamespacesType is the name of the FederatedTypeConfig of Namespaces.
const NamespacesType = "namespaces"

// ReadTypeConfig reads a FederatedTypeConfig.
func ReadTypeConfig(u *unstructured.Unstructured) TypeConfig {
	t := TypeConfig{Name: u.GetName(), Generation: u.GetGeneration(), Deleting: u.GetDeletionTimestamp() != nil, Status: statusOf[TypeStatus](u)}
	err := decode(u.Object["spec"], &t.TypeSpec)
	plural, group, _ := strings.Cut(t.Name, ".")
	if t.Target.PluralName == "" {
		t.Target.PluralName = plural
	}
	if t.Target.Group == "" {
		t.Target.Group = group
	}
	if t.Federated.PluralName == "" {
		t.Federated.PluralName = defaultPlural(t.Federated.Kind)
	}
	if t.Invalid = err; err == nil {
		t.Invalid = t.validate()
	}
	return t
}

// defaultPlural returns the plural that a kind has by default.
func defaultPlural(kind string) string {
	kind = strings.ToLower(kind)
	if slices.ContainsFunc([]string{"s", "x", "ch", "sh", "z", "o"}, func(ending string) bool { return strings.HasSuffix(kind, ending) }) {
		return kind + "es"
	}
	if stem, found := strings.CutSuffix(kind, "y"); found {
		return stem + "ies"
	}
	return kind + "s"
}

func (t *TypeConfig) validate() error {
	resources := []Resource{t.Target, t.Federated}
	if t.StatusType != nil {
		resources = append(resources, *t.StatusType)
	}
	for _, r := range resources {
		if r.Kind == "" || r.Version == "" || r.PluralName == "" {
			return errors.New("a type must have a kind, a version and a plural")
		}
		if r.Scope != "Namespaced" && r.Scope != "Cluster" {
			return fmt.Errorf("scope of %s: must be Namespaced or Cluster, got %q", r.Kind, r.Scope)
		}
	}
	switch {
	case t.Name != t.Target.GroupResource().String():
		return fmt.Errorf("the name must be the name of the target, %s", t.Target.GroupResource())
	case !strings.Contains(t.Federated.Group, "."):
		return fmt.Errorf("the group of the federated type must have a dot, not be %q", t.Federated.Group)
	case t.Federated.Namespaced() != (t.Target.Namespaced() || t.IsNamespace()):
		return errors.New("the federated type must have the scope of its target, or Namespaced for Namespaces")
	case t.Propagation != enabled && t.Propagation != disabled:
		return fmt.Errorf("propagation: must be Enabled or Disabled, got %q", t.Propagation)
	case t.StatusCollection != "" && t.StatusCollection != enabled && t.StatusCollection != disabled:
		return fmt.Errorf("statusCollection: must be Enabled or Disabled, got %q", t.StatusCollection)
	}
	return nil
}

// Runs reports whether a type runs. If it does not and somebody should know, the warning says why.
// configs are the FederatedTypeConfigs of the federation namespace, and exists says whether there is a
// CustomResourceDefinition.
func (t *TypeConfig) Runs(configs []TypeConfig, c Config, exists func(schema.GroupResource) bool) (bool, Problem) {
	switch {
	case t.Deleting, t.Propagation == disabled, !c.PushReconciler, c.Namespaced:
		return false, Problem{}
	case t.Invalid != nil:
		return false, Problem{UnsupportedType, t.Invalid.Error()}
	}
	if reason := t.unsupportedReason(configs); reason != "" {
		return false, Problem{UnsupportedType, reason}
	}
	if !exists(t.Federated.GroupResource()) {
		return false, Problem{FederatedTypeMissing, fmt.Sprintf("there is no CustomResourceDefinition %s", t.Federated.GroupResource())}
	}
	if _, follows := Namespaces(configs, exists); t.Target.Namespaced() && !follows {
		return false, Problem{NamespaceTypeMissing, "a namespaced target needs the FederatedTypeConfig namespaces and its CustomResourceDefinition"}
	}
	return true, Problem{}
}

// Namespaces returns the FederatedTypeConfig of Namespaces, and whether FederatedNamespaces can be followed.
func Namespaces(configs []TypeConfig, exists func(schema.GroupResource) bool) (t TypeConfig, follows bool) {
	i := slices.IndexFunc(configs, func(t TypeConfig) bool { return t.Name == NamespacesType })
	if i < 0 {
		return t, false
	}
	t = configs[i]
	return t, t.Invalid == nil && !t.Deleting && t.unsupportedReason(configs) == "" && exists(t.Federated.GroupResource())
}

// unsupportedReason returns why the target must not be written in clusters, or "". Of two types that have one
// federated type neither runs: nobody knows which one is the mistake.
func (t *TypeConfig) unsupportedReason(configs []TypeConfig) string {
	target := t.Target.GroupResource()
	for _, other := range configs {
		if other.Name != t.Name && other.Federated.GroupResource() == t.Federated.GroupResource() {
			return fmt.Sprintf("%s is the federated type of %s too", t.Federated.GroupResource(), other.Name)
		}
		if target == other.Federated.GroupResource() || other.StatusType != nil && target == other.StatusType.GroupResource() {
			return fmt.Sprintf("%s is the federated or status type of %s", target, other.Name)
		}
	}
	switch {
	case slices.Contains([]string{CoreGroup, SchedulingGroup, DNSGroup, ownGroup}, target.Group),
		slices.Contains([]string{"authentication.k8s.io", "authorization.k8s.io"}, target.Group), // reviews
		slices.Contains([]string{"events", "nodes", "events.events.k8s.io", "leases.coordination.k8s.io"}, target.String()):
		return fmt.Sprintf("%s belongs to its own cluster", target)
	}
	return ""
}

// CollectsStatus reports whether the status of the targets is copied into their federated objects.
func (t *TypeConfig) CollectsStatus(c Config) bool {
	return t.StatusCollection == enabled && c.RawStatusCollection
}

// NextStatus returns the status of a FederatedTypeConfig that runs or not, and whether to write it.
func (t *TypeConfig) NextStatus(runs bool, c Config) (TypeStatus, bool) {
	state := map[bool]string{true: "Running", false: "NotRunning"}
	next := TypeStatus{ObservedGeneration: t.Generation, PropagationController: state[runs], StatusController: state[runs && t.CollectsStatus(c)]}
	return next, next != t.Status
}

// ClusterRules returns what the manager must be allowed in a cluster to propagate some types. With
// allowRoles, it may also write roles that hold more than its own rules, if there is a type for them: it is
// an administrator then. With allowDNS, it may read what DNS records need besides.
func ClusterRules(configs []TypeConfig, allowRoles, allowDNS bool) []rbacv1.PolicyRule {
	targets := map[string][]string{}
	for _, t := range configs {
		if t.Invalid == nil && t.unsupportedReason(configs) == "" {
			targets[t.Target.Group] = append(targets[t.Target.Group], t.Target.PluralName)
		}
	}
	var rules []rbacv1.PolicyRule
	addRule := func(group string, resources []string, verbs ...string) {
		rules = append(rules, rbacv1.PolicyRule{APIGroups: []string{group}, Resources: resources, Verbs: verbs})
	}
	for _, group := range slices.Sorted(maps.Keys(targets)) {
		slices.Sort(targets[group])
		addRule(group, targets[group], "get", "list", "watch", "create", "update", "patch", "delete")
	}
	if allowRoles && len(targets[rbacv1.GroupName]) > 0 {
		addRule(rbacv1.GroupName, []string{"clusterroles", "roles"}, "bind", "escalate")
	}
	if slices.ContainsFunc([]string{"deployments", "replicasets"}, func(t string) bool { return slices.Contains(targets["apps"], t) }) {
		addRule("", []string{"pods"}, "list") // for replicas
	}
	if allowDNS {
		addRule("", []string{"nodes"}, "list")
		addRule("discovery.k8s.io", []string{"endpointslices"}, "list", "watch")
	}
	addRule("", []string{"namespaces"}, "get") // which cluster it is
	rules[len(rules)-1].ResourceNames = []string{metav1.NamespaceSystem}
	return append(rules, rbacv1.PolicyRule{NonResourceURLs: []string{"/healthz", "/version"}, Verbs: []string{"get"}})
}
