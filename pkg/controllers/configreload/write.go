// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package configreload

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/configreload/policy"
)

// The reasons of Events.
const (
	reasonReloaded     = "Reloaded"
	reasonFailed       = "ReloadFail"
	reasonWouldReload  = "WouldReload"
	reasonSkipped      = "ReloadSkipped"
	reasonWaits        = "ReloadWaits"
	reasonNotRecorded  = "ReloadStateFail"
	reasonInvalid      = "InvalidReloadAnnotation"
	reasonInvalidPause = "InvalidPausePeriod"
)

// reloadOutcome is the result of a reload.
type reloadOutcome struct {
	// version is the workload's resourceVersion if it was written.
	version string
	// skipReason is why nothing was rolled although the state is recorded.
	skipReason string
	// retryAfter is set if nothing was done; decide again after this time.
	retryAfter time.Duration
	// handedOn is set if the rest is done, and reported, by recreateJob.
	handedOn bool
}

// reloadWorkload does what is due and then reports it.
func (c *controller) reloadWorkload(ctx context.Context, k *kind, facts *policy.Facts, plan *policy.Plan, e *entry, last bool) (time.Duration, error) {
	workload := facts.Workload
	names := namesOf(workload, plan)
	if c.cfg.DryRun {
		if workload.Suspended && !plan.HasNamedSource() {
			c.announceReload(ctx, k, workload, reasonSkipped, suspended+", would not reload for "+names, resultSkipped)
		} else {
			c.announceReload(ctx, k, workload, reasonWouldReload, "Would reload for "+names, resultDryRun)
		}
		c.finishPlan(workload, plan, e, "")
		return 0, nil
	}
	out, err := k.reload(ctx, k, facts, plan, e)
	switch {
	case isOutdated(err) && !last, controllers.IsNotLeading(err), err != nil && ctx.Err() != nil:
		return 0, err // not a failure of this reload: the decision is made again
	case err != nil:
		c.metrics.reloads.WithLabelValues(k.Name, resultError).Inc()
		c.events.Eventf(reference(k, workload), corev1.EventTypeWarning, reasonFailed, "Reload for %s failed: %s", policy.Truncate(names), policy.Truncate(err.Error()))
		return 0, fmt.Errorf("reload %s: %w", workload.QueueKey, err)
	case out.handedOn:
		return settleDelay, nil
	case out.retryAfter > 0:
		c.reportWait(ctx, k, facts, names)
		return out.retryAfter, nil
	case out.skipReason != "":
		c.announceReload(ctx, k, workload, reasonSkipped, out.skipReason+", not reloaded for "+names, resultSkipped)
	default:
		c.announceReload(ctx, k, workload, reasonReloaded, "Reloaded for "+names, resultSuccess)
		c.metrics.lag.Observe(time.Since(facts.Window.First).Seconds())
		if bad := facts.Selection.BadPause; bad != nil && k.Pauses {
			c.events.Event(reference(k, workload), corev1.EventTypeWarning, reasonInvalidPause, "Reloaded without a pause: "+bad.String())
		}
	}
	c.finishPlan(workload, plan, e, out.version)
	return 0, nil
}

// isOutdated reports whether the workload has changed or is gone. Admission may return the same errors for
// other reasons, so a live read has to confirm the change.
func isOutdated(err error) bool { return apierrors.IsConflict(err) || apierrors.IsNotFound(err) }

// errOutdated makes reconcile decide again on the live object.
func errOutdated(workload *policy.Workload) error {
	return apierrors.NewConflict(schema.GroupResource{Resource: workload.QueueKey.Kind}, workload.Name, fmt.Errorf("is not at version %s any more", workload.Version))
}

// isRefusal reports whether a request certainly changed nothing.
func isRefusal(err error) bool {
	var status apierrors.APIStatus
	if !errors.As(err, &status) {
		return controllers.IsNotLeading(err) && !controllers.IsOutcomeUnknown(err) // other errors may mean a lost answer
	}
	code := status.Status().Code
	return code >= 400 && code < 500 && code != http.StatusRequestTimeout
}

// patchTemplate reloads a workload by one patch of its pod template.
func (c *controller) patchTemplate(ctx context.Context, k *kind, facts *policy.Facts, plan *policy.Plan, _ *entry) (reloadOutcome, error) {
	version, err := c.sendPatch(ctx, k, facts.Workload, types.StrategicMergePatchType, c.cfg.TemplatePatch(facts, c.keys, plan))
	return reloadOutcome{version: version}, err
}

// sendPatch sends a patch and returns the new version.
func (c *controller) sendPatch(ctx context.Context, k *kind, workload *policy.Workload, patchType types.PatchType, patch any) (string, error) {
	data, err := json.Marshal(patch)
	if err != nil {
		return "", fmt.Errorf("marshal patch: %w", err)
	}
	return k.patch(ctx, workload.ObjectName, patchType, data)
}

// finishPlan notes that a plan was carried out: its state is recorded by the write that made version, by an
// earlier write, or in memory.
func (c *controller) finishPlan(workload *policy.Workload, plan *policy.Plan, e *entry, version string) {
	now := time.Now()
	c.memory.update(workload.QueueKey, workload.UID, now, func(current *entry) {
		if !plan.Pending {
			current.window.Close(&e.window, now)
			current.lastRun.hashes = nil
		}
		if version != "" && version != workload.Version {
			current.writtenVersion = version
		}
		// A workload that never had anything to record takes no memory.
		if len(plan.State) > 0 || version != "" || current.lastState != "" {
			current.lastState = plan.State.Text(workload.QueueKey, workload.Version)
		}
	})
}

