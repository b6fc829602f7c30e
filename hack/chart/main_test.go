// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"
	"time"

	"helm.sh/helm/v4/pkg/chart/v2/loader"
)

func TestPackage(t *testing.T) {
	modified := time.Unix(1_700_000_000, 0)
	first, err := pack(os.DirFS(chartDir), "v1.2.3-rc.1", modified)
	if err != nil {
		t.Fatal(err)
	}
	// In a copy, whose files are newer, and in another time zone.
	dir := filepath.Join(t.TempDir(), "elsewhere")
	if err := os.CopyFS(dir, os.DirFS(chartDir)); err != nil {
		t.Fatal(err)
	}
	second, err := pack(os.DirFS(dir), "v1.2.3-rc.1", modified.In(time.FixedZone("", 3600)))
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(first, second) {
		t.Error("packaging the same chart again gives another archive")
	}

	packaged, err := loader.LoadArchive(bytes.NewReader(first))
	if err != nil {
		t.Fatal(err)
	}
	if err := packaged.Validate(); err != nil {
		t.Error(err)
	}
	if m := packaged.Metadata; m.Version != "1.2.3-rc.1" || m.AppVersion != "v1.2.3-rc.1" {
		t.Errorf("version %s, appVersion %s", m.Version, m.AppVersion)
	}
	unpacked, err := loader.LoadDir(chartDir)
	if err != nil {
		t.Fatal(err)
	}
	if len(packaged.Raw) != len(unpacked.Raw) {
		t.Errorf("%d files of %d", len(packaged.Raw), len(unpacked.Raw))
	}
	for i, file := range unpacked.Raw {
		if file.Name != "Chart.yaml" && !bytes.Equal(file.Data, packaged.Raw[i].Data) {
			t.Errorf("%s differs", file.Name)
		}
	}
}

func TestPackageRefusesWhatIsNoVersion(t *testing.T) {
	for _, version := range []string{"", "1.2.3", "v1.2", "v1.2.3 ", "latest"} {
		if _, err := pack(os.DirFS(chartDir), version, time.Time{}); err == nil {
			t.Errorf("%q is taken for a version", version)
		}
	}
}
