// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package replication

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// TestLongHostileSourceKeepsNobodyWaiting measures another tenant's pull, from the update of its source
// until a reader sees the target, while one namespace writes what is expensive in each grammar, and while
// it has 200 targets due. The bounds leave room for a busy machine: pulls took 18 s and longer when
// values were evaluated where events arrive, and as long as all targets when the queue was first in,
// first out.
func TestLongHostileSourceKeepsNobodyWaiting(t *testing.T) {
	f := newFan(t, 0, 200)
	for _, name := range []string{"victim", "owner", "slow", "slow200"} {
		f.addNamespace(name)
	}
	shared.RunReleased(f.ctx, t, args()...)
	f.secret("owner/s", "k=0", f.annotated("Q:allow-pull={victim}"))
	f.secret("victim/t", "", f.annotated("Q:pull-from={owner}/s"))
	f.waitForContent("victim/t: k=0")
	latency := shared.NewLatency(f.ctx, t)
	median := func(during string) time.Duration {
		t.Helper()
		return latency.Median(during, func(value string) { f.edit("owner/s", holding("k="+value)) },
			func(value string) bool { return f.content("victim/t") == "k="+value })
	}
	quiet := median("alone")
	// measureDuring has four writers that send one patch after the other, whatever becomes of it.
	measureDuring := func(name string, patch func(i int) (object, body string)) {
		t.Helper()
		ctx, stop := context.WithCancel(f.ctx)
		var writers sync.WaitGroup
		for part := range 4 {
			writers.Go(func() {
				for i := part; ctx.Err() == nil; i += 4 {
					object, body := patch(i)
					namespace, name := f.split(object)
					_, _ = shared.Admin.CoreV1().Secrets(namespace).Patch(ctx, name, types.MergePatchType, []byte(body), metav1.PatchOptions{})
				}
			})
		}
		elapsed := median(name)
		stop()
		writers.Wait()
		if elapsed > quiet+2*time.Second {
			t.Errorf("%s: a pull takes %v, alone %v", name, elapsed, quiet)
		}
	}

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
		push := f.annotated(annotation, "R:reflection-allowed=true", "R:reflection-auto-enabled=true")
		if !strings.HasPrefix(annotation, "R:") {
			push = f.annotated(annotation)
		}
		f.secret("a/hostile", "k=v", push)
		measureDuring(name, func(i int) (object, body string) { return "a/hostile", fmt.Sprintf(`{"stringData":{"k":"%d"}}`, i) })
		f.remove("a/hostile")
	}

	// The first slow pattern stops all patterns of its namespace for 10 minutes, so each case has a namespace.
	slow := f.annotated("R:reflection-allowed=true", "R:reflection-auto-enabled=true", "R:reflection-auto-namespaces="+strings.TrimSuffix(strings.Repeat("(.+.+)+_,", 60), ","))
	flap := func(object string, i int) (string, string) {
		return object, fmt.Sprintf(`{"metadata":{"annotations":{"reflector.v1.k8s.emberstack.com/reflection-auto-namespaces":"(.+.+)+_%d"}}}`, i)
	}
	f.secret("slow/t", "k=v", slow)
	measureDuring("a slow pattern of a source with the target's name", func(i int) (string, string) { return flap("slow/t", i) })
	parallel(200, func(i int) { f.secret(fmt.Sprint("slow200/s-", i), "k=v", slow) })
	measureDuring("200 sources with slow patterns", func(i int) (string, string) { return flap(fmt.Sprint("slow200/s-", i%200), i) })

	f.secret("a/wide", "k=v", f.annotated("Q:push-to=labels: group={id},fan=yes"))
	if elapsed := median("while 200 targets are created"); elapsed > quiet+time.Second {
		t.Errorf("while 200 targets of a namespace are due, another's pull takes %v, alone %v", elapsed, quiet)
	}
	f.edit("a/wide", func(s *corev1.Secret) { s.Data["k"] = []byte("w") })
	if elapsed := median("while 200 targets are updated"); elapsed > quiet+time.Second {
		t.Errorf("while 200 targets of a namespace are due, another's pull takes %v, alone %v", elapsed, quiet)
	}
}
