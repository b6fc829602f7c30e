// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"

	"github.com/quartermaster-dev/quartermaster/hack/cluster/controlplane"
)

// Race reports whether the environment asks for managers with the race detector.
func Race() bool { return os.Getenv("RACE") != "" }

// readInputs calls DependOn for what the programs on a control plane are built from, and what is installed.
var readInputs = sync.OnceFunc(func() {
	Race()
	os.Getenv("KUBE_CACHE_MUTATION_DETECTOR")
	DependOn("cmd", "deploy", "examples", "hack/controlplane", "hack/nodes", "hack/run", "internal", "pkg")
})

// DependOn reads folders of the checkout, and the test's own folder, so that Go's test cache forgets a result
// when a file there changes. Go does not know the files that a started program or TestMain reads: it
// records what the test's own process opens while tests run.
func DependOn(folders ...string) {
	root, err := controlplane.Root()
	if err != nil {
		panic(err) // a test runs in a checkout
	}
	paths := []string{"."}
	for _, folder := range folders {
		paths = append(paths, filepath.Join(root, folder))
	}
	for _, path := range paths {
		// The sizes and times of the files are recorded with their folder.
		err := filepath.WalkDir(path, func(_ string, _ fs.DirEntry, err error) error { return err })
		if err != nil {
			panic(fmt.Errorf("read what the tests depend on: %w", err))
		}
	}
}
