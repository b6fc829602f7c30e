// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package federation

import (
	"context"
	"net/http"
	"testing"
	"testing/synctest"

	"k8s.io/component-base/metrics"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/internal/loopmetrics"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
)

// TestLoopOfAClusterIsStartedAgain lets the host run the loop of a cluster as after an early end.
func TestLoopOfAClusterIsStartedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		options := controllers.LoopOptions{Name: Name, Metrics: loopmetrics.New(metrics.NewKubeRegistry())}
		var loop controllers.ClusterLoop
		stopped := false
		cluster := &controllers.Cluster{LoopOptions: options, Go: func(_ context.Context, l controllers.ClusterLoop) func() {
			loop = l
			return func() { stopped = true }
		}}
		cluster.LoopOptions.Cluster = "c1"
		options.Loop = "host"
		c := &controller{readyByName: map[string]*readyCluster{}, clusterOpened: make(chan struct{}, 1)}
		var err error
		if c.loop, err = newKeyLoop(options, nil); err != nil {
			t.Fatal(err)
		}
		assert.NoError(t, c.openCluster(t.Context(), "c1", &client{cluster: cluster, transport: &http.Transport{}}))
		r := c.readyCluster("c1")
		for range 2 {
			ctx, end := context.WithCancel(t.Context())
			done := make(chan error)
			go func() { done <- loop.Run(ctx) }()
			synctest.Wait()
			if !r.running.Load() {
				t.Error("the loop runs, and its cluster is not followed")
			}
			end()
			if err := <-done; err != nil || r.running.Load() {
				t.Errorf("it has ended with the error %v, running %v", err, r.running.Load())
			}
		}
		if r.stop(); !stopped {
			t.Error("the host's loop is not stopped")
		}
	})
}
