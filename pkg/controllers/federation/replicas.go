// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package federation

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/federation/policy"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/federation/replicas"
)

// replicaSchedulingPreferences spread the replicas of federated objects.
var replicaSchedulingPreferences = schema.GroupVersionResource{Group: policy.SchedulingGroup, Version: "v1alpha1", Resource: "replicaschedulingpreferences"}

const (
	// replicaWorkers is how many preferences are reconciled at once.
	replicaWorkers = 5
	// replicaReadInterval is how often the clusters are read for a preference, at most.
	replicaReadInterval = 5 * time.Second
	// podRecheckInterval is how often the clusters are read while not all Pods are ready: no event says that a
	// Pod has had no Node for long.
	podRecheckInterval = 30 * time.Second
	// settleTime is how long after a write the running replicas are not read again, if the preference and the
	// clusters are the same. Moved replicas are not ready at once, so a new plan would move them back to a
	// cluster that is full, and then move them again.
	settleTime = 2 * time.Minute
	// podPageSize is the length of a page of Pods.
	podPageSize = 100
)

// spreader writes placement and replicas of the federated objects that have a ReplicaSchedulingPreference.
type spreader struct {
	*controllers.Loop[cache.ObjectName]
	controller *controller
	decisions  sync.Map // of decision, by name
}

// decision is what was last decided on a preference.
type decision struct {
	// decidedAt is when the decision was made; writtenAt is when the federated object was last written.
	decidedAt, writtenAt time.Time
	input                replicas.Input
	// text is for people.
	text string
}

func newSpreader(c *controller, loop controllers.LoopOptions) (*spreader, error) {
	s := &spreader{controller: c}
	loop.Workers = replicaWorkers
	var err error
	everyPreference := func(controllers.Event[*unstructured.Unstructured]) []cache.ObjectName {
		return objectNames(c.informers.preferences, metav1.NamespaceAll)
	}
	labelsOrReadiness := clusterChanges(func(c policy.Cluster) any { return []any{c.Labels, policy.StartHealth(c.Status).Ready()} })
	s.Loop, err = controllers.NewLoop(loop, s.reconcile, controllers.WatchSelf(c.informers.preferences),
		controllers.WatchChanges(c.informers.clusters, everyPreference, labelsOrReadiness), controllers.WatchChanges(c.informers.configs, everyPreference))
	return s, err
}

// clusterChanges leaves out updates of KubeFedClusters that do not change what a function returns.
func clusterChanges(property func(policy.Cluster) any) func(controllers.Event[*unstructured.Unstructured]) bool {
	return func(e controllers.Event[*unstructured.Unstructured]) bool {
		return e.Old == nil || e.New == nil || !reflect.DeepEqual(property(policy.ReadCluster(e.Old)), property(policy.ReadCluster(e.New)))
	}
}

// spreads reports whether there is a preference for a federated object.
func (s *spreader) spreads(k key) bool {
	object, exists := s.controller.informers.preferences.Get(k.ObjectName)
	if !exists {
		return false
	}
	preference, _ := policy.ReadReplicaPreference(object) // one that is invalid has a type nevertheless
	return preference.Type() == k.typeName
}

// enqueuePreference enqueues the preference of a federated object that has changed, or whose object in a
// cluster has.
func (s *spreader) enqueuePreference(k key) {
	if s.spreads(k) {
		s.Enqueue(k.ObjectName)
	}
}

// undecided reports whether a preference spreads the replicas of a federated object, and has not been decided
// on since a time.
func (s *spreader) undecided(k key, since time.Time) bool {
	return s.spreads(k) && s.lastDecision(k.ObjectName).decidedAt.Before(since)
}

func (s *spreader) lastDecision(name cache.ObjectName) decision {
	value, _ := s.decisions.Load(name)
	d, _ := value.(decision)
	return d
}

// decisionTexts returns the decisions for people, by NAMESPACE/NAME.
func (s *spreader) decisionTexts() map[string]string {
	texts := map[string]string{}
	for name, d := range s.decisions.Range {
		texts[name.(cache.ObjectName).String()] = d.(decision).text
	}
	return texts
}

