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

// outcome is the result of a reload.
type outcome struct {
	// version is the workload's resourceVersion if it was written.
	version string
	// skipped is why nothing was rolled although the state is recorded.
	skipped string
	// wait is set if nothing was done; decide again after this time.
	wait time.Duration
	// handedOn is set if the rest is done, and reported, by recreateJob.
	handedOn bool
}

// reload does what is due and then reports it.
func (c *controller) reload(ctx context.Context, k *kind, f *policy.Facts, p *policy.Plan, e *entry, last bool) (time.Duration, error) {
	w := f.Workload
	names := namesOf(w, p)
	if c.cfg.DryRun {
		if w.Suspended && !p.ByName() {
			c.announce(ctx, k, w, reasonSkipped, suspended+", would not reload for "+names, resultSkipped)
		} else {
			c.announce(ctx, k, w, reasonWouldReload, "Would reload for "+names, resultDryRun)
		}
		c.done(w, p, e, "")
		return 0, nil
	}
	out, err := k.reload(ctx, k, f, p, e)
	switch {
	case outdated(err) && !last, controllers.IsNotLeading(err), err != nil && ctx.Err() != nil:
		return 0, err // not a failure of this reload: it is decided on again
	case err != nil:
		c.metrics.reloads.WithLabelValues(k.Name, resultError).Inc()
		c.events.Eventf(reference(k, w), corev1.EventTypeWarning, reasonFailed, "Reload for %s failed: %s", policy.Truncate(names), policy.Truncate(err.Error()))
		return 0, fmt.Errorf("reload %s: %w", w.QueueKey, err)
	case out.handedOn:
		return settle, nil
	case out.wait > 0:
		c.tellOfWait(ctx, k, f, names)
		return out.wait, nil
	case out.skipped != "":
		c.announce(ctx, k, w, reasonSkipped, out.skipped+", not reloaded for "+names, resultSkipped)
	default:
		c.announce(ctx, k, w, reasonReloaded, "Reloaded for "+names, resultSuccess)
		c.metrics.lag.Observe(time.Since(f.Window.First).Seconds())
		if bad := f.Selection.BadPause; bad != nil && k.Pauses {
			c.events.Event(reference(k, w), corev1.EventTypeWarning, reasonInvalidPause, "Reloaded without a pause: "+bad.String())
		}
	}
	c.done(w, p, e, out.version)
	return 0, nil
}

// outdated reports whether the workload has changed or is gone. Admission may return the same
// errors for other reasons, so a live read has to confirm it.
func outdated(err error) bool { return apierrors.IsConflict(err) || apierrors.IsNotFound(err) }

// errOutdated makes reconcile decide again on the live object.
func errOutdated(w *policy.Workload) error {
	return apierrors.NewConflict(schema.GroupResource{Resource: w.QueueKey.Kind}, w.Name, fmt.Errorf("is not at version %s any more", w.Version))
}

// refused reports whether a request certainly changed nothing.
func refused(err error) bool {
	var status apierrors.APIStatus
	if !errors.As(err, &status) {
		return controllers.IsNotLeading(err) && !controllers.IsOutcomeUnknown(err) // other errors may be broken connections
	}
	code := status.Status().Code
	return code >= 400 && code < 500 && code != http.StatusRequestTimeout
}

// patchTemplate reloads a workload by one patch of its pod template.
func (c *controller) patchTemplate(ctx context.Context, k *kind, f *policy.Facts, p *policy.Plan, _ *entry) (outcome, error) {
	version, err := c.patch(ctx, k, f.Workload, types.StrategicMergePatchType, c.cfg.TemplatePatch(f, c.keys, p))
	return outcome{version: version}, err
}

// patch sends a patch and returns the new version.
func (c *controller) patch(ctx context.Context, k *kind, w *policy.Workload, as types.PatchType, patch any) (string, error) {
	data, err := json.Marshal(patch)
	if err != nil {
		return "", fmt.Errorf("marshal patch: %w", err)
	}
	return k.patch(ctx, w.ObjectName, as, data)
}

// done notes that a plan was carried out: its state is recorded by the write that made version, by an
// earlier write, or in memory.
func (c *controller) done(w *policy.Workload, p *policy.Plan, e *entry, version string) {
	now := time.Now()
	c.memory.update(w.QueueKey, w.UID, now, func(live *entry) {
		if !p.Pending {
			live.window.Close(&e.window, now)
			live.job.ranFor = nil
		}
		if version != "" && version != w.Version {
			live.written = version
		}
		// A workload that never had anything to record takes no memory.
		if len(p.State) > 0 || version != "" || live.last != "" {
			live.last = p.State.Text(w.QueueKey, w.Version)
		}
	})
}

