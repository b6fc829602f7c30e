// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Command sbom writes the software bill of materials of a Go binary as CycloneDX JSON: the modules
// that the linker put into it, according to the binary itself. The output is reproducible, so it
// has neither a time nor a serial number.
package main

import (
	"bytes"
	"crypto/sha256"
	"debug/buildinfo"
	"encoding/hex"
	"encoding/json"
	"flag"
	"fmt"
	"net/url"
	"os"
	"path"
	"runtime/debug"
	"strings"
)

func main() {
	version := flag.String("version", "", "version of the program; the binary's own if empty")
	out := flag.String("out", "", "file to write")
	flag.Parse()
	if err := run(flag.Args(), *version, *out); err != nil {
		fmt.Fprintln(os.Stderr, "Error:", err)
		os.Exit(1)
	}
}

func run(args []string, version, out string) error {
	if len(args) != 1 || out == "" {
		return fmt.Errorf("usage: sbom --out=FILE BINARY")
	}
	binary, err := os.ReadFile(args[0])
	if err != nil {
		return err
	}
	info, err := buildinfo.Read(bytes.NewReader(binary))
	if err != nil {
		return fmt.Errorf("read the modules of %s: %w", args[0], err)
	}
	text, err := json.MarshalIndent(newBOM(info, version, sha256.Sum256(binary)), "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(out, append(text, '\n'), 0o644)
}

// bom has the fields of CycloneDX 1.6 that are used, https://cyclonedx.org/docs/1.6/json/.
type bom struct {
	Schema      string      `json:"$schema"`
	BOMFormat   string      `json:"bomFormat"`
	SpecVersion string      `json:"specVersion"`
	Version     int         `json:"version"`
	Metadata    metadata    `json:"metadata"`
	Components  []component `json:"components"`
}

type metadata struct {
	Component component `json:"component"`
}

type component struct {
	BOMRef     string     `json:"bom-ref"`
	Type       string     `json:"type"`
	Name       string     `json:"name"`
	Version    string     `json:"version"`
	PackageURL string     `json:"purl"`
	Hashes     []hash     `json:"hashes,omitempty"`
	Properties []property `json:"properties,omitempty"`
}

type hash struct {
	Algorithm string `json:"alg"`
	Content   string `json:"content"`
}

type property struct {
	Name  string `json:"name"`
	Value string `json:"value"`
}

// newBOM lists the modules in the order of the binary, which is sorted by path, and then Go's
// standard library.
func newBOM(info *debug.BuildInfo, version string, sum [sha256.Size]byte) bom {
	if version == "" {
		version = info.Main.Version
	}
	program := newComponent("application", info.Main.Path, version)
	program.Name = path.Base(info.Path)
	program.Hashes = []hash{{"SHA-256", hex.EncodeToString(sum[:])}}
	for _, s := range info.Settings {
		if s.Key == "GOOS" || s.Key == "GOARCH" || s.Key == "CGO_ENABLED" {
			program.Properties = append(program.Properties, property{"go:" + s.Key, s.Value})
		}
	}
	b := bom{
		Schema:      "http://cyclonedx.org/schema/bom-1.6.schema.json",
		BOMFormat:   "CycloneDX",
		SpecVersion: "1.6",
		Version:     1,
		Metadata:    metadata{program},
	}
	for _, module := range info.Deps {
		if module.Replace != nil {
			module = module.Replace
		}
		c := newComponent("library", module.Path, module.Version)
		if module.Sum != "" {
			// CycloneDX has no type for this hash: that of go.sum is a hash of the list of the
			// files' hashes.
			c.Properties = []property{{"go:sum", module.Sum}}
		}
		b.Components = append(b.Components, c)
	}
	b.Components = append(b.Components, newComponent("library", "std", strings.TrimPrefix(info.GoVersion, "go")))
	return b
}

func newComponent(kind, module, version string) component {
	purl := "pkg:golang/" + module + "@" + url.QueryEscape(version)
	return component{BOMRef: purl, Type: kind, Name: module, Version: version, PackageURL: purl}
}
