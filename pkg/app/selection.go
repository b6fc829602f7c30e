// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
)

// known returns the names of all controllers, in the order of the registry.
func (o *Options) known() []string {
	names := make([]string, 0, len(o.entries))
	for _, e := range o.entries {
		names = append(names, e.Name)
	}
	return names
}

// enabled returns the entries that --controllers selects, in the order of the registry. As in
// kube-controller-manager, the first item that names a controller decides, and '*' stands for all
// that are on by default. An item that names no controller is an error.
func (o *Options) enabled() ([]controllers.Entry, error) {
	var unknown []string
	for _, item := range o.Generic.Controllers {
		name := strings.TrimPrefix(item, "-")
		if item != "*" && !slices.ContainsFunc(o.entries, func(e controllers.Entry) bool { return is(e, name) }) {
			unknown = append(unknown, fmt.Sprintf("%q", item))
		}
	}
	if len(unknown) > 0 {
		return nil, fmt.Errorf("--controllers: %s is not a known controller; known are %s",
			strings.Join(unknown, ", "), strings.Join(o.known(), ", "))
	}

	var on []controllers.Entry
	for _, e := range o.entries {
		if selected(e, o.Generic.Controllers) {
			on = append(on, e)
		}
	}
	return on, nil
}

func is(e controllers.Entry, name string) bool {
	return e.Name == name || slices.Contains(e.Aliases, name)
}

func selected(e controllers.Entry, items []string) bool {
	star := false
	for _, item := range items {
		switch {
		case item == "*":
			star = true
		case is(e, item):
			return true
		case strings.HasPrefix(item, "-") && is(e, item[1:]):
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
			fmt.Fprintln(t, "NAME\tDEFAULT\tNOW\tALIASES\tSUMMARY")
			for _, e := range o.entries {
				now := slices.ContainsFunc(enabled, func(on controllers.Entry) bool { return on.Name == e.Name })
				fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\n", e.Name, word[!e.OffByDefault], word[now], strings.Join(e.Aliases, ","), e.Summary)
			}
			return t.Flush()
		})
}
