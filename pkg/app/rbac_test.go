// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"bufio"
	"errors"
	"io"
	"slices"
	"strings"
	"testing"

	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/yaml"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/informers"
)

// printRBAC runs manager rbac. It returns a line for each rule, "ROLE in NAMESPACE: VERBS
// RESOURCES/NAMES", and for each binding, "ROLE in NAMESPACE: ACCOUNT in NAMESPACE". A ClusterRole
// is in no namespace.
func printRBAC(t *testing.T, args ...string) (rules, bindings []string) {
	t.Helper()
	out, err := execute(t, append([]string{"rbac"}, args...)...)
	must(t, err)
	reader := utilyaml.NewYAMLReader(bufio.NewReader(strings.NewReader(out)))
	for {
		document, err := reader.Read()
		if errors.Is(err, io.EOF) {
			return rules, bindings
		}
		var o struct {
			metav1.TypeMeta   `json:",inline"`
			metav1.ObjectMeta `json:"metadata"`
			Rules             []rbacv1.PolicyRule `json:"rules"`
			Subjects          []rbacv1.Subject    `json:"subjects"`
			RoleRef           rbacv1.RoleRef      `json:"roleRef"`
		}
		if err == nil {
			err = yaml.Unmarshal(document, &o)
		}
		must(t, err)
		where := o.Name
		if o.Namespace != "" {
			where += " in " + o.Namespace
		}
		if strings.HasPrefix(o.Kind, "Cluster") != (o.Namespace == "") {
			t.Errorf("%s %s", o.Kind, where)
		}
		for _, r := range o.Rules {
			rules = append(rules, where+": "+strings.Join(r.Verbs, ",")+" "+strings.Join(append(slices.Clone(r.Resources), r.ResourceNames...), ","))
		}
		for _, s := range o.Subjects {
			if scope, _ := strings.CutSuffix(o.Kind, "Binding"); o.RoleRef.Kind != scope || o.RoleRef.Name != o.Name {
				t.Errorf("%s %s is of %s %s", o.Kind, where, o.RoleRef.Kind, o.RoleRef.Name)
			}
			bindings = append(bindings, where+": "+s.Name+" in "+s.Namespace)
		}
	}
}

func TestRBACGrantsWhatTheFlagsAskFor(t *testing.T) {
	controller := func(where string) []string {
		return []string{
			"quartermaster-controller-config-reload" + where + ": list,watch configmaps,secrets",
			"quartermaster-controller-config-reload" + where + ": get,list,watch,patch deployments",
		}
	}
	host := func(namespace string) []string {
		return []string{
			"quartermaster-host in " + namespace + ": get,watch,update leases,quartermaster",
			"quartermaster-host in " + namespace + ": create leases",
		}
	}
	fence := []string{
		"quartermaster-fence: get,patch namespaces,quartermaster-leader",
		"quartermaster-api-servers-kube-system in default: get endpointslices,kubernetes",
		"quartermaster-api-servers in kube-system: list leases",
	}
	secure := []string{
		"quartermaster-authentication-reader in kube-system: list,watch configmaps,extension-apiserver-authentication",
		"quartermaster-reviews: create tokenreviews",
		"quartermaster-reviews: create subjectaccessreviews",
	}
	events := []string{"quartermaster-events: create,patch events"}
	for name, tc := range map[string]struct {
		args  []string
		rules []string
	}{
		"without a flag, in the whole cluster": {rules: slices.Concat(host("kube-system"), fence, events, secure, controller(""))},
		"a controller that is off needs nothing": {
			args:  []string{"--controllers=-config-reload"},
			rules: slices.Concat(host("kube-system"), fence, events, secure),
		},
		"without the secure port nobody is asked about": {
			args:  []string{"--secure-port=0"},
			rules: slices.Concat(host("kube-system"), fence, events, controller("")),
		},
		"without an election there is no Lease": {
			args:  []string{"--leader-elect=false"},
			rules: slices.Concat(events, secure, controller("")),
		},
		"the Namespace that names the leader is called after the Lease": {
			args: []string{"--leader-elect-resource-namespace=home", "--secure-port=0", "--controllers=-config-reload"},
			rules: slices.Concat(host("home"), []string{"quartermaster-events-home: create,patch events",
				"quartermaster-fence-home: get,patch namespaces,quartermaster-leader-home",
				"quartermaster-api-servers-home in default: get endpointslices,kubernetes",
				"quartermaster-api-servers-home in kube-system: list leases"}),
		},
		"in two namespaces nothing is granted in the cluster, and Events of the Lease are in its own": {
			args: []string{"--namespaces=a,b", "--leader-elect-resource-namespace=home", "--secure-port=0"},
			rules: slices.Concat(host("home"),
				[]string{"quartermaster-events-home in a: create,patch events", "quartermaster-events-home in b: create,patch events",
					"quartermaster-events in home: create,patch events"},
				controller("-home in a"), controller("-home in b")),
		},
		"the Lease's own namespace may be one of those": {
			args:  []string{"--namespaces=home", "--leader-elect-resource-namespace=home", "--secure-port=0"},
			rules: slices.Concat(host("home"), []string{"quartermaster-events in home: create,patch events"}, controller(" in home")),
		},
	} {
		t.Run(name, func(t *testing.T) {
			// One kind of workload is enough: the controller's own tests check its rules.
			rules, bindings := printRBAC(t, append([]string{"--config-reload-exclude-kinds=statefulsets,daemonsets,cronjobs,jobs"}, tc.args...)...)
			home := "kube-system"
			if strings.Contains(strings.Join(tc.args, " "), "namespace=home") {
				home = "home"
			}
			var bound []string // each role, to the ServiceAccount
			for _, r := range tc.rules {
				role, _, _ := strings.Cut(r, ": ")
				bound = append(bound, role+": quartermaster in "+home)
			}
			slices.Sort(bound)
			for _, both := range [][2][]string{{tc.rules, rules}, {slices.Compact(bound), bindings}} {
				slices.Sort(both[0])
				slices.Sort(both[1])
				same(t, "rules and bindings", both[0], both[1])
			}
		})
	}
}

