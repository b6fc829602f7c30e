// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
)

// image is what Containerfile describes, for several architectures.
type image struct {
	Version  string
	Revision string
	Created  time.Time
	Managers []managerOf
}

type managerOf struct {
	Architecture string
	Binary       []byte
}

// layout is an OCI image layout, https://github.com/opencontainers/image-spec/blob/v1.1.1/image-layout.md.
type layout map[string][]byte // by file

// descriptor refers to one of its blobs.
type descriptor struct {
	MediaType   string            `json:"mediaType"`
	Digest      string            `json:"digest"`
	Size        int               `json:"size"`
	Platform    *platform         `json:"platform,omitempty"`
	Annotations map[string]string `json:"annotations,omitempty"`
}

type platform struct {
	Architecture string `json:"architecture"`
	OS           string `json:"os"`
}

type index struct {
	SchemaVersion int          `json:"schemaVersion"`
	MediaType     string       `json:"mediaType"`
	Manifests     []descriptor `json:"manifests"`
}

type manifest struct {
	SchemaVersion int          `json:"schemaVersion"`
	MediaType     string       `json:"mediaType"`
	Config        descriptor   `json:"config"`
	Layers        []descriptor `json:"layers"`
}

type imageConfig struct {
	platform
	Created string    `json:"created"`
	Config  runConfig `json:"config"`
	RootFS  rootFS    `json:"rootfs"`
}

type runConfig struct {
	User         string
	ExposedPorts map[string]struct{}
	Entrypoint   []string
	Labels       map[string]string
}

type rootFS struct {
	Type    string   `json:"type"`
	DiffIDs []string `json:"diff_ids"`
}

const (
	indexType    = "application/vnd.oci.image.index.v1+json"
	manifestType = "application/vnd.oci.image.manifest.v1+json"
	configType   = "application/vnd.oci.image.config.v1+json"
	layerType    = "application/vnd.oci.image.layer.v1.tar+gzip"
)

// archive returns the layout as a tar, and the digest that registries show.
func (i image) archive() ([]byte, string, error) {
	l := layout{"oci-layout": []byte(`{"imageLayoutVersion":"1.0.0"}`)}
	all := index{SchemaVersion: 2, MediaType: indexType}
	for _, m := range i.Managers {
		one, err := i.manifest(l, m)
		if err != nil {
			return nil, "", err
		}
		all.Manifests = append(all.Manifests, one)
	}
	entry, err := l.addJSON(indexType, all)
	if err != nil {
		return nil, "", err
	}
	// The names under which tools that load the archive keep the image: containerd and podman read the
	// first, which is what a node takes quartermaster:vX.Y.Z for.
	entry.Annotations = map[string]string{
		"io.containerd.image.name":          "docker.io/library/quartermaster:" + i.Version,
		"org.opencontainers.image.ref.name": i.Version,
	}
	if l["index.json"], err = json.Marshal(index{SchemaVersion: 2, MediaType: indexType, Manifests: []descriptor{entry}}); err != nil {
		return nil, "", err
	}
	var files []file
	for _, name := range slices.Sorted(maps.Keys(l)) {
		files = append(files, file{Name: name, Mode: 0o644, Content: l[name]})
	}
	archive, err := tarred(i.Created, files)
	return archive, entry.Digest, err
}

// manifest adds the image of one architecture.
func (i image) manifest(l layout, m managerOf) (descriptor, error) {
	on := platform{Architecture: m.Architecture, OS: "linux"}
	files, err := tarred(i.Created, []file{{Name: "manager", Mode: 0o755, Content: m.Binary}})
	if err != nil {
		return descriptor{}, err
	}
	compressed, err := gzipped(files)
	if err != nil {
		return descriptor{}, err
	}
	created := i.Created.Format(time.RFC3339)
	config, err := l.addJSON(configType, imageConfig{
		platform: on,
		Created:  created,
		Config: runConfig{
			User:         "65532:65532",
			ExposedPorts: map[string]struct{}{"10357/tcp": {}},
			Entrypoint:   []string{"/manager"},
			Labels: map[string]string{
				"org.opencontainers.image.title":       "quartermaster",
				"org.opencontainers.image.description": "One highly available process for the controllers of a cluster",
				"org.opencontainers.image.licenses":    "Apache-2.0",
				"org.opencontainers.image.source":      "https://github.com/quartermaster-dev/quartermaster",
				"org.opencontainers.image.created":     created,
				"org.opencontainers.image.revision":    i.Revision,
				"org.opencontainers.image.version":     i.Version,
			},
		},
		RootFS: rootFS{"layers", []string{digestOf(files)}},
	})
	if err != nil {
		return descriptor{}, err
	}
	d, err := l.addJSON(manifestType, manifest{SchemaVersion: 2, MediaType: manifestType, Config: config,
		Layers: []descriptor{l.add(layerType, compressed)}})
	d.Platform = &on
	return d, err
}

func (l layout) addJSON(mediaType string, value any) (descriptor, error) {
	blob, err := json.Marshal(value)
	return l.add(mediaType, blob), err
}

// add adds a blob.
func (l layout) add(mediaType string, blob []byte) descriptor {
	digest := digestOf(blob)
	l["blobs/"+strings.Replace(digest, ":", "/", 1)] = blob
	return descriptor{MediaType: mediaType, Digest: digest, Size: len(blob)}
}

func digestOf(blob []byte) string { return fmt.Sprintf("sha256:%x", sha256.Sum256(blob)) }
