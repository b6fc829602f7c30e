// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package greeter_test

import (
	"slices"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/quartermaster-dev/quartermaster/examples/greeter"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/controllertest"
)

func TestConfigMapIsGreetedOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		asks := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{
			Namespace: "shop", Name: "a", Annotations: map[string]string{greeter.Annotation: "world"}}}
		h := controllertest.NewHost(t, greeter.Entry(), asks)
		if got := h.Writes(); !slices.Equal(got, []string{"patch configmaps shop/a"}) {
			t.Errorf("writes %q", got)
		}
		if got := h.Events(); !slices.Equal(got, []string{"Normal Greeted shop/a: Hello, world"}) {
			t.Errorf("Events %q", got)
		}
	})
}

func TestGreetingForNobodyIsNotRetried(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		asks := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "a", Annotations: map[string]string{greeter.Annotation: ""}}}
		h := controllertest.NewHost(t, greeter.Entry(), asks)
		h.Sleep(time.Hour)
		if s := h.Controller(greeter.Name).Status(); s.Reconciles != 1 || s.Errors != 1 || s.Panics != 0 {
			t.Errorf("%d reconciles, %d errors, %d panics", s.Reconciles, s.Errors, s.Panics)
		}
	})
}
