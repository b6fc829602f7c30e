// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package holdproxy

import (
	"io"
	"net"
	"path/filepath"
	"testing"
	"time"
)

// echo is an etcd that answers with what it was sent.
func echo(t *testing.T, socket string) {
	t.Helper()
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = listener.Close() })
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			go func() { _, _ = io.Copy(conn, conn); _ = conn.Close() }()
		}
	}()
}

func start(t *testing.T) (p *Proxy, dial func() net.Conn) {
	t.Helper()
	dir := t.TempDir()
	etcd, socket := filepath.Join(dir, "etcd"), filepath.Join(dir, "proxy")
	echo(t, etcd)
	p, err := Start(socket, etcd)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Close() })
	return p, func() net.Conn {
		conn, err := net.Dial("unix", socket)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = conn.Close() })
		return conn
	}
}

func send(t *testing.T, conn net.Conn, text string) {
	t.Helper()
	if _, err := io.WriteString(conn, text); err != nil {
		t.Fatal(err)
	}
}

// answered waits for the answer to what was sent.
func answered(t *testing.T, conn net.Conn, text string) {
	t.Helper()
	if err := conn.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, len(text))
	if _, err := io.ReadFull(conn, got); err != nil || string(got) != text {
		t.Fatalf("the answer is %q (%v), want %q", got, err, text)
	}
}

// silent checks that nothing arrives. Other connections have had answers, so there was time.
func silent(t *testing.T, conn net.Conn) {
	t.Helper()
	if err := conn.SetReadDeadline(time.Now().Add(20 * time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	if n, err := conn.Read(make([]byte, 1)); n > 0 || err == nil {
		t.Fatal("a held connection has had an answer")
	}
}

func TestProxyHoldsOnlySomeResources(t *testing.T) {
	p, dial := start(t)
	open, other := dial(), dial()
	send(t, open, "\x00\x12/registry/name")
	answered(t, open, "\x00\x12/registry/name")
	send(t, open, "spaces/default")
	answered(t, open, "spaces/default")
	send(t, other, "\x00\x12/registry/pods/a/b and /registry/namespaces/")
	answered(t, other, "\x00\x12/registry/pods/a/b and /registry/namespaces/")

	p.Hold("namespaces", "leases")
	opened := dial()
	send(t, open, "one")
	send(t, opened, "/registry/leases\x12\x00")
	send(t, other, "two")
	answered(t, other, "two")
	silent(t, open)
	silent(t, opened)

	p.Release("namespaces")
	answered(t, open, "one")
	silent(t, opened)
	p.Release("leases")
	answered(t, opened, "/registry/leases\x12\x00")
}
