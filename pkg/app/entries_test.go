// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/informers"
)

// withFunctions returns the entry with a New that returns an idle controller, and with Permissions that let
// the cache read what the entry needs, unless it has them.
func withFunctions(e controllers.Entry) controllers.Entry {
	if e.Permissions == nil && e.Needs != nil {
		e.Permissions = func(s controllers.Settings) (rules []rbacv1.PolicyRule) {
			needs, _ := e.Needs(s)
			for _, n := range needs {
				rules = append(rules, rule(n.Resource.Group, n.Resource.Resource, "", "list", "watch"))
			}
			return rules
		}
	}
	if e.New == nil {
		e.New = func(controllers.Host) (controllers.Controller, error) { return &scripted{}, nil }
	}
	return e
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
	same(t, "errors", want, strings.Split(err.Error(), "\n"))
}

func TestEntriesReportAllMistakes(t *testing.T) {
	const notALabel = `a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end with an alphanumeric character ` +
		`(e.g. 'my-name',  or '123-abc', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?')`
	flag := func(name, shorthand string) func(*pflag.FlagSet) {
		return func(fs *pflag.FlagSet) { fs.BoolP(name, shorthand, false, "") }
	}
	command := func(name string) func(func() (controllers.Settings, *rest.Config, error)) *cobra.Command {
		return func(func() (controllers.Settings, *rest.Config, error)) *cobra.Command {
			return &cobra.Command{Use: name}
		}
	}
	for name, tc := range map[string]struct {
		entries []controllers.Entry
		want    []string
	}{
		"no function New, in two entries": {
			[]controllers.Entry{{Name: "one"}, withFunctions(controllers.Entry{Name: "fine"}), {Name: "two"}},
			[]string{"controller one: the function New is missing", "controller two: the function New is missing"}},
		"no name": {
			[]controllers.Entry{withFunctions(controllers.Entry{})},
			[]string{fmt.Sprintf("controller number %d", len(registry())+1) + ` of the registry, which has no name: the name "" is not a DNS label: ` + notALabel}},
		"a name that is no label": {
			[]controllers.Entry{withFunctions(controllers.Entry{Name: "100%d"})}, []string{`controller 100%d: the name "100%d" is not a DNS label: ` + notALabel}},
		"one name twice": {
			[]controllers.Entry{withFunctions(controllers.Entry{Name: "one"}), withFunctions(controllers.Entry{Name: "one"})},
			[]string{"controller one: another entry has this name"}},
		"a flag of the host": {
			[]controllers.Entry{withFunctions(controllers.Entry{Name: "one", Config: &flagsConfig{flag("controllers", "")}})},
			[]string{`--controllers is a flag of two groups, "generic" and "controller one"`}},
		"a flag of a later group of the host, and one that every command has": {
			[]controllers.Entry{withFunctions(controllers.Entry{Name: "one", Config: &flagsConfig{func(fs *pflag.FlagSet) { flag("vmodule", "")(fs); flag("help", "")(fs) }}})},
			[]string{`--help is a flag of two groups, "global" and "controller one"`, `--vmodule is a flag of two groups, "controller one" and "logs"`}},
		"the command of the manager, and one command twice": {
			[]controllers.Entry{withFunctions(controllers.Entry{Name: "one", Command: command("status")}), withFunctions(controllers.Entry{Name: "two", Command: command("size")}),
				withFunctions(controllers.Entry{Name: "three", Command: command("size")})},
			[]string{`controller one: its command "status" is a command of the manager or of another controller`,
				`controller three: its command "size" is a command of the manager or of another controller`}},
		"a flag of another controller": {
			[]controllers.Entry{withFunctions(controllers.Entry{Name: "one", Config: &flagsConfig{flag("size", "")}}), withFunctions(controllers.Entry{Name: "two", Config: &flagsConfig{flag("size", "")}})},
			[]string{`--size is a flag of two groups, "controller one" and "controller two"`}},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := executeBuild([]BuildOption{With(tc.entries...)}, "--v=2", "--controllers=*")
			lines(t, err, tc.want...)
		})
	}
}

func TestControllersListSelectsControllers(t *testing.T) {
	build := []BuildOption{WithoutBuiltIns(), With(withFunctions(controllers.Entry{Name: "one", Summary: "does it"}),
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
			must(t, err)
			want := fmt.Sprintf("NAME DEFAULT NOW SUMMARY one on %s does it two on %s three off %s", tc.one, tc.two, tc.three)
			same(t, "list", want, strings.Join(strings.Fields(out), " "))
		})
	}
	o := newOptions(t, build...)
	o.Generic.Controllers = []string{"two", "one"}
	on, err := o.enabled()
	must(t, err)
	same(t, "first in the order of the registry", "one", on[0].Name)
}

// ownBuild is a build with a name and a controller of its own.
var ownBuild = []BuildOption{Named("shopkeeper"), WithoutBuiltIns(), With(withFunctions(controllers.Entry{
	Name: "shelves", Summary: "fills shelves",
	Needs: func(controllers.Settings) ([]informers.Need, error) {
		return []informers.Need{{Resource: informers.ConfigMaps}}, nil
	},
	Permissions: func(controllers.Settings) []rbacv1.PolicyRule {
		return []rbacv1.PolicyRule{rule("", "configmaps", "", "list", "watch", "patch")}
	},
}))}

