// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"bytes"
	"encoding/json"
	"fmt"
	"reflect"
	"slices"

	"github.com/spf13/pflag"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"
)

// Who the manager runs as, and where. The name is that of its Deployment too.
const serviceAccount, installationNamespace = "quartermaster", "kube-system"

const generatedHeader = "# Written by make generate from what the controllers declare. Do not edit.\n"

// Manifests returns what make generate writes below deploy/, by path:
//
//   - rbac: the roles of every controller in its default configuration, bound to the manager's ServiceAccount;
//   - components/service-account-per-controller: the same for --use-service-account-credentials;
//   - components/NAME for each flag that asks for further permissions.
func Manifests() (map[string][]byte, error) {
	roles, err := rolesWith()
	if err != nil {
		return nil, err
	}
	files := map[string][]byte{}
	rbac := kustomization{APIVersion: "kustomize.config.k8s.io/v1beta1", Kind: "Kustomization", Namespace: installationNamespace}
	for _, r := range roles {
		rbac.Resources = append(rbac.Resources, r.Controller+".yaml")
		if files["rbac/"+r.Controller+".yaml"], err = documents(r.objects()...); err != nil {
			return nil, err
		}
	}
	if files["rbac/kustomization.yaml"], err = documents(rbac); err != nil {
		return nil, err
	}
	const accounts = "components/service-account-per-controller/"
	if files[accounts+"accounts.yaml"], err = documents(accountsOf(roles)...); err != nil {
		return nil, err
	}
	if files[accounts+"kustomization.yaml"], err = documents(accountsComponent(roles)); err != nil {
		return nil, err
	}
	for name, flag := range map[string]string{
		"compat-reloader": "--compat=reloader",
		"argo-rollouts":   "--config-reload-argo-rollouts",
	} {
		component, err := flagComponent(roles, flag)
		if err != nil {
			return nil, fmt.Errorf("component %s: %w", name, err)
		}
		if files["components/"+name+"/kustomization.yaml"], err = documents(component); err != nil {
			return nil, err
		}
	}
	return files, nil
}

// rolesWith returns the controllers' roles under the given flags.
func rolesWith(args ...string) ([]Roles, error) {
	o, err := NewOptions()
	if err != nil {
		return nil, err
	}
	if err := o.parseArgs(args); err != nil {
		return nil, err
	}
	return o.Roles()
}

// parseArgs is for arguments that stand in a manifest.
func (o *Options) parseArgs(args []string) error {
	flags := pflag.NewFlagSet("manager", pflag.ContinueOnError)
	for _, fs := range o.flags.FlagSets {
		flags.AddFlagSet(fs)
	}
	if err := flags.Parse(args); err != nil {
		return err
	}
	if flags.NArg() > 0 {
		return fmt.Errorf("takes no arguments, got %q", flags.Args())
	}
	return nil
}

func (r Roles) cacheName() string { return "quartermaster-cache-" + r.Controller }
func (r Roles) ownName() string   { return "quartermaster-controller-" + r.Controller }

// objects are the roles and their bindings to the manager's ServiceAccount.
func (r Roles) objects() []any {
	var all []any
	for _, role := range []struct {
		name  string
		rules []rbacv1.PolicyRule
	}{{r.cacheName(), r.Cache}, {r.ownName(), r.Own}} {
		if len(role.rules) == 0 {
			continue
		}
		all = append(all, rbacv1.ClusterRole{
			TypeMeta:   rbacType("ClusterRole"),
			ObjectMeta: metav1.ObjectMeta{Name: role.name},
			Rules:      role.rules,
		}, rbacv1.ClusterRoleBinding{
			TypeMeta:   rbacType("ClusterRoleBinding"),
			ObjectMeta: metav1.ObjectMeta{Name: role.name},
			RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: role.name},
			Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Name: serviceAccount, Namespace: installationNamespace}},
		})
	}
	return all
}

func rbacType(kind string) metav1.TypeMeta {
	return metav1.TypeMeta{APIVersion: rbacv1.SchemeGroupVersion.String(), Kind: kind}
}

// accountsOf are the controllers' ServiceAccounts and the permission to request tokens of exactly these.
func accountsOf(roles []Roles) []any {
	var all []any
	var names []string
	for _, r := range roles {
		names = append(names, r.Controller)
		all = append(all, corev1.ServiceAccount{
			TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "ServiceAccount"},
			ObjectMeta: metav1.ObjectMeta{Name: r.Controller, Namespace: installationNamespace, Labels: map[string]string{"app.kubernetes.io/name": serviceAccount}},
			// No Pod runs as it.
			AutomountServiceAccountToken: new(bool),
		})
	}
	meta := metav1.ObjectMeta{Name: "quartermaster-tokens", Namespace: installationNamespace}
	return append(all, rbacv1.Role{
		TypeMeta:   rbacType("Role"),
		ObjectMeta: meta,
		Rules: []rbacv1.PolicyRule{{APIGroups: []string{""}, Resources: []string{"serviceaccounts/token"},
			ResourceNames: names, Verbs: []string{"create"}}},
	}, rbacv1.RoleBinding{
		TypeMeta:   rbacType("RoleBinding"),
		ObjectMeta: meta,
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: meta.Name},
		Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Name: serviceAccount, Namespace: installationNamespace}},
	})
}

