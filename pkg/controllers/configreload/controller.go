// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package configreload

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/configreload/policy"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/internal/originals"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/internal/retrystale"
	"github.com/quartermaster-dev/quartermaster/pkg/informers"
)

// Name is the name of the controller.
const Name = "config-reload"

// controller rolls workloads.
type controller struct {
	cfg       Config
	keys      *policy.AnnotationKeys
	informers informerSet
	sources   map[policy.SourceType]*informers.Informer[cachedSource] // without sources that are ignored
	kinds     map[string]*kind
	client    kubernetes.Interface
	metadata  metadata.Interface
	events    record.EventRecorder
	metrics   *controllerMetrics
	loop      *controllers.Loop[policy.QueueKey]
	memory    *memory
	selector  labels.Selector // of namespaces
	csiOnce   sync.Once       // logs the line about CSI secrets once
	changes   *changes
}

var _ controllers.Controller = &controller{}

// newController adds indexes and handlers to the informers, so it must be called before they are started. The
// configuration must have passed Validate.
func newController(cfg Config, set informerSet, clients controllers.Clients, events record.EventRecorder,
	loop controllers.LoopOptions, reg controllers.MetricsRegistry,
) (*controller, error) {
	selector, err := parseSelector(cfg.NamespaceSelector)
	if err != nil {
		return nil, err
	}
	if cfg.needsNamespaces() && set.Namespaces == nil {
		return nil, errors.New("--config-reload-namespace-selector needs an informer of namespaces")
	}
	c := &controller{
		cfg: cfg, keys: cfg.annotationKeys(), informers: set,
		sources:  map[policy.SourceType]*informers.Informer[cachedSource]{},
		client:   clients.Client,
		metadata: clients.Metadata,
		events:   events,
		selector: selector,
		changes:  newChanges(),
	}
	c.kinds = c.newKinds(clients.Dynamic)
	if c.kinds["CronJob"] != nil && set.Jobs == nil {
		return nil, errors.New("CronJobs need an informer of Jobs")
	}
	c.memory = newMemory(c.cachedUID)
	for typ, informer := range map[policy.SourceType]*informers.Informer[cachedSource]{
		policy.ConfigMap: set.ConfigMaps, policy.Secret: set.Secrets, policy.SecretProviderClass: set.PodStatuses,
	} {
		if informer != nil && cfg.watchesType(typ) {
			c.sources[typ] = informer
		}
	}
	c.addIndexes()
	c.metrics = newControllerMetrics(reg, c.memory, c.kinds)
	c.loop, err = controllers.NewLoop(loop, c.reconcile, c.watches()...)
	return c, err
}

// Run reconciles until ctx ends and every worker has returned.
func (c *controller) Run(ctx context.Context) error {
	defer c.changes.clear()
	defer c.memory.clear()
	var wg sync.WaitGroup
	defer wg.Wait()
	if c.cfg.Compat {
		wg.Go(func() {
			originals.Warn(ctx, c.client, c.cfg.Scope, "", "stakater/reloader") // the original's manifests have no label in common
		})
	}
	err := c.loop.Run(ctx)
	c.giveUpJobs(ctx)
	return err
}

// Status returns the state of the controller's loop.
func (c *controller) Status() controllers.Status { return c.loop.Status() }

func (c *controller) reconcile(ctx context.Context, key policy.QueueKey) (time.Duration, error) {
	k := c.kinds[key.Kind]
	if k == nil {
		if key.Kind == namespaceKind {
			c.reconcileNamespace(ctx, key)
		} else {
			c.reconcileSource(ctx, key)
		}
		return 0, nil
	}
	r, known := c.memory.replacement(key)
	if r != nil {
		return c.recreateJob(ctx, k, key, r)
	}
	obj, exists := k.informer.Get(key.ObjectName)
	if !exists || !c.isSelected(key.Namespace) {
		c.memory.forget(key)
		c.changes.take(key, nil)
		return 0, nil
	}
	workload, err := policy.NewWorkload(&k.Kind, obj, Name)
	if err != nil || !known && c.keys.RequestsNothing(workload) {
		c.changes.take(key, nil)
		return 0, err
	}
	e := c.memory.get(key, workload.UID)
	if e.isBehind(workload.Version) {
		return 0, nil // the write will arrive as the cache's next event
	}
	if e.writtenVersion != "" {
		c.memory.update(key, workload.UID, time.Now(), func(e *entry) { e.writtenVersion = "" })
	}
	// If the workload cannot be read for another attempt, the end of its pause keeps its timer.
	var after time.Duration
	return retrystale.Do(isOutdated, func(first, last bool) (_ time.Duration, err error) {
		if !first {
			klog.FromContext(ctx).V(4).Info("Workload has changed, reading it live")
			live, err := k.get(ctx, key.ObjectName)
			if apierrors.IsNotFound(err) {
				c.memory.forget(key)
				return 0, nil
			}
			if err != nil {
				return after, fmt.Errorf("get %s: %w", key, err)
			}
			before := workload
			if workload, err = policy.NewWorkload(&k.Kind, live, Name); err != nil {
				return 0, err
			}
			workload.InheritVersions(before)
		}
		after, err = c.reconcileVersion(ctx, k, workload, last)
		return after, err
	})
}

