// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"regexp"
	"strings"
)

// semver has no build metadata, which the tag of an image may not have.
// It has no zero before a number and no empty part: Helm refuses charts with such a suffix.
var semver = regexp.MustCompile(`^v` + number + `\.` + number + `\.` + number + `(-` + part + `(\.` + part + `)*)?$`)

const (
	number = `(0|[1-9]\d*)`
	part   = `(` + number + `|\d*[A-Za-z-][0-9A-Za-z-]*)`
)

// notesOf returns the section of a version in the changelog, whose heading is "## vX.Y.Z - YYYY-MM-DD".
func notesOf(changelog, version string) (string, error) {
	if !semver.MatchString(version) {
		return "", fmt.Errorf("VERSION=%s: must be vX.Y.Z, or vX.Y.Z-SUFFIX before a release", version)
	}
	heading := regexp.MustCompile(`(?m)^## ` + regexp.QuoteMeta(version) + ` - \d{4}-\d\d-\d\d$`)
	at := heading.FindStringIndex(changelog)
	if at == nil {
		return "", fmt.Errorf("CHANGELOG.md has no section \"## %s - YYYY-MM-DD\"", version)
	}
	notes, _, _ := strings.Cut(changelog[at[1]:], "\n## ")
	notes = strings.TrimSpace(notes)
	if notes == "" {
		return "", fmt.Errorf("CHANGELOG.md says nothing about %s", version)
	}
	return strings.Replace(changelog[at[0]:at[1]], "## ", "# Quartermaster ", 1) + "\n\n" + notes + "\n", nil
}
