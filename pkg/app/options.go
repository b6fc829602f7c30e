// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"github.com/spf13/pflag"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"
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
	"github.com/quartermaster-dev/quartermaster/pkg/serving"
)

// Options is the whole configuration of the manager, one Config per component; the entry of a controller
// has the controller's Config. The flags write to it.
type Options struct {
	File           ConfigFile
	Generic        GenericConfig
	Client         ClientConfig
	Election       election.Config
	Informers      InformersConfig
	Secure         serving.SecureConfig
	Insecure       serving.InsecureConfig
	Authentication serving.AuthenticationConfig
	Metrics        *metrics.Options
	Logs           *logsapi.LoggingConfiguration
	FeatureGate    featuregate.MutableVersionedFeatureGate

	// ElectionClock is election.NewBootClock's if it is nil. No flag sets it: it is for tests.
	ElectionClock protocol.Clock

	name    string // of the build
	entries entries
	workers map[string]*int // by name of the entry
	flags   cliflag.NamedFlagSets
}

// defaultName is the name of a build without Named.
const defaultName = "quartermaster"

// BuildOption is what a program puts into its build of the manager: see [With] and [Named].
type BuildOption func(*Options)

// With adds controllers to a build. They are built in this order. builtin.Entries has the controllers of
// Quartermaster.
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
			Profiling:            true,
		},
		Client: ClientConfig{ClientConnectionConfiguration: componentbaseconfig.ClientConnectionConfiguration{
			ContentType: runtime.ContentTypeProtobuf,
			QPS:         -1, // docs/adr/0005-client-limits.md
			Burst:       100,
		}},
		Informers:   InformersConfig{Standby: standbyWarm},
		Secure:      serving.SecureConfig{BindAddress: net.IPv4zero, BindPort: 10357},
		Insecure:    serving.InsecureConfig{BindAddress: net.IPv4(127, 0, 0, 1), Port: 10358},
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

// flagSets binds every flag, in groups, in the order of --help.
func (o *Options) flagSets() (cliflag.NamedFlagSets, error) {
	var sets cliflag.NamedFlagSets
	o.File.AddFlags(sets.FlagSet(configurationFlags))
	o.Generic.AddFlags(sets.FlagSet("generic"), o.entries)
	o.Client.AddFlags(sets.FlagSet("client connection"))
	o.addElectionFlags(sets.FlagSet("leader election"))
	o.Informers.AddFlags(sets.FlagSet("informers"))
	o.Secure.AddFlags(sets.FlagSet("secure serving"))
	o.Authentication.AddFlags(sets.FlagSet("authentication"))
	o.Insecure.AddFlags(sets.FlagSet("insecure serving"))
	sets.FlagSet("debugging").BoolVar(&o.Generic.Profiling, "profiling", o.Generic.Profiling,
		"Serve /debug/pprof on the secure port.")
	o.workers = map[string]*int{}
	for _, e := range o.entries {
		if err := o.addEntryFlags(e, &sets); err != nil {
			return sets, err
		}
	}
	o.Metrics.AddFlags(sets.FlagSet("metrics"))
	logs := sets.FlagSet("logs")
	logsapi.AddFlags(o.Logs, logs)
	logs.Lookup("v").Usage = fmt.Sprintf("The log level, 0 to %d: above it, the values of Secrets would be logged.", maxVerbosity)
	o.FeatureGate.AddFlag(sets.FlagSet("feature gates"))
	return sets, checkFlagNames(sets)
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

// addElectionFlags adds the flags of leader election to fs.
func (o *Options) addElectionFlags(fs *pflag.FlagSet) {
	o.Election.AddFlags(fs)
	for name, usage := range electionUsages {
		fs.Lookup("leader-elect" + name).Usage = usage
	}
}

// workersFlag is the end of the name of the flag of Entry.Workers.
const workersFlag = "-concurrent-syncs"

// addEntryFlags adds the flags of an entry, in a group of its own.
func (o *Options) addEntryFlags(e controllers.Entry, sets *cliflag.NamedFlagSets) error {
	controller, workers := "controller "+e.Name, e.Workers
	o.workers[e.Name] = &workers
	return recovered(e.Name, "AddFlags", func() error {
		if e.Config != nil {
			e.Config.AddFlags(sets.FlagSet(controller))
		}
		if workers > 0 {
			sets.FlagSet(controller).IntVar(&workers, e.Name+workersFlag, workers, "How many objects are reconciled at once.")
		}
		return nil
	})
}

// checkFlagNames returns an error if two groups have a flag of one name, of which the command would silently
// take one.
func checkFlagNames(sets cliflag.NamedFlagSets) error {
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
	return errors.Join(errs...)
}

// Parse sets what these flags say. It is for a program that runs the manager without its command, and that
// calls Check next.
func (o *Options) Parse(flags []string) error {
	all := pflag.NewFlagSet(o.name, pflag.ContinueOnError)
	for _, fs := range o.flags.FlagSets {
		all.AddFlagSet(fs)
	}
	return all.Parse(flags)
}

// Check reads the configuration file, and returns every mistake in the configuration. Each names its flag
// and, if the file sets the flag, the file and the line.
func (o *Options) Check() error {
	fileErr := o.readConfigFile()
	enabled, _ := o.enabled() // Generic.Validate returns the error
	elector := o.election()
	elector.DrainTimeout = max(elector.DrainTimeout, 1) // Generic.Validate checks --shutdown-timeout
	errs := append([]error{
		o.Generic.Validate(o.entries), o.Client.Validate(), elector.Validate(), o.Informers.Validate(enabled),
		o.Secure.Validate(), o.Insecure.Validate(o.Secure),
	}, o.Metrics.Validate()...)
	errs = append(errs, validateLogs(o))
	for _, e := range o.entries {
		errs = append(errs, o.validateEntry(e))
	}
	return errors.Join(fileErr, o.File.locate(errors.Join(errs...)))
}

// validateEntry returns all problems with the flags of an entry, joined.
func (o *Options) validateEntry(e controllers.Entry) error {
	var errs []error
	if n := *o.workers[e.Name]; e.Workers > 0 && n < 1 {
		errs = append(errs, fmt.Errorf("--%s%s: must be at least 1, got %d", e.Name, workersFlag, n))
	}
	if e.Config != nil {
		var invalid error // its lines begin with a flag
		err := recovered(e.Name, "Validate", func() error { invalid = e.Config.Validate(o.Settings()); return nil })
		errs = append(errs, err, invalid)
	}
	return errors.Join(errs...)
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
		Compat: o.Generic.Compat, Namespaces: o.Informers.Namespaces, DryRun: o.Generic.DryRun, Namespace: lease.Namespace,
		OwnNamespaces: []string{lease.Namespace, apifence.NamespaceFor(lease)},
		Pod: cache.ObjectName{
			Namespace: cmp.Or(os.Getenv("POD_NAMESPACE"), lease.Namespace), Name: os.Getenv("POD_NAME"),
		},
	}
}
