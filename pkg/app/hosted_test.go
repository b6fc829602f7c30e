// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
)

// endsAtOnce returns from Run without having been asked to.
type endsAtOnce struct{ started atomic.Int32 }

func (c *endsAtOnce) Run(context.Context) error { c.started.Add(1); return nil }

func (c *endsAtOnce) Status() controllers.Status { return controllers.Status{} }

func TestAControllerThatEndsByItselfIsStartedAgainWithBackOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &endsAtOnce{}
		ctx, cancel := context.WithTimeout(t.Context(), 7*time.Second+time.Millisecond)
		defer cancel()
		h := hosted{c, "ends", nil}
		if err := h.supervise(ctx); err != nil {
			t.Error(err)
		}
		// At 0, 1, 3 and 7 s.
		if n := c.started.Load(); n != 4 {
			t.Errorf("started %d times", n)
		}
	})
}
