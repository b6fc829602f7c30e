// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package controllertest

import (
	"cmp"
	"context"
	"fmt"
	"net/http/httptest"
	"path"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/rand"
	clientscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"

	"github.com/quartermaster-dev/quartermaster/pkg/app"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/controllertest/internal/apiserver"
)

// Host is a manager with one controller and an API server of its own.
type Host struct {
	t        testing.TB
	entry    controllers.Entry
	settings controllers.Settings
	scheme   *runtime.Scheme
	server   *apiserver.Server
	network  *network
	logger   klog.Logger
	stop     func() // the manager, if it runs
	lag      time.Duration

	mu      sync.Mutex
	writes  []written
	missing map[string]bool // rules that were reported
	hook    func(Write) error
	hooking chan struct{} // holds the one call of hook
}

// NewHost starts a manager that runs the entry, as the leader, against an API server with the given
// objects, and returns when the controller has nothing left to do. It must be called in a
// [synctest.Test], whose end stops the manager.
//
// Objects may be of the types that the entry's AddToScheme adds, of built-in types and unstructured.
// They are stored as they are, with their status. A CustomResourceDefinition, see [ReadYAML], makes
// the server serve its resource, and should come first. Without one, the server guesses the plural
// of a type, and a type with a field Status has the status as a subresource.
//
// The test fails if the manager does not start, if the controller does what its Permissions do not allow,
// changes an object in the cache, or has not ended within the shutdown timeout.
func NewHost(t testing.TB, entry controllers.Entry, objects ...runtime.Object) *Host {
	t.Helper()
	inBubble(t)
	h := &Host{t: t, entry: entry, scheme: runtime.NewScheme(), network: newNetwork(), missing: map[string]bool{},
		hooking: make(chan struct{}, 1)}
	if err := clientscheme.AddToScheme(h.scheme); err != nil {
		t.Fatal(err)
	}
	if entry.AddToScheme != nil {
		if err := entry.AddToScheme(h.scheme); err != nil {
			t.Fatalf("controller %s: AddToScheme: %v", entry.Name, err)
		}
	}
	h.server = apiserver.New(h.scheme, apiserver.Hooks{Admit: h.admit, Wrote: h.wrote, Unsupported: h.unsupported})
	h.Lag(0)
	h.Put(objects...)
	server := httptest.NewUnstartedServer(h.server)
	server.Listener.Close()
	server.Listener = h.network
	server.Start()
	h.logger = klog.New(mutations{h, ktesting.NewLogger(t, ktesting.NewConfig(ktesting.Verbosity(2))).GetSink()})
	t.Cleanup(func() {
		h.stop()
		server.CloseClientConnections()
		server.Close()
		<-time.After(time.Minute) // client-go's queues look every few seconds whether they have ended
	})
	h.start()
	return h
}

// inBubble fails the test outside of a synctest bubble.
func inBubble(t testing.TB) {
	t.Helper()
	defer func() {
		if recover() != nil {
			t.Fatal("controllertest.NewHost must be called within synctest.Test, which stops the clocks")
		}
	}()
	synctest.Wait()
}

// start starts a manager and sets stop.
func (h *Host) start() {
	h.t.Helper()
	h.stop = func() {}
	// Names of builds are unique in a process.
	o, err := app.NewOptions(app.With(h.entry), app.WithoutBuiltIns(), app.Named("test-"+rand.String(10)))
	if err != nil {
		h.t.Fatal(err)
	}
	o.Client.RESTConfig = h.network.config()
	o.Client.ContentType = runtime.ContentTypeJSON
	o.Generic.Controllers = []string{h.entry.Name} // although it may be off by default
	o.Election.LeaderElect = false
	o.Informers.CacheMutationDetection = true
	o.Secure.BindPort, o.Insecure.Port = 0, 0
	o.Authentication.SkipLookup = true // it starts queues that nobody stops
	if err := o.Validate(); err != nil {
		h.t.Fatal(err)
	}
	h.settings = o.Settings()
	ctx, cancel := context.WithCancel(klog.NewContext(context.Background(), h.logger))
	ended := make(chan error, 1)
	go func() { ended <- app.Run(ctx, o) }()
	h.Settle()
	select {
	case err := <-ended:
		cancel()
		h.t.Fatalf("the manager did not start: %v", err)
	default:
	}
	h.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			h.t.Errorf("the manager ended with an error: %v", err)
		}
	})
}

