// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"path"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	corev1ac "k8s.io/client-go/applyconfigurations/core/v1"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/election"
	"github.com/quartermaster-dev/quartermaster/pkg/informers"
	"github.com/quartermaster-dev/quartermaster/pkg/internal/panics"
)

// gadget is a custom resource as a Go type.
type gadget struct {
	metav1.TypeMeta
	metav1.ObjectMeta
}

func (g *gadget) DeepCopyObject() runtime.Object { out := *g; return &out }

type gadgetList struct {
	metav1.TypeMeta
	metav1.ListMeta
	Items []gadget
}

func (l *gadgetList) DeepCopyObject() runtime.Object { out := *l; return &out }

// gizmo is another custom resource of the same group.
type gizmo struct{ gadget }

func (g *gizmo) DeepCopyObject() runtime.Object { out := *g; return &out }

type gizmoList struct{ gadgetList }

func (l *gizmoList) DeepCopyObject() runtime.Object { out := *l; return &out }

var gadgets = schema.GroupVersionResource{Group: "example.com", Version: "v1", Resource: "gadgets"}

// addTypes returns an AddToScheme.
func addTypes(kinds map[string]runtime.Object) func(*runtime.Scheme) error {
	return func(s *runtime.Scheme) error {
		for kind, object := range kinds {
			s.AddKnownTypeWithName(gadgets.GroupVersion().WithKind(kind), object)
		}
		return nil
	}
}

func TestHostNamesTheControllerOfAMistake(t *testing.T) {
	complete := addTypes(map[string]runtime.Object{"Gadget": &gadget{}, "GadgetList": &gadgetList{}})
	twoKinds := addTypes(map[string]runtime.Object{"Gadget": &gadget{}, "GadgetList": &gadgetList{}, "Gizmo": &gizmo{}, "GizmoList": &gizmoList{}})
	oddPlural := schema.GroupVersionResource{Group: "example.com", Version: "v1", Resource: "oddities"}
	typed := []informers.Need{{Resource: gadgets, Form: informers.Typed}}
	for name, tc := range map[string]struct {
		add   func(*runtime.Scheme) error
		needs []informers.Need
		ask   func(controllers.Host) error
		want  string // empty: it is built
	}{
		"everything fits": {complete, typed, func(h controllers.Host) error {
			informers.For[*gadget](h, gadgets)
			informers.For[metav1.Object](h, gadgets)
			controllers.ClientFor[*gadget](h, gadgets)
			h.Handle(http.NotFoundHandler())
			return nil
		}, ""},
		"the need is missing": {complete, nil, func(h controllers.Host) error { informers.For[*gadget](h, gadgets); return nil },
			"asks for the informer of gadgets.example.com, which its entry does not declare in Needs"},
		"the need is of the reduced form": {complete, []informers.Need{{Resource: gadgets}}, func(h controllers.Host) error { informers.For[*gadget](h, gadgets); return nil },
			"asks for gadgets.example.com as *app.gadget, but its need has another Form than informers.Typed"},
		"the type is missing in the scheme": {addTypes(map[string]runtime.Object{"GadgetList": &gadgetList{}}), typed,
			func(h controllers.Host) error { informers.For[*gadget](h, gadgets); return nil },
			"asks for gadgets.example.com as *app.gadget, which AddToScheme has not added to the scheme"},
		"the type of the list is missing in the scheme": {addTypes(map[string]runtime.Object{"Gadget": &gadget{}}), typed,
			func(h controllers.Host) error { informers.For[*gadget](h, gadgets); return nil },
			"asks for gadgets.example.com as *app.gadget, but AddToScheme has not added GadgetList to the scheme"},
		"the type is of another group": {complete, typed, func(h controllers.Host) error { informers.For[*corev1.Pod](h, gadgets); return nil },
			"asks for gadgets.example.com as *v1.Pod, but that is a type of v1, not of example.com/v1"},
		"the version is another": {complete, typed, func(h controllers.Host) error {
			informers.For[*gadget](h, gadgets.GroupResource().WithVersion("v2"))
			return nil
		}, `asks for version "v2" of gadgets.example.com, but needs version "v1"`},
		"a client of a type that is missing in the scheme": {nil, nil, func(h controllers.Host) error { controllers.ClientFor[*gadget](h, gadgets); return nil },
			"asks for a client of gadgets.example.com with *app.gadget, which AddToScheme has not added to the scheme"},
		"a client of a type of another group": {nil, nil, func(h controllers.Host) error { controllers.ClientFor[*corev1.Pod](h, gadgets); return nil },
			"asks for a client of gadgets.example.com with *v1.Pod, but that is a type of v1, not of example.com/v1"},
		"a client of a type of two versions": {func(s *runtime.Scheme) error {
			s.AddKnownTypes(schema.GroupVersion{Group: "example.com", Version: "v1beta1"}, &gadget{})
			return complete(s)
		}, nil, func(h controllers.Host) error { controllers.ClientFor[*gadget](h, gadgets); return nil }, ""},
		"the type is of another resource of the group": {twoKinds, typed, func(h controllers.Host) error { informers.For[*gizmo](h, gadgets); return nil },
			"asks for gadgets.example.com as *app.gizmo, but these are of the kind Gadget"},
		"a client of a type of another resource of the group": {twoKinds, nil, func(h controllers.Host) error { controllers.ClientFor[*gizmo](h, gadgets); return nil },
			"asks for a client of gadgets.example.com with *app.gizmo, but these are of the kind Gadget"},
		"a resource whose plural nobody can guess": {twoKinds, []informers.Need{{Resource: oddPlural, Form: informers.Typed}}, func(h controllers.Host) error {
			informers.For[*gizmo](h, oddPlural)
			controllers.ClientFor[*gizmo](h, oddPlural)
			return nil
		}, ""},
		"two handlers": {nil, nil, func(h controllers.Host) error {
			h.Handle(http.NotFoundHandler())
			h.Handle(http.NotFoundHandler())
			return nil
		},
			"calls Host.Handle with nil or twice"},
		"owners that the cache holds": {nil, []informers.Need{{Resource: informers.Deployments, Fields: informers.OwnerReferences}}, func(h controllers.Host) error {
			_, err := controllers.NewLoop(h.LoopOptions, nothing, controllers.WatchOwner(informers.For[metav1.Object](h, informers.Deployments), schema.GroupKind{Kind: "Gadget"}))
			return err
		}, ""},
		"a handler that is nil": {nil, nil, func(h controllers.Host) error { h.Handle(nil); return nil }, "calls Host.Handle with nil or twice"},
	} {
		t.Run(name, func(t *testing.T) {
			entry := withFunctions(controllers.Entry{Name: "one", AddToScheme: tc.add, Needs: func(controllers.Settings) ([]informers.Need, error) { return tc.needs, nil }})
			entry.New = func(h controllers.Host) (controllers.Controller, error) { return &scripted{}, tc.ask(h) }
			_, err := buildAll(t, entry)
			switch {
			case tc.want == "" && err != nil:
				t.Errorf("refused: %v", err)
			case tc.want != "" && (err == nil || err.Error() != "controller one: "+tc.want):
				t.Errorf("the error is %v, want controller one: %s", err, tc.want)
			}
		})
	}
}

