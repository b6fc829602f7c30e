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
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/yaml"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/election/apifence"
	"github.com/quartermaster-dev/quartermaster/pkg/informers"
)

func newRBACCommand(o *Options) *cobra.Command {
	return o.subcommand("rbac", "Print the roles that a manager with these flags needs", strings.ReplaceAll(`
Prints what a manager with the given flags has to be allowed, as YAML for
kubectl apply: the rules that the enabled controllers of this build declare, and
the rules of the manager itself for its Lease, its Events, the Namespace that
names the leader to the API server's fence, and the secure port. All flags of
the manager are understood, --config among them.

The roles are bound to the ServiceAccount quartermaster in the namespace of the
Lease, see --leader-elect-resource-namespace. Roles named quartermaster-cache-*
are for reading into the cache; quartermaster-controller-* is what a controller
does itself, as an account of its own if --use-service-account-credentials is
given. So that installations do not replace each other's roles, Roles in other
namespaces have names that end in the namespace of the Lease. ClusterRoles have
such names too, unless that namespace is kube-system.

With --namespaces, each of the namespaces gets Roles in place of ClusterRoles,
and the API server's fence is not used. The secure port, which --secure-port=0
switches off, and --dry-run need a ClusterRole even then.`, defaultName, o.name),
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

// rbac returns what the process needs with this configuration, and nothing more: roles with their
// bindings, and the ServiceAccounts of controllers that have their own.
func (o *Options) rbac() (objects []any, err error) {
	d, err := o.demands()
	if err != nil {
		return nil, err
	}
	home := o.Election.ResourceNamespace
	scope := o.Informers.Namespaces
	if len(scope) == 0 {
		scope = []string{metav1.NamespaceAll}
	}
	grant := func(name string, account metav1.ObjectMeta, namespaces []string, rules ...rbacv1.PolicyRule) {
		for _, namespace := range namespaces {
			if len(rules) > 0 {
				name := roleName(o.name+"-"+name, namespace, home)
				objects = append(objects, role(name, namespace, rules), binding(name, namespace, account))
			}
		}
	}
	manager := metav1.ObjectMeta{Name: o.name, Namespace: home} // as the Deployment
	if o.Election.LeaderElect {
		lease := o.Election.ResourceName
		grant("host", manager, []string{home},
			rule("coordination.k8s.io", "leases", lease, "get", "watch", "update"),
			rule("coordination.k8s.io", "leases", "", "create")) // RBAC cannot limit create to a name
		if serverFence(o) == apifence.Unknown {
			name := apifence.NamespaceFor(types.NamespacedName{Namespace: home, Name: lease})
			grant("fence", manager, []string{metav1.NamespaceAll}, rule("", "namespaces", name, "get", "patch"))
			// The addresses of the API servers, and how many there are.
			grant("api-servers", manager, []string{metav1.NamespaceDefault}, rule("discovery.k8s.io", "endpointslices", "kubernetes", "get"))
			grant("api-servers", manager, []string{metav1.NamespaceSystem}, rule("coordination.k8s.io", "leases", "", "list"))
		}
	}
	recorded := scope
	if len(o.Informers.Namespaces) > 0 && !slices.Contains(scope, home) {
		recorded = append(slices.Clone(scope), home) // for Events about the Lease
	}
	grant("events", manager, recorded, rule("", "events", "", "create", "patch"))
	if o.Generic.DryRun {
		grant("dry-run", manager, []string{metav1.NamespaceAll}, rule("apiregistration.k8s.io", "apiservices", "", "get"))
	}
	if o.Secure.BindPort != 0 { // what the secure port needs to authenticate and authorize its callers
		if !o.Authentication.SkipLookup {
			grant("authentication-reader", manager, []string{authenticationNamespace},
				rule("", "configmaps", authenticationConfigMap, "list", "watch"))
		}
		grant("reviews", manager, []string{metav1.NamespaceAll}, rule("authentication.k8s.io", "tokenreviews", "", "create"),
			rule("authorization.k8s.io", "subjectaccessreviews", "", "create"))
	}

	var accounts []string
	for i, e := range d.entries {
		account, granted := manager, d.grants[i]
		if o.Generic.UseServiceAccountTokens {
			account = metav1.ObjectMeta{Name: e.Name, Namespace: o.Generic.ServiceAccountsNamespace}
			accounts = append(accounts, e.Name)
			objects = append(objects, controllerAccount(account, o.name))
		}
		namespaces := slices.Clone(scope)
		for _, namespace := range slices.Sorted(maps.Keys(granted)) {
			if namespace != metav1.NamespaceAll && !slices.Contains(scope, namespace) {
				namespaces = append(namespaces, namespace)
			}
		}
		for _, namespace := range namespaces {
			grant("cache-"+e.Name, manager, []string{namespace}, granted.in(namespace, scope).cache...)
		}
		for _, namespace := range namespaces {
			grant("controller-"+e.Name, account, []string{namespace}, granted.in(namespace, scope).own...)
		}
	}
	if len(accounts) > 0 {
		tokens := rule("", "serviceaccounts/token", "", "create")
		tokens.ResourceNames = accounts
		grant("tokens", manager, []string{o.Generic.ServiceAccountsNamespace}, tokens)
	}
	return objects, nil
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
// ClusterRoles get no suffix.
func roleName(name, namespace, home string) string {
	if namespace == home || namespace == metav1.NamespaceAll && home == metav1.NamespaceSystem {
		return name
	}
	return name + "-" + home
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

func controllerAccount(meta metav1.ObjectMeta, manager string) any {
	meta.Labels = map[string]string{"app.kubernetes.io/name": manager}
	return corev1.ServiceAccount{
		TypeMeta:                     metav1.TypeMeta{APIVersion: "v1", Kind: "ServiceAccount"},
		ObjectMeta:                   meta,
		AutomountServiceAccountToken: new(bool), // no Pod runs as it
	}
}

// grants are what an entry needs, by namespace. Under the empty name are rules for every namespace that it
// works in.
type grants map[string]granted

// granted is what the cache and the controller itself may do.
type granted struct{ cache, own []rbacv1.PolicyRule }

// in returns the grants for the role in a namespace, if the controller works in the namespaces of scope.
func (g grants) in(namespace string, scope []string) granted {
	all, one := g[metav1.NamespaceAll], g[namespace]
	if namespace == metav1.NamespaceAll || !slices.Contains(scope, namespace) {
		return one
	}
	return granted{slices.Concat(all.cache, one.cache), slices.Concat(all.own, one.own)}
}

// roles splits the entry's permissions. The cache, which reads as the manager, lists and watches
// what is in Needs; a rule without watch is not for the cache. Everything else is what the
// controller itself does. It is an error if the rules do not let the cache list and watch a
// resource in Needs. The cache also watches whatever the controller follows. A rule with resourceNames is
// for the cache if a need chooses one of the names: RBAC takes the name of a list or watch from the
// field selector metadata.name.
func roles(e controllers.Entry, s controllers.Settings, needs []informers.Need) (grants, error) {
	inCache := func(gr schema.GroupResource, names []string) bool {
		if e.Follows && len(names) == 0 {
			return true
		}
		return slices.ContainsFunc(needs, func(n informers.Need) bool {
			return n.Resource.GroupResource() == gr && (len(names) == 0 || slices.Contains(names, nameOf(n)))
		})
	}
	all, readable := grants{}, map[string]map[readableObjects]bool{}
	split := func(namespace string, rules []rbacv1.PolicyRule) {
		g, may := granted{}, map[readableObjects]bool{}
		for _, rule := range byGroup(rules) {
			g.split(rule, inCache, may)
		}
		all[namespace], readable[namespace] = g, may
	}
	split(metav1.NamespaceAll, e.Permissions(s))
	for namespace, rules := range e.InNamespaces(s) {
		split(namespace, rules)
	}
	for _, need := range needs {
		gr := need.Resource.GroupResource()
		every, named := readableObjects{gr, ""}, readableObjects{gr, nameOf(need)}
		if !slices.ContainsFunc([]string{metav1.NamespaceAll, need.Namespace}, func(namespace string) bool {
			return readable[namespace][every] || readable[namespace][named]
		}) {
			return nil, fmt.Errorf("needs %s in the cache, but its permissions do not let it list and watch them; wildcards do not count", gr)
		}
	}
	return all, nil
}

// readableObjects are the objects of a resource that the cache may list and watch: all, or the one of a name.
type readableObjects struct {
	schema.GroupResource
	name string
}

// nameOf returns the name of the objects that a need chooses; empty if it chooses them by something else.
func nameOf(need informers.Need) string {
	selector, err := fields.ParseSelector(need.FieldSelector)
	if err != nil {
		return "" // the cache refuses the need
	}
	name, _ := selector.RequiresExactMatch(metav1.ObjectNameField)
	return name
}

// split adds a rule of one group to what the cache and the controller may do, and to readable what the
// cache may list and watch by it.
func (g *granted) split(rule rbacv1.PolicyRule, inCache func(schema.GroupResource, []string) bool, readable map[readableObjects]bool) {
	if len(rule.APIGroups) != 1 {
		g.own = append(g.own, rule)
		return
	}
	var cached, others []string
	for _, resource := range rule.Resources {
		gr := schema.GroupResource{Group: rule.APIGroups[0], Resource: resource}
		if !slices.Contains(rule.Verbs, "watch") || !inCache(gr, rule.ResourceNames) {
			others = append(others, resource)
			continue
		}
		cached = append(cached, resource)
		for _, name := range namesOf(rule) {
			objects := readableObjects{gr, name}
			readable[objects] = readable[objects] || slices.Contains(rule.Verbs, "list")
		}
	}
	var reads, does []string
	for _, verb := range rule.Verbs {
		if verb == "list" || verb == "watch" {
			reads = append(reads, verb)
		} else {
			does = append(does, verb)
		}
	}
	g.cache = appendRule(g.cache, rule, cached, reads)
	g.own = appendRule(g.own, rule, cached, does)
	g.own = appendRule(g.own, rule, others, rule.Verbs)
}

// namesOf returns the names of a rule, and one empty name for a rule without names.
func namesOf(rule rbacv1.PolicyRule) []string {
	if len(rule.ResourceNames) == 0 {
		return []string{""}
	}
	return rule.ResourceNames
}

// byGroup returns the rules, with each rule for several groups divided into one rule per group.
func byGroup(rules []rbacv1.PolicyRule) (divided []rbacv1.PolicyRule) {
	for _, rule := range rules {
		if len(rule.APIGroups) < 2 {
			divided = append(divided, rule)
			continue
		}
		for _, group := range rule.APIGroups {
			one := rule
			one.APIGroups = []string{group}
			divided = append(divided, one)
		}
	}
	return divided
}

// appendRule appends what the rule grants of these resources and verbs, unless that is nothing.
func appendRule(rules []rbacv1.PolicyRule, rule rbacv1.PolicyRule, resources, verbs []string) []rbacv1.PolicyRule {
	if len(resources) == 0 || len(verbs) == 0 {
		return rules
	}
	rule.Resources, rule.Verbs = resources, verbs
	return append(rules, rule)
}