// cachedUID returns the UID of the cached workload; empty if the cache does not have it.
func (c *controller) cachedUID(key policy.QueueKey) types.UID {
	obj, exists := c.kinds[key.Kind].informer.Get(key.ObjectName)
	if !exists {
		return ""
	}
	return obj.GetUID()
}

// settleDelay is how soon a workload is looked at again if the event that is expected sooner does not come.
const settleDelay = time.Second

// pauseRetryDelay is how soon the end of a pause is retried after a failure, also if other failures of
// the workload have made its back-off longer.
const pauseRetryDelay = 10 * time.Second

// reconcileVersion decides on one version of a workload and does what is due. A conflict is reported as a
// failure only if last is set.
func (c *controller) reconcileVersion(ctx context.Context, k *kind, workload *policy.Workload, last bool) (time.Duration, error) {
	if workload.Deleting {
		return 0, nil
	}
	if selected := c.memory.selectedSince(workload.Namespace); policy.Newer(selected, workload.ContentVersion) {
		workload.ContentVersion = selected
	}
	now := time.Now()
	selection := c.keys.Selection(workload)
	e := c.memory.get(workload.QueueKey, workload.UID)

	step, pause := c.keys.PauseState(workload, selection, e.pause, now)
	if pause != e.pause {
		c.memory.update(workload.QueueKey, workload.UID, now, func(current *entry) { current.pause = pause })
	}
	if step != policy.PauseStands && !c.cfg.DryRun {
		if err := c.endPause(ctx, k, workload, step); err != nil {
			return pauseRetryDelay, err
		}
		return 0, nil
	}
	pauseLeft := max(pause.Until.Sub(now), 0)
	if !c.cfg.CSI && c.keys.RequestsCSI(workload) {
		c.csiOnce.Do(func() {
			workloadLogger(ctx, workload).Info("Annotations for secretproviderclasses have no effect without --config-reload-csi; logged once")
		})
	}

	facts, problem, err := c.collectFacts(workload, selection, &e, now)
	if problem != nil {
		c.reportProblems(ctx, k, workload, &e, append(slices.Clone(selection.Problems), *problem))
		return pauseLeft, nil
	}
	plan := c.cfg.Decide(facts)
	if err != nil {
		plan.Problems = append(slices.Clone(plan.Problems), policy.StateProblem(err))
	}
	c.reportProblems(ctx, k, workload, &e, plan.Problems)
	behind, err := c.cacheIsBehind(ctx, facts, plan.TrustedSources)
	if err != nil {
		return pauseLeft, err
	}
	if behind {
		return shorterDelay(settleDelay, pauseLeft), nil // the event of the source comes sooner
	}
	var after time.Duration
	switch {
	case len(plan.Reloads) > 0:
		after, err = c.reloadWorkload(ctx, k, facts, &plan, &e, last)
	default:
		after, err = c.recordState(ctx, k, facts, &plan, &e, last)
	}
	if err != nil {
		return pauseLeft, err // a failing reload does not delay the end of a pause
	}
	return shorterDelay(after, pauseLeft), nil
}

