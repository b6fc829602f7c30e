// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package election

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/runtime"

	"github.com/quartermaster-dev/quartermaster/pkg/election/protocol"
	"github.com/quartermaster-dev/quartermaster/pkg/election/writefence"
)

// simProc is one process of a replica: the clock, the network and the workload of an elector.
type simProc struct {
	sim      *simulation
	replica  *simReplica
	pod      string
	identity string
	link     *simLink
	rate     float64 // of its clock
	offset   time.Duration
	stop     context.CancelFunc // SIGTERM
	done     chan struct{}

	mu       sync.Mutex
	home     *simServer               // the API server that the process is connected to
	pinned   bool                     // the process stays connected to home whatever happens
	broken   bool                     // the connection to home is broken, so the process takes another
	cutOff   map[*simServer]time.Time // until when the process and an API server do not reach each other
	draws    map[string]uint64        // how many random draws were made, by purpose
	paused   time.Time                // when its pause ends, or has ended
	resumed  chan struct{}            // closed by resume
	stood    time.Duration            // for how long its clock has stood still
	frozen   time.Time                // when its clock stopped; zero: the clock runs
	apart    time.Time                // until when other replicas do not reach it
	evidence map[*simProc]bool        // whether a leader's process seems to have ended, by process
	maligned chan struct{}            // closed by malign
	ended    chan struct{}            // closed by kill; nil if that closes no connection
	gone     bool
	restored bool // it has ended because etcd was restored
	leading  bool // lead runs
	lost     bool // lead has seen that its term was lost
	inFlight int  // writes that have passed the fence
	dialing  int  // of these, those that have not left the process
	refused  int  // writes that were refused while lead ran

	unfinished bool // lead has said that work goes on

	hold     func() // called between the admission of its patch of the Namespace and the store; nil: nothing
	answered func() // called when an update of the Lease is answered; nil: nothing
	reads    func() // called before its clock is read; nil: nothing

	passes func() bool // whether a write would pass at this instant, without a pause
	aware  func() bool // whether it knows the term of the Lease
}

// ours is our elector.
var ours = simElector{run: runOurs}

func runOurs(ctx context.Context, p *simProc) error {
	candidate := Candidate{Identity: p.identity, Client: &simClient{proc: p}, Clock: p, Events: p, Metrics: p.sim.metrics,
		Address: p.identity, Witness: &simWitness{p}}
	if p.sim.fences.server {
		candidate.Namespaces, candidate.Servers = &simNamespaces{proc: p}, &simDirectory{proc: p}
	}
	lock, err := NewLock(p.sim.cfg, candidate)
	if err != nil {
		return err
	}
	p.mu.Lock()
	p.passes = func() bool {
		return lock.fence.Admits(p.now())
	}
	p.aware = func() bool {
		lease, _ := p.sim.store.get()
		term := lock.display.Status(0).Term
		return term != nil && (lease == nil || *term == protocol.TermOf(lease))
	}
	p.mu.Unlock()
	var writes http.RoundTripper = p
	if p.sim.fences.client {
		writes = lock.Fence(writes)
	} else if p.sim.fences.server {
		writes = lock.apiFence.Transport(writes, writefence.ErrNotLeading)
	}
	return lock.Run(ctx, func(ctx context.Context) error { return p.lead(ctx, &http.Client{Transport: writes}) })
}

// Eventf implements EventRecorder.
func (p *simProc) Eventf(_ runtime.Object, _, _, format string, args ...any) {
	p.sim.log(p.identity, "event: "+format, args...)
}

// Now implements Clock.
func (p *simProc) Now() time.Duration {
	p.call(&p.reads)
	p.gate()
	return p.now()
}

func (p *simProc) now() time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	at := time.Now()
	if !p.frozen.IsZero() {
		at = p.frozen
	}
	return p.offset + time.Duration(float64(at.Sub(p.sim.start)-p.stood)*p.rate)
}

// gate blocks a paused process: at every reading of the clock, and before and after everything that
// leaves the process.
//
// Blocked goroutines continue one after the other, in an order that depends on the seed, so that a
// run can be repeated.
func (p *simProc) gate() {
	p.mu.Lock()
	left, resumed := time.Until(p.paused), p.resumed
	p.mu.Unlock()
	if left <= 0 {
		return
	}
	stagger := time.Duration(p.nextRNG("gate").Int64N(int64(time.Millisecond)))
	for left > 0 {
		select {
		case <-time.After(left + stagger):
		case <-resumed:
			pass(stagger)
		}
		p.mu.Lock()
		left, resumed = time.Until(p.paused), p.resumed
		p.mu.Unlock()
	}
}

