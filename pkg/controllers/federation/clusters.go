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

// probesAtOnce is how many clusters are probed at once.
const probesAtOnce = 20

// clusterLoop probes the KubeFedClusters and holds the health of each.
type clusterLoop struct {
	*controllers.Loop[cache.ObjectName]
	c *controller

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
	// asked is set once the cluster has been asked which one it is, and until a probe fails: another cluster
	// may answer next.
	asked bool
	// topology is where the Nodes are, nil if that is not known; surveyed is when they were read.
	topology *policy.Topology
	surveyed time.Time
	clusterState
}

// clusterState is what others read of a probed cluster, under the mu of clusterLoop. The zero value is for a
// cluster that is not known.
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
	// replaced is set if the KubeFedCluster led to another cluster before: what is there now was not put there
	// by this federation, so placement deletes nothing.
	replaced bool
}

// newClusterLoop returns the loop of the clusters of the federation namespace. It calls setClient of the
// controller when it has probed a cluster, with its client, which is nil if the cluster is not ready.
func newClusterLoop(c *controller, loop controllers.LoopOptions) (*clusterLoop, error) {
	l := &clusterLoop{c: c, clusters: map[string]*probedCluster{}}
	loop.Workers, loop.DrainTimeout = probesAtOnce, drainTimeout
	// Not the status, which the loop writes itself.
	changes := controllers.WatchSelf(c.informers.clusters, controllers.GenerationChanged)
	var err error
	l.Loop, err = controllers.NewLoop(loop, l.reconcile, changes, controllers.WaitFor[cache.ObjectName](c.informers.configs), controllers.WatchChanges(c.informers.secrets, l.ofSecret))
	return l, err
}

// state returns what is known of a cluster.
func (l *clusterLoop) state(name string) (state clusterState) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if p := l.clusters[name]; p != nil {
		state = p.clusterState
	}
	return state
}

// reconcile probes a cluster, and again after the period.
func (l *clusterLoop) reconcile(ctx context.Context, key cache.ObjectName) (time.Duration, error) {
	object, exists := l.c.informers.clusters.Get(key)
	if !exists {
		l.forget(ctx, key.Name)
		return 0, nil
	}
	config, read := l.c.settings(ctx), policy.ReadCluster(object)
	p := l.clusterOf(read)
	if err := l.connect(ctx, p, object, read); err != nil {
		return config.ProbePeriod, err
	}
	result, version := policy.NoClient, ""
	var problem string
	if p.client == nil {
		problem = p.problem.Error()
	} else {
		result, version, problem = p.client.probe(ctx, config.ProbeTimeout)
		if ctx.Err() != nil {
			return 0, ctx.Err() // the manager ends: that says nothing of the cluster
		}
	}
	known, after := false, config.ProbePeriod
	if result == policy.Well {
		result, problem, known = l.identify(ctx, p, object, config.ProbeTimeout)
		if ctx.Err() != nil {
			return 0, ctx.Err()
		}
	}
	p.asked = p.asked && result == policy.Well
	l.observe(ctx, p, object, result, p.health.Observe(result, problem, config))
	switch {
	case !p.health.Ready():
		l.c.setClient(ctx, read.Name, nil)
	case known:
		l.c.setClient(ctx, read.Name, p.client)
	case result == policy.Well:
		after = olderRecheck
	}
	if known {
		l.survey(ctx, p, config.ProbeTimeout)
	}
	if err := l.write(ctx, read, p, version); err != nil || !known {
		return after, err
	}
	return after, l.writeIdentity(ctx, p, object)
}

// clusterOf returns the state of a cluster. A new process starts from the status of the KubeFedCluster.
func (l *clusterLoop) clusterOf(read policy.Cluster) *probedCluster {
	l.mu.Lock()
	defer l.mu.Unlock()
	p := l.clusters[read.Name]
	if p == nil {
		now := time.Now()
		p = &probedCluster{clusterState: clusterState{health: policy.StartHealth(read.Status), readySince: now, awaySince: now}}
		if since, away := read.NotReadySince(); away {
			p.awaySince = since
		}
		l.clusters[read.Name] = p
	}
	return p
}

func (l *clusterLoop) forget(ctx context.Context, name string) {
	l.mu.Lock()
	p := l.clusters[name]
	delete(l.clusters, name)
	l.mu.Unlock()
	if p != nil {
		l.disconnect(ctx, name, p)
	}
}

// disconnect closes the client of a cluster, once nobody uses it.
func (l *clusterLoop) disconnect(ctx context.Context, name string, p *probedCluster) {
	l.c.setClient(ctx, name, nil)
	if p.client != nil {
		p.client.close()
		p.client = nil
	}
	l.mu.Lock()
	p.asked, p.uid, p.replaced = false, "", false
	p.topology, p.surveyed = nil, time.Time{}
	l.mu.Unlock()
}

// closeAll closes all clients, when the loop does not run.
func (l *clusterLoop) closeAll() {
	l.mu.Lock()
	all := maps.Clone(l.clusters)
	l.mu.Unlock()
	var closing sync.WaitGroup
	for name, p := range all {
		closing.Go(func() { l.disconnect(context.Background(), name, p) })
	}
	closing.Wait()
}

