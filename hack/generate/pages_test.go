// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const deploy = "../../deploy"

func TestPagesAreUpToDate(t *testing.T) {
	for name, generate := range map[string]func(string) (map[string][]byte, error){
		"commands": commandsPage, "flags": flagsPage, "metrics": metricsPage,
	} {
		t.Run(name, func(t *testing.T) {
			pages, err := generate(deploy)
			if err != nil || len(pages) != 1 {
				t.Fatalf("%d pages, %v", len(pages), err)
			}
			for path, want := range pages {
				have, err := os.ReadFile(filepath.Join(deploy, path))
				if err != nil {
					t.Fatal(err)
				}
				if diff := cmp.Diff(string(want), string(have)); diff != "" {
					t.Errorf("%s is not up to date; run make generate (-want +have):\n%s", path, diff)
				}
			}
		})
	}
}

func TestFlagsPageHasEachFlag(t *testing.T) {
	help, err := os.ReadFile(filepath.Join(deploy, "..", "pkg", "app", "testdata", "help.golden"))
	if err != nil {
		t.Fatal(err)
	}
	pages, err := flagsPage(deploy)
	if err != nil {
		t.Fatal(err)
	}
	flags := regexp.MustCompile(`(?m)^(?: {6}|  -\w, )(--[a-z-]+)`).FindAllStringSubmatch(string(help), -1)
	if len(flags) < 100 {
		t.Errorf("%d flags: these are not all", len(flags))
	}
	for _, flag := range flags {
		if !strings.Contains(string(pages["../docs/operate/flags.md"]), flag[1]+"` |") {
			t.Errorf("the page lacks %s", flag[1])
		}
	}
}
