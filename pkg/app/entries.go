// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation"
	clientscheme "k8s.io/client-go/kubernetes/scheme"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/informers"
)

// checkEntries returns every mistake in the entries that can be found before the flags are parsed.
func checkEntries(entries []controllers.Entry) error {
	var errs []error
	for i, e := range entries {
		controller := "controller " + e.Name
		if e.Name == "" {
			controller = fmt.Sprintf("controller number %d, which has no name", i+1)
		}
		add := func(format string, args ...any) {
			errs = append(errs, fmt.Errorf("%s: %s", controller, fmt.Sprintf(format, args...)))
		}
		if problems := validation.IsDNS1123Label(e.Name); len(problems) > 0 {
			add("the name %q is not a DNS label: %s", e.Name, problems[0])
		}
		if slices.ContainsFunc(entries[:i], func(other controllers.Entry) bool { return other.Name == e.Name }) {
			add("another entry has this name")
		}
		if slices.Contains(OwnAgents(), e.Name) {
			add("the name is that of a client of the manager's own, so that the audit log could not tell them apart")
		}
		if e.New == nil {
			add("the function New is missing")
		}
	}
	return errors.Join(errs...)
}

// OwnAgents returns the suffixes of the user agents of the manager's own clients. The user agent of a
// controller's clients ends in the controller's name.
func OwnAgents() []string {
	return []string{"informers", "startup", "discovery", "events", "leader-election", "dry-run", "authentication", "authorization"}
}

// NewScheme returns a scheme with the built-in types and those that entries add.
func NewScheme(entries []controllers.Entry) (*runtime.Scheme, error) {
	scheme := runtime.NewScheme()
	if err := clientscheme.AddToScheme(scheme); err != nil {
		return nil, err
	}
	for _, e := range entries {
		if e.AddToScheme == nil {
			continue
		}
		if err := recovered(e.Name, "AddToScheme", func() error { return e.AddToScheme(scheme) }); err != nil {
			return nil, err
		}
	}
	return scheme, nil
}

// requirements are what the enabled entries ask of the process.
type requirements struct {
	entries []controllers.Entry
	cache   informers.CacheConfig
	grants  map[string]Grants // by name of the entry
}

// collectRequirements returns what the enabled entries ask for. The error lists the mistakes of all
// entries. With such a mistake the manager does not start, and rbac prints no roles.
func (o *Options) collectRequirements() (r requirements, err error) {
	if r.entries, err = o.enabled(); err != nil {
		return r, err
	}
	r.cache.Namespaces = o.Informers.Namespaces
	if r.cache.Scheme, err = NewScheme(r.entries); err != nil {
		return r, err
	}
	r.grants = map[string]Grants{}
	var errs []error
	settings := o.Settings()
	for _, e := range r.entries {
		var needs []informers.Need
		errs = append(errs, recovered(e.Name, "Needs or Permissions", func() (err error) {
			if e.Needs != nil {
				needs, err = e.Needs(settings)
			}
			if err == nil {
				r.grants[e.Name], err = GrantsOf(e, settings, needs)
			}
			return err
		}))
		r.cache.Declare(e.Name, needs...)
	}
	if err := errors.Join(errs...); err != nil {
		return r, err
	}
	return r, r.cache.Check()
}

// entries are the entries of a build, in the order in which they were added.
type entries []controllers.Entry

// names returns the names of all controllers.
func (all entries) names() []string {
	names := make([]string, 0, len(all))
	for _, e := range all {
		names = append(names, e.Name)
	}
	return names
}

func (all entries) onByDefault() string {
	var names []string
	for _, e := range all {
		if !e.OffByDefault {
			names = append(names, e.Name)
		}
	}
	return cmp.Or(strings.Join(names, ", "), "none")
}

// originals returns the operators that controllers can replace: --compat can name them.
func (all entries) originals() (names []string) {
	for _, e := range all {
		names = append(names, e.Compat...)
	}
	return names
}

// enabled returns the entries that the items of --controllers select. As in kube-controller-manager, the
// first item that names a controller decides, and '*' stands for all that are on by default. An item that
// names no controller is an error.
func (all entries) enabled(items []string) (enabled entries, err error) {
	var unknown []string
	for _, item := range items {
		name := strings.TrimPrefix(item, "-")
		if item != "*" && !slices.ContainsFunc(all, func(e controllers.Entry) bool { return e.Name == name }) {
			unknown = append(unknown, fmt.Sprintf("%q", item))
		}
	}
	if len(unknown) > 0 {
		return nil, fmt.Errorf("--controllers: %s is not a known controller; known are %s",
			strings.Join(unknown, ", "), strings.Join(all.names(), ", "))
	}
	for _, e := range all {
		if isEnabled(e, items) {
			enabled = append(enabled, e)
		}
	}
	return enabled, nil
}

// enabled returns the entries that --controllers selects.
func (o *Options) enabled() (entries, error) { return o.entries.enabled(o.Generic.Controllers) }

func isEnabled(e controllers.Entry, items []string) bool {
	star := false
	for _, item := range items {
		switch item {
		case "*":
			star = true
		case e.Name:
			return true
		case "-" + e.Name:
			return false
		}
	}
	return star && !e.OffByDefault
}

func newControllersCommand(o *Options) *cobra.Command {
	return o.subcommand("controllers", "List the controllers, and which of them these flags enable", `
Lists the controllers of this build, whether they are on by default and whether
the given flags enable them. All flags of the manager are understood, --config
among them. What the controllers need to be allowed is printed by `+o.command()+` rbac.`,
		func(w io.Writer) error {
			enabled, err := o.enabled()
			if err != nil {
				return err
			}
			word := map[bool]string{true: "on", false: "off"}
			t := tabwriter.NewWriter(w, 0, 0, 3, ' ', 0)
			fmt.Fprintln(t, "NAME\tDEFAULT\tNOW\tSUMMARY")
			for _, e := range o.entries {
				now := slices.ContainsFunc(enabled, func(other controllers.Entry) bool { return other.Name == e.Name })
				fmt.Fprintf(t, "%s\t%s\t%s\t%s\n", e.Name, word[!e.OffByDefault], word[now], e.Summary)
			}
			return t.Flush()
		})
}
