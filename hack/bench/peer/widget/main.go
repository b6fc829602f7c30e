// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Command widget is what examples/widget is compared with: the same controller on
// controller-runtime, as its documentation would have it.
package main

import (
	"flag"
	"os"

	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/healthz"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	v1 "github.com/quartermaster-dev/quartermaster/examples/widget/api/v1"
)

func main() {
	health := flag.String("health", "", "address of /readyz")
	metrics := flag.String("metrics", "0", "address of /metrics")
	flag.Parse() // controller-runtime defines --kubeconfig

	ctrl.SetLogger(klog.Background())
	if err := run(*health, *metrics); err != nil {
		klog.Background().Error(err, "Failed")
		os.Exit(1)
	}
}

func run(health, metrics string) error {
	scheme := clientgoscheme.Scheme
	if err := v1.AddToScheme(scheme); err != nil {
		return err
	}
	mgr, err := ctrl.NewManager(ctrl.GetConfigOrDie(), ctrl.Options{
		Scheme:                        scheme,
		Metrics:                       metricsserver.Options{BindAddress: metrics},
		HealthProbeBindAddress:        health,
		LeaderElection:                true,
		LeaderElectionID:              "bench-peer-widget",
		LeaderElectionNamespace:       "kube-system",
		LeaderElectionReleaseOnCancel: true,
	})
	if err != nil {
		return err
	}
	r := &reconciler{Client: mgr.GetClient(), scheme: scheme, events: mgr.GetEventRecorderFor("widget")} //nolint:staticcheck // the API of Events that most controllers use
	if err := r.setUp(mgr); err != nil {
		return err
	}
	if err := mgr.AddReadyzCheck("ping", healthz.Ping); err != nil {
		return err
	}
	return mgr.Start(ctrl.SetupSignalHandler())
}
