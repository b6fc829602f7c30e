// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package debug shows an election to people: at /debug/leader, in metrics, Events and the log. What it
// shows decides nothing.
package debug

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/yaml"

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
	phaseDraining   = "Draining"  // lead's context has ended
	phaseReleasing  = "Releasing" // lead has returned
	phaseLost       = "Lost"      // the term has ended, lead may not have returned
	phaseStopped    = "Stopped"
)

// refusalLifetime is how long a refusal is shown unless it is repeated. A standby learns only at its
// next attempt that it may update the Lease now, and that may be in years.
const refusalLifetime = 2 * protocol.MaxBackoff

// EventRecorder is the part of a record.EventRecorder that a Display needs.
type EventRecorder interface {
	Eventf(object runtime.Object, eventType, reason, messageFmt string, args ...any)
}

// Display shows one lock. Its status is derived from the protocol.
type Display struct {
	lease   types.NamespacedName
	clock   protocol.Clock
	events  EventRecorder
	metrics *lockMetrics

	mu       sync.Mutex
	status   status
	refusals map[string]refusal // by verb
	trouble  error              // what keeps the holder from leading
}

// refusal is a request that the API server has refused.
type refusal struct {
	err error
	at  time.Duration
}

// status is what /debug/leader shows.
type status struct {
	Lease       string               `json:"lease"`
	Identity    string               `json:"identity"`
	Phase       string               `json:"phase"`
	Holder      string               `json:"holder"`
	Term        *protocol.Term       `json:"term,omitempty"`
	Valid       float64              `json:"validSeconds"`
	Start       *start               `json:"start,omitempty"` // of the term of this replica
	Watching    bool                 `json:"watching"`
	Problem     string               `json:"problem,omitempty"`
	ServerFence apifence.State       `json:"serverFence"`
	Leader      protocol.LeaderState `json:"leaderProcess"` // as seen by a standby

	deadline time.Duration // when the own term ends on the clock, 0 if there is none
	expires  time.Duration // when others may take over, on the clock
	lost     bool          // Run has returned without a release
}

// start says how the term of this replica began.
type start struct {
	After    Start                `json:"after,omitempty"`    // empty: lead has not started
	Evidence protocol.LeaderState `json:"evidence,omitempty"` // why the Lease was taken early
	Why      string               `json:"why,omitempty"`      // could not be proved that the predecessors are refused
}

// New returns the display of a lock on the Lease. events and all may be nil.
func New(lease types.NamespacedName, identity string, clock protocol.Clock, events EventRecorder, all *Metrics) *Display {
	return &Display{
		lease:   lease,
		clock:   clock,
		events:  events,
		metrics: all.of(lease),
		status: status{Lease: lease.String(), Identity: identity, Phase: phaseNotStarted, ServerFence: apifence.Unknown,
			Leader: protocol.LeaderUnknown},
		refusals: map[string]refusal{},
	}
}

func (s *status) holding() bool {
	return s.Phase == phaseStarting || s.Phase == phaseLeading || s.Phase == phaseDraining || s.Phase == phaseReleasing
}

// Update shows the state. ending says that the term has ended.
func (d *Display) Update(v protocol.View, ending bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	s := &d.status
	s.Watching = v.Watching
	switch {
	case !v.Holding:
		s.Phase = phaseStandby
	case ending:
		s.Phase = phaseLost
	case v.LeadReturned:
		s.Phase = phaseReleasing
	case v.Stopping:
		s.Phase = phaseDraining
	case !v.Leading:
		s.Phase = phaseStarting
	default:
		s.Phase = phaseLeading
	}
	s.deadline, s.expires = v.Deadline, v.Expires
	if v.Owes.Until > 0 && s.Start == nil {
		s.Start = &start{Evidence: v.Owes.Evidence}
		d.metrics.counter(d.metrics.takeovers, string(v.Owes.Evidence)).Inc()
	}
	d.updateHolder(v)
	if v.Leader != s.Leader {
		s.Leader = v.Leader
		show(d.metrics, d.metrics.leaderSeen, protocol.LeaderStates, v.Leader)
	}
	d.metrics.set(d.metrics.leading, v.Leading && !ending)
}

// Unproved shows why it could not be proved that every API server refuses the predecessors.
func (d *Display) Unproved(err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.status.Start != nil {
		d.status.Start.Why = err.Error()
	}
}

// Started shows that lead starts, and logs why it may.
func (d *Display) Started(logger klog.Logger, v protocol.View) {
	d.mu.Lock()
	s := d.status.Start
	if s == nil {
		s = &start{}
		d.status.Start = s
	}
	switch {
	case s.Evidence == "":
		s.After = StartFree
	case v.Owes.Until == 0:
		s.After, s.Why = StartProved, ""
	default:
		s.After = StartWaited
	}
	shown := *s
	d.mu.Unlock()
	d.metrics.counter(d.metrics.starts, string(shown.After)).Inc()
	logger.Info("Started leading", "lease", d.lease, "term", v.Term, "after", shown.After, "evidence", shown.Evidence, "unproved", shown.Why)
}

// SawLeader logs what is seen of the leader's process.
func (d *Display) SawLeader(logger klog.Logger, holder string, process protocol.Process, seen protocol.LeaderState) {
	logger = logger.WithValues("lease", d.lease, "holder", holder, "address", process.Address)
	if seen == protocol.LeaderUnreachable {
		logger.Error(nil, "This replica cannot reach the leader's secure port, so it takes over only when the lease expires; "+
			"check the network policies: replicas must reach each other there")
		return
	}
	logger.V(2).Info("Leader process state changed", "state", seen)
}

