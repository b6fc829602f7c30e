// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"testing"
	"time"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
)

const (
	// Patience limits every wait. It is generous: a passing test does not use it up.
	Patience = 90 * time.Second

	// grace is longer than a manager's --shutdown-timeout.
	grace = 30 * time.Second
)

// Context returns a context that ends with the test or after Patience.
func Context(t testing.TB) context.Context {
	t.Helper()
	return Within(t.Context(), t, Patience)
}

// Within returns a context that ends with ctx, with the test, or after d.
func Within(ctx context.Context, t testing.TB, d time.Duration) context.Context {
	t.Helper()
	readInputs()
	ctx, cancel := context.WithTimeoutCause(ctx, d, fmt.Errorf("it took longer than %s", d))
	t.Cleanup(cancel)
	return ctx
}

// Poll calls check every 50 ms, see cluster.Poll.
func Poll(ctx context.Context, check func() error) error {
	return cluster.Poll(ctx, 50*time.Millisecond, func(context.Context) error { return check() })
}

// Eventually is Poll for what a test cannot continue without.
func Eventually(ctx context.Context, t testing.TB, check func() error) {
	t.Helper()
	if err := Poll(ctx, check); err != nil {
		t.Fatal(err)
	}
}

// Setting returns a number of the environment. Go caches no result of a test with a flag of ours, but
// results of tests that read their environment.
func Setting(t testing.TB, name string, otherwise int) int {
	t.Helper()
	text, ok := os.LookupEnv(name)
	if !ok {
		return otherwise
	}
	n, err := strconv.Atoi(text)
	if err != nil {
		t.Fatalf("%s=%s: must be a number", name, text)
	}
	return n
}

// Wait waits for d, the time that a fault lasts, or until ctx ends.
func Wait(ctx context.Context, d time.Duration) { _ = cluster.Sleep(ctx, d) }
