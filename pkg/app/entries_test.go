// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/yaml"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/informers"
)

// withFunctions returns the entry with a New that returns an idle controller, unless it has one.
func withFunctions(e controllers.Entry) controllers.Entry {
	if e.New == nil {
		e.New = func(controllers.Host) (controllers.Controller, error) { return &scripted{}, nil }
	}
	return e
}

// needing returns the Needs of an entry.
func needing(needs ...informers.Need) func(controllers.Settings) ([]informers.Need, error) {
	return func(controllers.Settings) ([]informers.Need, error) { return needs, nil }
}

// flagsConfig is a Config that adds flags.
type flagsConfig struct{ add func(*pflag.FlagSet) }

func (c *flagsConfig) AddFlags(fs *pflag.FlagSet)        { c.add(fs) }
func (*flagsConfig) Validate(controllers.Settings) error { return nil }

// lines compares the errors joined in err with want.
func lines(t *testing.T, err error, want ...string) {
	t.Helper()
	if err == nil {
		t.Fatal("accepted")
	}
	assert.Equal(t, "errors", want, strings.Split(err.Error(), "\n"))
}

func TestEntriesReportAllMistakes(t *testing.T) {
	const notALabel = `a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end with an alphanumeric character ` +
		`(e.g. 'my-name',  or '123-abc', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?')`
	flag := func(name, shorthand string) func(*pflag.FlagSet) {
		return func(fs *pflag.FlagSet) { fs.BoolP(name, shorthand, false, "") }
	}
	entry := func(name string, flags func(*pflag.FlagSet)) controllers.Entry {
		return withFunctions(controllers.Entry{Name: name, Config: &flagsConfig{flags}})
	}
	none := func(*pflag.FlagSet) {}
	commanded := func(name, command string) controllers.Entry {
		e := entry(name, none)
		e.Command = func(func() (controllers.Settings, *rest.Config, error)) *cobra.Command {
			return &cobra.Command{Use: command}
		}
		return e
	}
	for name, tc := range map[string]struct {
		entries []controllers.Entry
		want    []string
	}{
		"no function New, in two entries": {
			[]controllers.Entry{{Name: "one"}, withFunctions(controllers.Entry{Name: "fine"}), {Name: "two"}},
			[]string{"controller one: the function New is missing", "controller two: the function New is missing"}},
		"no name":                 {[]controllers.Entry{entry("", none)}, []string{`controller number 1, which has no name: the name "" is not a DNS label: ` + notALabel}},
		"a name that is no label": {[]controllers.Entry{entry("100%d", none)}, []string{`controller 100%d: the name "100%d" is not a DNS label: ` + notALabel}},
		"one name twice":          {[]controllers.Entry{entry("one", none), entry("one", none)}, []string{"controller one: another entry has this name"}},
		"a flag of the host":      {[]controllers.Entry{entry("one", flag("controllers", ""))}, []string{`--controllers is a flag of two groups, "generic" and "controller one"`}},
		"a flag of a later group of the host, and one that every command has": {
			[]controllers.Entry{entry("one", func(fs *pflag.FlagSet) { flag("vmodule", "")(fs); flag("help", "")(fs) })},
			[]string{`--help is a flag of two groups, "global" and "controller one"`, `--vmodule is a flag of two groups, "controller one" and "logs"`}},
		"the command of the manager, and one command twice": {
			[]controllers.Entry{commanded("one", "status"), commanded("two", "size"), commanded("three", "size")},
			[]string{`controller one: its command "status" is a command of the manager or of another controller`,
				`controller three: its command "size" is a command of the manager or of another controller`}},
		"a flag of another controller": {
			[]controllers.Entry{entry("one", flag("size", "")), entry("two", flag("size", ""))}, []string{`--size is a flag of two groups, "controller one" and "controller two"`}},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := executeBuild([]BuildOption{With(tc.entries...)}, "--v=2", "--controllers=*")
			lines(t, err, tc.want...)
		})
	}
}

