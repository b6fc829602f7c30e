// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"

	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"
)

const chartDir = "helm/quartermaster"

// chartCopies are manifests that the chart has copies of, since a chart includes no file from outside.
var chartCopies = map[string]string{
	"alerts.yaml":             "components/monitoring/alerts.yaml",
	"dashboard.json":          "components/monitoring/dashboard.json",
	"fence.yaml":              "components/fence/fence.yaml",
	"replication-policy.yaml": "components/replication-policy/policy.yaml",
}

// chartFiles returns what is generated of the chart, by path below deploy, the directory dir.
func chartFiles(dir string) (map[string][]byte, error) {
	files := map[string][]byte{}
	for name, source := range chartCopies {
		text, err := os.ReadFile(filepath.Join(dir, source))
		if err != nil {
			return nil, err
		}
		if filepath.Ext(name) == ".yaml" {
			text = append([]byte("# Copied by make generate from deploy/"+source+". Do not edit.\n"), text...)
		}
		files[chartDir+"/files/"+name] = text
	}
	roles, err := chartRoles()
	if err != nil {
		return nil, err
	}
	text, err := yaml.Marshal(roles)
	if err != nil {
		return nil, err
	}
	files[chartDir+"/files/roles.yaml"] = append([]byte(rolesHeader), text...)
	if files[chartDir+"/values.schema.json"], err = valuesSchema(); err != nil {
		return nil, err
	}
	files[chartDir+"/README.md"], err = chartReadme(filepath.Join(dir, chartDir))
	return files, err
}

const rolesHeader = "# Written by make generate from what manager rbac prints. Do not edit.\n" +
	"# A rule is granted if a setting in its `when` is made, or it has none, and no setting in its `unless`\n" +
	"# and not all in its `unlessAll` are made.\n"

// The namespace of the federation is a flag. Names of roles there end in the installation's namespace.
const (
	federationNamespace  = "kube-federation-system"
	otherNamespaceSuffix = ".kube-system"
)

// The rules for each type that ttl may delete are made like the rules for this type.
const anyType = "plural.group"

// baseFlags enable the controllers whose rules the settings change.
var baseFlags = []string{"--controllers=*,replication,ttl,federation,csr-approver,scale-schedule", "--scale-schedule-kinds=", "--ttl-include-resources=" + anyType}

// settings are the flags that add rules to baseFlags, or take some away, by the name under which
// the template quartermaster.settings of the chart knows them: NAME=ITEM for an item of a list,
// NAME=only ITEM,... for a list. baseFlags name no kind of scale-schedule, to which these add. The list of
// types of ttl is not among them: the chart writes the rules for these itself.
var settings = map[string]string{
	"authentication-skip-lookup":                    "--authentication-skip-lookup",
	"compat=downscaler":                             "--compat=downscaler",
	"compat=janitor":                                "--compat=janitor",
	"compat=reflector":                              "--compat=reflector",
	"compat=reloader":                               "--compat=reloader",
	"compat=replicator":                             "--compat=replicator",
	"compat=ttl-controller":                         "--compat=ttl-controller",
	"config-reload-argo-rollouts":                   "--config-reload-argo-rollouts",
	"config-reload-csi":                             "--config-reload-csi",
	"config-reload-dry-run":                         "--config-reload-dry-run",
	"config-reload-namespace-selector":              "--config-reload-namespace-selector=a=b",
	"dry-run":                                       "--dry-run",
	"federation-dns":                                "--federation-dns",
	"leader-elect=false":                            "--leader-elect=false",
	"namespaces":                                    "--namespaces=kube-system",
	"secure-port=0":                                 "--secure-port=0",
	"scale-schedule-kinds=cronjobs":                 "--scale-schedule-kinds=cronjobs",
	"scale-schedule-kinds=deployments":              "--scale-schedule-kinds=deployments",
	"scale-schedule-kinds=horizontalpodautoscalers": "--scale-schedule-kinds=horizontalpodautoscalers",
	"scale-schedule-kinds=rollouts.argoproj.io":     "--scale-schedule-kinds=rollouts.argoproj.io",
	"scale-schedule-kinds=scaledobjects.keda.sh":    "--scale-schedule-kinds=scaledobjects.keda.sh",
	"scale-schedule-kinds=statefulsets":             "--scale-schedule-kinds=statefulsets",
	"replication-kinds=only configmap":              "--replication-kinds=ConfigMap",
	"replication-kinds=only secret":                 "--replication-kinds=Secret",
}

