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
)

const (
	// attempts limits the deletions in one reconcile. After a conflict, the next is decided on another read.
	attempts = 3
	// What is forbidden is seldom allowed soon.
	minForbidden = 5 * time.Minute
	maxForbidden = time.Hour
	// tellAfter is the failure from which on an owner is told of other errors; tellAgain is the time after
	// which he is told again.
	tellAfter = 3
	tellAgain = time.Hour
	// skewPause is how long nothing is deleted after the clocks have been found apart.
	skewPause = time.Minute
)

// The reasons of Events, besides those of package policy.
const (
	reasonDeleted = "DeletedExpiredTTL"
	reasonFailed  = "FailedToDeleteExpiredTTL"
	reasonWould   = "WouldDeleteExpiredTTL"
	reasonBreaker = "TTLBreakerOpen"
)

// expire deletes the object of a record if it is still the one with that UID, and due.
func (c *Controller) expire(ctx context.Context, k key, r *entry, uid types.UID) (time.Duration, error) {
	for attempt := 1; ; attempt++ {
		live, date, err := c.objects.get(ctx, k.Type, k.ObjectName)
		now := c.clock.Now()
		switch {
		case apierrors.IsNotFound(err):
			return 0, nil
		case err != nil:
			return c.refused(ctx, k, r, uid, "get", err)
		case live.UID != uid:
			return 0, nil // its own event is on its way
		case c.skewed(ctx, date, now):
			return skewPause, nil
		}
		d := c.decide(k, r, live, now)
		if !d.Due(now) {
			return wait(&d, now), nil
		}
		because := fmt.Sprintf("deleted because of %s=%.80s, due at %s", d.Key, d.Value, d.Deadline.UTC().Format(time.RFC3339))
		logger := klog.FromContext(ctx).WithValues("annotation", d.Key, "value", d.Value, "deadline", d.Deadline)
		if c.cfg.DryRun {
			if r.news(reasonWould+because, now, 0) {
				logger.Info("Dry run: would delete")
				c.metrics.deletion(k, resultDryRun)
				c.event(k, uid, corev1.EventTypeNormal, reasonWould, "would be "+because)
			}
			return 0, nil
		}
		if !c.breaker.Take(now) {
			return c.tooMany(ctx, now), nil
		}
		err = c.objects.delete(ctx, k.Type, live)
		if err == nil {
			logger.V(2).Info("Deleted")
			c.metrics.deletion(k, resultDeleted)
			c.metrics.lag.Observe(c.clock.Since(d.Deadline).Seconds())
			k.decided(r, policy.Never) // it is not overdue while its finalizers work
			c.event(k, uid, corev1.EventTypeNormal, reasonDeleted, because)
			return 0, nil
		}
		if apierrors.ReasonForError(err) != metav1.StatusReasonUnknown {
			c.breaker.Return() // the API server says that nothing was deleted
		}
		switch {
		case apierrors.IsNotFound(err):
			return 0, nil
		case !apierrors.IsConflict(err) || attempt == attempts:
			return c.refused(ctx, k, r, uid, "delete", err)
		}
	}
}

// skewed reports whether this clock and that of the API server are too far apart. date is the API
// server's at now, in whole seconds, and zero if it is unknown.
func (c *Controller) skewed(ctx context.Context, date, now time.Time) bool {
	if c.cfg.MaxClockSkew == 0 || date.IsZero() {
		return false
	}
	skew := now.Sub(date.Add(time.Second / 2))
	c.metrics.skew.Set(skew.Seconds())
	if skew.Abs() <= c.cfg.MaxClockSkew+time.Second/2 {
		return false
	}
	if c.breaker.Trip(now, skewPause) {
		klog.FromContext(ctx).Error(nil, "The clock and the API server's are too far apart, so nothing is deleted",
			"ahead", skew.Round(time.Second), "flag", "--"+flagPrefix+"max-clock-skew")
	}
	return true
}

// tooMany opens the breaker unless it is open, and returns how long.
func (c *Controller) tooMany(ctx context.Context, now time.Time) time.Duration {
	if !c.breaker.Trip(now, c.cfg.BreakerCooldown) {
		return c.breaker.Open(now)
	}
	c.metrics.trips.Inc()
	overdue := map[string]int{}
	for _, s := range c.status() {
		if s.Overdue > 0 {
			overdue[s.Resource] = s.Overdue
		}
	}
	text := fmt.Sprintf("%d objects were deleted within a minute and more are due; nothing is deleted for %v", c.cfg.MaxDeletionsPerMinute, c.cfg.BreakerCooldown)
	klog.FromContext(ctx).Error(nil, "The breaker has opened: "+text, "overdue", overdue, "flag", "--"+flagPrefix+"max-deletions-per-minute")
	if pod := c.cfg.Pod; pod.Name != "" {
		c.events.Event(&corev1.ObjectReference{APIVersion: "v1", Kind: "Pod", Namespace: pod.Namespace, Name: pod.Name},
			corev1.EventTypeWarning, reasonBreaker, text)
	}
	return c.cfg.BreakerCooldown
}

// refused returns when to try again after an error.
func (c *Controller) refused(ctx context.Context, k key, r *entry, uid types.UID, operation string, err error) (time.Duration, error) {
	if controllers.IsNotLeading(err) {
		return 0, err
	}
	r.failures++
	c.metrics.deletion(k, resultFailed)
	err = fmt.Errorf("%s %s: %w", operation, k, err)
	forbidden := apierrors.IsForbidden(err)
	if (forbidden || r.failures >= tellAfter) && r.news(reasonFailed, c.clock.Now(), tellAgain) {
		klog.FromContext(ctx).Info("Warning: Cannot delete what has expired", "reason", err.Error())
		c.event(k, uid, corev1.EventTypeWarning, reasonFailed, err.Error())
	}
	if forbidden {
		return min(minForbidden<<min(r.failures-1, 10), maxForbidden), nil
	}
	return 0, err // the loop waits longer each time, and as long as the API server asks for
}

func (c *Controller) event(k key, uid types.UID, eventType, reason, text string) {
	c.events.Event(&corev1.ObjectReference{
		APIVersion: k.GroupVersion().String(), Kind: k.Kind, Namespace: k.Namespace, Name: k.Name, UID: uid,
	}, eventType, reason, text)
}

// deleteOptions name the object that was read, and no other.
func deleteOptions(live *metav1.PartialObjectMetadata) metav1.DeleteOptions {
	background := metav1.DeletePropagationBackground
	return metav1.DeleteOptions{
		Preconditions:     &metav1.Preconditions{UID: &live.UID, ResourceVersion: &live.ResourceVersion},
		PropagationPolicy: &background,
	}
}
