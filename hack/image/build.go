// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// build says what to build. The same fields and the same binaries give the same digests.
type build struct {
	Name      string   // of the image, without a tag
	Version   string   // its tag, besides latest
	Revision  string   // the commit
	Epoch     int64    // seconds since 1970
	Platforms []string // OS/ARCH
	Dir       string   // with Containerfile and bin/
	Out       io.Writer
}

func (b build) tagged() string { return b.Name + ":" + b.Version }

// arguments returns the arguments that podman, buildah and docker have in common.
func (b build) arguments() []string {
	return []string{
		"--file=" + filepath.Join(b.Dir, "Containerfile"),
		"--build-arg=VERSION=" + b.Version,
		"--build-arg=REVISION=" + b.Revision,
		"--build-arg=CREATED=" + time.Unix(b.Epoch, 0).UTC().Format(time.RFC3339),
	}
}

// with builds with the tool and returns the digest of each platform, as far as the tool reports it.
func (b build) with(ctx context.Context, tool string) ([]string, error) {
	if tool == "docker" {
		return nil, b.withDocker(ctx)
	}
	return b.withLists(ctx, tool)
}

// withLists builds with podman or buildah, one image after the other into a manifest list: images
// that are built at once enter it in the order in which they finish.
func (b build) withLists(ctx context.Context, tool string) ([]string, error) {
	// A build adds to an existing list, so it is removed. There may be none; if the removal fails,
	// the check below finds it.
	_, _ = command(ctx, tool, "manifest", "rm", b.list())
	for _, platform := range b.Platforms {
		// Without layers nothing is taken from a cache. The label would contain the builder's
		// version, and the history has hashes of the files on disk, including their owner.
		args := append([]string{"build", "--quiet", "--layers=false", "--identity-label=false", "--omit-history",
			fmt.Sprintf("--timestamp=%d", b.Epoch), "--platform=" + platform, "--manifest=" + b.list()}, b.arguments()...)
		if _, err := command(ctx, tool, append(args, b.Dir)...); err != nil {
			return nil, err
		}
	}
	text, err := command(ctx, tool, "manifest", "inspect", b.list())
	if err != nil {
		return nil, err
	}
	digests, err := b.digests(text)
	if err != nil {
		return nil, err
	}
	_, err = command(ctx, tool, "tag", b.list(), b.Name+":latest")
	return digests, err
}

// list returns the full name of the manifest list. For a short name, tools would ask registries.
func (b build) list() string {
	host, _, found := strings.Cut(b.Name, "/")
	if found && (strings.ContainsAny(host, ".:") || host == "localhost") {
		return b.tagged()
	}
	return "localhost/" + b.tagged()
}

// digests reads a manifest list, which must have exactly the platforms of the build.
func (b build) digests(list string) ([]string, error) {
	var index struct {
		Manifests []struct {
			Digest   string
			Platform struct{ OS, Architecture string }
		}
	}
	if err := json.Unmarshal([]byte(list), &index); err != nil {
		return nil, fmt.Errorf("read the manifest list: %w", err)
	}
	var digests, platforms []string
	for _, m := range index.Manifests {
		digests = append(digests, m.Digest)
		platforms = append(platforms, m.Platform.OS+"/"+m.Platform.Architecture)
	}
	if !slices.Equal(platforms, b.Platforms) {
		return nil, fmt.Errorf("%s holds %q, not %q", b.tagged(), platforms, b.Platforms)
	}
	return digests, nil
}

// withDocker leaves the images in docker's own store. For several platforms, it must be
// containerd's.
func (b build) withDocker(ctx context.Context) error {
	args := append([]string{"buildx", "build", "--provenance=false", fmt.Sprintf("--build-arg=SOURCE_DATE_EPOCH=%d", b.Epoch),
		"--platform=" + strings.Join(b.Platforms, ","), "--tag=" + b.tagged(), "--tag=" + b.Name + ":latest"}, b.arguments()...)
	_, err := command(ctx, "docker", append(args, b.Dir)...)
	return err
}