// updateHolder shows the holder of the Lease.
func (d *Display) updateHolder(v protocol.View) {
	s := &d.status
	if v.Lease == nil {
		if v.Known {
			s.Holder, s.Term = "", nil
		}
		return
	}
	term := protocol.TermOf(v.Lease)
	s.Holder, s.Term = protocol.HolderOf(v.Lease), &term
	d.metrics.gauge(d.metrics.transitions).Set(float64(term.Transitions))
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
		logger.V(2).Info("The lease has changed", "lease", d.lease, "verb", verb, "err", err)
		delete(d.refusals, verb)
	case protocol.FailUnanswered:
		logger.Error(err, "Failed to reach the lease", "lease", d.lease, "verb", verb)
	case protocol.FailRefused, protocol.FailUnauthorized:
		logger.Error(err, "The API server refuses what leader election needs", "lease", d.lease, "verb", verb)
		d.refusals[verb] = refusal{err: fmt.Errorf("the API server refuses to %s lease %s: %w", verb, d.lease, err), at: now}
	}
}

// Wrote logs and shows how a write of the Lease ended that took so long.
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

// Trouble shows what keeps the holder from leading, nil if nothing does.
func (d *Display) Trouble(err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.trouble = err
}

// Problem returns the refusals that last until somebody repairs their cause.
func (d *Display) Problem() error {
	now := d.clock.Now()
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.problemLocked(now)
}

func (d *Display) problemLocked(now time.Duration) error {
	var errs []error
	for _, verb := range []string{"get", "create", "update"} { // without watch it polls
		r := d.refusals[verb]
		if verb == "create" && d.status.Term != nil {
			continue // somebody else has created the Lease
		}
		if r.err != nil && now-r.at < refusalLifetime && !apierrors.IsTooManyRequests(r.err) {
			errs = append(errs, r.err)
		}
	}
	if d.trouble != nil {
		errs = append(errs, d.trouble)
	}
	if d.status.ServerFence == apifence.Misconfigured {
		errs = append(errs, errors.New("the fence in the API server refuses the writes of this replica even if it leads, so it does not begin to lead"))
	}
	return errors.Join(errs...)
}

// Ended shows the end of Run, and of its term if it had one, led.
func (d *Display) Ended(reason protocol.Reason, led bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.status.Phase = phaseStopped
	d.status.Watching = false
	d.metrics.set(d.metrics.leading, false)
	d.status.lost = led && reason != protocol.ReasonReleased && reason != protocol.ReasonCannotLead
	if led {
		d.metrics.counter(d.metrics.ended, string(reason)).Inc()
	}
}

// Unelected shows that leader election is off.
func (d *Display) Unelected() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.status.Phase = phaseUnelected
	d.metrics.set(d.metrics.leading, true)
}

// Healthy returns an error if this process led until its Lease expired, and has not exited.
func (d *Display) Healthy(tolerance time.Duration) error {
	now := d.clock.Now()
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.status.holding() && d.status.Phase != phaseLost && !d.status.lost {
		return nil
	}
	if late := now - d.status.expires; late > tolerance {
		return fmt.Errorf("this process led through lease %s, which expired %s ago, and has not exited",
			d.lease, late.Truncate(time.Second))
	}
	return nil
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
	d.events.Eventf(ref, corev1.EventTypeNormal, "LeaderElection", "%s %s", d.status.Identity, what)
}

// SetServerFence shows what is known of the fence in the API server, and reports whether that is new.
func (d *Display) SetServerFence(found apifence.State) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	before := d.status.ServerFence
	d.status.ServerFence = found
	show(d.metrics, d.metrics.serverFence, apifence.States, found)
	return found != before
}

// Term returns the term of the newest version of the Lease that this replica knows, nil if there is none.
func (d *Display) Term() *protocol.Term {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.status.Term
}

// ServerFence returns what is known of the fence in the API server.
func (d *Display) ServerFence() apifence.State {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.status.ServerFence
}

// snapshot returns the status, including the fields that depend on the current time.
func (d *Display) snapshot() status {
	now := d.clock.Now()
	d.mu.Lock()
	defer d.mu.Unlock()
	s := d.status
	if s.Start != nil {
		s.Start = ptr.To(*s.Start)
	}
	if left := s.deadline - now; s.holding() && left > 0 {
		s.Valid = left.Seconds()
	}
	if err := d.problemLocked(now); err != nil {
		s.Problem = err.Error()
	}
	return s
}

// ServeHTTP serves /debug/leader: JSON if the request accepts it or has ?format=json, else YAML.
func (d *Display) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	s := d.snapshot()
	w.Header().Set("Cache-Control", "no-store")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	if wantsJSON(req) {
		w.Header().Set("Content-Type", "application/json")
		encoder := json.NewEncoder(w)
		encoder.SetIndent("", "  ")
		_ = encoder.Encode(s) // the client is gone
		return
	}
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	text, _ := yaml.Marshal(s) // of strings, numbers and times
	_, _ = w.Write(text)       // the client is gone
}

func wantsJSON(req *http.Request) bool {
	if format := req.URL.Query().Get("format"); format != "" {
		return format == "json"
	}
	return strings.Contains(req.Header.Get("Accept"), "application/json")
}