// Restart stops the manager as at a hand-over: the controller finishes what it is doing. Then it
// starts another one, which knows nothing but what is in the API server.
func (h *Host) Restart() {
	h.t.Helper()
	h.stop()
	h.start()
}

// latency is how long a write takes.
const latency = time.Millisecond

// Settle returns when the controller has nothing left to do now. A write takes a millisecond, so the
// clock goes on a little.
func (h *Host) Settle() {
	h.t.Helper()
	for range 10_000 {
		before := h.server.Requests()
		<-time.After(2*latency + 2*h.lag)
		synctest.Wait()
		if h.server.Requests() == before {
			return
		}
	}
	h.t.Fatalf("controller %s goes on and on; its last writes are %q", h.entry.Name, last(h.Writes(), 10))
}

func last(texts []string, n int) []string { return texts[max(0, len(texts)-n):] }

// Sleep lets time pass, and all that is due meanwhile happen.
func (h *Host) Sleep(d time.Duration) {
	h.t.Helper()
	<-time.After(d)
	h.Settle()
}

// Lag delays what the cache learns from now on. Without it, the cache has each write before the
// controller has the response; with one of more than a millisecond, after that. In production, either
// happens.
func (h *Host) Lag(d time.Duration) {
	h.lag = d
	h.server.SetTiming(apiserver.Timing{Latency: latency, Lag: d})
}

// Put creates or replaces objects as somebody else does, whatever their resourceVersions. It
// stores them as they are, with their status. Call Settle for the controller to take notice.
func (h *Host) Put(objects ...runtime.Object) {
	h.t.Helper()
	for _, obj := range objects {
		if err := h.server.Put(h.encode(obj)); err != nil {
			h.t.Fatal(err)
		}
	}
}

// Delete deletes objects as somebody else does: one with finalizers stays until the last of these is
// removed. Nobody collects what such objects own.
func (h *Host) Delete(objects ...runtime.Object) {
	h.t.Helper()
	for _, obj := range objects {
		if err := h.server.Delete(h.encode(obj)); err != nil {
			h.t.Fatal(err)
		}
	}
}

// object is a pointer to an API type.
type object[T any] interface {
	*T
	runtime.Object
}

// Get returns the object with that name, or nil if there is none: controllertest.Get[v1.Widget](h,
// "shop", "a").
func Get[T any, P object[T]](h *Host, namespace, name string) P {
	h.t.Helper()
	for _, obj := range List[T, P](h) {
		if m, err := runtime.DefaultUnstructuredConverter.ToUnstructured(obj); err == nil {
			if u := (&unstructured.Unstructured{Object: m}); u.GetNamespace() == namespace && u.GetName() == name {
				return obj
			}
		}
	}
	return nil
}

// List returns all objects of a type, sorted by namespace and name.
func List[T any, P object[T]](h *Host) []P {
	h.t.Helper()
	kinds, _, err := h.scheme.ObjectKinds(P(new(T)))
	if err != nil {
		h.t.Fatal(err)
	}
	var all []P
	for _, obj := range h.server.Objects(kinds[0].Group, kinds[0].Kind) {
		typed := P(new(T))
		if err := runtime.DefaultUnstructuredConverter.FromUnstructured(obj.Object, typed); err != nil {
			h.t.Fatal(err)
		}
		all = append(all, typed)
	}
	return all
}

