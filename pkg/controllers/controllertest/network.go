// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package controllertest

import (
	"context"
	"net"
	"net/http"
	"net/url"
	"sync"

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

// config returns the configuration of clients.
func (n *network) config() *rest.Config {
	return &rest.Config{
		Host: "http://" + address{}.String(), Dial: n.dial, QPS: -1,
		Proxy: func(*http.Request) (*url.URL, error) { return nil, nil },
	}
}
