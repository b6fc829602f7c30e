// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package debug shows an election to people: at /debug/leader, in metrics, Events and the log. What it
// shows decides nothing.
package debug

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

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

const (
	// historySize is how many changes of holder are remembered.
	historySize = 32

	// complaintPeriod is how often a refusal that lasts is logged.
	complaintPeriod = 10 * time.Minute

	// complaintLifetime is how long a refusal is shown unless it is repeated. A standby learns only
	// at its next attempt that it may update the Lease now, and that may be in years.
	complaintLifetime = 2 * protocol.MaxBackoff
)

// EventRecorder is the part of a record.EventRecorder that a Display needs.
type EventRecorder interface {
	Eventf(object runtime.Object, eventType, reason, messageFmt string, args ...any)
}

// Clock returns the time since some fixed moment.
type Clock interface {
	Now() time.Duration
}

// Display shows one lock. Its status is derived from the protocol.
type Display struct {
	lease   types.NamespacedName
	clock   Clock
	events  EventRecorder
	metrics *lockMetrics

	mu         sync.Mutex
	status     status
	unseen     bool                 // the last holder that was to be looked at could not be reached
	complaints map[string]complaint // by verb
	trouble    error                // what keeps the holder from leading
}

// complaint is a refusal.
type complaint struct {
	err    error
	at     time.Duration
	logged time.Duration
}

// status is what /debug/leader shows. The times of day are only for readers; the validity is
// computed from the lock's clock.
type status struct {
	Lease       string               `json:"lease"`
	Identity    string               `json:"identity"`
	Phase       string               `json:"phase"`
	Holder      string               `json:"holder"`
	Term        *protocol.Term       `json:"term,omitempty"`
	Acquired    *time.Time           `json:"acquired,omitempty"`
	Valid       float64              `json:"validSeconds"`
	LastRenewal *renewal             `json:"lastRenewal,omitempty"`
	Start       *start               `json:"start,omitempty"` // of the term of this replica
	Watching    bool                 `json:"watching"`
	Problem     string               `json:"problem,omitempty"`
	ServerFence apifence.State       `json:"serverFence"`
	Leader      protocol.LeaderState `json:"leaderProcess"` // as seen by a standby
	History     []transition         `json:"history"`

	deadline time.Duration // when the own term ends on the clock, 0 if there is none
	expires  time.Duration // when others may take over, on the clock
	lost     bool          // Run has returned without a release
}

// renewal is the last acknowledged write of this replica to the Lease.
type renewal struct {
	Sent    time.Time `json:"sent"`
	Latency float64   `json:"latencySeconds"`
}

// start says how the term of this replica began.
type start struct {
	After    Start                `json:"after,omitempty"`    // empty: lead has not started
	Evidence protocol.LeaderState `json:"evidence,omitempty"` // why the Lease was taken early
	Why      string               `json:"why,omitempty"`      // could not be proved that the predecessors are refused
}

// transition is a change of holder as seen by this replica.
type transition struct {
	Time   time.Time      `json:"time"`
	Holder string         `json:"holder"` // empty if the Lease was released or is absent
	Term   *protocol.Term `json:"term,omitempty"`
	Reason string         `json:"reason"`
}

