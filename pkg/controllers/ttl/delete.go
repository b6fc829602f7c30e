// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package ttl

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/ttl/policy"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/ttl/policy/rules"
)

const (
	// The delays after a forbidden deletion: permissions seldom change soon.
	minForbidden = 5 * time.Minute
	maxForbidden = time.Hour
	// After a conflict, the object is read and decided on again nearly at once. Only an object that
	// changes all the time, or that somebody refuses as a conflict, waits as long as the maximum.
	minConflict = 100 * time.Millisecond
	maxConflict = time.Minute
	// noticeFailures is the number of failures after which an owner is told of errors other than Forbidden;
	// noticeInterval is the time after which the owner is told again.
	noticeFailures = 3
	noticeInterval = time.Hour
	// typePause is how long a type is left alone after its clock was found wrong, or after a request failed
	// that took slowRequest or longer: its API, or a webhook, does not answer. Without the pause, many
	// objects of such a type would keep the workers from all other types.
	typePause   = time.Minute
	slowRequest = 5 * time.Second
)

// The reasons of Events, besides the reasons of package policy.
const (
	reasonDeleted     = "DeletedExpiredTTL"
	reasonFailed      = "FailedToDeleteExpiredTTL"
	reasonWillDelete  = "WillDeleteExpiredTTL"
	reasonWouldDelete = "WouldDeleteExpiredTTL"
	reasonBreaker     = "TTLBreakerOpen"
)

// expire deletes the object of a record if the live object has the UID too, and is due. cachedDecision is the
// decision on the cached object.
func (c *controller) expire(
	ctx context.Context, key objectKey, rec *dueRecord, cachedDecision *policy.Decision, uid types.UID,
) (time.Duration, error) {
	start := time.Now()
	live, serverTime, err := c.objects.get(ctx, key.Type, key.ObjectName, cachedDecision.Rule != "" && key.rules.NeedsWhole)
	now := time.Now()
	switch {
	case apierrors.IsNotFound(err):
		return 0, nil
	case err != nil:
		return c.handleFailure(ctx, key, rec, cachedDecision, uid, start, "get", err)
	case live.GetUID() != uid:
		return 0, nil // a new object of this name, whose event is on its way
	case c.clockSkewed(ctx, key, serverTime, now):
		return c.pause(key, cachedDecision, now), nil
	}
	var verdict rules.Verdict
	if cachedDecision.Rule != "" { // an annotation outranks the rules, and its removal is an event of its own
		verdict, _ = key.rules.verdict(live)
	}
	decision := c.decide(key, live, verdict, now)
	switch {
	case !decision.Due(now):
		return lookDelay(&decision, now), nil
	case c.cfg.Grace > 0 && !decision.Deadline.Equal(cachedDecision.Deadline):
		return c.cfg.Grace, nil // a deadline that nobody has been told of; its own event is on its way
	}
	logger := klog.FromContext(ctx).WithValues(
		"annotation", decision.Key, "rule", decision.Rule, "value", decision.Value, "deadline", decision.Deadline)
	if c.isDryRun(&decision) {
		text := "would be deleted because of " + decision.Explanation()
		if c.recordEventOnce(key, uid, corev1.EventTypeNormal, reasonWouldDelete, text) {
			logger.Info("Dry run: would delete")
			c.metrics.countDeletion(key, &decision, resultDryRun)
		}
		return 0, nil
	}
	breaker := c.breakerOf(&decision)
	if permitted, scope := breaker.Take(key.Namespace, now); !permitted {
		if scope != "" {
			c.reportBreaker(ctx, key, &decision, scope)
		}
		return c.pause(key, &decision, now), nil
	}
	err = c.objects.delete(ctx, key.Type, live)
	if err == nil {
		logger.V(2).Info("Deleted an expired object")
		c.metrics.countDeletion(key, &decision, resultSuccess)
		c.metrics.lag.Observe(time.Since(decision.Deadline).Seconds())
		key.setDeadline(rec, policy.Never) // it is not overdue while its finalizers work
		c.recordEvent(key, uid, corev1.EventTypeNormal, reasonDeleted, "deleted because of "+decision.Explanation())
		return 0, nil
	}
	switch apierrors.ReasonForError(err) {
	case metav1.StatusReasonForbidden, metav1.StatusReasonNotFound, metav1.StatusReasonConflict,
		metav1.StatusReasonInvalid, metav1.StatusReasonTooManyRequests:
		breaker.Return(key.Namespace) // nothing was deleted; after other errors, such as 500 and 504, the object may have been
	}
	if apierrors.IsNotFound(err) {
		return 0, nil
	}
	return c.handleFailure(ctx, key, rec, &decision, uid, start, "delete", err)
}

