// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"debug/buildinfo"
	"encoding/hex"
	"fmt"
	"net/url"
	"os"
	"path"
	"runtime/debug"
	"strings"

	cdx "github.com/CycloneDX/cyclonedx-go"
)

// materials returns the bill of materials of a Go binary, in CycloneDX: the modules that the linker
// put into it, according to the binary itself, each with its license. Whoever hands the binary on has
// to hand on the texts of these licenses too.
func materials(ctx context.Context, binary []byte, version string) (bill, texts []byte, err error) {
	info, err := buildinfo.Read(bytes.NewReader(binary))
	if err != nil {
		return nil, nil, fmt.Errorf("read the modules: %w", err)
	}
	modules := modules(info)
	licenses, err := readLicenses(ctx, modules)
	if err != nil {
		return nil, nil, err
	}
	// Without a time and a serial number, the same binary gives the same bill.
	var text bytes.Buffer
	bom := newBOM(info, modules, licenses, version, sha256.Sum256(binary))
	err = cdx.NewBOMEncoder(&text, cdx.BOMFileFormatJSON).SetPretty(true).EncodeVersion(bom, cdx.SpecVersion1_6)
	return text.Bytes(), licenseTexts(modules, licenses), err
}

// writeMaterials writes them beside a file.
func writeMaterials(ctx context.Context, file, version string) error {
	binary, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	bill, texts, err := materials(ctx, binary, version)
	if err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	if err := os.WriteFile(file+".cdx.json", bill, 0o644); err != nil {
		return err
	}
	return os.WriteFile(file+".licenses.txt", texts, 0o644)
}

// modules returns what is in the binary besides the program: the modules, sorted by path as in the
// binary, and then Go's standard library as std, with the version of Go.
func modules(info *debug.BuildInfo) []debug.Module {
	var modules []debug.Module
	for _, module := range info.Deps {
		if module.Replace != nil {
			module = module.Replace
		}
		modules = append(modules, *module)
	}
	return append(modules, debug.Module{Path: std, Version: strings.TrimPrefix(info.GoVersion, "go")})
}

const std = "std"

func newBOM(info *debug.BuildInfo, modules []debug.Module, licenses map[string]license, version string,
	sum [sha256.Size]byte) *cdx.BOM {
	program := newComponent(cdx.ComponentTypeApplication, info.Main.Path, version, "Apache-2.0")
	program.Name = path.Base(info.Path)
	program.Hashes = &[]cdx.Hash{{Algorithm: cdx.HashAlgoSHA256, Value: hex.EncodeToString(sum[:])}}
	var settings []cdx.Property
	for _, s := range info.Settings {
		if s.Key == "GOOS" || s.Key == "GOARCH" || s.Key == "CGO_ENABLED" {
			settings = append(settings, cdx.Property{Name: "go:" + s.Key, Value: s.Value})
		}
	}
	program.Properties = &settings
	var parts []cdx.Component
	for _, module := range modules {
		c := newComponent(cdx.ComponentTypeLibrary, module.Path, module.Version, licenses[module.Path].IDs...)
		if module.Sum != "" {
			// CycloneDX has no type for go.sum's hash, which is a hash of the list of the files' hashes.
			c.Properties = &[]cdx.Property{{Name: "go:sum", Value: module.Sum}}
		}
		parts = append(parts, c)
	}
	bom := cdx.NewBOM()
	bom.Metadata, bom.Components = &cdx.Metadata{Component: &program}, &parts
	return bom
}

func newComponent(kind cdx.ComponentType, module, version string, licenses ...string) cdx.Component {
	purl := "pkg:golang/" + module + "@" + url.QueryEscape(version)
	var choices cdx.Licenses
	for _, id := range licenses {
		choices = append(choices, cdx.LicenseChoice{License: &cdx.License{ID: id}})
	}
	return cdx.Component{BOMRef: purl, Type: kind, Name: module, Version: version, PackageURL: purl, Licenses: &choices}
}
