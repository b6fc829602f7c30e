// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package federation

import (
	"context"
	"encoding/json"
	"errors"
	"maps"
	"sync"
	"sync/atomic"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/federation/policy"
)

const (
	// kubeFedLock is the ConfigMap or the Endpoints of KubeFed's election.
	kubeFedLock = "kubefed-controller-manager"
	// kubeFedRenewPeriod is the longest time between two renewals of the lock by KubeFed.
	kubeFedRenewPeriod = 20 * time.Second
	// staleLockAge is how old the last renewal of the lock must be to show at once that KubeFed does not lead.
	// Clocks differ by less. After a migration the lock stays, and without this age each new leader would wait
	// kubeFedRenewPeriod.
	staleLockAge = time.Hour
	// pollInterval is how often the states of watches are polled while a watch has no complete list,
	// idlePollInterval how often otherwise: no event reports a state.
	pollInterval, idlePollInterval = 250 * time.Millisecond, time.Second
	// drainTimeout is how long probes, and requests to clusters, may go on when the process is to end. A cluster
	// that does not answer delays the release of the Lease by this. The next leader reads each object, so a
	// write that is cut off does no harm.
	drainTimeout = 100 * time.Millisecond
)

// controller propagates objects.
type controller struct {
	controllers.Loops
	cfg           Config
	host          controllers.Host
	informers     informerSet
	clusters      *clusterLoop
	types         *typeLoop
	loop          keyLoop
	statuses      keyLoop
	replicas      *spreader
	dns           *dnsLoop // nil without --federation-dns
	recentObjects recentObjects
	metrics       *controllerMetrics
	metadata      metadata.Interface // a client that does not log that Endpoints are deprecated
	clusterOpened chan struct{}      // receives when a cluster has been opened
	// epoch counts what may have moved objects between clusters.
	epoch atomic.Uint64
	idle  atomic.Bool // set while nothing is propagated because KubeFed leads
	// statusDuration is how long the last status took to be read and written, in nanoseconds.
	statusDuration atomic.Int64
	// invalidConfig is the resourceVersion of the KubeFedConfig that was last logged as invalid.
	invalidConfig atomic.Value

	mu             sync.Mutex
	federatedTypes map[string]*federatedType // the followed types, by the name of the FederatedTypeConfig
	readyByName    map[string]*readyCluster
	records        map[key]*keyRecord
	clusterList    []policy.Cluster                 // the KubeFedClusters; nil until they are read
	writeOffs      map[string]policy.WriteOff       // the records of removals that were written off, by ConfigMap
	endedWatches   map[string]map[string]*typeWatch // the ended watches of clusters that are away, by type
}

func newController(cfg Config, h controllers.Host) (*controller, error) {
	c := &controller{cfg: cfg, host: h, informers: newInformerSet(h), clusterOpened: make(chan struct{}, 1),
		federatedTypes: map[string]*federatedType{}, readyByName: map[string]*readyCluster{}, records: map[key]*keyRecord{},
		writeOffs: map[string]policy.WriteOff{}, endedWatches: map[string]map[string]*typeWatch{}}
	quietConfig := rest.CopyConfig(h.RESTConfig)
	quietConfig.WarningHandler = rest.NoWarnings{}
	var err error
	if c.metadata, err = metadata.NewForConfig(quietConfig); err != nil {
		return nil, err
	}
	loopOptions := func(loop string) controllers.LoopOptions {
		options := h.LoopOptions
		options.Loop, options.WaitFor = loop, c.informers.all()
		return options
	}
	if c.clusters, err = newClusterLoop(c, loopOptions("clusters")); err != nil {
		return nil, err
	}
	if c.types, err = newTypeLoop(c, loopOptions("types")); err != nil {
		return nil, err
	}
	options := loopOptions("sync")
	options.Workers, options.Background = syncWorkers, c.followObjects
	c.loop, err = newKeyLoop(options, c.reconcile,
		controllers.WatchChanges(c.informers.clusters, c.clusterChanged), controllers.WatchChanges(c.informers.definitions, c.definitionChanged))
	if err != nil {
		return nil, err
	}
	options = loopOptions("statuses")
	options.Background = c.watchForKubeFed
	if c.statuses, err = newKeyLoop(options, c.paceStatus); err != nil {
		return nil, err
	}
	if c.replicas, err = newSpreader(c, loopOptions("replicas")); err != nil {
		return nil, err
	}
	if cfg.DNS {
		if c.dns, err = newDNSLoop(c, loopOptions("dns")); err != nil {
			return nil, err
		}
		c.Loops = append(c.Loops, c.dns)
	}
	writeOffs, err := c.newWriteOffLoop(loopOptions("written-off"))
	c.Loops = append(c.Loops, c.loop, c.clusters, c.types, c.statuses, c.replicas, writeOffs)
	// The list must also be dropped while the loop, which calls clusterChanged, does not run.
	c.informers.clusters.AddHandler(func(_, _ *unstructured.Unstructured, _ bool) { c.dropClusterList() })
	c.metrics = newControllerMetrics(h.Metrics)
	return c, err
}