// New returns the display of a lock on the Lease. events and all may be nil.
func New(lease types.NamespacedName, identity string, clock Clock, events EventRecorder, all *Metrics) *Display {
	return &Display{
		lease:   lease,
		clock:   clock,
		events:  events,
		metrics: all.of(lease),
		status: status{Lease: lease.String(), Identity: identity, Phase: phaseNotStarted, ServerFence: apifence.Unknown,
			Leader: protocol.LeaderUnknown},
		complaints: map[string]complaint{},
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
		for _, other := range protocol.LeaderStates {
			d.metrics.set(d.metrics.leaderSeen, other == v.Leader, string(other))
		}
	}
	d.metrics.set(d.metrics.watching, v.Watching)
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

// SawLeader logs what is seen of the leader's process. That it cannot be reached is logged until it
// could be reached once.
func (d *Display) SawLeader(logger klog.Logger, holder string, process protocol.Process, seen protocol.LeaderState) {
	logger = logger.WithValues("lease", d.lease, "holder", holder, "address", process.Address)
	if seen != protocol.LeaderUnreachable {
		d.unseen = d.unseen && seen != protocol.LeaderAnswers
		logger.V(2).Info("The leader's process is seen differently", "state", seen)
		return
	}
	if !d.unseen {
		d.unseen = true
		logger.Error(nil, "This replica cannot reach the leader's secure port, so it takes over only when the lease expires; "+
			"check the network policies: replicas must reach each other there")
	}
}

// updateHolder shows the holder of the Lease and remembers it if it has changed.
func (d *Display) updateHolder(v protocol.View) {
	s := &d.status
	if v.Lease == nil {
		if v.Known && (s.Term != nil || len(s.History) == 0) {
			s.Holder, s.Term, s.Acquired = "", nil, nil
			s.remember("the Lease does not exist")
		}
		return
	}
	term, holder := protocol.TermOf(v.Lease), protocol.HolderOf(v.Lease)
	if s.Term != nil && *s.Term == term && s.Holder == holder {
		return
	}
	reason := "first seen"
	switch {
	case v.Holding && holder == s.Identity:
		reason = "acquired by this replica"
	case len(s.History) == 0:
	case holder == "":
		reason = "released"
	default:
		reason = "acquired by another replica"
	}
	s.Holder, s.Term, s.Acquired = holder, &term, nil
	if v.Lease.Spec.AcquireTime != nil && holder != "" {
		s.Acquired = ptr.To(v.Lease.Spec.AcquireTime.Time)
	}
	d.metrics.gauge(d.metrics.transitions).Set(float64(term.Transitions))
	s.remember(reason)
}

func (s *status) remember(reason string) {
	if len(s.History) == historySize {
		s.History = s.History[1:]
	}
	s.History = append(s.History, transition{Time: time.Now(), Holder: s.Holder, Term: s.Term, Reason: reason})
}

// Finished logs and shows how a request ended.
func (d *Display) Finished(logger klog.Logger, verb string, err error, f protocol.Failure) {
	now := d.clock.Now()
	d.mu.Lock()
	defer d.mu.Unlock()
	switch f.Kind {
	case protocol.FailNone:
		delete(d.complaints, verb)
	case protocol.FailConflict: // the request was permitted
		logger.V(2).Info("The lease has changed", "lease", d.lease, "verb", verb, "err", err)
		delete(d.complaints, verb)
	case protocol.FailUnanswered:
		logger.Error(err, "Failed to reach the lease", "lease", d.lease, "verb", verb)
	case protocol.FailRefused, protocol.FailUnauthorized:
		last, known := d.complaints[verb]
		next := complaint{err: explain(verb, d.lease, err), at: now, logged: last.logged}
		if !known || now-last.logged > complaintPeriod || apierrors.ReasonForError(last.err) != apierrors.ReasonForError(err) {
			next.logged = now
			logger.Error(next.err, "The API server refuses what leader election needs", "lease", d.lease, "verb", verb)
		}
		d.complaints[verb] = next
	}
}

// explain returns what keeps this replica from a request that was refused.
func explain(verb string, lease types.NamespacedName, err error) error {
	var status apierrors.APIStatus
	missing := apierrors.IsNotFound(err) && errors.As(err, &status) && status.Status().Details != nil && status.Status().Details.Kind == "namespaces"
	switch {
	case missing:
		return fmt.Errorf("namespace %s of the lease does not exist: %w", lease.Namespace, err)
	case apierrors.IsForbidden(err):
		return fmt.Errorf("this replica may not %s lease %s (leases in coordination.k8s.io): %w", verb, lease, err)
	case apierrors.IsUnauthorized(err):
		return fmt.Errorf("the API server does not accept the credentials of this replica: %w", err)
	}
	return fmt.Errorf("the API server refuses to %s lease %s: %w", verb, lease, err)
}

// Wrote logs and shows how a write of the Lease ended that took so long.
func (d *Display) Wrote(logger klog.Logger, kind protocol.ActionKind, err error, f protocol.Failure, took time.Duration) {
	verb := "update"
	if kind == protocol.ActCreate {
		verb = "create"
	}
	d.Finished(logger, verb, err, f)
	d.metrics.wrote(kind, f, took)
	if f.Kind == protocol.FailNone && kind != protocol.ActCreate {
		d.mu.Lock()
		defer d.mu.Unlock()
		sent := time.Now().Add(-took)
		d.status.LastRenewal = &renewal{Sent: sent, Latency: took.Seconds()}
		d.metrics.gauge(d.metrics.renewed).Set(float64(sent.UnixMilli()) / 1000)
	}
}

// RefusedWrite counts a write that the client's fence refused.
func (d *Display) RefusedWrite(method string) { d.metrics.refused(method) }

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
		c := d.complaints[verb]
		if verb == "create" && d.status.Term != nil {
			continue // somebody else has created the Lease
		}
		if c.err != nil && now-c.at < complaintLifetime && !apierrors.IsTooManyRequests(c.err) {
			errs = append(errs, c.err)
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
	d.status.remember("this replica stopped: " + string(reason))
	d.metrics.set(d.metrics.leading, false)
	d.metrics.set(d.metrics.watching, false)
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
	for _, state := range apifence.States {
		d.metrics.set(d.metrics.serverFence, state == found, string(state))
	}
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
	s.History = append([]transition{}, s.History...)
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

// ServeHTTP serves /debug/leader: JSON if the request accepts it or has ?format=json, else text.
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
	s.writeText(w)
}

func wantsJSON(req *http.Request) bool {
	switch req.URL.Query().Get("format") {
	case "json":
		return true
	case "text":
		return false
	}
	return strings.Contains(req.Header.Get("Accept"), "application/json")
}

func (s *status) writeText(w io.Writer) {
	out := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	row := func(name, format string, args ...any) {
		fmt.Fprintf(out, name+":\t"+format+"\n", args...)
	}
	row("lease", "%s", s.Lease)
	row("identity", "%s", s.Identity)
	row("phase", "%s", s.Phase)
	row("holder", "%s", orNone(s.Holder))
	if s.Term != nil {
		row("term", "%s", s.Term)
	}
	if s.Acquired != nil {
		row("held since", "%s", s.Acquired.UTC().Format(time.RFC3339))
	}
	if s.holding() {
		row("valid for", "%.1fs", s.Valid)
	}
	if s.LastRenewal != nil {
		row("last renewal", "%s, took %.1fms", s.LastRenewal.Sent.UTC().Format(time.RFC3339Nano), 1000*s.LastRenewal.Latency)
	}
	if s.Start != nil {
		row("started after", "%s", orNone(string(s.Start.After)))
		if s.Start.Evidence != "" {
			row("taken early", "the predecessor was %s", s.Start.Evidence)
		}
		if s.Start.Why != "" {
			row("not proved", "%s", strings.ReplaceAll(s.Start.Why, "\n", "; "))
		}
	}
	row("watching", "%t", s.Watching)
	if s.Problem != "" {
		row("problem", "%s", strings.ReplaceAll(s.Problem, "\n", "; "))
	}
	row("server fence", "%s", s.ServerFence)
	row("leader seen", "%s", s.Leader)
	fmt.Fprintln(out, "\nhistory:")
	for i := len(s.History) - 1; i >= 0; i-- {
		t := s.History[i]
		term := "<none>"
		if t.Term != nil {
			term = t.Term.String()
		}
		fmt.Fprintf(out, "  %s\t%s\t%s\t%s\n", t.Time.UTC().Format(time.RFC3339), orNone(t.Holder), term, t.Reason)
	}
	_ = out.Flush() // the client is gone
}

func orNone(s string) string {
	if s == "" {
		return "<none>"
	}
	return s
}
