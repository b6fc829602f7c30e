// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"net"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	cliflag "k8s.io/component-base/cli/flag"
	componentbaseconfig "k8s.io/component-base/config"
	"k8s.io/component-base/featuregate"
	logsapi "k8s.io/component-base/logs/api/v1"
	"k8s.io/component-base/metrics"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/election"
	"github.com/quartermaster-dev/quartermaster/pkg/election/apifence"
	"github.com/quartermaster-dev/quartermaster/pkg/election/protocol"
)

// Options is the whole configuration of the manager, one Config per component; the entry of a controller
// has the controller's Config. The flags write to it.
type Options struct {
	File           ConfigFile
	Generic        GenericConfig
	Client         ClientConfig
	Election       election.Config
	Secure         SecureConfig
	Insecure       InsecureConfig
	Authentication AuthenticationConfig
	Metrics        *metrics.Options
	Logs           *logsapi.LoggingConfiguration
	FeatureGate    featuregate.MutableVersionedFeatureGate

	// ElectionClock is election.NewBootClock's if it is nil. No flag sets it: it is for tests.
	ElectionClock protocol.Clock

	name    string // of the build
	entries []controllers.Entry
	workers map[string]*int // by name of the entry
	flags   cliflag.NamedFlagSets
}

// defaultName is the name of a build without Named.
const defaultName = "quartermaster"

// BuildOption is what a program puts into its build of the manager: see [With] and [Named].
type BuildOption func(*Options)

// With adds controllers to a build. They are built in this order. Those of Quartermaster are builtin.Entries.
func With(entries ...controllers.Entry) BuildOption {
	return func(o *Options) { o.entries = append(o.entries, entries...) }
}

// Named gives a build a name in place of quartermaster, so that both can run in one cluster. It is
// the name of the command, of the Lease, of the ServiceAccount and of the label
// app.kubernetes.io/name of the Pods; names of roles and the source components of Events begin with
// it. It must be a DNS label.
func Named(name string) BuildOption {
	return func(o *Options) { o.name = name }
}

// workersFlag is the end of the name of the flag of Entry.Workers.
const workersFlag = "-concurrent-syncs"

// GenericConfig is the configuration that concerns all controllers alike.
type GenericConfig struct {
	Controllers          []string
	Compat               []string
	ControllerStuckAfter time.Duration
	ShutdownTimeout      time.Duration
	DryRun               bool
	Profiling            bool
	Standby              string   // standbyWarm or standbyCold
	Namespaces           []string // empty means all
}

// With a warm standby, informers run on every replica; with a cold one, they start when the replica leads.
const standbyWarm, standbyCold = "warm", "cold"

// ClientConfig says how to reach the API server.
type ClientConfig struct {
	componentbaseconfig.ClientConnectionConfiguration
	Master string
	// RESTConfig, if set, is used in place of a kubeconfig. No flag sets it: it is for a program that
	// runs the manager, such as a test.
	RESTConfig *rest.Config
}

// InsecureConfig configures the plain HTTP server for health checks.
type InsecureConfig struct {
	BindAddress net.IP
	Port        int
	Metrics     bool
}

// NewOptions returns the defaults for a build with the given options. The error lists the mistakes in
// all entries.
func NewOptions(options ...BuildOption) (*Options, error) {
	gate := featuregate.NewFeatureGate() // of logging only: the manager has no features of its own
	if err := logsapi.AddFeatureGates(gate); err != nil {
		return nil, fmt.Errorf("feature gates of logging: %w", err)
	}
	o := &Options{
		Generic: GenericConfig{
			Controllers:          []string{"*"},
			ControllerStuckAfter: 5 * time.Minute,
			ShutdownTimeout:      20 * time.Second,
			Standby:              standbyWarm,
			Profiling:            true,
		},
		Client: ClientConfig{ClientConnectionConfiguration: componentbaseconfig.ClientConnectionConfiguration{
			ContentType: runtime.ContentTypeProtobuf,
			QPS:         -1, // docs/adr/0005-client-limits.md
			Burst:       100,
		}},
		Secure:      SecureConfig{BindAddress: net.IPv4zero, BindPort: 10357},
		Insecure:    InsecureConfig{BindAddress: net.IPv4(127, 0, 0, 1), Port: 10358},
		Metrics:     metrics.NewOptions(),
		Logs:        logsapi.NewLoggingConfiguration(),
		FeatureGate: gate,
		name:        defaultName,
	}
	for _, option := range options {
		option(o)
	}
	if problems := validation.IsDNS1123Label(o.name); len(problems) > 0 {
		return nil, fmt.Errorf("the name %q of the build is not a DNS label: %s", o.name, problems[0])
	}
	if err := checkEntries(o.entries); err != nil {
		return nil, err
	}
	o.Election = election.NewConfig(types.NamespacedName{Namespace: metav1.NamespaceSystem, Name: o.name})
	var err error
	o.flags, err = o.flagSets()
	return o, err
}

