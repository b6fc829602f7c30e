// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package deploy tests what deploy/ installs, on a real control plane: every object is accepted,
// each permission is needed, the manager exports the metrics that are listed, and an upgrade loses
// nothing.
package deploy

import (
	"context"
	"errors"
	"fmt"
	"os"
	"testing"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// shared is the control plane of all tests of the package.
var shared *fleet.Fleet

func TestMain(m *testing.M) {
	// Like an older one, this API server cannot stream lists, so it gets list requests as well as
	// watches.
	os.Exit(fleet.Main(m, &shared, fleet.Options{Cluster: cluster.Options{FeatureGates: "WatchList=false"}}))
}

// installCRDs installs the CRDs that the components need.
func installCRDs(ctx context.Context, t *testing.T) {
	t.Helper()
	assert.NoError(t, shared.ApplyDir(ctx, "testdata/crds.yaml"))
	assert.NoError(t, shared.WaitForCRDs(ctx, "testdata/crds.yaml"))
	installFederation(ctx, t)
}

// installFederation installs what the component federation needs: its types and its namespace.
func installFederation(ctx context.Context, t *testing.T) {
	t.Helper()
	const dir = "../../deploy/federation"
	err := shared.ApplyDir(ctx, dir+"/crds")
	for _, file := range []string{"core.yaml", "federated.yaml", "scheduling.yaml", "dns.yaml"} {
		err = errors.Join(err, shared.WaitForCRDs(ctx, dir+"/crds/"+file))
	}
	assert.NoError(t, errors.Join(err, shared.ApplyDir(ctx, dir)))
}

// overlay calls fleet.Overlay.
func overlay(t *testing.T, components ...string) string {
	t.Helper()
	dir, err := shared.Overlay(components...)
	assert.NoError(t, err)
	return dir
}

// render returns the objects of a kustomization, as YAML.
func render(ctx context.Context, t *testing.T, kustomization string) string {
	t.Helper()
	manifests, err := shared.Kubectl(ctx, "kustomize", kustomization)
	if err != nil {
		t.Fatal(fmt.Errorf("%s: %w", kustomization, err))
	}
	return manifests
}
