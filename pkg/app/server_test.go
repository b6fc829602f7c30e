// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	requestmetrics "k8s.io/client-go/tools/metrics"
	"k8s.io/component-base/metrics"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/textlogger"
)

func TestServerEndsRequestsWithoutTheirBody(t *testing.T) {
	server := httptest.NewServer(withBodyTimeout(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}), time.Millisecond))
	defer server.Close()
	for name, header := range map[string]string{
		"a body of a known length": "Content-Length: 1000",
		"a body in chunks":         "Transfer-Encoding: chunked",
	} {
		t.Run(name, func(t *testing.T) {
			connection, err := net.Dial("tcp", server.Listener.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			defer connection.Close()
			_ = connection.SetReadDeadline(time.Now().Add(30 * time.Second))
			if _, err := fmt.Fprintf(connection, "POST /healthz HTTP/1.1\r\nHost: x\r\n%s\r\n\r\n", header); err != nil {
				t.Fatal(err)
			}
			if _, err := io.ReadAll(connection); errors.Is(err, os.ErrDeadlineExceeded) {
				t.Error("the server keeps the connection open")
			}
		})
	}
}

func TestMetricsThatCannotBeServedHideNoOthers(t *testing.T) {
	registry := metrics.NewKubeRegistry()
	for _, name := range []string{"rest_client_requests_total", "widgets_total"} { // the first is a library's
		counter := metrics.NewCounter(&metrics.CounterOpts{Name: name, Help: "A controller's own."})
		registry.MustRegister(counter)
		counter.Inc()
	}
	requestmetrics.RequestResult.Increment(t.Context(), "200", http.MethodGet, "api")
	w := httptest.NewRecorder()
	metricsHandler(registry).ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	if w.Code != http.StatusOK || !strings.Contains(w.Body.String(), "\nwidgets_total 1\n") {
		t.Errorf("status %d, and the metrics\n%s", w.Code, w.Body)
	}
}

func TestServerWaitsForPermittedCallers(t *testing.T) {
	var ended error
	server := httptest.NewServer(withBodyTimeout(withoutBodyTimeout(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if ended = r.Context().Err(); err == nil {
			_, err = w.Write(body)
		}
		if err != nil {
			t.Error(err)
		}
	})), -time.Second)) // the deadline has passed
	defer server.Close()
	resp, err := http.Post(server.URL, "text/plain", io.MultiReader(strings.NewReader("a"), strings.NewReader("b")))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if body, err := io.ReadAll(resp.Body); err != nil || string(body) != "ab" || ended != nil {
		t.Errorf("%q, error %v, context %v", body, err, ended)
	}
}

func TestVerbosityRequestIsChecked(t *testing.T) {
	handler := introspectionHandler(&Options{}, metricsHandler(metrics.NewKubeRegistry()), nil)
	for name, tc := range map[string]struct {
		body string
		code int
	}{
		"a number is taken":      {"0", http.StatusOK},
		"a long body is cut off": {strings.Repeat("0", 2<<10), http.StatusBadRequest},
		"a level at which client-go logs the values of Secrets is refused": {"8", http.StatusBadRequest},
	} {
		t.Run(name, func(t *testing.T) {
			w := httptest.NewRecorder()
			handler.ServeHTTP(w, httptest.NewRequest(http.MethodPut, "/debug/flags/v", strings.NewReader(tc.body)))
			if w.Code != tc.code {
				t.Errorf("code %d, want %d: %s", w.Code, tc.code, w.Body)
			}
		})
	}
}

// TestVerbosityHighestShowsNoSecret also fails when client-go logs bodies at a lower level than today.
func TestVerbosityHighestShowsNoSecret(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write([]byte(`{"apiVersion":"v1","kind":"Secret","stringData":{"read":"opensesame"}}`))
	}))
	defer server.Close()
	client, err := kubernetes.NewForConfig(&rest.Config{Host: server.URL})
	if err != nil {
		t.Fatal(err)
	}
	secret := &corev1.Secret{StringData: map[string]string{"written": "opensesame"}}
	for level, logged := range map[int]bool{maxVerbosity: false, maxVerbosity + 1: true} {
		var log bytes.Buffer
		logger := textlogger.NewLogger(textlogger.NewConfig(textlogger.Verbosity(level), textlogger.Output(&log)))
		ctx := klog.NewContext(t.Context(), logger)
		if _, err := client.CoreV1().Secrets("shop").Create(ctx, secret, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		if got := strings.Contains(log.String(), "opensesame"); got != logged {
			t.Errorf("level %d logs the value: %t, want %t:\n%s", level, got, logged, log.String())
		}
	}
}
