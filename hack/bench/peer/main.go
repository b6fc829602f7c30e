// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Command peer is what the benchmarks compare the manager with: a manager built as in
// controller-runtime's documentation. It elects a leader, caches Secrets, ConfigMaps and
// Deployments, and has one controller.
//
// Like config-reload at the first sight of a workload, the controller adds an annotation, by one patch, to
// each Deployment with the annotation quartermaster.dev/reload, unless the Deployment has it.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net/http"
	"os"
	"sync/atomic"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/config"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/healthz"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

const (
	reloadAnnotation = "quartermaster.dev/reload"
	seenAnnotation   = "peer.bench.quartermaster.dev/seen"
)

type options struct {
	health                    string
	duration, deadline, retry time.Duration
	warm                      bool
}

func main() {
	var o options
	flag.StringVar(&o.health, "health", "", "address of /readyz")
	flag.DurationVar(&o.duration, "lease-duration", 15*time.Second, "")
	flag.DurationVar(&o.deadline, "renew-deadline", 10*time.Second, "")
	flag.DurationVar(&o.retry, "retry-period", 2*time.Second, "")
	flag.BoolVar(&o.warm, "warm", false, "EnableWarmup")
	flag.Parse() // controller-runtime defines --kubeconfig

	ctrl.SetLogger(klog.Background())
	if err := run(ctrl.SetupSignalHandler(), o); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(ctx context.Context, o options) error {
	cfg, err := config.GetConfig()
	if err != nil {
		return err
	}
	mgr, err := ctrl.NewManager(cfg, ctrl.Options{
		Metrics:                       metricsserver.Options{BindAddress: "0"}, // without: what authenticates a scraper takes 15 MiB
		HealthProbeBindAddress:        o.health,
		LeaderElection:                true,
		LeaderElectionID:              "bench-peer",
		LeaderElectionNamespace:       "kube-system",
		LeaderElectionReleaseOnCancel: true,
		LeaseDuration:                 &o.duration,
		RenewDeadline:                 &o.deadline,
		RetryPeriod:                   &o.retry,
	})
	if err != nil {
		return err
	}
	noRequests := handler.EnqueueRequestsFromMapFunc(func(context.Context, client.Object) []reconcile.Request { return nil })
	err = ctrl.NewControllerManagedBy(mgr).
		For(&appsv1.Deployment{}).
		Watches(&corev1.Secret{}, noRequests).Watches(&corev1.ConfigMap{}, noRequests).
		WithOptions(controller.Options{EnableWarmup: &o.warm, MaxConcurrentReconciles: 4}).
		Complete(&reconciler{mgr.GetClient()})
	if err != nil {
		return err
	}
	objects := []client.Object{&appsv1.Deployment{}, &corev1.Secret{}, &corev1.ConfigMap{}}
	caches := &cacheSync{mgr: mgr, objects: objects, everyReplica: o.warm}
	if err := errors.Join(mgr.Add(caches), mgr.AddReadyzCheck("synced", caches.check), mgr.AddHealthzCheck("ping", healthz.Ping)); err != nil {
		return err
	}
	return mgr.Start(ctx)
}

type reconciler struct{ client client.Client }

// Reconcile implements reconcile.Reconciler.
func (r *reconciler) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	var d appsv1.Deployment
	if err := r.client.Get(ctx, req.NamespacedName, &d); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	if d.Annotations[reloadAnnotation] == "" || d.Annotations[seenAnnotation] != "" {
		return reconcile.Result{}, nil
	}
	changed := d.DeepCopy()
	changed.Annotations[seenAnnotation] = "true"
	return reconcile.Result{}, client.IgnoreNotFound(r.client.Patch(ctx, changed, client.MergeFrom(&d)))
}

// cacheSync reports when the caches that the controller uses have synced: on the leader, and with warm
// on every replica.
type cacheSync struct {
	mgr          ctrl.Manager
	objects      []client.Object
	everyReplica bool
	synced       atomic.Bool
}

// NeedLeaderElection implements manager.LeaderElectionRunnable.
func (s *cacheSync) NeedLeaderElection() bool { return !s.everyReplica }

// Start implements manager.Runnable.
func (s *cacheSync) Start(ctx context.Context) error {
	for _, obj := range s.objects {
		// Returns once it has synced.
		if _, err := s.mgr.GetCache().GetInformer(ctx, obj); err != nil {
			return err
		}
	}
	s.synced.Store(true)
	return nil
}

// check implements healthz.Checker. A standby without a cache is ready at once.
func (s *cacheSync) check(*http.Request) error {
	select {
	case <-s.mgr.Elected():
	default:
		if !s.everyReplica {
			return nil
		}
	}
	if !s.synced.Load() {
		return errors.New("caches have not synced")
	}
	return nil
}
