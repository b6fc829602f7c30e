// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package scaleschedule

import (
	"context"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/time/rate"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/internal/notices"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/internal/originals"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/scaleschedule/policy"
	"github.com/quartermaster-dev/quartermaster/pkg/informers"
)

// Name is the name of the controller.
const Name = "scale-schedule"

// horizon is how long before its next boundary a workload gets a timer. Earlier it has none, since a timer
// takes more memory than a workload in the cache. All workloads are enqueued every horizon/2, so after a step
// of the clock a workload is at most 30 minutes late.
const horizon = time.Hour

// targetIndex is an index of what scales workloads, by NAMESPACE/KIND/NAME of the workload.
const targetIndex = "scale-schedule-target"

// controller scales workloads.
type controller struct {
	cfg        Config
	evaluator  *policy.Evaluator
	kinds      []*kind // that are watched
	namespaces *kind   // nil with --namespaces
	client     kubernetes.Interface
	objects    objects
	limiter    *rate.Limiter
	events     record.EventRecorder
	metrics    *controllerMetrics
	memory     *memory
	// onceNotices are what owners are told once, repeatedNotices what they are told again.
	onceNotices, repeatedNotices *notices.Memory
	loop                         *controllers.Loop[objectKey]

	mu                          sync.Mutex
	clockCheckedAt, writesAfter time.Time
}

var _ controllers.Controller = &controller{}

// newController returns the controller. cfg must have passed Validate. watchedKinds have their informers,
// namespaces is nil if Namespaces do not count. Clients made from config write only while this replica leads.
func newController(
	cfg Config, watchedKinds []*kind, namespaces *informers.Informer[*informers.Object], client kubernetes.Interface, config *rest.Config,
	events record.EventRecorder, loop controllers.LoopOptions, reg controllers.MetricsRegistry,
) (*controller, error) {
	objects, err := newAPI(config)
	if err != nil {
		return nil, err
	}
	limit := rate.Inf
	if cfg.MaxWritesPerSecond > 0 {
		limit = rate.Limit(cfg.MaxWritesPerSecond)
	}
	c := &controller{
		cfg: cfg, evaluator: cfg.evaluator(), kinds: watchedKinds, client: client, objects: objects, limiter: rate.NewLimiter(limit, 1), events: events,
		memory: newMemory(), onceNotices: notices.New(math.MaxInt64), repeatedNotices: notices.New(noticeInterval),
	}
	c.metrics = newControllerMetrics(reg, c)
	loop.MaxBackoff, loop.Background = maxBackoff, c.resyncWorkloads
	var watches []controllers.Watch[objectKey]
	for _, k := range watchedKinds {
		watches = append(watches, c.watch(k))
	}
	if namespaces != nil {
		c.namespaces = &kind{Kind: "Namespace", plural: "namespaces", resource: informers.Namespaces, informer: namespaces}
		watches = append(watches, controllers.WatchChanges(namespaces, func(e controllers.Event[*informers.Object]) []objectKey {
			return []objectKey{{c.namespaces, cache.MetaObjectToName(eventObject(e))}}
		}, digestChanged))
	}
	c.loop, err = controllers.NewLoop(loop, c.reconcile, watches...)
	return c, err
}

// watch maps an object to its own key, and an object that scales a workload also to the workload's key.
func (c *controller) watch(k *kind) controllers.Watch[objectKey] {
	isScaler := k.Kind == policy.Autoscaler || k.Kind == policy.ScaledObject
	if isScaler {
		k.informer.AddIndex(targetIndex, func(obj *informers.Object) []string {
			if o := policy.Decode(obj.Digest(Name)); o.ScaleTarget != "" {
				return []string{obj.GetNamespace() + "/" + o.ScaleTarget}
			}
			return nil
		})
	}
	return controllers.WatchMapped(k.informer, func(e controllers.Event[*informers.Object]) (keys []objectKey) {
		if c.cfg.scales(k) {
			workload := objectKey{k, cache.MetaObjectToName(eventObject(e))}
			keys = append(keys, workload)
			if e.Old != nil && e.New != nil {
				c.memory.rememberLostRecord(workload, e.Old, e.New)
			}
		}
		if isScaler {
			keys = append(keys, c.targets(e)...)
		}
		return keys
	})
}

// eventObject returns the newest state of the object that an event is about.
func eventObject(e controllers.Event[*informers.Object]) *informers.Object {
	if e.New != nil {
		return e.New
	}
	return e.Old
}

// digestChanged reports whether the digest of a Namespace has changed. Changes of its labels, and resyncs,
// wake no workload.
func digestChanged(e controllers.Event[*informers.Object]) bool {
	return e.Old == nil || e.New == nil || !slices.Equal(e.Old.Digest(Name), e.New.Digest(Name))
}

// targets returns the workloads that an object scales, or has scaled.
func (c *controller) targets(e controllers.Event[*informers.Object]) (keys []objectKey) {
	for _, obj := range []*informers.Object{e.Old, e.New} {
		if obj == nil {
			continue
		}
		target := policy.Decode(obj.Digest(Name)).ScaleTarget
		for _, k := range c.kinds {
			if name, ok := strings.CutPrefix(target, string(k.Kind)+"/"); ok && c.cfg.scales(k) {
				keys = append(keys, objectKey{k, cache.NewObjectName(obj.GetNamespace(), name)})
			}
		}
	}
	return keys
}

