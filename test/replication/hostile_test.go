// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package replication

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// TestAHostileSourceKeepsNobodyWaiting measures another tenant's pull, from the update of its source
// until a reader sees the target, while one namespace writes what is expensive in each grammar, and while
// it has 200 targets due. The bounds leave room for a busy machine: pulls took 18 s and longer when
// values were evaluated where events arrive, and as long as all targets when the queue was first in,
// first out.
func TestAHostileSourceKeepsNobodyWaiting(t *testing.T) {
	f := newFan(t, 0, 200)
	f.namespace("victim")
	f.namespace("owner")
	shared.RunLeader(f.ctx, t, args()...)
	f.secret("owner/s", "k=0", f.with("Q:allow-pull={victim}"))
	f.secret("victim/t", "", f.with("Q:pull-from={owner}/s"))
	f.await("victim/t: k=0")
	value := 0
	median := func(during string) time.Duration {
		t.Helper()
		var took []time.Duration
		for range 11 {
			value++
			want := fmt.Sprintf("k=%d", value)
			f.edit("owner/s", holding(want))
			begin := time.Now()
			for f.content("victim/t") != want {
				if time.Since(begin) > fleet.Patience {
					t.Fatalf("%s: no pull within %v", during, fleet.Patience)
				}
			}
			took = append(took, time.Since(begin))
		}
		slices.Sort(took)
		t.Logf("%s: a pull takes %v, %v at most", during, took[len(took)/2].Round(time.Millisecond), took[len(took)-1].Round(time.Millisecond))
		return took[len(took)/2]
	}
	quiet := median("alone")

	costly := strings.TrimSuffix(strings.Repeat(strings.Repeat("*a", 31)+"b,", 64), ",")
	for name, annotation := range map[string]string{
		"a value of 200 KiB":        "Q:push-to=" + strings.Repeat("*", 200<<10) + "x",
		"the costliest globs":       "Q:push-to=" + costly,
		"200 KiB for the original":  "M:replicate-to=" + strings.Repeat("(a?)*", 40<<10),
		"the costliest expressions": "M:replicate-to=" + strings.TrimSuffix(strings.Repeat("(a?){70}b,", 60), ","),
		"backtracking expressions":  "R:reflection-auto-namespaces=" + strings.TrimSuffix(strings.Repeat("(.+.+)+_,", 60), ","),
		"a marker of 200 KiB":       `Q:source={"copy":"` + strings.Repeat("x", 200<<10) + `"}`,
		"200 KiB of keys":           "M:replicated-keys=" + strings.Repeat("k,", 100<<10),
	} {
		push := f.with(annotation, "R:reflection-allowed=true", "R:reflection-auto-enabled=true")
		if !strings.HasPrefix(annotation, "R:") {
			push = f.with(annotation)
		}
		f.secret("a/hostile", "k=v", push)
		ctx, stop := context.WithCancel(f.ctx)
		var writer sync.WaitGroup
		for range 4 {
			writer.Go(func() {
				secrets := shared.Admin.CoreV1().Secrets(f.namespaces["a"])
				for i := 0; ctx.Err() == nil; i++ {
					patch := fmt.Sprintf(`{"stringData":{"k":"%d"}}`, i)
					_, _ = secrets.Patch(ctx, "hostile", types.MergePatchType, []byte(patch), metav1.PatchOptions{}) // many, whatever becomes of one
				}
			})
		}
		took := median(name)
		stop()
		writer.Wait()
		f.remove("a/hostile")
		if took > quiet+2*time.Second {
			t.Errorf("%s: a pull takes %v, alone %v", name, took, quiet)
		}
	}

	f.secret("a/wide", "k=v", f.with("Q:push-to=labels: world={id},fan=yes"))
	if took := median("while 200 targets are created"); took > quiet+time.Second {
		t.Errorf("while 200 targets of a namespace are due, another's pull takes %v, alone %v", took, quiet)
	}
	f.edit("a/wide", func(s *corev1.Secret) { s.Data["k"] = []byte("w") })
	if took := median("while 200 targets are updated"); took > quiet+time.Second {
		t.Errorf("while 200 targets of a namespace are due, another's pull takes %v, alone %v", took, quiet)
	}
}
