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
	// A forbidden deletion is seldom allowed soon.
	minForbidden = 5 * time.Minute
	maxForbidden = time.Hour
	// After a conflict, the object is read and decided on again nearly at once. Only an object that
	// changes all the time, or that somebody refuses as a conflict, waits as long as the maximum.
	minConflict = 100 * time.Millisecond
	maxConflict = time.Minute
	// tellAfter is the number of failures after which an owner is told of errors other than Forbidden;
	// tellAgain is the time after which the owner is told again.
	tellAfter = 3
	tellAgain = time.Hour
	// typePause is how long a type is left alone after its clock was found wrong, or after a request failed
	// that took slow or longer: its API, or a webhook, does not answer. Without the pause, many objects of
	// such a type would keep the workers from all other types.
	typePause = time.Minute
	slow      = 5 * time.Second
)

// The reasons of Events, besides the reasons of package policy.
const (
	reasonDeleted     = "DeletedExpiredTTL"
	reasonFailed      = "FailedToDeleteExpiredTTL"
	reasonWillDelete  = "WillDeleteExpiredTTL"
	reasonWouldDelete = "WouldDeleteExpiredTTL"
	reasonBreaker     = "TTLBreakerOpen"
)

// expire deletes the object of a record if it still has the UID, and is due as decided.
func (c *controller) expire(ctx context.Context, k key, r *dueRecord, decided *policy.Decision, uid types.UID) (time.Duration, error) {
	begun := time.Now()
	live, date, err := c.objects.get(ctx, k.Type, k.ObjectName, decided.Rule != "" && k.rules.Whole)
	now := time.Now()
	switch {
	case apierrors.IsNotFound(err):
		return 0, nil
	case err != nil:
		return c.refused(ctx, k, r, decided, uid, begun, "get", err)
	case live.GetUID() != uid:
		return 0, nil // its own event is on its way
	case c.skewed(ctx, k, date, now):
		return c.pause(k, decided, now), nil
	}
	var v rules.Verdict
	if decided.Rule != "" { // else the rules decide on the event with which the annotation goes
		v, _ = k.rules.verdict(live)
	}
	d := c.decide(k, live, v, now)
	switch {
	case !d.Due(now):
		return wait(&d, now), nil
	case c.cfg.Grace > 0 && !d.Deadline.Equal(decided.Deadline):
		return c.cfg.Grace, nil // a deadline that nobody has been told of; its own event is on its way
	}
	logger := klog.FromContext(ctx).WithValues("annotation", d.Key, "rule", d.Rule, "value", d.Value, "deadline", d.Deadline)
	if c.dryRun(&d) {
		if c.tell(k, uid, corev1.EventTypeNormal, reasonWouldDelete, "would be deleted because of "+d.Because()) {
			logger.Info("Dry run: would delete")
			c.metrics.deletion(k, &d, resultDryRun)
		}
		return 0, nil
	}
	breaker := c.breakerOf(&d)
	if permitted, opened := breaker.Take(k.Namespace, now); !permitted {
		if opened != "" {
			c.reportBreaker(ctx, k, &d, opened)
		}
		return c.pause(k, &d, now), nil
	}
	err = c.objects.delete(ctx, k.Type, live)
	if err == nil {
		logger.V(2).Info("Deleted an expired object")
		c.metrics.deletion(k, &d, resultSuccess)
		c.metrics.lag.Observe(time.Since(d.Deadline).Seconds())
		k.setDeadline(r, policy.Never) // it is not overdue while its finalizers work
		c.event(k, uid, corev1.EventTypeNormal, reasonDeleted, "deleted because of "+d.Because())
		return 0, nil
	}
	switch apierrors.ReasonForError(err) {
	case metav1.StatusReasonForbidden, metav1.StatusReasonNotFound, metav1.StatusReasonConflict,
		metav1.StatusReasonInvalid, metav1.StatusReasonTooManyRequests:
		breaker.Return(k.Namespace) // nothing was deleted; after other errors, such as 500 and 504, the object may have been
	}
	if apierrors.IsNotFound(err) {
		return 0, nil
	}
	return c.refused(ctx, k, r, &d, uid, begun, "delete", err)
}

