// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func testImage() image {
	return image{Version: "v1.2.3", Revision: "0123abc", Created: time.Unix(1_700_000_000, 0).UTC(),
		Managers: []managerOf{{"amd64", []byte("for amd64")}, {"arm64", []byte("for arm64")}}}
}

// TestImage follows the references from index.json, as a registry's client does.
func TestImage(t *testing.T) {
	archive, digest, err := testImage().archive()
	if err != nil {
		t.Fatal(err)
	}
	l := layout{}
	for _, f := range untar(t, archive) {
		l[f.Name] = f.Content
	}
	if got := string(l["oci-layout"]); got != `{"imageLayoutVersion":"1.0.0"}` {
		t.Errorf("oci-layout is %s", got)
	}
	blobs := len(l) - 2

	var entry, all index
	parse(t, l["index.json"], &entry)
	if len(entry.Manifests) != 1 || entry.Manifests[0].Digest != digest {
		t.Fatalf("index.json is %+v, the digest %s", entry, digest)
	}
	parse(t, l.blob(t, entry.Manifests[0], indexType), &all)
	seen := 1
	for i, d := range all.Manifests {
		m := testImage().Managers[i]
		if want := (platform{m.Architecture, "linux"}); *d.Platform != want {
			t.Errorf("platform %d is %+v", i, *d.Platform)
		}
		var one manifest
		parse(t, l.blob(t, d, manifestType), &one)
		var config imageConfig
		parse(t, l.blob(t, one.Config, configType), &config)
		compressed, err := gzip.NewReader(bytes.NewReader(l.blob(t, one.Layers[0], layerType)))
		if err != nil {
			t.Fatal(err)
		}
		unzipped, err := io.ReadAll(compressed)
		if err != nil {
			t.Fatal(err)
		}
		if config.platform != *d.Platform || len(one.Layers) != 1 || !cmp.Equal(config.RootFS, rootFS{"layers", []string{digestOf(unzipped)}}) {
			t.Errorf("config %+v of %+v", config, one)
		}
		if diff := cmp.Diff([]file{{Name: "manager", Mode: 0o755, Content: m.Binary}}, untar(t, unzipped)); diff != "" {
			t.Errorf("-want +got:\n%s", diff)
		}
		seen += 3
	}
	if len(all.Manifests) != 2 || seen != blobs {
		t.Errorf("%d platforms; %d blobs of %d are referred to", len(all.Manifests), seen, blobs)
	}
}

func TestImageDependsOnWhatIsInIt(t *testing.T) {
	digest := func(i image) string {
		t.Helper()
		_, digest, err := i.archive()
		if err != nil {
			t.Fatal(err)
		}
		return digest
	}
	want := digest(testImage())
	for range 5 {
		if got := digest(testImage()); got != want {
			t.Fatalf("the same image has the digests %s and %s", want, got)
		}
	}
	other := testImage()
	other.Managers[1].Binary = []byte("another")
	if digest(other) == want {
		t.Error("another manager does not change the digest")
	}
}

// TestTheImageIsThatOfContainerfile compares the two descriptions of the image: that which make image
// builds with a container tool, and that of a release.
func TestTheImageIsThatOfContainerfile(t *testing.T) {
	text, err := os.ReadFile(filepath.Join("..", "..", "Containerfile"))
	if err != nil {
		t.Fatal(err)
	}
	want := runConfig{ExposedPorts: map[string]struct{}{}, Labels: map[string]string{}}
	i := testImage()
	args := strings.NewReplacer("${CREATED}", i.Created.Format(time.RFC3339), "${REVISION}", i.Revision, "${VERSION}", i.Version)
	for line := range strings.Lines(strings.ReplaceAll(string(text), "\\\n", " ")) {
		instruction, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		switch instruction {
		case "USER":
			want.User = value
		case "EXPOSE":
			want.ExposedPorts[value+"/tcp"] = struct{}{}
		case "ENTRYPOINT":
			parse(t, []byte(value), &want.Entrypoint)
		case "LABEL":
			for _, label := range regexp.MustCompile(`(\S+)="([^"]*)"`).FindAllStringSubmatch(value, -1) {
				want.Labels[label[1]] = args.Replace(label[2])
			}
		case "COPY":
			if value != "--chmod=0755 bin/${TARGETOS}/${TARGETARCH}/manager /manager" {
				t.Errorf("COPY %s", value)
			}
		case "FROM", "ARG", "", "#":
		default:
			t.Errorf("%s: the image of a release does not have this", line)
		}
	}
	l := layout{}
	d, err := i.manifest(l, i.Managers[0])
	if err != nil {
		t.Fatal(err)
	}
	var one manifest
	parse(t, l.blob(t, d, manifestType), &one)
	var config imageConfig
	parse(t, l.blob(t, one.Config, configType), &config)
	if diff := cmp.Diff(want, config.Config); diff != "" {
		t.Errorf("-Containerfile +release:\n%s", diff)
	}
}

// blob returns what a descriptor refers to, after the checks that clients make.
func (l layout) blob(t *testing.T, d descriptor, mediaType string) []byte {
	t.Helper()
	blob, found := l["blobs/"+strings.Replace(d.Digest, ":", "/", 1)]
	if !found || d.MediaType != mediaType || d.Size != len(blob) || d.Digest != digestOf(blob) {
		t.Fatalf("%+v refers to %d bytes with the digest %s", d, len(blob), digestOf(blob))
	}
	return blob
}

func parse(t *testing.T, text []byte, value any) {
	t.Helper()
	decoder := json.NewDecoder(bytes.NewReader(text))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(value); err != nil {
		t.Fatalf("%s: %v", text, err)
	}
}

func untar(t *testing.T, archive []byte) (files []file) {
	t.Helper()
	for r := tar.NewReader(bytes.NewReader(archive)); ; {
		header, err := r.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		if err != nil {
			t.Fatal(err)
		}
		content, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, file{Name: header.Name, Mode: header.FileInfo().Mode(), Content: content})
	}
}
