// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package controllers

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/client-go/tools/cache"
)

// problem is an error whose methods panic on a nil pointer.
type problem struct{ text string }

func (p *problem) Error() string    { return p.text }
func (p *problem) NotLeading() bool { return p.text == "" }

func TestLoopContainsANilPointerReturnedAsAnError(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		calls := 0
		h := newHarness(t, reconciling{
			Reconcile: func(context.Context, cache.ObjectName) (time.Duration, error) {
				if calls++; calls == 1 {
					var p *problem
					return 0, p
				}
				return 0, nil
			},
		}, "bad")
		h.run(t)
		pass(time.Minute)
		if got := h.loop.Status(); calls != 2 || got.Panics != 1 || got.Errors != 0 || !strings.Contains(got.LastError.Text, "nil pointer") {
			t.Errorf("%d calls, status %+v; want a panic, and the key tried again", calls, got)
		}
	})
}
