// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"go/parser"
	"go/token"
	"io/fs"
	"path"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

const module = "github.com/quartermaster-dev/quartermaster/"

// TestImportsPointOneWay checks the rule of ARCHITECTURE.md: cmd -> app -> {controllers/*,
// election/*, informers, healthz}, controllers/* -> controllers, election -> election/* -> election/apifence ->
// election/protocol, app/status -> {controllers, election/*}, and no other import between our packages. The
// test kit controllers/controllertest runs the whole manager.
func TestImportsPointOneWay(t *testing.T) {
	allowed := func(from, to string) bool {
		switch {
		case from == to:
			return true
		case strings.HasPrefix(from, "cmd/"):
			return to == "pkg/app"
		case from == "pkg/app":
			return strings.HasPrefix(to, "pkg/")
		case from == "pkg/election":
			return strings.HasPrefix(to, "pkg/election/")
		case from == "pkg/election/witness", from == "pkg/election/apifence":
			return to == "pkg/election/protocol"
		case from == "pkg/election/debug":
			return to == "pkg/election/apifence" || to == "pkg/election/protocol"
		case from == "pkg/app/status":
			return to == "pkg/controllers" || strings.HasPrefix(to, "pkg/election/")
		case strings.HasPrefix(from, "pkg/controllers/controllertest"):
			return strings.HasPrefix(to, "pkg/") || to == "examples/greeter" // its tests run that
		case strings.HasPrefix(from, "pkg/controllers/"):
			return to == "pkg/controllers" || strings.HasPrefix(to, "pkg/controllers/internal/") || strings.HasPrefix(to, from+"/")
		}
		return false
	}
	root := filepath.Join("..", "..")
	checked := 0
	for _, tree := range []string{"cmd", "pkg"} {
		err := filepath.WalkDir(filepath.Join(root, tree), func(file string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() || !strings.HasSuffix(file, ".go") {
				return err
			}
			parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.ImportsOnly)
			if err != nil {
				return err
			}
			rel, err := filepath.Rel(root, file)
			if err != nil {
				return err
			}
			from := path.Dir(filepath.ToSlash(rel))
			for _, spec := range parsed.Imports {
				imported, err := strconv.Unquote(spec.Path.Value)
				if err != nil {
					return err
				}
				to, ours := strings.CutPrefix(imported, module)
				if !ours {
					continue
				}
				checked++
				if !allowed(from, to) {
					t.Errorf("%s imports %s", rel, to)
				}
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if checked == 0 {
		t.Error("no import of ours was seen: the test looks in the wrong place")
	}
}
