// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"reflect"
	"runtime/debug"
	"slices"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/discovery/cached/memory"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/gentype"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/restmapper"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"
	"k8s.io/component-base/metrics"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/informers"
)

// Host is what the manager passes to Entry.New. A mistake that a function of it finds, such as an
// informer that is not declared, is a panic there, and fails the manager's start with an error that
// names the controller.
//
// All clients come from RESTConfig, so each of their writes passes both fences and --dry-run. They
// read at any time and write only while this replica leads.
type Host struct {
	// Informer returns the shared informer of a resource that the entry declares in Needs. Use it
	// with informers.For to have the type of the objects.
	Informer func(schema.GroupVersionResource) cache.SharedIndexInformer
	// LiveVersion returns the resourceVersion that an object of such a resource has in the API
	// server now. A controller calls it when it suspects that the cache is behind; see
	// informers.Factory.LiveVersion.
	LiveVersion func(context.Context, schema.GroupVersionResource, cache.ObjectName) (string, error)
	// Follow shows a handler the objects of a resource that was not known at the start, while the
	// controller runs; see informers.Factory.Follow.
	Follow func(context.Context, informers.Need, chan struct{}, cache.ResourceEventHandler) (*informers.Following, error)
	// Client is for the built-in types, Dynamic for objects of any type. See also ClientFor.
	Client  kubernetes.Interface
	Dynamic dynamic.Interface
	// RESTMapper finds resources by their kinds. It asks the API server when it is first used, and
	// for a kind that it does not know every 10 seconds at most.
	RESTMapper meta.RESTMapper
	// RESTConfig makes other clients with the same limits. They speak JSON, which custom resources
	// need.
	RESTConfig *rest.Config
	// Scheme holds the built-in types and those that the enabled entries add. Types that a library
	// registers with client-go's scheme.Scheme are not in it.
	Scheme *runtime.Scheme
	// Events records Events with a source component of the controller's own, quartermaster-NAME.
	Events record.EventRecorder
	// Loop is for controllers.NewLoop, with the name, the metrics and the clock filled in.
	Loop controllers.Options
	// Metrics is where a controller registers metrics of its own.
	Metrics metrics.KubeRegistry
	// Handle serves a handler on the secure port of every replica, for the paths that begin with
	// /controllers/NAME/ and for callers to whom RBAC allows the path. The handler sees the path
	// from the slash after NAME on. Entry.New may call it once.
	Handle func(http.Handler)

	// applies gets back nothing but the metadata of what Apply has sent.
	applies metadata.Interface
}

// mistake is what functions of a Host panic with that cannot return an error.
type mistake struct{ error }

// RuntimeError makes it one of the errors whose text is shown when a reconcile panics with them: it
// names types and resources, and holds nothing of an object.
func (mistake) RuntimeError() {}

// newHost returns the host of an entry. serve is called with the handler of Host.Handle.
func newHost(
	o *Options, c *clients, scheme *runtime.Scheme, e *events, shared *informers.Factory,
	registry metrics.KubeRegistry, loops *controllers.Metrics, entry Entry, serve func(http.Handler),
) (Host, error) {
	config := c.controller(entry.Name)
	client, err := c.typed(config)
	if err != nil {
		return Host{}, fmt.Errorf("client of controller %s: %w", entry.Name, err)
	}
	dyn, err := dynamic.NewForConfig(config)
	if err != nil {
		return Host{}, fmt.Errorf("client of controller %s: %w", entry.Name, err)
	}
	applies, err := metadata.NewForConfig(config)
	if err != nil {
		return Host{}, fmt.Errorf("client of controller %s: %w", entry.Name, err)
	}
	return Host{
		Informer: func(resource schema.GroupVersionResource) cache.SharedIndexInformer {
			return entry.informer(shared, resource)
		},
		LiveVersion: shared.LiveVersion,
		Follow: func(ctx context.Context, need informers.Need, lists chan struct{}, handler cache.ResourceEventHandler) (*informers.Following, error) {
			need.For = entry.Name
			return shared.Follow(ctx, need, lists, handler)
		},
		Client:     client,
		Dynamic:    dyn,
		RESTMapper: c.mapper,
		RESTConfig: config,
		Scheme:     scheme,
		Events:     e.recorder(o.name + "-" + entry.Name),
		Loop:       controllers.Options{Name: entry.Name, Metrics: loops, Clock: clock.RealClock{}},
		Metrics:    registry,
		Handle:     serve,
		applies:    applies,
	}, nil
}