// electionUsages are the usages of the flags of leader election. component-base's usages speak of candidates,
// slots and masters. A flag that component-base drops makes TestHelpGolden panic.
var electionUsages = map[string]string{
	"":                    "Run controllers only in the replica that holds the Lease. If false, run one replica only.",
	"-lease-duration":     "How long a standby waits for a leader that does not renew its Lease: 2s to 10m.",
	"-renew-deadline":     "A leader that could not renew its Lease for this long ends.",
	"-retry-period":       "How often the leader renews, and how soon a failed request is tried again.",
	"-resource-lock":      "The kind of object that replicas elect by: only leases.",
	"-resource-name":      "The name of the Lease.",
	"-resource-namespace": "The namespace of the Lease.",
}

// flagSets binds every flag, in groups, in the order of --help.
func (o *Options) flagSets() (sets cliflag.NamedFlagSets, err error) {
	fs := sets.FlagSet(configurationFlags)
	fs.StringVar(&o.File.Path, "config", o.File.Path, ""+
		"A file of kind "+configurationKind+" ("+groupVersion.String()+") with values of flags. "+
		"It is read at the start; a flag on the command line wins over it.")
	fs.BoolVar(&o.File.Print, "print-effective-config", o.File.Print,
		"Print the configuration that flags and --config result in, as a file for --config, and exit.")

	g := &o.Generic
	fs = sets.FlagSet("generic")
	fs.StringSliceVar(&g.Controllers, "controllers", g.Controllers, ""+
		"The controllers to run: '*' is all that are on by default, 'foo' switches foo on, '-foo' switches it off. "+
		"The first item that names a controller decides. "+
		"All: "+strings.Join(o.controllerNames(), ", ")+". On by default: "+o.onByDefault()+".")
	if originals := o.originals(); len(originals) > 0 {
		fs.StringSliceVar(&g.Compat, "compat", g.Compat, ""+
			"The operators that this installation replaces, whose annotations are understood besides the native ones: "+
			"any of "+strings.Join(originals, ", ")+".")
	}
	fs.DurationVar(&g.ControllerStuckAfter, "controller-stuck-after", g.ControllerStuckAfter,
		"A controller's health check fails while one of its reconciles has been running for longer than this.")
	fs.DurationVar(&g.ShutdownTimeout, "shutdown-timeout", g.ShutdownTimeout, ""+
		"The time that reconciles in flight have to finish after SIGTERM. If they do, the Lease is released at once; "+
		"if they do not, the Lease expires and the exit code is 1. Keep terminationGracePeriodSeconds at least 10 s above "+
		"this time.")
	fs.BoolVar(&g.DryRun, "dry-run", g.DryRun,
		"Change nothing. Controllers send writes with dryRun=All or only report them, and a request that cannot be a dry run "+
			"is refused. Leases and Events are written as always.")

	c := &o.Client
	fs = sets.FlagSet("client connection")
	fs.StringVar(&c.Kubeconfig, "kubeconfig", c.Kubeconfig,
		"The kubeconfig file to use. Default: the ServiceAccount of the Pod.")
	fs.StringVar(&c.Master, "master", c.Master, "The address of the API server; overrides the kubeconfig's.")
	fs.Float32Var(&c.QPS, "kube-api-qps", c.QPS, ""+
		"Requests per second to the API server, of all controllers, the cache and Events together. Watches, the Lease and "+
		"the reviews of who calls the secure port do not count. Negative: no limit.")
	fs.Int32Var(&c.Burst, "kube-api-burst", c.Burst, "Requests that may go out at once under --kube-api-qps.")
	fs.StringVar(&c.ContentType, "kube-api-content-type", c.ContentType, ""+
		"The content type of requests of typed clients for built-in types: "+runtime.ContentTypeProtobuf+" or "+
		runtime.ContentTypeJSON+". Other clients speak JSON.")

	fs = sets.FlagSet("leader election")
	o.Election.AddFlags(fs)
	for name, usage := range electionUsages {
		fs.Lookup("leader-elect" + name).Usage = usage
	}

	fs = sets.FlagSet("informers")
	fs.StringVar(&g.Standby, "standby", g.Standby, ""+
		"What a replica that does not lead keeps: \"warm\" synced caches, so that it can act at once when it "+
		"becomes the leader; or \"cold\", none: it saves the memory and lists everything on becoming the leader.")
	fs.StringSliceVar(&g.Namespaces, "namespaces", g.Namespaces, ""+
		"The only namespaces to watch and to work in. Default: all. With --secure-port=0 and without "+
		"--dry-run no permission in the whole cluster is needed then.")

	o.Secure.AddFlags(sets.FlagSet("secure serving"))
	o.Authentication.AddFlags(sets.FlagSet("authentication"))

	fs = sets.FlagSet("insecure serving")
	fs.IPVar(&o.Insecure.BindAddress, "insecure-bind-address", o.Insecure.BindAddress,
		"The address of the plain HTTP server, which has no authentication: /healthz, /livez and /readyz.")
	fs.IntVar(&o.Insecure.Port, "insecure-port", o.Insecure.Port, "The port of the plain HTTP server; 0 switches it off.")
	fs.BoolVar(&o.Insecure.Metrics, "insecure-metrics", o.Insecure.Metrics, "Serve /metrics on --insecure-port.")

	fs = sets.FlagSet("debugging")
	fs.BoolVar(&g.Profiling, "profiling", g.Profiling, "Serve /debug/pprof on the secure port.")

	o.workers = map[string]*int{}
	for _, e := range o.entries {
		controller, workers := "controller "+e.Name, e.Workers
		o.workers[e.Name] = &workers
		if err := recovered(controller+": AddFlags", func() error {
			if e.Config != nil {
				e.Config.AddFlags(sets.FlagSet(controller))
			}
			if workers > 0 {
				sets.FlagSet(controller).IntVar(&workers, e.Name+workersFlag, workers, "How many objects are reconciled at once.")
			}
			return nil
		}); err != nil {
			return sets, err
		}
	}

	o.Metrics.AddFlags(sets.FlagSet("metrics"))
	logsapi.AddFlags(o.Logs, sets.FlagSet("logs"))
	sets.FlagSet("logs").Lookup("v").Usage = fmt.Sprintf("The log level, 0 to %d: above it, the values of Secrets would be logged.", maxVerbosity)
	o.FeatureGate.AddFlag(sets.FlagSet("feature gates"))

	// The command would silently take one of two flags with the same name.
	groups := map[string]string{"help": globalFlags, "version": globalFlags}
	var errs []error
	for _, group := range sets.Order {
		sets.FlagSets[group].VisitAll(func(f *pflag.Flag) {
			if other, taken := groups[f.Name]; taken {
				errs = append(errs, fmt.Errorf("--%s is a flag of two groups, %q and %q", f.Name, other, group))
			}
			groups[f.Name] = group
		})
	}
	return sets, errors.Join(errs...)
}

