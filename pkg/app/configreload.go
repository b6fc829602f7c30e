// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"errors"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/client-go/dynamic"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/configreload"
	"github.com/quartermaster-dev/quartermaster/pkg/informers"
)

func configReload(o *Options) Entry {
	// config is called only after the flags have been parsed, some of which belong to the host.
	config := func() configreload.Config {
		cfg := o.ConfigReload
		cfg.Compat = o.compat("reloader")
		cfg.DryRun = cfg.DryRun || o.Generic.DryRun
		cfg.Scope = o.Informers.Namespaces
		return cfg
	}
	return Entry{
		Name:    configreload.Name,
		Summary: "rolls workloads whose ConfigMaps or Secrets changed",
		Config:  &o.ConfigReload,
		Needs:   func() ([]informers.Need, error) { return configReloadNeeds(config()) },
		Rules:   func() []rbacv1.PolicyRule { return configreload.Rules(config()) },
		New: func(h Host) (controllers.Controller, error) {
			dyn, err := dynamic.NewForConfig(h.RESTConfig)
			if err != nil {
				return nil, err
			}
			cfg := config()
			in := configreload.Informers{LiveVersion: h.LiveVersion}
			for _, resource := range configreload.Resources(cfg) {
				informer := h.Informer(resource)
				switch resource {
				case informers.ConfigMaps:
					in.ConfigMaps = informer
				case informers.Secrets:
					in.Secrets = informer
				case informers.Deployments:
					in.Deployments = informer
				case informers.StatefulSets:
					in.StatefulSets = informer
				case informers.DaemonSets:
					in.DaemonSets = informer
				case informers.CronJobs:
					in.CronJobs = informer
				case informers.Jobs:
					in.Jobs = informer
				case informers.Namespaces:
					in.Namespaces = informer
				case configreload.RolloutsResource:
					in.Rollouts = informer
				case configreload.PodStatusesResource:
					in.PodStatuses = informer
				}
			}
			return configreload.New(cfg, in, h.Client, dyn, h.Events, h.Loop, h.Metrics)
		},
	}
}

// validateScope returns an error if a namespace selector is used with --namespaces, since Namespaces
// are objects of the cluster, and with --namespaces the manager reads none of these; or if the
// controller is to work in a namespace that is not read.
func (o *Options) validateScope() error {
	enabled, err := o.enabled()
	if err != nil || len(o.Informers.Namespaces) == 0 ||
		!slices.ContainsFunc(enabled, func(e Entry) bool { return e.Name == configreload.Name }) {
		return nil // Validate reports an unknown controller
	}
	if slices.Contains(configreload.Resources(o.ConfigReload), informers.Namespaces) {
		return errors.New(
			"--config-reload-namespace-selector: needs the labels of Namespaces, which are not read with --namespaces; list the namespaces there")
	}
	for _, namespace := range o.ConfigReload.Namespaces {
		if !slices.Contains(o.Informers.Namespaces, namespace) {
			return fmt.Errorf("--config-reload-namespaces: %q is not in --namespaces, so nothing would be read there", namespace)
		}
	}
	return nil
}

// configReloadNeeds returns the needs of config-reload: a digest of each source and the references
// of each workload.
func configReloadNeeds(cfg configreload.Config) ([]informers.Need, error) {
	digest, err := configreload.SourceDigest(cfg)
	if err != nil {
		return nil, err
	}
	var needs []informers.Need
	for _, resource := range configreload.Resources(cfg) {
		need := informers.Need{Resource: resource}
		switch resource {
		case informers.ConfigMaps, informers.Secrets:
			need.Annotations = configreload.SourceAnnotations(cfg)
			need.Digest, need.History = digest, true
			if resource == informers.Secrets {
				need.SecretTypes = []corev1.SecretType{corev1.SecretTypeServiceAccountToken}
			}
		case configreload.PodStatusesResource:
			need.Digest, need.History, need.Optional = digest, true, true
		case informers.Namespaces:
			need.Fields, need.ClusterScoped = informers.Labels, true
		default:
			need.Annotations = configreload.WorkloadAnnotations(cfg)
			need.Digest, need.History = configreload.WorkloadDigest(cfg), true
			need.Optional = resource == configreload.RolloutsResource
		}
		needs = append(needs, need)
	}
	return needs, nil
}
