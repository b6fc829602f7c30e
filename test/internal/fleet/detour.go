// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"encoding/json"
	"io"
	"net"
	"sync"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/quartermaster-dev/quartermaster/pkg/election/protocol"
)

// Detour is a way from standbys to the leader that can be cut. The Lease leads there.
type Detour struct {
	net.Listener
	mu    sync.Mutex // held while nothing passes
	conns []*net.TCPConn
}

// NewDetour leads standbys to the present leader by a detour.
func (f *Fleet) NewDetour(ctx context.Context, t *testing.T) *Detour {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	d := &Detour{Listener: listener}
	t.Cleanup(func() { _ = listener.Close() })
	var note map[string]any
	Eventually(ctx, t, func() error {
		return json.Unmarshal([]byte(f.Lease(ctx, t).Annotations[protocol.ProcessAnnotation]), &note)
	})
	leader := note["address"].(string)
	go d.serve(leader)
	note["address"] = listener.Addr().String()
	value, err := json.Marshal(note)
	if err != nil {
		t.Fatal(err)
	}
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"annotations": map[string]string{protocol.ProcessAnnotation: string(value)}}})
	if err != nil {
		t.Fatal(err)
	}
	_, err = f.Admin.CoordinationV1().Leases(metav1.NamespaceSystem).Patch(ctx, LeaseName, types.MergePatchType, patch, metav1.PatchOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func (d *Detour) serve(leader string) {
	for {
		in, err := d.Accept()
		if err != nil {
			return
		}
		out, err := net.Dial("tcp", leader)
		if err != nil {
			_ = in.Close()
			return
		}
		d.mu.Lock()
		d.conns = append(d.conns, in.(*net.TCPConn))
		d.mu.Unlock()
		go d.pass(out, in)
		go d.pass(in, out)
	}
}

func (d *Detour) pass(to io.WriteCloser, from io.ReadCloser) {
	buf := make([]byte, 4096)
	for {
		n, err := from.Read(buf)
		d.mu.Lock()
		d.mu.Unlock() //nolint:staticcheck // it waits while nothing passes
		if err == nil {
			_, err = to.Write(buf[:n])
		}
		if err != nil {
			_ = to.Close()
			_ = from.Close()
			return
		}
	}
}

// Stall lets nothing pass any more.
func (d *Detour) Stall() { d.mu.Lock() }

// Reset ends the connections like a firewall, and refuses others.
func (d *Detour) Reset() { d.end(func(conn *net.TCPConn) { _ = conn.SetLinger(0) }) }

// CloseCleanly ends the connections as the kernel does for a process that ends, and refuses others.
func (d *Detour) CloseCleanly() { d.end(func(*net.TCPConn) {}) }

func (d *Detour) end(prepare func(*net.TCPConn)) {
	_ = d.Close()
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, conn := range d.conns {
		prepare(conn)
		_ = conn.Close()
	}
}
