// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package configreload

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
)

// The reasons of Events.
const (
	reasonReloaded     = "Reloaded"
	reasonFailed       = "ReloadFail"
	reasonWould        = "WouldReload"
	reasonSkipped      = "ReloadSkipped"
	reasonWaits        = "ReloadWaits"
	reasonInvalid      = "InvalidReloadAnnotation"
	reasonInvalidPause = "InvalidPausePeriod"
	reasonTooLarge     = "ReloadStateTooLarge"
)

// outcome is the result of a reload.
type outcome struct {
	// version is the workload's resourceVersion if it was written.
	version string
	// skipped is why nothing was rolled although the state is recorded.
	skipped string
	// wait is set if nothing was done; decide again after this time.
	wait time.Duration
	// after is set if it was done and something is left to do after this time.
	after time.Duration
	// replaced is set if the workload is now another object, of which nothing is known.
	replaced bool
}

// reload does what is due and then reports it.
func (c *Controller) reload(ctx context.Context, k *kind, f *facts, p *plan, e *entry, last bool) (time.Duration, error) {
	w := f.workload
	if c.cfg.DryRun {
		if why := p.skipsCronJob(w); why != "" {
			c.announce(ctx, k, f, p, reasonSkipped, why+", would not reload for ", resultSkipped)
		} else {
			c.announce(ctx, k, f, p, reasonWould, "Would reload for ", resultDryRun)
		}
		c.done(w, p, e, "")
		return 0, nil
	}
	out, err := c.write(ctx, k, f, p)
	switch {
	case outdated(err) && !last, controllers.IsNotLeading(err), err != nil && ctx.Err() != nil:
		return 0, err // not a failure of this reload: it is decided on again
	case err != nil:
		c.metrics.reloads.WithLabelValues(w.kind, resultError).Inc()
		c.events.Eventf(w.reference(k), corev1.EventTypeWarning, reasonFailed, "Reload for %s failed: %s", cut(p.names(w)), cut(err.Error()))
		return 0, fmt.Errorf("reload %s: %w", w.workloadKey, err)
	case out.wait > 0:
		c.tellOfWait(ctx, k, f, p)
		return out.wait, nil
	case out.skipped != "":
		c.announce(ctx, k, f, p, reasonSkipped, out.skipped+", not reloaded for ", resultSkipped)
	default:
		c.announce(ctx, k, f, p, reasonReloaded, "Reloaded for ", resultSuccess)
		c.metrics.changeToPatch.Observe(c.clock.Now().Sub(f.window.first).Seconds())
		if _, bad := c.keys.pausePeriod(w, &f.rules); bad != nil {
			c.events.Event(w.reference(k), corev1.EventTypeWarning, reasonInvalidPause, "Reloaded without a pause: "+bad.String())
		}
	}
	if !out.replaced {
		c.done(w, p, e, out.version)
	}
	return out.after, nil
}

// outdated reports whether the workload has changed or is gone. Admission may return the same
// errors for other reasons, so a live read has to confirm it.
func outdated(err error) bool { return apierrors.IsConflict(err) || apierrors.IsNotFound(err) }

// write sends the writes of a reload, as its kind requires.
func (c *Controller) write(ctx context.Context, k *kind, f *facts, p *plan) (outcome, error) {
	switch f.workload.kind {
	case "CronJob":
		return c.runCronJob(ctx, k, f, p)
	case "Job":
		return c.replaceJob(ctx, f, p)
	case "Rollout":
		return c.patchRollout(ctx, k, f, p)
	}
	version, err := c.patch(ctx, k, f.workload, types.StrategicMergePatchType, c.cfg.templatePatch(f, c.keys, p))
	return outcome{version: version}, err
}

func (c *Controller) patch(ctx context.Context, k *kind, w *workload, as types.PatchType, patch any) (string, error) {
	data, err := json.Marshal(patch)
	if err != nil {
		return "", fmt.Errorf("marshal patch: %w", err)
	}
	return k.patch(ctx, w.ObjectName, as, data)
}

// done notes that a plan was carried out.
func (c *Controller) done(w *workload, p *plan, e *entry, version string) {
	now := c.clock.Now()
	c.memory.update(w.workloadKey, w.uid, now, func(live *entry) {
		if !p.pending {
			live.close(*e, now)
		}
		if version != "" && version != w.version {
			live.written = version
		}
		if live.kept = nil; c.inMemory(w) && len(p.state) > 0 || p.state.tooLarge() {
			live.kept = p.state
		}
		// What is recorded now, or not watched any more, needs no memory.
		for key := range live.seen {
			if _, recorded := p.state[key]; recorded || !p.pending && live.touched == e.touched {
				delete(live.seen, key)
			}
		}
		if len(live.seen) == 0 {
			live.seen = nil
		}
	})
}

