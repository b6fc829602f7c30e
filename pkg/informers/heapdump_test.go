// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/pem"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
)

// serverEnv makes the test binary run as an API server, so that no value of a Secret is in the
// memory of the process whose heap is searched.
const serverEnv = "INFORMERS_TEST_SERVER"

const lastPlanted = 10

// plantedValue is computed, so that it is not among the constants of the binary either.
func plantedValue(i int) []byte {
	sum := sha256.Sum256([]byte("planted " + strconv.Itoa(i)))
	size := 1024
	if i == lastPlanted {
		size = 16 * 1024
	}
	return []byte(strings.Repeat(hex.EncodeToString(sum[:]), size/hex.EncodedLen(len(sum))))
}

func planted(i int) *corev1.Secret {
	name := fmt.Sprintf("planted-%d", i)
	if i == lastPlanted {
		name = "plant"
	}
	value := plantedValue(i)
	return &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name,
			Annotations: map[string]string{corev1.LastAppliedConfigAnnotation: string(value)}},
		Data: map[string][]byte{"value": value}}
}

// servePlanted serves ten planted Secrets. It adds the last one when /plant is requested, and Secrets without
// a planted value when /plough is.
func servePlanted() {
	c := newCluster()
	for i := range lastPlanted {
		c.put(planted(i))
	}
	api := &apiServer{secrets: c}
	mux := http.NewServeMux()
	mux.Handle("/", api)
	mux.HandleFunc("/plant", func(http.ResponseWriter, *http.Request) { c.put(planted(lastPlanted)) })
	mux.HandleFunc("/plough", func(http.ResponseWriter, *http.Request) {
		for i := range 20 {
			c.put(named(fmt.Sprintf("other-%d", i), strings.Repeat("x", 64<<10)))
		}
		c.put(named("plough", "1"))
	})
	serveUntilTheEnd(mux)
}

// serveUntilTheEnd serves until the standard input ends. It prints its address and certificate.
func serveUntilTheEnd(handler http.Handler) {
	server := httptest.NewUnstartedServer(handler)
	server.EnableHTTP2 = true
	server.StartTLS()
	_, _ = fmt.Fprintln(os.Stdout, server.URL, base64.StdEncoding.EncodeToString(server.Certificate().Raw))
	_, _ = io.Copy(io.Discard, os.Stdin)
}

// startServer runs this binary as the API server of that name.
func startServer(t testing.TB, name string) *rest.Config {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), serverEnv+"="+name)
	cmd.Stderr = os.Stderr
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = stdin.Close()
		_ = cmd.Wait()
	})
	line, err := bufio.NewReader(stdout).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	url, certificate, _ := strings.Cut(strings.TrimSpace(line), " ")
	der, err := base64.StdEncoding.DecodeString(certificate)
	if err != nil {
		t.Fatal(err)
	}
	config := &rest.Config{Host: url}
	config.CAData = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	return config
}

func TestHeapHasNoValueOfASecret(t *testing.T) {
	if testing.Short() {
		t.Skip("writes a heap dump")
	}
	config := startServer(t, "planted")
	clients := clientsOf(t, config)
	f, _ := newClusterCache(t, clients, reloadNeed)
	startSynced(t, f)
	// The last Secret arrives by the watch, after the list. Others follow, which reuse the buffers
	// of the connection.
	for _, step := range []string{"plant", "plough"} {
		request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, config.Host+"/"+step, nil)
		if err != nil {
			t.Fatal(err)
		}
		response, err := clients.http.Do(request)
		if err != nil {
			t.Fatal(err)
		}
		_ = response.Body.Close()
		eventually(t, step+" in the cache", func() bool { return cached(f, step) != nil })
	}

	dump := dumpHeap(t)
	if !bytes.Contains(dump, []byte("planted-9")) {
		t.Fatal("the dump does not even hold the names: the search proves nothing")
	}
	for i := range lastPlanted + 1 {
		for at, value := 0, plantedValue(i); at < len(value); at += 64 {
			if n := bytes.Count(dump, value[at:at+64]); n > 0 {
				t.Fatalf("the value of Secret %d is in the heap dump %d times", i, n)
			}
		}
	}
	runtime.KeepAlive(f)
}

func dumpHeap(t *testing.T) []byte {
	t.Helper()
	file, err := os.Create(filepath.Join(t.TempDir(), "heap"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = file.Close() }()
	for range 3 { // pools survive one collection
		runtime.GC()
	}
	debug.WriteHeapDump(file.Fd())
	dump, err := os.ReadFile(file.Name())
	if err != nil {
		t.Fatal(err)
	}
	return dump
}
