// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package controller is the controller of Widgets. It gives each Widget a ConfigMap with the message of the
// Widget, and a Deployment whose Pods have the message and the settings in their environment.
package controller

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	applyappsv1 "k8s.io/client-go/applyconfigurations/apps/v1"
	applycorev1 "k8s.io/client-go/applyconfigurations/core/v1"
	applymetav1 "k8s.io/client-go/applyconfigurations/meta/v1"
	"k8s.io/client-go/tools/cache"

	v1 "github.com/quartermaster-dev/quartermaster/examples/widget/api/v1"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/informers"
)

const (
	name = "widget"
	// finalizer keeps a Widget until its Deployment is gone.
	finalizer = "example.com/widget"
	// environment is an annotation of the Pods. It changes with the ConfigMaps in their environment.
	environment = "example.com/environment"
)

// Entry returns the controller's entry for app.NewCommand.
func Entry() controllers.Entry {
	return controllers.Entry{
		Name:        name,
		Summary:     "runs a Deployment for each Widget",
		AddToScheme: v1.AddToScheme,
		Needs: func(controllers.Settings) ([]informers.Need, error) {
			return []informers.Need{
				{Resource: v1.Widgets, Form: informers.Typed},
				{Resource: informers.Deployments, Form: informers.Typed},
				{Resource: informers.ConfigMaps, Fields: informers.OwnerReferences, Digest: informers.DigestOf(digest)},
			}, nil
		},
		Permissions: func(controllers.Settings) []rbacv1.PolicyRule {
			return []rbacv1.PolicyRule{
				{APIGroups: []string{"example.com"}, Resources: []string{"widgets"}, Verbs: []string{"patch"}},
				{APIGroups: []string{"example.com"}, Resources: []string{"widgets/status"}, Verbs: []string{"update"}},
				{APIGroups: []string{"apps"}, Resources: []string{"deployments"}, Verbs: []string{"create", "patch", "delete"}},
				{APIGroups: []string{""}, Resources: []string{"configmaps"}, Verbs: []string{"create", "patch"}},
			}
		},
		New: newController,
	}
}

type controller struct {
	*controllers.Loop[cache.ObjectName]
	host        controllers.Host
	client      controllers.TypedClient[*v1.Widget]
	widgets     *informers.Informer[*v1.Widget]
	deployments *informers.Informer[*appsv1.Deployment]
	configMaps  *informers.Informer[*informers.Object]
}

func newController(h controllers.Host) (_ controllers.Controller, err error) {
	c := &controller{
		host:        h,
		client:      controllers.ClientFor[*v1.Widget](h, v1.Widgets),
		widgets:     informers.For[*v1.Widget](h, v1.Widgets),
		deployments: informers.For[*appsv1.Deployment](h, informers.Deployments),
		configMaps:  informers.For[*informers.Object](h, informers.ConfigMaps),
	}
	c.widgets.AddIndex("settings", func(w *v1.Widget) []string { return []string{w.Namespace + "/" + w.Spec.Settings} })
	c.Loop, err = controllers.NewLoop(h.LoopOptions, c.reconcile,
		controllers.WatchSelf(c.widgets),
		controllers.WatchOwner(c.deployments, c.widgets, v1.Kind),
		controllers.WatchOwner(c.configMaps, c.widgets, v1.Kind),
		controllers.WatchChanges(c.configMaps, c.settingsChanged))
	return c, err
}

// settingsChanged returns the Widgets whose settings are in a ConfigMap.
func (c *controller) settingsChanged(e controllers.Event[*informers.Object]) (keys []cache.ObjectName) {
	configMap := cmp.Or(e.New, e.Old)
	for _, w := range c.widgets.ByIndex("settings", cache.MetaObjectToName(configMap).String()) {
		keys = append(keys, cache.MetaObjectToName(w))
	}
	return keys
}

// digest returns what the cache keeps of the data of a ConfigMap, a hash.
func digest(configMap *corev1.ConfigMap) []byte {
	data, _ := json.Marshal(configMap.Data) // strings never fail
	sum := sha256.Sum256(data)
	return sum[:8]
}

// cachedDigest returns the digest of a ConfigMap, or nil if there is none.
func (c *controller) cachedDigest(configMap cache.ObjectName) []byte {
	if cached, exists := c.configMaps.Get(configMap); exists {
		return cached.Digest(name)
	}
	return nil
}

func (c *controller) reconcile(ctx context.Context, key cache.ObjectName) (after time.Duration, err error) {
	w, exists := c.widgets.Get(key)
	if !exists {
		return 0, nil // the garbage collector removes what it owned
	}
	return c.bring(ctx, w.DeepCopy())
}

// finalize deletes the Deployment, if it is the Widget's. When that is gone, it lets the Widget go.
func (c *controller) finalize(ctx context.Context, w *v1.Widget) error {
	if d, exists := c.deployments.Get(cache.MetaObjectToName(w)); exists && metav1.IsControlledBy(d, w) {
		if d.DeletionTimestamp != nil {
			return nil
		}
		// The preconditions make the deletion fail if the Deployment has changed since the cache read it.
		return c.host.Client.AppsV1().Deployments(w.Namespace).Delete(ctx, w.Name, metav1.DeleteOptions{
			Preconditions: &metav1.Preconditions{UID: &d.UID, ResourceVersion: &d.ResourceVersion}})
	}
	return c.host.PatchFinalizers(ctx, v1.Widgets, w, slices.DeleteFunc(w.Finalizers, func(f string) bool { return f == finalizer }))
}

