// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"regexp"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
)

// processName matches the names of lives, POD-LIFE. Other programs of the tests have names with the
// same prefix.
var processName = regexp.MustCompile(`^quartermaster-\d+-\d+$`)

// IsReplica reports whether a process of this name was started by StartLife.
func IsReplica(process string) bool { return processName.MatchString(process) }

// StartLife starts a manager as one life of a Pod, numbered from 1. The user agent of the program's
// requests begins with the program's name, so each life gets another name: this is how the audit log
// distinguishes the processes of one Pod.
func (f *Fleet) StartLife(r *cluster.Replica, life int, o cluster.ManagerOptions) (*cluster.Manager, error) {
	name := filepath.Join(f.Dir(), ProcessName(r.Pod, life))
	if err := os.Symlink(cmp.Or(o.Binary, f.Binary), name); err != nil {
		return nil, err
	}
	o.Binary = name
	return f.StartManager(r, o)
}

// ProcessName returns the name of a life.
func ProcessName(pod string, life int) string { return fmt.Sprintf("%s-%d", pod, life) }
