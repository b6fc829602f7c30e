// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/record"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	v1 "github.com/quartermaster-dev/quartermaster/examples/widget/api/v1"
)

const (
	finalizer     = "example.com/widget"
	environment   = "example.com/environment"
	settingsIndex = "spec.settings"
)

//+kubebuilder:rbac:groups=example.com,resources=widgets,verbs=get;list;watch;update;patch
//+kubebuilder:rbac:groups=example.com,resources=widgets/status,verbs=get;update;patch
//+kubebuilder:rbac:groups=example.com,resources=widgets/finalizers,verbs=update
//+kubebuilder:rbac:groups=apps,resources=deployments,verbs=get;list;watch;create;update;patch;delete
//+kubebuilder:rbac:groups="",resources=configmaps,verbs=get;list;watch;create;update;patch
//+kubebuilder:rbac:groups="",resources=events,verbs=create;patch

type reconciler struct {
	client.Client
	scheme *runtime.Scheme
	events record.EventRecorder
}

func (r *reconciler) setUp(mgr ctrl.Manager) error {
	index := func(obj client.Object) []string {
		if name := obj.(*v1.Widget).Spec.Settings; name != "" {
			return []string{name}
		}
		return nil
	}
	if err := mgr.GetFieldIndexer().IndexField(context.Background(), &v1.Widget{}, settingsIndex, index); err != nil {
		return err
	}
	return ctrl.NewControllerManagedBy(mgr).
		For(&v1.Widget{}).
		Owns(&appsv1.Deployment{}).
		Owns(&corev1.ConfigMap{}).
		Watches(&corev1.ConfigMap{}, handler.EnqueueRequestsFromMapFunc(r.widgetRequests)).
		Complete(r)
}

// widgetRequests returns the Widgets whose settings are in a ConfigMap.
func (r *reconciler) widgetRequests(ctx context.Context, obj client.Object) (requests []reconcile.Request) {
	var list v1.WidgetList
	if err := r.List(ctx, &list, client.InNamespace(obj.GetNamespace()), client.MatchingFields{settingsIndex: obj.GetName()}); err != nil {
		return nil
	}
	for i := range list.Items {
		requests = append(requests, reconcile.Request{NamespacedName: client.ObjectKeyFromObject(&list.Items[i])})
	}
	return requests
}

// Reconcile implements reconcile.Reconciler.
func (r *reconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	w := &v1.Widget{}
	if err := r.Get(ctx, req.NamespacedName, w); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	if !w.DeletionTimestamp.IsZero() {
		return ctrl.Result{}, r.finalize(ctx, w)
	}
	if controllerutil.AddFinalizer(w, finalizer) {
		if err := r.Update(ctx, w); err != nil {
			return ctrl.Result{}, err
		}
	}
	settings := ""
	if w.Spec.Settings != "" {
		configMap := &corev1.ConfigMap{}
		err := r.Get(ctx, types.NamespacedName{Namespace: w.Namespace, Name: w.Spec.Settings}, configMap)
		if apierrors.IsNotFound(err) {
			return ctrl.Result{}, r.updateStatus(ctx, w, nil, "SettingsMissing", "there is no ConfigMap "+w.Spec.Settings)
		} else if err != nil {
			return ctrl.Result{}, err
		}
		settings = hash(configMap.Data)
	}
	replicas, expired := w.Spec.Replicas, false
	var remaining time.Duration
	if l := w.Spec.Lifetime; l != nil {
		if remaining = time.Until(w.CreationTimestamp.Add(l.Duration)); remaining <= 0 {
			replicas, expired, remaining = 0, true, 0
		}
	}

	data := map[string]string{"MESSAGE": w.Spec.Message}
	configMap := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: w.Namespace, Name: w.Name}}
	if _, err := controllerutil.CreateOrUpdate(ctx, r.Client, configMap, func() error {
		configMap.Data = data
		return controllerutil.SetControllerReference(w, configMap, r.scheme)
	}); err != nil {
		return ctrl.Result{}, err
	}
	deployment := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: w.Namespace, Name: w.Name}}
	if _, err := controllerutil.CreateOrUpdate(ctx, r.Client, deployment, func() error {
		setDeployment(deployment, w, replicas, hash(data)+","+w.Spec.Settings+":"+settings)
		return controllerutil.SetControllerReference(w, deployment, r.scheme)
	}); err != nil {
		return ctrl.Result{}, err
	}

	reason, message := "Running", "its Pods are ready"
	switch {
	case expired:
		reason, message = "Expired", "its lifetime is over"
	case deployment.Status.ReadyReplicas < replicas:
		reason, message = "Progressing", "its Pods are not ready"
	}
	return ctrl.Result{RequeueAfter: remaining}, r.updateStatus(ctx, w, deployment, reason, message)
}

