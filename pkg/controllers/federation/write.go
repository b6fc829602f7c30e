// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package federation

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/federation/policy"
)

// recheckInterval is the period of retries, without an event, of a removal that is held or an API that is
// absent.
const recheckInterval = time.Minute

// clientFor returns the client for an object of the target type in the cluster, in the version of the given
// apiVersion.
func (w *objectWriter) clientFor(apiVersion string) dynamic.ResourceInterface {
	gv, err := schema.ParseGroupVersion(apiVersion)
	if err != nil || gv.Version == "" {
		gv.Version = w.Target.Version
	}
	resource := schema.GroupVersionResource{Group: w.Target.Group, Version: gv.Version, Resource: w.Target.PluralName}
	return w.cluster.client.cluster.Dynamic.Resource(resource).Namespace(w.targetName(w.key).Namespace)
}

// get returns the cluster's object, or nil if there is none. It reads the object in the API version in which
// it is written: the cluster may serve no other.
func (w *objectWriter) get(ctx context.Context) (*unstructured.Unstructured, error) {
	version := ""
	if federated, err := w.cluster.controller.readFederated(ctx, w.view); err == nil && federated != nil {
		if rendered, err := policy.Render(policy.RenderRequest{Type: &w.TypeConfig, Federated: federated, Cluster: w.cluster.name}); err == nil {
			version = rendered.GetAPIVersion()
		}
	}
	live, err := w.clientFor(version).Get(ctx, w.key.Name, metav1.GetOptions{})
	// A server that does not serve the version answers 404 too, but not with a Status that names the object.
	if apierrors.IsNotFound(err) && !apierrors.IsUnexpectedServerError(err) {
		return nil, nil
	}
	return live, err
}

// isHostNamespace reports whether an object that was read is the host's own Namespace.
func (w *objectWriter) isHostNamespace(live metav1.Object) bool {
	return w.cluster.controller.isHostNamespace(w.federatedType, w.key, live.GetUID())
}

// setFailed sets why the cluster does not have its object. The request is retried, unless policy refused the
// object. After a conflict, or when the term is over, there is no outcome.
func (w *objectWriter) setFailed(status string, err error) error {
	if controllers.IsNotLeading(err) || apierrors.IsConflict(err) {
		return err
	}
	reason, timeout := eventReasons[status], net.Error(nil)
	if refused := (*policy.Failure)(nil); errors.As(err, &refused) {
		status = refused.Status // not retried: only a change of the federated object can help
	} else {
		if errors.Is(err, context.DeadlineExceeded) || errors.As(err, &timeout) && timeout.Timeout() {
			status, w.noAnswer = policy.TimedOutStatus(status), true
		}
		w.err = fmt.Errorf("%s in cluster %s: %w", describeTarget(w.view), w.cluster.name, truncatedError{err})
	}
	w.status = status
	w.recordEvent(reason, err)
	return nil
}

// truncatedError is an error whose text, which another cluster may have sent, is cut to 256 bytes.
type truncatedError struct{ error }

func (s truncatedError) Unwrap() error { return s.error }

func (s truncatedError) Error() string {
	text := s.error.Error()
	return text[:min(len(text), 256)]
}

// eventReasons are the reasons of Events, by the status of a failure.
var eventReasons = map[string]string{
	policy.CreationFailed: "CreateInCluster", policy.UpdateFailed: "UpdateInCluster", policy.DeletionFailed: "DeleteInCluster",
	policy.LabelRemovalFailed: "DeleteInCluster",
}

// eventTexts begin the text of an Event, by its reason.
var eventTexts = map[string]string{"CreateInCluster": "Creating", "UpdateInCluster": "Updating", "DeleteInCluster": "Deleting"}

