// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package holdproxy

import (
	"io"
	"net"
	"path/filepath"
	"testing"
	"time"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
)

// startEcho is an etcd that answers with what it was sent.
func startEcho(t *testing.T, socket string) {
	t.Helper()
	listener, err := net.Listen("unix", socket)
	assert.NoError(t, err)
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

func startProxy(t *testing.T) (p *Proxy, dial func() net.Conn) {
	t.Helper()
	dir := t.TempDir()
	etcd, socket := filepath.Join(dir, "etcd"), filepath.Join(dir, "proxy")
	startEcho(t, etcd)
	p, err := Start(socket, etcd)
	assert.NoError(t, err)
	t.Cleanup(func() { _ = p.Close() })
	return p, func() net.Conn {
		conn, err := net.Dial("unix", socket)
		assert.NoError(t, err)
		t.Cleanup(func() { _ = conn.Close() })
		return conn
	}
}

func sendText(t *testing.T, conn net.Conn, text string) {
	t.Helper()
	if _, err := io.WriteString(conn, text); err != nil {
		t.Fatal(err)
	}
}

// expectEcho waits for the answer to what was sent.
func expectEcho(t *testing.T, conn net.Conn, text string) {
	t.Helper()
	assert.NoError(t, conn.SetReadDeadline(time.Now().Add(time.Minute)))
	got := make([]byte, len(text))
	if _, err := io.ReadFull(conn, got); err != nil || string(got) != text {
		t.Fatalf("the answer is %q (%v), want %q", got, err, text)
	}
}

// expectSilence checks that nothing arrives. Other connections have had answers, so there was time.
func expectSilence(t *testing.T, conn net.Conn) {
	t.Helper()
	assert.NoError(t, conn.SetReadDeadline(time.Now().Add(20*time.Millisecond)))
	if n, err := conn.Read(make([]byte, 1)); n > 0 || err == nil {
		t.Fatal("a held connection has had an answer")
	}
}

func TestProxyHoldsOnlySomeResources(t *testing.T) {
	p, dial := startProxy(t)
	open, other := dial(), dial()
	sendText(t, open, "\x00\x12/registry/name")
	expectEcho(t, open, "\x00\x12/registry/name")
	sendText(t, open, "spaces/default")
	expectEcho(t, open, "spaces/default")
	sendText(t, other, "\x00\x12/registry/pods/a/b and /registry/namespaces/")
	expectEcho(t, other, "\x00\x12/registry/pods/a/b and /registry/namespaces/")

	p.Hold("namespaces", "leases")
	opened := dial()
	sendText(t, open, "one")
	sendText(t, opened, "/registry/leases\x12\x00")
	sendText(t, other, "two")
	expectEcho(t, other, "two")
	expectSilence(t, open)
	expectSilence(t, opened)

	p.Release("namespaces")
	expectEcho(t, open, "one")
	expectSilence(t, opened)
	p.Release("leases")
	expectEcho(t, opened, "/registry/leases\x12\x00")
}