func TestRBACLetsTheCacheReadWhatIsNeeded(t *testing.T) {
	rule := func(resources, verbs string, names ...string) rbacv1.PolicyRule {
		return rbacv1.PolicyRule{APIGroups: []string{""}, Resources: strings.Fields(resources), Verbs: strings.Fields(verbs), ResourceNames: names}
	}
	for name, tc := range map[string]struct {
		rule   rbacv1.PolicyRule
		in     string // the namespace in which the rule holds; empty for all
		need   informers.Need
		failed bool
	}{
		"a rule for the resource":                              {rule: rule("configmaps", "get list watch patch")},
		"a rule for several resources":                         {rule: rule("pods configmaps", "list watch delete")},
		"a rule for several groups":                            {rule: rbacv1.PolicyRule{APIGroups: []string{"apps", ""}, Resources: []string{"configmaps"}, Verbs: []string{"list", "watch"}}},
		"a rule for another group":                             {rule: rbacv1.PolicyRule{APIGroups: []string{"apps"}, Resources: []string{"configmaps"}, Verbs: []string{"list", "watch"}}, failed: true},
		"a rule for another resource":                          {rule: rule("pods", "list watch"), failed: true},
		"a rule without watch":                                 {rule: rule("configmaps", "list"), failed: true},
		"a rule without list":                                  {rule: rule("configmaps", "watch"), failed: true},
		"a rule of wildcards, which do not count":              {rule: rule("*", "*"), failed: true},
		"a rule with a name, for a need that chooses the name": {rule: rule("configmaps", "list watch", "mine"), need: informers.Need{FieldSelector: "metadata.name=mine"}},
		"a rule with a name, for a need of all names":          {rule: rule("configmaps", "list watch", "mine"), failed: true},
		"a rule with a name, for a need that chooses another":  {rule: rule("configmaps", "list watch", "mine"), need: informers.Need{FieldSelector: "metadata.name=other"}, failed: true},
		"a rule of the only namespace of the need":             {rule: rule("configmaps", "list watch"), in: "shop", need: informers.Need{Namespace: "shop"}},
		"a rule of all namespaces, for a need in one":          {rule: rule("configmaps", "list watch"), need: informers.Need{Namespace: "shop"}},
		"a rule of one namespace, for a need in all":           {rule: rule("configmaps", "list watch"), in: "shop", failed: true},
		"a rule of one namespace, for a need in another":       {rule: rule("configmaps", "list watch"), in: "shop", need: informers.Need{Namespace: "x"}, failed: true},
	} {
		t.Run(name, func(t *testing.T) {
			rules := []rbacv1.PolicyRule{tc.rule}
			e := controllers.Entry{Permissions: func(controllers.Settings) []rbacv1.PolicyRule { return rules }}
			if tc.in != "" {
				e.Permissions = func(controllers.Settings) []rbacv1.PolicyRule { return nil }
				e.NamespacePermissions = func(controllers.Settings) map[string][]rbacv1.PolicyRule {
					return map[string][]rbacv1.PolicyRule{tc.in: rules}
				}
			}
			tc.need.Resource = informers.ConfigMaps
			_, err := grantsOf(e, controllers.Settings{}, []informers.Need{tc.need})
			const want = "needs configmaps in the cache, but its permissions do not let it list and watch them; wildcards do not count"
			if (err != nil) != tc.failed || err != nil && err.Error() != want {
				t.Errorf("error %v", err)
			}
		})
	}
}

// TestRBACOfAnOwnNamespaceFollowsTheScope has the roles of a controller with a namespace of its own, in which
// it may work anyway, and in which it may not.
func TestRBACOfAnOwnNamespaceFollowsTheScope(t *testing.T) {
	rule := func(resource string) []rbacv1.PolicyRule {
		return []rbacv1.PolicyRule{{APIGroups: []string{""}, Resources: []string{resource}, Verbs: []string{"get"}}}
	}
	g := grants{"": rule("configmaps"), "mine": rule("secrets")}
	for name, tc := range map[string]struct {
		of    string
		scope []string
		want  []rbacv1.PolicyRule
	}{
		"everywhere": {"", []string{""}, rule("configmaps")},
		"the own namespace of a controller that works everywhere": {"mine", []string{""}, rule("secrets")},
		"the own namespace, which is one of --namespaces":         {"mine", []string{"shop", "mine"}, append(rule("configmaps"), rule("secrets")...)},
		"the own namespace, which is none of --namespaces":        {"mine", []string{"shop"}, rule("secrets")},
		"a namespace of --namespaces that is not the own one":     {"shop", []string{"shop"}, rule("configmaps")},
	} {
		t.Run(name, func(t *testing.T) {
			same(t, "rules", tc.want, g.rulesIn(tc.of, tc.scope))
		})
	}
}
