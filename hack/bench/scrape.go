// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"syscall"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

// statusInterval limits how exact the times of catchUp are.
const statusInterval = 2 * time.Millisecond

// scraper returns a client with a token that may read everything that the subjects serve.
func (b *bench) scraper(ctx context.Context) (*http.Client, error) {
	kubeconfig, err := b.kubeconfig(ctx, "bench-scraper")
	if err != nil {
		return nil, err
	}
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return nil, err
	}
	config.CAData, config.Insecure = nil, true // their certificates are self-signed
	config.Timeout = 5 * time.Second
	return rest.HTTPClientFor(config)
}

// catchUp ends our leader and returns how long after the write that made the standby the holder it
// had reconciled n workloads and had none left. A workload with nothing to write shows only in the
// controller's own status.
func (p *pair) catchUp(ctx context.Context, n int) (time.Duration, error) {
	client, err := p.b.scraper(ctx)
	if err != nil {
		return 0, err
	}
	defer client.CloseIdleConnections()
	url := strings.TrimSuffix(p.standby.metricsURL, "/metrics") + "/debug/controllers/config-reload"
	checkCaughtUp := func() error {
		body, err := get(client, url)
		if err != nil {
			return err
		}
		var status struct {
			Reconciles, QueueDepth int
			InFlight               []any
		}
		if err := json.Unmarshal(body, &status); err != nil {
			return err
		}
		if status.Reconciles < n || status.QueueDepth > 0 || len(status.InFlight) > 0 {
			return fmt.Errorf("%d of %d reconciles, %d keys wait", status.Reconciles, n, status.QueueDepth)
		}
		return nil
	}
	if err := checkCaughtUp(); err == nil { // also lets the standby review the token before it counts
		return 0, fmt.Errorf("%s has reconciled as a standby", p.standby.Name)
	}
	ended := make(chan time.Time, 1)
	failed := make(chan error, 1)
	go func() {
		failed <- eventually(ctx, statusInterval, "all workloads to be reconciled", func(context.Context) error { return checkCaughtUp() })
		ended <- time.Now()
	}()
	t, err := p.takeover(ctx, syscall.SIGTERM)
	if pollErr := <-failed; err == nil {
		err = pollErr
	}
	return (<-ended).Sub(t.wonLease), err
}
