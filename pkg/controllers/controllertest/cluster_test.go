// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package controllertest_test

import (
	"context"
	"testing"
	"testing/synctest"

	corev1 "k8s.io/api/core/v1"
	corev1ac "k8s.io/client-go/applyconfigurations/core/v1"
	"k8s.io/client-go/rest"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/controllertest"
)

func TestControllerAppliesInAnotherCluster(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := controllertest.NewHost(t, doing("copier", func(ctx context.Context, h controllers.Host) error {
			c, err := h.Cluster("far", &rest.Config{Host: "http://far.test"})
			if err != nil {
				return err
			}
			defer c.Close()
			return c.Apply(ctx, corev1ac.ConfigMap("a", "shop").WithData(map[string]string{"greeting": "hello"}))
		}))
		far := h.AddCluster("far")
		h.Put(asking("a"))
		h.Settle()
		expect(t, "writes in the cluster", far.Writes(), []string{"apply configmaps shop/a"})
		expect(t, "writes in our own", h.Writes(), nil)
		copied := controllertest.Get[corev1.ConfigMap](far.Host, "shop", "a")
		if copied == nil || copied.Data["greeting"] != "hello" || len(copied.ManagedFields) == 0 || copied.ManagedFields[0].Manager != "copier" {
			t.Errorf("the cluster has %+v", copied)
		}
	})
}
