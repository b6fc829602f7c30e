// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package replication

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/replication/policy"
)

// fieldManager is this controller's name in managedFields.
const fieldManager = "quartermaster-replication"

// The reasons of Events that are not problems of a decision.
const (
	reasonReplicated = "Replicated"
	reasonRepaired   = "DriftRepaired"
	reasonRemoved    = "ReplicaRemoved"
	reasonRejected   = "WriteRejected"
	reasonFight      = "DriftFight"
)

// write carries out a plan that was made on what the view has read.
func (c *controller) write(ctx context.Context, key policy.Key, plan *policy.Plan, view liveView) (time.Duration, error) {
	now := time.Now()
	source, target := view.bodies[plan.Source], view.bodies[key]
	body := &policy.Body{}
	if plan.Action != policy.Delete {
		body = c.evaluator.Apply(plan, c.digester, key, source, target, now)
	}
	if err := c.send(ctx, key, plan.Action, body, target); err != nil {
		return c.handleWriteError(ctx, key, plan, err)
	}
	logger := klog.FromContext(ctx)
	repairs := 0
	if source != nil && plan.Action != policy.Delete {
		repairs = c.memory.recordWrite(key, source.ResourceVersion, now)
	}
	if c.cfg.DryRun {
		c.metrics.countWrite(key.Kind, plan.Action, resultDryRun)
		logger.Info("Dry run: would write the target", "action", plan.Action, "source", plan.Source.String(), "dialect", plan.Dialect)
		return 0, nil
	}
	c.metrics.countWrite(key.Kind, plan.Action, resultSuccess)
	logger.V(2).Info("Wrote the target", "action", plan.Action, "source", plan.Source.String(), "dialect", plan.Dialect)
	reason, text := reasonReplicated, "replicated to "
	switch {
	case plan.Action == policy.Mark:
		return 0, nil
	case plan.Action == policy.Delete || plan.Action == policy.Strip || plan.Action == policy.Empty:
		reason, text = reasonRemoved, "removed from "
	case repairs > 0:
		reason, text = reasonRepaired, "repaired "
	}
	c.recordEvent(c.eventObject(key, plan), corev1.EventTypeNormal, reason, text+key.NamespacedName.String())
	if repairs >= fightThreshold {
		c.recordEvent(c.eventObject(key, plan), corev1.EventTypeWarning, reasonFight,
			key.NamespacedName.String()+" is changed again and again"+lastManager(target)+"; it is repaired ever more seldom")
	}
	return 0, nil
}

// eventObject returns the object of an Event: the target of a pull, the source of a push.
func (c *controller) eventObject(key policy.Key, plan *policy.Plan) policy.Key {
	if plan.Mode == policy.Pull {
		return key
	}
	return plan.Source
}

// lastManager names who wrote to the object last, other than this controller.
func lastManager(b *policy.Body) string {
	if b == nil {
		return ""
	}
	others := slices.DeleteFunc(b.ManagedFields, func(m metav1.ManagedFieldsEntry) bool { return m.Manager == fieldManager || m.Time == nil })
	if len(others) == 0 {
		return ""
	}
	return ", at last by " + slices.MaxFunc(others, func(a, b metav1.ManagedFieldsEntry) int { return a.Time.Compare(b.Time.Time) }).Manager
}

// errOutdated says that the target has changed since the decision.
var errOutdated = errors.New("the target has changed since it was read")

// namespaceRetryDelay is how soon to try again in a namespace that is terminating or missing, as the API
// server says: its cache may be behind, and with --namespaces no event reports a new namespace.
const namespaceRetryDelay = 5 * time.Minute

// handleWriteError returns when the loop should retry a failed write, and the error.
func (c *controller) handleWriteError(ctx context.Context, key policy.Key, plan *policy.Plan, err error) (time.Duration, error) {
	switch {
	case apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause), controllers.IsNamespaceMissing(err):
		return namespaceRetryDelay, nil
	case apierrors.IsAlreadyExists(err), plan.Action != policy.Create && (apierrors.IsConflict(err) || apierrors.IsNotFound(err)):
		return 0, fmt.Errorf("%w: %w", errOutdated, err)
	case controllers.IsNotLeading(err), ctx.Err() != nil:
		return 0, err
	}
	c.metrics.countWrite(key.Kind, plan.Action, resultError)
	// The message is for those who run the manager: it may show another namespace's quota.
	c.recordEvent(c.eventObject(key, plan), corev1.EventTypeWarning, reasonRejected, fmt.Sprintf("%s %s: %s", plan.Action, key, reasonOf(err)))
	return 0, newRejection(plan.Action, key, err)
}

// reasonOf returns the API server's reason in one word.
func reasonOf(err error) string {
	if reason := apierrors.ReasonForError(err); reason != metav1.StatusReasonUnknown {
		return string(reason)
	}
	return "no answer"
}