// clusterChanged returns every key if a KubeFedCluster comes or goes, or if its labels or annotations change.
func (c *controller) clusterChanged(e controllers.Event[*unstructured.Unstructured]) []queuedKey {
	if e.Old != nil && e.New != nil && maps.Equal(e.Old.GetLabels(), e.New.GetLabels()) && maps.Equal(e.Old.GetAnnotations(), e.New.GetAnnotations()) {
		return nil
	}
	c.dropClusterList()
	if e.Old != nil && e.New != nil {
		c.dropResults(e.New.GetName(), everyType) // the annotations may allow removals now
	}
	return queuedKeys(c.federatedKeys(everyType))
}

// dropClusterList lets the KubeFedClusters be read again.
func (c *controller) dropClusterList() {
	c.mu.Lock()
	c.clusterList = nil
	c.mu.Unlock()
	c.epoch.Add(1)
}

// definitionChanged returns the keys of a type whose CustomResourceDefinition begins to be deleted.
func (c *controller) definitionChanged(e controllers.Event[metav1.Object]) []queuedKey {
	if e.New == nil || e.New.GetDeletionTimestamp() == nil {
		return nil
	}
	return queuedKeys(c.federatedKeys(func(t *federatedType) bool { return t.Federated.GroupResource().String() == e.New.GetName() }))
}

func everyType(*federatedType) bool { return true }

// federatedKeys returns the keys of all federated objects of some types.
func (c *controller) federatedKeys(matches func(*federatedType) bool) (keys []key) {
	c.mu.Lock()
	var selected []*federatedType
	for _, t := range c.federatedTypes {
		if matches(t) {
			selected = append(selected, t)
		}
	}
	c.mu.Unlock()
	for _, t := range selected {
		for _, object := range t.following.List(metav1.NamespaceAll, nil) {
			keys = append(keys, key{t.Name, cache.MetaObjectToName(object)})
		}
	}
	return keys
}

// Run works until ctx ends. It is idle while KubeFed leads.
func (c *controller) Run(ctx context.Context) error {
	if err := c.waitForKubeFed(ctx); err != nil || ctx.Err() != nil {
		return err
	}
	c.replicas.decisions.Clear() // others may have written meanwhile
	defer c.clusters.closeClients()
	return c.Loops.Run(ctx)
}

// readKubeFedLock returns a text that names the holders of KubeFed's lock and their last renewals; "" means
// that nobody holds it. stale is set if nobody has renewed it for so long that KubeFed cannot lead.
func (c *controller) readKubeFedLock(ctx context.Context) (holders string, stale bool, err error) {
	const annotation = "control-plane.alpha.kubernetes.io/leader"
	stale = true
	for _, resource := range []string{"configmaps", "endpoints"} {
		object, err := c.metadata.Resource(schema.GroupVersionResource{Version: "v1", Resource: resource}).Namespace(c.cfg.Namespace).Get(ctx, kubeFedLock, metav1.GetOptions{})
		if err != nil && !apierrors.IsNotFound(err) {
			return "", false, err
		}
		if err != nil || object.Annotations[annotation] == "" {
			continue
		}
		holders += object.Annotations[annotation]
		var record struct{ RenewTime metav1.Time }
		malformed := json.Unmarshal([]byte(object.Annotations[annotation]), &record)
		if malformed != nil || record.RenewTime.IsZero() || time.Since(record.RenewTime.Time) < staleLockAge {
			stale = false
		}
	}
	return holders, stale, nil
}

