// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestMain runs the manager in place of the tests, if a test asks for it.
func TestMain(m *testing.M) {
	if os.Getenv("RUN_MANAGER") != "" {
		main()
	}
	os.Exit(m.Run())
}

func TestOnlyASignalIsLoggedAsOne(t *testing.T) {
	for range 20 { // the process may end before it logs
		cmd := exec.CommandContext(t.Context(), os.Args[0], "--kubeconfig="+filepath.Join(t.TempDir(), "none"))
		cmd.Env = append(os.Environ(), "RUN_MANAGER=1")
		out, err := cmd.CombinedOutput()
		if err == nil || !strings.Contains(string(out), "--kubeconfig, --master: ") || strings.Contains(string(out), "second signal") {
			t.Fatalf("error %v, and the log\n%s", err, out)
		}
	}
}

func TestHelpSaysWhatTheUserTypes(t *testing.T) {
	for name, tc := range map[string]struct{ program, want string }{
		"the manager":                    {"/manager", "  manager status [flags]\n"},
		"a plugin of kubectl":            {"/usr/local/bin/kubectl-quartermaster", "  kubectl quartermaster status [flags]\n"},
		"a plugin of kubectl on Windows": {"kubectl-quartermaster.exe", "  kubectl quartermaster status [flags]\n"},
	} {
		t.Run(name, func(t *testing.T) {
			var out strings.Builder
			cmd := command(tc.program)
			cmd.SetOut(&out)
			cmd.SetArgs([]string{"status", "--help"})
			if err := cmd.Execute(); err != nil || !strings.Contains(out.String(), tc.want) {
				t.Errorf("error %v, no %q in\n%s", err, tc.want, out.String())
			}
		})
	}
}
