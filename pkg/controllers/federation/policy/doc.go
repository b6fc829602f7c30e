// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package policy decides what the controller federation writes in clusters and on the host. It is
// pure: it has no clock and sends no requests.
//
//	config.go       KubeFedConfig and its defaults
//	cluster.go      KubeFedCluster: its spec and its status
//	connection.go   what a KubeFedCluster and its Secret must be to get a client
//	health.go       from probes to a state, and from a state to conditions; whether a cluster serves a type
//	types.go        FederatedTypeConfig: which types run, why not, and what a cluster must allow
//	federated.go    the federated object F, and the digest that is kept of it
//	placement.go    in which clusters F belongs
//	render.go       what a cluster should hold, and what of its object an update keeps
//	override.go     the JSON patches of a cluster, and what they must not change
//	version.go      what was last written where: PropagatedVersion, and the digest of an object
//	decide.go       what to do with one object in one cluster, and when the same content may be written again
//	removal.go      what holds a removal, when a cluster is written off, and the record of what it owes
//	replicas.go     ReplicaSchedulingPreference, and a federated object with the planned replicas
//	dns.go          ServiceDNSRecord and IngressDNSRecord, and the records of their DNSEndpoint
//	status.go       the status of F, with the status of clusters' objects
//
// What a tenant wrote and does not parse is an error of the part that it concerns: a malformed
// placement writes nothing, malformed overrides fail in their cluster only.
package policy
