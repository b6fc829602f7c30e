// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package federation propagates objects to other clusters, the members.
//
//	client.go      connections to a member, with its token
//	clusters.go    the loop that probes members and writes the status of KubeFedClusters
//	types.go       the loop of FederatedTypeConfigs: which types run
//	replicas.go    the loop of ReplicaSchedulingPreferences: where replicas go
//	controller.go  all loops together, and KubeFed's lock
//	follow.go      what is followed: federated objects on the host, managed objects in members
//	view.go        what is known of a federated object F at one moment
//	sync.go        the loop of the host: what F asks of each member, and what came of it
//	host.go        what sync.go writes on the host: finalizers, versions, status
//	member.go      the loop of a member
//	write.go       what the loop of a member writes in the member
//	bodies.go      federated objects that were read a moment ago
//
// The state:
//
//	members   the probed clusters             set by clusters.go; removed with the KubeFedCluster
//	health    a cluster's health and streak   set by clusters.go; a new process starts from the status
//	token     a cluster's bearer token        set by clusters.go and after a 401; removed with the client
//	running   the types that are propagated   set by types.go; removed when the type stops or its
//	                                          FederatedTypeConfig is deleted
//	warned    the last warning on each        set by types.go; removed when there is nothing to warn of
//	          FederatedTypeConfig
//	followed  types whose federated objects   set by follow.go; removed when the type stops or changes
//	          are watched
//	types     types watched in one member     set by follow.go; removed when the type stops, or with the
//	                                          member's loop
//	records   outcomes per federated object   set by sync.go and follow.go; removed when they are written on
//	          and cluster                     the host, or when the type stops
//	liveAnnotations  hashes of annotations    set by write.go; removed with the object, or with the
//	          of a member's objects           member's loop
//	decisions the last decision on each       set by replicas.go; removed with the
//	          ReplicaSchedulingPreference     ReplicaSchedulingPreference, or when KubeFed has led
//	repeats   writes of a member's objects    set by write.go; removed when the last write is long ago,
//	                                          or with the member's loop
//
// A member is a probedCluster for the loop that probes it and, while it is ready, a readyMember with a loop
// of its own.
package federation

import (
	"context"
	"encoding/json"
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
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/federation/policy"
	"github.com/quartermaster-dev/quartermaster/pkg/informers"
)

// The resources of the federation namespace, and those that the controller needs besides.
var (
	KubeFedClusters = schema.GroupVersionResource{Group: policy.CoreGroup, Version: "v1beta1", Resource: "kubefedclusters"}
	KubeFedConfigs  = schema.GroupVersionResource{Group: policy.CoreGroup, Version: "v1beta1", Resource: "kubefedconfigs"}
	// NewTypes reads FederatedTypeConfigs and CustomResourceDefinitions.
	FederatedTypeConfigs      = schema.GroupVersionResource{Group: policy.CoreGroup, Version: "v1beta1", Resource: "federatedtypeconfigs"}
	CustomResourceDefinitions = schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"}
	// PropagatedVersions and ClusterPropagatedVersions record the last written versions by cluster.
	PropagatedVersions        = schema.GroupVersionResource{Group: policy.CoreGroup, Version: "v1alpha1", Resource: "propagatedversions"}
	ClusterPropagatedVersions = schema.GroupVersionResource{Group: policy.CoreGroup, Version: "v1alpha1", Resource: "clusterpropagatedversions"}
)

// probesAtOnce is how many clusters are probed at once.
const probesAtOnce = 20

// Clusters probes the KubeFedClusters and holds the health of each.
type Clusters struct {
	*controllers.Loop[cache.ObjectName]
	namespace string
	unsafe    bool
	qps       int
	open      func(string, *rest.Config) (*controllers.Cluster, error)
	setClient func(context.Context, string, *client)
	objects   informers.Informer[*unstructured.Unstructured]
	configs   informers.Informer[*unstructured.Unstructured]
	statuses  dynamic.NamespaceableResourceInterface
	tokens    informers.Informer[metav1.Object]
	secrets   typedcorev1.SecretsGetter
	events    record.EventRecorder
	clock     clock.WithTicker

	mu      sync.Mutex
	members map[string]*probedCluster
}

