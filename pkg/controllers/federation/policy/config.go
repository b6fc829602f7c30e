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
	// PushReconciler, SchedulerPreferences and RawStatusCollection are the feature gates of these names, the
	// last RawResourceStatusCollection.
	PushReconciler, SchedulerPreferences, RawStatusCollection bool
	// ProbePeriod and ProbeTimeout are the period and the time-out of health probes.
	ProbePeriod, ProbeTimeout time.Duration
	// FailureThreshold and SuccessThreshold are how many probes in a row change a cluster's state.
	FailureThreshold, SuccessThreshold int64
	// AdoptResources says that objects without the managed label may be overwritten.
	AdoptResources bool
}

// DefaultConfig returns what counts if there is no KubeFedConfig.
func DefaultConfig() Config {
	return Config{AvailableDelay: 20 * time.Second, UnavailableDelay: time.Minute, PushReconciler: true, SchedulerPreferences: true,
		ProbePeriod: 10 * time.Second, ProbeTimeout: 3 * time.Second, FailureThreshold: 3, SuccessThreshold: 1, AdoptResources: true}
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
	setDuration := func(name string, d *metav1.Duration, field *time.Duration) {
		if d != nil && d.Duration <= 0 {
			errs = append(errs, fmt.Errorf("%s: must be positive", name))
		} else if d != nil {
			*field = d.Duration
		}
	}
	setDuration("availableDelay", spec.ControllerDuration.AvailableDelay, &c.AvailableDelay)
	setDuration("unavailableDelay", spec.ControllerDuration.UnavailableDelay, &c.UnavailableDelay)
	setDuration("period", spec.ClusterHealthCheck.Period, &c.ProbePeriod)
	setDuration("timeout", spec.ClusterHealthCheck.Timeout, &c.ProbeTimeout)
	setThreshold := func(name string, n *int64, field *int64) {
		if n != nil && *n < 1 {
			errs = append(errs, fmt.Errorf("%s: must be at least 1", name))
		} else if n != nil {
			*field = *n
		}
	}
	setThreshold("failureThreshold", spec.ClusterHealthCheck.FailureThreshold, &c.FailureThreshold)
	setThreshold("successThreshold", spec.ClusterHealthCheck.SuccessThreshold, &c.SuccessThreshold)
	setToggle := func(name, value string, field *bool) {
		if value != enabled && value != disabled {
			errs = append(errs, fmt.Errorf("%s: must be Enabled or Disabled, got %q", name, value))
			return
		}
		*field = value == enabled
	}
	gates := map[string]*bool{"PushReconciler": &c.PushReconciler, "SchedulerPreferences": &c.SchedulerPreferences, "RawResourceStatusCollection": &c.RawStatusCollection}
	for _, gate := range spec.FeatureGates {
		if field := gates[gate.Name]; field != nil {
			setToggle(gate.Name, gate.Configuration, field)
		}
	}
	if adopt := spec.SyncController.AdoptResources; adopt != nil {
		setToggle("adoptResources", *adopt, &c.AdoptResources)
	}
	return c, errors.Join(errs...)
}
