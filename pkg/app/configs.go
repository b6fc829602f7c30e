// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/client-go/rest"
	componentbaseconfig "k8s.io/component-base/config"
	logsapi "k8s.io/component-base/logs/api/v1"
)

// GenericConfig is the configuration that concerns all controllers alike.
type GenericConfig struct {
	Controllers          []string
	Compat               []string
	ControllerStuckAfter time.Duration
	ShutdownTimeout      time.Duration
	DryRun               bool
	Profiling            bool
}

// AddFlags adds the flags to fs, except --profiling. all are the entries of the build.
func (c *GenericConfig) AddFlags(fs *pflag.FlagSet, all entries) {
	fs.StringSliceVar(&c.Controllers, "controllers", c.Controllers, ""+
		"The controllers to run: '*' is all that are on by default, 'foo' switches foo on, '-foo' switches it off. "+
		"An item with a controller's own name beats '*', wherever it stands; of several with its name, the first decides. "+
		"All: "+strings.Join(all.names(), ", ")+". On by default: "+all.onByDefault()+".")
	if originals := all.originals(); len(originals) > 0 {
		fs.StringSliceVar(&c.Compat, "compat", c.Compat, ""+
			"The operators that this installation replaces, whose annotations are understood besides the native ones: "+
			"any of "+strings.Join(originals, ", ")+".")
	}
	fs.DurationVar(&c.ControllerStuckAfter, "controller-stuck-after", c.ControllerStuckAfter,
		"A controller's health check fails while one of its reconciles, its drain or its wait for its informers takes longer than this. "+
			"The context of a reconcile ends then, unless its controller has set another time.")
	fs.DurationVar(&c.ShutdownTimeout, "shutdown-timeout", c.ShutdownTimeout, ""+
		"The time that reconciles in flight have to finish after SIGTERM; their contexts end up to 2 s earlier. If they do "+
		"finish, the Lease is released at once; if not, the Lease expires and the exit code is 1. Keep "+
		"terminationGracePeriodSeconds at least 10 s above this time.")
	fs.BoolVar(&c.DryRun, "dry-run", c.DryRun,
		"Change nothing. Controllers send writes with dryRun=All or only report them, and a request that cannot be a dry run "+
			"is refused. Leases are written as always, and so are Events, unless a controller says otherwise.")
}

// Validate returns all problems, joined; each names its flag. all are the entries of the build.
func (c *GenericConfig) Validate(all entries) error {
	_, err := all.enabled(c.Controllers)
	errs := []error{err}
	originals := all.originals()
	for _, name := range c.Compat {
		if !slices.Contains(originals, name) {
			errs = append(errs, fmt.Errorf("--compat: %q is not known; known are %s", name, strings.Join(originals, ", ")))
		}
	}
	if c.ControllerStuckAfter <= 0 {
		errs = append(errs, fmt.Errorf("--controller-stuck-after: must be greater than 0, got %s", c.ControllerStuckAfter))
	}
	if c.ShutdownTimeout <= 0 {
		errs = append(errs, fmt.Errorf("--shutdown-timeout: must be greater than 0, got %s", c.ShutdownTimeout))
	}
	return errors.Join(errs...)
}

// ClientConfig says how to reach the API server.
type ClientConfig struct {
	componentbaseconfig.ClientConnectionConfiguration
	Master string
	// RESTConfig, if set, is used in place of a kubeconfig. No flag sets it: it is for a program that
	// runs the manager, such as a test.
	RESTConfig *rest.Config
}

// AddFlags adds the flags to fs.
func (c *ClientConfig) AddFlags(fs *pflag.FlagSet) {
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
}

