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

// horizon is how early a workload gets a timer for its boundary. Earlier it has none, since a timer takes
// more memory than a workload in the cache. Every workload comes up twice in this time. So after a step of
// the clock, a workload is at most half of it late.
const horizon = time.Hour

// byTarget is an index of what scales workloads, by NAMESPACE/KIND/NAME of the workload.
const byTarget = "scale-schedule-target"

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
	metrics    *domainMetrics
	memory     *memory
	// onceNotices are what owners are told once, repeatedNotices what they are told again.
	onceNotices, repeatedNotices *notices.Memory
	loop                         *controllers.Loop[key]

	mu                          sync.Mutex
	clockCheckedAt, writesAfter time.Time
}

var _ controllers.Controller = &controller{}

// newController returns the controller. cfg must have passed Validate. watched are the kinds with their
// informers, namespaces is nil if Namespaces do not count. Clients made from config write only while this
// replica leads.
func newController(cfg Config, watched []*kind, namespaces *informers.Informer[*informers.Object], client kubernetes.Interface, config *rest.Config,
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
		cfg: cfg, evaluator: cfg.evaluator(), kinds: watched, client: client, objects: objects, limiter: rate.NewLimiter(limit, 1), events: events,
		memory: newMemory(), onceNotices: notices.New(math.MaxInt64), repeatedNotices: notices.New(tellAgain),
	}
	c.metrics = newDomainMetrics(reg, c)
	loop.MaxBackoff, loop.Background = maxBackoff, c.lookAgain
	var watches []controllers.Watch[key]
	for _, k := range watched {
		watches = append(watches, c.watch(k))
	}
	if namespaces != nil {
		c.namespaces = &kind{Kind: "Namespace", plural: "namespaces", resource: informers.Namespaces, informer: namespaces}
		watches = append(watches, controllers.WatchChanges(namespaces, func(e controllers.Event[*informers.Object]) []key {
			return []key{{c.namespaces, cache.MetaObjectToName(newest(e))}}
		}, digestChanged))
	}
	c.loop, err = controllers.NewLoop(loop, c.reconcile, watches...)
	return c, err
}

// watch maps an object to itself, and what scales a workload to the workload too.
func (c *controller) watch(k *kind) controllers.Watch[key] {
	scales := k.Kind == policy.Autoscaler || k.Kind == policy.ScaledObject
	if scales {
		k.informer.AddIndex(byTarget, func(obj *informers.Object) []string {
			if o := policy.Decode(obj.Digest(Name)); o.Target != "" {
				return []string{obj.GetNamespace() + "/" + o.Target}
			}
			return nil
		})
	}
	return controllers.WatchMapped(k.informer, func(e controllers.Event[*informers.Object]) (keys []key) {
		if c.cfg.scales(k) {
			this := key{k, cache.MetaObjectToName(newest(e))}
			keys = append(keys, this)
			if e.Old != nil && e.New != nil {
				c.memory.compare(this, e.Old, e.New)
			}
		}
		if scales {
			keys = append(keys, c.targets(e)...)
		}
		return keys
	})
}

