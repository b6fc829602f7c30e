// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/record"
	"k8s.io/component-base/metrics"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/election"
	"github.com/quartermaster-dev/quartermaster/pkg/informers"
)

// apiServer answers every request with an empty ConfigMap and remembers the methods and credentials.
type apiServer struct {
	*httptest.Server
	mu       sync.Mutex
	requests []string // METHOD PATH?QUERY
}

func newAPIServer(t *testing.T) *apiServer {
	t.Helper()
	s := &apiServer{}
	s.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.mu.Lock()
		defer s.mu.Unlock()
		w.Header().Set("Content-Type", "application/json")
		body := `{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"x","namespace":"shop"}}`
		if strings.HasSuffix(r.URL.Path, "/token") {
			body = `{"apiVersion":"authentication.k8s.io/v1","kind":"TokenRequest","status":{"token":"t","expirationTimestamp":"2100-01-01T00:00:00Z"}}`
		} else {
			s.requests = append(s.requests, r.Method+" "+r.URL.RequestURI())
		}
		_, _ = w.Write([]byte(body))
	}))
	t.Cleanup(s.Close)
	return s
}

func (s *apiServer) take() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	got := s.requests
	s.requests = nil
	return got
}

// TestNoControllerGetsAClientWithoutTheFence builds controllers the way Run does, and writes with all that they are
// given while this replica does not lead.
func TestNoControllerGetsAClientWithoutTheFence(t *testing.T) {
	for name, change := range map[string]func(*Options){
		"by default":     func(*Options) {},
		"with --dry-run": func(o *Options) { o.Generic.DryRun = true },
		"with tokens of the controllers' own accounts": func(o *Options) { o.Generic.UseServiceAccountTokens = true },
	} {
		t.Run(name, func(t *testing.T) {
			server := newAPIServer(t)
			var host Host
			probe := Entry{
				Name:  "probe",
				Needs: func() ([]informers.Need, error) { return nil, nil },
				Rules: func() []rbacv1.PolicyRule { return nil },
				New: func(h Host) (controllers.Controller, error) {
					host = h
					return nil, nil
				},
			}
			o, err := NewOptions(probe)
			if err != nil {
				t.Fatal(err)
			}
			o.Client.Master = server.URL
			o.Client.ContentType = "application/json"
			o.Generic.Controllers = []string{"probe"}
			change(o)

			registry := metrics.NewKubeRegistry()
			connection, err := newConnection(o.Client)
			if err != nil {
				t.Fatal(err)
			}
			electionMetrics, err := election.NewMetrics(registry)
			if err != nil {
				t.Fatal(err)
			}
			lease := types.NamespacedName{Namespace: "kube-system", Name: "quartermaster"}
			lock, err := election.NewLock(lease, election.NewIdentity("pod"), kubernetes.NewForConfigOrDie(connection.base).CoordinationV1().Leases(lease.Namespace),
				record.NewFakeRecorder(10), election.NewMonotonicClock(), electionMetrics)
			if err != nil {
				t.Fatal(err)
			}
			clients, err := newClients(o, connection, lock.Fence)
			if err != nil {
				t.Fatal(err)
			}
			enabled, err := o.enabled()
			if err != nil {
				t.Fatal(err)
			}
			cache, err := newCache(o, connection, registry, enabled)
			if err != nil {
				t.Fatal(err)
			}
			defer cache.Shutdown()
			if _, err := newControllers(o, clients, runtime.NewScheme(), &events{broadcaster: record.NewBroadcaster(record.WithContext(t.Context()))}, cache, registry, enabled); err != nil {
				t.Fatal(err)
			}

			ctx := t.Context()
			dyn, err := dynamic.NewForConfig(host.RESTConfig)
			if err != nil {
				t.Fatal(err)
			}
			configMaps := host.Client.CoreV1().ConfigMaps("shop")
			for what, write := range map[string]func() error{
				"create": func() error {
					_, err := configMaps.Create(ctx, &corev1.ConfigMap{}, metav1.CreateOptions{})
					return err
				},
				"update": func() error {
					_, err := configMaps.Update(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "x"}}, metav1.UpdateOptions{})
					return err
				},
				"patch": func() error {
					_, err := configMaps.Patch(ctx, "x", types.MergePatchType, []byte("{}"), metav1.PatchOptions{})
					return err
				},
				"delete": func() error { return configMaps.Delete(ctx, "x", metav1.DeleteOptions{}) },
				"delete by another client made of the same configuration": func() error {
					return dyn.Resource(corev1.SchemeGroupVersion.WithResource("configmaps")).Namespace("shop").Delete(ctx, "x", metav1.DeleteOptions{})
				},
			} {
				if err := write(); !errors.Is(err, election.ErrNotLeading) {
					t.Errorf("%s while not leading: %v, want ErrNotLeading", what, err)
				}
			}
			if sent := server.take(); len(sent) != 0 {
				t.Errorf("the API server saw %v", sent)
			}
			if _, err := configMaps.Get(ctx, "x", metav1.GetOptions{}); err != nil {
				t.Errorf("a read was refused: %v", err)
			}
			if sent := server.take(); len(sent) != 1 {
				t.Errorf("of one read the API server saw %v", sent)
			}
		})
	}
}
