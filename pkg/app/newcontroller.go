// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"errors"
	"fmt"
	"net/http"

	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/internal/panics"
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

// newController builds the controller of an entry. If a function of the host panics with a Mistake, that is
// the error.
func (p *process) newController(entry controllers.Entry) (_ *hosted, err error) {
	host, err := p.host(entry.Name)
	if err != nil {
		return nil, err
	}
	var handler http.Handler
	host.Handle = func(h http.Handler) {
		if h == nil || handler != nil {
			panic(panics.Mistake("calls Host.Handle with nil or twice"))
		}
		handler = h
	}
	defer func() {
		switch r := recover().(type) {
		case nil:
		case panics.Mistake:
			err = r
		default:
			panic(r)
		}
	}()
	c, err := entry.New(host)
	if err != nil {
		return nil, err
	}
	if c == nil {
		return nil, errors.New("no controller was returned by New")
	}
	h := newHosted(entry.Name, c, p.cache, p.loopMetrics, p.options.Generic.ControllerStuckAfter)
	h.everyReplica = entry.EveryReplica
	if handler != nil {
		h.handler = h.contained(handler)
	}
	return h, nil
}

// host returns the host of a controller, without Handle.
func (p *process) host(name string) (h controllers.Host, err error) {
	config := p.clients.forController(name)
	h = controllers.Host{
		Settings:        p.options.Settings(),
		ControllerCache: p.cache.ForController(name),
		Cluster: func(cluster string, config *rest.Config) (*controllers.Cluster, error) {
			return p.openCluster(name, cluster, config)
		},
		Mapping:     p.clients.kinds.resourceOf,
		RESTConfig:  config,
		Scheme:      p.scheme,
		Events:      p.events.recorder(p.options.name + "-" + name),
		LoopOptions: controllers.LoopOptions{Name: name, Metrics: p.loopMetrics, Clock: clock.RealClock{}},
		Metrics:     p.registry,
	}
	var clientErr, dynamicErr, metadataErr error
	h.Client, clientErr = p.clients.typed(config)
	h.Dynamic, dynamicErr = dynamic.NewForConfig(config)
	h.Metadata, metadataErr = metadata.NewForConfig(config)
	return h, errors.Join(clientErr, dynamicErr, metadataErr)
}
