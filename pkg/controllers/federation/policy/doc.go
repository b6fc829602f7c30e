// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package policy decides what the controller federation writes in clusters and on the host. It is
// pure: it has no clock and sends no requests.
//
//	config.go       KubeFedConfig and its defaults
//	cluster.go      KubeFedCluster: its spec and its status
//	connection.go   what a KubeFedCluster and its Secret must be to get a client
//	health.go       from probes to a state, and from a state to conditions
//	types.go        FederatedTypeConfig: which types run, and why not
//	serving.go      whether a cluster serves a type
//	federated.go    the federated object F, and the digest that is kept of it
//	placement.go    in which clusters F belongs
//	render.go       what a cluster should hold
//	retain.go       what of a cluster's object an update keeps
//	override.go     the JSON patches of a cluster, and what they must not change
//	version.go      what was last written where: PropagatedVersion, and the digest of an object
//	decide.go       what to do with one object in one cluster
//	removal.go      what holds a removal, and when F itself may go
//	writeoff.go     when a cluster that is away is written off, and the record of what it owes
//	repeat.go       when the same content may be written again
//	replicas.go     ReplicaSchedulingPreference, and a federated object with the planned replicas
//	dns.go          ServiceDNSRecord and IngressDNSRecord, and the records of their DNSEndpoint
//	status.go       the status of F
//
// What a tenant wrote and does not parse is an error of the part that it concerns: a malformed
// placement writes nothing, malformed overrides fail in their cluster only.
package policy
