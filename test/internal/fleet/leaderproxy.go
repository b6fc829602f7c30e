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

// LeaderProxy passes connections of standbys on to the leader, and can cut them. The Lease names its address
// as the leader's.
type LeaderProxy struct {
	net.Listener
	mu    sync.Mutex // held while nothing passes
	conns []*net.TCPConn
}

// NewLeaderProxy starts a LeaderProxy in front of the present leader.
func (f *Fleet) NewLeaderProxy(ctx context.Context, t *testing.T) *LeaderProxy {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &LeaderProxy{Listener: listener}
	t.Cleanup(func() { _ = listener.Close() })
	var process map[string]any
	Eventually(ctx, t, func() error {
		return json.Unmarshal([]byte(f.Lease(ctx, t).Annotations[protocol.ProcessAnnotation]), &process)
	})
	leader := process["address"].(string)
	go p.serve(leader)
	process["address"] = listener.Addr().String()
	value, err := json.Marshal(process)
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
	return p
}

func (p *LeaderProxy) serve(leader string) {
	for {
		client, err := p.Accept()
		if err != nil {
			return
		}
		server, err := net.Dial("tcp", leader)
		if err != nil {
			_ = client.Close()
			return
		}
		p.mu.Lock()
		p.conns = append(p.conns, client.(*net.TCPConn))
		p.mu.Unlock()
		go p.copyUntilStalled(server, client)
		go p.copyUntilStalled(client, server)
	}
}

func (p *LeaderProxy) copyUntilStalled(target io.WriteCloser, source io.ReadCloser) {
	buf := make([]byte, 4096)
	for {
		n, err := source.Read(buf)
		p.mu.Lock()
		p.mu.Unlock() //nolint:staticcheck // it waits while nothing passes
		if err == nil {
			_, err = target.Write(buf[:n])
		}
		if err != nil {
			_ = target.Close()
			_ = source.Close()
			return
		}
	}
}

// Stall lets nothing pass any more.
func (p *LeaderProxy) Stall() { p.mu.Lock() }

// Reset ends the connections like a firewall, and refuses others.
func (p *LeaderProxy) Reset() { p.closeAll(func(conn *net.TCPConn) { _ = conn.SetLinger(0) }) }

// CloseCleanly ends the connections as the kernel does for a process that ends, and refuses others.
func (p *LeaderProxy) CloseCleanly() { p.closeAll(func(*net.TCPConn) {}) }

func (p *LeaderProxy) closeAll(prepare func(*net.TCPConn)) {
	_ = p.Close()
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, conn := range p.conns {
		prepare(conn)
		_ = conn.Close()
	}
}
