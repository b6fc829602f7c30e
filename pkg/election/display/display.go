// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package display shows an election to people: at /debug/leader, in metrics, Events and the log. What it
// shows decides nothing.
package display

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/quartermaster-dev/quartermaster/pkg/election/apifence"
	"github.com/quartermaster-dev/quartermaster/pkg/election/protocol"
)

// Phases of a lock as shown.
const (
	phaseNotStarted = "NotStarted"
	phaseUnelected  = "LeaderElectionOff"
	phaseStandby    = "Standby"
	phaseStarting   = "Starting" // the Lease is held, lead has not started
	phaseLeading    = "Leading"
	phaseDraining   = "Draining" // lead's context has ended, the Lease is held
	phaseLost       = "Lost"     // the term has ended, lead may not have returned
	phaseStopped    = "Stopped"
)

// refusalLifetime is how long a refusal is shown unless it is repeated. A standby that was refused learns
// only at its next write of the Lease that it may write now, and that may be in years.
const refusalLifetime = 2 * protocol.MaxBackoff

// EventRecorder is the part of a record.EventRecorder that a Display needs.
type EventRecorder interface {
	Eventf(object runtime.Object, eventType, reason, messageFmt string, args ...any)
}

// Display shows one lock.
type Display struct {
	lease          types.NamespacedName
	identity       string
	troubleTimeout time.Duration
	clock          protocol.Clock
	events         EventRecorder
	metrics        *lockMetrics

	mu       sync.Mutex
	view     protocol.View
	phase    string
	start    *Start // of the term of this replica; nil: it may lead as soon as it is named
	fence    apifence.State
	refusals map[string]refusal // by verb
	trouble  refusal            // what keeps the holder from leading, and since when
	lost     bool               // Run has returned without a release
}

// refusal is a request that the API server has refused.
type refusal struct {
	err error
	at  time.Duration
}

// Start says how the term of this replica began.
type Start struct {
	After StartKind `json:"after,omitempty"` // empty: lead has not started
	Why   string    `json:"why,omitempty"`   // it could not be proved that the predecessors are refused
}

// Status is what /debug/leader shows.
type Status struct {
	Lease       string               `json:"lease"`
	Identity    string               `json:"identity"`
	Phase       string               `json:"phase"`
	Holder      string               `json:"holder"`
	Term        *protocol.Term       `json:"term,omitempty"`
	Valid       float64              `json:"validSeconds"`
	Start       *Start               `json:"start,omitempty"`
	Watching    bool                 `json:"watching"`
	Problem     string               `json:"problem,omitempty"`
	ServerFence apifence.State       `json:"serverFence"`
	Leader      protocol.LeaderState `json:"leaderProcess"` // as seen by a standby
}

// New returns the display of a lock on the Lease. A holder that does not lead has a problem after
// troubleTimeout. events and metrics may be nil.
func New(
	lease types.NamespacedName, identity string, troubleTimeout time.Duration, clock protocol.Clock, events EventRecorder, metrics *Metrics,
) *Display {
	return &Display{lease: lease, identity: identity, troubleTimeout: troubleTimeout, clock: clock, events: events, metrics: metrics.forLease(lease),
		view: protocol.View{Leader: protocol.LeaderUnknown}, phase: phaseNotStarted, fence: apifence.Unknown, refusals: map[string]refusal{}}
}

// Update shows the state. ending says that the term has ended.
func (d *Display) Update(v protocol.View, ending bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	switch {
	case !v.Holding:
		d.phase = phaseStandby
	case ending:
		d.phase = phaseLost
	case v.Stopping:
		d.phase = phaseDraining
	case !v.Leading:
		d.phase = phaseStarting
	default:
		d.phase = phaseLeading
	}
	if v.ProofUntil > 0 && d.start == nil {
		d.start = &Start{}
	}
	if v.Leader != d.view.Leader {
		show(d.metrics, d.metrics.leaderProcess, protocol.LeaderStates, v.Leader)
	}
	if v.Lease != nil {
		d.metrics.gauge(d.metrics.transitions).Set(float64(protocol.TermOf(v.Lease).Transitions))
	}
	d.metrics.set(d.metrics.leading, v.Leading && !ending)
	d.view = v
}

// SetUnproved shows why it could not be proved that every API server refuses the predecessors.
func (d *Display) SetUnproved(err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.start != nil {
		d.start.Why = err.Error()
	}
}

// Started shows that lead starts, and logs why it may.
func (d *Display) Started(logger klog.Logger, v protocol.View) {
	d.mu.Lock()
	defer d.mu.Unlock()
	switch {
	case d.start == nil:
		d.start = &Start{After: StartFree}
	case v.ProofUntil == 0:
		d.start = &Start{After: StartProved}
	default:
		d.start.After = StartWaited
	}
	d.metrics.counter(d.metrics.starts, string(d.start.After)).Inc()
	logger.Info("Started leading", "lease", d.lease, "term", v.Term, "after", d.start.After, "unproved", d.start.Why)
}

// SawLeader logs what is seen of the leader's process.
func (d *Display) SawLeader(logger klog.Logger, process protocol.LeaderProcess, seen protocol.LeaderState) {
	logger = logger.WithValues("lease", d.lease, "holder", process.Holder, "address", process.Address)
	if seen == protocol.LeaderUnreachable {
		logger.Error(nil, "Cannot reach the leader's secure port; this replica waits for the Lease to expire before it takes over")
		return
	}
	logger.V(2).Info("Leader process state changed", "state", seen)
}

