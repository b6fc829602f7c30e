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
	// Permissions returns the RBAC rules for the controller's own requests, and rules with list and watch for
	// each resource that it follows; nil if there are none. It should grant nothing else: the host adds list
	// and watch for the resources in Needs. The command rbac prints all of these rules. Permissions is called
	// after the flags have been parsed.
	Permissions func(Settings) []rbacv1.PolicyRule
	// NamespacePermissions returns further rules, by the namespace in which they hold, such as rules for Secrets
	// in the controller's own namespace; nil if there are none. The rules under the empty name are for
	// cluster-scoped resources: rbac prints them as a ClusterRole, even with --namespaces. With --namespaces, a
	// need of a cluster-scoped resource is an error unless one of these rules names the resource.
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

// Controller is what the host runs while this replica leads or, with Entry.EveryReplica, all the time.
type Controller interface {
	// Run works until ctx ends. Then it finishes what is in flight, and returns nil once all of its work has
	// ended. The host waits for Run as long as --shutdown-timeout says.
	//
	// If Run returns an error, the host assumes that some work goes on, and does not release the Lease. An
	// error that is ctx.Err(), or wraps ctx.Err() and no other error, counts as nil. If Run panics, or returns
	// before ctx ends, the host starts it again.
	//
	// After Run, however it ended, the host closes the clusters that Run left open, and stops what it follows.
	// Run itself must close the loops that it made, by defer.
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