// accountsComponent binds what a controller does itself to its own ServiceAccount in place of the manager's.
func accountsComponent(roles []Roles) kustomization {
	k := newComponent("--use-service-account-credentials")
	k.Resources = []string{"accounts.yaml"}
	for _, r := range roles {
		k.Patches = append(k.Patches, patch{
			Target: target{Kind: "ClusterRoleBinding", Name: r.ownName()},
			Patch:  operation("replace", "/subjects/0/name", r.Controller),
		})
	}
	// The fence of components/fence cannot judge these accounts, so nobody asks it; see the flag.
	k.Patches = append(k.Patches, patch{
		Target: target{Kind: "Role|RoleBinding", Name: "quartermaster-fence"},
		Patch:  "$patch: delete\napiVersion: " + rbacv1.SchemeGroupVersion.String() + "\nkind: Role\nmetadata:\n  name: any\n",
	})
	return k
}

// flagComponent gives the flag and adds the rules that it asks for to those of the default.
func flagComponent(defaults []Roles, flag string) (kustomization, error) {
	k := newComponent(flag)
	with, err := rolesWith(flag)
	if err != nil {
		return k, err
	}
	for i, r := range with {
		for name, rules := range map[string][2][]rbacv1.PolicyRule{
			r.cacheName(): {defaults[i].Cache, r.Cache},
			r.ownName():   {defaults[i].Own, r.Own},
		} {
			more, err := additional(rules[0], rules[1])
			if err != nil {
				return k, fmt.Errorf("%s: %w", name, err)
			}
			for _, rule := range more {
				k.Patches = append(k.Patches, patch{
					Target: target{Kind: "ClusterRole", Name: name},
					Patch:  operation("add", "/rules/-", rule),
				})
			}
		}
	}
	slices.SortStableFunc(k.Patches, func(a, b patch) int { return bytes.Compare([]byte(a.Target.Name), []byte(b.Target.Name)) })
	return k, nil
}

// additional are the rules of all that defaults has not.
func additional(defaults, all []rbacv1.PolicyRule) ([]rbacv1.PolicyRule, error) {
	in := func(rules []rbacv1.PolicyRule, rule rbacv1.PolicyRule) bool {
		return slices.ContainsFunc(rules, func(r rbacv1.PolicyRule) bool { return reflect.DeepEqual(r, rule) })
	}
	for _, rule := range defaults {
		if !in(all, rule) {
			return nil, fmt.Errorf("the flag changes the rule %v, where it should add one", rule)
		}
	}
	return slices.DeleteFunc(slices.Clone(all), func(rule rbacv1.PolicyRule) bool { return in(defaults, rule) }), nil
}

// kustomization has the fields of one that are needed here.
type kustomization struct {
	APIVersion string   `json:"apiVersion"`
	Kind       string   `json:"kind"`
	Namespace  string   `json:"namespace,omitempty"`
	Resources  []string `json:"resources,omitempty"`
	Patches    []patch  `json:"patches,omitempty"`
}

type patch struct {
	Target target `json:"target"`
	Patch  string `json:"patch"`
}

type target struct {
	Kind string `json:"kind"`
	Name string `json:"name"`
}

// newComponent is a component that adds a flag to the manager's.
func newComponent(flag string) kustomization {
	return kustomization{
		APIVersion: "kustomize.config.k8s.io/v1alpha1",
		Kind:       "Component",
		Patches: []patch{{
			Target: target{Kind: "Deployment", Name: serviceAccount},
			Patch:  operation("add", "/spec/template/spec/containers/0/args/-", flag),
		}},
	}
}

// operation is a JSON patch of one operation.
func operation(op, path string, value any) string {
	text, _ := json.Marshal([]any{map[string]any{"op": op, "path": path, "value": value}}) // strings and rules: always marshals
	asYAML, _ := yaml.JSONToYAML(text)
	return string(asYAML)
}

func documents(objects ...any) ([]byte, error) {
	out := []byte(generatedHeader)
	for i, object := range objects {
		text, err := yaml.Marshal(object)
		if err != nil {
			return nil, err
		}
		if i > 0 {
			out = append(out, "---\n"...)
		}
		out = append(out, text...)
	}
	return out, nil
}
