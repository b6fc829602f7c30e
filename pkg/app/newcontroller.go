// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"errors"
	"fmt"
	"net/http"
	"runtime/debug"
	"slices"
	"time"

	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"

	"github.com/quartermaster-dev/quartermaster/internal/panics"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
)

// newControllers builds the controllers of the entries. The error names every controller that cannot be
// built.
func (p *process) newControllers(entries []controllers.Entry) (all hostedControllers, err error) {
	var errs []error
	for _, entry := range entries {
		errs = append(errs, recovered(entry.Name, "New", func() error {
			c, err := p.newController(entry)
			all = append(all, c)
			return err
		}))
	}
	return all, errors.Join(errs...)
}

// newController builds the controller of an entry.
func (p *process) newController(entry controllers.Entry) (*hostedController, error) {
	clusters := &openClusters{process: p, controller: entry.Name}
	h := newHosted(entry.Name, p.cache, clusters, p.loopMetrics, p.options.Generic.ControllerStuckAfter)
	h.everyReplica = entry.EveryReplica
	clients, err := p.clientsOf(entry.Name, p.clients.forController(entry.Name), p.clients.mapper)
	if err != nil {
		return nil, err
	}
	h.controller, err = entry.New(controllers.Host{
		Clients:     clients,
		Settings:    p.options.Settings(),
		Cache:       p.cache.ForController(entry.Name),
		Events:      p.events.recorder(p.options.name + "-" + entry.Name),
		LoopOptions: p.loopOptions(entry.Name, ""),
		Metrics:     p.metrics,
		Handle:      h.handle,
		Cluster:     h.openCluster,
	})
	if err == nil && h.controller == nil {
		err = errors.New("no controller was returned by New")
	}
	h.built.Store(true)
	return h, err
}

// handle implements Host.Handle.
func (h *hostedController) handle(handler http.Handler) {
	if handler == nil || h.handler != nil || h.built.Load() {
		panic(panics.Mistake("calls Host.Handle with nil, twice or after New"))
	}
	h.handler = h.withoutPanics(handler)
}

// openCluster implements Host.Cluster. New must not open a cluster: the host would close it when Run ends,
// and the next Run would lack it.
func (h *hostedController) openCluster(name string, config *rest.Config) (*controllers.Cluster, error) {
	if !h.built.Load() {
		panic(panics.Mistake("calls Host.Cluster in New; call it in Run or in a reconcile"))
	}
	return h.clusters.open(name, config)
}

// slowFunction is how long a function of an entry may take before the log names it: no probe is answered yet,
// and nothing else would show for which controller the process waits.
const slowFunction = 10 * time.Second

// recovered calls a function of a controller's entry. The error names the controller. If the function panics,
// the error has the stack, or is the Mistake that a function of the host has found.
func recovered(controller, function string, f func() error) (err error) {
	slow := time.AfterFunc(slowFunction, func() {
		klog.Background().Info("Still waiting for a function of a controller", "controller", controller, "function", function)
	})
	defer slow.Stop()
	defer func() {
		switch r := recover().(type) {
		case nil:
		case panics.Mistake:
			err = r
		default:
			err = fmt.Errorf("%s: panic: %v\n%s", function, r, debug.Stack()) // at the start no object has been read
		}
		if err != nil {
			err = fmt.Errorf("controller %s: %w", controller, err)
		}
	}()
	return f()
}

// clientsOf returns a controller's clients of the API server to which config leads.
func (p *process) clientsOf(controller string, config *rest.Config, mapper *kindMapper) (controllers.Clients, error) {
	shared, err := rest.HTTPClientFor(config)
	if err != nil {
		return controllers.Clients{}, err
	}
	client, clientErr := kubernetes.NewForConfigAndClient(p.clients.builtIn(config), shared)
	dynamicClient, dynamicErr := dynamic.NewForConfigAndClient(config, shared)
	metadataClient, metadataErr := metadata.NewForConfigAndClient(config, shared)
	return controllers.Clients{
		Client: client, Dynamic: dynamicClient, Metadata: metadataClient, Mapping: mapper.mapping,
		RESTConfig: config, Scheme: p.scheme, FieldManager: controller,
	}, errors.Join(clientErr, dynamicErr, metadataErr)
}

// loopOptions returns the options of the loops of a controller, in a cluster. A reconcile that obeys its
// context ends in time for a release of the Lease.
func (p *process) loopOptions(controller, cluster string) controllers.LoopOptions {
	shutdown := p.options.Generic.ShutdownTimeout
	o := controllers.LoopOptions{Name: controller, Cluster: cluster, Workers: *p.options.workers[controller],
		Timeout: p.options.Generic.ControllerStuckAfter, DrainTimeout: max(shutdown-2*time.Second, shutdown/2),
		Metrics: p.loopMetrics}
	if cluster == "" {
		for _, i := range p.cache.Declared(controller) {
			o.WaitFor = append(o.WaitFor, i)
		}
		o.WaitFor = slices.Clip(o.WaitFor) // loops of one controller append to copies
	}
	return o
}