// Parse sets what these flags say. It is for a program that runs the manager without its command.
func (o *Options) Parse(flags []string) error {
	all := pflag.NewFlagSet(o.name, pflag.ContinueOnError)
	for _, fs := range o.flags.FlagSets {
		all.AddFlagSet(fs)
	}
	return all.Parse(flags)
}

// originals returns the operators that controllers can replace: --compat can name them.
func (o *Options) originals() (names []string) {
	for _, e := range o.entries {
		names = append(names, e.Compat...)
	}
	return names
}

// Validate returns every mistake in the configuration. Each names its flag and, if the
// configuration file sets the flag, the file and the line.
func (o *Options) Validate() error {
	var errs []error
	add := func(flag, format string, args ...any) {
		errs = append(errs, fmt.Errorf("--%s: %s", flag, fmt.Sprintf(format, args...)))
	}

	g := o.Generic
	enabled, err := o.enabled()
	if err != nil {
		errs = append(errs, err)
	}
	for _, e := range enabled {
		if e.EveryReplica && g.Standby == standbyCold {
			add("standby", "%s runs on every replica, which needs the cache of a warm standby", e.Name)
		}
	}
	originals := o.originals()
	for _, name := range g.Compat {
		if !slices.Contains(originals, name) {
			add("compat", "%q is not known; known are %s", name, strings.Join(originals, ", "))
		}
	}
	if g.Standby != standbyWarm && g.Standby != standbyCold {
		add("standby", "%q is neither %q nor %q", g.Standby, standbyWarm, standbyCold)
	}
	for i, namespace := range g.Namespaces {
		if problems := validation.IsDNS1123Label(namespace); len(problems) > 0 {
			add("namespaces", "%q: %s", namespace, problems[0])
		} else if slices.Contains(g.Namespaces[:i], namespace) {
			add("namespaces", "%q is named twice", namespace)
		}
	}
	if g.ControllerStuckAfter <= 0 {
		add("controller-stuck-after", "must be greater than 0, got %s", g.ControllerStuckAfter)
	}
	if g.ShutdownTimeout <= 0 {
		add("shutdown-timeout", "must be greater than 0, got %s", g.ShutdownTimeout)
	}
	if qps := float64(o.Client.QPS); math.IsNaN(qps) || math.IsInf(qps, 0) || qps >= 0 && o.Client.QPS < 0.1 {
		add("kube-api-qps", "must be at least 0.1, or negative for no limit, got %v", qps)
	}
	if o.Client.QPS > 0 && o.Client.Burst <= 0 {
		add("kube-api-burst", "must be greater than 0, got %d", o.Client.Burst)
	}
	if known := []string{runtime.ContentTypeProtobuf, runtime.ContentTypeJSON}; !slices.Contains(known, o.Client.ContentType) {
		add("kube-api-content-type", "%q is not known; known are %s", o.Client.ContentType, strings.Join(known, ", "))
	}
	if o.Insecure.Port < 0 || o.Insecure.Port > 65535 {
		add("insecure-port", "must be 0 to 65535, got %d", o.Insecure.Port)
	}
	if o.Insecure.Port != 0 && o.Insecure.Port == o.Secure.BindPort && o.Insecure.BindAddress.Equal(o.Secure.BindAddress) {
		add("insecure-port", "must not be the --secure-port, got %d for both", o.Insecure.Port)
	}
	elector := o.election()
	elector.DrainTimeout = max(elector.DrainTimeout, 1) // --shutdown-timeout is checked above
	errs = append(errs, elector.Validate(), o.Secure.Validate())
	errs = append(errs, o.Metrics.Validate()...)
	if logErrs := logsapi.Validate(o.Logs, o.FeatureGate, nil); len(logErrs) > 0 {
		errs = append(errs, logErrs.ToAggregate())
	}
	if err := checkVerbosity(o.Logs.Verbosity); err != nil {
		add("v", "%v", err)
	}
	for _, item := range o.Logs.VModule {
		if err := checkVerbosity(item.Verbosity); err != nil {
			add("vmodule", "%s: %v", item.FilePattern, err)
		}
	}
	settings := o.Settings()
	for _, e := range o.entries {
		if n := *o.workers[e.Name]; e.Workers > 0 && n < 1 {
			add(e.Name+workersFlag, "must be at least 1, got %d", n)
		}
		if e.Config != nil {
			errs = append(errs, recovered("controller "+e.Name+": Validate", func() error { return e.Config.Validate(settings) }))
		}
	}
	return o.File.locate(errors.Join(errs...))
}

