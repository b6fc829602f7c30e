// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	rbacv1 "k8s.io/api/rbac/v1"

	"github.com/quartermaster-dev/quartermaster/pkg/informers"
)

// controllerInfo is what `manager controllers` says of one entry of the registry.
type controllerInfo struct {
	Name        string              `json:"name"`
	Aliases     []string            `json:"aliases,omitempty"`
	Summary     string              `json:"summary"`
	OnByDefault bool                `json:"onByDefault"`
	Enabled     bool                `json:"enabled"`
	Needs       []needInfo          `json:"needs"`
	Rules       []rbacv1.PolicyRule `json:"rules"`
}

// needInfo is what the cache keeps of one resource for it.
type needInfo struct {
	Group       string   `json:"group,omitempty"`
	Version     string   `json:"version,omitempty"`
	Resource    string   `json:"resource"`
	Form        string   `json:"form"`
	Annotations []string `json:"annotations,omitempty"`
	Optional    bool     `json:"optional,omitempty"`
}

func newControllersCommand(o *Options) *cobra.Command {
	var output outputFormat
	cmd := &cobra.Command{
		Use:   "controllers",
		Short: "List the controllers: defaults, needs of the cache, permissions",
		Long: `Lists the controllers of this build: whether they are on by default, and what
they need of the cache and of the API server. That depends on the configuration:
all flags of the manager are understood, --config among them.`,
		Args:              cobra.NoArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
		PersistentPreRun:  plainErrors,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := o.readConfigFile(); err != nil {
				return err
			}
			if err := o.Validate(); err != nil {
				return err
			}
			infos, err := controllerInfos(o)
			if err != nil {
				return err
			}
			return output.write(cmd.OutOrStdout(), infos, func(w io.Writer) { printControllers(w, infos) })
		},
	}
	output.addFlag(cmd.Flags())
	setUsage(cmd, cmd.Flags().FlagUsagesWrapped(helpColumns), ", besides those of the manager")
	for _, name := range o.flags.Order {
		cmd.Flags().AddFlagSet(o.flags.FlagSets[name])
	}
	return cmd
}

func controllerInfos(o *Options) ([]controllerInfo, error) {
	enabled, err := o.enabled()
	if err != nil {
		return nil, err
	}
	infos := make([]controllerInfo, 0, len(o.entries))
	for _, e := range o.entries {
		needs, err := e.Needs()
		if err != nil {
			return nil, fmt.Errorf("controller %s: %w", e.Name, err)
		}
		info := controllerInfo{
			Name: e.Name, Aliases: e.Aliases, Summary: e.Summary,
			OnByDefault: !e.OffByDefault,
			Enabled:     slices.ContainsFunc(enabled, func(on Entry) bool { return on.Name == e.Name }),
			Needs:       make([]needInfo, 0, len(needs)),
			Rules:       e.Rules(),
		}
		for _, n := range needs {
			info.Needs = append(info.Needs, needInfo{n.Resource.Group, n.Resource.Version, n.Resource.Resource, formOfNeed(n), n.Annotations, n.Optional})
		}
		infos = append(infos, info)
	}
	return infos, nil
}

// formOfNeed names the form as /debug/informers does.
func formOfNeed(n informers.Need) string {
	switch {
	case n.Digest != nil:
		return "content digest"
	case n.Form == informers.Typed:
		return "typed"
	case n.Form == informers.Unstructured:
		return "unstructured"
	}
	return "metadata"
}

func printControllers(w io.Writer, infos []controllerInfo) {
	t := newTable(w)
	t.row("NAME", "DEFAULT", "ENABLED", "ALIASES", "SUMMARY")
	for _, c := range infos {
		t.row(c.Name, onOff(c.OnByDefault), yesNo(c.Enabled), orNone(strings.Join(c.Aliases, ",")), c.Summary)
	}
	t.end()
	fmt.Fprintln(w)
	t.row("CONTROLLER", "CACHES", "FORM", "ANNOTATIONS")
	for _, c := range infos {
		for _, n := range c.Needs {
			t.row(c.Name, qualified(n.Resource, n.Group), n.Form, fmt.Sprint(len(n.Annotations)))
		}
	}
	t.end()
	fmt.Fprintln(w)
	t.row("CONTROLLER", "RESOURCES", "VERBS")
	for _, c := range infos {
		for _, r := range c.Rules {
			var resources []string
			for _, group := range r.APIGroups {
				for _, resource := range r.Resources {
					resources = append(resources, qualified(resource, group))
				}
			}
			t.row(c.Name, strings.Join(append(resources, r.NonResourceURLs...), ","), strings.Join(r.Verbs, ","))
		}
	}
	t.end()
}

// qualified is "secrets" or "deployments.apps", as kubectl has it.
func qualified(resource, group string) string {
	if group == "" {
		return resource
	}
	return resource + "." + group
}