func (s *spreader) reconcile(ctx context.Context, name cache.ObjectName) (time.Duration, error) {
	now := time.Now()
	object, exists := s.controller.informers.preferences.Get(name)
	if !exists {
		s.decisions.Delete(name)
		return 0, nil
	}
	if remaining := replicaReadInterval - now.Sub(s.lastDecision(name).decidedAt); remaining > 0 {
		return remaining, nil
	}
	d, requeueAfter, err := s.decide(ctx, object, now)
	if d.text != "" && err == nil {
		d.decidedAt = now
		s.decisions.Store(name, d)
	}
	return requeueAfter, err
}

// refusePreference tells once why a preference writes nothing.
func (s *spreader) refusePreference(object *unstructured.Unstructured, problem error) decision {
	text := "invalid: " + problem.Error()
	if s.lastDecision(cache.MetaObjectToName(object)).text != text {
		s.controller.host.Events.Event(object, corev1.EventTypeWarning, policy.InvalidPreference, problem.Error())
	}
	return decision{text: text}
}

// decide writes the federated object of a preference, if the plan is another than before. It returns the
// decision, without a text if it must wait, and when to decide again even without an event.
func (s *spreader) decide(ctx context.Context, object *unstructured.Unstructured, now time.Time) (d decision, requeueAfter time.Duration, err error) {
	config := s.controller.settings(ctx)
	preference, err := policy.ReadReplicaPreference(object)
	switch {
	case !config.SchedulerPreferences:
		return decision{text: "the gate SchedulerPreferences is off"}, 0, nil
	case err != nil:
		return s.refusePreference(object, err), 0, nil
	}
	v, runs := s.controller.viewOf(key{preference.Type(), cache.MetaObjectToName(object)})
	if !runs || v.object == nil || v.deleting {
		return d, 0, nil // an event follows when there is something to place
	}
	federated, err := s.controller.readObject(ctx, v.federatedType, v.key.ObjectName)
	if federated == nil || err != nil {
		return d, 0, err
	}
	clusters := s.controller.joinedClusters()
	if preference.Intersect {
		namespace, err := s.controller.readNamespace(ctx, v)
		if err != nil {
			return d, 0, err
		}
		if clusters, err = policy.SelectClusters(&v.TypeConfig, federated, namespace, clusters); err != nil {
			return s.refusePreference(object, err), 0, nil
		}
	}
	ready, wait := s.availableClusters(clusters, policy.ReadFederated(federated), config.UnavailableDelay, now)
	switch {
	case wait > 0:
		return d, wait, nil
	case len(ready) == 0:
		return decision{text: "no cluster is ready"}, 0, nil
	}
	last := s.lastDecision(v.key.ObjectName)
	d = decision{writtenAt: last.writtenAt, input: replicas.Input{Total: *preference.TotalReplicas, Rebalance: preference.Rebalance, Preferences: preference.Clusters,
		Current: last.input.Current, Capacity: last.input.Capacity, Key: v.key.ObjectName.String()}}
	for _, r := range ready {
		d.input.Clusters = append(d.input.Clusters, r.name)
	}
	if requeueAfter = settleTime - now.Sub(d.writtenAt); requeueAfter <= 0 || !reflect.DeepEqual(d.input, last.input) {
		if requeueAfter, err = s.readWorkloads(ctx, v, ready, &d.input); err != nil {
			return d, 0, err
		}
	}
	plan := map[string]int64{}
	for cluster, share := range replicas.Plan(d.input) {
		plan[cluster] = share.Replicas()
	}
	spread, changed, err := policy.Spread(federated, plan)
	if err != nil {
		return s.refusePreference(object, err), 0, nil
	}
	if changed {
		d.writtenAt, err = now, s.write(ctx, v, spread)
		requeueAfter = settleTime
	}
	d.text = strings.TrimPrefix(fmt.Sprint(plan), "map")
	return d, requeueAfter, err
}

