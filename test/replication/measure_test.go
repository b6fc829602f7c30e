// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package replication

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// released starts a manager as it is released, which leads.
func released(ctx context.Context, t *testing.T, more ...string) *cluster.Manager {
	t.Helper()
	binary, err := cluster.BuildProgram(ctx, "cmd/manager", false)
	if err != nil {
		t.Fatal(err)
	}
	m, err := shared.StartManager(shared.NewReplica(ctx, t), cluster.ManagerOptions{Binary: binary, Args: args(more...)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { shared.FreeLease(t, m) })
	fleet.StopAtEnd(t, m)
	shared.WaitForLeader(ctx, t, m)
	if _, err := m.WaitForLine(ctx, "Controller started"); err != nil {
		t.Fatal(err)
	}
	return m
}

// parallel calls do for 0 to n-1, 16 at a time.
func parallel(n int, do func(i int)) {
	var running sync.WaitGroup
	next := make(chan int)
	for range 16 {
		running.Go(func() {
			for i := range next {
				do(i)
			}
		})
	}
	for i := range n {
		next <- i
	}
	close(next)
	running.Wait()
}

// TestLongFanOut prints what a fan-out takes, and fails if it takes many times as long as the bar.
func TestLongFanOut(t *testing.T) {
	for _, tc := range []struct {
		namespaces int
		limit      time.Duration
	}{{200, 20 * time.Second}, {2000, 200 * time.Second}} {
		t.Run(fmt.Sprint(tc.namespaces, " namespaces"), func(t *testing.T) {
			w := newWorld(t, "a")
			w.ctx = fleet.Within(t.Context(), t, 15*time.Minute)
			parallel(tc.namespaces, func(i int) {
				ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("fan-%d-%d", tc.namespaces, i), Labels: map[string]string{"fan": w.id}}}
				if _, err := shared.Admin.CoreV1().Namespaces().Create(w.ctx, ns, metav1.CreateOptions{}); err != nil {
					t.Error(err)
				}
			})
			m := released(w.ctx, t)
			copies, err := shared.Admin.CoreV1().Secrets("").Watch(w.ctx, metav1.ListOptions{FieldSelector: "metadata.name=s"})
			if err != nil {
				t.Fatal(err)
			}
			defer copies.Stop()
			idle := latencies(w.ctx, t, 200, nil)
			measure := func(what string, value string, change func()) {
				begin := time.Now()
				over := make(chan struct{})
				var busy []time.Duration
				var asking sync.WaitGroup
				asking.Go(func() { busy = latencies(w.ctx, t, 1<<30, over) })
				change()
				seen := map[string]bool{}
				for e := range copies.ResultChan() {
					s, ok := e.Object.(*corev1.Secret)
					if ok && (e.Type == watch.Added || e.Type == watch.Modified) && s.Namespace != w.namespaces["a"] && string(s.Data["k"]) == value {
						if seen[s.Namespace] = true; len(seen) == tc.namespaces {
							break
						}
					}
				}
				took := time.Since(begin)
				close(over)
				asking.Wait()
				t.Logf("%s %d copies: %v; a GET by others: median %v, p99 %v while idle, %v and %v meanwhile; RSS %d MiB",
					what, len(seen), took, quantile(idle, 0.5), quantile(idle, 0.99), quantile(busy, 0.5), quantile(busy, 0.99), rss(t, m)>>20)
				if took > tc.limit || len(seen) < tc.namespaces {
					t.Errorf("%s %d copies took %v", what, len(seen), took)
				}
			}
			measure("create", "v", func() { w.secret("a/s", "k=v", w.with("Q:push-to=labels: fan={id}")) })
			measure("update", "w", func() { w.edit("a/s", holding("k=w")) })
		})
	}
}

// latencies returns how long n requests take, one after the other, or those until over is closed.
func latencies(ctx context.Context, t *testing.T, n int, over <-chan struct{}) (list []time.Duration) {
	t.Helper()
	for range n {
		select {
		case <-over:
			return list
		default:
		}
		begin := time.Now()
		if _, err := shared.Admin.CoreV1().Namespaces().Get(ctx, "default", metav1.GetOptions{}); err != nil {
			t.Error(err)
			return list
		}
		list = append(list, time.Since(begin))
	}
	return list
}

func quantile(list []time.Duration, q float64) time.Duration {
	list = slices.Clone(list)
	slices.Sort(list)
	return list[int(q*float64(len(list)-1))].Round(10 * time.Microsecond)
}