// recordEvent records an Event on the federated object: the write, or its failure if the status of the
// cluster is new.
func (w *objectWriter) recordEvent(reason string, err error) {
	if reason == "" || w.object == nil {
		return
	}
	eventType, text := corev1.EventTypeNormal, fmt.Sprintf("%s %s in cluster %q", eventTexts[reason], describeTarget(w.view), w.cluster.name)
	if err != nil {
		w.cluster.controller.mu.Lock()
		last := w.cluster.controller.records[w.key].resultOf(w.cluster.name)
		repeated := last != nil && last.status == w.status
		w.cluster.controller.mu.Unlock()
		if repeated {
			return
		}
		eventType, reason, text = corev1.EventTypeWarning, reason+"Failed", text+": "+truncatedError{err}.Error()
	}
	w.cluster.controller.recordEvent(w.view, eventType, reason, text)
}

// create creates the object, or updates one that exists already.
func (w *objectWriter) create(ctx context.Context) error {
	federated, err := w.cluster.controller.readFederated(ctx, w.view)
	if federated == nil || err != nil {
		w.noOutcome = true // if the federated object is gone, an event follows
		return err
	}
	object, err := policy.Render(policy.RenderRequest{Type: &w.TypeConfig, Federated: federated, Cluster: w.cluster.name})
	if err != nil {
		return w.setFailed(policy.CreationFailed, err)
	}
	created, err := w.clientFor(object.GetAPIVersion()).Create(ctx, object, metav1.CreateOptions{})
	switch {
	case apierrors.IsAlreadyExists(err):
		return w.update(ctx)
	case isTypeAbsent(err):
		return w.setWaiting(policy.APINotAvailable, recheckInterval)
	case err != nil:
		return w.setFailed(policy.CreationFailed, err)
	}
	w.recordWrite(federated, created, "CreateInCluster")
	return nil
}

// isTypeAbsent reports whether an error says that the cluster does not serve the type, and not that a
// namespace is missing.
func isTypeAbsent(err error) bool {
	if !apierrors.IsNotFound(err) {
		return false
	}
	status := apierrors.APIStatus(nil)
	return errors.As(err, &status) && (status.Status().Details == nil || status.Status().Details.Kind != "namespaces")
}

// update reads the object, and writes it unless it is as rendered.
func (w *objectWriter) update(ctx context.Context) error {
	federated, err := w.cluster.controller.readFederated(ctx, w.view)
	if federated == nil || err != nil {
		w.noOutcome = true
		return err
	}
	live, err := w.get(ctx)
	switch {
	case err != nil:
		return w.setFailed(policy.RetrievalFailed, err)
	case live == nil:
		w.noOutcome, w.requeueAfter = true, time.Second // the cache will show that the object is gone
		return nil
	case live.GetDeletionTimestamp() != nil:
		return w.setWaiting(policy.WaitingForRemoval, 5*time.Second) // no event follows for an object without the label
	}
	if status := policy.AdoptionRefusal(live, w.isHostNamespace(live), w.cluster.controller.settings(ctx)); status != "" {
		return w.setWaiting(status, 0)
	}
	object, err := policy.Render(policy.RenderRequest{Type: &w.TypeConfig, Federated: federated, Cluster: w.cluster.name, Live: live, IsHostNamespace: w.isHostNamespace(live)})
	if err != nil {
		return w.setFailed(policy.UpdateFailed, err)
	}
	digest := federated.Digest()
	content := digest.ContentHash(w.cluster.name)
	if w.needsNoWrite(live, object, digest.ForCluster(w.cluster.name)) {
		w.rememberVersion(live, content, digest.ForCluster(w.cluster.name).Annotations)
		return nil
	}
	now := time.Now()
	w.cluster.controller.mu.Lock()
	repeats := w.cluster.repeats[newQueuedKey(w.key)]
	if repeats == nil {
		repeats = &policy.Repeats{}
		w.cluster.repeats[newQueuedKey(w.key)] = repeats
	}
	wait := repeats.NextWrite(content).Sub(now)
	w.cluster.controller.mu.Unlock()
	if wait > 0 {
		return w.setWaiting(policy.UpdateFailed, wait)
	}
	updated, err := w.clientFor(object.GetAPIVersion()).Update(ctx, object, metav1.UpdateOptions{})
	if err != nil {
		return w.setFailed(policy.UpdateFailed, err)
	}
	w.cluster.controller.mu.Lock()
	// A write that changes nothing is not contested: somebody has changed a field that is retained.
	contested := updated.GetResourceVersion() != live.GetResourceVersion() && repeats.AddWrite(content, now)
	w.cluster.controller.mu.Unlock()
	if contested {
		w.cluster.controller.warnOnce(w.view, policy.Problem{Reason: policy.UpdateConflict, Text: fmt.Sprintf("somebody reverts the object in cluster %q again and again", w.cluster.name)})
	}
	w.recordWrite(federated, updated, "UpdateInCluster")
	return nil
}

