// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package replication

import (
	"bytes"
	"crypto/rand"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// TestHeapHasNoValueAfterItsWrite searches the heap and the log of a manager that has copied, merged,
// repaired and replaced Secrets for their values.
func TestHeapHasNoValueAfterItsWrite(t *testing.T) {
	f := newFixture(t, "a", "b")
	binary, err := cluster.BuildProgram(f.ctx, "test/replication/dumping", false)
	assert.NoError(t, err)
	path := filepath.Join(t.TempDir(), "heap")
	m := shared.Run(t, shared.NewReplica(f.ctx, t), cluster.ManagerOptions{Binary: binary, Args: args("-v=6"), Env: []string{"HEAP_DUMP=" + path}})
	shared.WaitForLeader(f.ctx, t, m)

	var planted []string
	plant := func() string {
		var value strings.Builder
		for value.Len() < 48<<10 {
			value.WriteString(rand.Text())
		}
		planted = append(planted, value.String())
		return value.String()
	}
	for i := range 10 {
		name := fmt.Sprintf("planted-%d", i)
		permitted := f.annotated("Q:push-to={b}", "M:replication-allowed=true", "M:replication-allowed-namespaces={b}")
		first, own := plant(), plant()
		f.secret("a/"+name, "k="+first, permitted)
		f.secret("b/pull-"+name, "own="+own, f.annotated("M:replicate-from={a}/"+name))
		f.waitForContent("b/"+name+": k="+first, "b/pull-"+name+": k="+first+" own="+own)
		f.edit("b/"+name, holding("k="+plant())) // drift
		f.waitForContent("b/" + name + ": k=" + first)
		f.edit("b/"+name, func(s *corev1.Secret) { s.Immutable = new(true) })
		second := plant()
		f.edit("a/"+name, holding("k="+second))
		f.waitForContent("b/"+name+": k="+second, "b/pull-"+name+": k="+second+" own="+own)
	}
	// What follows takes the buffers of the connection.
	for i := range 20 {
		name := fmt.Sprintf("plough-%d", i)
		f.secret("a/"+name, "k="+strings.Repeat("x", 64<<10), f.annotated("Q:push-to={b}"))
		fleet.Eventually(f.ctx, t, func() error {
			if f.get("b/"+name) == nil {
				return fmt.Errorf("no copy of %s", name)
			}
			return nil
		})
	}
	f.settle()

	assert.NoError(t, m.Signal(syscall.SIGUSR1))
	var dump []byte
	fleet.Eventually(f.ctx, t, func() (err error) {
		dump, err = os.ReadFile(path)
		return err
	})
	if !bytes.Contains(dump, []byte("pull-planted-9")) {
		t.Fatal("the dump does not even hold the names: the search proves nothing")
	}
	log, err := os.ReadFile(m.Log)
	assert.NoError(t, err)
	for i, value := range planted {
		// Go does not clear memory that it allocates for bytes, so parts of values may be in what is alive.
		// What holds a value holds it as a whole.
		if bytes.Contains(dump, []byte(value)) {
			t.Errorf("value %d is in the heap", i)
		}
		if bytes.Contains(log, []byte(value[:26])) {
			t.Errorf("value %d is in the log", i)
		}
	}
}
