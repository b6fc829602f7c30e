// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
)

func TestControllersAreListedAsTheRegistryHasThem(t *testing.T) {
	for name, tc := range map[string]struct {
		args []string
		want string
	}{
		"by default":                      {nil, "extra off off x,y does more"},
		"as the flags have it":            {[]string{"--controllers=extra"}, "extra off on x,y does more"},
		"as the flags have it by alias":   {[]string{"--controllers=*,y"}, "extra off on x,y does more"},
		"those of the registry among all": {[]string{"--controllers=extra"}, "config-reload on off rolls workloads"},
	} {
		t.Run(name, func(t *testing.T) {
			var out strings.Builder
			cmd := NewCommand(With(withFunctions(controllers.Entry{Name: "extra", Aliases: []string{"x", "y"}, Summary: "does more", OffByDefault: true})))
			cmd.SetOut(&out)
			cmd.SetArgs(append([]string{"controllers"}, tc.args...))
			if err := cmd.Execute(); err != nil {
				t.Fatal(err)
			}
			if words := strings.Join(strings.Fields(out.String()), " "); !strings.Contains(words, tc.want) {
				t.Errorf("no %q in\n%s", tc.want, out.String())
			}
		})
	}
}

// TestAControllerImportsNoSibling holds for packages of controllers what the linter cannot say of every
// one: of ours, they import what all share, and their own.
func TestAControllerImportsNoSibling(t *testing.T) {
	const module, shared = "github.com/quartermaster-dev/quartermaster/", "github.com/quartermaster-dev/quartermaster/pkg/controllers"
	root, seen := filepath.Join("..", "controllers"), map[string]bool{}
	err := filepath.WalkDir(root, func(path string, _ fs.DirEntry, err error) error {
		if err != nil || filepath.Ext(path) != ".go" {
			return err
		}
		below, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		controller, _, isPackage := strings.Cut(filepath.ToSlash(below), "/")
		if !isPackage || slices.Contains([]string{"controllertest", "internal"}, controller) {
			return nil
		}
		seen[controller] = true
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.ImportsOnly)
		if err != nil {
			return err
		}
		for _, i := range file.Imports {
			imported := strings.Trim(i.Path.Value, `"`)
			switch own := shared + "/" + controller; {
			case !strings.HasPrefix(imported, module), imported == shared, imported == module+"pkg/informers":
			case imported == own, strings.HasPrefix(imported, own+"/"), strings.HasPrefix(imported, shared+"/internal/"):
			case imported == shared+"/controllertest" && strings.HasSuffix(path, "_test.go"):
			default:
				t.Errorf("%s imports %s", path, imported)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range registry() {
		if !seen[strings.ReplaceAll(e.Name, "-", "")] {
			t.Errorf("the test has not seen the package of %s", e.Name)
		}
	}
}
