// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Command chart packages deploy/helm/quartermaster as `helm package` does, and writes the checksum and
// the bill of materials beside it. They depend on the files, the version and the time and on nothing
// else.
package main

import (
	"archive/tar"
	"bytes"
	"cmp"
	"compress/gzip"
	"crypto/sha256"
	"flag"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"sigs.k8s.io/yaml"

	"github.com/quartermaster-dev/quartermaster/hack/internal/cyclonedx"
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
	files, err := read(os.DirFS(dir), version)
	if err != nil {
		return err
	}
	archive, err := pack(files, modified)
	if err != nil {
		return err
	}
	bom, err := newBOM(files, archive, version)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(out, 0o755); err != nil {
		return err
	}
	name := chartName + "-" + strings.TrimPrefix(version, "v") + ".tgz"
	if err := os.WriteFile(filepath.Join(out, name), archive, 0o644); err != nil {
		return err
	}
	if err := bom.Write(filepath.Join(out, name+".cdx.json")); err != nil {
		return err
	}
	sum := fmt.Sprintf("%x  %s\n", sha256.Sum256(archive), name)
	fmt.Print(sum)
	return os.WriteFile(filepath.Join(out, name+".sha256"), []byte(sum), 0o644)
}

const chartName = "quartermaster"

var (
	semver         = regexp.MustCompile(`^v\d+\.\d+\.\d+(-[0-9A-Za-z.-]+)?$`)
	versionLine    = regexp.MustCompile(`(?m)^version: .*$`)
	appVersionLine = regexp.MustCompile(`(?m)^appVersion: .*$`)
)

// file is one of the chart's.
type file struct {
	name string // below the chart's folder
	text []byte
}

// read returns the files of a chart in the order of their names, with the version vX.Y.Z.
func read(chart fs.FS, version string) ([]file, error) {
	if !semver.MatchString(version) {
		return nil, fmt.Errorf("-version: %q is not vX.Y.Z", version)
	}
	var files []file
	err := fs.WalkDir(chart, ".", func(name string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		text, err := fs.ReadFile(chart, name)
		if name == "Chart.yaml" {
			text = versionLine.ReplaceAll(text, []byte("version: "+strings.TrimPrefix(version, "v")))
			text = appVersionLine.ReplaceAll(text, []byte("appVersion: "+version))
		}
		files = append(files, file{name, text})
		return err
	})
	return files, err
}

// pack returns the archive of a chart.
func pack(files []file, modified time.Time) ([]byte, error) {
	var buffer bytes.Buffer
	compressed := gzip.NewWriter(&buffer)
	archive := tar.NewWriter(compressed)
	for _, f := range files {
		header := &tar.Header{Name: path.Join(chartName, f.name), Mode: 0o644, Size: int64(len(f.text)), ModTime: modified.UTC()}
		if err := archive.WriteHeader(header); err != nil {
			return nil, err
		}
		if _, err := archive.Write(f.text); err != nil {
			return nil, err
		}
	}
	if err := archive.Close(); err != nil {
		return nil, err
	}
	if err := compressed.Close(); err != nil {
		return nil, err
	}
	return buffer.Bytes(), nil
}

// newBOM lists the files of the archive and the image that the chart installs by default.
func newBOM(files []file, archive []byte, version string) (cyclonedx.BOM, error) {
	purl := "pkg:helm/" + chartName + "@" + strings.TrimPrefix(version, "v")
	chart := cyclonedx.Component{BOMRef: purl, Type: "application", Name: chartName, Version: strings.TrimPrefix(version, "v"),
		Hashes: cyclonedx.SHA256(archive), Licenses: cyclonedx.Licenses("Apache-2.0"), PackageURL: purl}
	var parts []cyclonedx.Component
	for _, f := range files {
		parts = append(parts, cyclonedx.Component{BOMRef: path.Join(chartName, f.name), Type: "file", Name: path.Join(chartName, f.name),
			Hashes: cyclonedx.SHA256(f.text)})
		if f.name != "values.yaml" {
			continue
		}
		var values struct {
			Image struct{ Repository, Tag string }
		}
		if err := yaml.Unmarshal(f.text, &values); err != nil {
			return cyclonedx.BOM{}, fmt.Errorf("values.yaml: %w", err)
		}
		image := values.Image.Repository
		tag := cmp.Or(values.Image.Tag, version)
		purl := fmt.Sprintf("pkg:oci/%s?tag=%s", path.Base(image), url.QueryEscape(tag))
		if image != path.Base(image) {
			purl += "&repository_url=" + url.QueryEscape(image)
		}
		parts = append(parts, cyclonedx.Component{BOMRef: purl, Type: "container", Name: image, Version: tag, PackageURL: purl})
	}
	return cyclonedx.New(chart, parts), nil
}