// newOptions returns the options of a build.
func newOptions(t *testing.T, build ...BuildOption) *Options {
	t.Helper()
	o, err := NewOptions(build...)
	must(t, err)
	return o
}

func TestBuildHasItsNameEverywhere(t *testing.T) {
	for name, args := range map[string][]string{
		"help":            {"--help"},
		"status":          {"status", "--help"},
		"controllers":     {"controllers"},
		"the help of one": {"controllers", "--help"},
		"rbac":            {"rbac"},
	} {
		t.Run(name, func(t *testing.T) {
			out, err := executeBuild(ownBuild, args...)
			must(t, err)
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
	must(t, err)
	var names []string
	for _, match := range regexp.MustCompile(`(?m)^  name: (.*)$`).FindAllStringSubmatch(roles, -1) {
		names = append(names, match[1])
	}
	slices.Sort(names)
	want := []string{"shopkeeper", "shopkeeper-api-servers", "shopkeeper-api-servers-kube-system", "shopkeeper-authentication-reader",
		"shopkeeper-controller-shelves", "shopkeeper-events", "shopkeeper-fence", "shopkeeper-host", "shopkeeper-reviews"}
	same(t, "the names of roles and accounts", want, slices.Compact(names))
	if !strings.Contains(roles, "- kind: ServiceAccount\n  name: shopkeeper\n  namespace: kube-system\n") {
		t.Errorf("the roles are not bound to the ServiceAccount shopkeeper:\n%s", roles)
	}
	o := newOptions(t, ownBuild...)
	same(t, "Lease", "kube-system/shopkeeper", o.Election.Lease().String())
}

// TestRolesAreOfWhatCanStart has entries that both rbac and the start refuse, with one error.
func TestRolesAreOfWhatCanStart(t *testing.T) {
	needing := func(n informers.Need) controllers.Entry {
		return controllers.Entry{Name: "one", Needs: func(controllers.Settings) ([]informers.Need, error) { return []informers.Need{n}, nil }}
	}
	failing := func(name string) controllers.Entry {
		return controllers.Entry{Name: name, Needs: func(controllers.Settings) ([]informers.Need, error) { return nil, errors.New("cannot tell") }}
	}
	forbidden := needing(informers.Need{Resource: informers.ConfigMaps})
	forbidden.Permissions = func(controllers.Settings) []rbacv1.PolicyRule { return nil }
	for name, tc := range map[string]struct {
		entries []controllers.Entry
		want    []string
	}{
		"a need that Permissions do not allow": {[]controllers.Entry{forbidden},
			[]string{"controller one: needs configmaps in the cache, but its permissions do not let it list and watch them; wildcards do not count"}},
		"a need without namespaces": {[]controllers.Entry{needing(informers.Need{Resource: informers.Namespaces, ClusterScoped: true})},
			[]string{"one: namespaces: the objects have no namespace: not possible with --namespaces"}},
		"a need in another namespace": {[]controllers.Entry{needing(informers.Need{Resource: informers.Secrets, Namespace: "b"})},
			[]string{"one: secrets: the namespace b is not in --namespaces"}},
		"needs that fail": {[]controllers.Entry{failing("one"), failing("two")}, []string{"controller one: cannot tell", "controller two: cannot tell"}},
		"a scheme that fails": {[]controllers.Entry{{Name: "one", AddToScheme: func(*runtime.Scheme) error { return errors.New("no") }}},
			[]string{"controller one: AddToScheme: no"}},
		"permissions in a namespace without a name": {[]controllers.Entry{{Name: "one", NamespacePermissions: func(controllers.Settings) map[string][]rbacv1.PolicyRule {
			return map[string][]rbacv1.PolicyRule{"": nil}
		}}}, []string{"controller one: has NamespacePermissions for a namespace without a name; rules for all namespaces belong in Permissions"}},
	} {
		t.Run(name, func(t *testing.T) {
			var entries []controllers.Entry
			for _, e := range tc.entries {
				entries = append(entries, withFunctions(e))
			}
			o := newOptions(t, With(entries...), WithoutBuiltIns())
			o.Generic.Namespaces = []string{"a"}
			_, printed := o.rbac()
			lines(t, printed, tc.want...)
			_, started := build(t.Context(), o)
			lines(t, started, tc.want...)
		})
	}
}

func TestBuildNameIsALabel(t *testing.T) {
	const want = `the name "My manager" of the build is not a DNS label: `
	if _, err := executeBuild([]BuildOption{Named("My manager")}, "rbac"); err == nil || !strings.HasPrefix(err.Error(), want) {
		t.Errorf("the error is %v, want %s", err, want)
	}
}

func TestSettingsNameThePod(t *testing.T) {
	t.Setenv("POD_NAME", "shopkeeper-0")
	for namespace, want := range map[string]string{
		"":       "kube-system/shopkeeper-0", // that of the Lease
		"market": "market/shopkeeper-0",
	} {
		t.Setenv("POD_NAMESPACE", namespace)
		same(t, "Pod with POD_NAMESPACE="+namespace, want, newOptions(t, ownBuild...).Settings().Pod.String())
	}
}