// excludeFlags are flags with lists of what is left out, whose items are settings too.
var excludeFlags = map[string][]string{
	"config-reload-exclude-kinds":   {"cronjobs", "daemonsets", "deployments", "jobs", "rollouts", "statefulsets"},
	"config-reload-exclude-sources": {"configmaps", "secrets"},
}

// chartRole has every rule that a setting can bring about.
type chartRole struct {
	Name       string      `json:"name"`
	Controller string      `json:"controller,omitempty"` // that the role is for
	Scopes     []string    `json:"in"`                   // cluster, release, default, kube-system, federation, or watched, which is the cluster without --namespaces
	Rules      []chartRule `json:"rules"`
}

type chartRule struct {
	When      []string          `json:"when,omitempty"`
	Unless    []string          `json:"unless,omitempty"`
	UnlessAll []string          `json:"unlessAll,omitempty"`
	Rule      rbacv1.PolicyRule `json:"rule"`
}

// withBaseFlags returns baseFlags and the flags. With --namespaces, it leaves out the controllers that do not
// start then.
func withBaseFlags(flags ...string) []string {
	all := append(slices.Clone(baseFlags), flags...)
	if slices.ContainsFunc(flags, func(f string) bool { return strings.HasPrefix(f, "--namespaces=") }) {
		all[0] = "--controllers=*,replication,ttl,scale-schedule"
	}
	return all
}

func chartRoles() (roles []*chartRole, err error) {
	// role returns the role of that name in roles, and adds an empty one if there is none.
	role := func(o object) *chartRole {
		name := strings.TrimPrefix(o.Name, "quartermaster-")
		i := slices.IndexFunc(roles, func(r *chartRole) bool { return r.Name == name })
		if i < 0 {
			r := &chartRole{Name: name}
			if controller, ok := strings.CutPrefix(name, "controller-"); ok {
				r.Controller = strings.TrimSuffix(controller, otherNamespaceSuffix)
			}
			roles, i = append(roles, r), len(roles)
		}
		return roles[i]
	}
	base, err := rbac(baseFlags...)
	if err != nil {
		return nil, err
	}
	for _, o := range base {
		for _, rule := range splitByResource(o.Rules) {
			r := role(o)
			r.Rules = append(r.Rules, chartRule{Rule: rule})
		}
	}
	// granted returns the rules with these flags besides baseFlags.
	granted := func(flags ...string) (map[*chartRole][]rbacv1.PolicyRule, error) {
		objects, err := rbac(withBaseFlags(flags...)...)
		rules := map[*chartRole][]rbacv1.PolicyRule{}
		for _, o := range objects {
			if len(o.Rules) > 0 {
				rules[role(o)] = splitByResource(o.Rules)
			}
		}
		return rules, err
	}
	flagsBySetting, lists := maps.Clone(settings), []string{}
	for flag, items := range excludeFlags {
		for _, item := range items {
			flagsBySetting[flag+"="+item] = "--" + flag + "=" + item
			lists = append(lists, flag+"="+item)
		}
	}
	slices.Sort(lists)
	for _, name := range slices.Sorted(maps.Keys(flagsBySetting)) {
		rules, err := granted(flagsBySetting[name])
		if err != nil {
			return nil, err
		}
		for _, r := range roles {
			r.recordSetting(name, rules[r])
		}
	}
	// A workload that is not rolled may still be watched for another kind.
	kinds := slices.DeleteFunc(slices.Clone(lists), func(name string) bool { return !strings.Contains(name, "kinds") })
	for _, r := range roles {
		grantedWith := func(one, other string) ([]rbacv1.PolicyRule, error) {
			rules, err := granted(flagsBySetting[one], flagsBySetting[other])
			return rules[r], err
		}
		for i := range r.Rules {
			if err := errors.Join(r.Rules[i].recordExclusions(lists, grantedWith),
				r.Rules[i].recordPairs(kinds, grantedWith)); err != nil {
				return nil, err
			}
		}
	}
	return roles, setScopes(roles, base)
}

