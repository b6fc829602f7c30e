// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package manager

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// configFile writes a ManagerConfiguration with the given groups, replacing the file as a whole, as a mounted
// ConfigMap's is.
func configFile(t *testing.T, path, groups string) {
	t.Helper()
	text := "apiVersion: quartermaster.dev/v1alpha1\nkind: ManagerConfiguration\n" + groups
	if err := os.WriteFile(path+".new", []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		t.Fatal(err)
	}
}

// shows waits until a path of the manager's secure port answers with all of the texts in its body.
func shows(ctx context.Context, t *testing.T, m *cluster.Manager, token, path string, texts ...string) {
	t.Helper()
	fleet.Eventually(ctx, t, func() error {
		code, body, err := fleet.Get(m.SecureURL+path, token)
		if err != nil {
			return err
		}
		for _, text := range texts {
			if code != 200 || !strings.Contains(body, text) {
				return fmt.Errorf("%s answers %d, without %q", path, code, text)
			}
		}
		return nil
	})
}

func TestConfigurationFileIsFollowedWithoutARestart(t *testing.T) {
	ctx := fleet.Context(t)
	token := newToken(ctx, t, "config-reader", "cluster-admin")
	path := filepath.Join(t.TempDir(), "config.yaml")
	configFile(t, path, "logs: {v: 1}\nconfigReloadController: {configReloadQuietPeriod: 100ms}\n")
	// Without the arguments of the Deployment, which would win over the file.
	m, err := shared.Cluster.StartManager(shared.NewReplica(ctx, t), cluster.ManagerOptions{Binary: shared.Binary, Args: []string{"--config=" + path}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("log of %s:\n%s", m.Pod, m.Tail(60))
		}
		_ = m.Stop(context.Background(), fleet.Patience)
	})
	shared.WaitForLeader(ctx, t, m)
	s := newShop(ctx, t)
	s.waitUntilKnown(ctx, t, "web")
	shows(ctx, t, m, token, "/configz", `"v":1`, `"configReloadQuietPeriod":"100ms"`)
	shows(ctx, t, m, token, "/metrics", "quartermaster_config_restart_required 0", "quartermaster_config_last_reload_successful 1")

	// The log level, at once: level 2 logs every write.
	configFile(t, path, "logs: {v: 2}\nconfigReloadController: {configReloadQuietPeriod: 100ms}\n")
	if _, err := m.WaitForLine(ctx, `"Changed a setting" file="`+path+`" setting="logs.v" from=1 to=2`); err != nil {
		t.Fatal(err)
	}
	shows(ctx, t, m, token, "/configz", `"v":2`)
	s.paint(ctx, t, "red")
	s.waitForReplicaSets(ctx, t, "web", 2)
	if _, err := m.WaitForLine(ctx, `"Reload"`); err != nil {
		t.Fatal(err)
	}

	// What needs a restart, and what is broken.
	configFile(t, path, "logs: {v: 2}\nconfigReloadController: {configReloadQuietPeriod: 5s}\n")
	shows(ctx, t, m, token, "/metrics", "quartermaster_config_restart_required 1", "quartermaster_config_last_reload_successful 1")
	shows(ctx, t, m, token, "/configz", `"configReloadQuietPeriod":"100ms"`)
	configFile(t, path, "logs: {v: 3}\nnothing: {}\n")
	shows(ctx, t, m, token, "/metrics", "quartermaster_config_restart_required 1", "quartermaster_config_last_reload_successful 0")
	if _, err := m.WaitForLine(ctx, path+":4: nothing: is not known"); err != nil {
		t.Fatal(err)
	}
	shows(ctx, t, m, token, "/configz", `"v":2`)
	if m.ExitCode() != -1 || shared.HolderPod(ctx, t) != m.Pod {
		t.Errorf("the manager was restarted or lost the lease: exit code %d", m.ExitCode())
	}
}

func TestBrokenConfigurationFileStopsTheStart(t *testing.T) {
	ctx := fleet.Context(t)
	path := filepath.Join(t.TempDir(), "config.yaml")
	configFile(t, path, "logs: {v: many}\n")
	out, err := exec.CommandContext(ctx, shared.Binary, "--config="+path).CombinedOutput()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() != 1 {
		t.Errorf("it ended with %v", err)
	}
	if want := "Error: " + path + `:3: logs.v: must be a whole number, got the string "many"`; strings.TrimSpace(string(out)) != want {
		t.Errorf("it said:\n%s\nwant:\n%s", out, want)
	}
}
