// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package controllertest

import (
	"context"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"sync"
	"testing"

	"k8s.io/client-go/rest"
)

// network is a listener and the only way to it. Connections are pipes in memory: a goroutine that
// waits for one does not keep the time of a synctest bubble from passing.
type network struct {
	connections chan net.Conn
	closed      chan struct{}
	once        sync.Once
}

func newNetwork() *network {
	return &network{connections: make(chan net.Conn), closed: make(chan struct{})}
}

// Accept implements net.Listener.
func (n *network) Accept() (net.Conn, error) {
	select {
	case c := <-n.connections:
		return c, nil
	case <-n.closed:
		return nil, net.ErrClosed
	}
}

// Close implements net.Listener.
func (n *network) Close() error {
	n.once.Do(func() { close(n.closed) })
	return nil
}

// Addr implements net.Listener.
func (n *network) Addr() net.Addr { return address{} }

type address struct{}

func (address) Network() string { return "memory" }
func (address) String() string  { return "apiserver.test:80" }

// dial connects to the listener.
func (n *network) dial(ctx context.Context, _, _ string) (net.Conn, error) {
	client, server := net.Pipe()
	select {
	case n.connections <- server:
		return client, nil
	case <-n.closed:
		return nil, net.ErrClosed
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// server returns a server of this network, which is not started.
func (n *network) server(handler http.Handler) *httptest.Server {
	server := httptest.NewUnstartedServer(handler)
	server.Listener.Close()
	server.Listener = n
	return server
}

// config returns the configuration of clients.
func (n *network) config() *rest.Config {
	return &rest.Config{
		Host: "http://" + address{}.String(), Dial: n.dial, QPS: -1,
		Proxy: func(*http.Request) (*url.URL, error) { return nil, nil },
	}
}

// Serve returns a client for a controller that calls another service, such as a cloud or a registry: the
// handler answers all requests of the client, to whatever host, those to https too. A server of [httptest]
// will not do, since the clock of a bubble stands still while a goroutine waits for the real network.
// [Host.Settle] does not wait for a handler that sleeps.
func Serve(t testing.TB, handler http.Handler) *http.Client {
	t.Helper()
	requireBubble(t)
	n := newNetwork()
	server := n.server(handler)
	server.Start()
	t.Cleanup(func() {
		server.CloseClientConnections()
		server.Close()
	})
	// What DialTLSContext returns counts as encrypted already, so the service needs no certificate.
	return &http.Client{Transport: &http.Transport{DialContext: n.dial, DialTLSContext: n.dial}}
}