// Events returns the Events that the controller has recorded, the oldest first, such as
// "Normal Created shop/a: made Deployment a".
func (h *Host) Events() []string {
	h.t.Helper()
	events := List[corev1.Event](h)
	slices.SortStableFunc(events, func(a, b *corev1.Event) int { return strings.Compare(string(a.UID), string(b.UID)) })
	texts := make([]string, 0, len(events))
	for _, e := range events {
		if strings.HasSuffix(e.Source.Component, "-"+h.entry.Name) {
			texts = append(texts, fmt.Sprintf("%s %s %s: %s", e.Type, e.Reason, path.Join(e.InvolvedObject.Namespace, e.InvolvedObject.Name), e.Message))
		}
	}
	return texts
}

// Writes returns all writes of the controller since the last call, those that were refused too, in
// the order of time, and sorted where there is none, as among those of one Apply:
//
//	create configmaps shop/a
//	apply deployments.apps shop/a
//	apply deployments.apps shop/a (unchanged)
//	update widgets.example.com/status shop/a: Conflict
//
// Events are not among them.
func (h *Host) Writes() []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	slices.SortStableFunc(h.writes, func(a, b written) int {
		return cmp.Or(a.at.Compare(b.at), strings.Compare(a.text, b.text))
	})
	var texts []string
	for _, w := range h.writes {
		texts = append(texts, w.text)
	}
	h.writes = nil
	return texts
}

// written is a write with its result, and the instant of the bubble's clock at which it took effect.
type written struct {
	at   time.Time
	text string
}

// Write is a request of the controller that writes.
type Write struct {
	// Verb is create, update, patch, apply, delete or deletecollection. Resource is such as
	// deployments.apps or widgets.example.com/status.
	Verb, Resource  string
	Namespace, Name string
}

// String returns the write in the form of [Host.Writes].
func (w Write) String() string {
	return strings.TrimSpace(w.Verb + " " + w.Resource + " " + path.Join(w.Namespace, w.Name))
}

// OnWrite calls hook before each write of the controller, and refuses the write with the error that
// it returns, if any. In between, the hook may change objects with Put, to provoke a conflict. It is
// called for one write at a time.
func (h *Host) OnWrite(hook func(Write) error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.hook = hook
}

// RESTConfig returns the configuration for a client of the test's own, whom everything is allowed.
func (h *Host) RESTConfig() *rest.Config {
	config := h.network.config()
	config.UserAgent, config.ContentType = testAgent, runtime.ContentTypeJSON
	return config
}

func writeOf(r apiserver.Request) Write {
	w := Write{Verb: r.Verb, Resource: r.Resource.String(), Namespace: r.Namespace, Name: r.Name}
	if r.Subresource != "" {
		w.Resource += "/" + r.Subresource
	}
	if r.Patch == types.ApplyPatchType {
		w.Verb = "apply"
	}
	return w
}

// wrote records a write of the controller.
func (h *Host) wrote(r apiserver.Request, result apiserver.Result) {
	if by(r) != h.entry.Name {
		return
	}
	text := writeOf(r).String()
	switch {
	case result.Err != nil && apierrors.ReasonForError(result.Err) == "":
		text += ": " + result.Err.Error()
	case result.Err != nil:
		text += ": " + string(apierrors.ReasonForError(result.Err))
	case result.Unchanged:
		text += " (unchanged)"
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.writes = append(h.writes, written{time.Now(), text})
}

func (h *Host) unsupported(r apiserver.Request, err error) {
	h.t.Errorf("controller %s: %s: %v", h.entry.Name, writeOf(r), err)
}

// encode returns an object as the API server stores it.
func (h *Host) encode(obj runtime.Object) *unstructured.Unstructured {
	h.t.Helper()
	if u, ok := obj.(*unstructured.Unstructured); ok {
		return u.DeepCopy()
	}
	kinds, _, err := h.scheme.ObjectKinds(obj)
	if err != nil {
		h.t.Fatalf("%s: %v", reflect.TypeOf(obj), err)
	}
	content, err := runtime.DefaultUnstructuredConverter.ToUnstructured(obj)
	if err != nil {
		h.t.Fatal(err)
	}
	u := &unstructured.Unstructured{Object: content}
	u.SetGroupVersionKind(kinds[0])
	return u
}