// cacheIsBehind reports whether the cached version of a source is outdated, so that a write would record old
// data. The cache of sources may lag by any time, also on a replica that has just begun to lead, while the
// record on the workload may be newer. A version of a source that is newer than the workload's is safe. For
// any other, the API server is asked whether the version is the latest.
func (c *controller) cacheIsBehind(ctx context.Context, facts *policy.Facts, keys []policy.SourceKey) (bool, error) {
	workload := facts.Workload
	for _, key := range keys {
		cached := facts.Sources[key]
		if key.Type == policy.SecretProviderClass || policy.Newer(cached.Version, workload.Version) {
			continue // this process has seen each change of a class
		}
		live, err := c.liveVersion(ctx, workload.Namespace, key)
		if err != nil {
			return false, fmt.Errorf("check whether the cache is behind: %w", err)
		}
		if live != cached.Version {
			workloadLogger(ctx, workload).V(2).Info("The cache of sources is behind", "source", key, "cached", cached.Version)
			return true, nil
		}
	}
	return false, nil
}

// liveVersion returns the resourceVersion that a source has in the API server now, or "" if there is none or
// the cache leaves it out. It sends a list request, since the controller's role does not permit it to get
// sources.
func (c *controller) liveVersion(ctx context.Context, namespace string, key policy.SourceKey) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, liveTimeout)
	defer cancel()
	selector := fields.OneTermEqualSelector(metav1.ObjectNameField, key.Name).String()
	if key.Type == policy.Secret {
		selector += "," + informers.NotHelm
	}
	resource := sourceResource(key.Type)
	list, err := c.metadata.Resource(resource).Namespace(namespace).List(ctx, metav1.ListOptions{FieldSelector: selector})
	if err != nil {
		return "", fmt.Errorf("version of %s %s/%s: %w", resource.Resource, namespace, key.Name, err)
	}
	for i := range list.Items {
		if list.Items[i].Name == key.Name {
			return list.Items[i].ResourceVersion, nil
		}
	}
	return "", nil
}

// liveTimeout is a little longer than kube-apiserver's default --request-timeout.
const liveTimeout = 70 * time.Second

// shorterDelay returns the shorter delay. Zero asks for nothing and is ignored.
func shorterDelay(a, b time.Duration) time.Duration {
	if a == 0 || b > 0 && b < a {
		return b
	}
	return a
}

// collectFacts collects what the decision on the workload depends on, unless there is a problem with its
// patterns. The error says that the state annotation could not be parsed; the recorded state is then nil.
func (c *controller) collectFacts(workload *policy.Workload, selection *policy.Selection, e *entry, now time.Time) (*policy.Facts, *policy.Problem, error) {
	recorded, err := c.recordedState(workload, e)
	sources, watched, problem := c.lookUpSources(workload, selection, recorded)
	if problem != nil {
		return nil, problem, err
	}
	// The changes of watched sources that are not distributed yet belong to this decision too.
	for source, change := range c.changes.take(workload.QueueKey, watched) {
		c.extendWindow(workload, selection, source, change)
	}
	*e = c.memory.get(workload.QueueKey, workload.UID)
	return &policy.Facts{Workload: workload, Selection: selection, RecordedState: recorded, Sources: sources, Window: e.window, Now: now}, nil, err
}

// recordedState returns what was last recorded of the workload; nil if nothing was.
func (c *controller) recordedState(workload *policy.Workload, e *entry) (policy.State, error) {
	return policy.ParseState(workload.LatestState(e.lastState), workload.QueueKey)
}

// keepsStateInMemory reports whether the workload's state is kept in memory, not in its annotation.
func (c *controller) keepsStateInMemory(workload *policy.Workload) bool {
	return c.cfg.DryRun || workload.Kind.Stateless
}

// isSelected reports whether the controller works in a namespace.
func (c *controller) isSelected(namespace string) bool {
	switch {
	case slices.Contains(c.cfg.ExcludeNamespaces, namespace):
		return false
	case len(c.cfg.IncludeNamespaces) > 0:
		return slices.Contains(c.cfg.IncludeNamespaces, namespace)
	case !c.cfg.needsNamespaces():
		return true
	}
	obj, exists := c.informers.Namespaces.Get(cache.NewObjectName("", namespace))
	return exists && c.selectorMatches(obj)
}

// workloadLogger returns a logger with the workload's name.
func workloadLogger(ctx context.Context, workload *policy.Workload) klog.Logger {
	return klog.FromContext(ctx).WithValues("kind", workload.QueueKey.Kind, "workload", workload.ObjectName)
}
