// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package federation

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/federation/policy"
)

// The resources that the controller follows besides those of the federated types.
var (
	kubeFedClusters           = schema.GroupVersionResource{Group: policy.CoreGroup, Version: "v1beta1", Resource: "kubefedclusters"}
	kubeFedConfigs            = schema.GroupVersionResource{Group: policy.CoreGroup, Version: "v1beta1", Resource: "kubefedconfigs"}
	federatedTypeConfigs      = schema.GroupVersionResource{Group: policy.CoreGroup, Version: "v1beta1", Resource: "federatedtypeconfigs"}
	customResourceDefinitions = schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"}
	// propagatedVersions and clusterPropagatedVersions have the last written versions by cluster.
	propagatedVersions        = schema.GroupVersionResource{Group: policy.CoreGroup, Version: "v1alpha1", Resource: "propagatedversions"}
	clusterPropagatedVersions = schema.GroupVersionResource{Group: policy.CoreGroup, Version: "v1alpha1", Resource: "clusterpropagatedversions"}
)

// probeWorkers is how many clusters are probed at once.
const probeWorkers = 20

// clusterLoop probes the KubeFedClusters and holds the health of each.
type clusterLoop struct {
	*controllers.Loop[cache.ObjectName]
	controller *controller

	mu       sync.Mutex
	clusters map[string]*probedCluster
}

// probedCluster is a probed KubeFedCluster. Only the worker that holds its key uses it, except for its
// clusterState.
type probedCluster struct {
	spec    policy.ClusterSpec
	client  *client // nil if the KubeFedCluster or its Secret gives none
	problem error   // why there is no client
	secret  string  // the version of the Secret that the token is from
	// identified is set once the cluster has been asked which one it is, and until a probe fails: another
	// cluster may answer next.
	identified bool
	// topology is where the Nodes are, nil if that is not known; topologyReadAt is when they were read.
	topology       *policy.Topology
	topologyReadAt time.Time
	clusterState
}

// clusterState is what other loops read of a probed cluster, under the mu of clusterLoop. The zero value is
// for a cluster that is not known.
type clusterState struct {
	health policy.Health
	// probed is set once this process has probed the cluster.
	probed bool
	// readySince and awaySince are when the cluster became ready, or not ready, as far as this process knows.
	readySince, awaySince time.Time
	// failures counts the failed probes in a row.
	failures int64
	// uid is the UID of the cluster's Namespace kube-system. It is empty if it may not be read.
	uid types.UID
	// replaced is set if the KubeFedCluster led to another cluster before: this federation did not put the
	// present objects there, so placement deletes none.
	replaced bool
}

// newClusterLoop returns the loop of the clusters of the federation namespace. After each probe it calls
// setClient of the controller with the cluster's client, which is nil if the cluster is not ready.
func newClusterLoop(c *controller, loop controllers.LoopOptions) (*clusterLoop, error) {
	l := &clusterLoop{controller: c, clusters: map[string]*probedCluster{}}
	loop.Workers, loop.DrainTimeout = probeWorkers, drainTimeout
	// Changes of the status do not count, since the loop itself writes the status.
	changes := controllers.WatchSelf(c.informers.clusters, controllers.GenerationChanged)
	var err error
	l.Loop, err = controllers.NewLoop(loop, l.reconcile, changes, controllers.WatchChanges(c.informers.secrets, l.secretChanged))
	return l, err
}

// state returns what is known of a cluster.
func (l *clusterLoop) state(name string) (state clusterState) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if cluster := l.clusters[name]; cluster != nil {
		state = cluster.clusterState
	}
	return state
}

