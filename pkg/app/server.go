// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	genericapifilters "k8s.io/apiserver/pkg/endpoints/filters"
	apirequest "k8s.io/apiserver/pkg/endpoints/request"
	apiserver "k8s.io/apiserver/pkg/server"
	"k8s.io/apiserver/pkg/server/filters"
	"k8s.io/apiserver/pkg/server/flagz"
	"k8s.io/apiserver/pkg/server/mux"
	"k8s.io/apiserver/pkg/server/routes"
	"k8s.io/apiserver/pkg/server/statusz"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/component-base/configz"
	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	"k8s.io/component-base/metrics/prometheus/slis"
	_ "k8s.io/component-base/metrics/prometheus/version"
	_ "k8s.io/component-base/metrics/prometheus/workqueue"
	"k8s.io/klog/v2"

	"github.com/quartermaster-dev/quartermaster/pkg/healthz"
)

// health is the three health paths, which both servers serve. It is open to everyone and asks nobody else.
type health struct {
	healthz, livez, readyz *healthz.Handler
}

func (h health) handler(path string) http.Handler {
	for root, handler := range map[string]http.Handler{"/healthz": h.healthz, "/livez": h.livez, "/readyz": h.readyz} {
		if path == root || strings.HasPrefix(path, root+"/") {
			return handler
		}
	}
	return nil
}

// servers are the secure and the insecure HTTP server.
type servers struct {
	health   health
	stopping chan struct{}
	stopped  []<-chan struct{}
}

// startServers listens and serves: health checks on both servers, protected behind authentication and authorization
// on the secure one, and metrics on the insecure one when asked for.
func startServers(ctx context.Context, o *Options, h health, auth *auth, protected, metrics http.Handler) (*servers, error) {
	s := &servers{health: h, stopping: make(chan struct{})}
	if err := s.startInsecure(ctx, o.Insecure, metrics); err != nil {
		return nil, err
	}
	if err := s.startSecure(o, auth, protected); err != nil {
		s.stop()
		return nil, err
	}
	return s, nil
}

func (s *servers) startInsecure(ctx context.Context, cfg InsecureConfig, metrics http.Handler) error {
	if cfg.Port == 0 {
		return nil
	}
	listener, err := net.Listen("tcp", net.JoinHostPort(cfg.BindAddress.String(), strconv.Itoa(cfg.Port)))
	if err != nil {
		return fmt.Errorf("--insecure-port: %w", err)
	}
	handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if h := s.health.handler(r.URL.Path); h != nil {
			h.ServeHTTP(w, r)
		} else if cfg.Metrics && r.URL.Path == "/metrics" {
			metrics.ServeHTTP(w, r)
		} else {
			http.NotFound(w, r)
		}
	})
	klog.FromContext(ctx).Info("Serving health checks insecurely", "address", listener.Addr().String(), "metrics", cfg.Metrics)
	server := &http.Server{Handler: handler, ReadHeaderTimeout: 10 * time.Second, IdleTimeout: 90 * time.Second, MaxHeaderBytes: 1 << 16}
	stopped, _, err := apiserver.RunServer(server, listener, 5*time.Second, s.stopping)
	s.stopped = append(s.stopped, stopped)
	return err
}

func (s *servers) startSecure(o *Options, auth *auth, protected http.Handler) error {
	if o.Secure.BindPort == 0 {
		return nil
	}
	if err := o.Secure.MaybeDefaultWithSelfSignedCerts("localhost", []string{"manager.kube-system.svc"}, []net.IP{net.IPv4(127, 0, 0, 1)}); err != nil {
		return fmt.Errorf("self-signed certificate: %w", err)
	}
	var info *apiserver.SecureServingInfo
	if err := o.Secure.ApplyTo(&info); err != nil {
		return fmt.Errorf("--secure-port, --tls-*: %w", err)
	}
	if err := auth.acceptClientCertificates(info); err != nil {
		return err
	}
	protected = genericapifilters.WithAuthorization(protected, auth.authorizer, scheme.Codecs)
	protected = genericapifilters.WithAuthentication(protected, auth.authenticator, genericapifilters.Unauthorized(scheme.Codecs), nil, nil)
	handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if h := s.health.handler(r.URL.Path); h != nil {
			h.ServeHTTP(w, r)
		} else {
			protected.ServeHTTP(w, r)
		}
	})
	resolver := &apirequest.RequestInfoFactory{}
	chain := filters.WithPanicRecovery(genericapifilters.WithRequestInfo(genericapifilters.WithCacheControl(handler), resolver), resolver)
	stopped, _, err := info.Serve(chain, 5*time.Second, s.stopping)
	if err != nil {
		return fmt.Errorf("secure server: %w", err)
	}
	s.stopped = append(s.stopped, stopped)
	return nil
}

// stop closes the listeners and waits for the requests in flight, 5 s at most.
func (s *servers) stop() {
	close(s.stopping)
	for _, stopped := range s.stopped {
		<-stopped
	}
}

// introspection is everything on the secure port that needs RBAC on its nonResourceURL.
func introspection(o *Options, metrics http.Handler, handlers map[string]http.Handler) http.Handler {
	m := mux.NewPathRecorderMux("manager")
	m.Handle("/metrics", metrics)
	slis.SLIMetricsWithReset{}.Install(m)
	configz.InstallHandler(m)
	flagz.Install(m, "manager", flagz.NamedFlagSetsReader{FlagSets: o.flags})
	if o.Generic.Debugging.EnableProfiling {
		routes.Profiling{}.Install(m)
	}
	for path, handler := range handlers {
		if strings.HasSuffix(path, "/") {
			m.HandlePrefix(path, handler)
		} else {
			m.Handle(path, handler)
		}
	}
	statusz.Install(m, "manager", statusz.NewRegistry(nil, statusz.WithListedPaths(m.ListedPaths())))
	return m
}

// metricsHandler serves our own registry together with that of the libraries.
func metricsHandler(own metrics.KubeRegistry) http.Handler {
	return promhttp.HandlerFor(prometheus.Gatherers{legacyregistry.DefaultGatherer, own}, promhttp.HandlerOpts{
		ProcessStartTime: legacyregistry.GetProcessStart(),
	})
}

// writeJSON answers a debug request; an error can only be a client that went away.
func writeJSON(w http.ResponseWriter, value any) {
	w.Header().Set("Content-Type", "application/json")
	encoder := json.NewEncoder(w)
	encoder.SetIndent("", "  ")
	if err := encoder.Encode(value); err != nil && !errors.Is(err, http.ErrHandlerTimeout) {
		http.Error(w, err.Error(), http.StatusInternalServerError)
	}
}
