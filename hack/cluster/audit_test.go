// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"os"
	"path/filepath"
	"testing"
)

func TestAuditTailReadsWholeLinesThatAreAdded(t *testing.T) {
	const line = `{"verb":"get"}` + "\n"
	for name, tc := range map[string]struct {
		before, after string
		want          int
	}{
		"the log is empty at first":      {"", line + line, 2},
		"the log ends with a whole line": {line, line, 1},
		"the last line is being written": {line + line[:5], line[5:] + line, 1},
		"it is still being written":      {line + line[:5], line[5:9], 0},
		"the next line is being written": {line, line + line[:5], 1},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "audit.log")
			if err := os.WriteFile(path, []byte(tc.before), 0o600); err != nil {
				t.Fatal(err)
			}
			tail := &AuditTail{path, int64(len(tc.before))}
			if err := os.WriteFile(path, []byte(tc.before+tc.after), 0o600); err != nil {
				t.Fatal(err)
			}
			for _, want := range []int{tc.want, 0} {
				if got, err := tail.Read(); err != nil || len(got) != want {
					t.Errorf("%d events, %v, want %d", len(got), err, want)
				}
			}
		})
	}
}