// connect gives a cluster its client, if it has none or the spec has changed, and its token, if the
// Secret has changed. An error means that it is not known whether there is one.
func (l *clusterLoop) connect(ctx context.Context, p *probedCluster, object *unstructured.Unstructured, read policy.Cluster) error {
	version := ""
	if secret, exists := l.c.informers.secrets.Get(cache.ObjectName{Namespace: l.c.cfg.Namespace, Name: read.Spec.SecretRef.Name}); exists {
		version = string(secret.GetUID()) + "/" + secret.GetResourceVersion()
	}
	same := p.client != nil && read.Malformed == nil && reflect.DeepEqual(p.spec, read.Spec)
	if same && p.secret == version {
		return nil
	}
	if !same {
		l.disconnect(ctx, read.Name, p) // the name is free for the next client
	}
	made, problem := p.client, read.Malformed
	if !same && problem == nil {
		made, problem = newClient(read.Spec, l.c.cfg.UnsafeEndpoints, l.secret(read.Spec.SecretRef.Name), clock.RealClock{})
	}
	if problem == nil && version == "" {
		problem = errors.New("there is no such Secret")
	}
	if problem == nil {
		err := made.renew(ctx)
		if wrong := (*malformed)(nil); errors.As(err, &wrong) || apierrors.IsNotFound(err) {
			problem = err
		} else if err != nil {
			return fmt.Errorf("read the token of cluster %s: %w", read.Name, err)
		}
	}
	if problem == nil && !same {
		made.cluster, problem = l.c.host.Cluster(read.Name, made.config(l.c.cfg.ClusterQPS))
	}
	p.spec, p.secret, p.problem = read.Spec, version, problem
	if problem != nil {
		l.disconnect(ctx, read.Name, p)
		klog.FromContext(ctx).V(2).Info("Cannot connect to the cluster", "cluster", klog.KObj(object), "err", problem)
		return nil
	}
	p.client = made
	if !same && made.connection.Insecure() {
		l.c.host.Events.Event(object, corev1.EventTypeWarning, "InsecureTLS", "disabledTLSValidations lets others pretend to be the API server, and get the token")
	}
	return nil
}

// ofSecret returns the clusters whose token a Secret has.
func (l *clusterLoop) ofSecret(e controllers.Event[metav1.Object]) (keys []cache.ObjectName) {
	secret := cmp.Or(e.New, e.Old)
	for _, object := range l.c.informers.clusters.List(l.c.cfg.Namespace, nil) {
		if policy.ReadCluster(object).Spec.SecretRef.Name == secret.GetName() {
			keys = append(keys, cache.MetaObjectToName(object))
		}
	}
	return keys
}

func (l *clusterLoop) secret(name string) func(context.Context) (map[string][]byte, error) {
	return func(ctx context.Context) (map[string][]byte, error) {
		secret, err := l.c.host.Client.CoreV1().Secrets(l.c.cfg.Namespace).Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return nil, err
		}
		return secret.Data, nil
	}
}

// observe takes the health after a probe, and says what has become worse.
func (l *clusterLoop) observe(ctx context.Context, p *probedCluster, object *unstructured.Unstructured, result policy.Result, next policy.Health) {
	before, probed := p.health, p.probed
	l.mu.Lock()
	if next.Ready() && !before.Ready() {
		p.readySince = time.Now()
	}
	if !next.Ready() && before.Ready() {
		p.awaySince = time.Now()
	}
	if p.failures++; result == policy.Well {
		p.failures = 0
	}
	p.health, p.probed = next, true
	l.mu.Unlock()
	if next.Ready() != before.Ready() {
		klog.FromContext(ctx).Info("Cluster readiness changed", "cluster", klog.KObj(object), "ready", next.Ready())
	}
	if !next.Ready() && (before.Ready() || !probed) {
		l.c.recheckAll()
	}
	switch next.State {
	case before.State:
	case policy.NoClient:
		l.c.host.Events.Event(object, corev1.EventTypeWarning, "MalformedClusterConfig", next.Error)
	case policy.NoAnswer:
		l.c.host.Events.Event(object, corev1.EventTypeWarning, "RetrievingClusterHealthFailed", "the cluster does not answer: "+next.Error)
	}
}

// write updates the status if it has changed, or is too old.
func (l *clusterLoop) write(ctx context.Context, read policy.Cluster, p *probedCluster, version string) error {
	status, changed := read.Status.Next(p.health, version, time.Now())
	fields := map[string]any{"conditions": status.Conditions, "kubernetesVersion": status.KubernetesVersion}
	if t := p.topology; t != nil && !reflect.DeepEqual(*t, status.Topology) {
		fields["zones"], fields["region"], changed = t.Zones, t.Region, true
	}
	if !changed {
		return nil
	}
	_, err := patch(ctx, l.c.ofFederation(kubeFedClusters), read.Name, map[string]any{"status": fields}, "status")
	return err
}