// reconcile probes a cluster, and again after the period.
func (l *clusterLoop) reconcile(ctx context.Context, key cache.ObjectName) (time.Duration, error) {
	object, exists := l.controller.informers.clusters.Get(key)
	if !exists {
		l.removeCluster(ctx, key.Name)
		return 0, nil
	}
	config, kubeFedCluster := l.controller.settings(ctx), policy.ReadCluster(object)
	cluster := l.ensureCluster(kubeFedCluster)
	if err := l.connect(ctx, cluster, object, kubeFedCluster); err != nil {
		return config.ProbePeriod, err
	}
	result, version := policy.NoClient, ""
	var problem string
	if cluster.client == nil {
		problem = cluster.problem.Error()
	} else {
		result, version, problem = cluster.client.probe(ctx, config.ProbeTimeout)
		if ctx.Err() != nil {
			return 0, ctx.Err() // the manager ends: a failed probe then says nothing of the cluster
		}
	}
	identityKnown, requeueAfter := false, config.ProbePeriod
	if result == policy.Healthy {
		result, problem, identityKnown = l.identify(ctx, cluster, object, config.ProbeTimeout)
		if ctx.Err() != nil {
			return 0, ctx.Err()
		}
	}
	cluster.identified = cluster.identified && result == policy.Healthy
	l.setHealth(ctx, cluster, object, result, cluster.health.Next(result, problem, config))
	switch {
	case !cluster.health.Ready():
		l.controller.setClient(ctx, kubeFedCluster.Name, nil)
	case identityKnown:
		l.controller.setClient(ctx, kubeFedCluster.Name, cluster.client)
	case result == policy.Healthy:
		requeueAfter = olderRecheckInterval
	}
	if identityKnown {
		l.readTopology(ctx, cluster, config.ProbeTimeout)
	}
	if err := l.writeStatus(ctx, kubeFedCluster, cluster, version); err != nil || !identityKnown {
		return requeueAfter, err
	}
	return requeueAfter, l.writeIdentity(ctx, cluster, object)
}

// ensureCluster returns the state of a cluster. A new process starts from the status of the KubeFedCluster.
func (l *clusterLoop) ensureCluster(kubeFedCluster policy.Cluster) *probedCluster {
	l.mu.Lock()
	defer l.mu.Unlock()
	cluster := l.clusters[kubeFedCluster.Name]
	if cluster == nil {
		now := time.Now()
		cluster = &probedCluster{clusterState: clusterState{health: policy.StartHealth(kubeFedCluster.Status), readySince: now, awaySince: now}}
		if since, away := kubeFedCluster.NotReadySince(); away {
			cluster.awaySince = since
		}
		l.clusters[kubeFedCluster.Name] = cluster
	}
	return cluster
}

func (l *clusterLoop) removeCluster(ctx context.Context, name string) {
	l.mu.Lock()
	cluster := l.clusters[name]
	delete(l.clusters, name)
	l.mu.Unlock()
	if cluster != nil {
		l.disconnect(ctx, name, cluster)
	}
}

// disconnect closes the client of a cluster, once nobody uses it.
func (l *clusterLoop) disconnect(ctx context.Context, name string, cluster *probedCluster) {
	l.controller.setClient(ctx, name, nil)
	if cluster.client != nil {
		cluster.client.close()
		cluster.client = nil
	}
	l.mu.Lock()
	cluster.identified, cluster.uid, cluster.replaced = false, "", false
	cluster.topology, cluster.topologyReadAt = nil, time.Time{}
	l.mu.Unlock()
}

// closeClients closes all clients, when the loop does not run.
func (l *clusterLoop) closeClients() {
	l.mu.Lock()
	clusters := maps.Clone(l.clusters)
	l.mu.Unlock()
	var closing sync.WaitGroup
	for name, cluster := range clusters {
		closing.Go(func() { l.disconnect(context.Background(), name, cluster) })
	}
	closing.Wait()
}

