// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package scaleschedule

import (
	"context"
	"fmt"
	"net/http"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/scaleschedule/policy"
)

const (
	// fieldManager is this controller's name in managedFields.
	fieldManager = "quartermaster-scale-schedule"
	// requestTimeout keeps an API that does not answer from occupying the workers.
	requestTimeout = 10 * time.Second
	// maxBackoff is how long a failed write waits at most. After a conflict, the event of the change comes
	// sooner.
	maxBackoff = time.Minute
	// What the API server refuses is seldom allowed soon.
	minForbidden = 5 * time.Minute
	maxForbidden = time.Hour
	// tellAgain is the time after which an owner is told again of a refusal.
	tellAgain = time.Hour
	// clockInterval is how long a comparison of the clocks holds, and how long nothing is written if they
	// differ.
	clockInterval = time.Minute
	// lagWindow is how long after a boundary a write counts as late for the metric.
	lagWindow = time.Hour
)

// The reasons of Events, besides the reasons of package policy.
const (
	reasonDown      = "ScaledDown"
	reasonUp        = "ScaledUp"
	reasonWouldDown = "WouldScaleDown"
	reasonWouldUp   = "WouldScaleUp"
	reasonFailed    = "FailedToScale"
)

// objects asks the API server.
type objects interface {
	// date returns the time on the server's clock, zero if that is unknown. It reads the workload for it.
	date(ctx context.Context, k key) (time.Time, error)
	patch(ctx context.Context, k key, patch []byte) error
}

// api implements objects. It reads and writes metadata, so that no workload is sent back.
type api struct{ client metadata.Interface }

func newAPI(config *rest.Config) (api, error) {
	config = rest.CopyConfig(config)
	config.Timeout = requestTimeout
	config.Wrap(func(next http.RoundTripper) http.RoundTripper { return dateReader{next} })
	client, err := metadata.NewForConfig(config)
	return api{client}, err
}

func (a api) date(ctx context.Context, k key) (date time.Time, err error) {
	ctx = context.WithValue(ctx, dateKey{}, &date)
	_, err = a.client.Resource(k.resource).Namespace(k.Namespace).Get(ctx, k.Name, metav1.GetOptions{})
	return date, err
}

func (a api) patch(ctx context.Context, k key, patch []byte) error {
	_, err := a.client.Resource(k.resource).Namespace(k.Namespace).
		Patch(ctx, k.Name, types.MergePatchType, patch, metav1.PatchOptions{FieldManager: fieldManager})
	return err
}

type dateKey struct{}

// dateReader notes the date of a response where the request's context asks for it.
type dateReader struct{ http.RoundTripper }

// RoundTrip implements http.RoundTripper.
func (r dateReader) RoundTrip(req *http.Request) (*http.Response, error) {
	response, err := r.RoundTripper.RoundTrip(req)
	if date, ok := req.Context().Value(dateKey{}).(*time.Time); ok && err == nil {
		*date, _ = http.ParseTime(response.Header.Get("Date")) // zero if there is none
	}
	return response, err
}

// write writes what is planned, and returns when to look again.
func (c *controller) write(ctx context.Context, w *workload, p *policy.Plan) (time.Duration, error) {
	wait, err := c.clocksDiffer(ctx, w)
	if err != nil {
		return c.refused(ctx, w, p, "get", err)
	}
	if wait > 0 {
		return wait, nil
	}
	// The worker waits for its turn, not the key: so the queue's order decides who is next, and a tenant
	// with many workloads delays nobody.
	if err := c.limiter.Wait(ctx); err != nil {
		return 0, err
	}
	if err := c.objects.patch(ctx, w.key, c.evaluator.Patch(w.Object, w.Kind, p, w.version)); err != nil {
		return c.refused(ctx, w, p, "patch", err)
	}
	now := time.Now()
	c.memory.update(w.key, w.uid, func(e *entry) {
		e.failures = 0
		switch {
		case p.Again:
			e.Contests++
			e.Raised = time.Time{}
		case p.Do == policy.PutBack:
			e.PutBack, e.Lost = true, 0
		}
	})
	c.metrics.wrote(w.Kind, p.Do, resultSuccess)
	klog.FromContext(ctx).V(2).Info("Scaled a workload", "direction", direction(p.Do), "from", w.Number, "to", p.Number, "record", p.Record)
	if p.Do == policy.ScaleDown && !p.Again || p.Do == policy.ScaleUp {
		if since, known := c.evaluator.Since(w.Object, w.namespace, now, lagWindow); known {
			c.metrics.lag.Observe(now.Sub(since).Seconds())
		}
	}
	if reason, text := describe(w, p, reasonDown, reasonUp); reason != "" {
		c.events.Event(w.reference(), corev1.EventTypeNormal, reason, text)
	}
	return 0, nil
}

