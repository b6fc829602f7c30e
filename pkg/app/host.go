// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"errors"
	"fmt"
	"net/http"

	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/clock"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/informers"
)

// newControllers builds the controllers of the entries. The error names every controller that cannot be
// built.
func (p *process) newControllers(entries []controllers.Entry) (all hostedControllers, err error) {
	var errs []error
	for _, entry := range entries {
		h, err := p.newController(entry)
		if err != nil {
			errs = append(errs, fmt.Errorf("controller %s: %w", entry.Name, err))
			continue
		}
		all = append(all, h)
	}
	return all, errors.Join(errs...)
}

// newController builds the controller of an entry. What a function of the host panics with is returned
// as an error.
func (p *process) newController(entry controllers.Entry) (_ *hosted, err error) {
	host, err := p.host(entry.Name)
	if err != nil {
		return nil, err
	}
	var handler http.Handler
	host.Handle = func(h http.Handler) {
		if h == nil || handler != nil {
			panic(controllers.Mistake("calls Host.Handle with nil or twice"))
		}
		handler = h
	}
	defer func() {
		switch r := recover().(type) {
		case nil:
		case controllers.Mistake:
			err = r
		case informers.MismatchError:
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
	config := p.clients.controller(name)
	h = controllers.Host{
		Settings: p.options.Settings(),
		Informer: func(resource schema.GroupVersionResource) cache.SharedIndexInformer {
			// An informer that only another entry declares may lack what this one needs of the objects,
			// and is missing when the other is switched off.
			informer, ok := p.cache.Informer(name, resource)
			if !ok {
				panic(controllers.Mistake(fmt.Sprintf("asks for the informer of %s, which its entry does not declare in Needs", resource.GroupResource())))
			}
			return informer
		},
		LiveVersion: p.cache.LiveVersion,
		Follow:      follow(p.cache, name),
		Cluster: func(cluster string, config *rest.Config) (*controllers.Cluster, error) {
			return p.openCluster(name, cluster, config)
		},
		Mapping:    p.clients.mapper.mapping,
		RESTConfig: config,
		Scheme:     p.scheme,
		Events:     p.events.recorder(p.options.name + "-" + name),
		Loop:       controllers.Options{Name: name, Metrics: p.loopMetrics, Clock: clock.RealClock{}},
		Metrics:    p.registry,
	}
	var clientErr, dynamicErr, metadataErr error
	h.Client, clientErr = p.clients.typed(config)
	h.Dynamic, dynamicErr = dynamic.NewForConfig(config)
	h.Metadata, metadataErr = metadata.NewForConfig(config)
	return h, errors.Join(clientErr, dynamicErr, metadataErr)
}

// follow returns Factory.Follow for a controller.
func follow(c *informers.Factory, controller string) func(context.Context, informers.Need, chan struct{}, cache.ResourceEventHandler) (*informers.Following, error) {
	return func(ctx context.Context, need informers.Need, lists chan struct{}, handler cache.ResourceEventHandler) (*informers.Following, error) {
		need.For = controller
		return c.Follow(ctx, need, lists, handler)
	}
}