// maxVerbosity is the highest level of the log. From 8 on, client-go logs the bodies of requests and
// responses: the values of Secrets that are copied, and the tokens of those who call the secure port.
const maxVerbosity = 7

// checkVerbosity returns an error if the log would have secret values at this level.
func checkVerbosity(level logsapi.VerbosityLevel) error {
	if level > maxVerbosity {
		return fmt.Errorf("must be at most %d, above which the values of Secrets would be logged, got %d", maxVerbosity, level)
	}
	return nil
}

// election returns the configuration of the elector. Controllers may drain for --shutdown-timeout.
func (o *Options) election() election.Config {
	cfg := o.Election
	cfg.DrainTimeout = o.Generic.ShutdownTimeout
	return cfg
}

// Settings returns what the process decides for all controllers.
func (o *Options) Settings() controllers.Settings {
	lease := o.Election.Lease()
	return controllers.Settings{
		Compat: o.Generic.Compat, Namespaces: o.Generic.Namespaces, DryRun: o.Generic.DryRun, Namespace: lease.Namespace,
		OwnNamespaces: []string{lease.Namespace, apifence.NamespaceFor(lease)},
		Pod:           cache.ObjectName{Namespace: cmp.Or(os.Getenv("POD_NAMESPACE"), lease.Namespace), Name: os.Getenv("POD_NAME")},
	}
}
