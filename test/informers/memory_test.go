// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// newValue is 1 KiB of text that is nowhere else.
func newValue(t *testing.T) string {
	t.Helper()
	b := make([]byte, 512)
	if _, err := rand.Read(b); err != nil {
		t.Fatal(err)
	}
	return hex.EncodeToString(b)
}

// resident yields the memory of a process that it can write and that is in RAM, mapping by mapping.
func resident(pid int, yield func([]byte)) error {
	maps, err := os.Open(fmt.Sprintf("/proc/%d/maps", pid))
	if err != nil {
		return err
	}
	defer func() { _ = maps.Close() }()
	pages, err := os.Open(fmt.Sprintf("/proc/%d/pagemap", pid))
	if err != nil {
		return err
	}
	defer func() { _ = pages.Close() }()
	memory, err := os.Open(fmt.Sprintf("/proc/%d/mem", pid))
	if err != nil {
		return err
	}
	defer func() { _ = memory.Close() }()
	for lines := bufio.NewScanner(maps); lines.Scan(); {
		var from, to uint64
		var mode string
		if _, err := fmt.Sscanf(lines.Text(), "%x-%x %s", &from, &to, &mode); err != nil {
			return fmt.Errorf("read %q: %w", lines.Text(), err)
		}
		if !strings.HasPrefix(mode, "rw") {
			continue
		}
		if err := residentPages(pages, memory, from, to, yield); err != nil {
			return err
		}
	}
	return nil
}

func residentPages(pages, memory io.ReaderAt, from, to uint64, yield func([]byte)) error {
	pageSize := uint64(os.Getpagesize())
	entries := make([]byte, (to-from)/pageSize*8)
	if _, err := pages.ReadAt(entries, int64(from/pageSize*8)); err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	var run []byte
	for at := from; at < to; at += pageSize {
		const present, swapped = 1 << 63, 1 << 62
		if binary.LittleEndian.Uint64(entries[(at-from)/pageSize*8:])&(present|swapped) == 0 {
			yield(run)
			run = nil
			continue
		}
		page := make([]byte, pageSize)
		if _, err := memory.ReadAt(page, int64(at)); err != nil {
			return fmt.Errorf("read memory at %x: %w", at, err)
		}
		run = append(run, page...)
	}
	yield(run)
	return nil
}

// occurrences counts the pieces of value that are in the memory of a process, as they are and in base64.
func occurrences(t *testing.T, pid int, value string) (plain, encoded int) {
	t.Helper()
	const piece = 32
	pieces := func(s string) (list [][]byte) {
		for at := 0; at+piece <= len(s); at += piece {
			list = append(list, []byte(s[at:at+piece]))
		}
		if len(list) == 0 {
			list = append(list, []byte(s))
		}
		return list
	}
	raw, inBase64 := pieces(value), pieces(base64.StdEncoding.EncodeToString([]byte(value)))
	err := resident(pid, func(memory []byte) {
		for _, p := range raw {
			plain += bytes.Count(memory, p)
		}
		for _, p := range inBase64 {
			encoded += bytes.Count(memory, p)
		}
	})
	if errors.Is(err, os.ErrPermission) {
		t.Skipf("the kernel does not let this process read another's memory: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	return plain, encoded
}

func TestNoValueOfASecretIsInTheMemoryThatTheManagerUses(t *testing.T) {
	ctx := fleet.Context(t)
	production, err := cluster.BuildManager(ctx, false)
	if err != nil {
		t.Fatal(err)
	}
	s := shared.NewShop(ctx, t)
	listed, changed, marker := newValue(t), newValue(t), "marker-"+newValue(t)[:40]
	applySecret(ctx, t, s.Namespace, "db", listed)
	s.CreateSecret(ctx, t, marker, "", "x")
	m := shared.Run(t, shared.NewReplica(ctx, t), cluster.ManagerOptions{Binary: production, Env: []string{
		"GODEBUG=clobberfree=1", // the garbage collector overwrites what it frees
	}})
	shared.WaitForLeader(ctx, t, m)
	s.WaitUntilKnown(ctx, t, "web")
	applySecret(ctx, t, s.Namespace, "db", changed)
	s.WaitForReplicaSets(ctx, t, "web", 2)
	for range 3 { // pools survive one collection
		if code, _, err := fleet.Get(m.SecureURL+"/debug/pprof/heap?gc=1", token); err != nil || code != http.StatusOK {
			t.Fatalf("the garbage collector was not started: %d, %v", code, err)
		}
	}

	if plain, _ := occurrences(t, m.PID(), marker); plain == 0 {
		t.Fatal("the name of a Secret is not found: the search proves nothing")
	}
	for what, value := range map[string]string{"was listed": listed, "came as a change": changed} {
		if plain, encoded := occurrences(t, m.PID(), value); plain+encoded > 0 {
			t.Errorf("of a value that %s, %d pieces of 32 bytes are in memory as they are and %d in base64", what, plain, encoded)
		}
	}
}

// applySecret changes a Secret as kubectl apply does, which leaves the value in an annotation too.
func applySecret(ctx context.Context, t *testing.T, namespace, name, value string) {
	t.Helper()
	encoded := base64.StdEncoding.EncodeToString([]byte(value))
	annotation := fmt.Sprintf(`{"apiVersion":"v1","kind":"Secret","data":{"value":%q}}`, encoded)
	patch := fmt.Appendf(nil, `{"data":{"value":%q},"metadata":{"annotations":{%q:%q}}}`, encoded, corev1.LastAppliedConfigAnnotation, annotation)
	if _, err := shared.Admin.CoreV1().Secrets(namespace).Patch(ctx, name, types.MergePatchType, patch, metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
}
