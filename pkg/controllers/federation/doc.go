// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package federation propagates objects to other clusters. The host is the cluster in which the manager
// runs and in which the federated objects are. Everywhere else in this package, a cluster is one that a
// KubeFedCluster names; the host may be one of them.
//
//	client.go        connections to a cluster, with its token
//	clusters.go      the loop that probes clusters and writes the status of KubeFedClusters
//	identity.go      which cluster a KubeFedCluster leads to
//	types.go         the loop of FederatedTypeConfigs: which types are propagated
//	replicas.go      the loop of ReplicaSchedulingPreferences: how many replicas each cluster gets
//	dns.go           the loop of ServiceDNSRecords and IngressDNSRecords, and where Nodes are
//	join.go          the command by which clusters join and leave
//	controller.go    all loops together, and KubeFed's lock
//	keys.go          the keys of the loops below
//	follow.go        what is followed: federated objects on the host, managed objects in clusters
//	view.go          what is known of a federated object F at one moment
//	sync.go          the loop of the host: what F asks of each cluster, and the outcome there
//	host.go          what sync.go writes on the host, and the loop that paces statuses
//	readycluster.go  the loop of a cluster that is ready
//	write.go         what the loop of a cluster writes in the cluster
//	writeoff.go      the loop of the records of removals that clusters owe, and how clusters are written off
//	recentobjects.go federated objects that were read a moment ago
//
// The state:
//
//	clusters         the probed clusters; set by clusters.go, removed with the KubeFedCluster
//	clusterState     a cluster's health, and which cluster answers; set by clusters.go, at first from the
//	                 KubeFedCluster's status, and by identity.go
//	token            a cluster's bearer token; set by clusters.go and after a 401, removed with the client
//	states           what was decided on each FederatedTypeConfig; set by types.go, removed with the
//	                 FederatedTypeConfig
//	federatedTypes   the types whose federated objects are watched; set by follow.go, removed when the type
//	                 stops or changes
//	readyByName      the clusters that have a loop; set and removed by readycluster.go
//	watches          the watches of one cluster, by type; set by follow.go, removed when the type stops or with
//	                 the cluster's loop
//	records          the outcomes by federated object and cluster; set by sync.go and follow.go, removed when
//	                 they are written on the host, or when the type stops
//	liveAnnotations  hashes of annotations of a cluster's objects; set by write.go, removed with the object, or
//	                 with the cluster's loop
//	repeats          writes of a cluster's objects; set by write.go, removed when [policy.Repeats.Idle] says
//	                 so, ten to twenty minutes after the last write, or with the cluster's loop
//	writeOffs        the records of removals that clusters owe; set and removed as the cache has the ConfigMaps
//	endedWatches     the ended watches of clusters that are away; set by writeoff.go, removed when the type is
//	                 listed again, or with the KubeFedCluster
//	decisions        the last decision on each ReplicaSchedulingPreference; set by replicas.go, removed with
//	                 the ReplicaSchedulingPreference, or when KubeFed has led
//	outcomes         why nothing was last written for a DNS record, or its last answers for host names; set by
//	                 dns.go, removed with the record
//	endpoints        the EndpointSlices of one cluster; set by readycluster.go, stopped with the cluster's loop
//	topology         the zones and the region of a cluster; set by dns.go, removed with the client
//
// A cluster is a probedCluster for the loop that probes it and, while it is ready, a readyCluster with a loop
// of its own.
package federation