func TestControllersListSelectsControllers(t *testing.T) {
	build := []BuildOption{With(withFunctions(controllers.Entry{Name: "one", Summary: "does it"}),
		withFunctions(controllers.Entry{Name: "two"}), withFunctions(controllers.Entry{Name: "three", OffByDefault: true}))}
	for name, tc := range map[string]struct {
		items, one, two, three string
	}{
		"star is all that are on by default":     {"*", "on", "on", "off"},
		"a name adds one that is off":            {"*,three", "on", "on", "on"},
		"a minus takes one away":                 {"*,-one", "off", "on", "off"},
		"without a star only the named ones run": {"two", "off", "on", "off"},
		"the first item that names it decides":   {"one,-one", "on", "off", "off"},
		"none at all is possible":                {"", "off", "off", "off"},
	} {
		t.Run(name, func(t *testing.T) {
			out, err := executeBuild(build, "controllers", "--controllers="+tc.items)
			assert.NoError(t, err)
			want := fmt.Sprintf("NAME DEFAULT NOW SUMMARY one on %s does it two on %s three off %s", tc.one, tc.two, tc.three)
			assert.Equal(t, "list", want, strings.Join(strings.Fields(out), " "))
		})
	}
	o := newOptions(t, build...)
	o.Generic.Controllers = []string{"two", "one"}
	on, err := o.enabled()
	assert.NoError(t, err)
	assert.Equal(t, "first in the order of the entries", "one", on[0].Name)
}

func TestLoopOptionsFollowEntryAndFlag(t *testing.T) {
	var got []int
	create := func(h controllers.Host) (controllers.Controller, error) {
		got = append(got, h.LoopOptions.Workers, cap(h.LoopOptions.WaitFor))
		return &scripted{}, nil
	}
	build := With(controllers.Entry{Name: "one", Workers: 3, New: create, Needs: needing(informers.Need{Resource: informers.ConfigMaps}, informers.Need{Resource: informers.Secrets}, informers.Need{Resource: informers.Jobs})}, controllers.Entry{Name: "two", New: create})
	o := newOptions(t, build)
	assert.NoError(t, errors.Join(o.Parse([]string{"--config=" + writeConfig(t, "one-concurrent-syncs: 5")}), o.Check()))
	o.Client.Master = newAPIServer(t).URL
	_, err := builtProcess(t, o)
	assert.NoError(t, err)
	assert.Equal(t, "workers, and room for caches that loops wait for", []int{5, 3, 0, 0}, got)
	path := writeConfig(t, "one-concurrent-syncs: 0", "two-concurrent-syncs: 1")
	_, err = executeBuild([]BuildOption{build}, "--config="+path)
	lines(t, err, path+":5: two-concurrent-syncs: not a flag that the file can set", path+":4: --one-concurrent-syncs: must be at least 1, got 0")
}

// ownBuild is a build with a name and a controller of its own.
var ownBuild = []BuildOption{Named("shopkeeper"), With(withFunctions(controllers.Entry{
	Name: "shelves", Summary: "fills shelves",
	Needs: needing(informers.Need{Resource: informers.ConfigMaps}),
	Permissions: func(controllers.Settings) []rbacv1.PolicyRule {
		return []rbacv1.PolicyRule{rule("", "configmaps", "", "patch")}
	},
}))}

// newOptions returns the options of a build.
func newOptions(t *testing.T, build ...BuildOption) *Options {
	t.Helper()
	o, err := NewOptions(build...)
	assert.NoError(t, err)
	return o
}

func TestBuildPrintsItsOwnNameEverywhere(t *testing.T) {
	for name, args := range map[string][]string{
		"help":            {"--help"},
		"status":          {"status", "--help"},
		"controllers":     {"controllers"},
		"the help of one": {"controllers", "--help"},
		"rbac":            {"rbac"},
	} {
		t.Run(name, func(t *testing.T) {
			out, err := executeBuild(ownBuild, args...)
			assert.NoError(t, err)
			for _, builtIn := range []string{"config-reload", "replication", "--compat"} {
				if strings.Contains(out, builtIn) {
					t.Errorf("it has %s:\n%s", builtIn, out)
				}
			}
			// What stays are the kind of the configuration file and the names of metrics.
			rest := regexp.MustCompile(`quartermaster\.dev|quartermaster_\w+`).ReplaceAllString(out, "")
			if strings.Contains(rest, "uartermaster") {
				t.Errorf("it names quartermaster:\n%s", out)
			}
			if wrong := regexp.MustCompile(`\bmanager (status|rbac|--help)`).FindString(out); wrong != "" {
				t.Errorf("it tells to run %s:\n%s", wrong, out)
			}
		})
	}
	roles, err := executeBuild(ownBuild, "rbac")
	assert.NoError(t, err)
	var names []string
	for _, match := range regexp.MustCompile(`(?m)^  name: (.*)$`).FindAllStringSubmatch(roles, -1) {
		names = append(names, match[1])
	}
	slices.Sort(names)
	want := []string{"shopkeeper", "shopkeeper-api-servers", "shopkeeper-api-servers.kube-system", "shopkeeper-authentication-reader",
		"shopkeeper-controller-shelves", "shopkeeper-events", "shopkeeper-fence", "shopkeeper-host", "shopkeeper-reviews"}
	assert.Equal(t, "the names of roles and accounts", want, slices.Compact(names))
	if !strings.Contains(roles, "- kind: ServiceAccount\n  name: shopkeeper\n  namespace: kube-system\n") {
		t.Errorf("the roles are not bound to the ServiceAccount shopkeeper:\n%s", roles)
	}
	o := newOptions(t, ownBuild...)
	assert.Equal(t, "Lease", "kube-system/shopkeeper", o.Election.Lease().String())
}

