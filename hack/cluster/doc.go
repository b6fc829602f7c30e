// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package cluster runs a real Kubernetes control plane on loopback, and managers on it as they run
// in production, for `make run` and for the tests.
//
//	c, err := cluster.Start(ctx, cluster.Options{})
//	defer c.Stop()
//	err = c.InstallComponents(ctx) // deploy/, except for its Deployment
//	binary, err := cluster.BuildManager(ctx, false)
//	replica, err := c.NewReplica(ctx, "1")
//	m, err := c.StartManager(replica, cluster.ManagerOptions{Binary: binary})
//	line, err := m.WaitForLine(ctx, "leading")
//	err = m.Stop(ctx, 30*time.Second)
//	events, err := c.AuditEvents() // who wrote what, and when
//
// The cluster has etcd, kube-apiserver and kube-controller-manager, all of the pinned version, with
// TLS, RBAC, bound ServiceAccount tokens and an audit log. It has no nodes: Pods stay Pending, and
// a rollout shows as a new ReplicaSet. With Options.Nodes it has kube-scheduler and nodes that
// hack/nodes simulates: Pods are ready after a second though nothing runs in them, rollouts end,
// and Jobs complete.
//
// A manager is never an administrator. It uses ServiceAccount quartermaster with a token bound to a
// Pod object of its own, and may do what deploy/ grants. It has the arguments and the environment of
// deploy/'s Deployment.
//
// Package test/internal/faultproxy stands between a manager and the API server and injects faults.
// StopAPIServer, KillAPIServer and RestartAPIServer stop the server itself.
//
// With Options.SecondAPIServer there is a second API server on the same etcd. Package
// test/internal/holdproxy stands between the two, and makes what the API server knows of chosen
// resources lag behind. This needs addresses that only a network namespace has, see
// test/internal/netns.
package cluster