// Finished logs and shows how a request ended.
func (d *Display) Finished(logger klog.Logger, verb string, err error, f protocol.Failure) {
	now := d.clock.Now()
	d.mu.Lock()
	defer d.mu.Unlock()
	switch f.Kind {
	case protocol.FailNone:
		delete(d.refusals, verb)
	case protocol.FailConflict: // the request was permitted
		logger.V(2).Info("Request for the Lease met a conflict", "lease", d.lease, "verb", verb, "err", err)
		delete(d.refusals, verb)
	case protocol.FailUnanswered:
		logger.Error(err, "Request for the Lease got no answer", "lease", d.lease, "verb", verb)
	case protocol.FailRefused, protocol.FailUnauthorized:
		logger.Error(err, "The API server refuses a request for the Lease", "lease", d.lease, "verb", verb)
		d.refusals[verb] = refusal{err: fmt.Errorf("the API server refuses to %s Lease %s: %w", verb, d.lease, err), at: now}
	}
}

// Wrote logs and shows how a write of the Lease ended, and how long it took.
func (d *Display) Wrote(logger klog.Logger, kind protocol.ActionKind, err error, f protocol.Failure, took time.Duration) {
	verb := "update"
	if kind == protocol.ActCreate {
		verb = "create"
	}
	d.Finished(logger, verb, err, f)
	d.metrics.wrote(kind, f, took)
}

// RefusedWrite counts a write that the client's fence refused.
func (d *Display) RefusedWrite() { d.metrics.counter(d.metrics.refusals).Inc() }

// SetTrouble shows what keeps the holder from leading, nil if nothing does.
func (d *Display) SetTrouble(err error) {
	now := d.clock.Now()
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.trouble.err == nil {
		d.trouble.at = now
	}
	d.trouble.err = err
}

// SetServerFence shows what is known of the fence in the API server, and reports whether that is new.
func (d *Display) SetServerFence(found apifence.State) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	before := d.fence
	d.fence = found
	show(d.metrics, d.metrics.serverFence, apifence.States, found)
	return found != before
}

// Problem returns what lasts until somebody repairs its cause.
func (d *Display) Problem() error {
	now := d.clock.Now()
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.problemLocked(now)
}

func (d *Display) problemLocked(now time.Duration) error {
	var errs []error
	if d.trouble.err != nil && now-d.trouble.at >= d.troubleTimeout {
		errs = append(errs, fmt.Errorf("this replica holds the Lease and cannot lead: %w", d.trouble.err))
	}
	for _, verb := range []string{"get", "create", "update"} { // without watch it polls
		r := d.refusals[verb]
		if verb == "create" && d.view.Lease != nil {
			continue // somebody else has created the Lease
		}
		if r.err != nil && now-r.at < refusalLifetime && !apierrors.IsTooManyRequests(r.err) {
			errs = append(errs, r.err)
		}
	}
	if d.fence == apifence.Misconfigured {
		errs = append(errs, errors.New("the fence in the API server refuses the writes of this replica even if it leads, so it does not begin to lead"))
	}
	return errors.Join(errs...)
}

// Ended shows the end of Run, and of its term. led reports whether it had one.
func (d *Display) Ended(reason protocol.Reason, led bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.phase, d.view.Watching = phaseStopped, false
	d.metrics.set(d.metrics.leading, false)
	d.lost = led && reason != protocol.ReasonReleased && reason != protocol.ReasonCannotLead
	if led {
		d.metrics.counter(d.metrics.ended, string(reason)).Inc()
	}
}

// SetUnelected shows that leader election is off.
func (d *Display) SetUnelected() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.phase = phaseUnelected
	d.metrics.set(d.metrics.leading, true)
}

// Healthy returns an error if this process led until its Lease expired, and has not exited.
func (d *Display) Healthy(tolerance time.Duration) error {
	now := d.clock.Now()
	d.mu.Lock()
	defer d.mu.Unlock()
	late := now - d.view.Expires
	if !d.view.Holding || d.phase == phaseStopped && !d.lost || late <= tolerance {
		return nil
	}
	return fmt.Errorf("this process led through Lease %s, which expired %s ago, and has not exited", d.lease, late.Truncate(time.Second))
}

// Record records a transition of this replica as an Event on the Lease, with the wording of
// client-go's elector.
func (d *Display) Record(lease *coordinationv1.Lease, what string) {
	if d.events == nil || lease == nil {
		return
	}
	ref := &corev1.ObjectReference{
		APIVersion: coordinationv1.SchemeGroupVersion.String(), Kind: "Lease",
		Namespace: d.lease.Namespace, Name: d.lease.Name, UID: lease.UID, ResourceVersion: lease.ResourceVersion,
	}
	d.events.Eventf(ref, corev1.EventTypeNormal, "LeaderElection", "%s %s", d.identity, what)
}

// Status returns what is shown at this time.
func (d *Display) Status(now time.Duration) Status {
	d.mu.Lock()
	defer d.mu.Unlock()
	s := Status{Lease: d.lease.String(), Identity: d.identity, Phase: d.phase, Watching: d.view.Watching,
		ServerFence: d.fence, Leader: d.view.Leader}
	if d.start != nil {
		began := *d.start
		s.Start = &began
	}
	if lease := d.view.Lease; lease != nil {
		term := protocol.TermOf(lease)
		s.Holder, s.Term = protocol.HolderOf(lease), &term
	}
	if left := d.view.Deadline - now; d.view.Holding && d.phase != phaseLost && d.phase != phaseStopped && left > 0 {
		s.Valid = left.Seconds()
	}
	if err := d.problemLocked(now); err != nil {
		s.Problem = err.Error()
	}
	return s
}

// ServeHTTP serves /debug/leader as JSON.
func (d *Display) ServeHTTP(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Cache-Control", "no-store")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.Header().Set("Content-Type", "application/json")
	encoder := json.NewEncoder(w)
	encoder.SetIndent("", "  ")
	_ = encoder.Encode(d.Status(d.clock.Now())) // the client is gone
}
