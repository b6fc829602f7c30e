// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package docs runs the commands of the documentation.
package docs

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/hack/cluster/controlplane"
	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
	"github.com/quartermaster-dev/quartermaster/test/internal/pages"
)

// TestLongDocsCommands runs the commands of each page from top to bottom, in one
// shell, as its reader would. They find what make run starts, with all controllers, and the
// namespaces team-a and team-b, the first with what other operators have left there.
// test/internal/pages holds that every command is run or says why not.
func TestLongDocsCommands(t *testing.T) {
	fleet.Require(t)
	root, err := controlplane.Root()
	assert.NoError(t, err)
	all, err := pages.ReadAll(root)
	assert.NoError(t, err)
	f, err := fleet.Start(context.Background(), fleet.Options{
		Cluster:    cluster.Options{Nodes: 2},
		Components: []string{"replication", "ttl-chosen-types", "scale-schedule", "compat-reloader"},
	})
	assert.NoError(t, err)
	t.Cleanup(func() {
		if err := f.Stop(); err != nil {
			t.Error(err)
		}
	})
	ctx := fleet.Context(t)
	assert.NoError(t, f.ApplyDir(ctx, filepath.Join(root, "hack", "run", "sample.yaml")))
	for _, ns := range []string{"team-a", "team-b"} {
		if _, err := f.Kubectl(ctx, "create", "namespace", ns); err != nil {
			t.Fatal(err)
		}
	}
	assert.NoError(t, f.ApplyDir(ctx, "testdata/originals.yaml"))
	f.RunLeader(ctx, t, "--replication-push-namespaces=platform") // which a page lets push
	f.RunStandby(ctx, t, "--replication-push-namespaces=platform")
	reader := newReader(t, root, f.Cluster.Binary("kubectl"), f.Binary)
	if err := f.WriteKubeconfig(reader.kubeconfig); err != nil { // a page may change it
		t.Fatal(err)
	}
	for _, page := range all {
		text, err := os.ReadFile(filepath.Join(root, page.Path))
		assert.NoError(t, err)
		script := ""
		if strings.Contains(string(text), "first run `NS=kube-system`") { // others have a block
			script = "NS=kube-system\n"
		}
		for _, b := range page.Blocks {
			if b.Run {
				script += b.Script
			}
		}
		if script != "" {
			t.Run(page.Path, func(t *testing.T) { reader.run(fleet.Context(t), t, script) })
		}
	}
}

// reader is a folder in which commands find deploy/, and on their path kubectl and the manager.
type reader struct {
	dir        string
	kubeconfig string
	env        []string
}

func newReader(t *testing.T, root, kubectl, manager string) *reader {
	t.Helper()
	r := &reader{dir: t.TempDir()}
	r.kubeconfig = filepath.Join(r.dir, "kubeconfig-of-the-reader")
	bin := filepath.Join(r.dir, ".local", "bin") // below its home
	for _, err := range []error{
		os.MkdirAll(bin, 0o700),
		os.Symlink(kubectl, filepath.Join(bin, "kubectl")),
		os.Symlink(manager, filepath.Join(bin, "manager")),
		os.Symlink(filepath.Join(root, "deploy"), filepath.Join(r.dir, "deploy")),
	} {
		assert.NoError(t, err)
	}
	r.env = append(os.Environ(), "PATH="+bin+":"+os.Getenv("PATH"), "KUBECONFIG="+r.kubeconfig, "HOME="+r.dir)
	return r
}

func (r *reader) run(ctx context.Context, t *testing.T, script string) {
	t.Helper()
	cmd := exec.CommandContext(ctx, "bash", "-euxo", "pipefail", "-c", script)
	cmd.Dir, cmd.Env = r.dir, r.env
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Errorf("%v:\n%s", err, out)
	}
}
