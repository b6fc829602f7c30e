// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"crypto/sha256"
	"runtime/debug"
	"strings"
	"testing"
	"testing/fstest"

	cdx "github.com/CycloneDX/cyclonedx-go"
	"github.com/google/go-cmp/cmp"
)

const (
	apache = "Apache License\n  Version 2.0, January 2004\n"
	bsd2   = "Redistribution and use in source and\nbinary forms, with or without modification\n"
	bsd3   = bsd2 + "may not be used to endorse or promote\nproducts derived from this software\n"
	mit    = "Permission is hereby granted, free of charge, to any\nperson obtaining a copy of this software\n"
)

func TestNewBOM(t *testing.T) {
	const modulePath = "github.com/quartermaster-dev/quartermaster"
	info := &debug.BuildInfo{
		GoVersion: "go1.26.8",
		Path:      modulePath + "/cmd/manager",
		Main:      debug.Module{Path: modulePath, Version: "(devel)"},
		Deps: []*debug.Module{
			{Path: "example.com/old", Version: "v2.0.0+incompatible", Sum: "h1:abc="},
			{Path: "example.com/replaced", Version: "v1.0.0", Replace: &debug.Module{Path: "example.com/fork", Version: "v1.0.1"}},
		},
		Settings: []debug.BuildSetting{{Key: "-trimpath", Value: "true"}, {Key: "GOARCH", Value: "arm64"}},
	}
	got := newBOM(info, modules(info), map[string]license{
		"example.com/old":  {IDs: []string{"Apache-2.0", "MIT"}},
		"example.com/fork": {IDs: []string{"ISC"}},
		"std":              {IDs: []string{"BSD-3-Clause"}},
	}, "v1.2.3", sha256.Sum256([]byte("binary")))

	licensed := func(ids ...string) *cdx.Licenses {
		var choices cdx.Licenses
		for _, id := range ids {
			choices = append(choices, cdx.LicenseChoice{License: &cdx.License{ID: id}})
		}
		return &choices
	}
	want := cdx.NewBOM()
	want.Metadata = &cdx.Metadata{Component: &cdx.Component{
		BOMRef: "pkg:golang/" + modulePath + "@v1.2.3", Type: "application", Name: "manager", Version: "v1.2.3",
		PackageURL: "pkg:golang/" + modulePath + "@v1.2.3",
		Hashes:     &[]cdx.Hash{{Algorithm: "SHA-256", Value: "9a3a45d01531a20e89ac6ae10b0b0beb0492acd7216a368aa062d1a5fecaf9cd"}},
		Licenses:   licensed("Apache-2.0"),
		Properties: &[]cdx.Property{{Name: "go:GOARCH", Value: "arm64"}},
	}}
	want.Components = &[]cdx.Component{
		{
			BOMRef: "pkg:golang/example.com/old@v2.0.0%2Bincompatible", Type: "library", Name: "example.com/old",
			Version: "v2.0.0+incompatible", PackageURL: "pkg:golang/example.com/old@v2.0.0%2Bincompatible",
			Licenses: licensed("Apache-2.0", "MIT"), Properties: &[]cdx.Property{{Name: "go:sum", Value: "h1:abc="}},
		},
		{
			BOMRef: "pkg:golang/example.com/fork@v1.0.1", Type: "library", Name: "example.com/fork", Version: "v1.0.1",
			PackageURL: "pkg:golang/example.com/fork@v1.0.1", Licenses: licensed("ISC"),
		},
		{
			BOMRef: "pkg:golang/std@1.26.8", Type: "library", Name: "std", Version: "1.26.8",
			PackageURL: "pkg:golang/std@1.26.8", Licenses: licensed("BSD-3-Clause"),
		},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

func TestReadLicense(t *testing.T) {
	for name, test := range map[string]struct {
		files   map[string]string
		shallow bool
		want    string
		wantErr string
	}{
		"one":                                     {files: map[string]string{"LICENSE": apache, "README.md": "MIT"}, want: "Apache-2.0"},
		"two in one file":                         {files: map[string]string{"LICENSE.txt": mit + apache}, want: "Apache-2.0 MIT"},
		"a notice belongs to one":                 {files: map[string]string{"LICENSE": apache, "NOTICE": "Copyright"}, want: "Apache-2.0"},
		"forked code has one too":                 {files: map[string]string{"LICENSE": apache, "forked/LICENSE": bsd3}, want: "Apache-2.0 BSD-3-Clause"},
		"only the license at Go's root counts":    {files: map[string]string{"LICENSE": bsd3, "misc/LICENSE": mit}, shallow: true, want: "BSD-3-Clause"},
		"the license of test data does not count": {files: map[string]string{"LICENSE": bsd2, "a/testdata/LICENSE": mit}, want: "BSD-2-Clause"},
		"none":                               {files: map[string]string{"NOTICE": "Copyright"}, wantErr: "has no license"},
		"one for a person to judge":          {files: map[string]string{"COPYING": "GNU GENERAL PUBLIC LICENSE"}, wantErr: "COPYING is no license"},
		"such a one beside one that we know": {files: map[string]string{"LICENSE": mit, "b/LICENSE": "GNU"}, wantErr: "b/LICENSE is no license"},
	} {
		t.Run(name, func(t *testing.T) {
			module := fstest.MapFS{}
			for name, text := range test.files {
				module[name] = &fstest.MapFile{Data: []byte(text)}
			}
			got, err := readLicense(module, !test.shallow)
			if test.wantErr != "" {
				if err == nil || !strings.Contains(err.Error(), test.wantErr) {
					t.Errorf("got %v", err)
				}
				return
			}
			if err != nil || strings.Join(got.IDs, " ") != test.want {
				t.Errorf("got %q, %v", got.IDs, err)
			}
		})
	}
}

func TestLicenseTextsSharedAreThereOnce(t *testing.T) {
	got := string(licenseTexts([]debug.Module{{Path: "a", Version: "v1"}, {Path: "b", Version: "v2"}}, map[string]license{
		"a": {Texts: map[string]string{"LICENSE": "shared\n", "NOTICE": "of a\n"}},
		"b": {Texts: map[string]string{"sub/LICENSE": "shared\n"}},
	}))
	line := strings.Repeat("=", 80)
	want := "The licenses of the modules that are linked into the program. Its own is in LICENSE.\n" +
		"\n" + line + "\na v1: LICENSE\nb v2: sub/LICENSE\n\nshared\n" +
		"\n" + line + "\na v1: NOTICE\n\nof a\n"
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}