// recordState writes the state alone, if it differs from the state on the workload.
func (c *controller) recordState(ctx context.Context, k *kind, facts *policy.Facts, plan *policy.Plan, e *entry, last bool) (time.Duration, error) {
	workload, now := facts.Workload, facts.Now
	if plan.OpensWindow {
		c.memory.update(workload.QueueKey, workload.UID, now, func(current *entry) { current.window.Open(now) })
	}
	if plan.State == nil {
		return plan.RequeueAfter, nil
	}
	patch, changes := policy.MetadataPatch(workload, plan.State)
	if c.keepsStateInMemory(workload) || !changes {
		c.finishPlan(workload, plan, e, "")
		return plan.RequeueAfter, nil
	}
	// Somebody else has changed the record. A tool that changes it again and again must not cause a
	// write each time.
	changedByOthers := e.lastState != "" && !facts.RecordedState.IsRecordedOn(workload)
	if remaining := e.rewrittenAt.Add(rewriteInterval).Sub(now); changedByOthers && !e.rewrittenAt.IsZero() && remaining > 0 {
		c.finishPlan(workload, plan, e, "")
		return shorterDelay(plan.RequeueAfter, remaining), nil
	}
	version, err := c.sendPatch(ctx, k, workload, k.mergeType, patch)
	switch {
	case isOutdated(err) && !last, controllers.IsNotLeading(err), err != nil && ctx.Err() != nil:
		return 0, err // not a failure: the decision is made again
	case err != nil:
		c.metrics.stateWrites.WithLabelValues(resultError).Inc()
		c.events.Eventf(reference(k, workload), corev1.EventTypeWarning, reasonNotRecorded,
			"The state of its sources could not be recorded, so a change while no manager runs may be missed: %s", policy.Truncate(err.Error()))
		return 0, fmt.Errorf("record state of %s: %w", workload.QueueKey, err)
	}
	c.metrics.stateWrites.WithLabelValues(resultSuccess).Inc()
	workloadLogger(ctx, workload).V(2).Info("State recorded", "sources", len(plan.State))
	c.finishPlan(workload, plan, e, version)
	if changedByOthers {
		c.memory.update(workload.QueueKey, workload.UID, now, func(current *entry) { current.rewrittenAt = now })
	}
	return plan.RequeueAfter, nil
}

// endPause resumes a Deployment, or removes the time of a pause that is over.
func (c *controller) endPause(ctx context.Context, k *kind, workload *policy.Workload, step policy.PauseStep) error {
	version, err := c.sendPatch(ctx, k, workload, k.mergeType, c.keys.PausePatch(workload, step))
	if err != nil {
		return fmt.Errorf("end pause of %s: %w", workload.QueueKey, err)
	}
	workloadLogger(ctx, workload).V(2).Info("Pause ended", "resumed", step == policy.PauseEnds)
	c.memory.update(workload.QueueKey, workload.UID, time.Now(), func(current *entry) {
		if version != workload.Version {
			current.writtenVersion = version
		}
	})
	return nil
}

// reportProblems reports annotations that could not be parsed, once for each set of them.
func (c *controller) reportProblems(ctx context.Context, k *kind, workload *policy.Workload, e *entry, problems []policy.Problem) {
	texts := make([]string, len(problems))
	for i, p := range problems {
		texts[i] = p.String()
	}
	joined := strings.Join(texts, "\n")
	if joined == e.reportedProblems {
		return
	}
	for _, text := range texts {
		if strings.Contains(e.reportedProblems, text) {
			continue
		}
		c.metrics.invalidAnnotations.Inc()
		workloadLogger(ctx, workload).V(2).Info("Annotation is invalid", "problem", text)
		c.events.Event(reference(k, workload), corev1.EventTypeWarning, reasonInvalid, text)
	}
	c.memory.update(workload.QueueKey, workload.UID, time.Now(), func(current *entry) { current.reportedProblems = joined })
}

// announceReload logs, counts and records one Normal Event for all reloads of a plan.
func (c *controller) announceReload(ctx context.Context, k *kind, workload *policy.Workload, reason, text, result string) {
	level := 2
	if result == resultDryRun {
		level = 0 // a dry run leaves nothing but this line
	}
	workloadLogger(ctx, workload).V(level).Info("Handled a reload", "result", result, "detail", text)
	c.metrics.reloads.WithLabelValues(k.Name, result).Inc()
	c.events.Event(reference(k, workload), corev1.EventTypeNormal, reason, policy.Truncate(text))
}

// reportWait sends one Event that a reload waits for the end of a Job, which may take forever.
func (c *controller) reportWait(ctx context.Context, k *kind, facts *policy.Facts, names string) {
	workload := facts.Workload
	if facts.Window.WaitReported {
		return
	}
	workloadLogger(ctx, workload).V(2).Info("Reload waits for a Job to finish")
	c.events.Eventf(reference(k, workload), corev1.EventTypeNormal, reasonWaits, "A Job is active and concurrencyPolicy is Forbid, waits to reload for %s", policy.Truncate(names))
	c.memory.update(workload.QueueKey, workload.UID, facts.Now, func(current *entry) { current.window.WaitReported = true })
}

// namesOf returns type, name and namespace of the reloads' sources.
func namesOf(workload *policy.Workload, plan *policy.Plan) string {
	list := make([]string, len(plan.Reloads))
	for i, r := range plan.Reloads {
		list[i] = r.Key.Type.Kind() + " " + workload.Namespace + "/" + r.Key.Name
	}
	return strings.Join(list, ", ")
}

// reference returns the object that an Event is about.
func reference(k *kind, workload *policy.Workload) *corev1.ObjectReference {
	return &corev1.ObjectReference{
		APIVersion: k.resource.GroupVersion().String(), Kind: k.Name,
		Namespace: workload.Namespace, Name: workload.Name, UID: workload.UID, ResourceVersion: workload.Version,
	}
}
