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
	// The delays after a refusal: permissions seldom change soon.
	minForbidden = 5 * time.Minute
	maxForbidden = time.Hour
	// noticeInterval is the time after which an owner is told again of a refusal.
	noticeInterval = time.Hour
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
	// serverTime reads the workload for the time on the server's clock, which is zero if that is unknown.
	serverTime(ctx context.Context, key objectKey) (time.Time, error)
	patch(ctx context.Context, key objectKey, patch []byte) error
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

func (a api) serverTime(ctx context.Context, key objectKey) (date time.Time, err error) {
	ctx = context.WithValue(ctx, dateKey{}, &date)
	_, err = a.client.Resource(key.resource).Namespace(key.Namespace).Get(ctx, key.Name, metav1.GetOptions{})
	return date, err
}

func (a api) patch(ctx context.Context, key objectKey, patch []byte) error {
	_, err := a.client.Resource(key.resource).Namespace(key.Namespace).
		Patch(ctx, key.Name, types.MergePatchType, patch, metav1.PatchOptions{FieldManager: fieldManager})
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
func (c *controller) write(ctx context.Context, workload *workloadState, plan *policy.Plan) (time.Duration, error) {
	wait, err := c.clockPause(ctx, workload)
	if err != nil {
		return c.handleFailure(ctx, workload, plan, "get", err)
	}
	if wait > 0 {
		return wait, nil
	}
	// The worker waits for the limiter here, and does not requeue the key: so the queue's order decides who is
	// next, and a tenant with many workloads delays nobody.
	if err := c.limiter.Wait(ctx); err != nil {
		return 0, err
	}
	patch := c.evaluator.Patch(workload.Object, workload.Kind, plan, workload.version)
	if err := c.objects.patch(ctx, workload.objectKey, patch); err != nil {
		return c.handleFailure(ctx, workload, plan, "patch", err)
	}
	now := time.Now()
	c.memory.update(workload.objectKey, workload.uid, func(e *entry) {
		e.failures = 0
		switch {
		case plan.Repeated:
			e.Contests++
			e.RaisedAt = time.Time{}
		case plan.Action == policy.RestoreRecord:
			e.RecordRestored, e.LostRecord = true, 0
		}
	})
	c.metrics.countWrite(workload.Kind, plan.Action, resultSuccess)
	klog.FromContext(ctx).V(2).Info("Scaled a workload", "direction", direction(plan.Action), "from", workload.Number,
		"to", plan.Number, "record", plan.Record)
	if plan.Action == policy.ScaleDown && !plan.Repeated || plan.Action == policy.ScaleUp {
		if boundary, known := c.evaluator.LastBoundary(workload.Object, workload.namespace, now, lagWindow); known {
			c.metrics.lag.Observe(now.Sub(boundary).Seconds())
		}
	}
	if reason, text := planEvent(workload, plan, reasonDown, reasonUp); reason != "" {
		c.events.Event(workload.reference(), corev1.EventTypeNormal, reason, text)
	}
	return 0, nil
}

// planEvent returns the reason and the text of the Event of a plan; no reason if it only concerns the record.
func planEvent(workload *workloadState, plan *policy.Plan, downReason, upReason string) (reason, text string) {
	switch plan.Action {
	case policy.ScaleDown:
		reason = downReason
	case policy.ScaleUp:
		reason = upReason
	default:
		return "", ""
	}
	return reason, fmt.Sprintf("from %s to %s by its schedule", policy.DescribeNumber(workload.Kind, workload.Number),
		policy.DescribeNumber(workload.Kind, plan.Number))
}

// reportDryRun reports the write that a dry run omits, unless the last report was of the same action.
func (c *controller) reportDryRun(ctx context.Context, workload *workloadState, plan *policy.Plan, reported policy.Action) {
	if plan.Action == reported {
		return
	}
	c.memory.update(workload.objectKey, workload.uid, func(e *entry) { e.dryRunAction = plan.Action })
	if reason, text := planEvent(workload, plan, reasonWouldDown, reasonWouldUp); reason != "" {
		klog.FromContext(ctx).Info("Dry run: would scale", "change", text)
		c.metrics.countWrite(workload.Kind, plan.Action, resultDryRun)
		c.events.Event(workload.reference(), corev1.EventTypeNormal, reason, text)
	}
}

// clockPause returns how long writes must wait because this clock and the API server's are too far apart; 0
// means not at all. It asks for the API server's clock once a minute.
func (c *controller) clockPause(ctx context.Context, workload *workloadState) (time.Duration, error) {
	if c.cfg.MaxClockSkew == 0 {
		return 0, nil
	}
	now := time.Now()
	c.mu.Lock()
	pause, fresh := c.writesAfter.Sub(now), now.Sub(c.clockCheckedAt) < clockInterval
	c.mu.Unlock()
	if pause > 0 || fresh {
		return max(pause, 0), nil
	}
	date, err := c.objects.serverTime(ctx, workload.objectKey)
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

// handleFailure counts and reports the error of a request, and returns when to try again.
func (c *controller) handleFailure(
	ctx context.Context, workload *workloadState, plan *policy.Plan, operation string, err error,
) (time.Duration, error) {
	switch {
	case controllers.IsNotLeading(err), ctx.Err() != nil:
		return 0, err
	case apierrors.IsNotFound(err):
		return 0, nil
	}
	err = fmt.Errorf("%s %s: %w", operation, workload.objectKey, err)
	if apierrors.IsConflict(err) {
		c.metrics.countWrite(workload.Kind, plan.Action, resultConflict)
		return 0, err // the event of the change comes first
	}
	c.metrics.countWrite(workload.Kind, plan.Action, resultError)
	if !apierrors.IsForbidden(err) && !apierrors.IsInvalid(err) && !apierrors.IsBadRequest(err) {
		return 0, err // the loop waits longer each time, and as long as the API server asks for
	}
	if c.repeatedNotices.Due(workload.uid, time.Now()) {
		klog.FromContext(ctx).Error(err, "Cannot scale a workload")
		c.events.Event(workload.reference(), corev1.EventTypeWarning, reasonFailed, err.Error())
	}
	failures := 0
	c.memory.update(workload.objectKey, workload.uid, func(e *entry) {
		failures = e.failures
		e.failures++
	})
	return min(minForbidden<<min(failures, 10), maxForbidden), nil
}

// warnOwner tells the owner of a workload, or of a Namespace, of a problem once.
func (c *controller) warnOwner(workload *workloadState, problem *policy.Problem) {
	subject := workload.reference()
	if problem.Scope == policy.ScopeNamespace {
		subject = &corev1.ObjectReference{APIVersion: "v1", Kind: "Namespace", Name: workload.Namespace}
		if obj, exists := c.namespaces.informer.Get(cache.NewObjectName("", workload.Namespace)); exists {
			subject.UID = obj.GetUID()
		}
	}
	if !c.onceNotices.Due([3]string{string(subject.UID), problem.Reason, problem.Text}, time.Now()) {
		return
	}
	if problem.Reason == policy.InvalidSchedule {
		c.metrics.invalid.WithLabelValues(problem.Key.String()).Inc()
	}
	c.events.Event(subject, corev1.EventTypeWarning, problem.Reason, problem.Text)
}

// reference returns the object that an Event is about.
func (w *workloadState) reference() *corev1.ObjectReference {
	return &corev1.ObjectReference{APIVersion: w.resource.GroupVersion().String(), Kind: string(w.Kind), Namespace: w.Namespace, Name: w.Name, UID: w.uid}
}