// probedCluster is a probed KubeFedCluster. Only the worker that holds its key uses it; what others read is
// under the mu of Clusters.
type probedCluster struct {
	spec   policy.ClusterSpec
	client *client // nil if the KubeFedCluster or its Secret gives none
	secret string  // the version of the Secret that the token is from
	health policy.Health
	// probed is set once this process has probed the cluster.
	probed bool
	// readySince is when it became ready in this process.
	readySince time.Time
}

// NewClusters returns the loop of the clusters of the federation namespace. It calls setClient when it has
// probed a cluster, with its client, which is nil if the cluster is not ready.
func NewClusters(cfg Config, i informersOf, h controllers.Host, loop controllers.Options, setClient func(context.Context, string, *client)) (*Clusters, error) {
	c := &Clusters{namespace: cfg.Namespace, unsafe: cfg.UnsafeEndpoints, qps: cfg.MemberQPS, open: h.Cluster, setClient: setClient,
		objects: i.clusters, configs: i.configs, statuses: h.Dynamic.Resource(KubeFedClusters),
		tokens: i.secrets, secrets: h.Client.CoreV1(), events: h.Events, clock: loop.Clock, members: map[string]*probedCluster{}}
	loop.Workers, loop.DrainTimeout = probesAtOnce, drain
	// Not the status, which the loop writes itself.
	changes := controllers.WatchSelf(c.objects, controllers.GenerationChanged)
	// The settings are read at each use; the watch makes the loop wait until they are in the cache.
	known := controllers.WatchChanges(c.configs, func(controllers.Event[*unstructured.Unstructured]) []cache.ObjectName { return nil })
	var err error
	c.Loop, err = controllers.NewLoop(loop, c.reconcile, changes, known, controllers.WatchChanges(c.tokens, c.ofSecret))
	return c, err
}

// Ready reports whether a cluster is ready, and since when this process knows it.
func (c *Clusters) Ready(name string) (bool, time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	m := c.members[name]
	if m == nil || !m.health.Ready() {
		return false, time.Time{}
	}
	return true, m.readySince
}

// probed reports whether this process has probed a cluster, and whether the cluster is ready.
func (c *Clusters) probed(name string) (probed, ready bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	m := c.members[name]
	return m != nil && m.probed, m != nil && m.health.Ready()
}

// reconcile probes a cluster, and again after the period.
func (c *Clusters) reconcile(ctx context.Context, key cache.ObjectName) (time.Duration, error) {
	object, exists := c.objects.Get(key)
	if !exists {
		c.forget(ctx, key.Name)
		return 0, nil
	}
	config, read := settings(ctx, c.configs, c.namespace), policy.ReadCluster(object)
	m := c.probedCluster(read)
	if err := c.connect(ctx, m, object, read); err != nil {
		return config.ProbePeriod, err
	}
	result, version, problem := policy.NoClient, "", ""
	if m.client != nil {
		result, version, problem = m.client.probe(ctx, config.ProbeTimeout)
		if ctx.Err() != nil {
			return 0, ctx.Err() // the manager ends: that says nothing of the cluster
		}
	}
	c.observe(ctx, m, object, m.health.Observe(result, problem, config))
	if m.health.Ready() {
		c.setClient(ctx, read.Name, m.client)
	} else {
		c.setClient(ctx, read.Name, nil)
	}
	if err := c.write(ctx, object, read, m.health, version); err != nil {
		return config.ProbePeriod, err
	}
	return config.ProbePeriod, nil
}

// probedCluster returns the state of a cluster. A new process starts from the status of the KubeFedCluster.
func (c *Clusters) probedCluster(read policy.Cluster) *probedCluster {
	c.mu.Lock()
	defer c.mu.Unlock()
	m := c.members[read.Name]
	if m == nil {
		m = &probedCluster{health: policy.StartHealth(read.Status), readySince: c.clock.Now()}
		c.members[read.Name] = m
	}
	return m
}

func (c *Clusters) forget(ctx context.Context, name string) {
	c.mu.Lock()
	m := c.members[name]
	delete(c.members, name)
	c.mu.Unlock()
	if m != nil {
		c.disconnect(ctx, name, m)
	}
}

// disconnect closes the client of a cluster, once nobody uses it.
func (c *Clusters) disconnect(ctx context.Context, name string, m *probedCluster) {
	c.setClient(ctx, name, nil)
	if m.client != nil {
		m.client.close()
		m.client = nil
	}
}

