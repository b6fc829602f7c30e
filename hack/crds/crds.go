// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build crds

// Package crds names the modules that have the CRDs of the tests, or the Go types from which
// controller-gen makes the CRDs. Nothing builds this package.
package crds

import (
	_ "github.com/argoproj/argo-cd/v3/pkg/apis/application" // manifests/crds
	_ "github.com/fluxcd/helm-controller/api/v2"
	_ "github.com/fluxcd/source-controller/api/v1"
	_ "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
)
