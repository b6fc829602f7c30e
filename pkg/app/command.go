// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package app assembles a manager of the controllers that a program gives it: its flags, the servers, and
// Run, which is the whole life of the process.
//
// Where to look, in the order of that life:
//
//	command.go                                the command
//	options.go, configs.go, configfile.go     its flags
//	entries.go, rbac.go                       what the entries ask for
//	run.go                                    Run: build, listen, lead
//	clients.go, dryrun.go, kinds.go           the clients of controllers, and what requests pass
//	newcontroller.go, cluster.go              the Host of a controller, and other clusters
//	lock.go                                   the Lease and the fences
//	events.go, memory.go                      Events; free memory
//	pages.go, metrics.go                      what the servers of package serving serve
//	supervise.go, restart.go                  controllers that run, their health and their status
package app

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os/signal"
	"slices"
	"strings"
	"sync"
	"syscall"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	cliflag "k8s.io/component-base/cli/flag"
	logsapi "k8s.io/component-base/logs/api/v1"
	_ "k8s.io/component-base/logs/json/register" // --logging-format=json
	"k8s.io/component-base/version"
	"k8s.io/klog/v2"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/status"
)

// helpColumns is the width of --help. It does not follow the terminal, so that the generated pages
// are the same everywhere.
const helpColumns = 80

// NewCommand returns the command of a build, which runs the controllers among the options. If an option is
// wrong, executing the command returns the error.
func NewCommand(options ...BuildOption) *cobra.Command {
	o, err := NewOptions(options...)
	cmd := &cobra.Command{
		Use:           "manager",
		Short:         "One highly available process for the controllers of a cluster",
		Version:       version.Get().GitVersion,
		SilenceErrors: true,
		SilenceUsage:  true,
		// Args is called before logging is set up: it reports all mistakes in the command line at
		// once, as plain text.
		Args: func(_ *cobra.Command, args []string) error {
			if err != nil {
				return err
			}
			var stray error
			if len(args) > 0 {
				stray = fmt.Errorf("takes no arguments, and %q is not a command; see --help", args)
			}
			return errors.Join(stray, o.Check())
		},
		RunE: func(cmd *cobra.Command, _ []string) error { return o.run(cmd) },
	}
	cmd.SetContext(context.Background())
	if err == nil {
		err = o.complete(cmd)
	}
	cmd.DisableFlagParsing = err != nil // so that err is returned for any arguments
	return cmd
}

