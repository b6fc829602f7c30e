// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package serving serves the manager's pages on two ports: health checks for everyone on both, and on the
// secure port everything else, for callers whom the API server knows and permits.
//
//	serving.go    the servers
//	tls.go        the secure port's flags and certificates
//	reviewer.go   who the callers of the secure port are, and what they may see
package serving

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/spf13/pflag"
	genericapifilters "k8s.io/apiserver/pkg/endpoints/filters"
	"k8s.io/klog/v2"

	"github.com/quartermaster-dev/quartermaster/pkg/healthz"
)

// InsecureConfig configures the plain HTTP server for health checks.
type InsecureConfig struct {
	BindAddress net.IP
	Port        int
	Metrics     bool
}

// AddFlags adds the flags to fs.
func (c *InsecureConfig) AddFlags(fs *pflag.FlagSet) {
	fs.IPVar(&c.BindAddress, "insecure-bind-address", c.BindAddress,
		"The address of the plain HTTP server, which has no authentication: /healthz, /livez and /readyz.")
	fs.IntVar(&c.Port, "insecure-port", c.Port, "The port of the plain HTTP server; 0 switches it off.")
	fs.BoolVar(&c.Metrics, "insecure-metrics", c.Metrics, "Serve /metrics on --insecure-port.")
}

// Validate returns all problems, joined; each names its flag.
func (c *InsecureConfig) Validate(secure SecureConfig) error {
	var errs []error
	if c.Port < 0 || c.Port > 65535 {
		errs = append(errs, fmt.Errorf("--insecure-port: must be 0 to 65535, got %d", c.Port))
	}
	if c.Port != 0 && c.Port == secure.BindPort && c.BindAddress.Equal(secure.BindAddress) {
		errs = append(errs, fmt.Errorf("--insecure-port: must not be the --secure-port, got %d for both", c.Port))
	}
	return errors.Join(errs...)
}

// Health are the handlers of the three health paths. Both servers serve them to everyone, without asking
// another system.
type Health struct {
	Healthz, Livez, Readyz *healthz.Handler
}

func (h Health) install(mux *http.ServeMux) {
	for path, handler := range map[string]http.Handler{"/healthz": h.Healthz, "/livez": h.Livez, "/readyz": h.Readyz} {
		mux.Handle(path, handler)
		mux.Handle(path+"/", handler)
	}
}

// Pages are what the servers serve.
type Pages struct {
	Health Health
	// Metrics is served on the insecure port if --insecure-metrics says so.
	Metrics http.Handler
	// Protected is served on the secure port, to callers whom the API server permits the path.
	Protected http.Handler
	// Open are the handlers of further paths of the secure port, for everyone.
	Open map[string]http.Handler
}

// Servers are the secure and the insecure HTTP server, and the goroutines that keep certificates
// and CAs up to date.
type Servers struct {
	logger klog.Logger
	pages  Pages
	all    []*http.Server
	wg     sync.WaitGroup
	cancel context.CancelFunc
}

// Start starts both servers. Both serve health checks. r decides who may see protected pages; it is nil
// without a secure port. Start returns an error with the flag's name if a port or a certificate cannot be
// used.
func Start(ctx context.Context, insecure InsecureConfig, secure SecureConfig, r *Reviewer, pages Pages) (*Servers, error) {
	ctx, cancel := context.WithCancel(ctx)
	s := &Servers{logger: klog.FromContext(ctx), pages: pages, cancel: cancel}
	err := s.startInsecure(ctx, insecure)
	if err == nil {
		err = s.startSecure(ctx, secure, r)
	}
	if err != nil {
		s.Stop()
		return nil, err
	}
	return s, nil
}

func (s *Servers) startInsecure(ctx context.Context, cfg InsecureConfig) error {
	if cfg.Port == 0 {
		return nil
	}
	mux := http.NewServeMux()
	s.pages.Health.install(mux)
	if cfg.Metrics {
		mux.Handle("/metrics", s.pages.Metrics)
	}
	if err := s.serve(ctx, cfg.BindAddress, cfg.Port, mux, nil); err != nil {
		return fmt.Errorf("--insecure-port: %w", err)
	}
	return nil
}

func (s *Servers) startSecure(ctx context.Context, cfg SecureConfig, r *Reviewer) error {
	if cfg.BindPort == 0 {
		return nil
	}
	config, err := cfg.serve(ctx, r.clientCA)
	if err != nil {
		return err
	}
	s.wg.Go(func() { r.run(ctx) })
	mux := http.NewServeMux()
	s.pages.Health.install(mux)
	mux.Handle("/", r.protect(s.pages.Protected))
	for path, handler := range s.pages.Open {
		mux.Handle(path, handler)
	}
	if err := s.serve(ctx, cfg.BindAddress, cfg.BindPort, genericapifilters.WithCacheControl(mux), config); err != nil {
		return fmt.Errorf("--secure-port: %w", err)
	}
	return nil
}

// serve starts to listen and returns. It serves until Stop is called. Stop ends ctx, so that no request goes
// on waiting for a review or a profile.
func (s *Servers) serve(ctx context.Context, address net.IP, port int, handler http.Handler, config *tls.Config) error {
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
		ErrorLog:          ErrorLog(s.logger),
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

// Stop closes the listeners and waits at most 5 seconds for the requests in flight.
func (s *Servers) Stop() {
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

// ErrorLog returns the logger of a net/http server. It logs failed TLS handshakes at level 5 only, since
// every port scan and TCP probe causes one.
func ErrorLog(logger klog.Logger) *log.Logger { return log.New(serverLog{logger}, "", 0) }

type serverLog struct{ logger klog.Logger }

func (l serverLog) Write(text []byte) (int, error) {
	level := 0
	if bytes.Contains(text, []byte("TLS handshake error")) {
		level = 5
	}
	l.logger.V(level).Info("HTTP server reported a problem", "problem", strings.TrimSpace(string(text)))
	return len(text), nil
}
