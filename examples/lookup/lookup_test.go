// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package lookup_test

import (
	"net/http"
	"net/http/httptest"
	"testing"
	"testing/synctest"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/quartermaster-dev/quartermaster/examples/lookup"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/controllertest"
)

func TestPodIsFoundByItsAddress(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web"}, Status: corev1.PodStatus{PodIP: "10.0.0.7"}}
		h := controllertest.NewHost(t, lookup.Entry(), pod)
		expect := func(want string) {
			response := httptest.NewRecorder()
			h.Handler("lookup").ServeHTTP(response, httptest.NewRequest(http.MethodGet, "/10.0.0.7", nil))
			if response.Body.String() != want {
				t.Errorf("answer %q, want %q", response.Body, want)
			}
		}
		expect("shop/web\n")
		h.Delete(pod)
		h.Settle()
		expect("404 page not found\n")
	})
}
