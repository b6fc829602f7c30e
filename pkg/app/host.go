// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"fmt"
	"net/http"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/tools/cache"
	"k8s.io/component-base/metrics"
	"k8s.io/utils/clock"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/informers"
)

// newHost returns the host of an entry. serve is called with the handler of Host.Handle.
func newHost(
	o *Options, c *clients, scheme *runtime.Scheme, e *events, shared *informers.Factory,
	registry metrics.KubeRegistry, loops *controllers.Metrics, entry controllers.Entry, serve func(http.Handler),
) (controllers.Host, error) {
	config := c.controller(entry.Name)
	client, err := c.typed(config)
	if err != nil {
		return controllers.Host{}, fmt.Errorf("client of controller %s: %w", entry.Name, err)
	}
	dyn, err := dynamic.NewForConfig(config)
	if err != nil {
		return controllers.Host{}, fmt.Errorf("client of controller %s: %w", entry.Name, err)
	}
	meta, err := metadata.NewForConfig(config)
	if err != nil {
		return controllers.Host{}, fmt.Errorf("client of controller %s: %w", entry.Name, err)
	}
	return controllers.Host{
		Settings: o.Settings(),
		Informer: func(resource schema.GroupVersionResource) cache.SharedIndexInformer {
			// An informer that only another entry declares may lack what this one needs of the objects,
			// and is missing when the other is switched off.
			informer, ok := shared.Informer(entry.Name, resource)
			if !ok {
				panic(controllers.Mistake(fmt.Sprintf("asks for the informer of %s, which its entry does not declare in Needs", resource.GroupResource())))
			}
			return informer
		},
		LiveVersion: shared.LiveVersion,
		Follow: func(ctx context.Context, need informers.Need, lists chan struct{}, handler cache.ResourceEventHandler) (*informers.Following, error) {
			need.For = entry.Name
			return shared.Follow(ctx, need, lists, handler)
		},
		Client:     client,
		Dynamic:    dyn,
		Metadata:   meta,
		RESTMapper: c.mapper,
		RESTConfig: config,
		Scheme:     scheme,
		Events:     e.recorder(o.name + "-" + entry.Name),
		Loop:       controllers.Options{Name: entry.Name, Metrics: loops, Clock: clock.RealClock{}},
		Metrics:    registry,
		Handle:     serve,
	}, nil
}