// splitByResource returns a rule for each resource, so that settings leave out one and not the others.
func splitByResource(rules []rbacv1.PolicyRule) (divided []rbacv1.PolicyRule) {
	for _, rule := range rules {
		for _, resource := range rule.Resources {
			single := rule
			single.Resources = []string{resource}
			divided = append(divided, single)
		}
	}
	return divided
}

func equals(a rbacv1.PolicyRule) func(rbacv1.PolicyRule) bool {
	return func(b rbacv1.PolicyRule) bool { return reflect.DeepEqual(a, b) }
}

// recordSetting notes which rules are there because of a setting, and which are not.
func (r *chartRole) recordSetting(setting string, granted []rbacv1.PolicyRule) {
	for i := range r.Rules {
		if c := &r.Rules[i]; len(c.When) == 0 && !slices.ContainsFunc(granted, equals(c.Rule)) {
			c.Unless = append(c.Unless, setting)
		}
	}
	for _, rule := range granted {
		i := slices.IndexFunc(r.Rules, func(c chartRule) bool { return equals(rule)(c.Rule) })
		if i < 0 {
			i = len(r.Rules)
			r.Rules = append(r.Rules, chartRule{Rule: rule, When: []string{}})
		}
		if c := &r.Rules[i]; c.When != nil {
			c.When = append(c.When, setting)
		}
	}
}

// recordExclusions notes the items of lists that take the rule away, whatever other settings have added it.
func (c *chartRule) recordExclusions(lists []string, granted func(when, item string) ([]rbacv1.PolicyRule, error)) error {
	for _, item := range lists {
		kept := len(c.When) == 0
		for _, when := range c.When {
			rules, err := granted(when, item)
			if err != nil {
				return err
			}
			kept = kept || slices.ContainsFunc(rules, equals(c.Rule))
		}
		if !kept {
			c.Unless = append(c.Unless, item)
		}
	}
	return nil
}

// recordPairs notes a pair of items of lists that together take the rule away, though each alone leaves it.
func (c *chartRule) recordPairs(lists []string, granted func(one, other string) ([]rbacv1.PolicyRule, error)) error {
	for i, one := range lists {
		for _, other := range lists[:i] {
			if len(c.When) > 0 || slices.Contains(c.Unless, one) || slices.Contains(c.Unless, other) {
				continue
			}
			if rules, err := granted(one, other); err != nil {
				return err
			} else if !slices.ContainsFunc(rules, equals(c.Rule)) {
				c.UnlessAll = []string{other, one}
			}
		}
	}
	return nil
}

// setScopes finds out where the roles stand, from the roles of an installation in another namespace or, if
// they are not used with --namespaces, from base.
func setScopes(roles []*chartRole, base []object) error {
	scoped, err := rbac(withBaseFlags(
		"--dry-run", "--namespaces=watched", "--leader-elect-resource-namespace=release", "--scale-schedule-kinds=deployments")...)
	if err != nil {
		return err
	}
	for _, r := range roles {
		for _, o := range scoped {
			if strings.HasSuffix(o.Kind, "Role") && o.Namespace != federationNamespace && o.Namespace != metav1.NamespaceDefault && strings.TrimSuffix(o.Name, ".release") == "quartermaster-"+r.Name {
				r.Scopes = append(r.Scopes, cmp.Or(o.Namespace, "cluster"))
			}
		}
		if r.Scopes != nil {
			continue
		}
		for _, o := range base {
			if strings.HasSuffix(o.Kind, "Role") && o.Name == "quartermaster-"+r.Name {
				r.Scopes = append(r.Scopes, cmp.Or(map[string]string{"": "cluster", federationNamespace: "federation"}[o.Namespace], o.Namespace))
			}
		}
		r.Name = strings.TrimSuffix(r.Name, otherNamespaceSuffix) // the chart adds its own namespace
	}
	return nil
}
