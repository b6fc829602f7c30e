// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package controllers

import (
	"context"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"

	"github.com/quartermaster-dev/quartermaster/pkg/informers"
)

// Entry describes one controller. Its flags, help text, cache needs and permissions all come from
// here. Name and New are required.
type Entry struct {
	// Name identifies the controller in --controllers, metrics, logs and health checks, and is its field
	// manager. It must be a DNS label that no other entry has as its name.
	Name string
	// Summary says in half a line what the controller does.
	Summary string
	// OffByDefault excludes the controller from '*' in --controllers.
	OffByDefault bool
	// Compat lists the operators that the controller can replace, by the names that --compat has for
	// them. Settings.Compat has the operators that it does replace.
	Compat []string
	// Config binds and checks the controller's flags; nil if it has none.
	Config Config
	// Workers is the default of the flag --NAME-concurrent-syncs: how many keys each loop of the controller
	// reconciles at once. Host.LoopOptions has its value. 0 means that there is no such flag, and 1 worker.
	Workers int
	// AddToScheme adds the types of the controller's custom resources to the scheme of the host;
	// nil if it has none.
	AddToScheme func(*runtime.Scheme) error
	// Needs returns what the shared cache must keep for the controller; nil if that is nothing. It is called
	// after the flags have been parsed.
	Needs func(Settings) ([]informers.Need, error)
	// Permissions returns the RBAC rules for what the controller does itself, and list and watch of what it
	// follows, and no more; nil if there are none. It is called after the flags have been parsed. The host adds
	// list and watch of what is in Needs. The command rbac prints all of it.
	Permissions func(Settings) []rbacv1.PolicyRule
	// NamespacePermissions returns further rules, each of which holds in one namespace, by its name; nil if
	// there are none. Secrets that are only in the controller's own namespace belong here. Rules under the
	// empty name are for objects that have no namespace: they hold with --namespaces too, in a ClusterRole. A
	// need of such objects is an error then if there is no such rule for the resource.
	NamespacePermissions func(Settings) map[string][]rbacv1.PolicyRule
	// Command returns a command for people, with subcommands that understand all flags of the manager;
	// nil if there is none. connect returns what the flags say, and how the user of a kubeconfig
	// reaches the API server.
	Command func(connect func() (Settings, *rest.Config, error)) *cobra.Command
	// EveryReplica makes every replica run the controller, from the time when its cache is started
	// until the process ends, and not only the one that leads. The fences refuse the writes of a
	// replica that does not lead, see IsNotLeading. A reconcile that returns this error is called
	// again when the replica leads. The Lease is released without waiting for such a controller: what
	// it does outside of the API must not need the Lease.
	EveryReplica bool
	// New builds the controller. Every replica calls it at its start, standbys included, so that a
	// mistake does not wait for a failover to show.
	New func(Host) (Controller, error)
}

// Controller is what the host runs while this replica leads.
type Controller interface {
	// Run works until ctx ends, finishes what is in flight, and returns nil when none of its work goes on. The
	// host waits for this as long as --shutdown-timeout says. If Run returns an error, the host assumes that
	// some work goes on and does not release the Lease. An error that is or wraps ctx.Err() counts as nil, but
	// not one that also wraps another. If Run returns before ctx ends, or panics, the host starts it again.
	//
	// In any case the host closes the clusters that Run left open, and stops what it follows. Run itself must
	// close the loops that it made, by defer.
	Run(ctx context.Context) error

	// Status returns what the controller is doing. It may be called at any time, also before Run.
	Status() Status
}

// Config is what the host uses of a controller's configuration. AddFlags binds its flags. Validate
// returns every mistake in it, each with the name of its flag; it is called whether or not the
// controller is enabled.
type Config interface {
	AddFlags(*pflag.FlagSet)
	Validate(Settings) error
}

// Settings is what the process decides for all controllers.
type Settings struct {
	// Namespace is the namespace of the process's Lease, and of its Pod unless POD_NAMESPACE names another.
	Namespace string
	// Pod is the process's Pod; the name is empty if the Pod is not known.
	Pod cache.ObjectName
	// Namespaces are the only namespaces that may be read and written; empty means all: --namespaces.
	Namespaces []string
	// OwnNamespaces are the namespace of the process's Lease, and the Namespace that names the leader
	// to the API server's fence. Controllers leave them alone.
	OwnNamespaces []string
	// DryRun says that no write changes anything: --dry-run.
	DryRun bool
	// Compat names the operators that this installation replaces: --compat.
	Compat []string
}