// TestHostMistakeInAReconcileIsShown asks too late, so that the start does not fail.
func TestHostMistakeInAReconcileIsShown(t *testing.T) {
	entry := withFunctions(controllers.Entry{Name: "one", Needs: func(controllers.Settings) ([]informers.Need, error) {
		return []informers.Need{{Resource: informers.Deployments}}, nil
	}})
	var h controllers.Host
	entry.New = func(host controllers.Host) (controllers.Controller, error) { h = host; return &scripted{}, nil }
	if _, err := buildAll(t, entry); err != nil {
		t.Fatal(err)
	}
	for want, ask := range map[string]func(){
		"asks for a client of gadgets.example.com with *app.gadget, which AddTo":     func() { controllers.ClientFor[*gadget](h, gadgets) },
		"asks for the informer of secrets, which its entry does not declare":         func() { informers.For[metav1.Object](h, informers.Secrets) },
		"asks for deployments.apps as *v1.Deployment, but its need has another Form": func() { informers.For[*appsv1.Deployment](h, informers.Deployments) },
	} {
		if _, err := panics.Recover(func() error { ask(); return nil }); err == nil || !strings.HasPrefix(err.Error(), "panic: "+want) {
			t.Errorf("the error is %v, want panic: %s", err, want)
		}
	}
}

func TestEntryMustBuildAController(t *testing.T) {
	none := func(name string) controllers.Entry {
		return withFunctions(controllers.Entry{Name: name, New: func(controllers.Host) (controllers.Controller, error) { return nil, nil }})
	}
	_, err := buildAll(t, none("one"), withFunctions(controllers.Entry{Name: "fine"}), none("two"))
	lines(t, err, "controller one: no controller was returned by New", "controller two: no controller was returned by New")
}