// Apply applies objects server-side, all at once, with the entry's name as the field manager. It takes
// fields over that somebody else has set. It returns when all have been answered, with the errors of
// all; a mistake in one of the configurations, or an object that is there twice, keeps it from sending
// any. An object that needs another one first is applied by a later call. Of several errors,
// apierrors.IsNotFound and the like see the first only.
//
// Configurations of built-in types are in k8s.io/client-go/applyconfigurations, and controller-gen makes
// those of custom resources; an unstructured object is applied with Dynamic.
func (h Host) Apply(ctx context.Context, configs ...runtime.ApplyConfiguration) error {
	return h.apply(ctx, configs)
}

// ApplyStatus is Apply for the status of an object.
func (h Host) ApplyStatus(ctx context.Context, config runtime.ApplyConfiguration) error {
	return h.apply(ctx, []runtime.ApplyConfiguration{config}, "status")
}

func (h Host) apply(ctx context.Context, configs []runtime.ApplyConfiguration, subresources ...string) error {
	patches := make([]patch, len(configs))
	for i, config := range configs {
		p, err := h.patch(config)
		if err != nil {
			return err
		}
		if slices.ContainsFunc(patches[:i], func(o patch) bool { return o.resource == p.resource && o.object == p.object }) {
			// Each would remove what the other has set, since both are of one field manager.
			return fmt.Errorf("apply %s %s: it is among the objects twice", p.kind, p.object)
		}
		patches[i] = p
	}
	errs := make([]error, len(patches))
	var sent sync.WaitGroup
	for i, p := range patches {
		sent.Go(func() { errs[i] = h.send(ctx, p, subresources...) })
	}
	sent.Wait()
	return errors.Join(errs...)
}

// patch is what Apply sends of one object.
type patch struct {
	kind     string
	resource schema.GroupVersionResource
	object   cache.ObjectName
	body     []byte
}

func (h Host) patch(config runtime.ApplyConfiguration) (patch, error) {
	body, err := json.Marshal(config)
	if err != nil {
		return patch{}, fmt.Errorf("apply a %T: %w", config, err)
	}
	var object metav1.PartialObjectMetadata
	if err := json.Unmarshal(body, &object); err != nil {
		return patch{}, fmt.Errorf("apply a %T: %w", config, err)
	}
	gvk := object.GroupVersionKind()
	if gvk.Version == "" || gvk.Kind == "" || object.Name == "" {
		return patch{}, fmt.Errorf("apply a %T: its apiVersion, kind or name is missing", config)
	}
	name := cache.MetaObjectToName(&object)
	mapping, err := h.RESTMapper.RESTMapping(gvk.GroupKind(), gvk.Version)
	if err != nil {
		return patch{}, fmt.Errorf("apply %s %s: %w", gvk.Kind, name, err)
	}
	// The API server knows no such path, and its NotFound would be taken for that of an object.
	switch namespaced := mapping.Scope.Name() == meta.RESTScopeNameNamespace; {
	case namespaced && name.Namespace == "":
		return patch{}, fmt.Errorf("apply %s %s: its namespace is missing", gvk.Kind, name)
	case !namespaced && name.Namespace != "":
		return patch{}, fmt.Errorf("apply %s %s: objects of this kind have no namespace", gvk.Kind, name)
	}
	return patch{gvk.Kind, mapping.Resource, name, body}, nil
}

func (h Host) send(ctx context.Context, p patch, subresources ...string) error {
	// Field validation would parse the patch again, to find fields that are there twice. Unknown ones are
	// errors in any case.
	opts := metav1.PatchOptions{FieldManager: h.Loop.Name, Force: ptr.To(true), FieldValidation: metav1.FieldValidationIgnore}
	_, err := h.applies.Resource(p.resource).Namespace(p.object.Namespace).
		Patch(ctx, p.object.Name, types.ApplyPatchType, p.body, opts, subresources...)
	if err != nil {
		return fmt.Errorf("apply %s %s: %w", p.kind, p.object, err)
	}
	return nil
}

// Object is a Go type of the API, such as *v1.Widget.
type Object interface {
	runtime.Object
	metav1.Object
}

