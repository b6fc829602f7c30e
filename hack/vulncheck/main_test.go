// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestRunWithoutADatabase checks that nothing passes silently.
func TestRunWithoutADatabase(t *testing.T) {
	server := httptest.NewServer(nil)
	server.Close()
	for name, test := range map[string]struct {
		database    string
		skipOffline bool
		wantErr     bool
		wantOut     string
	}{
		"one that can't be reached is an error":                           {server.URL, false, true, ""},
		"one that can't be reached is skipped loudly when that is wanted": {server.URL, true, false, "SKIPPED"},
		"a folder that was named must be there":                           {"file://" + t.TempDir(), true, true, ""},
	} {
		t.Run(name, func(t *testing.T) {
			var out strings.Builder
			err := check{Program: "none", Database: test.database, SkipOffline: test.skipOffline, Out: &out}.run(t.Context(), nil)
			if (err != nil) != test.wantErr || !strings.Contains(out.String(), test.wantOut) {
				t.Errorf("error %v, output:\n%s", err, out.String())
			}
		})
	}
}

// TestRunFindsVulnerabilities runs the real govulncheck on this package.
func TestRunFindsVulnerabilities(t *testing.T) {
	program, err := filepath.Abs("../../.cache/tools/govulncheck")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(program); err != nil {
		t.Skip("govulncheck is not built; make verify builds it")
	}
	for name, test := range map[string]struct {
		symbol   string // of net/http
		wantCode int    // 3: found
		wantOut  string
	}{
		"a function that this program calls":      {"NewRequestWithContext", 3, "main.go"},
		"a function that this program never uses": {"ListenAndServeTLS", 0, "2000-01-02 03:04:05"},
	} {
		t.Run(name, func(t *testing.T) {
			var out strings.Builder
			c := check{Program: program, Database: "file://" + database(t, test.symbol), Out: &out}
			err, code := c.run(t.Context(), []string{"."}), 0
			if exit, ok := errors.AsType[*exec.ExitError](err); ok {
				code = exit.ExitCode()
			} else if err != nil {
				t.Fatal(err)
			}
			if code != test.wantCode || !strings.Contains(out.String(), test.wantOut) {
				t.Errorf("error %v, output:\n%s", err, out.String())
			}
		})
	}
}

// database writes a database with a vulnerability in every version of one function of net/http, and
// returns its path.
func database(t *testing.T, symbol string) string {
	t.Helper()
	const modified = "2000-01-02T03:04:05Z"
	dir := t.TempDir()
	for path, text := range map[string]string{
		"index/db.json":      fmt.Sprintf(`{"modified":%q}`, modified),
		"index/modules.json": fmt.Sprintf(`[{"path":"stdlib","vulns":[{"id":"GO-2000-0001","modified":%q}]}]`, modified),
		"index/vulns.json":   fmt.Sprintf(`[{"id":"GO-2000-0001","modified":%q}]`, modified),
		"ID/GO-2000-0001.json": fmt.Sprintf(`{"schema_version":"1.3.1","id":"GO-2000-0001","modified":%q,"details":"made up","affected":[{
			"package":{"name":"stdlib","ecosystem":"Go"},"ranges":[{"type":"SEMVER","events":[{"introduced":"0"}]}],
			"ecosystem_specific":{"imports":[{"path":"net/http","symbols":[%q]}]}}],
			"database_specific":{"url":"https://example.com/GO-2000-0001"}}`, modified, symbol),
	} {
		path = filepath.Join(dir, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}
