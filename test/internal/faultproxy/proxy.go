// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package faultproxy is a reverse proxy on loopback in front of an API server. It injects faults:
// into requests by rules, and into the network by Partition.
//
//	p, err := faultproxy.Start(c.AdminConfig())
//	defer p.Close()
//	err = replica.Via(p.URL(), p.CA())
//	rule := p.Add(faultproxy.Rule{
//		Match: faultproxy.Path("PUT", "/leases/"), Status: 429, RetryAfter: time.Second})
//	err = rule.WaitHits(ctx, 1)
//	rule.Remove()
//	p.Partition(faultproxy.Hang)
//	p.Heal()
//
// It terminates TLS with a CA of its own and passes on bearer tokens. It cannot pass on client
// certificates.
package faultproxy

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/cert"
)

// Rule says what happens to a request. Its fields apply in their order.
type Rule struct {
	// Match selects requests; nil selects all. It is called concurrently.
	Match func(*http.Request) bool
	// Times is the number of requests after which the rule ends; 0 means never.
	Times int
	// Delay passes before the request is forwarded.
	Delay time.Duration
	// Hold holds the request until the channel is closed or its client disconnects.
	Hold <-chan struct{}
	// Status, such as 429 or 500, is returned as a Kubernetes Status and nothing is forwarded; 0
	// forwards the request.
	Status int
	// RetryAfter is sent with Status, in whole seconds; 0 means no header.
	RetryAfter time.Duration
	// DropResponse forwards the request and then breaks its stream instead of responding: the
	// server has executed the request, but the client does not know.
	DropResponse bool
	// DropBookmarks forwards the request, which must be a watch, and removes the bookmarks from the
	// response.
	DropBookmarks bool
}

// Request is what the proxy remembers of each request, in the order of arrival.
type Request struct {
	Time      time.Time
	Method    string
	Path      string
	Query     string
	UserAgent string
}

// Path selects requests with the method ("" for any) whose path contains text.
func Path(method, text string) func(*http.Request) bool {
	return func(r *http.Request) bool {
		return (method == "" || r.Method == method) && strings.Contains(r.URL.Path, text)
	}
}

// Proxy is a running proxy. Its methods may be called from several goroutines.
type Proxy struct {
	ca       []byte
	net      *network
	server   *http.Server
	upstream *http.Transport
	forward  *httputil.ReverseProxy
	served   chan error
	closing  sync.Once
	closeErr error

	mu       sync.Mutex
	rules    []*ActiveRule
	requests []Request
}

// Start starts a proxy in front of the server of config, from which it takes only the URL and the
// CA.
func Start(config *rest.Config) (*Proxy, error) {
	target, err := url.Parse(config.Host)
	if err != nil {
		return nil, fmt.Errorf("parse the server's URL: %w", err)
	}
	roots, err := cert.NewPoolFromBytes(config.CAData)
	if err != nil {
		return nil, fmt.Errorf("read the server's CA: %w", err)
	}
	crt, key, err := cert.GenerateSelfSignedCertKey("127.0.0.1", []net.IP{net.IPv4(127, 0, 0, 1)}, nil)
	if err != nil {
		return nil, fmt.Errorf("make the proxy's certificate: %w", err)
	}
	pair, err := tls.X509KeyPair(crt, key)
	if err != nil {
		return nil, err
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	p := &Proxy{
		ca:       crt,
		net:      newNetwork(listener),
		upstream: newUpstream(roots),
		served:   make(chan error, 1),
	}
	quiet := log.New(io.Discard, "", 0) // broken connections are its purpose
	p.forward = &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			r.SetURL(target)
			r.Out.Host = target.Host
		},
		Transport:    p.upstream,
		ErrorLog:     quiet,
		ErrorHandler: func(http.ResponseWriter, *http.Request, error) { panic(http.ErrAbortHandler) },
	}
	p.server = &http.Server{
		Handler:           http.HandlerFunc(p.serve),
		TLSConfig:         &tls.Config{Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS12},
		ReadHeaderTimeout: time.Minute,
		ErrorLog:          quiet,
	}
	go func() { p.served <- p.server.ServeTLS(p.net, "", "") }()
	return p, nil
}