// Run reconciles until ctx ends and every worker has ended.
func (c *controller) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	if c.cfg.Compat {
		// The originals' manifests have no label in common, so only the image tells.
		wg.Go(func() {
			originals.Warn(ctx, c.client, c.cfg.Scope, "", "kube-downscaler", "gokubedownscaler")
		})
	}
	return c.loop.Run(ctx)
}

// Status returns the state of the controller's loop.
func (c *controller) Status() controllers.Status { return c.loop.Status() }

func (c *controller) reconcile(ctx context.Context, key objectKey) (time.Duration, error) {
	if key.kind == c.namespaces {
		c.enqueueWorkloads(ctx, key.Name)
		return 0, nil
	}
	obj, exists := key.informer.Get(key.ObjectName)
	if !exists || obj.GetDeletionTimestamp() != nil || !c.evaluator.Covers(key.Namespace, key.Name) {
		c.memory.forget(key)
		return 0, nil
	}
	object := policy.Decode(obj.Digest(Name))
	if object.Unselected {
		c.memory.forget(key)
		return 0, nil
	}
	namespace, known := c.namespace(key.Namespace)
	if !known {
		return 0, nil // the event of its Namespace, which may want it down, enqueues it
	}
	now := time.Now()
	workload := &workloadState{key, &object, obj.GetUID(), obj.GetResourceVersion(), namespace}
	verdict := c.evaluator.Decide(workload.Object, workload.namespace, now)
	for i := range verdict.Problems {
		c.warnOwner(workload, &verdict.Problems[i])
	}
	previous := c.memory.get(key, workload.uid)
	plan := c.evaluator.Plan(workload.Object, key.Kind, &verdict, c.rival(key), previous.History, now)
	if plan.Problem != nil {
		c.warnOwner(workload, plan.Problem)
	}
	if plan.History != previous.History {
		c.memory.update(key, workload.uid, func(latest *entry) {
			lost := latest.LostRecord
			if latest.History = plan.History; lost != previous.LostRecord {
				latest.LostRecord = lost // a handler has recorded it meanwhile
			}
		})
	}
	delay := plan.Wait
	if next := verdict.Next.Sub(now); next <= horizon {
		delay = shorterDelay(delay, max(next, 0)) // 0 if there is no next
	}
	if c.cfg.DryRun {
		c.reportDryRun(ctx, workload, &plan, previous.dryRunAction)
		return delay, nil
	}
	if plan.Action == policy.Nothing {
		return delay, nil
	}
	retryDelay, err := c.write(ctx, workload, &plan)
	return shorterDelay(delay, retryDelay), err
}

// workloadState is what a reconcile knows of a workload.
type workloadState struct {
	objectKey
	*policy.Object
	uid       types.UID
	version   string
	namespace *policy.Object
}

// shorterDelay returns the shorter delay. Zero asks for nothing and is ignored.
func shorterDelay(a, b time.Duration) time.Duration {
	if a == 0 || b > 0 && b < a {
		return b
	}
	return a
}

// namespace returns what the cache keeps of a Namespace, and whether the cache has the Namespace.
func (c *controller) namespace(name string) (*policy.Object, bool) {
	if c.namespaces == nil {
		return &policy.Object{}, true
	}
	obj, exists := c.namespaces.informer.Get(cache.NewObjectName("", name))
	if !exists {
		return nil, false
	}
	o := policy.Decode(obj.Digest(Name))
	return &o, true
}

// resyncWorkloads enqueues all workloads twice in the horizon, until ctx ends.
func (c *controller) resyncWorkloads(ctx context.Context) error {
	ticker := time.NewTicker(horizon / 2)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
			c.enqueueWorkloads(ctx, metav1.NamespaceAll)
		}
	}
}

// enqueueWorkloads enqueues the workloads of a Namespace that has changed. If the name is empty, it enqueues
// all workloads except those whose last write failed, which have a timer.
func (c *controller) enqueueWorkloads(ctx context.Context, namespace string) {
	for _, k := range c.kinds {
		if !c.cfg.scales(k) {
			continue
		}
		for _, obj := range k.informer.List(namespace, nil) {
			workload := objectKey{k, cache.MetaObjectToName(obj)}
			if namespace != metav1.NamespaceAll || c.memory.get(workload, obj.GetUID()).failures == 0 {
				c.loop.EnqueueFor(ctx, workload.Namespace, workload)
			}
		}
	}
}

// rival returns what else scales a workload.
func (c *controller) rival(key objectKey) policy.Rival {
	rival := policy.RivalNone
	for _, other := range c.kinds {
		if (other.Kind != policy.Autoscaler && other.Kind != policy.ScaledObject) || other == key.kind ||
			len(other.informer.ByIndex(targetIndex, fmt.Sprintf("%s/%s/%s", key.Namespace, key.Kind, key.Name))) == 0 {
			continue
		}
		if other.Kind == policy.ScaledObject {
			return policy.RivalKEDA
		}
		rival = policy.RivalAutoscaler
	}
	return rival
}