// skewed reports whether this clock and the API server's are too far apart. date is the API server's
// clock at now, in whole seconds, and zero if it is unknown. An aggregated API has its own clock, so only
// the type is left alone.
func (c *controller) skewed(ctx context.Context, k key, date, now time.Time) bool {
	if c.cfg.MaxClockSkew == 0 || date.IsZero() {
		return false
	}
	skew := now.Sub(date.Add(time.Second / 2))
	c.metrics.skew.Set(skew.Seconds())
	if skew.Abs() <= c.cfg.MaxClockSkew+time.Second/2 {
		return false
	}
	if k.beginPause(now) {
		klog.FromContext(ctx).Error(nil, "The clocks of the manager and the API server differ too much, so nothing of this type is deleted",
			"resource", k.GroupResource(), "ahead", skew.Round(time.Second), "flag", "--"+flagPrefix+"max-clock-skew")
	}
	return true
}

// reportBreaker reports, in the log, in a metric and by an Event, that the deletion of k has opened the
// breaker. Only the log names the namespace: the Events of the manager's Pod are for whoever may read that
// namespace.
func (c *controller) reportBreaker(ctx context.Context, k key, d *policy.Decision, opened policy.Scope) {
	c.metrics.trips.WithLabelValues(string(opened)).Inc()
	logger := klog.FromContext(ctx)
	limit, text := c.cfg.MaxDeletionsPerMinute, "%d objects of one namespace were deleted within a minute and more are due; nothing in it is deleted for %v"
	if opened == policy.OneNamespace {
		logger = logger.WithValues("namespace", k.Namespace)
	} else {
		limit *= policy.TotalLimitFactor
		text = "%d objects were deleted within a minute and more are due; nothing at all is deleted for %v"
		overdue := map[string]int{}
		for _, s := range c.status() {
			if s.Overdue > 0 {
				overdue[s.Resource] = s.Overdue
			}
		}
		logger = logger.WithValues("overdue", overdue)
	}
	if d.Rule != "" {
		logger = logger.WithValues("rule", d.Rule)
		text += ". This is about deletions by rules, of which " + d.Rule + " is due; annotations go on"
	}
	logger.Error(nil, "Breaker opened; nothing is deleted in its scope until the cooldown ends", "scope", opened, "limit", limit, "cooldown", c.cfg.BreakerCooldown, "flag", "--"+flagPrefix+"max-deletions-per-minute")
	if pod := c.cfg.Pod; pod.Name != "" {
		c.events.Event(&corev1.ObjectReference{APIVersion: "v1", Kind: "Pod", Namespace: pod.Namespace, Name: pod.Name},
			corev1.EventTypeWarning, reasonBreaker, fmt.Sprintf(text, limit, c.cfg.BreakerCooldown))
	}
}

// refused returns when to try again after an error of a request that began at begun.
func (c *controller) refused(
	ctx context.Context, k key, r *dueRecord, d *policy.Decision, uid types.UID, begun time.Time, operation string, err error,
) (time.Duration, error) {
	if controllers.IsNotLeading(err) {
		return 0, err
	}
	now := time.Now()
	if now.Sub(begun) >= slow && k.beginPause(now) {
		klog.FromContext(ctx).Error(err, "A request took too long; pausing deletions of this type",
			"resource", k.GroupResource(), "pause", typePause)
	}
	r.failures++
	c.metrics.deletion(k, d, resultError)
	err = fmt.Errorf("%s %s: %w", operation, k, err)
	forbidden := apierrors.IsForbidden(err)
	if (forbidden || r.failures >= tellAfter) && c.repeatedNotices.Due(uid, now) {
		klog.FromContext(ctx).Error(err, "Cannot delete an expired object")
		c.event(k, uid, corev1.EventTypeWarning, reasonFailed, err.Error())
	}
	doublings := min(r.failures-1, 10)
	switch {
	case forbidden:
		return min(minForbidden<<doublings, maxForbidden), nil
	case apierrors.IsConflict(err):
		return min(minConflict<<doublings, maxConflict), nil
	}
	return 0, err // the loop waits longer each time, and as long as the API server asks for
}

// tell sends an Event about an object once, and reports whether it has.
func (c *controller) tell(k key, uid types.UID, eventType, reason, text string) bool {
	due := c.onceNotices.Due([3]string{string(uid), reason, text}, time.Now())
	if due {
		c.event(k, uid, eventType, reason, text)
	}
	return due
}

func (c *controller) event(k key, uid types.UID, eventType, reason, text string) {
	c.events.Event(&corev1.ObjectReference{
		APIVersion: k.GroupVersion().String(), Kind: k.Kind, Namespace: k.Namespace, Name: k.Name, UID: uid,
	}, eventType, reason, text)
}