// TestRBACRefusesWhatTheStartRefuses has entries that both rbac and the start refuse, with one error.
func TestRBACRefusesWhatTheStartRefuses(t *testing.T) {
	failing := func(name string) controllers.Entry {
		return controllers.Entry{Name: name, Needs: func(controllers.Settings) ([]informers.Need, error) { return nil, errors.New("cannot tell") }}
	}
	for name, tc := range map[string]struct {
		entries []controllers.Entry
		want    []string
	}{
		"a need without namespaces": {[]controllers.Entry{{Name: "one", Needs: needing(informers.Need{Resource: informers.Namespaces, ClusterScoped: true})}},
			[]string{"controller one: needs namespaces, which have no namespace: not possible with --namespaces"}},
		"a need in another namespace": {[]controllers.Entry{{Name: "one", Needs: needing(informers.Need{Resource: informers.Secrets, Namespace: "b"})}},
			[]string{"one: secrets: the namespace b is not in --namespaces"}},
		"needs that fail": {[]controllers.Entry{failing("one"), failing("two")}, []string{"controller one: cannot tell", "controller two: cannot tell"}},
		"a scheme that fails": {[]controllers.Entry{{Name: "one", AddToScheme: func(*runtime.Scheme) error { return errors.New("no") }}},
			[]string{"controller one: no"}},
	} {
		t.Run(name, func(t *testing.T) {
			var entries []controllers.Entry
			for _, e := range tc.entries {
				entries = append(entries, withFunctions(e))
			}
			o := newOptions(t, With(entries...))
			o.Informers.Namespaces = []string{"a"}
			_, printed := o.rbac()
			lines(t, printed, tc.want...)
			_, started := build(t.Context(), o)
			lines(t, started, tc.want...)
		})
	}
}

func TestBuildNameMustBeADNSLabel(t *testing.T) {
	const want = `the name "My manager" of the build is not a DNS label: `
	_, err := executeBuild([]BuildOption{Named("My manager")}, "rbac")
	assert.Equal(t, fmt.Sprintf("%q begins with %q", fmt.Sprint(err), want), true, strings.HasPrefix(fmt.Sprint(err), want))
}

func TestSettingsNameThePod(t *testing.T) {
	t.Setenv("POD_NAME", "shopkeeper-0")
	for namespace, want := range map[string]string{
		"":       "kube-system/shopkeeper-0", // that of the Lease
		"market": "market/shopkeeper-0",
	} {
		t.Setenv("POD_NAMESPACE", namespace)
		assert.Equal(t, "Pod with POD_NAMESPACE="+namespace, want, newOptions(t, ownBuild...).Settings().Pod.String())
	}
}

// printRBAC runs manager rbac. It returns a line for each rule, "ROLE in NAMESPACE: VERBS
// RESOURCES/NAMES", and for each binding, "ROLE in NAMESPACE: ACCOUNT in NAMESPACE". A ClusterRole
// is in no namespace.
func printRBAC(t *testing.T, args ...string) (rules, bindings []string) {
	t.Helper()
	out, err := execute(t, append([]string{"rbac"}, args...)...)
	assert.NoError(t, err)
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
		assert.NoError(t, err)
		where := o.Name
		if o.Namespace != "" {
			where += " in " + o.Namespace
		}
		if strings.HasPrefix(o.Kind, "Cluster") != (o.Namespace == "") {
			t.Errorf("%s %s", o.Kind, where)
		}
		for _, r := range o.Rules {
			rules = append(rules, where+": "+verbsAndResources(r))
		}
		for _, s := range o.Subjects {
			if scope, _ := strings.CutSuffix(o.Kind, "Binding"); o.RoleRef.Kind != scope || o.RoleRef.Name != o.Name {
				t.Errorf("%s %s is of %s %s", o.Kind, where, o.RoleRef.Kind, o.RoleRef.Name)
			}
			bindings = append(bindings, where+": "+s.Name+" in "+s.Namespace)
		}
	}
}

// verbsAndResources returns "VERBS RESOURCES,NAMES".
func verbsAndResources(r rbacv1.PolicyRule) string {
	return strings.Join(r.Verbs, ",") + " " + strings.Join(append(slices.Clone(r.Resources), r.ResourceNames...), ",")
}

