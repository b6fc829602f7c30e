// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	genericapifilters "k8s.io/apiserver/pkg/endpoints/filters"
	"k8s.io/apiserver/pkg/server/flagz"
	"k8s.io/apiserver/pkg/server/mux"
	"k8s.io/apiserver/pkg/server/routes"
	"k8s.io/apiserver/pkg/server/statusz"
	"k8s.io/component-base/logs"
	logsapi "k8s.io/component-base/logs/api/v1"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	"k8s.io/component-base/metrics/prometheus/slis"
	_ "k8s.io/component-base/metrics/prometheus/version"
	"k8s.io/klog/v2"

	"github.com/quartermaster-dev/quartermaster/pkg/election/witness"
	"github.com/quartermaster-dev/quartermaster/pkg/healthz"
)

// health holds the handlers of the three health paths. Both servers serve them to everyone, without
// asking another system.
type health struct {
	healthz, livez, readyz *healthz.Handler
}

func (h health) install(mux *http.ServeMux) {
	for path, handler := range map[string]http.Handler{"/healthz": h.healthz, "/livez": h.livez, "/readyz": h.readyz} {
		mux.Handle(path, handler)
		mux.Handle(path+"/", handler)
	}
}

// servers are the secure and the insecure HTTP server, and the goroutines that keep certificates
// and CAs up to date.
type servers struct {
	logger klog.Logger
	health health
	all    []*http.Server
	wg     sync.WaitGroup
	cancel context.CancelFunc
}

// startServers starts both servers. Both serve health checks. The secure one serves protected behind
// authentication and authorization, the insecure one serves metrics if a flag says so. It returns an error
// with the flag's name if a port or a certificate cannot be used. own, this process's witness, answers other
// replicas without authentication; it may be nil.
func startServers(
	ctx context.Context, o *Options, h health, r *reviewer, protected, metricsPage http.Handler, own *witness.Witness,
) (*servers, error) {
	ctx, cancel := context.WithCancel(ctx)
	s := &servers{logger: klog.FromContext(ctx), health: h, cancel: cancel}
	err := s.startInsecure(ctx, o.Insecure, metricsPage)
	if err == nil {
		err = s.startSecure(ctx, &o.Secure, r, protected, own)
	}
	if err != nil {
		s.stop()
		return nil, err
	}
	return s, nil
}

func (s *servers) startInsecure(ctx context.Context, cfg InsecureConfig, metricsPage http.Handler) error {
	if cfg.Port == 0 {
		return nil
	}
	mux := http.NewServeMux()
	s.health.install(mux)
	if cfg.Metrics {
		mux.Handle("/metrics", metricsPage)
	}
	if err := s.serve(ctx, cfg.BindAddress, cfg.Port, mux, nil); err != nil {
		return fmt.Errorf("--insecure-port: %w", err)
	}
	return nil
}

func (s *servers) startSecure(
	ctx context.Context, cfg *SecureConfig, r *reviewer, protected http.Handler, own *witness.Witness,
) error {
	if cfg.BindPort == 0 {
		return nil
	}
	config, err := cfg.serve(ctx, r.clientCA)
	if err != nil {
		return err
	}
	s.wg.Go(func() { r.run(ctx) })
	mux := http.NewServeMux()
	s.health.install(mux)
	mux.Handle("/", r.protect(protected))
	if own != nil {
		mux.Handle(witness.Path, own)
	}
	if err := s.serve(ctx, cfg.BindAddress, cfg.BindPort, genericapifilters.WithCacheControl(mux), config); err != nil {
		return fmt.Errorf("--secure-port: %w", err)
	}
	return nil
}

