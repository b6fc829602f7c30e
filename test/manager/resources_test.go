// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package manager

import (
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// gadgetEntry is the entry of a controller with a custom resource as a Go type.
var gadgetEntry = controllers.Entry{
	AddToScheme: addGadgets,
	Permissions: func(controllers.Settings) []rbacv1.PolicyRule {
		return []rbacv1.PolicyRule{{APIGroups: []string{gadgets.Group}, Resources: []string{gadgets.Resource}, Verbs: []string{"*"}}}
	},
}

func TestTypedCustomResourceIsWrittenAndHasEvents(t *testing.T) {
	ctx := fleet.Context(t)
	serveGadgets(ctx, t)
	ns := shared.NewNamespace(ctx, t, nil)
	// A library in the same program may do this; it must have no effect.
	assert.NoError(t, addGadgets(scheme.Scheme))
	h := runHosted(ctx, t, gadgetEntry, false)

	config := rest.CopyConfig(h.RESTConfig)
	gv := gadgets.GroupVersion()
	config.APIPath, config.GroupVersion = "/apis", &gv
	config.NegotiatedSerializer = serializer.NewCodecFactory(h.Scheme).WithoutConversion()
	client, err := rest.RESTClientFor(config)
	assert.NoError(t, err)
	gadget := &Gadget{ObjectMeta: metav1.ObjectMeta{Name: "g", Namespace: ns}, Spec: GadgetSpec{Color: "blue"}}
	if err := client.Post().Namespace(ns).Resource(gadgets.Resource).Body(gadget).Do(ctx).Into(gadget); err != nil {
		t.Fatalf("create: %v", err)
	}
	gadget.Spec.Color = "red"
	if err := client.Put().Namespace(ns).Resource(gadgets.Resource).Name("g").Body(gadget).Do(ctx).Into(gadget); err != nil {
		t.Fatalf("update: %v", err)
	}
	patch := client.Patch(types.MergePatchType).Namespace(ns).Resource(gadgets.Resource).Name("g")
	if err := patch.Body([]byte(`{"spec":{"replicas":7}}`)).Do(ctx).Into(gadget); err != nil {
		t.Fatalf("patch: %v", err)
	}
	read := &Gadget{}
	assert.NoError(t, client.Get().Namespace(ns).Resource(gadgets.Resource).Name("g").Do(ctx).Into(read))
	if want := (GadgetSpec{Color: "red", Replicas: 7}); read.Spec != want {
		t.Errorf("it is stored as %+v, want %+v", read.Spec, want)
	}

	h.Events.Event(gadget, corev1.EventTypeNormal, "Written", "in three ways")
	fleet.Eventually(ctx, t, func() error {
		events, err := shared.Admin.CoreV1().Events(ns).List(ctx, metav1.ListOptions{FieldSelector: "reason=Written"})
		if err != nil {
			return err
		}
		want := corev1.ObjectReference{APIVersion: "test.example.com/v1", Kind: "Gadget", Namespace: ns, Name: "g", UID: gadget.UID, ResourceVersion: gadget.ResourceVersion}
		if len(events.Items) != 1 || events.Items[0].InvolvedObject != want {
			return fmt.Errorf("Events %v, want one of %v", events.Items, want)
		}
		return nil
	})
	if err := client.Delete().Namespace(ns).Resource(gadgets.Resource).Name("g").Body(&metav1.DeleteOptions{}).Do(ctx).Error(); err != nil {
		t.Errorf("delete: %v", err)
	}
}

func TestDrainSendsItsEvents(t *testing.T) {
	ctx := fleet.Context(t)
	ns := shared.NewNamespace(ctx, t, nil)
	h := runHosted(ctx, t, gadgetEntry, false)
	h.drain = func() {
		h.Events.Event(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "app-config", Namespace: ns}}, corev1.EventTypeNormal, "Drained", "the last word")
	}
	assert.NoError(t, h.stop())
	events, err := shared.Admin.CoreV1().Events(ns).List(ctx, metav1.ListOptions{FieldSelector: "reason=Drained"})
	if err != nil || len(events.Items) != 1 {
		t.Errorf("Events when the manager has ended: %v, %v", events, err)
	}
}