// bring brings a Widget to its desired state.
func (c *controller) bring(ctx context.Context, w *v1.Widget) (after time.Duration, err error) {
	if w.DeletionTimestamp != nil {
		return 0, c.finalize(ctx, w)
	}
	if !slices.Contains(w.Finalizers, finalizer) {
		return 0, c.host.PatchFinalizers(ctx, v1.Widgets, w, append(w.Finalizers, finalizer)) // its event brings the key again
	}
	deployment, exists := c.deployments.Get(cache.MetaObjectToName(w))
	configMap, configMapExists := c.configMaps.Get(cache.MetaObjectToName(w))
	if exists && !metav1.IsControlledBy(deployment, w) || configMapExists && !metav1.IsControlledBy(configMap, w) {
		// No event of a foreign object brings the key again.
		return time.Minute, c.report(ctx, w, nil, "NameTaken", "there is a Deployment or ConfigMap of its name that is not its own")
	}
	settings := c.cachedDigest(cache.NewObjectName(w.Namespace, w.Spec.Settings))
	if w.Spec.Settings != "" && settings == nil {
		return 0, c.report(ctx, w, deployment, "SettingsMissing", "there is no ConfigMap "+w.Spec.Settings)
	}
	reason, message := "Running", "its Pods are ready"
	if !exists || deployment.Status.ReadyReplicas < w.Spec.Replicas {
		reason, message = "Progressing", "its Pods are not ready"
	}
	if l := w.Spec.Lifetime; l != nil {
		if after = l.Duration - time.Since(w.CreationTimestamp.Time); after <= 0 {
			w.Spec.Replicas, reason, message = 0, "Expired", "its lifetime is over"
		}
	}
	data := map[string]string{"MESSAGE": w.Spec.Message}
	own := digest(&corev1.ConfigMap{Data: data})
	var changes []runtime.ApplyConfiguration
	if !bytes.Equal(c.cachedDigest(cache.MetaObjectToName(w)), own) {
		changes = append(changes, applycorev1.ConfigMap(w.Name, w.Namespace).WithData(data).
			WithOwnerReferences(controllers.ControllerReference(w, v1.GroupVersion.WithKind("Widget"))))
	}
	if env := fmt.Sprintf("%x,%s:%x", own, w.Spec.Settings, settings); !exists || !isAsDesired(deployment, w, env) {
		changes = append(changes, desired(w, env))
	}
	if err := c.host.Apply(ctx, changes...); err != nil {
		return 0, err
	}
	return after, c.report(ctx, w, deployment, reason, message)
}

// isAsDesired reports whether a Deployment has what desired may set anew.
func isAsDesired(d *appsv1.Deployment, w *v1.Widget, env string) bool {
	return *d.Spec.Replicas == w.Spec.Replicas && d.Spec.Template.Spec.Containers[0].Image == w.Spec.Image &&
		d.Spec.Template.Annotations[environment] == env
}

func desired(w *v1.Widget, env string) *applyappsv1.DeploymentApplyConfiguration {
	labels := map[string]string{"example.com/widget": w.Name}
	container := applycorev1.Container().WithName("widget").WithImage(w.Spec.Image)
	for _, configMap := range []string{w.Name, w.Spec.Settings} {
		if configMap != "" {
			container.WithEnvFrom(applycorev1.EnvFromSource().WithConfigMapRef(applycorev1.ConfigMapEnvSource().WithName(configMap)))
		}
	}
	pod := applycorev1.PodTemplateSpec().WithLabels(labels).WithAnnotations(map[string]string{environment: env}).
		WithSpec(applycorev1.PodSpec().WithContainers(container))
	return applyappsv1.Deployment(w.Name, w.Namespace).
		WithOwnerReferences(controllers.ControllerReference(w, v1.GroupVersion.WithKind("Widget"))).
		WithSpec(applyappsv1.DeploymentSpec().WithReplicas(w.Spec.Replicas).
			WithSelector(applymetav1.LabelSelector().WithMatchLabels(labels)).WithTemplate(pod))
}

// report writes the status if it has changed. It records an Event if the reason has.
func (c *controller) report(ctx context.Context, w *v1.Widget, d *appsv1.Deployment, reason, message string) error {
	before := w.DeepCopy().Status
	w.Status.ObservedGeneration = w.Generation
	if d != nil {
		w.Status.ReadyReplicas = d.Status.ReadyReplicas
	}
	status := map[bool]metav1.ConditionStatus{true: metav1.ConditionTrue, false: metav1.ConditionFalse}[reason == "Running"]
	meta.SetStatusCondition(&w.Status.Conditions, metav1.Condition{
		Type: "Ready", Status: status, Reason: reason, Message: message, ObservedGeneration: w.Generation})
	if equality.Semantic.DeepEqual(before, w.Status) {
		return nil
	}
	_, err := c.client.Namespace(w.Namespace).UpdateStatus(ctx, w, metav1.UpdateOptions{})
	if was := meta.FindStatusCondition(before.Conditions, "Ready"); err == nil && (was == nil || was.Reason != reason) {
		c.host.Events.Event(w, corev1.EventTypeNormal, reason, message)
	}
	return err
}