// clockSkewed reports whether this clock and the API server's are too far apart. serverTime is the API
// server's clock at now, in whole seconds, and zero if it is unknown. An aggregated API has its own clock, so
// only deletions of the object's type pause.
func (c *controller) clockSkewed(ctx context.Context, key objectKey, serverTime, now time.Time) bool {
	if c.cfg.MaxClockSkew == 0 || serverTime.IsZero() {
		return false
	}
	skew := now.Sub(serverTime.Add(time.Second / 2))
	c.metrics.skew.Set(skew.Seconds())
	if skew.Abs() <= c.cfg.MaxClockSkew+time.Second/2 {
		return false
	}
	if key.beginPause(now) {
		klog.FromContext(ctx).Error(nil, "The clocks of the manager and the API server differ too much, so nothing of this type is deleted",
			"resource", key.GroupResource(), "ahead", skew.Round(time.Second), "flag", "--"+flagPrefix+"max-clock-skew")
	}
	return true
}

// reportBreaker reports, in the log, in a metric and by an Event, that the breaker has refused the deletion
// of the key's object and is now open. Only the log names the namespace: the Events of the manager's Pod are
// for whoever may read that namespace.
func (c *controller) reportBreaker(ctx context.Context, key objectKey, decision *policy.Decision, scope policy.Scope) {
	c.metrics.trips.WithLabelValues(string(scope)).Inc()
	logger := klog.FromContext(ctx)
	limit, text := c.cfg.MaxDeletionsPerMinute, "%d objects of one namespace were deleted within a minute and more are due; nothing in it is deleted for %v"
	if scope == policy.OneNamespace {
		logger = logger.WithValues("namespace", key.Namespace)
	} else {
		limit *= policy.TotalLimitFactor
		text = "%d objects were deleted within a minute and more are due; nothing at all is deleted for %v"
		overdue := map[string]int{}
		for _, s := range c.typeStatuses() {
			if s.Overdue > 0 {
				overdue[s.Resource] = s.Overdue
			}
		}
		logger = logger.WithValues("overdue", overdue)
	}
	if decision.Rule != "" {
		logger = logger.WithValues("rule", decision.Rule)
		text += ". This is about deletions by rules, of which " + decision.Rule + " is due; annotations go on"
	}
	logger.Error(nil, "Breaker opened; nothing is deleted in its scope until the cooldown ends", "scope", scope, "limit", limit,
		"cooldown", c.cfg.BreakerCooldown, "flag", "--"+flagPrefix+"max-deletions-per-minute")
	if pod := c.cfg.Pod; pod.Name != "" {
		c.events.Event(&corev1.ObjectReference{APIVersion: "v1", Kind: "Pod", Namespace: pod.Namespace, Name: pod.Name},
			corev1.EventTypeWarning, reasonBreaker, fmt.Sprintf(text, limit, c.cfg.BreakerCooldown))
	}
}

// handleFailure counts and reports the error of a request that began at start, and returns when to try again.
func (c *controller) handleFailure(
	ctx context.Context, key objectKey, rec *dueRecord, decision *policy.Decision, uid types.UID,
	start time.Time, operation string, err error,
) (time.Duration, error) {
	if controllers.IsNotLeading(err) {
		return 0, err
	}
	now := time.Now()
	if now.Sub(start) >= slowRequest && key.beginPause(now) {
		klog.FromContext(ctx).Error(err, "A request took too long; pausing deletions of this type",
			"resource", key.GroupResource(), "pause", typePause)
	}
	rec.failures++
	c.metrics.countDeletion(key, decision, resultError)
	err = fmt.Errorf("%s %s: %w", operation, key, err)
	forbidden := apierrors.IsForbidden(err)
	if (forbidden || rec.failures >= noticeFailures) && c.repeatedNotices.Due(uid, now) {
		klog.FromContext(ctx).Error(err, "Cannot delete an expired object")
		c.recordEvent(key, uid, corev1.EventTypeWarning, reasonFailed, err.Error())
	}
	doublings := min(rec.failures-1, 10)
	switch {
	case forbidden:
		return min(minForbidden<<doublings, maxForbidden), nil
	case apierrors.IsConflict(err):
		return min(minConflict<<doublings, maxConflict), nil
	}
	return 0, err // the loop waits longer each time, and as long as the API server asks for
}

// recordEventOnce records an Event about an object unless it has been recorded, and reports whether it did.
func (c *controller) recordEventOnce(key objectKey, uid types.UID, eventType, reason, text string) bool {
	due := c.onceNotices.Due([3]string{string(uid), reason, text}, time.Now())
	if due {
		c.recordEvent(key, uid, eventType, reason, text)
	}
	return due
}

func (c *controller) recordEvent(key objectKey, uid types.UID, eventType, reason, text string) {
	c.events.Event(&corev1.ObjectReference{
		APIVersion: key.GroupVersion().String(), Kind: key.Kind, Namespace: key.Namespace, Name: key.Name, UID: uid,
	}, eventType, reason, text)
}
