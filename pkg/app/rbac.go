// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/yaml"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/election/apifence"
	"github.com/quartermaster-dev/quartermaster/pkg/informers"
	"github.com/quartermaster-dev/quartermaster/pkg/serving"
)

func newRBACCommand(o *Options) *cobra.Command {
	return o.subcommand("rbac", "Print the roles that a manager with these flags needs", strings.ReplaceAll(`
Prints what a manager with the given flags has to be allowed, as YAML for
kubectl apply: the rules that the enabled controllers of this build declare, and
the rules of the manager itself for its Lease, its Events, the Namespace that
names the leader to the API server's fence, and the secure port. All flags of
the manager are understood, --config among them.

The roles are bound to the ServiceAccount quartermaster in the namespace of the
Lease, see --leader-elect-resource-namespace. Roles named
quartermaster-controller-* are for what a controller does, and for what the
cache reads for it. So that installations do not replace each other's roles,
Roles in other namespaces have names that end in the namespace of the Lease.
ClusterRoles have such names too, unless that namespace is kube-system.

With --namespaces, each of the namespaces gets Roles in place of ClusterRoles,
and the API server's fence is not used. The secure port, which --secure-port=0
switches off, --dry-run and some controllers of a build of your own need a
ClusterRole even then.`, defaultName, o.name),
		func(w io.Writer) error {
			objects, err := o.rbac()
			if err != nil {
				return err
			}
			for i, object := range objects {
				text, err := yaml.Marshal(object)
				if err != nil {
					return err
				}
				if i > 0 {
					text = append([]byte("---\n"), text...)
				}
				if _, err := w.Write(text); err != nil {
					return err
				}
			}
			return nil
		})
}

// rbac returns what the process needs with this configuration, and nothing more: roles with their bindings.
func (o *Options) rbac() (objects []any, err error) {
	required, err := o.collectRequirements()
	if err != nil {
		return nil, err
	}
	home := o.Election.ResourceNamespace
	account := metav1.ObjectMeta{Name: o.name, Namespace: home}
	grant := func(name string, namespaces []string, rules ...rbacv1.PolicyRule) {
		for _, namespace := range namespaces {
			if len(rules) > 0 {
				name := roleName(o.name+"-"+name, namespace, home)
				objects = append(objects, role(name, namespace, rules), binding(name, namespace, account))
			}
		}
	}
	o.hostGrants(home, grant)
	for _, e := range required.entries {
		granted := required.grants[e.Name]
		for _, namespace := range slices.Sorted(maps.Keys(granted)) {
			grant("controller-"+e.Name, []string{namespace}, granted[namespace]...)
		}
	}
	return objects, nil
}

// orCluster returns the namespaces of --namespaces, or the empty name, which stands for the cluster.
func orCluster(namespaces []string) []string {
	if len(namespaces) == 0 {
		return []string{metav1.NamespaceAll}
	}
	return namespaces
}

// hostGrants grants what the host itself needs.
func (o *Options) hostGrants(home string, grant func(name string, namespaces []string, rules ...rbacv1.PolicyRule)) {
	if o.Election.LeaderElect {
		lease := o.Election.ResourceName
		grant("host", []string{home},
			rule("coordination.k8s.io", "leases", lease, "get", "watch", "update"),
			rule("coordination.k8s.io", "leases", "", "create")) // RBAC cannot limit create to a name
		if serverFence(o) == apifence.Unknown {
			name := apifence.NamespaceFor(types.NamespacedName{Namespace: home, Name: lease})
			grant("fence", []string{metav1.NamespaceAll}, rule("", "namespaces", name, "get", "patch"))
			// The addresses of the API servers, and how many there are.
			grant("api-servers", []string{metav1.NamespaceDefault}, rule("discovery.k8s.io", "endpointslices", "kubernetes", "get"))
			grant("api-servers", []string{metav1.NamespaceSystem}, rule("coordination.k8s.io", "leases", "", "list"))
		}
	}
	eventNamespaces := orCluster(o.Informers.Namespaces)
	if len(o.Informers.Namespaces) > 0 && !slices.Contains(eventNamespaces, home) {
		eventNamespaces = append(slices.Clone(eventNamespaces), home) // for Events about the Lease
	}
	grant("events", eventNamespaces, rule("", "events", "", "create", "patch"))
	if o.Generic.DryRun {
		grant("dry-run", []string{metav1.NamespaceAll}, rule("apiregistration.k8s.io", "apiservices", "", "get"))
	}
	if o.Secure.BindPort != 0 { // what the secure port needs to authenticate and authorize its callers
		if !o.Authentication.SkipLookup {
			grant("authentication-reader", []string{serving.AuthenticationNamespace},
				rule("", "configmaps", serving.AuthenticationConfigMap, "list", "watch"))
		}
		grant("reviews", []string{metav1.NamespaceAll}, rule("authentication.k8s.io", "tokenreviews", "", "create"),
			rule("authorization.k8s.io", "subjectaccessreviews", "", "create"))
	}
}