// needsNoWrite reports whether the object that was read needs no write: the cache was late, or this process
// did not know its annotations.
func (w *objectWriter) needsNoWrite(live, object *unstructured.Unstructured, rendered policy.OverrideDigest) bool {
	if live.GetLabels()[policy.ManagedLabel] != "true" || !maps.Equal(live.GetAnnotations(), object.GetAnnotations()) {
		return false
	}
	cached, state := policy.ReadLiveObject(live, policy.SummarizeLiveObject(live)), w.state
	state.Live, state.Rendered, state.Rendered.Annotations = &cached, rendered, false
	return policy.Decide(state) == policy.Nothing
}

// recordWrite notes a write of the content of the federated object.
func (w *objectWriter) recordWrite(federated *policy.Federated, object *unstructured.Unstructured, reason string) {
	digest := federated.Digest()
	w.wrote = true
	w.rememberVersion(object, digest.ContentHash(w.cluster.name), digest.ForCluster(w.cluster.name).Annotations)
	w.recordEvent(reason, nil)
}

// rememberVersion notes the version of an object that has the content.
func (w *objectWriter) rememberVersion(object *unstructured.Unstructured, content uint64, annotations bool) {
	w.status, w.version, w.content = "", policy.ObjectVersion(object), content
	if !annotations {
		return
	}
	cached := policy.ReadLiveObject(object, policy.SummarizeLiveObject(object))
	w.cluster.controller.mu.Lock()
	w.cluster.liveAnnotations[w.key] = &cached.Annotations
	w.cluster.controller.mu.Unlock()
}

// remove deletes the object, or takes the label off.
func (w *objectWriter) remove(ctx context.Context, deletes bool) error {
	c := w.cluster.controller
	if !w.inputsListed {
		w.noOutcome, w.requeueAfter = true, time.Second
		return nil
	}
	options := metav1.DeleteOptions{}
	if w.deleting {
		federated, err := c.readFederated(ctx, w.view)
		if federated == nil || err != nil {
			w.noOutcome = true
			return err
		}
		if options, err = c.deleteOptions(w.view, federated); err != nil {
			return w.setWaiting(policy.WaitingForRemoval, 0) // wait until the annotation with the DeleteOptions changes
		}
		deleted, err := c.definitionDeleted(ctx, w.view, w.federatedType)
		if err != nil {
			return err
		}
		deletes = deletes && !deleted
	} else {
		if deletes && w.object != nil {
			if held, err := w.holdRemoval(ctx); held || err != nil {
				return err
			}
		}
		if wanted, exists, err := c.stillWanted(ctx, w.view, w.cluster.name); err != nil || wanted || exists != (w.object != nil) {
			w.noOutcome, w.requeueAfter = true, time.Second // the cache is behind
			return err
		}
	}
	failedStatus := policy.DeletionFailed
	if !deletes {
		failedStatus = policy.LabelRemovalFailed
	}
	live, err := w.get(ctx)
	if err != nil {
		return w.setFailed(failedStatus, err)
	}
	if w.object == nil && c.clusters.state(w.cluster.name).replaced {
		w.noOutcome, w.requeueAfter = true, recheckInterval
		return nil
	}
	if w.object == nil && live != nil && !w.keepUnwanted {
		if deletes, options, err = w.owedRemoval(ctx, live); err != nil {
			return err
		}
	}
	return w.removeLive(ctx, live, deletes, options)
}

