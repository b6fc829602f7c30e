// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/hack/cluster/controlplane"
	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
	"github.com/quartermaster-dev/quartermaster/test/internal/pages"
)

// readerWithoutCluster also returns the pages.
func readerWithoutCluster(t *testing.T) (*reader, []*pages.Page) {
	t.Helper()
	fleet.Require(t)
	root, err := controlplane.Root()
	assert.NoError(t, err)
	all, err := pages.ReadAll(root)
	assert.NoError(t, err)
	programs, err := controlplane.Ensure(t.Context(), os.Stderr)
	assert.NoError(t, err)
	manager, err := cluster.BuildManager(t.Context(), false)
	assert.NoError(t, err)
	return newReader(t, root, filepath.Join(programs, "kubectl"), manager), all
}

// TestDocsNameCommandsThatExist asks kubectl and the manager for the help of each command that is in
// the text and not in a block. They refuse flags, and kubectl commands, that do not exist. For an unknown
// command the manager prints its own help, so the help must be the command's.
func TestDocsNameCommandsThatExist(t *testing.T) {
	reader, all := readerWithoutCluster(t)
	script, count := "set +x\nbad=0\nNS=kube-system\n", 0 // pages set NS in a block
	for _, p := range all {
		for _, m := range p.Text {
			if m.Words[0] != "kubectl" && m.Words[0] != "manager" {
				continue
			}
			count++
			command := strings.Join(m.Words, " ")
			if strings.ContainsAny(command, "|<>") {
				t.Errorf("%s:%d: give it a block, and write NAME for what the reader fills in: %s", p.Path, m.Line, command)
				continue
			}
			usage := ""
			if m.Words[0] == "manager" && len(m.Words) > 1 && !strings.HasPrefix(m.Words[1], "-") {
				usage = "manager " + m.Words[1]
			}
			script += fmt.Sprintf("%s --help >help && grep -q '^  %s' help || { bad=1; echo '%s:%d'; }\n", command, usage, p.Path, m.Line)
		}
	}
	if count < 20 {
		t.Errorf("%d commands: these are not all", count)
	}
	reader.run(fleet.Context(t), t, script+"exit $bad\n")
}

// TestDocsOverlaysCanBeBuilt builds each kustomization of a page with the deploy/ of this
// commit.
func TestDocsOverlaysCanBeBuilt(t *testing.T) {
	reader, all := readerWithoutCluster(t)
	localPaths := strings.NewReplacer(
		"https://github.com/quartermaster-dev/quartermaster//", "../", "?ref=v0.1.0", "", // as from elsewhere
		"<path>/", "../")
	overlay := filepath.Join(reader.dir, "overlay")
	assert.NoError(t, os.Mkdir(overlay, 0o700))
	// What own-controllers.md has the reader copy from what a build prints.
	reader.run(fleet.Context(t), t, "cp deploy/../examples/greeter/rbac.yaml overlay/greeter.yaml")
	built := 0
	for _, p := range all {
		for _, b := range p.YAML {
			if !strings.Contains(b.Script, "\nkind: Kustomization\n") {
				continue
			}
			built++
			assert.NoError(t, os.WriteFile(filepath.Join(overlay, "kustomization.yaml"), []byte(localPaths.Replace(b.Script)), 0o600))
			t.Run(p.Path, func(t *testing.T) { reader.run(fleet.Context(t), t, "kubectl kustomize overlay >/dev/null") })
		}
	}
	if built < 3 {
		t.Errorf("%d overlays: these are not all", built)
	}
}
