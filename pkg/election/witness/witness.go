// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package witness looks at the leader's process on a connection to its secure port, so that a standby
// learns within milliseconds that the process has ended.
//
// Each process serves Path and sends a byte each second for as long as it lives. A client needs no right to
// Path, and learns only whether the process whose identity it knows lives. A process seems to have ended
// if its kernel has closed the connection in the middle of the response and refuses another, or if another
// process answers at its address. Any other failure proves nothing, since networks lose packets and
// firewalls reset connections. A standby that is deceived causes a handover and nothing worse, so
// certificates are not verified.
package witness

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"syscall"
	"time"

	"github.com/quartermaster-dev/quartermaster/pkg/election/protocol"
)

// Path is where the secure server serves a Witness to everybody.
const Path = "/leader-process"

const (
	beatPeriod     = time.Second
	silenceTimeout = 3 * beatPeriod // after which a standby connects anew

	// maxStandbys is how many standbys a process serves at a time. Others are turned away.
	maxStandbys = 32

	// requestTimeout bounds each of the three parts of a request: to connect, to shake hands, and to
	// get the header of the response.
	requestTimeout = 2 * time.Second

	// A connection is tried again after redialMin, then after twice as long each time. A standby says
	// that it cannot reach the leader after unreachableAfter.
	redialMin        = 5 * time.Millisecond
	redialMax        = 15 * time.Second
	unreachableAfter = 5 * time.Second
)

var (
	errOtherProcess = errors.New("another process answers at this address")
	errStatus       = errors.New("the process does not serve this standby")
)

// Witness serves standbys, and implements election.Witness for this process when it is a standby.
type Witness struct {
	address  string
	identity string
	slots    chan struct{} // holds one value for each standby
}

// New returns the witness of a process that serves the address.
func New(address netip.AddrPort, identity string) *Witness {
	return &Witness{address: address.String(), identity: identity, slots: make(chan struct{}, maxStandbys)}
}

// Address returns where standbys reach this process.
func (w *Witness) Address() string { return w.address }

// ServeHTTP implements http.Handler. It sends a byte each second until the request's context ends,
// which a server ends when it stops. Then the response ends in good order, unlike the response of a
// process that was killed.
func (w *Witness) ServeHTTP(resp http.ResponseWriter, req *http.Request) {
	if req.URL.RawQuery != url.QueryEscape(w.identity) {
		http.Error(resp, "another process", http.StatusGone)
		return
	}
	select {
	case w.slots <- struct{}{}:
		defer func() { <-w.slots }()
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
func (w *Witness) Watch(ctx context.Context, process protocol.LeaderProcess, report func(protocol.LeaderState)) {
	if process.Address == w.address && protocol.PodOf(process.Holder) == protocol.PodOf(w.identity) {
		// The process ran in this Pod before: the kubelet starts a container only when the last one has ended.
		report(protocol.LeaderGone)
		return
	}
	transport := &http.Transport{
		DialContext:           (&net.Dialer{Timeout: requestTimeout}).DialContext,
		TLSClientConfig:       &tls.Config{InsecureSkipVerify: true}, // see the package comment
		TLSHandshakeTimeout:   requestTimeout,
		ResponseHeaderTimeout: requestTimeout,
		DisableKeepAlives:     true,
		DisableCompression:    true,
	}
	state, began := protocol.LeaderUnknown, time.Now()
	reportChange := func(now protocol.LeaderState) {
		if now != state {
			state = now
			report(now)
		}
	}
	hungUp := false // the last response was cut off by a kernel that closed the connection
	pause := redialMin
	for {
		request, end := context.WithCancel(ctx)
		body, err := dial(request, transport, process)
		switch {
		case err == nil:
			answered := time.Now()
			err = readBeats(body, end, func() { reportChange(protocol.LeaderAnswers) })
			hungUp = errors.Is(err, io.ErrUnexpectedEOF) // a reset may be a firewall's
			if time.Since(answered) > silenceTimeout {
				pause = redialMin
			}
		case ctx.Err() != nil:
		case hungUp && (errors.Is(err, errOtherProcess) || errors.Is(err, syscall.ECONNREFUSED)):
			end()
			reportChange(protocol.LeaderGone)
			return
		case state == protocol.LeaderUnknown && time.Since(began) >= unreachableAfter:
			reportChange(protocol.LeaderUnreachable)
		}
		end()
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return
		}
		pause = min(2*pause, redialMax)
	}
}

// dial returns the response of the process, which goes on until ctx ends.
func dial(ctx context.Context, transport *http.Transport, process protocol.LeaderProcess) (io.ReadCloser, error) {
	address, err := netip.ParseAddrPort(process.Address) // an edited Lease must choose no more than this
	if err != nil {
		return nil, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://"+address.String()+Path+"?"+url.QueryEscape(process.Holder), nil)
	if err != nil {
		return nil, err
	}
	resp, err := transport.RoundTrip(req)
	switch {
	case err != nil:
		return nil, err
	case resp.StatusCode == http.StatusOK:
		return resp.Body, nil
	case resp.StatusCode == http.StatusGone:
		err = errOtherProcess
	default:
		err = errStatus
	}
	return nil, errors.Join(err, resp.Body.Close())
}

// readBeats reads the response until it ends and returns why. It calls beat after each read, and end if
// nothing comes for a while.
func readBeats(body io.ReadCloser, end, beat func()) error {
	timer := time.AfterFunc(silenceTimeout, end)
	defer timer.Stop()
	var buf [64]byte
	for {
		n, err := body.Read(buf[:])
		if n > 0 {
			beat()
			timer.Reset(silenceTimeout)
		}
		if err != nil {
			return errors.Join(err, body.Close())
		}
	}
}