func nothing(context.Context, cache.ObjectName) (time.Duration, error) { return 0, nil }

// builtProcess builds a process as Run does.
func builtProcess(t *testing.T, o *Options) (*process, error) {
	t.Helper()
	o.Secure.BindPort = 0 // authentication starts queues that nobody stops
	p, err := build(t.Context(), o)
	if err == nil {
		t.Cleanup(p.events.broadcaster.Shutdown) // stop would wait for an API server that is not there
		t.Cleanup(p.cache.Shutdown)
	}
	return p, err
}

// buildAll builds the controllers of entries as Run does.
func buildAll(t *testing.T, entries ...controllers.Entry) (hostedControllers, error) {
	t.Helper()
	o, err := NewOptions(With(entries...), WithoutBuiltIns())
	if err != nil {
		return nil, err
	}
	o.Client.Master = newAPIServer(t).URL
	p, err := builtProcess(t, o)
	if err != nil {
		return nil, err
	}
	return p.controllers, nil
}

func TestSchemeMistakesNameTheEntry(t *testing.T) {
	_, err := buildAll(t, withFunctions(controllers.Entry{Name: "one", AddToScheme: func(*runtime.Scheme) error { return errors.New("no") }}))
	lines(t, err, "controller one: AddToScheme: no")
}

func TestApplyMistakesAreErrors(t *testing.T) {
	h := controllers.Host{Mapping: knownKinds}
	for name, tc := range map[string]struct {
		config runtime.ApplyConfiguration
		want   string
	}{
		"an object without a name":                    {corev1ac.ConfigMap("", "shop"), "apply a *v1.ConfigMapApplyConfiguration: its apiVersion, kind or name is missing"},
		"an object without a kind":                    {&corev1ac.ConfigMapApplyConfiguration{}, "apply a *v1.ConfigMapApplyConfiguration: its apiVersion, kind or name is missing"},
		"an object of a kind that nobody knows":       {corev1ac.Secret("x", "shop"), `apply Secret shop/x: no matches for kind "Secret" in version "v1"`},
		"that cannot be written as an object":         {unwritable{}, "apply a app.unwritable: json: error calling MarshalJSON for type app.unwritable: no"},
		"an object without the namespace of its kind": {corev1ac.ConfigMap("x", ""), "apply ConfigMap x: its namespace is missing"},
		"an object in a namespace that cannot be": {
			corev1ac.Namespace("x").WithNamespace("shop"), "apply Namespace shop/x: objects of this kind have no namespace"},
	} {
		t.Run(name, func(t *testing.T) {
			if err := h.Apply(t.Context(), tc.config); err == nil || err.Error() != tc.want {
				t.Errorf("the error is %v, want %s", err, tc.want)
			}
		})
	}
}

func TestApplySendsItsObjectsAtOnce(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	var arrived atomic.Int32
	both := make(chan struct{}) // nobody is answered before both have arrived
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if arrived.Add(1) == 2 {
			close(both)
		}
		select {
		case <-both:
		case <-ctx.Done():
		}
		http.Error(w, path.Base(r.URL.Path)+" is refused", http.StatusForbidden)
	}))
	defer server.Close()
	applies, err := metadata.NewForConfig(&rest.Config{Host: server.URL})
	if err != nil {
		t.Fatal(err)
	}
	h := controllers.Host{Mapping: knownKinds, Metadata: applies}

	err = h.Apply(ctx, corev1ac.ConfigMap("a", "shop"), corev1ac.ConfigMap("", "shop"))
	if err == nil || !strings.Contains(err.Error(), "name is missing") || arrived.Load() != 0 {
		t.Errorf("%d requests were sent in spite of a mistake, with the error %v", arrived.Load(), err)
	}
	err = h.Apply(ctx, corev1ac.ConfigMap("a", "shop"), corev1ac.ConfigMap("a", "bar"), corev1ac.ConfigMap("a", "shop"))
	if want := "apply ConfigMap shop/a: it is among the objects twice"; err == nil || err.Error() != want || arrived.Load() != 0 {
		t.Errorf("%d requests were sent with an object twice, with the error %v, want %s", arrived.Load(), err, want)
	}
	err = h.Apply(ctx, corev1ac.ConfigMap("b", "shop"), corev1ac.ConfigMap("c", "shop"))
	if !apierrors.IsForbidden(err) {
		t.Errorf("the error is %v, want what the API server said", err)
	}
	for _, name := range []string{"b", "c"} {
		if err == nil || !strings.Contains(err.Error(), "apply ConfigMap shop/"+name+": ") {
			t.Errorf("the error is %v, want it to name %s", err, name)
		}
	}
}

