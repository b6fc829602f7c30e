// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"errors"
	"fmt"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// ConfigName is the name of the only KubeFedConfig that counts.
const ConfigName = "kubefed"

const (
	enabled  = "Enabled"
	disabled = "Disabled"
)

// Config is a KubeFedConfig with its defaults.
type Config struct {
	// Namespaced says that the federation is restricted to a namespace, which is not supported.
	Namespaced bool
	// AvailableDelay is how long a cluster must be ready before placement deletes in it, and
	// UnavailableDelay how long it must be not ready before its replicas move.
	AvailableDelay, UnavailableDelay time.Duration
	// Push, Scheduler and RawStatus are the feature gates PushReconciler, SchedulerPreferences and
	// RawResourceStatusCollection.
	Push, Scheduler, RawStatus bool
	// ProbePeriod and ProbeTimeout are the period and the time-out of health probes.
	ProbePeriod, ProbeTimeout time.Duration
	// FailureThreshold and SuccessThreshold are how many probes in a row change a cluster's state.
	FailureThreshold, SuccessThreshold int64
	// Adopt says that objects without the managed label may be overwritten.
	Adopt bool
}

// DefaultConfig returns what counts if there is no KubeFedConfig.
func DefaultConfig() Config {
	return Config{AvailableDelay: 20 * time.Second, UnavailableDelay: time.Minute, Push: true, Scheduler: true,
		ProbePeriod: 10 * time.Second, ProbeTimeout: 3 * time.Second, FailureThreshold: 3, SuccessThreshold: 1, Adopt: true}
}

// ReadConfig returns the settings of a KubeFedConfig. The error names every field that is wrong;
// such a field has its default.
func ReadConfig(object map[string]any) (Config, error) {
	var spec struct {
		Scope              string
		ControllerDuration struct{ AvailableDelay, UnavailableDelay *metav1.Duration }
		FeatureGates       []struct{ Name, Configuration string }
		ClusterHealthCheck struct {
			Period, Timeout                    *metav1.Duration
			FailureThreshold, SuccessThreshold *int64
		}
		SyncController struct{ AdoptResources *string }
	}
	c := DefaultConfig()
	if err := decode(object["spec"], &spec); err != nil {
		return c, err
	}
	var errs []error
	switch spec.Scope {
	case "Cluster":
	case "Namespaced":
		c.Namespaced = true
	default:
		errs = append(errs, fmt.Errorf("scope: must be Cluster or Namespaced, got %q", spec.Scope))
	}
	duration := func(name string, d *metav1.Duration, into *time.Duration) {
		if d != nil && d.Duration <= 0 {
			errs = append(errs, fmt.Errorf("%s: must be positive", name))
		} else if d != nil {
			*into = d.Duration
		}
	}
	duration("availableDelay", spec.ControllerDuration.AvailableDelay, &c.AvailableDelay)
	duration("unavailableDelay", spec.ControllerDuration.UnavailableDelay, &c.UnavailableDelay)
	duration("period", spec.ClusterHealthCheck.Period, &c.ProbePeriod)
	duration("timeout", spec.ClusterHealthCheck.Timeout, &c.ProbeTimeout)
	threshold := func(name string, n *int64, into *int64) {
		if n != nil && *n < 1 {
			errs = append(errs, fmt.Errorf("%s: must be at least 1", name))
		} else if n != nil {
			*into = *n
		}
	}
	threshold("failureThreshold", spec.ClusterHealthCheck.FailureThreshold, &c.FailureThreshold)
	threshold("successThreshold", spec.ClusterHealthCheck.SuccessThreshold, &c.SuccessThreshold)
	toggle := func(name, value string, into *bool) {
		if value != enabled && value != disabled {
			errs = append(errs, fmt.Errorf("%s: must be Enabled or Disabled, got %q", name, value))
			return
		}
		*into = value == enabled
	}
	gates := map[string]*bool{"PushReconciler": &c.Push, "SchedulerPreferences": &c.Scheduler, "RawResourceStatusCollection": &c.RawStatus}
	for _, gate := range spec.FeatureGates {
		if into := gates[gate.Name]; into != nil {
			toggle(gate.Name, gate.Configuration, into)
		}
	}
	if adopt := spec.SyncController.AdoptResources; adopt != nil {
		toggle("adoptResources", *adopt, &c.Adopt)
	}
	return c, errors.Join(errs...)
}
