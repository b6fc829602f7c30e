// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"errors"
	"fmt"
	"net/http"
	"runtime/debug"
	"sync/atomic"

	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"

	"github.com/quartermaster-dev/quartermaster/internal/panics"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
)

// newControllers builds the controllers of the entries. The error names every controller that cannot be
// built.
func (p *process) newControllers(entries []controllers.Entry) (all hostedControllers, err error) {
	var errs []error
	for _, entry := range entries {
		c, err := p.newController(entry)
		if err != nil {
			errs = append(errs, fmt.Errorf("controller %s: %w", entry.Name, err))
			continue
		}
		all = append(all, c)
	}
	return all, errors.Join(errs...)
}

// newController builds the controller of an entry.
func (p *process) newController(entry controllers.Entry) (*hostedController, error) {
	host, err := p.host(entry.Name)
	if err != nil {
		return nil, err
	}
	var handler http.Handler
	var built atomic.Bool
	host.Handle = func(h http.Handler) {
		if h == nil || handler != nil || built.Load() {
			panic(panics.Mistake("calls Host.Handle with nil, twice or after New"))
		}
		handler = h
	}
	clusters := &openClusters{process: p, controller: entry.Name}
	host.Cluster = func(name string, config *rest.Config) (*controllers.Cluster, error) {
		if !built.Load() { // the cluster would be closed when Run ends, and be missing in the next Run
			panic(panics.Mistake("calls Host.Cluster in New; call it in Run or in a reconcile"))
		}
		return clusters.open(name, config)
	}
	var c controllers.Controller
	if err := recovered("New", func() (err error) { c, err = entry.New(host); return err }); err != nil {
		return nil, err
	}
	built.Store(true)
	if c == nil {
		return nil, errors.New("no controller was returned by New")
	}
	h := newHosted(entry.Name, c, p.cache, clusters, p.loopMetrics, p.options.Generic.ControllerStuckAfter)
	h.everyReplica = entry.EveryReplica
	if handler != nil {
		h.handler = h.withoutPanics(handler)
	}
	return h, nil
}

// recovered calls a function of an entry. If the function panics, recovered returns an error with the stack,
// or the Mistake that a function of the host has found.
func recovered(name string, f func() error) (err error) {
	defer func() {
		switch r := recover().(type) {
		case nil:
		case panics.Mistake:
			err = r
		default:
			err = fmt.Errorf("%s: panic: %v\n%s", name, r, debug.Stack()) // at the start no object has been read
		}
	}()
	return f()
}

// host returns the host of a controller, without Handle and Cluster.
func (p *process) host(name string) (controllers.Host, error) {
	all, err := p.clientsOf(name, p.clients.forController(name), p.clients.kinds)
	return controllers.Host{
		Clients:     all,
		Settings:    p.options.Settings(),
		Cache:       p.cache.ForController(name),
		Events:      p.events.recorder(p.options.name + "-" + name),
		LoopOptions: controllers.LoopOptions{Name: name, Workers: *p.options.workers[name], Metrics: p.loopMetrics},
		Metrics:     p.metrics,
	}, err
}

// clientsOf returns a controller's clients of the API server to which config leads.
func (p *process) clientsOf(controller string, config *rest.Config, kinds *kinds) (controllers.Clients, error) {
	shared, err := rest.HTTPClientFor(config)
	if err != nil {
		return controllers.Clients{}, err
	}
	client, clientErr := kubernetes.NewForConfigAndClient(p.clients.builtIn(config), shared)
	dynamicClient, dynamicErr := dynamic.NewForConfigAndClient(config, shared)
	metadataClient, metadataErr := metadata.NewForConfigAndClient(config, shared)
	return controllers.Clients{
		Client: client, Dynamic: dynamicClient, Metadata: metadataClient, Mapping: kinds.mapping,
		RESTConfig: config, Scheme: p.scheme, FieldManager: controller,
	}, errors.Join(clientErr, dynamicErr, metadataErr)
}