func TestApplyHasTenRequestsOnTheWay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		applies, err := metadata.NewForConfig(&rest.Config{Host: "http://api", QPS: -1, Transport: roundTripper(func(*http.Request) (*http.Response, error) {
			<-time.After(time.Second)
			return nil, errors.New("no")
		})})
		if err != nil {
			t.Fatal(err)
		}
		h := controllers.Host{Mapping: knownKinds, Metadata: applies}
		var all []runtime.ApplyConfiguration
		for i := range 30 {
			all = append(all, corev1ac.ConfigMap(fmt.Sprint(i), "shop"))
		}
		begun := time.Now()
		if err := h.Apply(t.Context(), all...); err == nil || time.Since(begun) != 3*time.Second {
			t.Errorf("30 requests of 1 s have taken %s, with the error %v", time.Since(begun), err)
		}
	})
}

type unwritable struct{}

func (unwritable) IsApplyConfiguration()        {}
func (unwritable) MarshalJSON() ([]byte, error) { return nil, errors.New("no") }

func TestHandlersAreServedUnderTheirName(t *testing.T) {
	entry := withFunctions(controllers.Entry{Name: "one"})
	entry.New = func(h controllers.Host) (controllers.Controller, error) {
		h.Handle(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path == "/poison" {
				panic("hunter2")
			}
			fmt.Fprint(w, r.URL.Path)
		}))
		return &scripted{}, nil
	}
	all, err := buildAll(t, entry)
	if err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{
		"/controllers/one/":       "/",
		"/controllers/one/things": "/things",
		"/controllers/one/poison": "the controller's handler panicked\n",
	} {
		w := httptest.NewRecorder()
		all[0].handler.ServeHTTP(w, httptest.NewRequest(http.MethodGet, path, nil))
		if got := w.Body.String(); got != want {
			t.Errorf("%s: %q, want %q", path, got, want)
		}
	}
}

func TestEveryReplicaStopsWithTheProcess(t *testing.T) {
	stuck := func(ctx context.Context) error { <-ctx.Done(); <-time.After(time.Hour); return nil }
	for name, tc := range map[string]struct {
		run  func(context.Context) error
		took time.Duration
		want error
	}{
		"a controller that drains":                      {func(ctx context.Context) error { <-ctx.Done(); <-time.After(3 * time.Second); return nil }, 3 * time.Second, nil},
		"a controller that returns an error at its end": {func(ctx context.Context) error { <-ctx.Done(); return errors.New("no") }, 0, election.ErrUnfinished},
		"a controller that does not drain in time":      {stuck, 20 * time.Second, election.ErrUnfinished},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				here, c, _ := host(t, tc.run)
				here.everyReplica = true
				c.status = controllers.Status{InFlight: []controllers.InFlight{{Key: "shop/a", Since: time.Now()}}}
				leaders, other, _ := host(t, untilTheEnd)
				all := hostedControllers{leaders, here}
				stop := all.where(true).start(t.Context(), 20*time.Second)
				<-time.After(time.Minute)
				synctest.Wait()
				if len(c.starts) != 1 || len(other.starts) != 0 {
					t.Errorf("%d runs of the one for every replica and %d of the other, want 1 and 0", len(c.starts), len(other.starts))
				}
				begun := time.Now()
				err := stop()
				if took := time.Since(begun); took != tc.took || !errors.Is(err, tc.want) {
					t.Errorf("it stopped after %s with %v; want %s and %v", took, err, tc.took, tc.want)
				}
				if named := strings.Contains(fmt.Sprint(err), "controller x has been reconciling shop/a for "); named != (tc.took == 20*time.Second) {
					t.Errorf("the error is %v", err)
				}
				<-time.After(2 * time.Hour) // until the one that does not drain has returned
			})
		})
	}
}

func TestEveryReplicaNeedsAWarmStandby(t *testing.T) {
	o := newOptions(t, With(withFunctions(controllers.Entry{Name: "one", EveryReplica: true}), withFunctions(controllers.Entry{Name: "two"})), WithoutBuiltIns())
	if err := o.Validate(); err != nil {
		t.Errorf("a warm standby: %v", err)
	}
	o.Informers.Standby = informers.StandbyCold
	lines(t, o.Validate(), "--standby: one runs on every replica, which needs the cache of a warm standby")
}