// finalize deletes the Deployment. When that is gone, it lets the Widget go.
func (r *reconciler) finalize(ctx context.Context, w *v1.Widget) error {
	deployment := &appsv1.Deployment{}
	err := r.Get(ctx, client.ObjectKeyFromObject(w), deployment)
	if err == nil {
		if !deployment.DeletionTimestamp.IsZero() {
			return nil
		}
		return client.IgnoreNotFound(r.Delete(ctx, deployment, client.PropagationPolicy(metav1.DeletePropagationBackground)))
	}
	if !apierrors.IsNotFound(err) {
		return err
	}
	if controllerutil.RemoveFinalizer(w, finalizer) {
		return client.IgnoreNotFound(r.Update(ctx, w))
	}
	return nil
}

// updateStatus writes the status if it has changed. It records an Event if the reason has.
func (r *reconciler) updateStatus(ctx context.Context, w *v1.Widget, d *appsv1.Deployment, reason, message string) error {
	before := w.DeepCopy().Status
	w.Status.ObservedGeneration = w.Generation
	if d != nil {
		w.Status.ReadyReplicas = d.Status.ReadyReplicas
	}
	ready := metav1.Condition{Type: "Ready", Status: metav1.ConditionFalse, Reason: reason, Message: message, ObservedGeneration: w.Generation}
	if reason == "Running" {
		ready.Status = metav1.ConditionTrue
	}
	meta.SetStatusCondition(&w.Status.Conditions, ready)
	if equality.Semantic.DeepEqual(before, w.Status) {
		return nil
	}
	if err := r.Status().Update(ctx, w); err != nil {
		return err
	}
	if previous := meta.FindStatusCondition(before.Conditions, "Ready"); previous == nil || previous.Reason != reason {
		r.events.Event(w, corev1.EventTypeNormal, reason, message)
	}
	return nil
}

// setDeployment sets what the controller sets of a Deployment, and leaves the defaults alone.
func setDeployment(d *appsv1.Deployment, w *v1.Widget, replicas int32, env string) {
	labels := map[string]string{"example.com/widget": w.Name}
	d.Spec.Replicas = &replicas
	d.Spec.Selector = &metav1.LabelSelector{MatchLabels: labels}
	d.Spec.Template.Labels = labels
	if d.Spec.Template.Annotations == nil {
		d.Spec.Template.Annotations = map[string]string{}
	}
	d.Spec.Template.Annotations[environment] = env
	if len(d.Spec.Template.Spec.Containers) != 1 {
		d.Spec.Template.Spec.Containers = []corev1.Container{{}}
	}
	container := &d.Spec.Template.Spec.Containers[0]
	container.Name, container.Image, container.EnvFrom = "widget", w.Spec.Image, nil
	for _, name := range []string{w.Name, w.Spec.Settings} {
		if name != "" {
			container.EnvFrom = append(container.EnvFrom, corev1.EnvFromSource{
				ConfigMapRef: &corev1.ConfigMapEnvSource{LocalObjectReference: corev1.LocalObjectReference{Name: name}}})
		}
	}
}

func hash(data map[string]string) string {
	text, _ := json.Marshal(data) // strings never fail
	sum := sha256.Sum256(text)
	return fmt.Sprintf("%x", sum[:8])
}
