// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Command nodes acts as the kubelet of every Node of a cluster, without running anything: Nodes are
// ready, Pods run, Pods of Jobs succeed, and deleted Pods go away. Package hack/cluster starts it.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/pflag"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/kwok/kustomize/stage/node/fast"
	heartbeat "sigs.k8s.io/kwok/kustomize/stage/node/heartbeat-with-lease"
	podfast "sigs.k8s.io/kwok/kustomize/stage/pod/fast"
	"sigs.k8s.io/kwok/pkg/apis/internalversion"
	kwokconfig "sigs.k8s.io/kwok/pkg/config"
	"sigs.k8s.io/kwok/pkg/kwok/controllers"
	kwokclient "sigs.k8s.io/kwok/pkg/utils/client"
)

// Longer than the blink of an eye, so that a person can watch.
const (
	podStart = time.Second     // from a Pod's Node to its containers
	jobRun   = 5 * time.Second // how long the Pod of a Job runs
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	err := run(ctx, os.Args[1:])
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "Error:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	fs := pflag.NewFlagSet("nodes", pflag.ContinueOnError)
	kubeconfig := fs.String("kubeconfig", "", "the cluster, and a user who may do what a kubelet may")
	if err := fs.Parse(args); err != nil {
		return err
	}
	if *kubeconfig == "" {
		return errors.New("--kubeconfig is required")
	}
	config, err := controllerConfig(*kubeconfig)
	if err != nil {
		return err
	}
	c, err := controllers.NewController(config)
	if err != nil {
		return err
	}
	if err := c.Start(ctx); err != nil {
		return err
	}
	<-ctx.Done()
	return nil
}

func controllerConfig(kubeconfig string) (config controllers.Config, err error) {
	config = controllers.Config{
		Clock:                     clock.RealClock{},
		ManageAllNodes:            true,
		CIDR:                      "10.244.0.0/16", // of the Pods
		NodeIP:                    "127.0.0.1",
		PodPlayStageParallelism:   4,
		NodePlayStageParallelism:  4,
		NodeLeaseParallelism:      4,
		PodsOnNodeSyncParallelism: 1,
		NodeLeaseDurationSeconds:  40, // a kubelet's
	}
	if config.LocalStages, err = stages(); err != nil {
		return config, err
	}
	if config.ID, err = controllers.Identity(); err != nil {
		return config, err
	}
	clients, err := kwokclient.NewClientset("", kubeconfig)
	if err != nil {
		return config, err
	}
	restConfig, err := clients.ToRESTConfig()
	if err != nil {
		return config, err
	}
	if config.RESTClient, err = rest.RESTClientFor(restConfig); err != nil {
		return config, err
	}
	if config.TypedClient, err = kubernetes.NewForConfig(restConfig); err != nil {
		return config, err
	}
	if config.DynamicClient, err = clients.ToDynamicClient(); err != nil {
		return config, err
	}
	config.RESTMapper, err = clients.ToRESTMapper()
	return config, err
}

// stages returns what happens to Nodes and Pods, and after how long.
func stages() (map[internalversion.StageResourceRef][]*internalversion.Stage, error) {
	byResource := map[internalversion.StageResourceRef][]*internalversion.Stage{}
	for _, s := range []struct {
		yaml  string
		delay time.Duration // 0 keeps the stage's delay
	}{
		{yaml: fast.DefaultNodeInit},
		{yaml: heartbeat.DefaultNodeHeartbeatWithLease},
		{yaml: podfast.DefaultPodReady, delay: podStart},
		{yaml: podfast.DefaultPodComplete, delay: jobRun},
		{yaml: podfast.DefaultPodDelete},
	} {
		stage, err := kwokconfig.UnmarshalWithType[*internalversion.Stage](s.yaml)
		if err != nil {
			return nil, err
		}
		if s.delay > 0 {
			stage.Spec.Delay = &internalversion.StageDelay{DurationMilliseconds: ptr.To(s.delay.Milliseconds())}
		}
		ref := stage.Spec.ResourceRef
		byResource[ref] = append(byResource[ref], stage)
	}
	return byResource, nil
}