// connect makes the client of a cluster if it has none or its spec has changed, and reads the token if the
// Secret has changed. An error means that it is not known whether the cluster has a token.
func (l *clusterLoop) connect(ctx context.Context, cluster *probedCluster, object *unstructured.Unstructured, kubeFedCluster policy.Cluster) error {
	version := ""
	if secret, exists := l.controller.informers.secrets.Get(cache.ObjectName{Namespace: l.controller.cfg.Namespace, Name: kubeFedCluster.Spec.SecretRef.Name}); exists {
		version = string(secret.GetUID()) + "/" + secret.GetResourceVersion()
	}
	sameSpec := cluster.client != nil && kubeFedCluster.Malformed == nil && reflect.DeepEqual(cluster.spec, kubeFedCluster.Spec)
	if sameSpec && cluster.secret == version {
		return nil
	}
	if !sameSpec {
		l.disconnect(ctx, kubeFedCluster.Name, cluster) // the name is free for the next client
	}
	client, problem := cluster.client, kubeFedCluster.Malformed
	if !sameSpec && problem == nil {
		client, problem = newClient(kubeFedCluster.Spec, l.controller.cfg.UnsafeEndpoints, l.secretReader(kubeFedCluster.Spec.SecretRef.Name), clock.RealClock{})
	}
	if problem == nil && version == "" {
		problem = errors.New("there is no such Secret")
	}
	if problem == nil {
		err := client.renewToken(ctx)
		if malformed := (*malformedError)(nil); errors.As(err, &malformed) || apierrors.IsNotFound(err) {
			problem = err
		} else if err != nil {
			return fmt.Errorf("read the token of cluster %s: %w", kubeFedCluster.Name, err)
		}
	}
	if problem == nil && !sameSpec {
		client.cluster, problem = l.controller.host.Cluster(kubeFedCluster.Name, client.config(l.controller.cfg.ClusterQPS))
	}
	cluster.spec, cluster.secret, cluster.problem = kubeFedCluster.Spec, version, problem
	if problem != nil {
		l.disconnect(ctx, kubeFedCluster.Name, cluster)
		klog.FromContext(ctx).V(2).Info("Cannot connect to the cluster", "cluster", klog.KObj(object), "err", problem)
		return nil
	}
	cluster.client = client
	if !sameSpec && client.connection.Insecure() {
		l.controller.host.Events.Event(object, corev1.EventTypeWarning, "InsecureTLS", "disabledTLSValidations lets others pretend to be the API server, and get the token")
	}
	return nil
}

// secretChanged returns the clusters whose token a Secret has.
func (l *clusterLoop) secretChanged(e controllers.Event[metav1.Object]) (keys []cache.ObjectName) {
	secret := cmp.Or(e.New, e.Old)
	for _, object := range l.controller.informers.clusters.List(l.controller.cfg.Namespace, nil) {
		if policy.ReadCluster(object).Spec.SecretRef.Name == secret.GetName() {
			keys = append(keys, cache.MetaObjectToName(object))
		}
	}
	return keys
}

func (l *clusterLoop) secretReader(name string) func(context.Context) (map[string][]byte, error) {
	return func(ctx context.Context) (map[string][]byte, error) {
		secret, err := l.controller.host.Client.CoreV1().Secrets(l.controller.cfg.Namespace).Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return nil, err
		}
		return secret.Data, nil
	}
}

// setHealth stores the health after a probe, and reports what has become worse.
func (l *clusterLoop) setHealth(ctx context.Context, cluster *probedCluster, object *unstructured.Unstructured, result policy.ProbeResult, next policy.Health) {
	before, probed := cluster.health, cluster.probed
	l.mu.Lock()
	if next.Ready() && !before.Ready() {
		cluster.readySince = time.Now()
	}
	if !next.Ready() && before.Ready() {
		cluster.awaySince = time.Now()
	}
	if cluster.failures++; result == policy.Healthy {
		cluster.failures = 0
	}
	cluster.health, cluster.probed = next, true
	l.mu.Unlock()
	if next.Ready() != before.Ready() {
		klog.FromContext(ctx).Info("Cluster readiness changed", "cluster", klog.KObj(object), "ready", next.Ready())
	}
	if !next.Ready() && (before.Ready() || !probed) {
		l.controller.recheckObjects()
	}
	switch next.State {
	case before.State:
	case policy.NoClient:
		l.controller.host.Events.Event(object, corev1.EventTypeWarning, "MalformedClusterConfig", next.Error)
	case policy.NoAnswer:
		l.controller.host.Events.Event(object, corev1.EventTypeWarning, "RetrievingClusterHealthFailed", "the cluster does not answer: "+next.Error)
	}
}

// writeStatus updates the status if it has changed, or is too old.
func (l *clusterLoop) writeStatus(ctx context.Context, kubeFedCluster policy.Cluster, cluster *probedCluster, version string) error {
	status, changed := kubeFedCluster.Status.Next(cluster.health, version, time.Now())
	fields := map[string]any{"conditions": status.Conditions, "kubernetesVersion": status.KubernetesVersion}
	if topology := cluster.topology; topology != nil && !reflect.DeepEqual(*topology, status.Topology) {
		fields["zones"], fields["region"], changed = topology.Zones, topology.Region, true
	}
	if !changed {
		return nil
	}
	_, err := patch(ctx, l.controller.federationClient(kubeFedClusters), kubeFedCluster.Name, map[string]any{"status": fields}, "status")
	return err
}
