// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package cluster_test tests hack/cluster with the real programs. It leaves out what
// most other packages of test/ would notice too.
package cluster_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"testing"

	"go.uber.org/goleak"
	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// shared is the cluster of the tests.
var shared *cluster.Cluster

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) (code int) {
	ctx := context.Background()
	fail := func(err error) {
		if err != nil {
			fmt.Fprintln(os.Stderr, "FAIL:", err)
			code = 1
		}
	}
	var err error
	if shared, err = cluster.Start(ctx, cluster.Options{Progress: os.Stderr}); err != nil {
		fail(err)
		return code
	}
	defer func() { // also if a test panics
		fail(shared.Stop())
		if _, err := os.Lstat(shared.Dir()); err == nil {
			fail(fmt.Errorf("%s is left", shared.Dir()))
		}
		fail(goleak.Find())
	}()
	if err := shared.ApplyDir(ctx, "testdata", "Deployment"); err != nil {
		fail(err)
		return code
	}
	return m.Run()
}

// waitForAudit waits for an event of the audit log that matches.
func waitForAudit(t *testing.T, match func(auditv1.Event) bool) (found auditv1.Event) {
	t.Helper()
	fleet.Eventually(fleet.Context(t), t, func() error {
		events, err := shared.AuditEvents()
		if err != nil {
			return err
		}
		i := slices.IndexFunc(events, match)
		if i < 0 {
			return errors.New("the event is not in the audit log")
		}
		found = events[i]
		return nil
	})
	return found
}