// holdRemoval reports whether a deletion by placement must wait, and sets the outcome if so.
func (w *objectWriter) holdRemoval(ctx context.Context) (bool, error) {
	c, removals := w.cluster.controller, w.cluster.removals()
	if c.replicas.undecided(w.key, removals.ReadySince) {
		// The replicas were moved away while the cluster was not ready; the next plan may place some here again.
		return true, w.setWaiting(policy.WaitingForRemoval, time.Second)
	}
	status, wait := removals.Hold(c.settings(ctx).AvailableDelay, c.cfg.RemovalGuard, time.Now())
	removalText := fmt.Sprintf("%d of %d objects", removals.Deletions, removals.Managed)
	if status == "" && removals.HoldsUnrecorded(c.cfg.RemovalGuard, time.Now()) {
		propagated, err := c.hasPropagatedTo(ctx, w.view, w.cluster.name)
		if err != nil {
			return false, err
		}
		if !propagated {
			status, removalText = policy.RemovalHeld, "objects of which the host has no record, such as "+describeTarget(w.view)
		}
	}
	switch {
	case status == "":
		w.cluster.warnedHeld.Store(false)
		return false, nil
	case status == policy.RemovalHeld && !removals.Replaced: // a replaced cluster has a Warning of its own
		c.warnRemovalsHeld(w.cluster, removalText)
	}
	return true, w.setWaiting(status, cmp.Or(wait, recheckInterval))
}

// removeLive removes an object that was read a moment ago, and no other.
func (w *objectWriter) removeLive(ctx context.Context, live *unstructured.Unstructured, deletes bool, options metav1.DeleteOptions) error {
	if live == nil {
		return w.setWaiting(policy.WaitingForRemoval, recheckInterval) // the cache will show that it is gone
	}
	action := policy.ActionToRemove(&w.TypeConfig, live)
	if action == policy.Remove && (!deletes || w.isHostNamespace(live)) {
		action = policy.Unlabel
	}
	uid, version := live.GetUID(), live.GetResourceVersion()
	w.status = policy.WaitingForRemoval // until the cache shows that the object is gone
	switch action {
	case policy.Remove:
		if kind := live.GetKind(); options.PropagationPolicy == nil && (kind == "Job" || kind == "ReplicationController") {
			// For these two kinds, the API server's default would leave their Pods running.
			options.PropagationPolicy = new(metav1.DeletePropagationBackground)
		}
		if w.object != nil && !w.deleting { // by placement
			w.cluster.controller.mu.Lock()
			w.cluster.recentRemovals[uid] = time.Now()
			w.cluster.controller.mu.Unlock()
		}
		options.Preconditions = &metav1.Preconditions{UID: &uid, ResourceVersion: &version}
		if err := w.clientFor(live.GetAPIVersion()).Delete(ctx, w.key.Name, options); err != nil && !apierrors.IsNotFound(err) {
			return w.setFailed(policy.DeletionFailed, err)
		}
	case policy.Unlabel:
		if _, err := patch(ctx, w.clientFor(live.GetAPIVersion()), w.key.Name, map[string]any{"metadata": map[string]any{
			"uid": uid, "resourceVersion": version, "labels": map[string]any{policy.ManagedLabel: nil}}}); err != nil {
			return w.setFailed(policy.LabelRemovalFailed, err)
		}
	default:
		return nil
	}
	w.wrote = true
	w.recordEvent("DeleteInCluster", nil)
	return nil
}
