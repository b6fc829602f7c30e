// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package ttl

import (
	"context"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/ttl/policy"
)

const (
	// attempts limits the deletions in one reconcile. After a conflict, the next is decided on another read.
	attempts = 3
	// An object whose status never rests is tried again after 1 s, 2 s, and so on.
	minConflict = time.Second
	maxConflict = time.Minute
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

// expire deletes the object of a record if the live object is due too.
func (c *Controller) expire(ctx context.Context, r *entry) (time.Duration, error) {
	for attempt := 1; ; attempt++ {
		if pause := c.pause(); pause > 0 {
			return pause + spread(), nil
		}
		live, date, err := c.objects.get(ctx, r.kind.Type, r.ObjectName)
		switch {
		case apierrors.IsNotFound(err):
			return 0, nil
		case err != nil:
			return c.refused(ctx, r, "get", err)
		case live.UID != r.obj.GetUID():
			return 0, nil // its own event is on its way
		}
		now := c.clock.Now()
		if c.skewed(ctx, date, now) {
			return skewPause + spread(), nil
		}
		d := c.rules.Decide(describe(r.kind.Type, live), now)
		c.warn(r, &d)
		if !d.Due(now) {
			return c.wait(&d, now), nil
		}
		if c.cfg.DryRun {
			c.would(ctx, r, &d)
			return 0, nil
		}
		if wait := c.take(ctx, now); wait > 0 {
			return wait + spread(), nil
		}
		err = c.objects.delete(ctx, r.kind.Type, live)
		if err == nil {
			c.deleted(ctx, r, &d)
			return 0, nil
		}
		c.giveBack(err)
		switch {
		case apierrors.IsNotFound(err):
			return 0, nil
		case apierrors.IsConflict(err) && attempt < attempts:
			continue
		}
		return c.refused(ctx, r, "delete", err)
	}
}

// pause returns how long nothing is deleted because the clocks are apart.
func (c *Controller) pause() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.paused.Sub(c.clock.Now())
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
	c.mu.Lock()
	first := !now.Before(c.paused)
	c.paused = now.Add(skewPause)
	c.mu.Unlock()
	if first {
		klog.FromContext(ctx).Error(nil, "The clock and the API server's are too far apart, so nothing is deleted",
			"ahead", skew.Round(time.Second), "flag", "--"+flagPrefix+"max-clock-skew")
	}
	return true
}

// take asks the breaker for a deletion.
func (c *Controller) take(ctx context.Context, now time.Time) time.Duration {
	c.mu.Lock()
	wait, opened := c.breaker.Take(now)
	c.mu.Unlock()
	if !opened {
		return wait
	}
	c.metrics.trips.Inc()
	overdue := map[string]int{}
	for _, s := range c.book.status(now) {
		if s.Overdue > 0 {
			overdue[s.Resource] = s.Overdue
		}
	}
	text := fmt.Sprintf("%d objects were deleted within a minute and more are due; nothing is deleted for %v", c.cfg.MaxDeletionsPerMinute, wait)
	klog.FromContext(ctx).Error(nil, "The breaker has opened: "+text, "overdue", overdue, "flag", "--"+flagPrefix+"max-deletions-per-minute")
	if pod := c.cfg.Pod; pod.Name != "" {
		c.events.Event(&corev1.ObjectReference{APIVersion: "v1", Kind: "Pod", Namespace: pod.Namespace, Name: pod.Name},
			corev1.EventTypeWarning, reasonBreaker, text)
	}
	return wait
}

// giveBack tells the breaker that an object was not deleted, if that is certain.
func (c *Controller) giveBack(err error) {
	if status := apierrors.APIStatus(nil); errors.As(err, &status) || controllers.IsNotLeading(err) {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.breaker.Return()
	}
}

func (c *Controller) deleted(ctx context.Context, r *entry, d *policy.Decision) {
	klog.FromContext(ctx).V(2).Info("Deleted", "annotation", d.Key, "value", d.Value, "deadline", d.Deadline)
	c.metrics.deletion(r, resultDeleted)
	c.metrics.lag.Observe(c.clock.Since(d.Deadline).Seconds())
	c.book.change(r, func(r *entry) { r.failures, r.deadline = 0, time.Time{} })
	c.event(r, corev1.EventTypeNormal, reasonDeleted, "deleted because of "+because(d))
}

// would tells once what a dry run does not delete.
func (c *Controller) would(ctx context.Context, r *entry, d *policy.Decision) {
	told := false
	c.book.change(r, func(r *entry) { told, r.would = r.would.Equal(d.Deadline), d.Deadline })
	if told {
		return
	}
	klog.FromContext(ctx).Info("Dry run: would delete", "annotation", d.Key, "value", d.Value, "deadline", d.Deadline)
	c.metrics.deletion(r, resultDryRun)
	c.event(r, corev1.EventTypeNormal, reasonWould, "would be deleted because of "+because(d))
}

func because(d *policy.Decision) string {
	return fmt.Sprintf("%s=%s, due at %s", d.Key, d.Value, d.Deadline.UTC().Format(time.RFC3339))
}

// refused returns when to try again after an error.
func (c *Controller) refused(ctx context.Context, r *entry, operation string, err error) (time.Duration, error) {
	if controllers.IsNotLeading(err) {
		return 0, err
	}
	n := c.book.failed(r, operation, err)
	if operation == "delete" {
		c.metrics.deletion(r, resultFailed)
	}
	backoff := func(first, last time.Duration) time.Duration { return min(first<<min(n-1, 10), last) }
	err = fmt.Errorf("%s %s: %w", operation, r.key, err)
	switch {
	case apierrors.IsForbidden(err):
		c.tellFailure(ctx, r, err)
		return backoff(minForbidden, maxForbidden), nil
	case apierrors.IsConflict(err):
		return backoff(minConflict, maxConflict), nil
	case n >= tellAfter:
		c.tellFailure(ctx, r, err)
	}
	return 0, err // the loop waits longer each time, and as long as the API server asks for
}

// tellFailure tells an owner that the object cannot be deleted, once an hour.
func (c *Controller) tellFailure(ctx context.Context, r *entry, err error) {
	now, due := c.clock.Now(), false
	c.book.change(r, func(r *entry) {
		if due = r.failedAt.IsZero() || now.Sub(r.failedAt) >= tellAgain; due {
			r.failedAt = now
		}
	})
	if due {
		klog.FromContext(ctx).Info("Warning: Cannot delete what has expired", "reason", err.Error())
		c.event(r, corev1.EventTypeWarning, reasonFailed, err.Error())
	}
}

// warn tells an owner the warnings of a decision, each once for the same object and annotations.
func (c *Controller) warn(r *entry, d *policy.Decision) {
	for _, w := range d.Warnings {
		if !c.book.tell(r, w.Reason+w.Key) {
			continue
		}
		if w.Reason == policy.InvalidTTL {
			c.metrics.invalid.WithLabelValues(w.Key).Inc()
		}
		c.event(r, corev1.EventTypeWarning, w.Reason, w.Text)
	}
}

func (c *Controller) event(r *entry, eventType, reason, text string) {
	c.events.Event(&corev1.ObjectReference{
		APIVersion: r.kind.GroupVersion().String(), Kind: r.kind.Kind, Namespace: r.Namespace, Name: r.Name, UID: r.obj.GetUID(),
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
