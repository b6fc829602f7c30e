// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package witness

import (
	"context"
	"crypto/tls"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/quartermaster-dev/quartermaster/pkg/election/protocol"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// leader is a process that serves its witness as a manager does.
type leader struct {
	*Witness
	t        *testing.T
	listener *recorder
	server   *http.Server
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
	if err != nil {
		t.Fatal(err)
	}
	w, err := New(netip.MustParseAddrPort(listener.Addr().String()), "")
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	mux := http.NewServeMux()
	mux.Handle(Path, w)
	config := &tls.Config{}
	w.ServeTLS(config)
	l := &leader{Witness: w, t: t, listener: &recorder{Listener: listener, accepted: make(chan struct{}, 100)}, stopAll: stop, done: make(chan struct{}),
		server: &http.Server{Handler: mux, TLSConfig: config, BaseContext: func(net.Listener) context.Context { return ctx }}}
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

func watch(t *testing.T, process protocol.Process) *standby {
	t.Helper()
	own, err := New(netip.MustParseAddrPort("127.0.0.1:1"), "")
	if err != nil {
		t.Fatal(err)
	}
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

func TestWatch(t *testing.T) {
	tests := map[string]struct {
		end  func(l *leader)
		want []protocol.LeaderState
	}{
		"a killed process is gone": {
			func(l *leader) { l.die() },
			[]protocol.LeaderState{protocol.LeaderGone}},
		"one that was killed and whose address another has is gone": {
			func(l *leader) {
				l.die()
				newLeader(l.t, l.Process().Address)
			},
			[]protocol.LeaderState{protocol.LeaderGone}},
		"one whose connection is reset and whose address another answers, as a Service may, is silent": {
			func(l *leader) {
				_ = l.listener.Close()
				newLeader(l.t, l.Process().Address)
				l.hangUp(reset)
			},
			[]protocol.LeaderState{protocol.LeaderSilent}},
		"one whose connections are reset and refused, as by a firewall, is silent": {
			func(l *leader) {
				_ = l.listener.Close()
				l.hangUp(reset)
			},
			[]protocol.LeaderState{protocol.LeaderSilent}},
		"one that ends in good order is silent": {
			func(l *leader) {
				_ = l.listener.Close()
				l.stopAll()
			},
			[]protocol.LeaderState{protocol.LeaderSilent}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLeader(t, "127.0.0.1:0")
			s := watch(t, l.Process())
			s.expect(protocol.LeaderAnswers)
			test.end(l)
			for _, want := range test.want {
				s.expect(want)
			}
		})
	}
}

func TestWatchAgain(t *testing.T) {
	t.Parallel()
	l := newLeader(t, "127.0.0.1:0")
	s := watch(t, l.Process())
	s.expect(protocol.LeaderAnswers)
	<-l.listener.accepted
	l.hangUp(func(conn *net.TCPConn) { _ = conn.Close() })
	<-l.listener.accepted
	select {
	case got := <-s.seen:
		t.Errorf("a connection that broke and was made again shows %s", got)
	default:
	}
	l.die()
	s.expect(protocol.LeaderGone)
}

func TestWatchOneThatServesTooManyOthers(t *testing.T) {
	t.Parallel()
	l := newLeader(t, "127.0.0.1:0")
	s := watch(t, l.Process())
	s.expect(protocol.LeaderAnswers)
	for range most - 1 { // and the standby
		l.served <- struct{}{}
	}
	l.hangUp(reset)
	l.served <- struct{}{} // as soon as the standby's connection has ended
	select {
	case got := <-s.seen:
		t.Errorf("a process that refuses to serve one more shows %s", got)
	case <-time.After(2 * silence):
	}
}

// TestWatchSilent keeps the connection open, as that of a stopped process is.
func TestWatchSilent(t *testing.T) {
	t.Parallel()
	l := newLeader(t, "127.0.0.1:0")
	proxy, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = proxy.Close() })
	gate := &gate{}
	go gate.serve(proxy, l.Process().Address)
	process := l.Process()
	process.Address = proxy.Addr().String()
	s := watch(t, process)
	s.expect(protocol.LeaderAnswers)
	gate.mu.Lock() // nothing passes
	s.expect(protocol.LeaderSilent)
	gate.mu.Unlock()
	s.expect(protocol.LeaderAnswers)
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

func TestWatchUnreachable(t *testing.T) {
	t.Parallel()
	tests := map[string]func(t *testing.T) protocol.Process{
		"nobody listens": func(*testing.T) protocol.Process {
			return protocol.Process{Address: "127.0.0.1:1", Certificate: "x"}
		},
		"another process has answered from the beginning": func(t *testing.T) protocol.Process {
			t.Helper()
			process := newLeader(t, "127.0.0.1:0").Process()
			process.Certificate = "x"
			return process
		},
		"it serves too many others": func(t *testing.T) protocol.Process {
			t.Helper()
			l := newLeader(t, "127.0.0.1:0")
			for range most {
				l.served <- struct{}{}
			}
			return l.Process()
		},
	}
	for name, process := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			watch(t, process(t)).expect(protocol.LeaderUnreachable)
		})
	}
}

func TestWatchPredecessor(t *testing.T) {
	tests := map[string]struct {
		own, before protocol.Process
		want        bool
	}{
		"the last life of the same Pod has ended": {
			protocol.Process{Address: "10.0.0.1:10357", PodUID: "a", Certificate: "2"},
			protocol.Process{Address: "10.0.0.1:10357", PodUID: "a", Certificate: "1"}, true},
		"also if the Pod has another address since its node was started again": {
			protocol.Process{Address: "10.0.0.2:10357", PodUID: "a", Certificate: "2"},
			protocol.Process{Address: "10.0.0.1:10357", PodUID: "a", Certificate: "1"}, true},
		"another Pod of the same name may live": {
			protocol.Process{Address: "10.0.0.1:10357", PodUID: "b", Certificate: "2"},
			protocol.Process{Address: "10.0.0.1:10357", PodUID: "a", Certificate: "1"}, false},
		"a Pod without a known UID may be another": {
			protocol.Process{Address: "10.0.0.1:10357", Certificate: "2"},
			protocol.Process{Address: "10.0.0.1:10357", Certificate: "1"}, false},
		"another container of the Pod may live": {
			protocol.Process{Address: "10.0.0.1:10358", PodUID: "a", Certificate: "2"},
			protocol.Process{Address: "10.0.0.1:10357", PodUID: "a", Certificate: "1"}, false},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			if got := (&Witness{process: test.own}).succeeds(test.before); got != test.want {
				t.Errorf("got %t", got)
			}
		})
	}
}

// TestServe checks what others than standbys see.
func TestServe(t *testing.T) {
	l := newLeader(t, "127.0.0.1:0")
	_, err := tls.Dial("tcp", l.Process().Address, &tls.Config{InsecureSkipVerify: true, ServerName: "example.org"})
	if err == nil {
		t.Error("the certificate of the witness is shown to others")
	}
	conn, err := tls.Dial("tcp", l.Process().Address, &tls.Config{InsecureSkipVerify: true, ServerName: serverName})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if got := hash(conn.ConnectionState().PeerCertificates[0].Raw); got != l.Process().Certificate {
		t.Errorf("got certificate %s, want %s", got, l.Process().Certificate)
	}
}
