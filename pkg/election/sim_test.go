// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package election

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/go-logr/logr"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/klog/v2"
)

// simulation is one run: replicas over one store, faults, and what was observed.
type simulation struct {
	seed        uint64
	cfg         Config
	elect       simElector
	serverFence bool // the API server refuses writes of replicas that do not hold the Lease
	store       *simStore
	metrics     *Metrics
	start       time.Time

	launching     sync.Mutex
	noLaunchUntil time.Time
	mu            sync.Mutex
	procs         []*simProc // including ended ones
	replicas      []*simReplica
	stormy        bool
	history       []simEvent
	violations    []violation
	terms         map[Term]string      // who led each term
	acquired      map[string]Term      // by identity, the last term that the store saw begin
	renewed       map[string]time.Time // by identity, when the store saw it write the Lease
	tampered      time.Time            // when the Lease was last edited or deleted
	stale         int                  // writes executed for a replica that did not hold the Lease
}

// simElector runs one process' part of the election until it ends.
type simElector func(ctx context.Context, p *simProc) error

// simReplica is a replica. It runs one process after another.
type simReplica struct {
	index int
	lives int
	proc  *simProc
}

// current returns the process that the replica runs now.
func (s *simulation) current(r *simReplica) *simProc {
	s.mu.Lock()
	defer s.mu.Unlock()
	return r.proc
}

type simEvent struct {
	at   time.Duration
	who  string
	what string
	args []any
}

// violation is a broken invariant.
type violation struct {
	rule string
	text string
}

// The invariants.
const (
	ruleOneLeader    = "no two replicas pass the fence at the same instant"
	ruleTermsUnique  = "a term never repeats"
	ruleSomeoneLeads = "someone leads again within the bound"
	ruleNoEarlySteal = "a lease is not taken from a live holder"
	ruleReplaced     = "a replica that another has replaced does not pass the fence"
	ruleAfterPause   = "a replica that was replaced while it was paused does not write when it goes on"
	ruleOwnRelease   = "only the holder releases the lease"
	ruleDrainFirst   = "the lease is released after the drain"
	ruleDrainWrites  = "a drain in good order can write"
	ruleReturns      = "Run returns"
)

// simProc is one process: the clock, the network and the workload of an elector.
type simProc struct {
	sim      *simulation
	replica  *simReplica
	identity string
	link     *simLink
	rate     float64 // of its clock
	offset   time.Duration
	lock     *Lock
	stop     context.CancelFunc // SIGTERM

	mu       sync.Mutex
	draws    map[string]uint64 // by purpose
	paused   time.Time         // until this time
	gone     bool
	leading  bool        // lead runs
	inFlight int         // writes that have passed the fence
	refused  int         // writes that were refused while lead ran
	passes   func() bool // whether a write would pass at this instant, without a pause
	done     chan struct{}
}

func (s *simulation) log(who, what string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.history = append(s.history, simEvent{at: time.Since(s.start), who: who, what: what, args: args})
}

func (s *simulation) violate(rule, format string, args ...any) {
	s.log("VIOLATION", rule+": "+format, args...)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.violations = append(s.violations, violation{rule: rule, text: fmt.Sprintf(format, args...)})
}

// report prints the end of the history, oldest first.
func (s *simulation) report() string {
	const last = 400
	var out strings.Builder
	events := s.history
	if len(events) > last {
		fmt.Fprintf(&out, "... %d earlier events\n", len(events)-last)
		events = events[len(events)-last:]
	}
	for _, e := range events {
		fmt.Fprintf(&out, "%12s  %-10s  %s\n", e.at, e.who, fmt.Sprintf(e.what, e.args...))
	}
	return out.String()
}

// storm returns the error with which the API server responds, if any.
func (s *simulation) storm() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stormy {
		return apierrors.NewInternalError(errors.New("etcd is having a bad day"))
	}
	return nil
}

// rng returns a source of random numbers for one purpose. Each use has its own, so that the numbers
// do not depend on the order in which goroutines run.
func (s *simulation) rng(purpose string, n uint64) *rand.Rand {
	h := uint64(14695981039346656037)
	for _, b := range []byte(purpose) {
		h = (h ^ uint64(b)) * 1099511628211
	}
	return rand.New(rand.NewPCG(s.seed, h+n*0x9e3779b97f4a7c15))
}

// launch starts a process on the replica.
func (s *simulation) launch(r *simReplica) {
	r.lives++
	identity := fmt.Sprintf("r%d_%d", r.index, r.lives)
	rng := s.rng(identity, 0)
	ctx, stop := context.WithCancel(klog.NewContext(context.Background(), logr.Discard()))
	p := &simProc{
		sim: s, replica: r, identity: identity, link: newSimLink(), stop: stop,
		rate:   1 + clockRateError*(2*rng.Float64()-1),
		offset: time.Duration(rng.Int64N(int64(1000 * time.Hour))),
		done:   make(chan struct{}),
		draws:  map[string]uint64{},
	}
	s.mu.Lock()
	r.proc = p
	s.procs = append(s.procs, p)
	s.mu.Unlock()
	s.log(p.identity, "starts")
	go func() {
		defer close(p.done)
		defer stop()
		err := s.elect(ctx, p)
		p.returned(err)
	}()
}

