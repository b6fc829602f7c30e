// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package manager

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// configFile writes a ManagerConfiguration with the flags.
func configFile(t *testing.T, flags string) string {
	t.Helper()
	text := "apiVersion: quartermaster.dev/v1alpha1\nkind: ManagerConfiguration\nflags: " + flags
	return writeFile(t, []byte(text))
}

func writeFile(t *testing.T, text []byte) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "config.yaml")
	assert.NoError(t, os.WriteFile(path, text, 0o600))
	return path
}

// waitForBody waits until a path of the manager's secure port returns a body with all of the texts.
func waitForBody(ctx context.Context, t *testing.T, m *cluster.Manager, token, path string, texts ...string) {
	t.Helper()
	fleet.Eventually(ctx, t, func() error {
		code, body, err := fleet.Get(m.SecureURL+path, token)
		if err != nil {
			return err
		}
		for _, text := range texts {
			if code != 200 || !strings.Contains(body, text) {
				return fmt.Errorf("%s returned %d, without %q", path, code, text)
			}
		}
		return nil
	})
}

func TestConfigurationFileIsInForceAndShown(t *testing.T) {
	ctx := fleet.Context(t)
	token := shared.NewToken(ctx, t, "config-reader", "cluster-admin")
	args := []string{"--config=" + configFile(t, "{v: 2, config-reload-quiet-period: 100ms, controllers: [config-reload, -nothing]}"), "--controllers=config-reload"}
	// The arguments of the Deployment are left out, since they would take precedence over the file.
	m, err := shared.StartBare(shared.NewReplica(ctx, t), cluster.ManagerOptions{Binary: shared.Binary, Args: args})
	assert.NoError(t, err)
	fleet.StopAtEnd(t, m)
	shared.WaitForLeader(ctx, t, m)
	s := shared.NewSample(ctx, t)
	s.WaitUntilKnown(ctx, t, "web")
	s.Paint(ctx, t, "red")
	s.WaitForReplicaSets(ctx, t, "web", 2)
	if _, err := m.WaitForLine(ctx, `"Handled a reload"`); err != nil { // level 2 logs every write
		t.Fatal(err)
	}

	_, body, err := fleet.Get(m.SecureURL+"/configz", token)
	assert.NoError(t, err)
	var shown map[string]json.RawMessage
	if err := json.Unmarshal([]byte(body), &shown); err != nil {
		t.Fatalf("%v: %s", err, body)
	}
	config := shown["quartermaster.dev"]
	var flags struct{ Flags map[string]any }
	assert.NoError(t, json.Unmarshal(config, &flags))
	for flag, want := range map[string]any{"v": 2.0, "config-reload-quiet-period": "100ms", "controllers": []any{"config-reload"}, "shutdown-timeout": "20s"} {
		assert.Equal(t, "/configz, "+flag, want, flags.Flags[flag])
	}

	// The output of /configz and of --print-effective-config are files with the same result.
	printed := printConfig(ctx, t, writeFile(t, config))
	if reprinted := printConfig(ctx, t, writeFile(t, printed)); string(reprinted) != string(printed) {
		t.Errorf("what is printed is read as something else:\n%s", cmp.Diff(string(printed), string(reprinted)))
	}
}

// printConfig returns what --print-effective-config prints for a file.
func printConfig(ctx context.Context, t *testing.T, path string) []byte {
	t.Helper()
	cmd := exec.CommandContext(ctx, shared.Binary, "--config="+path, "--print-effective-config")
	var problems strings.Builder
	cmd.Stderr = &problems
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v: %s", err, problems.String())
	}
	return out
}

func TestBrokenConfigurationFileStopsTheStart(t *testing.T) {
	ctx := fleet.Context(t)
	path := configFile(t, "\n  v: many\n  dryrun: true\n")
	out, err := exec.CommandContext(ctx, shared.Binary, "--config="+path).CombinedOutput()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() != 1 {
		t.Errorf("it ended with %v", err)
	}
	want := "Error: " + path + `:4: v: strconv.ParseUint: parsing "many": invalid syntax` + "\n" +
		path + `:5: dryrun: not a flag that the file can set` + "\n"
	assert.Equal(t, "printed", want, string(out))
}