// closeAll closes all clients, when the loop does not run.
func (c *Clusters) closeAll() {
	c.mu.Lock()
	all := maps.Clone(c.members)
	c.mu.Unlock()
	var closing sync.WaitGroup
	for name, m := range all {
		closing.Go(func() { c.disconnect(context.Background(), name, m) })
	}
	closing.Wait()
}

// connect gives a cluster its client, if it has none or the spec has changed, and its token, if the
// Secret has changed. An error means that it is not known whether there is one.
func (c *Clusters) connect(ctx context.Context, m *probedCluster, object *unstructured.Unstructured, read policy.Cluster) error {
	version := ""
	if secret, exists := c.tokens.Get(cache.ObjectName{Namespace: c.namespace, Name: read.Spec.SecretRef.Name}); exists {
		version = string(secret.GetUID()) + "/" + secret.GetResourceVersion()
	}
	same := m.client != nil && read.Malformed == nil && reflect.DeepEqual(m.spec, read.Spec)
	if same && m.secret == version {
		return nil
	}
	if !same {
		c.disconnect(ctx, read.Name, m) // the name is free for the next client
	}
	made, problem := m.client, read.Malformed
	if !same && problem == nil {
		made, problem = newClient(read.Spec, c.unsafe, c.secret(read.Spec.SecretRef.Name), c.clock)
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
		made.cluster, problem = c.open(read.Name, made.config(c.qps))
	}
	m.spec, m.secret = read.Spec, version
	if problem != nil {
		c.disconnect(ctx, read.Name, m)
		klog.FromContext(ctx).V(2).Info("Cannot connect to the cluster", "cluster", klog.KObj(object), "err", problem)
		return nil
	}
	m.client = made
	if !same && made.connection.Insecure() {
		c.events.Event(object, corev1.EventTypeWarning, "InsecureTLS", "disabledTLSValidations lets others pretend to be the API server, and get the token")
	}
	return nil
}

// ofSecret returns the clusters whose token a Secret has.
func (c *Clusters) ofSecret(e controllers.Event[metav1.Object]) (keys []cache.ObjectName) {
	secret := e.New
	if secret == nil {
		secret = e.Old
	}
	for _, object := range c.objects.List(c.namespace, labels.Everything()) {
		if policy.ReadCluster(object).Spec.SecretRef.Name == secret.GetName() {
			keys = append(keys, cache.MetaObjectToName(object))
		}
	}
	return keys
}

func (c *Clusters) secret(name string) func(context.Context) (map[string][]byte, error) {
	return func(ctx context.Context) (map[string][]byte, error) {
		secret, err := c.secrets.Secrets(c.namespace).Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return nil, err
		}
		return secret.Data, nil
	}
}

// observe takes the health after a probe, and says what has become worse.
func (c *Clusters) observe(ctx context.Context, m *probedCluster, object *unstructured.Unstructured, next policy.Health) {
	before := m.health
	c.mu.Lock()
	if next.Ready() && !before.Ready() {
		m.readySince = c.clock.Now()
	}
	m.health, m.probed = next, true
	c.mu.Unlock()
	if next.Ready() != before.Ready() {
		klog.FromContext(ctx).Info("Cluster readiness changed", "cluster", klog.KObj(object), "ready", next.Ready())
	}
	if reason := next.Event(before); reason != "" {
		text := "the cluster does not answer: " + next.Error
		if next.State == policy.NoClient {
			text = "the KubeFedCluster or its Secret gives no client"
		}
		c.events.Event(object, corev1.EventTypeWarning, reason, text)
	}
}

// write updates the status if it has changed, or is too old.
func (c *Clusters) write(ctx context.Context, object *unstructured.Unstructured, read policy.Cluster, h policy.Health, version string) error {
	status, changed := read.Status.Next(h, version, c.clock.Now())
	if !changed {
		return nil
	}
	// Zones and the region are others' to write.
	patch, err := json.Marshal(map[string]any{"status": map[string]any{"conditions": status.Conditions, "kubernetesVersion": status.KubernetesVersion}})
	if err != nil {
		return err
	}
	_, err = c.statuses.Namespace(object.GetNamespace()).Patch(ctx, object.GetName(), types.MergePatchType, patch, metav1.PatchOptions{}, "status")
	if apierrors.IsNotFound(err) {
		return nil // the KubeFedCluster is gone
	}
	return err
}