func rss(t *testing.T, m *cluster.Manager) int {
	t.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", m.PID()))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(status)) {
		if rest, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			n, err := strconv.Atoi(strings.Fields(rest)[0])
			if err != nil {
				t.Fatal(err)
			}
			return n << 10
		}
	}
	t.Fatal("no VmRSS")
	return 0
}

// heap returns the bytes of the heap that are in use, garbage included.
func heap(t *testing.T, m *cluster.Manager) int {
	t.Helper()
	_, metrics, err := fleet.Get(m.InsecureURL+"/metrics", "")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(metrics) {
		if rest, ok := strings.CutPrefix(line, "go_memstats_heap_alloc_bytes "); ok {
			f, err := strconv.ParseFloat(strings.TrimSpace(rest), 64)
			if err != nil {
				t.Fatal(err)
			}
			return int(f)
		}
	}
	t.Fatal("no heap")
	return 0
}

// TestLongPullLatency prints how long a pull target waits for its source.
func TestLongPullLatency(t *testing.T) {
	w := newWorld(t, "a", "b")
	w.ctx = fleet.Within(t.Context(), t, 10*time.Minute)
	released(w.ctx, t)
	w.secret("a/s", "k=v", w.with("M:replication-allowed=true", "M:replication-allowed-namespaces={b}"))
	w.secret("b/t", "", w.with("M:replicate-from={a}/s"))
	w.await("b/t: k=v")
	targets, err := shared.Admin.CoreV1().Secrets(w.namespaces["b"]).Watch(w.ctx, metav1.ListOptions{FieldSelector: "metadata.name=t"})
	if err != nil {
		t.Fatal(err)
	}
	defer targets.Stop()
	source := w.get("a/s")
	var list []time.Duration
	for i := range 200 {
		want := fmt.Sprint(i)
		source.Data["k"] = []byte(want)
		updated, err := shared.Admin.CoreV1().Secrets(source.Namespace).Update(w.ctx, source, metav1.UpdateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		begin := time.Now()
		source = updated
		for e := range targets.ResultChan() {
			if s, ok := e.Object.(*corev1.Secret); ok && string(s.Data["k"]) == want {
				break
			}
		}
		list = append(list, time.Since(begin))
	}
	t.Logf("source update -> target updated: median %v, p99 %v", quantile(list, 0.5), quantile(list, 0.99))
}

// TestLongMemory prints by how much 5,000 sources of 4 KiB and their copies let a manager grow, and
// what a restart requests.
func TestLongMemory(t *testing.T) {
	const n = 5000
	w := newWorld(t, "a", "b")
	w.ctx = fleet.Within(t.Context(), t, 15*time.Minute)
	m := released(w.ctx, t, "--insecure-metrics")
	w.settle()
	before, heapBefore := rss(t, m), heap(t, m)
	value := strings.Repeat("v", 4<<10)
	parallel(n, func(i int) { w.secret(fmt.Sprintf("a/s%d", i), "k="+value, w.with("Q:push-to={b}")) })
	count := func() error {
		list, err := shared.Admin.CoreV1().Secrets(w.namespaces["b"]).List(w.ctx, metav1.ListOptions{ResourceVersion: "0"})
		if err == nil && len(list.Items) != n {
			err = fmt.Errorf("%d copies", len(list.Items))
		}
		return err
	}
	fleet.Eventually(w.ctx, t, count)
	// Go returns memory to the system bit by bit.
	lowest := rss(t, m)
	for end := time.Now().Add(time.Minute); time.Now().Before(end); w.settle() {
		lowest = min(lowest, rss(t, m))
	}
	t.Logf("with %d sources and copies: RSS %d -> %d MiB, heap in use %d -> %d MiB", n, before>>20, lowest>>20, heapBefore>>20, heap(t, m)>>20)
	if err := m.Stop(w.ctx, 30*time.Second); err != nil {
		t.Fatal(err)
	}
	w.begin = time.Now()
	next := released(w.ctx, t)
	w.settle()
	t.Logf("a new leader: RSS %d MiB", rss(t, next)>>20)
	w.wrote()
	if read := w.requests(func(e auditv1.Event) bool { return e.Verb == "get" }); len(read) > 0 {
		t.Errorf("%d objects are read though they are in sync, such as %s", len(read), read[0])
	}
}
