// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package election

import (
	"errors"
	"fmt"
	"time"

	"github.com/spf13/pflag"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"
	componentbaseconfig "k8s.io/component-base/config"
	componentbaseoptions "k8s.io/component-base/config/options"

	"github.com/quartermaster-dev/quartermaster/pkg/election/apifence"
	"github.com/quartermaster-dev/quartermaster/pkg/election/protocol"
)

const (
	// resourceLockLeases is the only supported lock type.
	resourceLockLeases = "leases"

	// minLease is the shortest lease duration. It is longer than protocol.ReleasedDuration, because a
	// duration of protocol.ReleasedDuration marks a release.
	minLease = protocol.ReleasedDuration + time.Second

	// minRetryPeriod keeps a mistyped flag from flooding the API server.
	minRetryPeriod = 100 * time.Millisecond
)

// Config configures leader election. Every Kubernetes component has the embedded fields, bound to the
// flags of the same names.
type Config struct {
	componentbaseconfig.LeaderElectionConfiguration

	// DrainTimeout is how long lead may take to return once the context of Run has ended. The Lease
	// is renewed meanwhile. If lead takes longer, the Lease is not released but expires. There is
	// no flag for it here: the process has one for its whole shutdown.
	DrainTimeout time.Duration
}

// NewConfig returns the defaults for a Lease: a duration of 15 s, a renew deadline of 10 s and a retry
// period of 2 s, as in Kubernetes' own components, and 30 s to drain.
func NewConfig(lease types.NamespacedName) Config {
	return Config{
		LeaderElectionConfiguration: componentbaseconfig.LeaderElectionConfiguration{
			LeaderElect:       true,
			LeaseDuration:     metav1.Duration{Duration: 15 * time.Second},
			RenewDeadline:     metav1.Duration{Duration: 10 * time.Second},
			RetryPeriod:       metav1.Duration{Duration: 2 * time.Second},
			ResourceLock:      resourceLockLeases,
			ResourceName:      lease.Name,
			ResourceNamespace: lease.Namespace,
		},
		DrainTimeout: 30 * time.Second,
	}
}

// Lease returns the name of the Lease.
func (c Config) Lease() types.NamespacedName {
	return types.NamespacedName{Namespace: c.ResourceNamespace, Name: c.ResourceName}
}

// AddFlags binds the flags --leader-elect and --leader-elect-*.
func (c *Config) AddFlags(fs *pflag.FlagSet) {
	componentbaseoptions.BindLeaderElectionFlags(&c.LeaderElectionConfiguration, fs)
}

// Validate returns all problems, joined; each names its flag. If leader election is
// off, the values are not checked.
func (c Config) Validate() error {
	if !c.LeaderElect {
		return nil
	}
	return errors.Join(c.validateLock(), c.validateTimings())
}

func (c Config) validateLock() error {
	var errs []error
	if c.ResourceLock != resourceLockLeases {
		errs = append(errs, fmt.Errorf("--leader-elect-resource-lock: %q is not supported, use %q; a fleet that elects through another "+
			"must be stopped before this one is started", c.ResourceLock, resourceLockLeases))
	}
	for _, problem := range validation.IsDNS1123Label(c.ResourceName) {
		errs = append(errs, fmt.Errorf("--leader-elect-resource-name: %q: %s", c.ResourceName, problem))
	}
	for _, problem := range validation.IsDNS1123Label(c.ResourceNamespace) {
		errs = append(errs, fmt.Errorf("--leader-elect-resource-namespace: %q: %s", c.ResourceNamespace, problem))
	}
	if namespace := apifence.NamespaceFor(c.Lease()); len(errs) == 0 && len(validation.IsDNS1123Label(namespace)) > 0 {
		errs = append(errs, fmt.Errorf("--leader-elect-resource-name: %q is too long: the Namespace %q, which names the leader, "+
			"is named after it", c.ResourceName, namespace))
	}
	return errors.Join(errs...)
}

func (c Config) validateTimings() error {
	var errs []error
	lease, deadline, retry := c.LeaseDuration.Duration, c.RenewDeadline.Duration, c.RetryPeriod.Duration
	switch {
	case lease < minLease:
		errs = append(errs, fmt.Errorf("--leader-elect-lease-duration: must be at least %s, got %s", minLease, lease))
	case lease%time.Second != 0:
		errs = append(errs, fmt.Errorf("--leader-elect-lease-duration: must be a whole number of seconds, "+
			"which is all that the Lease can hold, got %s", lease))
	case lease > protocol.MaxLease:
		errs = append(errs, fmt.Errorf("--leader-elect-lease-duration: must be at most %s, got %s", protocol.MaxLease, lease))
	}
	if deadline <= 0 {
		errs = append(errs, fmt.Errorf("--leader-elect-renew-deadline: must be greater than 0, got %s", deadline))
	} else if least := protocol.SafeLease(deadline); lease < least {
		errs = append(errs, fmt.Errorf("--leader-elect-renew-deadline: %s needs a --leader-elect-lease-duration of at least %s "+
			"(the deadline, %.0f%% of clock error in either replica, and %s for cancelled requests to end) but that is %s: "+
			"raise the lease duration or lower the renew deadline",
			deadline, least, 100*protocol.ClockRateError, protocol.SettleTime, lease))
	}
	if retry < minRetryPeriod {
		errs = append(errs, fmt.Errorf("--leader-elect-retry-period: must be at least %s, got %s", minRetryPeriod, retry))
	} else if deadline > 0 && deadline < 2*retry {
		errs = append(errs, fmt.Errorf("--leader-elect-retry-period: must be at most half of --leader-elect-renew-deadline (%s), got %s: "+
			"one renewal that fails would end the term; lower the retry period or raise the renew deadline",
			deadline, retry))
	}
	if c.DrainTimeout <= 0 {
		errs = append(errs, fmt.Errorf("the time to drain must be greater than 0, got %s", c.DrainTimeout))
	}
	return errors.Join(errs...)
}

func (c Config) timing() protocol.Timing {
	return protocol.Timing{
		Lease:    c.LeaseDuration.Duration,
		Deadline: c.RenewDeadline.Duration,
		Retry:    c.RetryPeriod.Duration,
	}
}
