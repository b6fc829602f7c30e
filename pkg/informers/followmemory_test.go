// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"bufio"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/rest"
)

// serverEnv makes the test binary run as an API server, so that its memory is not in that of the test.
const serverEnv = "INFORMERS_TEST_SERVER"

// What the served types have: plain objects, and one with an annotation.
const (
	servedTypes  = 300
	plainObjects = 666
)

// serveTypes serves the same plain objects, and an annotated one, as every resource.
func serveTypes() {
	object := func(i int) map[string]any {
		annotations := map[string]string{"kubectl.kubernetes.io/last-applied-configuration": strings.Repeat("x", 200)}
		if i == plainObjects {
			annotations["ttl"] = "1h"
		}
		return map[string]any{"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": map[string]any{
			"namespace": fmt.Sprintf("team-%d", i%40), "name": fmt.Sprintf("object-of-some-length-%d", i), "annotations": annotations,
			"uid": fmt.Sprintf("6b0c33a2-5c46-4b6c-9b39-%012d", i), "resourceVersion": fmt.Sprint(1000 + i), "creationTimestamp": "2030-01-10T12:00:00Z",
			"labels": map[string]string{"app.kubernetes.io/name": "shop", "team": "x"},
		}}
	}
	var events []byte
	add := func(kind string, object any) {
		text, _ := json.Marshal(map[string]any{"type": kind, "object": object})
		events = append(events, append(text, '\n')...)
	}
	for i := range plainObjects + 1 {
		add("ADDED", object(i))
	}
	add("BOOKMARK", map[string]any{"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": map[string]any{
		"resourceVersion": "5000", "annotations": map[string]string{metav1.InitialEventsAnnotationKey: "true"}}})
	serveUntilTheEnd(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write(events)
		_ = http.NewResponseController(w).Flush()
		<-r.Context().Done()
	}))
}

// serveUntilTheEnd serves until the standard input ends. It prints its address and certificate.
func serveUntilTheEnd(handler http.Handler) {
	server := httptest.NewUnstartedServer(handler)
	server.EnableHTTP2 = true
	server.StartTLS()
	_, _ = fmt.Fprintln(os.Stdout, server.URL, base64.StdEncoding.EncodeToString(server.Certificate().Raw))
	_, _ = io.Copy(io.Discard, os.Stdin)
}

// startServer runs this binary as an API server.
func startServer(t testing.TB) *rest.Config {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), serverEnv+"=1")
	cmd.Stderr = os.Stderr
	stdin, err := cmd.StdinPipe()
	must(t, err)
	stdout, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	t.Cleanup(func() {
		_ = stdin.Close()
		_ = cmd.Wait()
	})
	line, err := bufio.NewReader(stdout).ReadString('\n')
	must(t, err)
	url, certificate, _ := strings.Cut(strings.TrimSpace(line), " ")
	der, err := base64.StdEncoding.DecodeString(certificate)
	must(t, err)
	config := &rest.Config{Host: url}
	config.CAData = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	return config
}

// resident returns the resident memory of this process.
func resident(t *testing.T) int {
	t.Helper()
	text, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Skip(err)
	}
	var kib int
	_, rest, _ := strings.Cut(string(text), "VmRSS:")
	if _, err := fmt.Sscan(rest, &kib); err != nil {
		t.Fatal(err)
	}
	return kib << 10
}

// raceDetector reports whether the race detector is built in, which takes memory of its own.
func raceDetector() bool {
	info, ok := debug.ReadBuildInfo()
	return ok && slices.Contains(info.Settings, debug.BuildSetting{Key: "-race", Value: "true"})
}

// TestFollowOf300TypesTakesAtMost40MiB follows 300 types with 200,000 plain objects. A manager collects
// garbage as often as this does.
func TestFollowOf300TypesTakesAtMost40MiB(t *testing.T) {
	if testing.Short() || raceDetector() {
		t.Skip("measures memory")
	}
	defer debug.SetGCPercent(debug.SetGCPercent(60))
	f, _ := newClusterCache(t, clientsOf(t, startServer(t)))
	debug.FreeOSMemory()
	before := resident(t)
	var all []*Following[*Object]
	h, lists := &told{}, make(chan struct{}, 2)
	for i := range servedTypes {
		need := ttlNeed
		need.Resource = schema.GroupVersionResource{Group: fmt.Sprintf("g%d.example.com", i%30), Version: "v1", Resource: fmt.Sprintf("resources%d", i)}
		need.ListSlots = lists
		w, err := Follow[*Object](t.Context(), f.ForController("ttl"), need)
		must(t, err)
		w.AddHandler(h.handle)
		all = append(all, w)
	}
	peak := 0
	eventually(t, "all types to sync", func() bool {
		peak = max(peak, resident(t)-before)
		for _, w := range all {
			if !w.Status().Synced {
				return false
			}
		}
		return true
	})
	eventually(t, "the handler to be told of each object", func() bool {
		h.mu.Lock()
		defer h.mu.Unlock()
		return len(h.lines) == servedTypes
	})
	synced := resident(t) - before
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	goroutines := runtime.NumGoroutine()
	t.Logf("%d types with %d objects: %d KiB of resident memory once synced, %d at the peak; %d KiB of heap, %d of stacks, %d goroutines",
		servedTypes, servedTypes*(plainObjects+1), synced>>10, peak>>10, m.HeapAlloc>>10, m.StackInuse>>10, goroutines)
	if peak > 40<<20 {
		t.Errorf("it took %d MiB", peak>>20)
	}
	begin := time.Now()
	for _, w := range all {
		w.Stop()
	}
	t.Logf("stopped in %v", time.Since(begin))
	eventually(t, "the goroutines to end", func() bool { return runtime.NumGoroutine() < 50 })
}
