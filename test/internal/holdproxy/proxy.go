// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package holdproxy stands between a kube-apiserver and etcd, both on unix sockets without TLS, and
// holds the connections of chosen resources.
//
//	p, err := holdproxy.Start("/dir/localhost:3", "/dir/localhost:1")
//	defer p.Close()
//	p.Hold("namespaces", "leases")
//	p.Release("namespaces", "leases")
//
// kube-apiserver has one connection for each resource. The first key on the connection,
// /registry/RESOURCE..., names the resource, since gRPC sends keys in plain text. What is sent on a held
// connection, in either direction, arrives after the release. So the API server's cache of a held resource
// stands still, and its reads and writes of that resource wait; all other resources work.
package holdproxy

import (
	"errors"
	"fmt"
	"net"
	"regexp"
	"slices"
	"sync"
)

// Everything holds all connections, new ones too: a partition between the API server and etcd.
const Everything = "*"

// key finds a key of kube-apiserver. Not all have a slash behind the resource, and what follows is
// binary.
var key = regexp.MustCompile(`/registry/([a-z0-9.-]+)[^a-z0-9.-]`)

// Proxy is a running proxy. Its methods may be called from several goroutines.
type Proxy struct {
	listener net.Listener
	etcd     string
	served   sync.WaitGroup

	mu      sync.Mutex
	changed *sync.Cond // what follows has changed
	held    map[string]bool
	open    map[*link]struct{}
	closed  bool
}

// link is a connection of the API server and the one to etcd that belongs to it.
type link struct {
	api, etcd net.Conn
	resource  string // "" until it is known; guarded by Proxy.mu
	unparsed  []byte // of what the API server has sent, as long as the resource is unknown
}

// Start starts a proxy that listens on one socket and connects to the socket of etcd.
func Start(socket, etcd string) (*Proxy, error) {
	listener, err := net.Listen("unix", socket)
	if err != nil {
		return nil, fmt.Errorf("start the proxy in front of etcd: %w", err)
	}
	p := &Proxy{listener: listener, etcd: etcd, held: map[string]bool{}, open: map[*link]struct{}{}}
	p.changed = sync.NewCond(&p.mu)
	p.served.Go(p.serve)
	return p, nil
}

// Close ends the proxy and all connections.
func (p *Proxy) Close() error {
	p.mu.Lock()
	p.closed = true
	err := p.listener.Close()
	for l := range p.open {
		err = errors.Join(err, l.close())
	}
	p.changed.Broadcast()
	p.mu.Unlock()
	p.served.Wait()
	return err
}

// Hold holds the connections of the resources, such as "leases", until Release.
func (p *Proxy) Hold(resources ...string) { p.setHeld(true, resources) }

// Release passes on what the connections were sent meanwhile, and from now on.
func (p *Proxy) Release(resources ...string) { p.setHeld(false, resources) }

func (p *Proxy) setHeld(held bool, resources []string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, r := range resources {
		p.held[r] = held
	}
	p.changed.Broadcast()
}

func (p *Proxy) serve() {
	for {
		api, err := p.listener.Accept()
		if err != nil {
			return // it was closed
		}
		etcd, err := net.Dial("unix", p.etcd)
		if err != nil {
			_ = api.Close() // the API server tries again
			continue
		}
		l := &link{api: api, etcd: etcd}
		p.mu.Lock()
		p.open[l] = struct{}{}
		if p.closed {
			_ = l.close()
		}
		p.mu.Unlock()
		p.served.Go(func() { p.copy(l, etcd, api) })
		p.served.Go(func() { p.copy(l, api, etcd) })
	}
}

// copy passes on one direction until the connection ends.
func (p *Proxy) copy(l *link, target, source net.Conn) {
	defer func() {
		_ = l.close()
		p.mu.Lock()
		defer p.mu.Unlock()
		delete(p.open, l)
	}()
	buffer := make([]byte, 32<<10)
	for {
		n, err := source.Read(buffer)
		if n > 0 {
			p.waitUntilReleased(l, buffer[:n], source == l.api)
			if _, err := target.Write(buffer[:n]); err != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}

// waitUntilReleased returns when the bytes may be passed on. The resource is looked for before, so that the
// request that names it is held too.
func (p *Proxy) waitUntilReleased(l *link, sent []byte, fromAPIServer bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if fromAPIServer && l.resource == "" {
		l.unparsed = slices.Concat(l.unparsed, sent)
		if l.resource = findResource(l.unparsed); l.resource != "" {
			l.unparsed = nil
		}
	}
	for !p.closed && (p.held[Everything] || p.held[l.resource]) {
		p.changed.Wait()
	}
}

// findResource returns the resource of the first key, or "" if there is no complete one.
func findResource(sent []byte) string {
	found := key.FindSubmatch(sent)
	if found == nil {
		return ""
	}
	return string(found[1])
}

func (l *link) close() error {
	return errors.Join(ignoreClosed(l.api.Close()), ignoreClosed(l.etcd.Close()))
}

func ignoreClosed(err error) error {
	if errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}