// run is what the command does when its flags have been checked.
func (o *Options) run(cmd *cobra.Command) error {
	if o.File.Print {
		return o.printConfig(cmd.OutOrStdout())
	}
	var background sync.WaitGroup
	defer background.Wait() // after stop
	// The first signal ends ctx and restores the signals' default effect, so a second one
	// ends the process at once.
	ctx, stop := signal.NotifyContext(cmd.Context(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	defer context.AfterFunc(ctx, func() { // unless run returns first
		stop()
		klog.FromContext(ctx).Info("Stopping; a second signal ends the process at once", "reason", context.Cause(ctx))
	})()
	if err := o.apply(); err != nil {
		return err
	}
	background.Go(func() { returnMemory(ctx) })
	cliflag.PrintFlags(cmd.Flags())
	return Run(ctx, o)
}

// complete adds the flags, the commands and the help to cmd.
func (o *Options) complete(cmd *cobra.Command) error {
	cmd.Use = o.command()
	cmd.Long = strings.ReplaceAll(`The Quartermaster manager runs controllers in one process instead of one
operator each. Several replicas may run: one leads and runs the controllers,
the others stand by with warm caches.`, "Quartermaster manager", o.title())
	cmd.Flags().BoolP("version", "", false, "Print the version and exit.")
	global := o.flags.FlagSet(globalFlags)
	global.BoolP("help", "h", false, "Print this help and exit.")
	global.AddFlag(cmd.Flags().Lookup("version"))
	for _, fs := range o.flags.FlagSets {
		cmd.Flags().AddFlagSet(fs)
	}
	cmd.AddCommand(status.NewCommand(o.command(), o.Election.Lease()), newControllersCommand(o), newRBACCommand(o))
	err := o.addEntryCommands(cmd)
	for _, c := range cmd.Commands() {
		if c.PersistentPreRun == nil && c.PersistentPreRunE == nil {
			// Otherwise the manager's hook would set up logging, and errors would be log lines.
			c.PersistentPreRun = func(*cobra.Command, []string) {}
		}
	}
	setHelp(cmd, o.flags)
	return err
}

// command returns the name of the command in its help.
func (o *Options) command() string {
	if o.name == defaultName {
		return "manager"
	}
	return o.name
}

// title returns the name of the build in a sentence.
func (o *Options) title() string {
	if o.name == defaultName {
		return "Quartermaster manager"
	}
	return "manager " + o.name
}

// subcommand returns a command that takes all flags of the manager, checks them and calls write.
func (o *Options) subcommand(name, short, long string, write func(io.Writer) error) *cobra.Command {
	cmd := &cobra.Command{
		Use:               name,
		Short:             short,
		Long:              strings.TrimSpace(long),
		Args:              cobra.NoArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := o.Check(); err != nil {
				return err
			}
			return write(cmd.OutOrStdout())
		},
	}
	for _, fs := range o.flags.FlagSets {
		cmd.Flags().AddFlagSet(fs)
	}
	return cmd
}

// addEntryCommands adds the commands of the entries. It is an error if two commands have one name: cobra
// would run the first.
func (o *Options) addEntryCommands(root *cobra.Command) error {
	names := []string{"completion", "help"} // which cobra adds
	for _, c := range root.Commands() {
		names = append(names, c.Name())
	}
	var errs []error
	for _, e := range o.entries {
		if e.Command == nil {
			continue
		}
		var cmd *cobra.Command
		if err := recovered(e.Name, "Command", func() error { cmd = e.Command(o.connect); return nil }); err != nil {
			errs = append(errs, err)
			continue
		}
		if cmd == nil {
			continue
		}
		for _, c := range cmd.Commands() {
			for _, fs := range o.flags.FlagSets {
				c.Flags().AddFlagSet(fs)
			}
		}
		if slices.Contains(names, cmd.Name()) {
			errs = append(errs, fmt.Errorf("controller %s: its command %q is a command of the manager or of another controller",
				e.Name, cmd.Name()))
		}
		names = append(names, cmd.Name())
		root.AddCommand(cmd)
	}
	return errors.Join(errs...)
}

// connect returns what the flags say, and how a person reaches the API server: as with kubectl.
func (o *Options) connect() (s controllers.Settings, config *rest.Config, err error) {
	if err := o.Check(); err != nil {
		return s, nil, err
	}
	files := clientcmd.NewDefaultClientConfigLoadingRules()
	files.ExplicitPath = o.Client.Kubeconfig
	config, err = clientcmd.NewNonInteractiveDeferredLoadingClientConfig(
		files, &clientcmd.ConfigOverrides{ClusterInfo: clientcmdapi.Cluster{Server: o.Client.Master}}).ClientConfig()
	if err != nil {
		return s, nil, fmt.Errorf("--kubeconfig, --master: %w", err)
	}
	return o.Settings(), config, nil
}

// setHelp makes root print its flags in groups and list its commands. Each of our commands prints only the
// flags that root does not have; cobra's own commands keep cobra's help.
func setHelp(root *cobra.Command, flags cliflag.NamedFlagSets) {
	help, usage := root.HelpFunc(), root.UsageFunc()
	printUsage := func(w io.Writer) {
		fmt.Fprintf(w, "Usage:\n  %s\n  %s [command]\n\nCommands:\n", root.UseLine(), root.CommandPath())
		for _, c := range root.Commands() {
			if c.IsAvailableCommand() {
				fmt.Fprintf(w, "  %-*s %s\n", root.NamePadding(), c.Name(), c.Short)
			}
		}
		cliflag.PrintSections(w, flags, helpColumns)
	}
	root.SetUsageFunc(func(cmd *cobra.Command) error {
		if cmd == root {
			printUsage(cmd.OutOrStderr())
			return nil
		}
		if cmd.Parent() != root && cmd.Flags().Lookup("controllers") == nil || cmd.HasSubCommands() {
			return usage(cmd)
		}
		own := pflag.NewFlagSet(cmd.Name(), pflag.ContinueOnError)
		cmd.Flags().VisitAll(func(f *pflag.Flag) {
			if f.Name != "help" && root.Flags().Lookup(f.Name) != f {
				own.AddFlag(f)
			}
		})
		text := fmt.Sprintf("  the flags of %[1]s, see %[1]s --help\n", root.Name())
		if own.HasFlags() {
			text = own.FlagUsagesWrapped(helpColumns)
		}
		_, err := fmt.Fprintf(cmd.OutOrStdout(), "Usage:\n  %s\n\nFlags:\n%s", cmd.UseLine(), text)
		return err
	})
	root.SetHelpFunc(func(cmd *cobra.Command, args []string) {
		if cmd != root {
			help(cmd, args)
			return
		}
		fmt.Fprintf(cmd.OutOrStdout(), "%s\n\n", cmd.Long)
		printUsage(cmd.OutOrStdout())
	})
}

// apply puts the settings into effect that libraries keep once per process: logging, hidden metrics, garbage
// collection. Run changes nothing of the process, so that several managers can run in it.
func (o *Options) apply() error {
	if err := logsapi.ValidateAndApply(o.Logs, o.FeatureGate); err != nil {
		return err
	}
	// If nothing is set, Apply would log an error about a manifest that nobody asked for.
	if m := o.Metrics; m.ShowHiddenMetricsForVersion != "" || len(m.DisabledMetrics) > 0 || len(m.AllowListMapping) > 0 ||
		m.AllowListMappingManifest != "" {
		m.Apply()
	}
	return nil
}