// serve starts to listen and returns. It serves until stop is called. stop ends ctx, so that no request goes
// on waiting for a review or a profile.
func (s *servers) serve(ctx context.Context, address net.IP, port int, handler http.Handler, config *tls.Config) error {
	listener, err := net.Listen("tcp", net.JoinHostPort(address.String(), strconv.Itoa(port)))
	if err != nil {
		return err
	}
	server := &http.Server{
		Handler:           withBodyTimeout(handler, bodyTimeout),
		BaseContext:       func(net.Listener) context.Context { return ctx },
		TLSConfig:         config,
		ReadHeaderTimeout: 10 * time.Second,
		IdleTimeout:       90 * time.Second,
		MaxHeaderBytes:    1 << 16,
		HTTP2:             &http.HTTP2Config{MaxConcurrentStreams: 100}, // as kube-apiserver
		ErrorLog:          log.New(serverLog{s.logger}, "", 0),
	}
	s.all = append(s.all, server)
	s.logger.Info("Serving", "address", listener.Addr().String(), "secure", config != nil)
	s.wg.Go(func() {
		serve := server.Serve
		if config != nil {
			serve = func(l net.Listener) error { return server.ServeTLS(l, "", "") }
		}
		if err := serve(listener); !errors.Is(err, http.ErrServerClosed) {
			s.logger.Error(err, "Server stopped unexpectedly", "address", listener.Addr().String())
		}
	})
	return nil
}

// bodyTimeout is how long the body of a request may take to arrive, unless its caller is permitted.
const bodyTimeout = 10 * time.Second

// withBodyTimeout sets the deadline for the body of a request. Before it responds, net/http reads what the
// handler has not read, and would wait for it for ever: anybody could fill the process with connections.
func withBodyTimeout(next http.Handler, timeout time.Duration) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.ContentLength != 0 {
			_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(timeout)) // net/http can
		}
		next.ServeHTTP(w, r)
	})
}

// withoutBodyTimeout removes the deadline of withBodyTimeout: a controller's handler may read slowly what a
// permitted caller sends, and net/http ends the handler's context when the deadline passes.
func withoutBodyTimeout(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_ = http.NewResponseController(w).SetReadDeadline(time.Time{}) // net/http can
		next.ServeHTTP(w, r)
	})
}

// stop closes the listeners and waits at most 5 seconds for the requests in flight.
func (s *servers) stop() {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	for _, server := range s.all {
		s.wg.Go(func() {
			if err := server.Shutdown(ctx); err != nil {
				s.logger.Error(err, "Requests did not end in time")
			}
		})
	}
	s.cancel()
	s.wg.Wait()
}

// serverLog logs the messages of net/http. Failed TLS handshakes are logged at level 5 only, since
// every port scan and TCP probe causes one.
type serverLog struct{ logger klog.Logger }

func (l serverLog) Write(text []byte) (int, error) {
	level := 0
	if bytes.Contains(text, []byte("TLS handshake error")) {
		level = 5
	}
	l.logger.V(level).Info("HTTP server reported a problem", "problem", strings.TrimSpace(string(text)))
	return len(text), nil
}

// setVerbosity sets --v while the manager runs.
func setVerbosity(text string) (string, error) {
	level, err := strconv.ParseUint(text, 10, 31) // GlogSetter takes more than klog
	if err == nil {
		err = checkVerbosity(logsapi.VerbosityLevel(level))
	}
	if err != nil {
		return "", err
	}
	return logs.GlogSetter(text)
}

// introspectionHandler returns a handler of everything that needs RBAC permission for its nonResourceURL.
func introspectionHandler(o *Options, metricsPage http.Handler, handlers map[string]http.Handler) http.Handler {
	m := mux.NewPathRecorderMux("manager")
	m.Handle("/metrics", metricsPage)
	slis.SLIMetricsWithReset{}.Install(m)
	m.Handle("/configz", configz(o))
	flagz.Install(m, "manager", flagz.NamedFlagSetsReader{FlagSets: o.flags})
	putVerbosity := routes.StringFlagPutHandler(setVerbosity)
	routes.DebugFlags{}.Install(m, "v", func(w http.ResponseWriter, r *http.Request) {
		r.Body = http.MaxBytesReader(w, r.Body, 1<<10)
		putVerbosity(w, r)
	})
	if o.Generic.Profiling {
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

// configz returns the handler of /configz. It responds as component-base's handler does, of which a process
// has only one: tests run several managers in one process.
func configz(o *Options) http.Handler {
	config := map[string]any{groupVersion.Group: o.effectiveConfig()}
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { writeJSON(w, config) })
}

// writeJSON writes the response to a debug request.
func writeJSON(w http.ResponseWriter, value any) {
	w.Header().Set("Content-Type", "application/json")
	encoder := json.NewEncoder(w)
	encoder.SetIndent("", "  ")
	if err := encoder.Encode(value); err != nil { // Details of a controller may be no JSON
		http.Error(w, err.Error(), http.StatusInternalServerError)
	}
}
