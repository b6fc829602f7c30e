// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package witness

import (
	"context"
	"crypto/tls"
	"flag"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/pkg/election/protocol"
)

// TestMain runs more tests at a time than there are processors: they wait most of the time.
func TestMain(m *testing.M) {
	if err := flag.Set("test.parallel", "16"); err != nil {
		panic(err)
	}
	goleak.VerifyTestMain(m)
}

// leader is a process that serves its witness as a manager does.
type leader struct {
	*Witness
	t        *testing.T
	listener *recorder
	server   *http.Server
	asked    chan struct{} // receives for each request
	stopAll  context.CancelFunc
	done     chan struct{}
}

// recorder remembers the connections, to close them as the kernel does.
type recorder struct {
	net.Listener
	mu    sync.Mutex
	conns []*net.TCPConn

	accepted chan struct{}
}

func (r *recorder) Accept() (net.Conn, error) {
	conn, err := r.Listener.Accept()
	if err == nil {
		r.mu.Lock()
		r.conns = append(r.conns, conn.(*net.TCPConn))
		r.mu.Unlock()
		r.accepted <- struct{}{}
	}
	return conn, err
}

// newLeader starts a process at the address; port 0 is any.
func newLeader(t *testing.T, address string) *leader {
	t.Helper()
	listener, err := net.Listen("tcp", address)
	assert.NoError(t, err)
	w := New(netip.MustParseAddrPort(listener.Addr().String()), fmt.Sprintf("pod_%d", count.Add(1)))
	ctx, stop := context.WithCancel(t.Context())
	mux := http.NewServeMux()
	asked := make(chan struct{}, 100)
	mux.HandleFunc(Path, func(resp http.ResponseWriter, req *http.Request) {
		asked <- struct{}{}
		w.ServeHTTP(resp, req)
	})
	l := &leader{Witness: w, asked: asked, t: t, listener: &recorder{Listener: listener, accepted: make(chan struct{}, 100)}, stopAll: stop, done: make(chan struct{}),
		server: &http.Server{Handler: mux, TLSConfig: serverTLS().Clone(), BaseContext: func(net.Listener) context.Context { return ctx }}}
	go func() {
		defer close(l.done)
		_ = l.server.ServeTLS(l.listener, "", "") // until it is closed
	}()
	t.Cleanup(func() {
		stop()
		_ = l.server.Close()
		<-l.done
	})
	return l
}

// count gives each process an identity of its own.
var count atomic.Int64

// serverTLS returns the configuration of a server whose certificate nobody verifies.
var serverTLS = sync.OnceValue(func() *tls.Config {
	server := httptest.NewTLSServer(http.NotFoundHandler())
	server.Close()
	return server.TLS
})

// process returns how others look at the leader.
func (l *leader) process() protocol.LeaderProcess {
	return protocol.LeaderProcess{Holder: l.identity, Address: l.Address()}
}

// die closes the sockets as the kernel does when a process is killed.
func (l *leader) die() {
	_ = l.listener.Close()
	l.hangUp(func(conn *net.TCPConn) { _ = conn.Close() })
}

func (l *leader) hangUp(end func(*net.TCPConn)) {
	l.listener.mu.Lock()
	defer l.listener.mu.Unlock()
	for _, conn := range l.listener.conns {
		end(conn)
	}
	l.listener.conns = nil
}

func reset(conn *net.TCPConn) {
	_ = conn.SetLinger(0)
	_ = conn.Close()
}

// standby watches a leader.
type standby struct {
	t    *testing.T
	seen chan protocol.LeaderState
}

func startStandby(t *testing.T, process protocol.LeaderProcess) *standby {
	t.Helper()
	own := New(netip.MustParseAddrPort("127.0.0.1:2"), "standby_1")
	s := &standby{t: t, seen: make(chan protocol.LeaderState, 100)}
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		own.Watch(ctx, process, func(state protocol.LeaderState) { s.seen <- state })
	}()
	t.Cleanup(func() {
		stop()
		<-done
	})
	return s
}

func (s *standby) expect(want protocol.LeaderState) {
	s.t.Helper()
	select {
	case got := <-s.seen:
		if got != want {
			s.t.Fatalf("sees %s, want %s", got, want)
		}
	case <-time.After(time.Minute):
		s.t.Fatalf("does not see %s", want)
	}
}

// expectNothing expects that nothing new is seen for d.
func (s *standby) expectNothing(d time.Duration) {
	s.t.Helper()
	select {
	case got := <-s.seen:
		s.t.Errorf("sees %s", got)
	case <-time.After(d):
	}
}