// Validate returns all problems, joined; each names its flag. It reads no files.
func (c *ClientConfig) Validate() error {
	var errs []error
	if qps := float64(c.QPS); math.IsNaN(qps) || math.IsInf(qps, 0) || qps >= 0 && c.QPS < 0.1 {
		errs = append(errs, fmt.Errorf("--kube-api-qps: must be at least 0.1, or negative for no limit, got %v", qps))
	}
	if c.QPS > 0 && c.Burst <= 0 {
		errs = append(errs, fmt.Errorf("--kube-api-burst: must be greater than 0, got %d", c.Burst))
	}
	if known := []string{runtime.ContentTypeProtobuf, runtime.ContentTypeJSON}; !slices.Contains(known, c.ContentType) {
		errs = append(errs, fmt.Errorf("--kube-api-content-type: %q is not known; known are %s",
			c.ContentType, strings.Join(known, ", ")))
	}
	return errors.Join(errs...)
}

// InformersConfig says what the informers watch, and when.
type InformersConfig struct {
	Standby    string   // standbyWarm or standbyCold
	Namespaces []string // empty means all
}

// With a warm standby, informers run on every replica; with a cold one, they start when the replica leads.
const standbyWarm, standbyCold = "warm", "cold"

// AddFlags adds the flags to fs.
func (c *InformersConfig) AddFlags(fs *pflag.FlagSet) {
	fs.StringVar(&c.Standby, "standby", c.Standby, ""+
		"What a replica that does not lead keeps: \"warm\" synced caches, so that it can act at once when it "+
		"becomes the leader; or \"cold\", none: it saves the memory and lists everything on becoming the leader.")
	fs.StringSliceVar(&c.Namespaces, "namespaces", c.Namespaces, ""+
		"The only namespaces to watch and to work in. Default: all. With --secure-port=0 and without "+
		"--dry-run no permission in the whole cluster is needed then.")
}

// Validate returns all problems, joined; each names its flag. enabled are the entries that --controllers
// selects.
func (c *InformersConfig) Validate(enabled entries) error {
	var errs []error
	for _, e := range enabled {
		if e.EveryReplica && c.Standby == standbyCold {
			errs = append(errs, fmt.Errorf("--standby: %s runs on every replica, which needs the cache of a warm standby", e.Name))
		}
	}
	if c.Standby != standbyWarm && c.Standby != standbyCold {
		errs = append(errs, fmt.Errorf("--standby: %q is neither %q nor %q", c.Standby, standbyWarm, standbyCold))
	}
	for i, namespace := range c.Namespaces {
		if problems := validation.IsDNS1123Label(namespace); len(problems) > 0 {
			errs = append(errs, fmt.Errorf("--namespaces: %q: %s", namespace, problems[0]))
		} else if slices.Contains(c.Namespaces[:i], namespace) {
			errs = append(errs, fmt.Errorf("--namespaces: %q is named twice", namespace))
		}
	}
	return errors.Join(errs...)
}

// maxVerbosity is the highest level of the log. From 8 on, client-go logs the bodies of requests and
// responses: the values of Secrets that are copied, and the tokens of those who call the secure port.
const maxVerbosity = 7

// validateLogs returns all problems with the configuration of the log, joined; each names its flag.
func validateLogs(o *Options) error {
	var errs []error
	if logErrs := logsapi.Validate(o.Logs, o.FeatureGate, nil); len(logErrs) > 0 {
		errs = append(errs, logErrs.ToAggregate())
	}
	if err := checkVerbosity(o.Logs.Verbosity); err != nil {
		errs = append(errs, fmt.Errorf("--v: %w", err))
	}
	for _, item := range o.Logs.VModule {
		if err := checkVerbosity(item.Verbosity); err != nil {
			errs = append(errs, fmt.Errorf("--vmodule: %s: %w", item.FilePattern, err))
		}
	}
	return errors.Join(errs...)
}

// checkVerbosity returns an error if the log would have secret values at this level.
func checkVerbosity(level logsapi.VerbosityLevel) error {
	if level > maxVerbosity {
		return fmt.Errorf("must be at most %d, above which the values of Secrets would be logged, got %d", maxVerbosity, level)
	}
	return nil
}
