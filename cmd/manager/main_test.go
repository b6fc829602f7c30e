// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"
)

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
