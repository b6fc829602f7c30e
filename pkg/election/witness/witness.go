// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package witness looks at the leader's process on a connection to its secure port, so that a standby
// learns within milliseconds that the process has ended.
//
// Each process serves Path with a certificate that only it has and that the Lease names. It sends a
// byte each second for as long as it lives, and says so when it ends in good order. Nobody needs a
// right for that, and nobody learns anything but that the process lives.
//
// That a process has ended is certain only if its kernel has closed the connection and now refuses
// another, or if another process has its address. All else that goes wrong is silence, since networks
// lose packets and firewalls reset connections.
package witness

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/netip"
	"syscall"
	"time"

	"github.com/quartermaster-dev/quartermaster/pkg/election/protocol"
)

// Path is where the secure server serves a Witness to everybody.
const Path = "/leader-process"

const (
	// serverName is what a standby asks for in its handshake, and what selects the certificate.
	serverName = "leader-process.quartermaster.internal"

	beatPeriod = time.Second
	silence    = 3 * beatPeriod

	// most is how many standbys a process serves at a time. Others are turned away.
	most = 32

	// requestTimeout bounds each of the three parts of a request: to connect, to shake hands, and to
	// get the header of the response.
	requestTimeout = 2 * time.Second

	// A connection is tried again after redialMin, then after twice as long each time. A standby says
	// that it cannot reach the leader after unreachableAfter.
	redialMin        = 5 * time.Millisecond
	redialMax        = 15 * time.Second
	unreachableAfter = 5 * time.Second
)

// errOther is the error of a connection that another process has answered.
var errOther = errors.New("another process answers at this address")

// Witness serves standbys, and implements election.Witness for this process when it is a standby.
type Witness struct {
	process     protocol.Process
	certificate tls.Certificate
	served      chan struct{} // holds one value for each standby
}

// New returns the witness of a process that serves the address, in the Pod with that UID, which may be
// empty.
func New(address netip.AddrPort, podUID string) (*Witness, error) {
	certificate, err := newCertificate()
	if err != nil {
		return nil, fmt.Errorf("certificate for other replicas: %w", err)
	}
	return &Witness{
		process:     protocol.Process{Address: address.String(), Certificate: hash(certificate.Certificate[0]), PodUID: podUID},
		certificate: certificate,
		served:      make(chan struct{}, most),
	}, nil
}

// newCertificate returns a certificate that nobody checks but by its hash. Its key never leaves this
// process, and so it stands for the process.
func newCertificate() (tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return tls.Certificate{}, err
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), DNSNames: []string{serverName}}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, err
}

func hash(certificate []byte) string {
	sum := sha256.Sum256(certificate)
	return hex.EncodeToString(sum[:])
}

// Process returns how standbys reach this process.
func (w *Witness) Process() protocol.Process {
	return w.process
}

// ServeTLS makes config present the certificate of the witness to standbys.
func (w *Witness) ServeTLS(config *tls.Config) {
	own := &tls.Config{
		Certificates: []tls.Certificate{w.certificate}, MinVersion: tls.VersionTLS13,
		NextProtos: []string{"http/1.1"}, SessionTicketsDisabled: true,
	}
	others := config.GetConfigForClient
	config.GetConfigForClient = func(hello *tls.ClientHelloInfo) (*tls.Config, error) {
		if hello.ServerName == serverName {
			return own, nil
		}
		if others == nil {
			return nil, nil
		}
		return others(hello)
	}
}

// ServeHTTP implements http.Handler. It sends a byte each second until the request's context ends,
// which a server ends when it stops. Then the response ends in good order, unlike that of a process
// that was killed.
func (w *Witness) ServeHTTP(resp http.ResponseWriter, req *http.Request) {
	if req.TLS == nil || req.TLS.ServerName != serverName {
		http.NotFound(resp, req)
		return
	}
	select {
	case w.served <- struct{}{}:
		defer func() { <-w.served }()
	default:
		http.Error(resp, "too many standbys", http.StatusServiceUnavailable)
		return
	}
	resp.Header().Set("Content-Type", "text/plain; charset=utf-8")
	sender := http.NewResponseController(resp)
	ticker := time.NewTicker(beatPeriod)
	defer ticker.Stop()
	for {
		if _, err := resp.Write([]byte("\n")); err != nil || sender.Flush() != nil {
			return
		}
		select {
		case <-ticker.C:
		case <-req.Context().Done():
			return
		}
	}
}

// Watch implements election.Witness.
func (w *Witness) Watch(ctx context.Context, process protocol.Process, report func(protocol.LeaderState)) {
	if w.succeeds(process) {
		report(protocol.LeaderGone)
		return
	}
	l := &look{process: process, report: report, state: protocol.LeaderUnknown, last: time.Now()}
	l.run(ctx)
}

