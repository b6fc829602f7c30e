// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"io"
	"io/fs"
	"os"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// image is an OCI image with the manager and nothing else, for several architectures. It needs no files:
// the CA of the API server comes with the kubeconfig or the ServiceAccount, and the self-signed serving
// certificate is kept in memory unless --tls-cert-file says otherwise.
type image struct {
	Name     string // without a tag
	Version  string // its tag
	Revision string
	Created  time.Time
	Managers []managerBinary
}

type managerBinary struct {
	Architecture string
	Binary       []byte
}

func (i image) config() v1.Config {
	return v1.Config{
		// Numeric, since there is no /etc/passwd, and so that runAsNonRoot can be checked without one.
		User:         "65532:65532",
		ExposedPorts: map[string]struct{}{"10357/tcp": {}}, // --secure-port; documentation only
		Entrypoint:   []string{"/manager"},
		Labels: map[string]string{
			"org.opencontainers.image.title":       "quartermaster",
			"org.opencontainers.image.description": "One highly available process for the controllers of a cluster",
			"org.opencontainers.image.licenses":    "Apache-2.0",
			"org.opencontainers.image.source":      "https://github.com/quartermaster-dev/quartermaster",
			"org.opencontainers.image.created":     i.Created.Format(time.RFC3339),
			"org.opencontainers.image.revision":    i.Revision,
			"org.opencontainers.image.version":     i.Version,
		},
	}
}

// index returns what registries show under the image's tag.
func (i image) index() (v1.ImageIndex, error) {
	index := mutate.IndexMediaType(empty.Index, types.OCIImageIndex)
	for _, m := range i.Managers {
		files, err := makeTar(i.Created, []file{{Name: "manager", Mode: 0o755, Content: m.Binary}})
		if err != nil {
			return nil, err
		}
		layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) {
			return io.NopCloser(bytes.NewReader(files)), nil
		}, tarball.WithMediaType(types.OCILayer))
		if err != nil {
			return nil, err
		}
		platformImage, err := mutate.ConfigFile(mutate.MediaType(empty.Image, types.OCIManifestSchema1), &v1.ConfigFile{
			OS: "linux", Architecture: m.Architecture, Created: v1.Time{Time: i.Created}, Config: i.config(), RootFS: v1.RootFS{Type: "layers"}})
		if err == nil {
			platformImage, err = mutate.Append(mutate.ConfigMediaType(platformImage, types.OCIConfigJSON), mutate.Addendum{Layer: layer,
				History: v1.History{Created: v1.Time{Time: i.Created}}})
		}
		if err != nil {
			return nil, err
		}
		index = mutate.AppendManifests(index, mutate.IndexAddendum{Add: plainImage{platformImage},
			Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: m.Architecture}}})
	}
	return index, nil
}

// plainImage keeps the field artifactType out of the index: tools that do not know it change the digest
// when they copy the index.
type plainImage struct{ v1.Image }

func (plainImage) ArtifactType() (string, error) { return "", nil }

// archive returns the image as a tar of an OCI layout, and the digest that registries show.
func (i image) archive() ([]byte, string, error) {
	index, err := i.index()
	if err != nil {
		return nil, "", err
	}
	digest, err := index.Digest()
	if err != nil {
		return nil, "", err
	}
	dir, err := os.MkdirTemp("", "image-")
	if err != nil {
		return nil, "", err
	}
	defer os.RemoveAll(dir)
	target, err := layout.Write(dir, empty.Index)
	if err != nil {
		return nil, "", err
	}
	// containerd and podman name the image by the first annotation when they load the archive. A node
	// takes quartermaster:vX.Y.Z for docker.io/library/quartermaster:vX.Y.Z.
	name := i.Name
	if !strings.Contains(name, "/") {
		name = "docker.io/library/" + name
	}
	if err := target.AppendIndex(index, layout.WithAnnotations(map[string]string{
		"io.containerd.image.name":          name + ":" + i.Version,
		"org.opencontainers.image.ref.name": i.Version,
	})); err != nil {
		return nil, "", err
	}
	var files []file
	err = fs.WalkDir(os.DirFS(dir), ".", func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		content, err := fs.ReadFile(os.DirFS(dir), path)
		files = append(files, file{Name: path, Mode: 0o644, Content: content})
		return err
	})
	if err != nil {
		return nil, "", err
	}
	archive, err := makeTar(i.Created, files)
	return archive, digest.String(), err
}