func newest(e controllers.Event[*informers.Object]) *informers.Object {
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
func (c *controller) targets(e controllers.Event[*informers.Object]) (keys []key) {
	for _, obj := range []*informers.Object{e.Old, e.New} {
		if obj == nil {
			continue
		}
		target := policy.Decode(obj.Digest(Name)).Target
		for _, k := range c.kinds {
			if name, ok := strings.CutPrefix(target, string(k.Kind)+"/"); ok && c.cfg.scales(k) {
				keys = append(keys, key{k, cache.NewObjectName(obj.GetNamespace(), name)})
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
		// Their manifests agree on no label.
		wg.Go(func() {
			originals.Warn(ctx, c.client, c.cfg.Scope, "", "kube-downscaler", "gokubedownscaler")
		})
	}
	return c.loop.Run(ctx)
}

// Status returns the state of the controller's loop.
func (c *controller) Status() controllers.Status { return c.loop.Status() }

func (c *controller) reconcile(ctx context.Context, k key) (time.Duration, error) {
	if k.kind == c.namespaces {
		c.enqueueWorkloads(ctx, k.Name)
		return 0, nil
	}
	obj, exists := k.informer.Get(k.ObjectName)
	if !exists || obj.GetDeletionTimestamp() != nil || !c.evaluator.Covers(k.Namespace, k.Name) {
		c.memory.forget(k)
		return 0, nil
	}
	o := policy.Decode(obj.Digest(Name))
	if o.Unselected {
		c.memory.forget(k)
		return 0, nil
	}
	namespace, known := c.namespace(k.Namespace)
	if !known {
		return 0, nil // it comes up when the cache has its Namespace, which may say that it is to be down
	}
	now := time.Now()
	w := &workload{key: k, uid: obj.GetUID(), version: obj.GetResourceVersion(), Object: &o, namespace: namespace}
	v := c.evaluator.Decide(w.Object, w.namespace, now)
	for i := range v.Problems {
		c.warn(w, &v.Problems[i])
	}
	e := c.memory.get(k, w.uid)
	p := c.evaluator.Plan(w.Object, k.Kind, &v, c.rival(k), e.Remembered, now)
	if p.Problem != nil {
		c.warn(w, p.Problem)
	}
	if p.Remembered != e.Remembered {
		c.memory.update(k, w.uid, func(now *entry) {
			lost := now.Lost
			if now.Remembered = p.Remembered; lost != e.Lost {
				now.Lost = lost // a handler was faster
			}
		})
	}
	after := p.Wait
	if next := v.Next.Sub(now); next <= horizon {
		after = soonest(after, max(next, 0)) // 0 if there is no next
	}
	if c.cfg.DryRun {
		c.wouldWrite(ctx, w, &p, e.announced)
		return after, nil
	}
	if p.Do == policy.Nothing {
		return after, nil
	}
	again, err := c.write(ctx, w, &p)
	return soonest(after, again), err
}

// workload is what a reconcile knows of a workload.
type workload struct {
	key
	*policy.Object
	uid       types.UID
	version   string
	namespace *policy.Object
}

// soonest returns the shorter delay. Zero asks for nothing and is ignored.
func soonest(a, b time.Duration) time.Duration {
	if a == 0 || b > 0 && b < a {
		return b
	}
	return a
}

// namespace returns what counts of a Namespace, and whether that is known.
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

// lookAgain enqueues all workloads twice in the horizon, until ctx ends.
func (c *controller) lookAgain(ctx context.Context) error {
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

// enqueueWorkloads enqueues the workloads of a Namespace that has changed. It enqueues all if the name is
// empty, but those that the API server has refused, which have a timer.
func (c *controller) enqueueWorkloads(ctx context.Context, namespace string) {
	for _, k := range c.kinds {
		if !c.cfg.scales(k) {
			continue
		}
		for _, obj := range k.informer.List(namespace, nil) {
			of := key{k, cache.MetaObjectToName(obj)}
			if namespace != metav1.NamespaceAll || c.memory.get(of, obj.GetUID()).failures == 0 {
				c.loop.EnqueueFor(ctx, of.Namespace, of)
			}
		}
	}
}

// rival returns who scales a workload besides.
func (c *controller) rival(k key) policy.Rival {
	rival := policy.Nobody
	for _, other := range c.kinds {
		if (other.Kind != policy.Autoscaler && other.Kind != policy.ScaledObject) || other == k.kind ||
			len(other.informer.ByIndex(byTarget, fmt.Sprintf("%s/%s/%s", k.Namespace, k.Kind, k.Name))) == 0 {
			continue
		}
		if other.Kind == policy.ScaledObject {
			return policy.ByKEDA
		}
		rival = policy.ByAutoscaler
	}
	return rival
}
