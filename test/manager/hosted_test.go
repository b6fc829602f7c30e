// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package manager

import (
	"context"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/pkg/app"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/builtin"
	"github.com/quartermaster-dev/quartermaster/pkg/informers"
)

// hosted is a controller played by the test itself, in a manager that runs in the test's process.
type hosted struct {
	controllers.Host
	pod     string // the manager has its token
	leading chan struct{}
	drain   func() // called when its context has ended; may be nil
	stop    func() error
}

func (h *hosted) Run(ctx context.Context) error {
	close(h.leading)
	<-ctx.Done()
	if h.drain != nil {
		h.drain()
	}
	return nil
}

func (h *hosted) Status() controllers.Status { return controllers.Status{} }

// runHosted runs a manager with one controller, made from the given entry, until the test ends or stops
// it. It returns once the controller runs.
func runHosted(ctx context.Context, t *testing.T, entry controllers.Entry, dryRun bool) *hosted {
	t.Helper()
	h := &hosted{leading: make(chan struct{})}
	entry.Name, entry.Summary = "hosted", "does what a test says"
	entry.Needs = func(controllers.Settings) ([]informers.Need, error) { return nil, nil }
	entry.New = func(host controllers.Host) (controllers.Controller, error) {
		h.Host = host
		return h, nil
	}
	o, err := app.NewOptions(app.With(builtin.Entries()...), app.With(entry))
	assert.NoError(t, err)
	shared.Grant(ctx, t, entry.Permissions(controllers.Settings{})...)
	replica := shared.NewReplica(ctx, t)
	h.pod = replica.Pod
	t.Setenv("POD_NAME", h.pod)
	o.Client.Kubeconfig = replica.Kubeconfig
	o.Generic.Controllers = []string{entry.Name}
	o.Generic.DryRun = dryRun
	o.Secure.BindPort, o.Insecure.Port = 0, 0

	running, cancel := context.WithCancel(context.WithoutCancel(ctx))
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		err = app.Run(running, o)
	}()
	h.stop = func() error {
		cancel()
		<-ended
		return err
	}
	t.Cleanup(func() {
		if err := h.stop(); err != nil {
			t.Errorf("the manager ended with %v", err)
		}
	})
	select {
	case <-h.leading:
	case <-ended:
		t.Fatalf("the manager ended with %v", err)
	case <-ctx.Done():
		t.Fatal(context.Cause(ctx))
	}
	return h
}

// Gadget is a custom resource as a Go type.
type Gadget struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata"`
	Spec              GadgetSpec `json:"spec"`
	Status            struct {
		Painted string `json:"painted,omitempty"`
	} `json:"status"`
}

// GadgetSpec is the spec of a Gadget.
type GadgetSpec struct {
	Color    string `json:"color,omitempty"`
	Replicas int    `json:"replicas"`
}

// DeepCopyObject implements runtime.Object.
func (g *Gadget) DeepCopyObject() runtime.Object {
	out := *g
	g.DeepCopyInto(&out.ObjectMeta)
	return &out
}

// GadgetList is a list of Gadgets.
type GadgetList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata"`
	Items           []Gadget `json:"items"`
}

// DeepCopyObject implements runtime.Object.
func (l *GadgetList) DeepCopyObject() runtime.Object {
	out := *l
	out.Items = nil
	for i := range l.Items {
		out.Items = append(out.Items, *l.Items[i].DeepCopyObject().(*Gadget))
	}
	return &out
}

var gadgets = schema.GroupVersionResource{Group: "test.example.com", Version: "v1", Resource: "gadgets"}

func addGadgets(s *runtime.Scheme) error {
	s.AddKnownTypes(gadgets.GroupVersion(), &Gadget{}, &GadgetList{})
	metav1.AddToGroupVersion(s, gadgets.GroupVersion())
	return nil
}

// serveGadgets makes the API server serve gadgets from now on.
func serveGadgets(ctx context.Context, t *testing.T) {
	t.Helper()
	if _, err := shared.Kubectl(ctx, "apply", "-f", "testdata/gadgets.yaml"); err != nil {
		t.Fatal(err)
	}
	assert.NoError(t, shared.WaitForCRDs(ctx, "testdata/gadgets.yaml"))
}
