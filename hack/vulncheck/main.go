// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Command vulncheck checks that the vulnerability database is reachable and then runs govulncheck,
// so that a machine without access finds out in seconds. `make vulncheck` and `make verify` run it.
package main

import (
	"compress/gzip"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"time"
)

// probeTimeout is how long the database may take to return the time of its last change.
const probeTimeout = 5 * time.Second

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	c := check{Out: os.Stdout}
	flag.StringVar(&c.Program, "govulncheck", "govulncheck", "path of govulncheck")
	flag.StringVar(&c.Database, "db", "https://vuln.go.dev", "URL of the database: https, http or file")
	flag.BoolVar(&c.SkipOffline, "skip-offline", false, "when a database of the network can't be reached, warn instead of failing")
	flag.Parse()
	if err := c.run(ctx, flag.Args()); err != nil {
		fmt.Fprintln(os.Stderr, "Error:", err)
		os.Exit(1)
	}
}

type check struct {
	Program     string // govulncheck
	Database    string // URL
	SkipOffline bool
	Out         io.Writer
}

// run returns an error if govulncheck finds a vulnerability that the packages can reach, or cannot
// check for vulnerabilities.
func (c check) run(ctx context.Context, packages []string) error {
	modified, err := c.modified(ctx)
	if err != nil {
		if !c.SkipOffline || strings.HasPrefix(c.Database, "file://") {
			return fmt.Errorf("vulnerability database %s: %w", c.Database, err)
		}
		fmt.Fprintf(c.Out, "WARNING: govulncheck was SKIPPED, so known vulnerabilities were not checked.\n"+
			"WARNING: The database %s can't be read: %v\n"+
			"WARNING: Run `make vulncheck` where it can be, or with VULNDB=file:///path of a copy.\n", c.Database, err)
		return nil
	}
	fmt.Fprintf(c.Out, "govulncheck with %s of %s\n", c.Database, modified.Format(time.DateTime))
	cmd := exec.CommandContext(ctx, c.Program, append([]string{"-db=" + c.Database}, packages...)...)
	cmd.Stdout, cmd.Stderr = c.Out, c.Out
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("govulncheck: %w", err)
	}
	return nil
}

// modified returns the time of the database's last change. The layout is that of
// https://go.dev/doc/security/vuln/database.
func (c check) modified(ctx context.Context) (time.Time, error) {
	text, err := c.index(ctx)
	if err != nil {
		return time.Time{}, err
	}
	var db struct{ Modified time.Time }
	if err := json.Unmarshal(text, &db); err != nil {
		return time.Time{}, fmt.Errorf("read index/db.json: %w", err)
	}
	if db.Modified.IsZero() {
		return time.Time{}, fmt.Errorf("read index/db.json: no time of modification")
	}
	return db.Modified, nil
}

func (c check) index(ctx context.Context) ([]byte, error) {
	if dir, ok := strings.CutPrefix(c.Database, "file://"); ok {
		return os.ReadFile(filepath.Join(dir, "index", "db.json"))
	}
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, c.Database+"/index/db.json.gz", nil)
	if err != nil {
		return nil, err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("GET %s: %s", request.URL, response.Status)
	}
	body, err := gzip.NewReader(response.Body)
	if err != nil {
		return nil, err
	}
	return io.ReadAll(body)
}
