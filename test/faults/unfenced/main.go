// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Command unfenced is the counter-check of the tests with faults: the controller config-reload
// behind an elector, but without the fence, and with as little else as possible. It writes after its
// term, which shows that the tests see such writes. Do not use it for anything else.
//
// With --elector=client-go it elects as most controllers do today.
package main

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/signal"
	"strconv"
	"syscall"

	"github.com/spf13/pflag"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
	"k8s.io/client-go/tools/record"
	"k8s.io/component-base/metrics"
	"k8s.io/klog/v2"

	corev1 "k8s.io/api/core/v1"

	"github.com/quartermaster-dev/quartermaster/internal/loopmetrics"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/configreload"
	"github.com/quartermaster-dev/quartermaster/pkg/election"
	"github.com/quartermaster-dev/quartermaster/pkg/election/display"
	"github.com/quartermaster-dev/quartermaster/pkg/informers"
)

type options struct {
	kubeconfig, elector string
	insecurePort        int
	qps                 float32
	burst               int
	election            election.Config
	entry               controllers.Entry
}

func main() {
	o := options{election: election.NewConfig(types.NamespacedName{Namespace: metav1.NamespaceSystem, Name: "quartermaster"}), entry: configreload.Entry()}
	fs := pflag.NewFlagSet("unfenced", pflag.ExitOnError)
	fs.ParseErrorsAllowlist.UnknownFlags = true // it is started like a manager
	fs.StringVar(&o.kubeconfig, "kubeconfig", "", "Path of the kubeconfig.")
	fs.StringVar(&o.elector, "elector", "ours", "ours or client-go.")
	fs.IntVar(&o.insecurePort, "insecure-port", 0, "Port of /readyz on loopback.")
	fs.Float32Var(&o.qps, "kube-api-qps", 20, "Requests per second to the API server.")
	fs.IntVar(&o.burst, "kube-api-burst", 30, "Requests beyond it that may go out at once.")
	o.election.AddFlags(fs)
	o.entry.Config.AddFlags(fs)
	_ = fs.Parse(os.Args[1:]) // exits on an error
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	if err := run(ctx, o); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(ctx context.Context, o options) error {
	config, err := clientcmd.BuildConfigFromFlags("", o.kubeconfig)
	if err != nil {
		return err
	}
	config.QPS, config.Burst = o.qps, o.burst
	registry := metrics.NewKubeRegistry()
	controller, cache, err := newController(o, config, registry)
	if err != nil {
		return err
	}
	cache.Start(ctx)
	go func() { // until the process ends
		mux := http.NewServeMux()
		mux.HandleFunc("/readyz", func(w http.ResponseWriter, r *http.Request) {
			if err := cache.CheckSync(r); err != nil {
				http.Error(w, err.Error(), http.StatusInternalServerError)
			}
		})
		klog.FromContext(ctx).Error(http.ListenAndServe(net.JoinHostPort("127.0.0.1", strconv.Itoa(o.insecurePort)), mux), "Failed to serve")
	}()
	identity := election.NewIdentity(os.Getenv("POD_NAME"))
	if o.elector == "client-go" {
		return runClientGo(ctx, o, config, identity, controller)
	}
	return runElector(ctx, o, config, identity, controller, registry)
}

// newController returns the controller with a client that has no fence.
func newController(o options, config *rest.Config, registry metrics.KubeRegistry) (controllers.Controller, *informers.ClusterCache, error) {
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, nil, err
	}
	needs, err := o.entry.Needs(controllers.Settings{})
	if err != nil {
		return nil, nil, err
	}
	loops := loopmetrics.New(registry)
	caches, err := informers.NewCaches(registry)
	if err != nil {
		return nil, nil, err
	}
	cacheConfig := informers.CacheConfig{Scheme: scheme.Scheme}
	cacheConfig.Declare(o.entry.Name, needs...)
	cache, err := caches.AddCluster(cacheConfig, config, loops.Panicked)
	if err != nil {
		return nil, nil, err
	}
	controller, err := o.entry.New(controllers.Host{
		Cache:       cache.ForController(o.entry.Name),
		Clients:     controllers.Clients{Client: client},
		Metrics:     registry,
		LoopOptions: controllers.LoopOptions{Name: o.entry.Name, Workers: o.entry.Workers, Metrics: loops},
		// Nobody receives them.
		Events: record.NewBroadcaster().NewRecorder(scheme.Scheme, corev1.EventSource{Component: "unfenced"}),
	})
	return controller, cache, err
}

func runElector(ctx context.Context, o options, config *rest.Config, identity string, controller controllers.Controller, registry metrics.KubeRegistry) error {
	client, err := kubernetes.NewForConfig(election.ClientConfig(config))
	if err != nil {
		return err
	}
	electionMetrics, err := display.NewMetrics(registry)
	if err != nil {
		return err
	}
	lock, err := election.NewLock(o.election, election.Candidate{Identity: identity, Metrics: electionMetrics,
		Client: client.CoordinationV1().Leases(o.election.ResourceNamespace)})
	if err != nil {
		return err
	}
	return lock.Run(ctx, controller.Run)
}

// runClientGo follows client-go's examples: the process ends when it has lost the Lease.
func runClientGo(ctx context.Context, o options, config *rest.Config, identity string, controller controllers.Controller) error {
	client, err := kubernetes.NewForConfig(rest.AddUserAgent(config, "leader-election"))
	if err != nil {
		return err
	}
	lost := make(chan struct{})
	elector, err := leaderelection.NewLeaderElector(leaderelection.LeaderElectionConfig{
		Lock: &resourcelock.LeaseLock{
			LeaseMeta:  metav1.ObjectMeta{Namespace: metav1.NamespaceSystem, Name: o.election.ResourceName},
			Client:     client.CoordinationV1(),
			LockConfig: resourcelock.ResourceLockConfig{Identity: identity},
		},
		LeaseDuration: o.election.LeaseDuration.Duration, RenewDeadline: o.election.RenewDeadline.Duration, RetryPeriod: o.election.RetryPeriod.Duration,
		ReleaseOnCancel: true,
		Name:            "unfenced",
		Callbacks: leaderelection.LeaderCallbacks{
			OnStartedLeading: func(ctx context.Context) {
				if err := controller.Run(ctx); err != nil {
					klog.FromContext(ctx).Error(err, "The controller has failed")
				}
			},
			OnStoppedLeading: func() { close(lost) },
		},
	})
	if err != nil {
		return err
	}
	elector.Run(ctx)
	<-lost
	if ctx.Err() != nil {
		return nil
	}
	return fmt.Errorf("%s has lost the Lease", identity)
}
