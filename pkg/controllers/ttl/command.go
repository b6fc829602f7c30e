// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package ttl

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path"
	"slices"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/pager"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/ttl/policy/rules"
)

// newCommand returns the command that tries a file of rules.
func newCommand(flags *Config, connect func() (controllers.Settings, *rest.Config, error)) *cobra.Command {
	parent := &cobra.Command{Use: Name, Short: "Try a file of rules of the controller " + Name}
	parent.AddCommand(&cobra.Command{
		Use:   "test FILE",
		Short: "Show what a file of rules would delete now",
		Long: `Checks a file for --ttl-rules, reads the objects that its rules are about, and
shows those that are due now and why. It writes nothing. All flags of the
manager are understood, --config among them: they say what is protected. It
reads as the user of the kubeconfig, who needs the verb list; --kubeconfig is by
default $KUBECONFIG, then ~/.kube/config.`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			set, err := rules.Read(args[0])
			if err != nil {
				return err
			}
			settings, config, err := connect()
			if err != nil {
				return err
			}
			cfg := flags.withSettings(settings)
			t := &trial{controller: &controller{cfg: *cfg, options: cfg.Policy(), rules: set}, now: time.Now(), counts: make([]counts, len(set.Rules()))}
			err = t.run(cmd.Context(), config)
			t.print(cmd.OutOrStdout())
			return err
		},
	})
	return parent
}

// trial is what the rules say of the objects of a cluster.
type trial struct {
	*controller
	now    time.Time
	due    []string // the rows of the table of objects that are due
	counts []counts // the counts of each rule, in the order of the file
	notes  []string // what is printed below the tables
}

// counts is how many objects a rule decides on.
type counts struct {
	due, later, faulty int
	fault              string // the fault of one of the faulty objects
}

// run evaluates the rules for every object that they are about. The error has everything that could
// not be read.
func (t *trial) run(ctx context.Context, config *rest.Config) error {
	config = rest.CopyConfig(config)
	config.QPS = -1
	discoveryClient, discoveryErr := discovery.NewDiscoveryClientForConfig(config)
	metadataClient, metadataErr := metadata.NewForConfig(config)
	dynamicClient, dynamicErr := dynamic.NewForConfig(config)
	if err := errors.Join(discoveryErr, metadataErr, dynamicErr); err != nil {
		return err
	}
	types, _, err := discover(discoveryClient)
	errs := []error{err}
	for _, missing := range t.rules.MissingTypes(t.selectTypes(types)) {
		t.notes = append(t.notes, missing+" is no type whose objects may be deleted here; the flags may exclude it, such as --ttl-include-resources")
	}
	namespaces := t.cfg.Scope
	if len(namespaces) == 0 {
		namespaces = []string{metav1.NamespaceAll}
	}
	for _, typ := range t.selectTypes(types) {
		typeRules := t.rulesFor(t.rules.PinVersion(typ))
		if typeRules == nil {
			continue
		}
		opts := metav1.ListOptions{FieldSelector: typeNeed(t.options, typeRules.typ, typeRules).FieldSelector}
		for _, namespace := range namespaces {
			err := pager.New(func(ctx context.Context, opts metav1.ListOptions) (runtime.Object, error) {
				if typeRules.NeedsWhole {
					return dynamicClient.Resource(typeRules.typ.GroupVersionResource).Namespace(namespace).List(ctx, opts)
				}
				return metadataClient.Resource(typeRules.typ.GroupVersionResource).Namespace(namespace).List(ctx, opts)
			}).EachListItem(ctx, opts, func(obj runtime.Object) error {
				t.add(typeRules, obj.(metav1.Object))
				return nil
			})
			if err != nil {
				errs = append(errs, fmt.Errorf("list %s: %w", path.Join(typ.GroupResource().String(), namespace), err))
			}
		}
	}
	return errors.Join(errs...)
}

// add evaluates the rules for an object.
func (t *trial) add(typeRules *typeRules, obj metav1.Object) {
	verdict, err := typeRules.verdict(obj)
	if verdict.Rule == 0 {
		return
	}
	ruleCounts := &t.counts[verdict.Rule-1]
	name := typeRules.typ.GroupResource().String() + "/" + obj.GetName()
	decision := t.rules.Decide(verdict)
	switch {
	case verdict.Problem != 0:
		ruleCounts.faulty++
		ruleCounts.fault = fmt.Sprintf("%s, such as %s in %q: %v", verdict.Problem, name, obj.GetNamespace(), err)
	case decision.Due(t.now):
		ruleCounts.due++
		t.due = append(t.due, fmt.Sprintf("%s\t%s\t%s\t%s\t%s", obj.GetNamespace(), name, decision.Rule,
			decision.Since.UTC().Format(time.RFC3339), decision.Deadline.UTC().Format(time.RFC3339)))
	default:
		ruleCounts.later++
	}
}

// print writes the objects that are due as a table, and how many objects each rule decides on.
func (t *trial) print(w io.Writer) {
	table := tabwriter.NewWriter(w, 0, 0, 3, ' ', 0)
	slices.Sort(t.due)
	if len(t.due) > 0 {
		fmt.Fprintln(table, "NAMESPACE\tNAME\tRULE\tSINCE\tDUE")
	}
	for _, row := range t.due {
		fmt.Fprintln(table, row)
	}
	fmt.Fprintln(table, "\nRULE\tDUE\tLATER\tFAULTY\tDRYRUN")
	for i, r := range t.rules.Rules() {
		ruleCounts := t.counts[i]
		fmt.Fprintf(table, "%s\t%d\t%d\t%d\t%t\n", r.Name, ruleCounts.due, ruleCounts.later, ruleCounts.faulty, r.DryRun)
		if ruleCounts.faulty > 0 {
			t.notes = append(t.notes, fmt.Sprintf("the rule %s %s", r.Name, ruleCounts.fault))
		}
	}
	_ = table.Flush()
	for _, note := range t.notes {
		fmt.Fprintf(w, "\n%s\n", note)
	}
}
