// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Command chart packages deploy/helm/quartermaster as `helm package` does, and writes the checksum
// beside it. The archive depends on the files, the version and the time and on nothing else.
package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"strings"
	"time"
)

func main() {
	version := flag.String("version", "", "the `version` of the chart and of the application")
	epoch := flag.Int64("epoch", 0, "the time of the files, in `seconds` since 1970")
	out := flag.String("out", "", "the `directory` to write to")
	flag.Parse()
	if err := run(flag.Arg(0), *version, time.Unix(*epoch, 0), *out); err != nil {
		fmt.Fprintln(os.Stderr, "Error:", err)
		os.Exit(1)
	}
}

func run(dir, version string, modified time.Time, out string) error {
	archive, err := pack(os.DirFS(dir), version, modified)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(out, 0o755); err != nil {
		return err
	}
	name := "quartermaster-" + strings.TrimPrefix(version, "v") + ".tgz"
	if err := os.WriteFile(filepath.Join(out, name), archive, 0o644); err != nil {
		return err
	}
	sum := fmt.Sprintf("%x  %s\n", sha256.Sum256(archive), name)
	fmt.Print(sum)
	return os.WriteFile(filepath.Join(out, name+".sha256"), []byte(sum), 0o644)
}

var (
	semver         = regexp.MustCompile(`^v\d+\.\d+\.\d+(-[0-9A-Za-z.-]+)?$`)
	versionLine    = regexp.MustCompile(`(?m)^version: .*$`)
	appVersionLine = regexp.MustCompile(`(?m)^appVersion: .*$`)
)

// pack returns the archive of a chart, with the version vX.Y.Z.
func pack(chart fs.FS, version string, modified time.Time) ([]byte, error) {
	if !semver.MatchString(version) {
		return nil, fmt.Errorf("-version: %q is not vX.Y.Z", version)
	}
	var archive bytes.Buffer
	compressed := gzip.NewWriter(&archive)
	files := tar.NewWriter(compressed)
	add := func(name string, text []byte) error {
		header := &tar.Header{Name: path.Join("quartermaster", name), Mode: 0o644, Size: int64(len(text)), ModTime: modified.UTC()}
		if err := files.WriteHeader(header); err != nil {
			return err
		}
		_, err := files.Write(text)
		return err
	}
	// The files come in the order of their names.
	err := fs.WalkDir(chart, ".", func(name string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		text, err := fs.ReadFile(chart, name)
		if err != nil {
			return err
		}
		if name == "Chart.yaml" {
			text = versionLine.ReplaceAll(text, []byte("version: "+strings.TrimPrefix(version, "v")))
			text = appVersionLine.ReplaceAll(text, []byte("appVersion: "+version))
		}
		return add(name, text)
	})
	if err != nil {
		return nil, err
	}
	if err := files.Close(); err != nil {
		return nil, err
	}
	if err := compressed.Close(); err != nil {
		return nil, err
	}
	return archive.Bytes(), nil
}
