// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"

	rbacv1 "k8s.io/api/rbac/v1"
	"sigs.k8s.io/yaml"
)

const chartDir = "helm/quartermaster"

// chartFiles are manifests that the chart has copies of, since a chart includes no file from outside.
var chartFiles = map[string]string{
	"alerts.yaml":             "components/monitoring/alerts.yaml",
	"dashboard.json":          "components/monitoring/dashboard.json",
	"fence.yaml":              "components/fence/fence.yaml",
	"replication-policy.yaml": "components/replication-policy/policy.yaml",
}

// chart returns what is generated of the chart, by path below deploy, the directory dir.
func chart(dir string) (map[string][]byte, error) {
	files := map[string][]byte{}
	for name, source := range chartFiles {
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
	"# A rule is granted if a setting in its `when` is made, or it has none, and no setting in its `unless` is made.\n"

// The rules for a type that ttl may delete are those for this one.
const anyType = "plural.group"

// allOn switches on what settings only change.
var allOn = []string{"--controllers=*,replication,ttl", "--ttl-include-resources=" + anyType}

// settings are the flags that add rules to those of allOn, or take some away, by the name under which
// the template quartermaster.settings of the chart knows them. Flags that list types are not among
// them: the chart drops the rules for the types itself.
var settings = map[string]string{
	"authentication-kubeconfig":        "--authentication-kubeconfig=file",
	"authentication-skip-lookup":       "--authentication-skip-lookup",
	"authorization-kubeconfig":         "--authorization-kubeconfig=file",
	"compat=janitor":                   "--compat=janitor",
	"compat=reflector":                 "--compat=reflector",
	"compat=reloader":                  "--compat=reloader",
	"compat=replicator":                "--compat=replicator",
	"compat=ttl-controller":            "--compat=ttl-controller",
	"config-reload-argo-rollouts":      "--config-reload-argo-rollouts",
	"config-reload-csi":                "--config-reload-csi",
	"config-reload-dry-run":            "--config-reload-dry-run",
	"config-reload-namespace-selector": "--config-reload-namespace-selector=a=b",
	"dry-run":                          "--dry-run",
	"leader-elect=false":               "--leader-elect=false",
	"namespaces":                       "--namespaces=kube-system",
	"secure-port=0":                    "--secure-port=0",
	"use-service-account-credentials":  "--use-service-account-credentials",
}

// chartRole has every rule that a setting can bring about.
type chartRole struct {
	Name       string      `json:"name"`
	Controller string      `json:"controller,omitempty"` // that the role is for
	In         []string    `json:"in"`                   // cluster, release, default, kube-system, or watched, which is the cluster without --namespaces
	Rules      []chartRule `json:"rules"`
}

type chartRule struct {
	When   []string          `json:"when,omitempty"`
	Unless []string          `json:"unless,omitempty"`
	Rule   rbacv1.PolicyRule `json:"rule"`
}

func chartRoles() (roles []*chartRole, err error) {
	// role returns the role, to which it adds nothing if it is there.
	role := func(o object) *chartRole {
		name := strings.TrimPrefix(o.Name, "quartermaster-")
		at := slices.IndexFunc(roles, func(r *chartRole) bool { return r.Name == name })
		if at < 0 {
			r := &chartRole{Name: name}
			if kind, controller, _ := strings.Cut(name, "-"); kind == "cache" || kind == "controller" {
				r.Controller = controller
			}
			roles, at = append(roles, r), len(roles)
		}
		return roles[at]
	}
	base, err := rbac(allOn...)
	if err != nil {
		return nil, err
	}
	for _, o := range base {
		for _, rule := range o.Rules {
			r := role(o)
			r.Rules = append(r.Rules, chartRule{Rule: rule})
		}
	}
	for _, name := range slices.Sorted(maps.Keys(settings)) {
		with, err := rbac(append(slices.Clone(allOn), settings[name])...)
		if err != nil {
			return nil, err
		}
		granted := map[*chartRole][]rbacv1.PolicyRule{}
		for _, o := range with {
			// The chart writes the role tokens itself, since it names the controllers.
			if len(o.Rules) > 0 && o.Name != "quartermaster-tokens" {
				granted[role(o)] = o.Rules
			}
		}
		for _, r := range roles {
			r.compare(name, granted[r])
		}
	}
	return roles, place(roles, base)
}

// compare notes which rules are there because of a setting, and which are not.
func (r *chartRole) compare(setting string, granted []rbacv1.PolicyRule) {
	equal := func(a rbacv1.PolicyRule) func(rbacv1.PolicyRule) bool {
		return func(b rbacv1.PolicyRule) bool { return reflect.DeepEqual(a, b) }
	}
	for i := range r.Rules {
		if c := &r.Rules[i]; len(c.When) == 0 && !slices.ContainsFunc(granted, equal(c.Rule)) {
			c.Unless = append(c.Unless, setting)
		}
	}
	for _, rule := range granted {
		at := slices.IndexFunc(r.Rules, func(c chartRule) bool { return equal(rule)(c.Rule) })
		if at < 0 {
			at = len(r.Rules)
			r.Rules = append(r.Rules, chartRule{Rule: rule, When: []string{}})
		}
		if c := &r.Rules[at]; c.When != nil {
			c.When = append(c.When, setting)
		}
	}
}

// place finds out where the roles stand, from those of an installation in another namespace or, if they are
// not used with --namespaces, from base.
func place(roles []*chartRole, base []object) error {
	scoped, err := rbac(append(slices.Clone(allOn),
		"--dry-run", "--namespaces=watched", "--leader-elect-resource-namespace=release")...)
	if err != nil {
		return err
	}
	for _, r := range roles {
		for _, o := range scoped {
			if strings.HasSuffix(o.Kind, "Role") && strings.TrimSuffix(o.Name, "-release") == "quartermaster-"+r.Name {
				r.In = append(r.In, cmp.Or(o.Namespace, "cluster"))
			}
		}
		if r.In != nil {
			continue
		}
		for _, o := range base {
			if strings.HasSuffix(o.Kind, "Role") && o.Name == "quartermaster-"+r.Name {
				r.In = append(r.In, cmp.Or(o.Namespace, "cluster"))
			}
		}
		r.Name = strings.TrimSuffix(r.Name, "-kube-system") // the chart adds its own namespace
	}
	return nil
}
