// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"crypto/sha256"
	"runtime/debug"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestNewBOM(t *testing.T) {
	const us = "github.com/quartermaster-dev/quartermaster"
	got := newBOM(&debug.BuildInfo{
		GoVersion: "go1.26.8",
		Path:      us + "/cmd/manager",
		Main:      debug.Module{Path: us, Version: "(devel)"},
		Deps: []*debug.Module{
			{Path: "example.com/old", Version: "v2.0.0+incompatible", Sum: "h1:abc="},
			{Path: "example.com/replaced", Version: "v1.0.0", Replace: &debug.Module{Path: "example.com/fork", Version: "v1.0.1"}},
		},
		Settings: []debug.BuildSetting{{Key: "-trimpath", Value: "true"}, {Key: "GOARCH", Value: "arm64"}},
	}, "v1.2.3", [sha256.Size]byte{0xff})

	want := bom{
		Schema: "http://cyclonedx.org/schema/bom-1.6.schema.json", BOMFormat: "CycloneDX", SpecVersion: "1.6", Version: 1,
		Metadata: metadata{component{
			BOMRef: "pkg:golang/" + us + "@v1.2.3", Type: "application", Name: "manager", Version: "v1.2.3",
			PackageURL: "pkg:golang/" + us + "@v1.2.3",
			Hashes:     []hash{{"SHA-256", "ff00000000000000000000000000000000000000000000000000000000000000"}},
			Properties: []property{{"go:GOARCH", "arm64"}},
		}},
		Components: []component{
			{
				BOMRef: "pkg:golang/example.com/old@v2.0.0%2Bincompatible", Type: "library", Name: "example.com/old",
				Version: "v2.0.0+incompatible", PackageURL: "pkg:golang/example.com/old@v2.0.0%2Bincompatible",
				Properties: []property{{"go:sum", "h1:abc="}},
			},
			{
				BOMRef: "pkg:golang/example.com/fork@v1.0.1", Type: "library", Name: "example.com/fork", Version: "v1.0.1",
				PackageURL: "pkg:golang/example.com/fork@v1.0.1",
			},
			{BOMRef: "pkg:golang/std@1.26.8", Type: "library", Name: "std", Version: "1.26.8", PackageURL: "pkg:golang/std@1.26.8"},
		},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}
