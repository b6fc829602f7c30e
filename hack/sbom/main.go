// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Command sbom writes the software bill of materials of Go binaries, BINARY.cdx.json: the modules that
// the linker put into it, according to the binary itself, each with its license. The texts of these
// licenses, which whoever hands the binary on has to hand on too, are in BINARY.licenses.txt.
package main

import (
	"bytes"
	"context"
	"debug/buildinfo"
	"flag"
	"fmt"
	"net/url"
	"os"
	"os/signal"
	"path"
	"runtime/debug"
	"strings"

	"github.com/quartermaster-dev/quartermaster/hack/internal/cyclonedx"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	version := flag.String("version", "", "version of the program; the binary's own if empty")
	flag.Parse()
	if flag.NArg() == 0 {
		fmt.Fprintln(os.Stderr, "usage: sbom [--version=vX.Y.Z] BINARY...")
		os.Exit(1)
	}
	for _, binary := range flag.Args() {
		if err := run(ctx, binary, *version); err != nil {
			fmt.Fprintln(os.Stderr, "Error:", err)
			os.Exit(1)
		}
	}
}

func run(ctx context.Context, file, version string) error {
	binary, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	info, err := buildinfo.Read(bytes.NewReader(binary))
	if err != nil {
		return fmt.Errorf("read the modules of %s: %w", file, err)
	}
	modules := modules(info)
	licenses, err := licensesOf(ctx, modules)
	if err != nil {
		return err
	}
	if err := newBOM(info, modules, licenses, version, cyclonedx.SHA256(binary)).Write(file + ".cdx.json"); err != nil {
		return err
	}
	return os.WriteFile(file+".licenses.txt", licenseTexts(modules, licenses), 0o644)
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
	hashes []cyclonedx.Hash) cyclonedx.BOM {
	if version == "" {
		version = info.Main.Version
	}
	program := newComponent("application", info.Main.Path, version)
	program.Name = path.Base(info.Path)
	program.Hashes = hashes
	program.Licenses = cyclonedx.Licenses("Apache-2.0")
	for _, s := range info.Settings {
		if s.Key == "GOOS" || s.Key == "GOARCH" || s.Key == "CGO_ENABLED" {
			program.Properties = append(program.Properties, cyclonedx.Property{Name: "go:" + s.Key, Value: s.Value})
		}
	}
	var parts []cyclonedx.Component
	for _, module := range modules {
		c := newComponent("library", module.Path, module.Version)
		c.Licenses = cyclonedx.Licenses(licenses[module.Path].IDs...)
		if module.Sum != "" {
			// CycloneDX has no type for this hash: that of go.sum is a hash of the list of the
			// files' hashes.
			c.Properties = []cyclonedx.Property{{Name: "go:sum", Value: module.Sum}}
		}
		parts = append(parts, c)
	}
	return cyclonedx.New(program, parts)
}

func newComponent(kind, module, version string) cyclonedx.Component {
	purl := "pkg:golang/" + module + "@" + url.QueryEscape(version)
	return cyclonedx.Component{BOMRef: purl, Type: kind, Name: module, Version: version, PackageURL: purl}
}