// resume ends the pause.
func (p *simProc) resume() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.paused = time.Now()
	close(p.resumed)
	p.resumed = make(chan struct{})
}

// pause stops the process for d, like SIGSTOP.
func (p *simProc) pause(d time.Duration) {
	p.beginPause(d)
	pass(d)
}

func (p *simProc) beginPause(d time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.paused = latest(p.paused, time.Now().Add(d))
}

// freeze stops the process and its clock for d, as a hypervisor does that freezes a guest.
func (p *simProc) freeze(d time.Duration) {
	p.mu.Lock()
	if !p.frozen.IsZero() {
		p.mu.Unlock()
		return
	}
	p.frozen, p.paused = time.Now(), latest(p.paused, time.Now().Add(d))
	p.mu.Unlock()
	pass(d)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.frozen, p.stood = time.Time{}, p.stood+d
}

// clockStood reports whether the clock of the process has ever stood still. Its own fence proves
// nothing then.
func (p *simProc) clockStood() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.stood > 0 || !p.frozen.IsZero()
}

// justResumed reports whether a pause has ended within the last retry period.
func (p *simProc) justResumed() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return !p.paused.IsZero() && time.Since(p.paused) < p.sim.cfg.RetryPeriod.Duration
}

// kill ends the process at once: nothing that it does from now on leaves it.
func (p *simProc) kill() {
	p.mu.Lock()
	if !p.gone && p.ended != nil {
		close(p.ended)
	}
	p.gone = true
	p.mu.Unlock()
	p.link.set(func(l *simLink) { l.dead = true })
	p.sim.log(p.identity, "is killed")
	p.stop()
}

// returned is called when Run has returned.
func (p *simProc) returned(err error) {
	p.sim.log(p.identity, "Run returns: %v", err)
	p.mu.Lock()
	p.gone = true // the process exits
	p.restored = errors.Is(err, ErrRestored)
	refused := p.refused
	p.mu.Unlock()
	p.sim.audit.onReturned(p, err, refused)
}

func (p *simProc) isGone() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.gone
}

// hasSeenRestore reports whether the process has ended because etcd was restored.
func (p *simProc) hasSeenRestore() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.restored
}

func (p *simProc) isAware() bool {
	p.mu.Lock()
	aware := p.aware
	p.mu.Unlock()
	return aware != nil && aware()
}

// wouldPass reports whether a write of the process would pass the client's fence at this instant if
// it were not paused.
func (p *simProc) wouldPass() bool {
	p.mu.Lock()
	passes, gone := p.passes, p.gone
	p.mu.Unlock()
	return !gone && passes != nil && passes()
}

// call calls one of the functions with which a plan interferes.
func (p *simProc) call(interfere *func()) {
	p.mu.Lock()
	do := *interfere
	p.mu.Unlock()
	if do != nil {
		do()
	}
}

// lead is the work of a leader: it writes now and then until ctx ends, and a few more times while
// it drains.
func (p *simProc) lead(ctx context.Context, client *http.Client) error {
	p.sim.store.background.Add(1)
	defer p.sim.store.background.Done()
	p.sim.audit.onLead(p)
	p.setLeading(true)
	defer p.setLeading(false)
	pace := p.sim.cfg.RetryPeriod.Duration / 2
	for ctx.Err() == nil {
		p.write(client)
		if p.sim.sparse.Load() {
			pauseFor(ctx, 4*pace)
		}
		pauseFor(ctx, time.Duration(p.nextRNG("pace").Int64N(int64(pace))))
	}
	var lost *LostError
	p.mu.Lock()
	p.lost = errors.As(context.Cause(ctx), &lost)
	p.mu.Unlock()
	// Most drain in time, some do not.
	p.sim.log(p.identity, "lead drains: %v", context.Cause(ctx))
	rng := p.nextRNG("drain")
	until := time.Now().Add(time.Duration(rng.Int64N(int64(p.sim.cfg.DrainTimeout) * 5 / 4)))
	for time.Now().Before(until) && !p.isGone() {
		pass(min(time.Until(until), time.Duration(rng.Int64N(int64(pace)))))
		p.write(client)
	}
	if rng.IntN(3) == 0 { // leave a goroutine behind
		p.sim.store.background.Go(func() { p.write(client) })
		pass(1) // until it has started
	}
	if rng.IntN(8) == 0 {
		p.mu.Lock()
		p.unfinished = true
		p.mu.Unlock()
		p.sim.log(p.identity, "lead returns and leaves work behind")
		return ErrUnfinished
	}
	p.sim.log(p.identity, "lead returns")
	return nil
}