// write writes the federated object, unless somebody else has since it was read.
func (s *spreader) write(ctx context.Context, v *view, spread *unstructured.Unstructured) error {
	written, err := v.client.Namespace(v.key.Namespace).Update(ctx, spread, metav1.UpdateOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("replicas of %s %s: %w", v.Federated.Kind, v.key.ObjectName, err)
	}
	s.controller.recentObjects.put(v.key, written)
	s.controller.metrics.replicaWrites.Inc()
	klog.FromContext(ctx).V(2).Info("Wrote the replicas of a federated object", "object", klog.KRef(v.key.Namespace, v.key.Name))
	return nil
}

// availableClusters returns the clusters of a plan. If there can be no plan yet, it returns how long to wait:
// a cluster is not known yet, or the federated object is placed in one that has not been away for the delay.
// A plan without that cluster would move its replicas, a plan with it needs to know what runs there.
func (s *spreader) availableClusters(clusters []policy.Cluster, federated *policy.Federated, delay time.Duration, now time.Time) (available []*readyCluster, wait time.Duration) {
	for _, cluster := range clusters {
		state, r := s.controller.clusters.state(cluster.Name), s.controller.readyCluster(cluster.Name)
		remaining := time.Duration(0)
		switch since, away := cluster.NotReadySince(); {
		case r != nil && state.health.Ready():
			available = append(available, r)
		case state.health.Ready(), !state.probed:
			remaining = time.Second
		case !slices.Contains(federated.Placement.Clusters, cluster.Name):
		case !away:
			remaining = time.Second // its status does not yet say since when it is away
		default:
			remaining = since.Add(delay + time.Second).Sub(now) // the status has whole seconds
		}
		if remaining > 0 && (wait == 0 || remaining < wait) {
			wait = remaining
		}
	}
	return available, wait
}

// readWorkloads reads what runs in the clusters, and returns when to read again even without an event.
func (s *spreader) readWorkloads(ctx context.Context, v *view, ready []*readyCluster, input *replicas.Input) (requeueAfter time.Duration, err error) {
	input.Current, input.Capacity = map[string]int64{}, map[string]int64{}
	var (
		mu      sync.Mutex
		reading sync.WaitGroup
	)
	for _, r := range ready {
		reading.Go(func() {
			workload, readErr := r.readWorkload(ctx, v)
			mu.Lock()
			defer mu.Unlock()
			if readErr != nil {
				r.controller.clusters.Enqueue(cache.ObjectName{Namespace: r.controller.cfg.Namespace, Name: r.name}) // is it still there?
				err = errors.Join(err, fmt.Errorf("replicas in cluster %s: %w", r.name, truncatedError{readErr}))
			}
			if workload.Ready != workload.Replicas {
				requeueAfter = podRecheckInterval
			}
			if input.Current[r.name] = workload.Ready; workload.Unschedulable > 0 {
				input.Capacity[r.name] = workload.Replicas - workload.Unschedulable
			}
		})
	}
	reading.Wait()
	return requeueAfter, err
}

// readWorkload reads a workload of the cluster, which is empty if there is none. Its Pods are read, page by
// page, if not all are ready.
func (r *readyCluster) readWorkload(ctx context.Context, v *view) (workload policy.Workload, err error) {
	resource := schema.GroupVersionResource{Group: v.Target.Group, Version: v.Target.Version, Resource: v.Target.PluralName}
	object, err := r.client.cluster.Dynamic.Resource(resource).Namespace(v.key.Namespace).Get(ctx, v.key.Name, metav1.GetOptions{})
	if err != nil {
		return workload, ignoreNotFound(err)
	}
	if workload, err = policy.ReadWorkload(object); err != nil || workload.Ready == workload.Replicas {
		return workload, err
	}
	workload.Ready = 0
	for options := (metav1.ListOptions{LabelSelector: workload.Selector, Limit: podPageSize}); ; {
		page, err := r.client.cluster.Dynamic.Resource(corev1.SchemeGroupVersion.WithResource("pods")).Namespace(v.key.Namespace).List(ctx, options)
		if err != nil {
			return workload, err
		}
		for i := range page.Items {
			workload.CountPod(&page.Items[i], time.Now())
		}
		if options.Continue = page.GetContinue(); options.Continue == "" {
			return workload, nil
		}
	}
}
