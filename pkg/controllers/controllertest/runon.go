// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package controllertest

import (
	"context"
	"errors"
	"testing"

	"k8s.io/client-go/rest"

	"github.com/quartermaster-dev/quartermaster/pkg/app"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
)

// RunOn runs a manager with the entries on a real API server, such as that of envtest, until the test ends.
// All entries run, even if off by default. The manager has no ports, and leads without a Lease. flags are
// flags of the manager and of the entries. The test fails if the flags are wrong, or if the manager ends
// before the test or with an error.
func RunOn(t testing.TB, config *rest.Config, flags []string, entries ...controllers.Entry) {
	t.Helper()
	o, err := app.NewOptions(app.With(entries...))
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		o.Generic.Controllers = append(o.Generic.Controllers, e.Name)
	}
	o.Client.RESTConfig, o.Election.LeaderElect, o.Secure.BindPort, o.Insecure.Port = config, false, 0, 0
	if err := errors.Join(o.Parse(flags), o.Check()); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.WithoutCancel(t.Context()))
	ended := make(chan error, 1)
	go func() { ended <- app.Run(ctx, o) }()
	t.Cleanup(func() {
		select {
		case err := <-ended:
			t.Errorf("the manager ended before the test, with the error %v", err)
		default:
			stop()
			if err := <-ended; err != nil {
				t.Errorf("the manager ended with an error: %v", err)
			}
		}
		stop()
	})
}