func (p *simProc) setLeading(leading bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.leading = leading
}

// write sends one write through the fence. Some do not wait long for the response.
func (p *simProc) write(client *http.Client) {
	timeout := 2 * p.sim.cfg.LeaseDuration.Duration
	if rng := p.nextRNG("patience"); rng.IntN(4) == 0 {
		timeout = time.Millisecond + time.Duration(rng.Int64N(int64(p.sim.cfg.RetryPeriod.Duration)))
	}
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPut, "http://api/object", bytes.NewReader([]byte(p.identity)))
	if err != nil {
		panic(err)
	}
	resp, err := client.Do(req)
	switch {
	case errors.Is(err, writefence.ErrNotLeading):
		p.mu.Lock()
		if p.leading && !strings.Contains(err.Error(), "quartermaster-fence") {
			p.refused++
		}
		p.mu.Unlock()
		p.sim.log(p.identity, "write refused: %v", err)
	case err == nil:
		_ = resp.Body.Close()
	}
}

// RoundTrip implements http.RoundTripper. It is the network behind the fence.
func (p *simProc) RoundTrip(req *http.Request) (*http.Response, error) {
	w := p.sim.audit.onPassed(p)
	p.addInFlight(1)
	defer p.addInFlight(-1)
	// Dialing takes a while now and then, and a pause may fall into this.
	rng := p.nextRNG("dial")
	dial := 5 * time.Millisecond
	if rng.IntN(10) == 0 {
		dial = time.Second
	}
	if rng.IntN(4) == 0 && !p.dial(req.Context(), time.Duration(rng.Int64N(int64(dial)))) {
		return nil, req.Context().Err()
	}
	p.gate()
	if _, err := io.Copy(io.Discard, req.Body); err != nil {
		return nil, err
	}
	p.sim.audit.onSent(w)
	if rng.IntN(10) == 0 { // the fence has let it go, but a pause may still hold it up in the process
		pass(time.Duration(rng.Int64N(int64(5 * time.Millisecond))))
	}
	refused, err := exchange(req.Context(), p, "write", func(server *simServer) (string, error) { return server.execute(w) })
	if err != nil {
		return nil, err
	}
	resp := &http.Response{StatusCode: http.StatusOK, Body: http.NoBody, Header: http.Header{}}
	if refused != "" {
		resp.StatusCode, resp.Body = http.StatusForbidden, io.NopCloser(strings.NewReader(refused))
	}
	return resp, nil
}

// dial takes d and reports whether ctx lasted.
func (p *simProc) dial(ctx context.Context, d time.Duration) bool {
	p.addDialing(1)
	defer p.addDialing(-1)
	return pauseFor(ctx, d)
}

func (p *simProc) addDialing(n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.dialing += n
}

// nextRNG returns a source of random numbers for the next use for that purpose.
func (p *simProc) nextRNG(purpose string) *rand.Rand {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.draws[purpose]++
	return p.sim.rng(p.identity+purpose, p.draws[purpose])
}

// pin connects the process to an API server for good.
func (p *simProc) pin(server *simServer) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.home, p.pinned = server, true
}

// separateFrom cuts the process off from an API server for d.
func (p *simProc) separateFrom(server *simServer, d time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.cutOff == nil {
		p.cutOff = map[*simServer]time.Time{}
	}
	p.cutOff[server] = latest(p.cutOff[server], time.Now().Add(d))
}

// sees reports whether the process and the API server reach each other.
func (p *simProc) sees(server *simServer) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return !time.Now().Before(p.cutOff[server])
}

// awaitSide waits until the process and the API server reach each other, unless it has ended.
func (p *simProc) awaitSide(server *simServer) bool {
	for !p.sees(server) {
		p.mu.Lock()
		left := time.Until(p.cutOff[server])
		p.mu.Unlock()
		pass(left)
	}
	_, dead, _ := p.link.state()
	return !dead
}

func (p *simProc) addInFlight(n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.inFlight += n
}
