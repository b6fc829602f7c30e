// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"bytes"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/textlogger"
)

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