// record writes the state alone, if it differs from the one on the workload.
func (c *Controller) record(ctx context.Context, k *kind, f *facts, p *plan, e *entry) (time.Duration, error) {
	w, now := f.workload, f.now
	if p.found {
		c.memory.update(w.workloadKey, w.uid, now, func(live *entry) {
			if !live.window.open() {
				live.window.first, live.window.last = now, now
			}
		})
	}
	if p.state == nil {
		return p.after, nil
	}
	_, annotated := w.meta[nativeState]
	text := p.state.annotation()
	if c.inMemory(w) || text == w.meta[nativeState] && annotated == (text != "") {
		c.done(w, p, e, "")
		c.forgetRemoval(w, e)
		return p.after, nil
	}
	if e.removed {
		if left := e.rewritten.Add(rewriteInterval).Sub(now); !e.rewritten.IsZero() && left > 0 {
			return soonest(p.after, left), nil
		}
	}
	version, err := c.patch(ctx, k, w, k.merge, metadataPatch(w, p.state))
	if err != nil {
		if !outdated(err) && !controllers.IsNotLeading(err) {
			c.metrics.stateWrites.WithLabelValues(resultError).Inc()
		}
		return 0, fmt.Errorf("record state of %s: %w", w.workloadKey, err)
	}
	c.metrics.stateWrites.WithLabelValues(resultSuccess).Inc()
	workloadLogger(ctx, w).V(2).Info("State recorded", "sources", len(p.state))
	c.done(w, p, e, version)
	if e.removed {
		c.memory.update(w.workloadKey, w.uid, now, func(live *entry) { live.removed, live.rewritten = false, now })
	}
	return p.after, nil
}

// forgetRemoval is called when the annotation is there again, or is missing because nothing is
// watched any more.
func (c *Controller) forgetRemoval(w *workload, e *entry) {
	if e.removed {
		c.memory.update(w.workloadKey, w.uid, c.clock.Now(), func(live *entry) { live.removed = false })
	}
}

// endPause resumes a Deployment, or removes the time of a pause that is over.
func (c *Controller) endPause(ctx context.Context, k *kind, w *workload, step pauseStep) error {
	version, err := c.patch(ctx, k, w, k.merge, c.keys.pausePatch(w, step))
	if err != nil {
		return fmt.Errorf("end pause of %s: %w", w.workloadKey, err)
	}
	workloadLogger(ctx, w).V(2).Info("Pause ended", "resumed", step == pauseEnds)
	c.memory.update(w.workloadKey, w.uid, c.clock.Now(), func(live *entry) {
		if version != w.version {
			live.written = version
		}
	})
	return nil
}

// report reports annotations that could not be parsed or written, once for each set of them.
func (c *Controller) report(ctx context.Context, w *workload, e *entry, problems []problem) {
	texts := make([]string, len(problems))
	for i, p := range problems {
		texts[i] = p.String()
	}
	all := strings.Join(texts, "\n")
	if all == e.reported {
		return
	}
	for i, text := range texts {
		if strings.Contains(e.reported, text) {
			continue
		}
		reason := reasonInvalid
		if problems[i] == stateTooLarge {
			reason = reasonTooLarge
		} else {
			c.metrics.invalid.Inc()
		}
		workloadLogger(ctx, w).V(2).Info("Problem with an annotation", "reason", reason, "problem", text)
		c.events.Event(w.reference(c.kinds[w.kind]), corev1.EventTypeWarning, reason, text)
	}
	c.memory.update(w.workloadKey, w.uid, c.clock.Now(), func(live *entry) { live.reported = all })
}

// announce logs, counts and records one Normal Event for all reloads of a plan.
func (c *Controller) announce(ctx context.Context, k *kind, f *facts, p *plan, reason, text, result string) {
	w := f.workload
	names := p.names(w)
	level := 2
	if result == resultDryRun {
		level = 0 // a dry run leaves nothing but this line
	}
	workloadLogger(ctx, w).V(level).Info("Reload", "sources", names, "result", result)
	c.metrics.reloads.WithLabelValues(w.kind, result).Inc()
	c.events.Event(w.reference(k), corev1.EventTypeNormal, reason, cut(text+names))
}

// tellOfWait sends one Event that a reload waits for a Job to end, which may take forever.
func (c *Controller) tellOfWait(ctx context.Context, k *kind, f *facts, p *plan) {
	w := f.workload
	if f.window.waits {
		return
	}
	workloadLogger(ctx, w).V(2).Info("Reload waits for a Job to finish")
	c.events.Eventf(w.reference(k), corev1.EventTypeNormal, reasonWaits, "A Job is active and concurrencyPolicy is Forbid, waits to reload for %s", cut(p.names(w)))
	c.memory.update(w.workloadKey, w.uid, f.now, func(live *entry) { live.window.waits = true })
}

// names returns type, name and namespace of the reloads' sources.
func (p *plan) names(w *workload) string {
	list := make([]string, len(p.reloads))
	for i, r := range p.reloads {
		list[i] = r.key.typ.kind() + " " + w.Namespace + "/" + r.key.name
	}
	return strings.Join(list, ", ")
}

// reference returns the object that an Event is about.
func (w *workload) reference(k *kind) *corev1.ObjectReference {
	return &corev1.ObjectReference{
		APIVersion: k.gvk.GroupVersion().String(), Kind: k.gvk.Kind,
		Namespace: w.Namespace, Name: w.Name, UID: w.uid, ResourceVersion: w.version,
	}
}