// describe returns the reason and the text of the Event of a plan; no reason if it only concerns the record.
func describe(w *workload, p *policy.Plan, down, up string) (reason, text string) {
	switch p.Do {
	case policy.ScaleDown:
		reason = down
	case policy.ScaleUp:
		reason = up
	default:
		return "", ""
	}
	return reason, fmt.Sprintf("from %s to %s by its schedule", policy.Describe(w.Kind, w.Number), policy.Describe(w.Kind, p.Number))
}

// wouldWrite tells what a dry run does not write, once until something else is planned.
func (c *controller) wouldWrite(ctx context.Context, w *workload, p *policy.Plan, announced policy.Action) {
	if p.Do == announced {
		return
	}
	c.memory.update(w.key, w.uid, func(e *entry) { e.announced = p.Do })
	if reason, text := describe(w, p, reasonWouldDown, reasonWouldUp); reason != "" {
		klog.FromContext(ctx).Info("Dry run: would scale", "change", text)
		c.metrics.wrote(w.Kind, p.Do, resultDryRun)
		c.events.Event(w.reference(), corev1.EventTypeNormal, reason, text)
	}
}

// clocksDiffer returns how long nothing is written since this clock and the API server's are too far apart.
// It asks for the API server's clock once a minute.
func (c *controller) clocksDiffer(ctx context.Context, w *workload) (time.Duration, error) {
	if c.cfg.MaxClockSkew == 0 {
		return 0, nil
	}
	now := time.Now()
	c.mu.Lock()
	rests, fresh := c.writesAfter.Sub(now), now.Sub(c.clockCheckedAt) < clockInterval
	c.mu.Unlock()
	if rests > 0 || fresh {
		return max(rests, 0), nil
	}
	date, err := c.objects.date(ctx, w.key)
	if err != nil {
		return 0, err
	}
	now = time.Now()
	skew := now.Sub(date.Add(time.Second / 2)) // dates are in whole seconds
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.clockCheckedAt = now; date.IsZero() {
		return 0, nil
	}
	c.metrics.skew.Set(skew.Seconds())
	if skew.Abs() <= c.cfg.MaxClockSkew+time.Second/2 {
		return 0, nil
	}
	c.writesAfter = now.Add(clockInterval)
	klog.FromContext(ctx).Error(nil, "The clocks of the manager and the API server differ too much, so nothing is scaled for a minute",
		"ahead", skew.Round(time.Second), "flag", "--"+flagPrefix+"max-clock-skew")
	return clockInterval, nil
}

// refused returns when to try again after an error.
func (c *controller) refused(ctx context.Context, w *workload, p *policy.Plan, operation string, err error) (time.Duration, error) {
	switch {
	case controllers.IsNotLeading(err), ctx.Err() != nil:
		return 0, err
	case apierrors.IsNotFound(err):
		return 0, nil
	}
	err = fmt.Errorf("%s %s: %w", operation, w.key, err)
	if apierrors.IsConflict(err) {
		c.metrics.wrote(w.Kind, p.Do, resultConflict)
		return 0, err // the event of the change comes first
	}
	c.metrics.wrote(w.Kind, p.Do, resultError)
	if !apierrors.IsForbidden(err) && !apierrors.IsInvalid(err) && !apierrors.IsBadRequest(err) {
		return 0, err // the loop waits longer each time, and as long as the API server asks for
	}
	if c.repeatedNotices.Due(w.uid, time.Now()) {
		klog.FromContext(ctx).Error(err, "Cannot scale a workload")
		c.events.Event(w.reference(), corev1.EventTypeWarning, reasonFailed, err.Error())
	}
	failures := 0
	c.memory.update(w.key, w.uid, func(e *entry) {
		failures = e.failures
		e.failures++
	})
	return min(minForbidden<<min(failures, 10), maxForbidden), nil
}

// warn tells the owner of a workload, or of a Namespace, of a problem once.
func (c *controller) warn(w *workload, p *policy.Problem) {
	about := w.reference()
	if p.Scope == policy.OfNamespace {
		about = &corev1.ObjectReference{APIVersion: "v1", Kind: "Namespace", Name: w.Namespace}
		if obj, exists := c.namespaces.informer.Get(cache.NewObjectName("", w.Namespace)); exists {
			about.UID = obj.GetUID()
		}
	}
	if !c.onceNotices.Due([3]string{string(about.UID), p.Reason, p.Text}, time.Now()) {
		return
	}
	if p.Reason == policy.InvalidSchedule {
		c.metrics.invalid.WithLabelValues(p.Key.String()).Inc()
	}
	c.events.Event(about, corev1.EventTypeWarning, p.Reason, p.Text)
}

// reference returns the object that an Event is about.
func (w *workload) reference() *corev1.ObjectReference {
	return &corev1.ObjectReference{APIVersion: w.resource.GroupVersion().String(), Kind: string(w.Kind), Namespace: w.Namespace, Name: w.Name, UID: w.uid}
}
