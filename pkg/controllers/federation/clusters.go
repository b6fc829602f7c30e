// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package federation will propagate objects to other clusters. So far it has what is needed to know
// whether a cluster can be reached. Nothing runs it yet.
//
//	client.go    connections to a cluster, with its token
//	clusters.go  the loop that probes clusters and writes the status of KubeFedClusters
//	types.go     the loop of FederatedTypeConfigs: which types run
//
// The state:
//
//	state     what it is                       set by          cleared by
//	members   the clusters that were probed    the loop        the end of the KubeFedCluster
//	health    state and streak of a cluster    the loop        a new process begins as the status says
//	token     of a cluster                     the loop, 401   a new client
//	running   the types that run               the loop        the loop, the end of the FederatedTypeConfig
//	warned    what owners have been told       the loop        a type that runs, or its end
package federation

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
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
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/federation/policy"
	"github.com/quartermaster-dev/quartermaster/pkg/informers"
)

// The resources that the informers of NewClusters are of.
var (
	KubeFedClusters = schema.GroupVersionResource{Group: policy.CoreGroup, Version: "v1beta1", Resource: "kubefedclusters"}
	KubeFedConfigs  = schema.GroupVersionResource{Group: policy.CoreGroup, Version: "v1beta1", Resource: "kubefedconfigs"}
	// FederatedTypeConfigs and CustomResourceDefinitions are those of NewTypes.
	FederatedTypeConfigs      = schema.GroupVersionResource{Group: policy.CoreGroup, Version: "v1beta1", Resource: "federatedtypeconfigs"}
	CustomResourceDefinitions = schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"}
)

// probesAtOnce is how many clusters are probed at once.
const probesAtOnce = 20

// Clusters knows how the clusters are.
type Clusters struct {
	*controllers.Loop[cache.ObjectName]
	namespace string
	unsafe    bool
	objects   informers.Informer[*unstructured.Unstructured]
	configs   informers.Informer[*unstructured.Unstructured]
	statuses  dynamic.NamespaceableResourceInterface
	tokens    informers.Informer[metav1.Object]
	secrets   typedcorev1.SecretsGetter
	events    record.EventRecorder
	clock     clock.WithTicker

	mu      sync.Mutex
	members map[string]*cluster
}

// cluster is one that was probed. One worker at a time has it.
type cluster struct {
	spec   policy.ClusterSpec
	client *client // nil if the KubeFedCluster or its Secret gives none
	secret string  // the version of the Secret that the token is from
	health policy.Health
	// readySince is when it became ready in this process.
	readySince time.Time
}

// NewClusters returns the loop of the clusters of the federation namespace. All informers are of this
// namespace alone; tokens is that of the metadata of its Secrets.
func NewClusters(namespace string, unsafe bool, objects, configs informers.Informer[*unstructured.Unstructured], tokens informers.Informer[metav1.Object],
	client dynamic.Interface, secrets typedcorev1.SecretsGetter, events record.EventRecorder, loop controllers.Options,
) (*Clusters, error) {
	c := &Clusters{namespace: namespace, unsafe: unsafe, objects: objects, configs: configs, statuses: client.Resource(KubeFedClusters),
		tokens: tokens, secrets: secrets, events: events, clock: loop.Clock, members: map[string]*cluster{}}
	loop.Workers = probesAtOnce
	// Not the status, which the loop writes itself.
	changes := controllers.Filter(controllers.WatchSelf(objects), controllers.GenerationChanged[*unstructured.Unstructured])
	// The settings are read at each use; the watch makes the loop wait until they are in the cache.
	known := controllers.WatchChanges(configs, func(controllers.Event[*unstructured.Unstructured]) []cache.ObjectName { return nil })
	var err error
	c.Loop, err = controllers.NewLoop(loop, c.reconcile, changes, known, controllers.WatchChanges(tokens, c.ofSecret))
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

// reconcile probes a cluster, and again after the period.
func (c *Clusters) reconcile(ctx context.Context, key cache.ObjectName) (time.Duration, error) {
	object, exists := c.objects.Get(key)
	if !exists {
		c.forget(key.Name)
		return 0, nil
	}
	config, read := settings(ctx, c.configs, c.namespace), policy.ReadCluster(object)
	m := c.member(read)
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
	if err := c.write(ctx, object, read, m.health, version); err != nil {
		return config.ProbePeriod, err
	}
	return config.ProbePeriod, nil
}

// member returns what is known of a cluster. A new process begins as the status says.
func (c *Clusters) member(read policy.Cluster) *cluster {
	c.mu.Lock()
	defer c.mu.Unlock()
	m := c.members[read.Name]
	if m == nil {
		m = &cluster{health: policy.StartHealth(read.Status), readySince: c.clock.Now()}
		c.members[read.Name] = m
	}
	return m
}

func (c *Clusters) forget(name string) {
	c.mu.Lock()
	m := c.members[name]
	delete(c.members, name)
	c.mu.Unlock()
	if m != nil && m.client != nil {
		m.client.close()
	}
}

// connect gives a cluster its client, if it has none or the spec has changed, and its token, if the
// Secret has changed. An error means that it is not known whether there is one.
func (c *Clusters) connect(ctx context.Context, m *cluster, object *unstructured.Unstructured, read policy.Cluster) error {
	version := ""
	if secret, exists := c.tokens.Get(cache.ObjectName{Namespace: c.namespace, Name: read.Spec.SecretRef.Name}); exists {
		version = string(secret.GetUID()) + "/" + secret.GetResourceVersion()
	}
	same := m.client != nil && read.Malformed == nil && reflect.DeepEqual(m.spec, read.Spec)
	if same && m.secret == version {
		return nil
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
	if m.client != nil && (problem != nil || m.client != made) {
		m.client.close()
	}
	m.spec, m.secret = read.Spec, version
	if problem != nil {
		m.client = nil
		klog.FromContext(ctx).V(2).Info("The cluster has no client", "cluster", klog.KObj(object), "problem", problem.Error())
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
func (c *Clusters) observe(ctx context.Context, m *cluster, object *unstructured.Unstructured, next policy.Health) {
	before := m.health
	c.mu.Lock()
	if next.Ready() && !before.Ready() {
		m.readySince = c.clock.Now()
	}
	m.health = next
	c.mu.Unlock()
	if next.Ready() != before.Ready() {
		klog.FromContext(ctx).Info("A cluster has changed", "cluster", klog.KObj(object), "ready", next.Ready())
	}
	if reason := next.Event(before); reason != "" {
		text := "the cluster does not answer: " + next.Error
		if next.State == policy.NoClient {
			text = "the KubeFedCluster or its Secret gives no client"
		}
		c.events.Event(object, corev1.EventTypeWarning, reason, text)
	}
}

// write writes the status, if it has to be.
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
