// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path"
	"regexp"
	"runtime/debug"
	"slices"
	"strings"
)

// license is what a module says about its licenses.
type license struct {
	IDs   []string          // of SPDX, sorted
	Texts map[string]string // by file
}

// readLicenses reads the licenses of modules, by path, from their sources.
func readLicenses(ctx context.Context, modules []debug.Module) (map[string]license, error) {
	dirs, err := sources(ctx, modules)
	if err != nil {
		return nil, err
	}
	licenses := map[string]license{}
	var problems []error
	for _, module := range modules {
		// Go's own tree also holds the licenses of what it tests with.
		l, err := readLicense(os.DirFS(dirs[module.Path]), module.Path != std)
		if err != nil {
			problems = append(problems, fmt.Errorf("%s %s: %w", module.Path, module.Version, err))
		}
		licenses[module.Path] = l
	}
	return licenses, errors.Join(problems...)
}

// sources returns the folders of modules, by path. They are downloaded if they are not there.
func sources(ctx context.Context, modules []debug.Module) (map[string]string, error) {
	args := []string{"mod", "download", "-json"}
	for _, module := range modules {
		if module.Path != std {
			args = append(args, module.Path+"@"+module.Version)
		}
	}
	out, err := output(ctx, args...)
	if err != nil {
		return nil, err
	}
	dirs := map[string]string{}
	for decoder := json.NewDecoder(bytes.NewReader(out)); ; {
		var module struct{ Path, Dir string }
		if err := decoder.Decode(&module); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return nil, fmt.Errorf("read what go mod download prints: %w", err)
		}
		dirs[module.Path] = module.Dir
	}
	root, err := output(ctx, "env", "GOROOT")
	dirs[std] = strings.TrimSpace(string(root))
	return dirs, err
}

func output(ctx context.Context, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, "go", args...)
	out, err := cmd.Output()
	if err != nil {
		// go mod download -json reports on stdout why.
		return nil, fmt.Errorf("go %s: %w: %s", strings.Join(args[:2], " "), err, out)
	}
	return out, nil
}

// licenseFile matches names of files. A NOTICE and a PATENTS belong to a license and are none.
var licenseFile = regexp.MustCompile(`^(LICENSE|COPYING|NOTICE|PATENTS)(\.(txt|md|libyaml))?$`)

// readLicense reads the license files at the root and, if deep, of forked code in the module.
func readLicense(module fs.FS, deep bool) (license, error) {
	l := license{Texts: map[string]string{}}
	err := fs.WalkDir(module, ".", func(name string, entry fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case entry.IsDir() && name != "." && (!deep || entry.Name() == "testdata"):
			return fs.SkipDir
		case entry.IsDir() || !licenseFile.MatchString(entry.Name()):
			return nil
		}
		text, err := fs.ReadFile(module, name)
		if err != nil {
			return err
		}
		l.Texts[name] = strings.TrimSpace(string(text)) + "\n"
		if base := path.Base(name); strings.HasPrefix(base, "NOTICE") || strings.HasPrefix(base, "PATENTS") {
			return nil
		}
		ids := identify(string(text))
		if len(ids) == 0 {
			return fmt.Errorf("%s is no license that hack/release knows", name)
		}
		l.IDs = append(l.IDs, ids...)
		return nil
	})
	slices.Sort(l.IDs)
	l.IDs = slices.Compact(l.IDs)
	if err == nil && len(l.IDs) == 0 {
		err = errors.New("has no license")
	}
	return l, err
}

// knownLicenses are the licenses under which we may hand on what we link, by a sentence that only they
// have. A module with another one is for a person to judge.
var knownLicenses = []struct{ id, sentence, excluded string }{
	{id: "Apache-2.0", sentence: `Apache License,? Version 2\.0`},
	{id: "MIT", sentence: `Permission is hereby granted, free of charge, to any person obtaining a copy`},
	{id: "ISC", sentence: `Permission to use, copy, modify, and(/or)? distribute this software for any purpose`},
	{id: "BSD-3-Clause", sentence: `Redistribution and use in source and binary forms.*endorse or promote products`},
	{id: "BSD-2-Clause", sentence: `Redistribution and use in source and binary forms`, excluded: `endorse or promote products`},
}

// identify returns the identifiers of the licenses in a text.
func identify(text string) (ids []string) {
	text = strings.Join(strings.Fields(text), " ")
	for _, k := range knownLicenses {
		if regexp.MustCompile(k.sentence).MatchString(text) &&
			(k.excluded == "" || !regexp.MustCompile(k.excluded).MatchString(text)) {
			ids = append(ids, k.id)
		}
	}
	return ids
}

// licenseTexts returns all texts, each once, below the files that have it.
func licenseTexts(modules []debug.Module, licenses map[string]license) []byte {
	var texts []string
	files := map[string][]string{} // by text
	for _, module := range modules {
		l := licenses[module.Path]
		for _, name := range slices.Sorted(maps.Keys(l.Texts)) {
			text := l.Texts[name]
			if files[text] == nil {
				texts = append(texts, text)
			}
			files[text] = append(files[text], fmt.Sprintf("%s %s: %s", module.Path, module.Version, name))
		}
	}
	var all bytes.Buffer
	fmt.Fprintln(&all, "The licenses of the modules that are linked into the program. Its own is in LICENSE.")
	for _, text := range texts {
		fmt.Fprintf(&all, "\n%s\n%s\n\n%s", strings.Repeat("=", 80), strings.Join(files[text], "\n"), text)
	}
	return all.Bytes()
}