func rule(group, resource, name string, verbs ...string) rbacv1.PolicyRule {
	r := rbacv1.PolicyRule{APIGroups: []string{group}, Resources: []string{resource}, Verbs: verbs}
	if name != "" {
		r.ResourceNames = []string{name}
	}
	return r
}

// roleName tells the installations of a cluster apart: applying one installation's roles must not replace
// another's. Names of Roles in the installation's own namespace, home, and of the default installation's
// ClusterRoles get no suffix. It begins with a dot, which no name of a controller has: config-NAMESPACE may
// be another controller.
func roleName(name, namespace, home string) string {
	if namespace == home || namespace == metav1.NamespaceAll && home == metav1.NamespaceSystem {
		return name
	}
	return name + "." + home
}

// role returns a ClusterRole if namespace is empty, otherwise a Role.
func role(name, namespace string, rules []rbacv1.PolicyRule) any {
	meta := metav1.ObjectMeta{Name: name, Namespace: namespace}
	if namespace == metav1.NamespaceAll {
		return rbacv1.ClusterRole{TypeMeta: rbacType("ClusterRole"), ObjectMeta: meta, Rules: rules}
	}
	return rbacv1.Role{TypeMeta: rbacType("Role"), ObjectMeta: meta, Rules: rules}
}

// binding binds the role of the same name to account.
func binding(name, namespace string, account metav1.ObjectMeta) any {
	meta := metav1.ObjectMeta{Name: name, Namespace: namespace}
	subjects := []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Name: account.Name, Namespace: account.Namespace}}
	if namespace == metav1.NamespaceAll {
		return rbacv1.ClusterRoleBinding{TypeMeta: rbacType("ClusterRoleBinding"), ObjectMeta: meta, Subjects: subjects,
			RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: name}}
	}
	return rbacv1.RoleBinding{TypeMeta: rbacType("RoleBinding"), ObjectMeta: meta, Subjects: subjects,
		RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: name}}
}

func rbacType(kind string) metav1.TypeMeta {
	return metav1.TypeMeta{APIVersion: rbacv1.SchemeGroupVersion.String(), Kind: kind}
}

// Grants are rules by the namespace in which they hold; those under the empty name hold in the cluster.
type Grants map[string][]rbacv1.PolicyRule

// GrantsOf returns what a controller may do: list and watch its needs, and what its permissions say.
func GrantsOf(e controllers.Entry, s controllers.Settings, needs []informers.Need) (Grants, error) {
	granted, own := Grants{}, Grants{}
	if e.NamespacePermissions != nil {
		own = e.NamespacePermissions(s)
	}
	for _, need := range needs {
		namespaces := []string{need.Namespace}
		if need.Namespace == "" && !need.ClusterScoped {
			namespaces = orCluster(s.Namespaces)
		}
		names := func(r rbacv1.PolicyRule) bool {
			return slices.Contains(r.APIGroups, need.Resource.Group) && slices.Contains(r.Resources, need.Resource.Resource)
		}
		if need.ClusterScoped && len(s.Namespaces) > 0 && !slices.ContainsFunc(own[metav1.NamespaceAll], names) {
			return nil, fmt.Errorf("needs %s, which have no namespace: not possible with --namespaces",
				need.Resource.GroupResource())
		}
		for _, namespace := range namespaces {
			granted[namespace] = addRead(granted[namespace], need)
		}
	}
	if e.Permissions != nil {
		for _, namespace := range orCluster(s.Namespaces) {
			granted[namespace] = append(granted[namespace], e.Permissions(s)...)
		}
	}
	for namespace, rules := range own {
		granted[namespace] = append(granted[namespace], rules...)
	}
	return granted, nil
}

// addRead adds a rule that lets the cache list and watch what the need chooses, or its resource to the last
// rule. RBAC takes the name of a list or watch from the field selector metadata.name.
func addRead(rules []rbacv1.PolicyRule, need informers.Need) []rbacv1.PolicyRule {
	name := ""
	if selector, err := fields.ParseSelector(need.FieldSelector); err == nil { // otherwise the cache refuses the need
		name, _ = selector.RequiresExactMatch(metav1.ObjectNameField)
	}
	r := rule(need.Resource.Group, need.Resource.Resource, name, "list", "watch")
	if last := len(rules) - 1; last >= 0 &&
		slices.Equal(rules[last].APIGroups, r.APIGroups) && slices.Equal(rules[last].ResourceNames, r.ResourceNames) {
		rules[last].Resources = append(rules[last].Resources, r.Resources...)
		return rules
	}
	return append(rules, r)
}
