// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"bufio"
	"encoding/base64"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"strconv"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/clock"
)

// The data set of BenchmarkUpdates.
const (
	benchSecrets = 5000
	benchUpdates = 10000
)

// serveUpdates serves a watch of Secrets of 4 KiB: first all of them and then, when /go is
// requested, as many updates.
func serveUpdates() {
	start := make(chan struct{})
	mux := http.NewServeMux()
	mux.HandleFunc("/go", func(http.ResponseWriter, *http.Request) { close(start) })
	mux.HandleFunc("/api/v1/secrets", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", protobuf+";stream=watch")
		frames := info().StreamSerializer.NewFrameWriter(w)
		version := 1
		send := func(kind watch.EventType, s *corev1.Secret) {
			version++
			s.ResourceVersion = strconv.Itoa(version)
			_, _ = frames.Write(encodeEvent(watch.Event{Type: kind, Object: s}, false))
		}
		for i := range benchSecrets {
			send(watch.Added, secret(i, 4096))
		}
		send(watch.Bookmark, &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{metav1.InitialEventsAnnotationKey: "true"}}})
		w.(http.Flusher).Flush()
		<-start
		for i := range benchUpdates {
			send(watch.Modified, secret(i%benchSecrets, 4096))
			w.(http.Flusher).Flush()
		}
		<-make(chan struct{})
	})
	server := httptest.NewUnstartedServer(mux)
	server.EnableHTTP2 = true
	server.StartTLS()
	_, _ = fmt.Fprintln(os.Stdout, server.URL, base64.StdEncoding.EncodeToString(server.Certificate().Raw))
	_, _ = bufio.NewReader(os.Stdin).ReadString(0)
}

// BenchmarkUpdates measures the CPU time that the process takes for 10,000 updates: in our cache,
// and in client-go's informer, which keeps the whole objects.
func BenchmarkUpdates(b *testing.B) {
	// Each calls a function with every update.
	for name, start := range map[string]func(*testing.B, *rest.Config, func()) (synced <-chan struct{}){
		"ours": func(b *testing.B, config *rest.Config, updated func()) <-chan struct{} {
			b.Helper()
			f, err := (&Caches{}).New(NewConfig(), clientsOf(b, config), []Need{reloadNeed}, clock.RealClock{}, func(string) {})
			if err != nil {
				b.Fatal(err)
			}
			b.Cleanup(f.Shutdown)
			f.Start(b.Context())
			informer := For[*Object](f.For("reload"), Secrets)
			informer.AddHandler(func(old, _ *Object, _ bool) {
				if old != nil {
					updated()
				}
			})
			return informer.Synced()
		},
		"client-go": func(b *testing.B, config *rest.Config, updated func()) <-chan struct{} {
			b.Helper()
			config = rest.CopyConfig(config)
			config.ContentType = protobuf
			shared := informers.NewSharedInformerFactory(kubernetes.NewForConfigOrDie(config), 0)
			informer := shared.Core().V1().Secrets().Informer()
			shared.Start(b.Context().Done())
			if _, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{UpdateFunc: func(any, any) { updated() }}); err != nil {
				b.Fatal(err)
			}
			return informer.HasSyncedChecker().Done()
		},
	} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				config := startServer(b, "updates")
				var seen atomic.Int64
				done := make(chan struct{})
				<-start(b, config, func() {
					if seen.Add(1) == benchUpdates {
						close(done)
					}
				})
				before := cpuTime(b)
				client, err := rest.HTTPClientFor(config)
				if err != nil {
					b.Fatal(err)
				}
				response, err := client.Get(config.Host + "/go")
				if err != nil {
					b.Fatal(err)
				}
				_ = response.Body.Close()
				<-done
				b.ReportMetric(float64((cpuTime(b) - before).Milliseconds()), "cpu-ms/10000-updates")
			}
		})
	}
}

func cpuTime(b *testing.B) time.Duration {
	b.Helper()
	var usage syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &usage); err != nil {
		b.Fatal(err)
	}
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}
