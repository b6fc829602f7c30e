// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"regexp"
	"strings"

	"golang.org/x/mod/semver"
)

// releaseNotes returns the section of a version in the changelog, whose heading is "## vX.Y.Z - YYYY-MM-DD".
func releaseNotes(changelog, version string) (string, error) {
	// The tag of an image may not have build metadata, which the canonical form lacks.
	if !semver.IsValid(version) || semver.Canonical(version) != version {
		return "", fmt.Errorf("VERSION=%s: must be vX.Y.Z, or vX.Y.Z-SUFFIX before a release", version)
	}
	heading := regexp.MustCompile(`(?m)^## ` + regexp.QuoteMeta(version) + ` - \d{4}-\d\d-\d\d$`)
	span := heading.FindStringIndex(changelog)
	if span == nil {
		return "", fmt.Errorf("CHANGELOG.md has no section \"## %s - YYYY-MM-DD\"", version)
	}
	notes, _, _ := strings.Cut(changelog[span[1]:], "\n## ")
	notes = strings.TrimSpace(notes)
	if notes == "" {
		return "", fmt.Errorf("CHANGELOG.md says nothing about %s", version)
	}
	return strings.Replace(changelog[span[0]:span[1]], "## ", "# Quartermaster ", 1) + "\n\n" + notes + "\n", nil
}