// rejection is the error of a write. Its text includes the API server's message only if the message is
// about a quota or a permission, and of other messages the name of the webhook or policy that refuses: the
// rest may hold keys or values of the object.
type rejection struct {
	text string
	error
}

// refuser finds the beginning of an API server's message that names the webhook or policy that refuses. What
// the webhook or policy says follows.
var refuser = regexp.MustCompile(`^(?:admission webhook "[^"]+" denied the request|Internal error occurred: failed calling webhook "[^"]+"|` +
	`\S+ "[^"]+" is forbidden: ValidatingAdmissionPolicy '[^']+' with binding '[^']+' denied request)`)

func newRejection(action policy.Action, key policy.Key, err error) rejection {
	reason := reasonOf(err)
	if status := apierrors.APIStatus(nil); errors.As(err, &status) {
		message := status.Status().Message
		if who := refuser.FindString(message); who != "" { // first: its own text may say anything
			reason = who
		} else if strings.Contains(message, "exceeded quota") || strings.Contains(message, ` is forbidden: User "`) {
			reason = message
		}
	}
	return rejection{fmt.Sprintf("%s %s: %s", action, key, reason), err}
}

func (r rejection) Error() string { return r.text }

func (r rejection) Unwrap() error { return r.error }

// send sends the requests of an action.
func (c *controller) send(ctx context.Context, key policy.Key, action policy.Action, b, target *policy.Body) error {
	if key.Kind == policy.Secret {
		return send(ctx, c.client.CoreV1().Secrets(key.Namespace), action, b.Secret(), target, c.cfg.DryRun)
	}
	return send(ctx, c.client.CoreV1().ConfigMaps(key.Namespace), action, b.ConfigMap(), target, c.cfg.DryRun)
}

// writer is the part of a typed client that writes.
type writer[T any] interface {
	Create(ctx context.Context, obj T, opts metav1.CreateOptions) (T, error)
	Update(ctx context.Context, obj T, opts metav1.UpdateOptions) (T, error)
	Delete(ctx context.Context, name string, opts metav1.DeleteOptions) error
}

// send updates and deletes only the version that was read: a change meanwhile is a conflict. Before it
// deletes an object to create it again, a dry run of the creation asks quota and admission.
func send[T any](ctx context.Context, client writer[T], action policy.Action, obj T, target *policy.Body, dryRun bool) (err error) {
	var dry []string
	if dryRun {
		dry = []string{metav1.DryRunAll}
	}
	if action == policy.Recreate {
		_, err = client.Create(ctx, obj, metav1.CreateOptions{FieldManager: fieldManager, DryRun: []string{metav1.DryRunAll}})
		if err != nil && !apierrors.IsAlreadyExists(err) { // the API server checks existence last
			return err
		}
	}
	if action == policy.Delete || action == policy.Recreate {
		err = client.Delete(ctx, target.Name, metav1.DeleteOptions{
			Preconditions: &metav1.Preconditions{UID: &target.UID, ResourceVersion: &target.ResourceVersion}, DryRun: dry,
		})
	}
	switch {
	case action == policy.Delete || err != nil || action == policy.Recreate && dryRun:
	case action == policy.Create || action == policy.Recreate:
		_, err = client.Create(ctx, obj, metav1.CreateOptions{FieldManager: fieldManager, DryRun: dry})
	default:
		_, err = client.Update(ctx, obj, metav1.UpdateOptions{FieldManager: fieldManager, DryRun: dry})
	}
	return err
}

func (c *controller) get(ctx context.Context, key policy.Key) (*policy.Body, error) {
	var obj runtime.Object
	var err error
	if key.Kind == policy.Secret {
		obj, err = c.client.CoreV1().Secrets(key.Namespace).Get(ctx, key.Name, metav1.GetOptions{})
	} else {
		obj, err = c.client.CoreV1().ConfigMaps(key.Namespace).Get(ctx, key.Name, metav1.GetOptions{})
	}
	if err != nil {
		return nil, err
	}
	return policy.NewBody(obj), nil
}

// report tells owners of problems.
func (c *controller) report(problems []policy.Problem) {
	for _, problem := range problems {
		c.metrics.problems.WithLabelValues(problem.Reason).Inc()
		c.recordEvent(problem.Object, corev1.EventTypeWarning, problem.Reason, problem.Text)
	}
}

// recordEvent records an Event about an object, unless there was one of this reason a short while ago.
func (c *controller) recordEvent(object policy.Key, eventType, reason, text string) {
	obj := c.Get(object)
	if !c.cfg.DryRun && obj != nil && c.memory.notices.Due(event{object, reason}, time.Now()) {
		c.events.Event(&corev1.ObjectReference{
			APIVersion: "v1", Kind: string(object.Kind), Namespace: object.Namespace, Name: object.Name, UID: types.UID(obj.UID), ResourceVersion: obj.Version,
		}, eventType, reason, text)
	}
}
