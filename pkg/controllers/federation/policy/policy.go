// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"encoding/json"
	"hash/fnv"
	"strings"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// The groups.
const (
	CoreGroup       = "core.kubefed.io"
	SchedulingGroup = "scheduling.kubefed.io"
	DNSGroup        = "multiclusterdns.kubefed.io"
	ownGroup        = "quartermaster.dev"
)

// Labels, annotations and finalizers.
const (
	// ManagedLabel is "true" on objects in clusters that the federation wrote.
	ManagedLabel = "kubefed.io/managed"
	// Finalizer keeps the federated object until no cluster holds its object.
	Finalizer = "kubefed.io/sync-controller"
	// TypeFinalizer is the finalizer of a FederatedTypeConfig.
	TypeFinalizer = "core.kubefed.io/federated-type-config"
	// OrphanAnnotation says, if "true", that clusters keep their objects when the federated object is
	// deleted.
	OrphanAnnotation = "kubefed.io/orphan"
	// DeleteOptionAnnotation has the DeleteOptions of deletions in clusters, as JSON.
	DeleteOptionAnnotation = "kubefed.io/deleteoption"
	// AdoptedAnnotation is "true" on a Namespace that was in a cluster before its federated object.
	AdoptedAnnotation = "quartermaster.dev/federation-adopted"
	// AllowRemovalsAnnotation of a KubeFedCluster is the time until which the guard is off.
	AllowRemovalsAnnotation = "quartermaster.dev/allow-removals"
	// ClusterUIDAnnotation of a KubeFedCluster is the UID of the Namespace kube-system of the cluster to which
	// it leads.
	ClusterUIDAnnotation = "quartermaster.dev/cluster-uid"
)

// Problem is what a Warning tells the owner of an object.
type Problem struct{ Reason, Text string }

// The reasons of problems.
const (
	AnnotationsNotSupported = "AnnotationsNotSupported"
	FinalizersNotSupported  = "FinalizersNotSupported"
	FederatedTypeMissing    = "FederatedTypeMissing"
	NamespaceTypeMissing    = "NamespaceTypeMissing"
	UnsupportedType         = "UnsupportedType"
	InvalidName             = "InvalidName"
	InvalidDeleteOptions    = "InvalidDeleteOptions"
	UpdateConflict          = "UpdateConflict"
	RemovalsHeld            = "RemovalsHeld"
	ClusterReplaced         = "ClusterReplaced"
	InvalidPreference       = "InvalidPreference"
	InvalidDNSRecord        = "InvalidDNSRecord"
	DomainMissing           = "DomainMissing"
)

// decode reads a part of an object into a Go type by encoding/json, which makes numbers in an any
// float64.
func decode(part, target any) error {
	data, err := json.Marshal(part)
	if err != nil {
		return err
	}
	return json.Unmarshal(data, target)
}

// statusOf returns the status of an object, or the zero T if it cannot be read.
func statusOf[T any](u *unstructured.Unstructured) (status T) {
	if decode(u.Object["status"], &status) != nil {
		status = *new(T) // decode may have read a part
	}
	return status
}

// hashJSON hashes the JSON form of a value. The hash detects changes. It does not resist a collision that the
// author of an object constructs.
func hashJSON(v any) uint64 {
	h := fnv.New64a()
	data, _ := json.Marshal(v)
	h.Write(data)
	return h.Sum64()
}

// Fingerprint hashes values that have a JSON form.
func Fingerprint(parts ...any) uint64 { return hashJSON(parts) }

// truncate returns at most n bytes of a text that another cluster sent.
func truncate(s string, n int) string {
	return strings.ToValidUTF8(s[:min(n, len(s))], "")
}