// succeeds reports whether the process was one before this in the same Pod: the kubelet starts a
// container when the last one has ended. That this process listens at the other's port, in the network
// namespace that they share, proves it once more.
func (w *Witness) succeeds(process protocol.Process) bool {
	own, ours := netip.ParseAddrPort(w.process.Address)
	other, theirs := netip.ParseAddrPort(process.Address)
	return ours == nil && theirs == nil && w.process.PodUID != "" && w.process.PodUID == process.PodUID &&
		own.Port() == other.Port() && w.process.Certificate != process.Certificate
}

// look is how one standby sees one process. Only the goroutine of run uses it.
type look struct {
	process protocol.Process
	report  func(protocol.LeaderState)
	state   protocol.LeaderState // as reported
	heard   bool                 // the process has answered
	last    time.Time            // when it did, or when run began
}

func (l *look) see(state protocol.LeaderState) {
	if state != l.state {
		l.state = state
		l.report(state)
	}
}

func (l *look) run(ctx context.Context) {
	transport := l.transport()
	hungUp := false // the last connection was closed, and not in good order
	pause := redialMin
	for ctx.Err() == nil {
		body, err := l.dial(ctx, transport)
		answered := err == nil
		if answered {
			began := time.Now()
			err = l.follow(ctx, body)
			hungUp = errors.Is(err, io.ErrUnexpectedEOF) // a reset may be a firewall's
			if time.Since(began) > silence {
				pause = redialMin
			}
		}
		quiet := time.Since(l.last)
		switch {
		case ctx.Err() != nil:
			return
		case answered:
		case l.heard && hungUp && (errors.Is(err, errOther) || errors.Is(err, syscall.ECONNREFUSED)):
			l.see(protocol.LeaderGone)
			return
		case l.heard && quiet >= silence:
			l.see(protocol.LeaderSilent)
		case !l.heard && quiet >= unreachableAfter:
			l.see(protocol.LeaderUnreachable)
		}
		timer := time.NewTimer(pause)
		select {
		case <-timer.C:
		case <-ctx.Done():
		}
		timer.Stop()
		pause = min(2*pause, redialMax)
		if l.heard && quiet < silence {
			pause = min(pause, silence/4) // so that silence is noticed in time
		}
	}
}

// transport returns a transport that connects to the process and to no other.
func (l *look) transport() *http.Transport {
	return &http.Transport{
		DialContext: (&net.Dialer{Timeout: requestTimeout}).DialContext,
		TLSClientConfig: &tls.Config{
			ServerName: serverName, MinVersion: tls.VersionTLS13,
			InsecureSkipVerify: true, // no CA knows it; VerifyConnection compares it with the Lease
			VerifyConnection: func(state tls.ConnectionState) error {
				if len(state.PeerCertificates) == 0 || hash(state.PeerCertificates[0].Raw) != l.process.Certificate {
					return errOther
				}
				return nil
			},
		},
		TLSHandshakeTimeout:   requestTimeout,
		ResponseHeaderTimeout: requestTimeout,
		DisableKeepAlives:     true,
		DisableCompression:    true,
	}
}

// dial returns the response of the process, which goes on.
func (l *look) dial(ctx context.Context, transport *http.Transport) (io.ReadCloser, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://"+l.process.Address+Path, nil)
	if err != nil {
		return nil, err
	}
	resp, err := transport.RoundTrip(req)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode != http.StatusOK {
		_ = resp.Body.Close() // it is not read
		// It is alive, though it serves too many others.
		if l.heard {
			l.last = time.Now()
			l.see(protocol.LeaderAnswers)
		}
		return nil, fmt.Errorf("%s: %s", req.URL, resp.Status)
	}
	return resp.Body, nil
}

// follow reads the response until it ends and returns why.
func (l *look) follow(ctx context.Context, body io.ReadCloser) error {
	beats, ended := make(chan struct{}, 1), make(chan error, 1)
	go func() {
		var buf [64]byte
		for {
			n, err := body.Read(buf[:])
			if n > 0 {
				select {
				case beats <- struct{}{}:
				default: // one waits
				}
			}
			if err != nil {
				ended <- err
				return
			}
		}
	}()
	timer := time.NewTimer(silence)
	defer timer.Stop()
	for {
		select {
		case <-beats:
			l.heard, l.last = true, time.Now()
			l.see(protocol.LeaderAnswers)
			timer.Reset(silence)
		case <-timer.C:
			l.see(protocol.LeaderSilent)
		case err := <-ended:
			return errors.Join(err, body.Close())
		case <-ctx.Done():
			return errors.Join(ctx.Err(), body.Close(), <-ended)
		}
	}
}
