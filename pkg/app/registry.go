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
	"github.com/spf13/pflag"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientscheme "k8s.io/client-go/kubernetes/scheme"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/informers"
)

// Entry describes one controller. Its flags, help text, cache needs and RBAC rules all come from
// here. Name, Needs, Rules and New are required.
type Entry struct {
	// Name identifies the controller in --controllers, metrics, logs and health checks. It must be
	// a DNS label that no other entry has as its name or alias.
	Name string
	// Aliases are other names that --controllers accepts.
	Aliases []string
	// Summary says in half a line what the controller does.
	Summary string
	// OffByDefault excludes the controller from '*' in --controllers.
	OffByDefault bool
	// Config binds and checks the controller's flags; nil if it has none.
	Config Config
	// AddToScheme adds the types of the controller's custom resources to the scheme of the host;
	// nil if it has none.
	AddToScheme func(*runtime.Scheme) error
	// Needs returns what the shared cache must keep for the controller. It is called after the
	// flags have been parsed.
	Needs func() ([]informers.Need, error)
	// Rules returns the permissions that the controller needs, and no more. It is called after the
	// flags have been parsed.
	Rules func() []rbacv1.PolicyRule
	// EveryReplica makes every replica run the controller, from the time when its cache is started
	// until the process ends, and not only the one that leads. The fences refuse the writes of a
	// replica that does not lead, see controllers.IsNotLeading. A reconcile that returns this error is
	// tried again with back-off, so not at once when the replica leads.
	EveryReplica bool
	// New builds the controller. Every replica calls it at its start, standbys included, so that a
	// mistake does not wait for a failover to show.
	New func(Host) (controllers.Controller, error)

	needs []informers.Need // the result of Needs with For filled in; see declareNeeds
}

// Config is what the host uses of a controller's configuration. AddFlags binds its flags. Validate
// returns every mistake in it, each with the name of its flag.
type Config interface {
	AddFlags(*pflag.FlagSet)
	Validate() error
}

// registry returns the controllers in the order in which they start.
func registry(o *Options) []Entry {
	return []Entry{
		configReload(o),
		replicationEntry(o),
		ttlEntry(o),
	}
}

// addToScheme calls AddToScheme. The library panics if a kind has two Go types.
func (e Entry) addToScheme(scheme *runtime.Scheme) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("panic: %v", r)
		}
	}()
	return e.AddToScheme(scheme)
}

// newScheme returns a scheme with the built-in types and those that entries add.
func newScheme(entries []Entry) (*runtime.Scheme, error) {
	scheme := runtime.NewScheme()
	if err := clientscheme.AddToScheme(scheme); err != nil {
		return nil, err
	}
	for _, e := range entries {
		if e.AddToScheme == nil {
			continue
		}
		if err := e.addToScheme(scheme); err != nil {
			return nil, fmt.Errorf("controller %s: AddToScheme: %w", e.Name, err)
		}
	}
	return scheme, nil
}

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
func (o *Options) enabled() ([]Entry, error) {
	var unknown []string
	for _, item := range o.Generic.Controllers {
		name := strings.TrimPrefix(item, "-")
		if item != "*" && !slices.ContainsFunc(o.entries, func(e Entry) bool { return e.is(name) }) {
			unknown = append(unknown, fmt.Sprintf("%q", item))
		}
	}
	if len(unknown) > 0 {
		return nil, fmt.Errorf("--controllers: %s is not a known controller; known are %s",
			strings.Join(unknown, ", "), strings.Join(o.known(), ", "))
	}

	var on []Entry
	for _, e := range o.entries {
		if e.selected(o.Generic.Controllers) {
			on = append(on, e)
		}
	}
	return on, nil
}

func (e Entry) is(name string) bool { return e.Name == name || slices.Contains(e.Aliases, name) }

func (e Entry) selected(items []string) bool {
	star := false
	for _, item := range items {
		switch {
		case item == "*":
			star = true
		case e.is(item):
			return true
		case strings.HasPrefix(item, "-") && e.is(item[1:]):
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
				now := slices.ContainsFunc(enabled, func(on Entry) bool { return on.Name == e.Name })
				fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\n", e.Name, word[!e.OffByDefault], word[now], strings.Join(e.Aliases, ","), e.Summary)
			}
			return t.Flush()
		})
}