// kubeFedLeads reports whether somebody renews the lock within the time in which KubeFed does.
func (c *controller) kubeFedLeads(ctx context.Context) (bool, error) {
	before, _, beforeErr := c.readKubeFedLock(ctx)
	select {
	case <-time.After(kubeFedRenewPeriod):
	case <-ctx.Done():
		return false, nil
	}
	after, _, afterErr := c.readKubeFedLock(ctx)
	return after != before, errors.Join(beforeErr, afterErr)
}

// waitForKubeFed returns when KubeFed does not lead: two managers would undo each other's work.
func (c *controller) waitForKubeFed(ctx context.Context) error {
	_, stale, err := c.readKubeFedLock(ctx)
	for leads := !stale; leads && err == nil; {
		if leads, err = c.kubeFedLeads(ctx); leads && err == nil && !c.idle.Swap(true) {
			klog.FromContext(ctx).Info("KubeFed leads; nothing is propagated until it ends")
		}
	}
	c.idle.Store(false)
	return err
}

// watchForKubeFed returns an error when KubeFed begins to lead, so that Run starts again and waits until
// KubeFed has ended. Before it returns, it ends the loops of the clusters.
func (c *controller) watchForKubeFed(ctx context.Context) error {
	defer func() {
		var clusters sync.WaitGroup
		defer clusters.Wait()
		for _, r := range c.readyClusters() {
			clusters.Go(r.stop)
		}
	}()
	for ctx.Err() == nil {
		if leads, err := c.kubeFedLeads(ctx); leads && err == nil {
			return errors.New("KubeFed has begun to lead")
		}
	}
	return nil
}

// clusterStatus is what /debug/controllers/federation says of a cluster.
type clusterStatus struct {
	Name  string `json:"name"`
	Ready bool   `json:"ready"`
	// Types are Synced, Absent, Forbidden or NotListed, by FederatedTypeConfig.
	Types map[string]string `json:"types,omitempty"`
	Queue int               `json:"queue"`
	// Pending counts the removals that wait, Held those of them that wait for somebody's permission.
	Pending int `json:"pendingRemovals"`
	Held    int `json:"heldRemovals"`
	// WrittenOff are removals that the cluster owes since its federated objects are gone.
	WrittenOff int `json:"writtenOffRemovals"`
}

// Status implements controllers.Controller.
func (c *controller) Status() controllers.Status {
	s := c.Loops.Status()
	s.Details = struct {
		Idle     bool            `json:"idleSinceKubeFedLeads"`
		Clusters []clusterStatus `json:"clusters"`
		// Replicas are the last decisions on ReplicaSchedulingPreferences.
		Replicas map[string]string `json:"replicas,omitempty"`
	}{c.idle.Load(), c.clusterStatuses(), c.replicas.decisionTexts()}
	return s
}

// clusterStatuses returns all clusters, sorted by name.
func (c *controller) clusterStatuses() []clusterStatus {
	joined := c.joinedClusters()
	statuses, byName := make([]clusterStatus, len(joined)), map[string]*clusterStatus{}
	for i, cluster := range joined {
		statuses[i] = clusterStatus{Name: cluster.Name, Ready: c.clusters.state(cluster.Name).health.Ready()}
		byName[cluster.Name] = &statuses[i]
		if r := c.readyCluster(cluster.Name); r != nil {
			statuses[i].Types, statuses[i].Queue = r.availabilities(), r.loop.Status().QueueDepth
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, record := range c.records {
		for cluster, result := range record.results {
			held := result.status == policy.RemovalHeld
			if status := byName[cluster]; status != nil && (held || result.status == policy.WaitingForRemoval) {
				if status.Pending++; held {
					status.Held++
				}
			}
		}
	}
	for _, record := range c.writeOffs {
		if status := byName[record.Cluster]; status != nil {
			status.WrittenOff++
		}
	}
	return statuses
}
