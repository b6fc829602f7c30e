// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// Cluster is a KubeFedCluster.
type Cluster struct {
	Name   string
	Labels map[string]string
	Spec   ClusterSpec
	Status ClusterStatus
	// Malformed is why the spec cannot be read. The cluster exists nevertheless.
	Malformed error
}

// ClusterSpec says how to reach a cluster.
type ClusterSpec struct {
	APIEndpoint string `json:"apiEndpoint"`
	CABundle    []byte `json:"caBundle"`
	SecretRef   struct {
		Name string `json:"name"`
	} `json:"secretRef"`
	DisabledTLSValidations []string `json:"disabledTLSValidations"`
	ProxyURL               string   `json:"proxyURL"`
}

// ClusterStatus is the status of a KubeFedCluster.
type ClusterStatus struct {
	Conditions        []ClusterCondition `json:"conditions"`
	KubernetesVersion string             `json:"kubernetesVersion,omitempty"`
	Topology
}

// ClusterCondition is a condition of a KubeFedCluster.
type ClusterCondition struct {
	Type               string       `json:"type"`
	Status             string       `json:"status"`
	LastProbeTime      metav1.Time  `json:"lastProbeTime"`
	LastTransitionTime *metav1.Time `json:"lastTransitionTime,omitempty"`
	Reason             string       `json:"reason,omitempty"`
	Message            string       `json:"message,omitempty"`
}

// The types of conditions of a KubeFedCluster.
const (
	Ready           = "Ready"
	Offline         = "Offline"
	ConfigMalformed = "ConfigMalformed"
)

// ReadCluster reads a KubeFedCluster. A status that cannot be read counts as none.
func ReadCluster(u *unstructured.Unstructured) Cluster {
	c := Cluster{Name: u.GetName(), Labels: u.GetLabels(), Status: statusOf[ClusterStatus](u)}
	if err := decode(u.Object["spec"], &c.Spec); err != nil {
		c.Malformed = fmt.Errorf("spec: %w", err)
	}
	return c
}

// OlderCluster reports whether a KubeFedCluster is older than another. Of two that were created in the same
// second, one counts as older.
func OlderCluster(a, b metav1.Object) bool {
	created := a.GetCreationTimestamp()
	return cmp.Or(created.Compare(b.GetCreationTimestamp().Time), cmp.Compare(a.GetName(), b.GetName())) < 0
}

// AllowedUntil returns until when a KubeFedCluster allows removals. An annotation that is not a time allows
// none.
func AllowedUntil(object metav1.Object) time.Time {
	until, _ := time.Parse(time.RFC3339, object.GetAnnotations()[AllowRemovalsAnnotation]) // the zero time if it is none
	return until
}

// maxStatusAge is how old an unchanged status may be.
const maxStatusAge = 5 * time.Minute

// Next returns the status after a probe, and whether to write it. A message alone is no reason to
// write before its time: the errors of two failed connections differ by their ports.
func (s ClusterStatus) Next(health Health, kubernetesVersion string, now time.Time) (ClusterStatus, bool) {
	next := s
	next.Conditions = health.conditions()
	if kubernetesVersion != "" {
		next.KubernetesVersion = kubernetesVersion
	}
	write := len(next.Conditions) != len(s.Conditions) || next.KubernetesVersion != s.KubernetesVersion
	for i := range next.Conditions {
		c := &next.Conditions[i]
		c.LastProbeTime, c.LastTransitionTime = metav1.NewTime(now), &metav1.Time{Time: now}
		var old ClusterCondition // the zero condition if there was none
		if j := slices.IndexFunc(s.Conditions, func(o ClusterCondition) bool { return o.Type == c.Type }); j >= 0 {
			old = s.Conditions[j]
		}
		if old.Status == c.Status {
			c.LastTransitionTime = old.LastTransitionTime
		}
		write = write || old.Status != c.Status || old.Reason != c.Reason || now.Sub(old.LastProbeTime.Time) >= maxStatusAge
	}
	return next, write
}