// TypedClient is a client of one resource, see [ClientFor].
type TypedClient[T Object] struct {
	resource string
	client   rest.Interface
}

// ClientFor returns a client of a resource whose Go type is in the host's scheme, such as a custom
// resource that the entry adds with AddToScheme. Built-in types can be had from Host.Client too.
func ClientFor[T Object](h Host, resource schema.GroupVersionResource) TypedClient[T] {
	version := resource.GroupVersion()
	object := newObject[T]()
	kinds, _, err := h.Scheme.ObjectKinds(object)
	if err != nil {
		panic(mistake{fmt.Errorf("asks for a client of %T, which AddToScheme has not added to the scheme", object)})
	}
	if kinds[0].GroupVersion() != version {
		panic(mistake{fmt.Errorf("asks for a client of %s with %T, which is a type of %s", resource.GroupResource(), object, kinds[0].GroupVersion())})
	}
	if other := informers.OtherKind(h.Scheme, kinds[0], resource); other != "" {
		panic(mistake{fmt.Errorf("asks for a client of %s with %T, but these are of the kind %s", resource.GroupResource(), object, other)})
	}
	config := rest.CopyConfig(h.RESTConfig)
	config.APIPath, config.GroupVersion = "/apis", &version
	if version.Group == "" {
		config.APIPath = "/api"
	}
	config.NegotiatedSerializer = serializer.NewCodecFactory(h.Scheme).WithoutConversion()
	client, err := rest.RESTClientFor(config)
	if err != nil {
		panic(mistake{fmt.Errorf("client of %s: %w", resource.GroupResource(), err)})
	}
	return TypedClient[T]{resource.Resource, client}
}

// Namespace returns the client for objects in a namespace; empty is for those that have none.
func (c TypedClient[T]) Namespace(namespace string) *gentype.Client[T] {
	return gentype.NewClient(c.resource, c.client, metav1.ParameterCodec, namespace, newObject[T])
}

// newObject returns a new object of the type to which T is a pointer.
func newObject[T Object]() T {
	t := reflect.TypeFor[T]()
	if t.Kind() != reflect.Pointer {
		panic(mistake{fmt.Errorf("asks for a client of %s, which is no pointer to a Go type", t)})
	}
	return reflect.New(t.Elem()).Interface().(T)
}

// mapperPatience is how long a RESTMapper believes that there is no kind that it does not know.
const mapperPatience = 10 * time.Second

// newMapper returns a mapper that asks the API server when it is first used.
func newMapper(c connection) (meta.RESTMapper, error) {
	client, err := discovery.NewDiscoveryClientForConfig(c.named("discovery"))
	if err != nil {
		return nil, err
	}
	return restmapper.NewDeferredDiscoveryRESTMapper(&agingDiscovery{CachedDiscoveryInterface: memory.NewMemCacheClient(client)}), nil
}

// agingDiscovery makes the mapper ask again for a kind that it does not know: its custom resource
// definition may be newer than what is cached.
type agingDiscovery struct {
	discovery.CachedDiscoveryInterface
	mu    sync.Mutex
	asked time.Time
}

// Fresh reports whether it is of no use to ask again.
func (d *agingDiscovery) Fresh() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.CachedDiscoveryInterface.Fresh() && time.Since(d.asked) < mapperPatience
}

// Invalidate makes the next use ask.
func (d *agingDiscovery) Invalidate() {
	d.mu.Lock()
	d.asked = time.Now()
	d.mu.Unlock()
	d.CachedDiscoveryInterface.Invalidate()
}

// contained returns a handler of a controller's paths that contains panics, as everything that the
// host calls of a controller.
func (h *hosted) contained(handler http.Handler) http.Handler {
	return http.StripPrefix("/controllers/"+h.name, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		defer func() {
			switch panicked := recover(); panicked {
			case nil:
			case http.ErrAbortHandler:
				panic(panicked) // net/http's own way to end a response
			default:
				h.loops.Panicked(h.name)
				klog.FromContext(r.Context()).Error(errors.New("panic in a controller's HTTP handler"), "Request failed",
					"controller", h.name, "type", fmt.Sprintf("%T", panicked), "stack", string(debug.Stack()))
				http.Error(w, "the controller's handler panicked", http.StatusInternalServerError)
			}
		}()
		handler.ServeHTTP(w, r)
	}))
}
