// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package ttl

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/internal/notices"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/internal/originals"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/ttl/policy"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/ttl/policy/rules"
)

// Name is the name of the controller.
const Name = "ttl"

// spread is the time over which objects that waited for the same moment come back.
const spread = 10 * time.Second

// controller deletes objects.
type controller struct {
	cfg     Config
	options policy.Options
	rules   *rules.Set
	follow  followFunc
	client  kubernetes.Interface
	objects objects
	events  record.EventRecorder
	metrics *controllerMetrics
	// Rules have a breaker of their own, so that the backlog of a new rule does not stop deletions by
	// annotations.
	breaker, ruleBreaker *policy.Breaker
	// onceNotices are what owners are told once, repeatedNotices what they are told again, faultNotices the
	// log lines about rules.
	onceNotices, repeatedNotices, faultNotices *notices.Memory
	loop                                       *controllers.Loop[objectKey]

	mu     sync.Mutex
	types  map[schema.GroupResource]*followedType
	faults map[string]RuleFault // the last fault of each rule
}

var _ controllers.Controller = &controller{}

// newController returns the controller. cfg must have passed Validate, and set is what its RulesFile has.
// Clients made from config write only while this replica leads.
func newController(cfg Config, set *rules.Set, follow followFunc, client kubernetes.Interface, config *rest.Config, events record.EventRecorder,
	loop controllers.LoopOptions, reg controllers.MetricsRegistry,
) (*controller, error) {
	objects, err := newAPI(config)
	if err != nil {
		return nil, err
	}
	c := &controller{
		cfg: cfg, options: cfg.Policy(), rules: set, follow: follow, client: client, objects: objects, events: events,
		breaker:     &policy.Breaker{Limit: cfg.MaxDeletionsPerMinute, Cooldown: cfg.BreakerCooldown},
		ruleBreaker: &policy.Breaker{Limit: cfg.MaxDeletionsPerMinute, Cooldown: cfg.BreakerCooldown},
		onceNotices: notices.New(math.MaxInt64), repeatedNotices: notices.New(noticeInterval), faultNotices: notices.New(time.Minute),
		types: map[schema.GroupResource]*followedType{}, faults: map[string]RuleFault{},
	}
	c.metrics = newControllerMetrics(reg, c)
	loop.Background = c.followTypes
	c.loop, err = controllers.NewLoop(loop, c.reconcile)
	return c, err
}

// Run reconciles until ctx ends and every worker and every watch has ended.
func (c *controller) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	if len(c.cfg.Compat) > 0 {
		// The originals' manifests have no label in common, so only the image tells.
		wg.Go(func() {
			originals.Warn(ctx, c.client, c.cfg.Scope, "", "k8s-ttl-controller", "kube-janitor")
		})
	}
	return c.loop.Run(ctx)
}

// Status returns the state of the controller's loop, and of each type.
func (c *controller) Status() controllers.Status {
	s := c.loop.Status()
	s.Details = Details{c.typeStatuses(), c.ruleStatuses()}
	return s
}

func (c *controller) reconcile(ctx context.Context, key objectKey) (time.Duration, error) {
	rec, obj := key.get(key.ObjectName)
	if rec == nil {
		return 0, nil
	}
	now := time.Now()
	decision := c.decide(key, obj, rec.verdict, now)
	if !withinHorizon(&decision, now) {
		key.forget(key.ObjectName, rec)
		return 0, nil
	}
	key.setDeadline(rec, decision.Deadline)
	if !decision.Due(now) {
		return lookDelay(&decision, now), nil
	}
	if left := c.graceLeft(rec, &decision, now); left > 0 {
		c.recordEventOnce(key, obj.GetUID(), corev1.EventTypeNormal, reasonWillDelete,
			fmt.Sprintf("will be deleted in %v or later because of %s", c.cfg.Grace, decision.Explanation()))
		return left, nil
	}
	if pause := c.pause(key, &decision, now); pause > 0 {
		return pause, nil
	}
	klog.FromContext(ctx).V(4).Info("Object is due", "annotation", decision.Key, "rule", decision.Rule, "deadline", decision.Deadline)
	return c.expire(ctx, key, rec, &decision, obj.GetUID())
}

// graceLeft returns how long to leave an object alone that was due already when its present state was first
// seen: somebody may just have restored it from a backup, or given it a deadline by mistake. For a new
// leader, every object that is due at the start is such an object.
func (c *controller) graceLeft(rec *dueRecord, decision *policy.Decision, now time.Time) time.Duration {
	if c.isDryRun(decision) || decision.Deadline.After(rec.firstSeen) {
		return 0
	}
	return max(c.cfg.Grace-now.Sub(rec.firstSeen), 0)
}

// pause returns when to look at an object again if nothing of its type or namespace may be deleted now; 0
// means now. Objects that wait come back spread, so in another order each time: with more objects than
// the breaker permits, the same objects would always be first otherwise. Each object that comes back
// before the breaker's limit is reached costs a request; each later object costs microseconds.
func (c *controller) pause(key objectKey, decision *policy.Decision, now time.Time) time.Duration {
	pause := max(c.breakerOf(decision).StoppedFor(key.Namespace, now), key.pauseLeft(now))
	if pause > 0 {
		pause += rand.N(spread)
	}
	return pause
}

// decide decides on a state of an object and the rules' verdict on it, and tells the object's owner the
// warnings.
func (c *controller) decide(key objectKey, obj metav1.Object, verdict rules.Verdict, now time.Time) policy.Decision {
	if verdict.Rule != 0 {
		return c.rules.Decide(verdict)
	}
	decision := c.options.Decide(key.Type, obj, now)
	for _, problem := range decision.Problems {
		recorded := c.recordEventOnce(key, obj.GetUID(), corev1.EventTypeWarning, problem.Reason, problem.Text)
		if recorded && problem.Reason == policy.InvalidTTL {
			c.metrics.invalid.WithLabelValues(problem.Key).Inc()
		}
	}
	return decision
}

// breakerOf returns the breaker that counts the deletion.
func (c *controller) breakerOf(decision *policy.Decision) *policy.Breaker {
	if decision.Rule != "" {
		return c.ruleBreaker
	}
	return c.breaker
}

// isDryRun reports whether the decision deletes nothing.
func (c *controller) isDryRun(decision *policy.Decision) bool { return c.cfg.DryRun || decision.DryRun }

// lookDelay returns when to look at an object again; 0 means at its next change.
func lookDelay(decision *policy.Decision, now time.Time) time.Duration {
	if decision.Deadline.Equal(policy.Never) {
		return 0
	}
	return min(decision.Deadline.Sub(now), horizon)
}
