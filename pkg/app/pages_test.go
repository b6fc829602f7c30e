// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"bytes"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	requestmetrics "k8s.io/client-go/tools/metrics"
	"k8s.io/component-base/metrics"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/textlogger"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/builtin"
)

type brokenCollector struct{ prometheus.Collector }

func (brokenCollector) Collect(ch chan<- prometheus.Metric) { ch <- nil; panic("no reason") }

func TestMetricsThatCannotBeServedHideNoOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		all := controllerMetrics{metrics.NewKubeRegistry(), metrics.NewKubeRegistry()}
		for name, in := range map[string]metrics.KubeRegistry{"rest_client_requests_total": all, "widgets_total": all, "host_total": all.host} { // the first is a library's
			counter := metrics.NewCounter(&metrics.CounterOpts{Name: name, Help: "A controller's own."})
			in.MustRegister(counter)
			counter.Inc()
		}
		requestmetrics.RequestResult.Increment(t.Context(), "200", http.MethodGet, "api")
		serves := func(others ...string) {
			t.Helper()
			w := httptest.NewRecorder()
			metricsHandler(all).ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", nil))
			for _, want := range append(others, "\nhost_total 1\n", "\nrest_client_requests_total{") {
				if w.Code != http.StatusOK || !strings.Contains(w.Body.String(), want) {
					t.Errorf("status %d, want %q in the metrics\n%s", w.Code, want, w.Body)
				}
			}
		}
		function := func(name string, f func() float64) prometheus.Collector {
			return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name}, f)
		}
		all.RawMustRegister(function("fine", func() float64 { return 3 }), function("bad", func() float64 { panic("no reason") }), brokenCollector{function("worse", nil)})
		serves("\nwidgets_total 1\n", "\nfine 3\n")
		all.RawMustRegister(function("slow", func() float64 { <-t.Context().Done(); return 0 }))
		serves()
	})
}

func TestVerbosityRequestIsChecked(t *testing.T) {
	handler := introspectionHandler(&Options{}, metricsHandler(controllerMetrics{metrics.NewKubeRegistry(), metrics.NewKubeRegistry()}), nil)
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
			assert.Equal(t, "code of "+w.Body.String(), tc.code, w.Code)
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
	assert.NoError(t, err)
	secret := &corev1.Secret{StringData: map[string]string{"written": "opensesame"}}
	for level, logged := range map[int]bool{maxVerbosity: false, maxVerbosity + 1: true} {
		var log bytes.Buffer
		logger := textlogger.NewLogger(textlogger.NewConfig(textlogger.Verbosity(level), textlogger.Output(&log)))
		ctx := klog.NewContext(t.Context(), logger)
		_, err := client.CoreV1().Secrets("shop").Create(ctx, secret, metav1.CreateOptions{})
		assert.NoError(t, err)
		if got := strings.Contains(log.String(), "opensesame"); got != logged {
			t.Errorf("level %d logs the value: %t, want %t:\n%s", level, got, logged, log.String())
		}
	}
}

func TestNoSecurePortNeedsNoAuthorities(t *testing.T) {
	o := newOptions(t, With())
	o.Client.Master, o.Authentication.ClientCAFile = newAPIServer(t).URL, filepath.Join(t.TempDir(), "none")
	_, err := builtProcess(t, o)
	assert.NoError(t, err)
}

func TestWitnessAddressFollowsTheFlags(t *testing.T) {
	for name, tc := range map[string]struct {
		change  func(*Options)
		podIP   string
		address string // empty: there is none
	}{
		"a Pod that listens everywhere is reached at its IP":        {func(*Options) {}, "10.0.0.1", "10.0.0.1:10357"},
		"a Pod with an IPv6 address is reached at it":               {func(*Options) {}, "fd00::1", "[fd00::1]:10357"},
		"a process that listens at one address is reached there":    {func(o *Options) { o.Secure.BindAddress = net.IPv4(127, 0, 0, 1) }, "10.0.0.1", "127.0.0.1:10357"},
		"a process that does not know its IP is not reached":        {func(*Options) {}, "", ""},
		"a process without a secure port is not reached":            {func(o *Options) { o.Secure.BindPort = 0 }, "10.0.0.1", ""},
		"a process without an election is not reached":              {func(o *Options) { o.Election.LeaderElect = false }, "10.0.0.1", ""},
		"a process that is restricted to namespaces is not reached": {func(o *Options) { o.Informers.Namespaces = []string{"a"} }, "10.0.0.1", ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv("POD_IP", tc.podIP)
			o := newOptions(t, With(builtin.Entries()...))
			o.Secure.BindPort = 10357
			tc.change(o)
			w := newWitness(o, "pod_1")
			if (w == nil) != (tc.address == "") || w != nil && w.Address() != tc.address {
				t.Errorf("got %+v", w)
			}
		})
	}
}
