// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package replication

import (
	"context"
	"errors"
	"fmt"
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

// write carries out a plan that was made on what l has read.
func (c *controller) write(ctx context.Context, key policy.Key, p *policy.Plan, l live) (time.Duration, error) {
	now := time.Now()
	source, target := l.bodies[p.Source], l.bodies[key]
	b := &policy.Body{}
	if p.Action != policy.Delete {
		b = c.evaluator.Apply(p, c.digester, key, source, target, now)
	}
	if err := c.send(ctx, key, p.Action, b, target); err != nil {
		return c.failed(ctx, key, p, err)
	}
	logger := klog.FromContext(ctx)
	repairs := 0
	if source != nil && p.Action != policy.Delete {
		repairs = c.memory.wrote(key, source.ResourceVersion, now)
	}
	if c.cfg.DryRun {
		c.metrics.wrote(key.Kind, p.Action, resultDryRun)
		logger.Info("Dry run: would write the target", "action", p.Action, "source", p.Source.String(), "dialect", p.Dialect)
		return 0, nil
	}
	c.metrics.wrote(key.Kind, p.Action, resultSuccess)
	logger.V(2).Info("Wrote the target", "action", p.Action, "source", p.Source.String(), "dialect", p.Dialect)
	reason, text := reasonReplicated, "replicated to "
	switch {
	case p.Action == policy.Mark:
		return 0, nil
	case p.Action == policy.Delete || p.Action == policy.Strip || p.Action == policy.Empty:
		reason, text = reasonRemoved, "removed from "
	case repairs > 0:
		reason, text = reasonRepaired, "repaired "
	}
	c.tell(c.about(key, p), corev1.EventTypeNormal, reason, text+key.NamespacedName.String())
	if repairs >= fightAfter {
		c.tell(c.about(key, p), corev1.EventTypeWarning, reasonFight,
			key.NamespacedName.String()+" is changed again and again"+lastManager(target)+"; it is repaired ever more seldom")
	}
	return 0, nil
}

// about returns the object of an Event: the target of a pull, the source of a push.
func (c *controller) about(key policy.Key, p *policy.Plan) policy.Key {
	if p.Mode == policy.Pull {
		return key
	}
	return p.Source
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

// namespaceRetry is when to try again in a namespace that is terminating or missing, as the API server
// says: its cache may be behind, and with --namespaces no event reports a new namespace.
const namespaceRetry = 5 * time.Minute

// failed returns when the loop should retry a failed write, and the error.
func (c *controller) failed(ctx context.Context, key policy.Key, p *policy.Plan, err error) (time.Duration, error) {
	switch {
	case apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause), controllers.IsNamespaceMissing(err):
		return namespaceRetry, nil
	case apierrors.IsAlreadyExists(err), p.Action != policy.Create && (apierrors.IsConflict(err) || apierrors.IsNotFound(err)):
		return 0, fmt.Errorf("%w: %w", errOutdated, err)
	case controllers.IsNotLeading(err), ctx.Err() != nil:
		return 0, err
	}
	c.metrics.wrote(key.Kind, p.Action, resultError)
	// The message is for those who run the manager: it may show another namespace's quota.
	c.tell(c.about(key, p), corev1.EventTypeWarning, reasonRejected, fmt.Sprintf("%s %s: %s", p.Action, key, reasonOf(err)))
	return 0, newRejection(p.Action, key, err)
}

// reasonOf returns the API server's reason in one word.
func reasonOf(err error) string {
	if reason := apierrors.ReasonForError(err); reason != metav1.StatusReasonUnknown {
		return string(reason)
	}
	return "no answer"
}

// rejection is the error of a write. Its text includes the API server's message only if the message is
// about a quota or a permission: others may hold keys or values of the object.
type rejection struct {
	text string
	error
}

func newRejection(a policy.Action, key policy.Key, err error) rejection {
	why := reasonOf(err)
	if status := apierrors.APIStatus(nil); errors.As(err, &status) {
		if message := status.Status().Message; strings.Contains(message, "exceeded quota") || strings.Contains(message, ` is forbidden: User "`) {
			why = message
		}
	}
	return rejection{fmt.Sprintf("%s %s: %s", a, key, why), err}
}

func (r rejection) Error() string { return r.text }

func (r rejection) Unwrap() error { return r.error }

// send sends the requests of an action.
func (c *controller) send(ctx context.Context, key policy.Key, a policy.Action, b, target *policy.Body) error {
	if key.Kind == policy.Secret {
		return send(ctx, c.client.CoreV1().Secrets(key.Namespace), a, b.Secret(), target, c.cfg.DryRun)
	}
	return send(ctx, c.client.CoreV1().ConfigMaps(key.Namespace), a, b.ConfigMap(), target, c.cfg.DryRun)
}

// writer is the part of a typed client that writes.
type writer[T any] interface {
	Create(ctx context.Context, obj T, opts metav1.CreateOptions) (T, error)
	Update(ctx context.Context, obj T, opts metav1.UpdateOptions) (T, error)
	Delete(ctx context.Context, name string, opts metav1.DeleteOptions) error
}

// send updates and deletes only the version that was read: a change meanwhile is a conflict. Before it
// deletes an object to create it again, a dry run of the creation asks quota and admission.
func send[T any](ctx context.Context, client writer[T], a policy.Action, obj T, target *policy.Body, dryRun bool) (err error) {
	var dry []string
	if dryRun {
		dry = []string{metav1.DryRunAll}
	}
	if a == policy.Recreate {
		_, err = client.Create(ctx, obj, metav1.CreateOptions{FieldManager: fieldManager, DryRun: []string{metav1.DryRunAll}})
		if err != nil && !apierrors.IsAlreadyExists(err) { // the API server checks existence last
			return err
		}
	}
	if a == policy.Delete || a == policy.Recreate {
		err = client.Delete(ctx, target.Name, metav1.DeleteOptions{
			Preconditions: &metav1.Preconditions{UID: &target.UID, ResourceVersion: &target.ResourceVersion}, DryRun: dry,
		})
	}
	switch {
	case a == policy.Delete || err != nil || a == policy.Recreate && dryRun:
	case a == policy.Create || a == policy.Recreate:
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
		c.tell(problem.About, corev1.EventTypeWarning, problem.Reason, problem.Text)
	}
}

// tell records an Event about an object, unless there was one of this reason a short while ago.
func (c *controller) tell(about policy.Key, eventType, reason, text string) {
	o := c.Get(about)
	if !c.cfg.DryRun && o != nil && c.memory.notices.Due(event{about, reason}, time.Now()) {
		c.events.Event(&corev1.ObjectReference{
			APIVersion: "v1", Kind: string(about.Kind), Namespace: about.Namespace, Name: about.Name, UID: types.UID(o.UID), ResourceVersion: o.Version,
		}, eventType, reason, text)
	}
}