// ours runs our elector.
func ours(ctx context.Context, p *simProc) error {
	lock, err := NewLock(p.sim.cfg, Candidate{Identity: p.identity, Client: &simClient{store: p.sim.store, proc: p},
		Clock: p, Events: p, Metrics: p.sim.metrics})
	if err != nil {
		return err
	}
	p.mu.Lock()
	p.lock = lock
	p.passes = func() bool {
		lock.fence.mu.Lock()
		defer lock.fence.mu.Unlock()
		return lock.fence.admitsAt(p.now())
	}
	p.mu.Unlock()
	client := &http.Client{Transport: lock.Fence(p)}
	return lock.Run(ctx, func(ctx context.Context) error { return p.lead(ctx, client) })
}

// Eventf implements EventRecorder.
func (p *simProc) Eventf(_ runtime.Object, _, _, format string, args ...any) {
	p.sim.log(p.identity, "event: "+format, args...)
}

// Now implements Clock.
func (p *simProc) Now() time.Duration {
	p.gate()
	return p.now()
}

func (p *simProc) now() time.Duration {
	return p.offset + time.Duration(float64(time.Since(p.sim.start))*p.rate)
}

// gate blocks a paused process: at every reading of the clock, and before and after everything that
// leaves the process.
//
// Blocked goroutines continue one after the other, in an order that depends on the seed, so that a
// run can be repeated.
func (p *simProc) gate() {
	p.mu.Lock()
	left := time.Until(p.paused)
	p.mu.Unlock()
	if left <= 0 {
		return
	}
	stagger := time.Duration(p.nextRNG("gate").Int64N(int64(time.Millisecond)))
	for left > 0 {
		pass(left + stagger)
		p.mu.Lock()
		left = time.Until(p.paused)
		p.mu.Unlock()
	}
}

// justResumed reports whether a pause has ended within the last retry period.
func (p *simProc) justResumed() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return !p.paused.IsZero() && time.Since(p.paused) < p.sim.cfg.RetryPeriod.Duration
}

// nextRNG returns a source of random numbers for the next use for that purpose.
func (p *simProc) nextRNG(purpose string) *rand.Rand {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.draws[purpose]++
	return p.sim.rng(p.identity+purpose, p.draws[purpose])
}

// wouldPass reports whether a write of the process would pass at this instant if it were not
// paused.
func (p *simProc) wouldPass() bool {
	p.mu.Lock()
	passes, gone := p.passes, p.gone
	p.mu.Unlock()
	return !gone && passes != nil && passes()
}

// checkAlone is called when the process passes the fence.
func (p *simProc) checkAlone() {
	p.sim.mu.Lock()
	var others []*simProc
	for _, r := range p.sim.replicas {
		if r.proc != nil && r.proc != p {
			others = append(others, r.proc)
		}
	}
	p.sim.mu.Unlock()
	holder := p.sim.ledBy()
	for _, other := range others {
		if other.wouldPass() {
			p.sim.violate(ruleOneLeader, "%s passes while %s would", p.identity, other.identity)
		}
		if other.identity == holder {
			p.sim.violate(ruleReplaced, "%s passes while %s holds the lease", p.identity, other.identity)
			if p.justResumed() {
				p.sim.violate(ruleAfterPause, "%s was replaced by %s", p.identity, other.identity)
			}
		}
	}
}

// lead is the work of a leader: it writes now and then until ctx ends, and a few more times while
// it drains.
func (p *simProc) lead(ctx context.Context, client *http.Client) error {
	p.sim.store.background.Add(1)
	defer p.sim.store.background.Done()
	p.checkAlone()
	p.sim.leads(p)
	p.mu.Lock()
	p.leading = true
	p.mu.Unlock()
	defer func() {
		p.mu.Lock()
		p.leading = false
		p.mu.Unlock()
		p.sim.log(p.identity, "lead returns")
	}()
	pace := p.sim.cfg.RetryPeriod.Duration / 2
	for ctx.Err() == nil {
		p.write(client)
		sleep(ctx, time.Duration(p.nextRNG("pace").Int64N(int64(pace))))
	}
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
	return nil
}

func (p *simProc) isGone() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.gone
}

// write sends one write through the fence.
func (p *simProc) write(client *http.Client) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*p.sim.cfg.LeaseDuration.Duration)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPut, "http://api/object", bytes.NewReader([]byte(p.identity)))
	if err != nil {
		panic(err)
	}
	resp, err := client.Do(req)
	switch {
	case errors.Is(err, ErrNotLeading):
		p.mu.Lock()
		if p.leading {
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
	p.checkAlone()
	p.addInFlight(1)
	defer p.addInFlight(-1)
	if _, err := io.Copy(io.Discard, req.Body); err != nil {
		return nil, err
	}
	rng := p.nextRNG("write")
	if rng.IntN(4) == 0 {
		pass(time.Duration(rng.Int64N(int64(5 * time.Millisecond)))) // a pause may fall into this
	}
	p.gate()
	code, err := request(req.Context(), p.sim.store, p.link, rng, p.sim.storm, func() (int, error) { return p.sim.execute(p), nil })
	p.gate()
	if err != nil {
		return nil, err
	}
	return &http.Response{StatusCode: code, Body: http.NoBody, Header: http.Header{}}, nil
}

func (p *simProc) addInFlight(n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.inFlight += n
}
