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
	asked = "quartermaster.dev/reload"
	seen  = "peer.bench.quartermaster.dev/seen"
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
	nothing := handler.EnqueueRequestsFromMapFunc(func(context.Context, client.Object) []reconcile.Request { return nil })
	err = ctrl.NewControllerManagedBy(mgr).
		For(&appsv1.Deployment{}).
		Watches(&corev1.Secret{}, nothing).Watches(&corev1.ConfigMap{}, nothing).
		WithOptions(controller.Options{EnableWarmup: &o.warm, MaxConcurrentReconciles: 4}).
		Complete(&reconciler{mgr.GetClient()})
	if err != nil {
		return err
	}
	cached := []client.Object{&appsv1.Deployment{}, &corev1.Secret{}, &corev1.ConfigMap{}}
	synced := &synced{mgr: mgr, cached: cached, always: o.warm}
	if err := errors.Join(mgr.Add(synced), mgr.AddReadyzCheck("synced", synced.check), mgr.AddHealthzCheck("ping", healthz.Ping)); err != nil {
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
	if d.Annotations[asked] == "" || d.Annotations[seen] != "" {
		return reconcile.Result{}, nil
	}
	changed := d.DeepCopy()
	changed.Annotations[seen] = "true"
	return reconcile.Result{}, client.IgnoreNotFound(r.client.Patch(ctx, changed, client.MergeFrom(&d)))
}

// synced reports when the caches that the controller uses have synced: on the leader, and with warm
// on every replica.
type synced struct {
	mgr    ctrl.Manager
	cached []client.Object
	always bool
	done   atomic.Bool
}

// NeedLeaderElection implements manager.LeaderElectionRunnable.
func (s *synced) NeedLeaderElection() bool { return !s.always }

// Start implements manager.Runnable.
func (s *synced) Start(ctx context.Context) error {
	for _, obj := range s.cached {
		// Returns once it has synced.
		if _, err := s.mgr.GetCache().GetInformer(ctx, obj); err != nil {
			return err
		}
	}
	s.done.Store(true)
	return nil
}

// check implements healthz.Checker. A standby without a cache is ready at once.
func (s *synced) check(*http.Request) error {
	select {
	case <-s.mgr.Elected():
	default:
		if !s.always {
			return nil
		}
	}
	if !s.done.Load() {
		return errors.New("caches have not synced")
	}
	return nil
}
