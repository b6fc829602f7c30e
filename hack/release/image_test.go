// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/validate"
)

func testImage() image {
	return image{Name: "quartermaster", Version: "v1.2.3", Revision: "0123abc", Created: time.Unix(1_700_000_000, 0).UTC(),
		Managers: []managerBinary{{"amd64", []byte("for amd64")}, {"arm64", []byte("for arm64")}}}
}

// TestImageHasEachPlatform unpacks the archive and reads it as a registry's client does.
func TestImageHasEachPlatform(t *testing.T) {
	archive, digest, err := testImage().archive()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	for _, f := range untar(t, bytes.NewReader(archive)) {
		if err := os.MkdirAll(filepath.Dir(filepath.Join(dir, f.Name)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, f.Name), f.Content, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	names, err := layout.ImageIndexFromPath(dir)
	if err != nil {
		t.Fatal(err)
	}
	entries, err := names.IndexManifest()
	if err != nil {
		t.Fatal(err)
	}
	entry := entries.Manifests[0]
	if name := entry.Annotations["io.containerd.image.name"]; name != "docker.io/library/quartermaster:v1.2.3" || entry.Digest.String() != digest {
		t.Errorf("index.json names %s with the digest %s, not %s", name, entry.Digest, digest)
	}
	index, err := names.ImageIndex(entry.Digest)
	if err != nil {
		t.Fatal(err)
	}
	if err := validate.Index(index); err != nil {
		t.Error(err)
	}
	list, err := index.IndexManifest()
	if err != nil || len(list.Manifests) != 2 {
		t.Fatalf("%+v: %v", list, err)
	}
	for i, m := range testImage().Managers {
		platformImage, err := index.Image(list.Manifests[i].Digest)
		if err != nil {
			t.Fatal(err)
		}
		config, err := platformImage.ConfigFile()
		if err != nil {
			t.Fatal(err)
		}
		if kind := list.Manifests[i].ArtifactType; kind != "" {
			t.Errorf("artifactType is %s", kind)
		}
		want := &v1.Platform{OS: "linux", Architecture: m.Architecture}
		if !list.Manifests[i].Platform.Equals(*want) || !config.Platform().Equals(*want) {
			t.Errorf("platforms %v and %v, not %v", list.Manifests[i].Platform, config.Platform(), want)
		}
		layers, err := platformImage.Layers()
		if err != nil || len(layers) != 1 {
			t.Fatalf("%d layers: %v", len(layers), err)
		}
		content, err := layers[0].Uncompressed()
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff([]file{{Name: "manager", Mode: 0o755, Content: m.Binary}}, untar(t, content)); diff != "" {
			t.Errorf("-want +got:\n%s", diff)
		}
	}
}

func TestImageRunsAsTheDeploymentSays(t *testing.T) {
	deployment, err := os.ReadFile(filepath.Join("..", "..", "deploy", "base", "deployment.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	config := testImage().config()
	user, group, _ := strings.Cut(config.User, ":")
	wanted := []string{"runAsUser: " + user + "\n", "runAsGroup: " + group + "\n", "image: quartermaster:"}
	for port := range config.ExposedPorts {
		wanted = append(wanted, "containerPort: "+strings.TrimSuffix(port, "/tcp")+"\n")
	}
	for _, want := range wanted {
		if !strings.Contains(string(deployment), want) {
			t.Errorf("the Deployment does not have %q", want)
		}
	}
}

func untar(t *testing.T, archive io.Reader) (files []file) {
	t.Helper()
	for r := tar.NewReader(archive); ; {
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