func TestOnlyAKilledProcessIsGone(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		end  func(l *leader)
		gone bool
	}{
		"a killed process is gone": {func(l *leader) { l.die() }, true},
		"a killed process whose address another process has is gone": {func(l *leader) {
			l.die()
			newLeader(l.t, l.Address())
		}, true},
		"a process whose connection is reset is not gone if another answers at its address, as a Service may": {func(l *leader) {
			_ = l.listener.Close()
			newLeader(l.t, l.Address())
			l.hangUp(reset)
		}, false},
		"a process whose connections are reset and refused, as by a firewall, is not gone": {func(l *leader) {
			_ = l.listener.Close()
			l.hangUp(reset)
		}, false},
		"a process that ends in good order is not gone": {func(l *leader) {
			_ = l.listener.Close()
			l.stopAll()
		}, false},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLeader(t, "127.0.0.1:0")
			s := startStandby(t, l.process())
			s.expect(protocol.LeaderAnswers)
			tc.end(l)
			if tc.gone {
				s.expect(protocol.LeaderGone)
			} else {
				s.expectNothing(time.Second)
			}
		})
	}
}

func TestStandbyConnectsAnewAfterAHangUp(t *testing.T) {
	t.Parallel()
	l := newLeader(t, "127.0.0.1:0")
	s := startStandby(t, l.process())
	s.expect(protocol.LeaderAnswers)
	<-l.listener.accepted
	l.hangUp(func(conn *net.TCPConn) { _ = conn.Close() })
	<-l.listener.accepted
	s.expectNothing(0)
	l.die()
	s.expect(protocol.LeaderGone)
}

// TestHungProcessIsNotGone lets nothing pass for a while, as when a process is stopped. The standby
// connects anew, so that it sees the end of the process later.
func TestHungProcessIsNotGone(t *testing.T) {
	t.Parallel()
	l := newLeader(t, "127.0.0.1:0")
	proxy, err := net.Listen("tcp", "127.0.0.1:0")
	assert.NoError(t, err)
	t.Cleanup(func() { _ = proxy.Close() })
	gate := &gate{}
	go gate.serve(proxy, l.Address())
	s := startStandby(t, protocol.LeaderProcess{Holder: l.identity, Address: proxy.Addr().String()})
	s.expect(protocol.LeaderAnswers)
	<-l.asked
	gate.mu.Lock() // nothing passes
	s.expectNothing(2 * silenceTimeout)
	gate.mu.Unlock()
	<-l.asked
	_ = proxy.Close()
	l.die()
	s.expect(protocol.LeaderGone)
}

// gate passes bytes on while nobody holds mu.
type gate struct{ mu sync.Mutex }

func (g *gate) serve(l net.Listener, to string) {
	for {
		in, err := l.Accept()
		if err != nil {
			return
		}
		out, err := net.Dial("tcp", to)
		if err != nil {
			_ = in.Close()
			continue
		}
		go g.pass(in, out)
		go g.pass(out, in)
	}
}

func (g *gate) pass(from, to net.Conn) {
	buf := make([]byte, 4096)
	for {
		n, err := from.Read(buf)
		g.mu.Lock()
		g.mu.Unlock() //nolint:staticcheck // it waits while nothing passes
		if err != nil {
			_ = to.Close()
			return
		}
		if _, err := to.Write(buf[:n]); err != nil {
			_ = from.Close()
			return
		}
	}
}

func TestProcessThatNeverAnswersIsUnreachable(t *testing.T) {
	t.Parallel()
	tests := map[string]func(t *testing.T) protocol.LeaderProcess{
		"nobody listens": func(*testing.T) protocol.LeaderProcess {
			return protocol.LeaderProcess{Address: "127.0.0.1:1"}
		},
		"another process has answered from the beginning": func(t *testing.T) protocol.LeaderProcess {
			t.Helper()
			return protocol.LeaderProcess{Holder: "other_1", Address: newLeader(t, "127.0.0.1:0").Address()}
		},
		"the process's address has a name": func(t *testing.T) protocol.LeaderProcess {
			t.Helper()
			process := newLeader(t, "127.0.0.1:0").process()
			process.Address = strings.Replace(process.Address, "127.0.0.1", "localhost", 1)
			return process
		},
		"the process serves too many others": func(t *testing.T) protocol.LeaderProcess {
			t.Helper()
			l := newLeader(t, "127.0.0.1:0")
			for range maxStandbys {
				l.slots <- struct{}{}
			}
			return l.process()
		},
	}
	for name, process := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			startStandby(t, process(t)).expect(protocol.LeaderUnreachable)
		})
	}
}

func TestEarlierProcessOfOnesOwnPodIsGone(t *testing.T) {
	t.Parallel()
	w := New(netip.MustParseAddrPort("127.0.0.1:1"), "a-0_2")
	for name, tc := range map[string]struct {
		process protocol.LeaderProcess
		want    protocol.LeaderState
	}{
		"the last life of the same Pod has ended": {protocol.LeaderProcess{Holder: "a-0_1", Address: "127.0.0.1:1"}, protocol.LeaderGone},
		"another Pod with this address may live":  {protocol.LeaderProcess{Holder: "a-1_1", Address: "127.0.0.1:1"}, protocol.LeaderUnreachable},
		"another process of the Pod may live":     {protocol.LeaderProcess{Holder: "a-0_1", Address: "127.0.0.1:2"}, protocol.LeaderUnreachable},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx, stop := context.WithCancel(t.Context())
			defer stop()
			w.Watch(ctx, tc.process, func(got protocol.LeaderState) {
				stop()
				if got != tc.want {
					t.Errorf("got %s", got)
				}
			})
		})
	}
}
