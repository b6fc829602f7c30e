// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package faultproxy

import (
	"net"
	"sync"
)

// Mode is the state of the network between the clients and the proxy.
type Mode int

const (
	// Connected is the initial state.
	Connected Mode = iota
	// Hang passes no byte, as if packets were lost: connections stay open; new ones are accepted
	// and then silent.
	Hang
	// Reset resets open connections at once, and new ones as they arrive.
	Reset
)

// network is the proxy's listener. Its connections obey the mode.
type network struct {
	net.Listener

	mu    sync.Mutex
	mode  Mode
	open  chan struct{} // closed unless the mode is Hang
	conns map[*conn]struct{}
}

func newNetwork(l net.Listener) *network {
	n := &network{Listener: l, open: make(chan struct{}), conns: map[*conn]struct{}{}}
	close(n.open)
	return n
}

func (n *network) setMode(mode Mode) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.mode != Hang && mode == Hang {
		n.open = make(chan struct{})
	}
	if n.mode == Hang && mode != Hang {
		close(n.open)
	}
	n.mode = mode
	if mode == Reset {
		for c := range n.conns {
			c.reset()
		}
	}
}

func (n *network) close() {
	n.setMode(Reset) // ends the connections that hang
}

func (n *network) gate() <-chan struct{} {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.open
}

func (n *network) Accept() (net.Conn, error) {
	for {
		raw, err := n.Listener.Accept()
		if err != nil {
			return nil, err
		}
		c := &conn{Conn: raw, net: n, closed: make(chan struct{})}
		n.mu.Lock()
		refused := n.mode == Reset
		if !refused {
			n.conns[c] = struct{}{}
		}
		n.mu.Unlock()
		if !refused {
			return c, nil
		}
		c.reset()
	}
}

// conn passes bytes as its network's mode allows.
type conn struct {
	net.Conn
	net *network

	closing sync.Once
	closed  chan struct{}
}

// Read also waits after reading: what arrives during a partition is delivered after its end.
func (c *conn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	c.waitUntilPassable()
	return n, err
}

func (c *conn) Write(b []byte) (int, error) {
	c.waitUntilPassable()
	return c.Conn.Write(b)
}

// waitUntilPassable waits until the network is not hanging or the connection is closed.
func (c *conn) waitUntilPassable() {
	for {
		gate := c.net.gate()
		select {
		case <-gate:
			if gate == c.net.gate() { // no new partition began meanwhile
				return
			}
		case <-c.closed:
			return
		}
	}
}

func (c *conn) Close() error {
	c.closing.Do(func() { close(c.closed) })
	c.net.mu.Lock()
	delete(c.net.conns, c)
	c.net.mu.Unlock()
	return c.Conn.Close()
}

// reset makes the peer see an error at once instead of an orderly end. It does not change the set
// of connections: its caller may hold the lock, and the server closes the connection when it
// notices.
func (c *conn) reset() {
	if tcp, ok := c.Conn.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0)
	}
	c.closing.Do(func() { close(c.closed) })
	_ = c.Conn.Close()
}
