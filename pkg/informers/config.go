// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/util/validation"
)

// Values of Config.Standby and of --standby.
const (
	StandbyWarm = "warm"
	StandbyCold = "cold"
)

// Config holds the values of the flags.
type Config struct {
	// Standby is StandbyWarm (the default), so that informers run on every replica, or StandbyCold,
	// so that they start when this replica starts leading.
	Standby string
	// Namespaces restricts all informers to the named ones; empty means all namespaces.
	Namespaces []string
	// Cluster is the label cluster of the metrics: empty for the cluster that the process runs in.
	Cluster string
}

// NewConfig returns the defaults.
func NewConfig() Config {
	return Config{Standby: StandbyWarm}
}

// AddFlags adds the flags to fs. Their defaults are the values of c.
func (c *Config) AddFlags(fs *pflag.FlagSet) {
	fs.StringVar(&c.Standby, "standby", c.Standby,
		"What a replica that does not lead keeps: \"warm\" synced caches, so that it can act at once when it "+
			"becomes the leader; or \"cold\", none: it saves the memory and lists everything on becoming the leader.")
	fs.StringSliceVar(&c.Namespaces, "namespaces", c.Namespaces,
		"The only namespaces to watch and to work in. Default: all. With --secure-port=0 and without "+
			"--dry-run no permission in the whole cluster is needed then.")
}

// Validate returns all problems, joined; each names its flag.
func (c *Config) Validate() error {
	var errs []error
	if c.Standby != StandbyWarm && c.Standby != StandbyCold {
		errs = append(errs, fmt.Errorf("--standby: %q is neither %q nor %q", c.Standby, StandbyWarm, StandbyCold))
	}
	for i, namespace := range c.Namespaces {
		if problems := validation.IsDNS1123Label(namespace); len(problems) > 0 {
			errs = append(errs, fmt.Errorf("--namespaces: %q: %s", namespace, strings.Join(problems, "; ")))
		} else if slices.Contains(c.Namespaces[:i], namespace) {
			errs = append(errs, fmt.Errorf("--namespaces: %q is named twice", namespace))
		}
	}
	return errors.Join(errs...)
}