func TestRBACGrantsWhatTheFlagsAskFor(t *testing.T) {
	controller := func(where string) []string {
		return []string{
			"quartermaster-controller-config-reload" + where + ": list,watch configmaps,secrets",
			"quartermaster-controller-config-reload" + where + ": list,watch deployments",
			"quartermaster-controller-config-reload" + where + ": get,patch deployments",
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
		"quartermaster-api-servers.kube-system in default: get endpointslices,kubernetes",
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
		"without a flag, in the whole cluster":          {rules: slices.Concat(host("kube-system"), fence, events, secure, controller(""))},
		"a controller that is off needs nothing":        {args: []string{"--controllers=-config-reload"}, rules: slices.Concat(host("kube-system"), fence, events, secure)},
		"without the secure port nobody is asked about": {args: []string{"--secure-port=0"}, rules: slices.Concat(host("kube-system"), fence, events, controller(""))},
		"without an election there is no Lease":         {args: []string{"--leader-elect=false"}, rules: slices.Concat(events, secure, controller(""))},
		"the Namespace that names the leader is called after the Lease": {
			args: []string{"--leader-elect-resource-namespace=home", "--secure-port=0", "--controllers=-config-reload"},
			rules: slices.Concat(host("home"), []string{"quartermaster-events.home: create,patch events",
				"quartermaster-fence.home: get,patch namespaces,quartermaster-leader-home",
				"quartermaster-api-servers.home in default: get endpointslices,kubernetes",
				"quartermaster-api-servers.home in kube-system: list leases"}),
		},
		"in two namespaces nothing is granted in the cluster, and Events of the Lease are in its own": {
			args: []string{"--namespaces=a,b", "--leader-elect-resource-namespace=home", "--secure-port=0"},
			rules: slices.Concat(host("home"),
				[]string{"quartermaster-events.home in a: create,patch events", "quartermaster-events.home in b: create,patch events",
					"quartermaster-events in home: create,patch events"},
				controller(".home in a"), controller(".home in b")),
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
				assert.Equal(t, "rules and bindings", both[0], both[1])
			}
		})
	}
}

// TestGrantsFollowNeedsAndScope has a controller with permissions everywhere, in the namespace mine, and for
// objects without a namespace.
func TestGrantsFollowNeedsAndScope(t *testing.T) {
	permit := func(resource string) []rbacv1.PolicyRule { return []rbacv1.PolicyRule{rule("", resource, "", "get")} }
	e := controllers.Entry{
		Permissions: func(controllers.Settings) []rbacv1.PolicyRule { return permit("pods") },
		NamespacePermissions: func(controllers.Settings) map[string][]rbacv1.PolicyRule {
			return map[string][]rbacv1.PolicyRule{"mine": permit("secrets"), "": permit("namespaces")}
		},
	}
	needs := []informers.Need{{Resource: informers.ConfigMaps}, {Resource: informers.Secrets},
		{Resource: informers.ConfigMaps, FieldSelector: "metadata.name=one,metadata.namespace!=x"},
		{Resource: informers.Deployments, FieldSelector: "metadata.name!=one"}, {Resource: informers.Secrets, Namespace: "mine"},
		{Resource: informers.Namespaces, ClusterScoped: true}}
	const everywhere = "list,watch configmaps,secrets; list,watch configmaps,one; list,watch deployments"
	for name, tc := range map[string]struct {
		scope []string
		want  map[string]string
	}{
		"in the whole cluster": {nil, map[string]string{
			"": everywhere + "; list,watch namespaces; get pods; get namespaces", "mine": "list,watch secrets; get secrets"}},
		"in two namespaces, one of them its own": {[]string{"shop", "mine"}, map[string]string{
			"": "list,watch namespaces; get namespaces", "shop": everywhere + "; get pods",
			"mine": everywhere + "; list,watch secrets; get pods; get secrets"}},
		"in another namespace": {[]string{"shop"}, map[string]string{
			"": "list,watch namespaces; get namespaces", "shop": everywhere + "; get pods", "mine": "list,watch secrets; get secrets"}},
	} {
		t.Run(name, func(t *testing.T) {
			granted, err := GrantsOf(e, controllers.Settings{Namespaces: tc.scope}, needs)
			assert.NoError(t, err)
			got := map[string]string{}
			for namespace, rules := range granted {
				var texts []string
				for _, r := range rules {
					texts = append(texts, verbsAndResources(r))
				}
				got[namespace] = strings.Join(texts, "; ")
			}
			assert.Equal(t, "rules", tc.want, got)
		})
	}
}
