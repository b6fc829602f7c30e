// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/client-go/rest"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
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
	if diff := cmp.Diff(want, strings.Split(err.Error(), "\n")); diff != "" {
		t.Errorf("errors (-want +got):\n%s", diff)
	}
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
			cmd := NewCommand(With(tc.entries...))
			cmd.SetArgs([]string{"--v=2", "--controllers=*"})
			lines(t, cmd.Execute(), tc.want...)
		})
	}
}

func TestControllersListHasTheOrderOfTheRegistry(t *testing.T) {
	var out strings.Builder
	cmd := NewCommand(With(withFunctions(controllers.Entry{Name: "extra", Summary: "does more", OffByDefault: true})))
	cmd.SetOut(&out)
	cmd.SetArgs([]string{"controllers", "--controllers=extra"})
	if err := cmd.Execute(); err != nil {
		t.Fatal(err)
	}
	words := strings.Join(strings.Fields(out.String()), " ")
	if !strings.HasPrefix(words, "NAME DEFAULT NOW SUMMARY config-reload on off rolls workloads") || !strings.HasSuffix(words, "extra off on does more") {
		t.Errorf("printed\n%s", out.String())
	}
}