// record writes the state alone, if it differs from the state on the workload.
func (c *controller) record(ctx context.Context, k *kind, f *policy.Facts, p *policy.Plan, e *entry, last bool) (time.Duration, error) {
	w, now := f.Workload, f.Now
	if p.Found {
		c.memory.update(w.QueueKey, w.UID, now, func(live *entry) { live.window.Open(now) })
	}
	if p.State == nil {
		return p.After, nil
	}
	patch, changes := policy.MetadataPatch(w, p.State)
	if c.inMemory(w) || !changes {
		c.done(w, p, e, "")
		return p.After, nil
	}
	// Somebody else has changed the record. A tool that changes it again and again must not cause a
	// write each time.
	others := e.last != "" && !f.Recorded.IsRecordedOn(w)
	if left := e.rewritten.Add(rewriteInterval).Sub(now); others && !e.rewritten.IsZero() && left > 0 {
		c.done(w, p, e, "")
		return soonest(p.After, left), nil
	}
	version, err := c.patch(ctx, k, w, k.merge, patch)
	switch {
	case outdated(err) && !last, controllers.IsNotLeading(err), err != nil && ctx.Err() != nil:
		return 0, err // not a failure: it is decided on again
	case err != nil:
		c.metrics.stateWrites.WithLabelValues(resultError).Inc()
		c.events.Eventf(reference(k, w), corev1.EventTypeWarning, reasonNotRecorded,
			"The state of its sources could not be recorded, so a change while no manager runs may be missed: %s", policy.Truncate(err.Error()))
		return 0, fmt.Errorf("record state of %s: %w", w.QueueKey, err)
	}
	c.metrics.stateWrites.WithLabelValues(resultSuccess).Inc()
	workloadLogger(ctx, w).V(2).Info("State recorded", "sources", len(p.State))
	c.done(w, p, e, version)
	if others {
		c.memory.update(w.QueueKey, w.UID, now, func(live *entry) { live.rewritten = now })
	}
	return p.After, nil
}

// endPause resumes a Deployment, or removes the time of a pause that is over.
func (c *controller) endPause(ctx context.Context, k *kind, w *policy.Workload, step policy.PauseStep) error {
	version, err := c.patch(ctx, k, w, k.merge, c.keys.PausePatch(w, step))
	if err != nil {
		return fmt.Errorf("end pause of %s: %w", w.QueueKey, err)
	}
	workloadLogger(ctx, w).V(2).Info("Pause ended", "resumed", step == policy.PauseEnds)
	c.memory.update(w.QueueKey, w.UID, time.Now(), func(live *entry) {
		if version != w.Version {
			live.written = version
		}
	})
	return nil
}

// report reports annotations that could not be parsed, once for each set of them.
func (c *controller) report(ctx context.Context, k *kind, w *policy.Workload, e *entry, problems []policy.Problem) {
	texts := make([]string, len(problems))
	for i, p := range problems {
		texts[i] = p.String()
	}
	all := strings.Join(texts, "\n")
	if all == e.reported {
		return
	}
	for _, text := range texts {
		if strings.Contains(e.reported, text) {
			continue
		}
		c.metrics.invalid.Inc()
		workloadLogger(ctx, w).V(2).Info("Annotation is invalid", "problem", text)
		c.events.Event(reference(k, w), corev1.EventTypeWarning, reasonInvalid, text)
	}
	c.memory.update(w.QueueKey, w.UID, time.Now(), func(live *entry) { live.reported = all })
}

// announce logs, counts and records one Normal Event for all reloads of a plan.
func (c *controller) announce(ctx context.Context, k *kind, w *policy.Workload, reason, text, result string) {
	level := 2
	if result == resultDryRun {
		level = 0 // a dry run leaves nothing but this line
	}
	workloadLogger(ctx, w).V(level).Info("Handled a reload", "result", result, "detail", text)
	c.metrics.reloads.WithLabelValues(k.Name, result).Inc()
	c.events.Event(reference(k, w), corev1.EventTypeNormal, reason, policy.Truncate(text))
}

// tellOfWait sends one Event that a reload waits for the end of a Job, which may take forever.
func (c *controller) tellOfWait(ctx context.Context, k *kind, f *policy.Facts, names string) {
	w := f.Workload
	if f.Window.Waits {
		return
	}
	workloadLogger(ctx, w).V(2).Info("Reload waits for a Job to finish")
	c.events.Eventf(reference(k, w), corev1.EventTypeNormal, reasonWaits, "A Job is active and concurrencyPolicy is Forbid, waits to reload for %s", policy.Truncate(names))
	c.memory.update(w.QueueKey, w.UID, f.Now, func(live *entry) { live.window.Waits = true })
}

// namesOf returns type, name and namespace of the reloads' sources.
func namesOf(w *policy.Workload, p *policy.Plan) string {
	list := make([]string, len(p.Reloads))
	for i, r := range p.Reloads {
		list[i] = r.Key.Type.Kind() + " " + w.Namespace + "/" + r.Key.Name
	}
	return strings.Join(list, ", ")
}

// reference returns the object that an Event is about.
func reference(k *kind, w *policy.Workload) *corev1.ObjectReference {
	return &corev1.ObjectReference{
		APIVersion: k.resource.GroupVersion().String(), Kind: k.Name,
		Namespace: w.Namespace, Name: w.Name, UID: w.UID, ResourceVersion: w.Version,
	}
}
