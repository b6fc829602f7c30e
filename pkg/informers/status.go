// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// Status is what /debug/informers shows.
type Status struct {
	Started   bool             `json:"started"` // in the process's own cluster
	Resources []ResourceStatus `json:"resources"`
}

// ResourceStatus is the state of one informer in one namespace, or in all. An age is nil until
// there is something to count from.
type ResourceStatus struct {
	Cluster   string   `json:"cluster,omitempty"` // empty for the process's own
	Group     string   `json:"group"`
	Version   string   `json:"version"`
	Resource  string   `json:"resource"`
	Namespace string   `json:"namespace,omitempty"`
	For       []string `json:"for"`
	Form      string   `json:"form"`
	// Content are the controllers for which the data of ConfigMaps or Secrets are in memory.
	Content         []string         `json:"content,omitempty"`
	LabelSelector   string           `json:"labelSelector,omitempty"`
	FieldSelector   string           `json:"fieldSelector,omitempty"`
	Synced          bool             `json:"synced"`
	Absent          bool             `json:"absent,omitempty"`
	Forbidden       bool             `json:"forbidden,omitempty"`
	Objects         int              `json:"objects"`
	Misfits         int              `json:"misfits,omitempty"`
	ResourceVersion string           `json:"resourceVersion"`
	LastActivityAge *metav1.Duration `json:"lastActivityAge,omitempty"`
	Lists           int64            `json:"lists"`
	Relists         int64            `json:"relists"`
	Watches         int64            `json:"watches"`
	Events          int64            `json:"events"`
	Failures        int64            `json:"failures"`
	LastFailure     *FailureStatus   `json:"lastFailure,omitempty"`
	Problem         string           `json:"problem,omitempty"`
}

// FailureStatus is the last series of failed requests with one verb.
type FailureStatus struct {
	Verb  string      `json:"verb"`
	Error string      `json:"error"`
	Count int64       `json:"count"`
	Since metav1.Time `json:"since"`
	Last  metav1.Time `json:"last"`
}

// Status returns the present state of all informers.
func (c *ClusterCache) Status() Status {
	s := Status{Started: !c.startedAt().IsZero(), Resources: []ResourceStatus{}}
	for _, i := range c.allInformers() {
		s.Resources = append(s.Resources, i.status()...)
	}
	return s
}

// status returns the state of an informer in each of its namespaces.
func (i *informer) status() (all []ResourceStatus) {
	for _, f := range i.feeds {
		status := f.state.status()
		status.Misfits = i.bad.countMisfits(f.covers)
		all = append(all, status)
	}
	return all
}

// Status returns the present state of all informers in all clusters.
func (c *Caches) Status() Status {
	status := Status{Resources: []ResourceStatus{}}
	for _, cluster := range c.clusters() {
		s := cluster.Status()
		status.Started = status.Started || cluster.cfg.Cluster == "" && s.Started
		status.Resources = append(status.Resources, s.Resources...)
	}
	return status
}
