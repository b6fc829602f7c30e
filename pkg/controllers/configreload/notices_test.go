// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package configreload

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/configreload/policy"
)

func TestOriginalThatRunsIsReported(t *testing.T) {
	for name, tc := range map[string]struct {
		replicas int32
		compat   bool
		warns    bool
	}{
		"the original's Deployment runs":                                {replicas: 1, compat: true, warns: true},
		"the original's Deployment is scaled to 0":                      {compat: true},
		"the original's Deployment runs, and --compat does not name it": {replicas: 1},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				original := deploy(pod())
				original.Spec.Replicas = &tc.replicas
				original.Spec.Template.Spec.Containers[0].Image = "ghcr.io/stakater/reloader:v1.4.21"
				w := newFixture(t, func(c *Config) { c.Compat = tc.compat }, original)
				w.resign()
				buffer := &ktesting.BufferTL{}
				ctx, cancel := context.WithCancel(klog.NewContext(t.Context(), ktesting.NewLogger(buffer, ktesting.NewConfig())))
				time.AfterFunc(time.Second, cancel)
				if err := w.c.Run(ctx); err != nil {
					t.Fatal(err)
				}
				if got := buffer.String(); strings.Contains(got, `still running deployment="shop/web"`) != tc.warns {
					t.Errorf("log = %q, want a warning: %v", got, tc.warns)
				}
			})
		})
	}
}

func TestCSIAnnotationsAreMentionedOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		buffer := &ktesting.BufferTL{}
		ctx := klog.NewContext(t.Context(), ktesting.NewLogger(buffer, ktesting.NewConfig()))
		w := newFixture(t, nil)
		for range 2 {
			one, err := policy.NewWorkload(&w.c.kinds["Deployment"].Kind, deploy(pod(), "secretproviderclass.reloader.stakater.com/auto", "true"), Name)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := w.c.step(ctx, w.c.kinds["Deployment"], one, false); err != nil {
				t.Fatal(err)
			}
		}
		if n := strings.Count(buffer.String(), "have no effect without"); n != 1 {
			t.Errorf("mentioned %d times, want once:\n%s", n, buffer.String())
		}
	})
}