func newUpstream(roots *x509.CertPool) *http.Transport {
	return &http.Transport{
		TLSClientConfig:   &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12},
		ForceAttemptHTTP2: true,
		// The proxy must not change a body.
		DisableCompression: true,
	}
}

// Close ends the proxy and every connection through it. Further calls return the first one's
// result.
func (p *Proxy) Close() error {
	p.closing.Do(func() {
		p.net.close()
		p.closeErr = p.server.Close()
		if serveErr := <-p.served; !errors.Is(serveErr, http.ErrServerClosed) {
			p.closeErr = errors.Join(p.closeErr, serveErr)
		}
		p.upstream.CloseIdleConnections()
	})
	return p.closeErr
}

// URL returns the proxy's URL, for a kubeconfig.
func (p *Proxy) URL() string { return "https://" + p.net.Addr().String() }

// CA returns the certificate (PEM) with which a client trusts the proxy.
func (p *Proxy) CA() []byte { return p.ca }

// Partition cuts every connection between the clients and the proxy, open ones and new ones, until
// Heal.
func (p *Proxy) Partition(mode Mode) { p.net.setMode(mode) }

// Heal ends a partition. Connections that hung continue.
func (p *Proxy) Heal() { p.net.setMode(Connected) }

// Requests returns the requests so far, oldest first.
func (p *Proxy) Requests() []Request {
	p.mu.Lock()
	defer p.mu.Unlock()
	return append([]Request(nil), p.requests...)
}

// Count returns how many of the requests so far match.
func (p *Proxy) Count(match func(Request) bool) int {
	n := 0
	for _, r := range p.Requests() {
		if match(r) {
			n++
		}
	}
	return n
}

func (p *Proxy) serve(w http.ResponseWriter, r *http.Request) {
	p.mu.Lock()
	p.requests = append(p.requests, Request{time.Now(), r.Method, r.URL.Path, r.URL.RawQuery, r.UserAgent()})
	p.mu.Unlock()

	drop, bookmarks := false, true
	for _, rule := range p.applyingRules(r) {
		if !rule.waitAsRuled(r.Context()) {
			panic(http.ErrAbortHandler) // the client has disconnected
		}
		if rule.Status != 0 {
			writeStatus(w, rule.Status, rule.RetryAfter)
			return
		}
		drop = drop || rule.DropResponse
		bookmarks = bookmarks && !rule.DropBookmarks
	}
	if !bookmarks {
		w = &bookmarkFilter{ResponseWriter: w}
	}
	if !drop {
		p.forward.ServeHTTP(w, r)
		return
	}
	// The server must finish even if the client gives up meanwhile.
	p.forward.ServeHTTP(discard{header: http.Header{}}, r.WithContext(context.WithoutCancel(r.Context())))
	panic(http.ErrAbortHandler)
}

// writeStatus writes a Status like the API server.
func writeStatus(w http.ResponseWriter, status int, retryAfter time.Duration) {
	w.Header().Set("Content-Type", "application/json")
	if retryAfter > 0 {
		w.Header().Set("Retry-After", fmt.Sprintf("%.0f", retryAfter.Seconds()))
	}
	w.WriteHeader(status)
	reason := map[int]string{http.StatusTooManyRequests: "TooManyRequests", http.StatusInternalServerError: "InternalError"}[status]
	fmt.Fprintf(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","message":"by a rule of the test","reason":%q,"code":%d}`, reason, status)
}

// discard drops a response that nobody reads.
type discard struct{ header http.Header }

func (d discard) Header() http.Header         { return d.header }
func (d discard) Write(b []byte) (int, error) { return len(b), nil }
func (d discard) WriteHeader(int)             {}
