// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package controllers

import (
	"context"
	"fmt"
	"net/http"
	"reflect"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/gentype"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/record"
	"k8s.io/component-base/metrics"

	"github.com/quartermaster-dev/quartermaster/internal/gotype"
	"github.com/quartermaster-dev/quartermaster/internal/panics"
	"github.com/quartermaster-dev/quartermaster/pkg/informers"
)

// Host is what the manager passes to [Entry.New]. If a method of Host or a function that takes a Host finds
// a mistake, such as an undeclared informer, it panics. The manager recovers the panic and does not start:
// its error names the controller.
type Host struct {
	// Settings is what the process decides for all controllers.
	Settings Settings
	// Cache is the cache as the controller gets it. informers.For returns the informer of a resource that the
	// entry declares in Needs. informers.Follow returns the informer of a resource that the controller names at
	// run time.
	informers.Cache
	// Each write of the Clients passes both fences and --dry-run.
	Clients
	// Cluster opens the API server of another cluster, in Run or in a reconcile.
	//
	//   - name is a label of metrics. No other open cluster of the controller may have it.
	//   - config holds credentials as contents, not as files or programs. Build it from scratch, since
	//     RESTConfig may send the token of this process.
	//   - config.QPS limits all clients together; 0 means no limit. config.Timeout is for the clients of
	//     Cluster.RESTConfig.
	//
	// The host closes a cluster that is left open when Run has returned, and waits for its loops.
	Cluster func(name string, config *rest.Config) (*Cluster, error)
	// Events records Events with a source component of the controller's own, BUILD-NAME: quartermaster-NAME
	// without app.Named.
	Events record.EventRecorder
	// LoopOptions is for NewLoop, with the name, the workers and the metrics filled in.
	LoopOptions LoopOptions
	// Metrics is where a controller registers metrics of its own, in Entry.New.
	Metrics MetricsRegistry
	// Handle serves a handler on the secure port of every replica, for the paths that begin with
	// /controllers/NAME/ and for callers to whom RBAC allows the path. The handler sees the path
	// from the slash after NAME on. Entry.New may call it once.
	Handle func(http.Handler)
}

// MetricsRegistry is where a controller registers its metrics. A mistake, such as a name that another
// controller has registered, panics, see Host.
type MetricsRegistry interface {
	MustRegister(...metrics.Registerable)
	// RawMustRegister is for what metrics.NewGaugeFunc returns, and for collectors. If one panics, a scrape
	// lacks its metrics only.
	RawMustRegister(...prometheus.Collector)
}

// Clients are a controller's clients of one API server. All come from RESTConfig. They read at any time and
// write only while this replica leads.
type Clients struct {
	// Client is for the built-in types, Dynamic for objects of any type. See also ClientFor.
	Client  kubernetes.Interface
	Dynamic dynamic.Interface
	// Metadata is for the metadata of objects of any type, without their content.
	Metadata metadata.Interface
	// Mapping finds the resource of a kind. For an unknown kind it asks the API server, every 10 seconds
	// at most unless the request fails, and waits for the answer; the error is a meta.NoKindMatchError if no
	// resource has the kind.
	Mapping func(context.Context, schema.GroupVersionKind) (*meta.RESTMapping, error)
	// RESTConfig makes other clients with the same limits. They speak JSON, which custom resources
	// need.
	RESTConfig *rest.Config
	// Scheme holds the built-in types and those that the enabled entries add. Types that a library
	// registers with client-go's scheme.Scheme are not in it.
	Scheme *runtime.Scheme
	// FieldManager is the entry's name, as which Apply and PatchFinalizers write.
	FieldManager string
}

func (c Clients) clients() Clients { return c }

// HasClients is [Clients] or what embeds them: a Host or a *Cluster.
type HasClients interface{ clients() Clients }

// Cluster is the API server of another cluster, see Host.Cluster. Before you open a cluster, read "Other
// clusters" in docs/operate/security.md.
type Cluster struct {
	// Cache is for informers.Follow, in all namespaces of that cluster. Needs are not declared for it.
	informers.Cache
	// Writes of the Clients pass the fence of the election and --dry-run, but not the fence in our own API
	// server, and they do not hold up the release of our Lease. RESTConfig does not contain the credentials. The
	// Clients do not follow redirects.
	Clients
	// Events records Events in that cluster. They are written like other objects, so the account needs to be
	// allowed to create and patch Events. Close drops those that are not sent yet.
	Events record.EventRecorder
	// LoopOptions is for the NewLoop of a loop that works there. Its reconciles in flight are cut off 2 s after
	// the oldest of them began, since the other API server may not answer. Go runs the loop, and closes it; a
	// loop that is not passed to Go has to be closed.
	LoopOptions LoopOptions
	// Go runs a loop until Close or stop is called, and then closes the loop. stop waits until the loop has
	// closed.
	//
	//   - ctx is the context of Run or of a reconcile, and tells the loop whether this replica leads. The loop
	//     outlasts ctx. Its channel of Draining is closed when the controller is told to drain.
	//   - A loop that ends earlier is started again, and is a problem of the controller until it has run for
	//     5 min.
	//   - After Close, Go closes the loop without running it.
	Go func(ctx context.Context, loop ClusterLoop) (stop func())
	// Close ends the loops and waits for them, stops the followed informers and removes the cluster's metrics.
	// It does not wait for requests of the informers; when they have ended, or after 5 s, the cluster's
	// connections are closed. A second call does nothing.
	// A loop that Go runs must call neither Close nor stop: both would wait for it.
	Close func()
}

// ClusterLoop is a [Loop] that works in another cluster. Its Status is part of the controller's.
type ClusterLoop interface {
	Controller
	Close()
}

// apiObject is a Go type of the API, such as *v1.Widget.
type apiObject interface {
	runtime.Object
	metav1.Object
}

// TypedClient is a client of one resource, see [ClientFor].
type TypedClient[T apiObject] struct {
	resource string
	client   rest.Interface
}

// ClientFor returns a client of a resource whose Go type is in the scheme, such as a custom resource that the
// entry adds with AddToScheme. Built-in types can be had from Clients.Client too. A mistake panics, see Host.
func ClientFor[T apiObject](has HasClients, resource schema.GroupVersionResource) TypedClient[T] {
	c := has.clients()
	if err := gotype.Check(reflect.TypeFor[T](), resource, c.Scheme); err != nil {
		panic(panics.Mistake(fmt.Sprintf("asks for a client of %s with %s, %v",
			resource.GroupResource(), reflect.TypeFor[T](), err)))
	}
	codecs := serializer.NewCodecFactory(c.Scheme).WithoutConversion()
	client, err := rest.RESTClientFor(gotype.ClientConfig(c.RESTConfig, resource.GroupVersion(), codecs))
	if err != nil {
		panic(panics.Mistake(fmt.Sprintf("client of %s: %v", resource.GroupResource(), err)))
	}
	return TypedClient[T]{resource.Resource, client}
}

// Namespace returns the client for objects in a namespace; empty is for those that have none.
func (c TypedClient[T]) Namespace(namespace string) *gentype.Client[T] {
	newObject := func() T { return reflect.New(reflect.TypeFor[T]().Elem()).Interface().(T) } // T is a pointer
	return gentype.NewClient(c.resource, c.client, metav1.ParameterCodec, namespace, newObject)
}
