// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	chart "helm.sh/helm/v4/pkg/chart/v2"
	"helm.sh/helm/v4/pkg/chart/v2/loader"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/quartermaster-dev/quartermaster/hack/internal/cyclonedx"
)

func TestPackage(t *testing.T) {
	modified := time.Unix(1_700_000_000, 0)
	archive := func(dir string, modified time.Time) []byte {
		files, err := read(os.DirFS(dir), "v1.2.3-rc.1")
		if err != nil {
			t.Fatal(err)
		}
		archive, err := pack(files, modified)
		if err != nil {
			t.Fatal(err)
		}
		return archive
	}
	first := archive(chartDir, modified)
	// In a copy, whose files are newer, and in another time zone.
	dir := filepath.Join(t.TempDir(), "elsewhere")
	if err := os.CopyFS(dir, os.DirFS(chartDir)); err != nil {
		t.Fatal(err)
	}
	second := archive(dir, modified.In(time.FixedZone("", 3600)))
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
		if _, err := read(os.DirFS(chartDir), version); err == nil {
			t.Errorf("%q is taken for a version", version)
		}
	}
}

// TestTheBillOfMaterials compares what make chart writes with the archive beside it as Helm reads it.
func TestTheBillOfMaterials(t *testing.T) {
	out := t.TempDir()
	if err := run(chartDir, "v1.2.3", time.Unix(1_700_000_000, 0), out); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(filepath.Join(out, "quartermaster-1.2.3.tgz.cdx.json"))
	if err != nil {
		t.Fatal(err)
	}
	var bom cyclonedx.BOM
	if err := json.Unmarshal(text, &bom); err != nil {
		t.Fatal(err)
	}
	archive, err := os.ReadFile(filepath.Join(out, "quartermaster-1.2.3.tgz"))
	if err != nil {
		t.Fatal(err)
	}
	if c := bom.Metadata.Component; !slices.Equal(c.Hashes, cyclonedx.SHA256(archive)) || c.PackageURL != "pkg:helm/quartermaster@1.2.3" {
		t.Errorf("it is about %+v", c)
	}
	chart, err := loader.LoadArchive(bytes.NewReader(archive))
	if err != nil {
		t.Fatal(err)
	}
	var want, got []string
	for _, file := range chart.Raw {
		want = append(want, "file quartermaster/"+file.Name+" "+cyclonedx.SHA256(file.Data)[0].Content)
	}
	want = append(want, "container "+installedImage(t, chart))
	for _, c := range bom.Components {
		line := c.Type + " " + c.Name
		for _, hash := range c.Hashes {
			line += " " + hash.Content
		}
		if c.Type == "container" {
			line += ":" + c.Version
		}
		got = append(got, line)
	}
	slices.Sort(want)
	slices.Sort(got)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-archive +bill:\n%s", diff)
	}
}

// installedImage returns the one image in what the chart renders with default values.
func installedImage(t *testing.T, chart *chart.Chart) string {
	t.Helper()
	objects, err := renderChart(chart, "", "kube-system")
	if err != nil {
		t.Fatal(err)
	}
	var images []string
	for _, object := range objects {
		containers, _, err := unstructured.NestedSlice(object, "spec", "template", "spec", "containers")
		if err != nil {
			t.Fatal(err)
		}
		for _, container := range containers {
			images = append(images, container.(map[string]any)["image"].(string))
		}
	}
	if len(images) != 1 {
		t.Fatalf("the chart installs %q", images)
	}
	return images[0]
}

func TestAnImageOfARegistryIsNamedInFull(t *testing.T) {
	for name, test := range map[string]struct{ image, want string }{
		"as it is":              {"{repository: quartermaster, tag: ''}", "pkg:oci/quartermaster?tag=v1.2.3"},
		"of a registry":         {"{repository: 'registry.example:5000/team/q', tag: ''}", "pkg:oci/q?tag=v1.2.3&repository_url=registry.example%3A5000%2Fteam%2Fq"},
		"with a tag of its own": {"{repository: quartermaster, tag: v2}", "pkg:oci/quartermaster?tag=v2"},
	} {
		t.Run(name, func(t *testing.T) {
			bom, err := newBOM([]file{{"values.yaml", []byte("image: " + test.image)}}, nil, "v1.2.3")
			if err != nil {
				t.Fatal(err)
			}
			if got := bom.Components[1].PackageURL; got != test.want {
				t.Errorf("got %s", got)
			}
		})
	}
}
