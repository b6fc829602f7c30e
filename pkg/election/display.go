// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package election

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
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"
)

// Phases of a lock as shown.
const (
	phaseNotStarted = "NotStarted"
	phaseUnelected  = "LeaderElectionOff"
	phaseStandby    = "Standby"
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
	complaintLifetime = 2 * maxBackoff
)

// display shows one lock to people: at /debug/leader, in metrics, Events and the log. What it shows
// is derived from the protocol and decides nothing.
type display struct {
	lease   types.NamespacedName
	clock   Clock
	events  EventRecorder
	metrics *lockMetrics

	mu         sync.Mutex
	status     status
	mistaken   bool                 // the holder before has said that it was alive
	unseen     bool                 // the last holder that was to be looked at could not be reached
	complaints map[string]complaint // by verb
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
	Lease       string       `json:"lease"`
	Identity    string       `json:"identity"`
	Phase       string       `json:"phase"`
	Holder      string       `json:"holder"`
	Term        *Term        `json:"term,omitempty"`
	Acquired    *time.Time   `json:"acquired,omitempty"`
	Valid       float64      `json:"validSeconds"`
	LastRenewal *renewal     `json:"lastRenewal,omitempty"`
	Watching    bool         `json:"watching"`
	Problem     string       `json:"problem,omitempty"`
	ServerFence ServerFence  `json:"serverFence"`
	Leader      LeaderState  `json:"leaderProcess"` // as seen by a standby
	History     []transition `json:"history"`

	deadline time.Duration // when the own term ends on the clock, 0 if there is none
	expires  time.Duration // when others may take over, on the clock
	lost     bool          // Run has returned without a release
}

// renewal is the last acknowledged write of this replica to the Lease.
type renewal struct {
	Sent    time.Time `json:"sent"`
	Latency float64   `json:"latencySeconds"`
}

// transition is a change of holder as seen by this replica.
type transition struct {
	Time   time.Time `json:"time"`
	Holder string    `json:"holder"` // empty if the Lease was released or is absent
	Term   *Term     `json:"term,omitempty"`
	Reason string    `json:"reason"`
}

func newDisplay(lease types.NamespacedName, who Candidate) *display {
	return &display{
		lease:      lease,
		clock:      who.Clock,
		events:     who.Events,
		metrics:    who.Metrics.of(lease),
		status:     status{Lease: lease.String(), Identity: who.Identity, Phase: phaseNotStarted, ServerFence: ServerFenceUnknown, Leader: LeaderUnknown},
		complaints: map[string]complaint{},
	}
}

func (s *status) holding() bool {
	return s.Phase == phaseLeading || s.Phase == phaseDraining || s.Phase == phaseReleasing
}

// update shows the state and what is done next.
func (d *display) update(p *protocol, next action) {
	d.mu.Lock()
	defer d.mu.Unlock()
	s := &d.status
	s.Watching = p.watchUp
	switch {
	case !p.holding:
		s.Phase = phaseStandby
	case next.kind == actEnd:
		s.Phase = phaseLost
	case p.leadReturned:
		s.Phase = phaseReleasing
	case p.stopping:
		s.Phase = phaseDraining
	default:
		s.Phase = phaseLeading
	}
	s.deadline, s.expires = 0, 0
	if p.holding {
		s.deadline, s.expires = p.sent+p.own.deadline, p.sent+p.own.lease
	}
	d.updateHolder(p)
	d.updateLeader(p)
	d.metrics.set(d.metrics.watching, p.watchUp)
	d.metrics.set(d.metrics.leading, s.Phase == phaseLeading || s.Phase == phaseDraining)
}

// updateLeader shows what is seen of the leader's process, and counts a take-over that was a mistake.
func (d *display) updateLeader(p *protocol) {
	state := p.leader
	if p.holding || state == "" {
		state = LeaderUnknown
	}
	if state != d.status.Leader {
		d.status.Leader = state
		for _, other := range leaderStates {
			d.metrics.set(d.metrics.leaderSeen, other == state, string(other))
		}
	}
	if p.holding && p.note.Mistaken && !d.mistaken {
		d.mistaken = true
		d.metrics.tookEarly(evidenceMistaken)
	}
}

// sawLeader logs what is seen of the leader's process. That it cannot be reached is logged until it
// could be reached once.
func (d *display) sawLeader(logger klog.Logger, p *protocol) {
	logger = logger.WithValues("lease", d.lease, "holder", p.watched.holder, "address", p.watched.process.Address)
	if p.leader != LeaderUnreachable {
		d.unseen = d.unseen && p.leader != LeaderAnswers
		logger.V(2).Info("The leader's process is seen differently", "state", p.leader)
		return
	}
	if !d.unseen {
		d.unseen = true
		logger.Error(nil, "This replica cannot reach the leader's secure port, so it takes over only when the lease expires; "+
			"check the network policies: replicas must reach each other there")
	}
}

// updateHolder shows the holder of the Lease and remembers it if it has changed.
func (d *display) updateHolder(p *protocol) {
	s := &d.status
	if p.lease == nil {
		if p.known && (s.Term != nil || len(s.History) == 0) {
			s.Holder, s.Term, s.Acquired = "", nil, nil
			s.remember("the Lease does not exist")
		}
		return
	}
	term, holder := termOf(p.lease), holderOf(p.lease)
	if s.Term != nil && *s.Term == term && s.Holder == holder {
		return
	}
	reason := "first seen"
	switch {
	case p.holding && holder == p.identity:
		reason = "acquired by this replica"
	case len(s.History) == 0:
	case holder == "":
		reason = "released"
	default:
		reason = "acquired by another replica"
	}
	s.Holder, s.Term, s.Acquired = holder, &term, nil
	if p.lease.Spec.AcquireTime != nil && holder != "" {
		s.Acquired = ptr.To(p.lease.Spec.AcquireTime.Time)
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

// finished logs and shows how a request ended, and returns what follows from that.
func (d *display) finished(logger klog.Logger, verb string, err error) failure {
	f, now := failureOf(err), d.clock.Now()
	d.mu.Lock()
	defer d.mu.Unlock()
	switch f.kind {
	case failNone:
		delete(d.complaints, verb)
	case failConflict: // the request was permitted
		logger.V(2).Info("The lease has changed", "lease", d.lease, "verb", verb, "err", err)
		delete(d.complaints, verb)
	case failUnanswered:
		logger.Error(err, "Failed to reach the lease", "lease", d.lease, "verb", verb)
	case failRefused:
		last, known := d.complaints[verb]
		next := complaint{err: explain(verb, d.lease, err), at: now, logged: last.logged}
		if !known || now-last.logged > complaintPeriod || apierrors.ReasonForError(last.err) != apierrors.ReasonForError(err) {
			next.logged = now
			logger.Error(next.err, "The API server refuses what leader election needs", "lease", d.lease, "verb", verb)
		}
		d.complaints[verb] = next
	}
	return f
}

// wrote logs and shows how a write ended, and returns what follows from that.
func (d *display) wrote(logger klog.Logger, msg writeDone) failure {
	verb := "update"
	if msg.kind == actCreate {
		verb = "create"
	}
	f := d.finished(logger, verb, msg.err)
	d.metrics.wrote(msg, f)
	if f.kind == failNone && msg.kind != actCreate {
		d.mu.Lock()
		defer d.mu.Unlock()
		sent := time.Now().Add(-msg.took)
		d.status.LastRenewal = &renewal{Sent: sent, Latency: msg.took.Seconds()}
		d.metrics.gauge(d.metrics.renewed).Set(float64(sent.UnixMilli()) / 1000)
	}
	return f
}

// problem returns the refusals that last until somebody repairs their cause.
func (d *display) problem() error {
	now := d.clock.Now()
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.problemLocked(now)
}

func (d *display) problemLocked(now time.Duration) error {
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
	if d.status.ServerFence == ServerFenceMisconfigured {
		errs = append(errs, errors.New("the fence in the API server refuses the writes of this replica even if it leads, so it does not begin to lead"))
	}
	return errors.Join(errs...)
}

// ended shows the end of Run, and of its term if it had one.
func (d *display) ended(reason Reason) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.status.Phase = phaseStopped
	d.status.Watching = false
	d.status.remember("this replica stopped: " + string(reason))
	d.metrics.set(d.metrics.leading, false)
	d.metrics.set(d.metrics.watching, false)
	d.status.lost = reason != ReasonReleased && reason != ReasonNeverLed
	if reason != ReasonNeverLed {
		d.metrics.counter(d.metrics.ended, string(reason)).Inc()
	}
}

// unelected shows that leader election is off.
func (d *display) unelected() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.status.Phase = phaseUnelected
	d.metrics.set(d.metrics.leading, true)
}

// healthy returns an error if this process led until its Lease expired, and has not exited.
func (d *display) healthy(tolerance time.Duration) error {
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

// record records a transition of this replica as an Event on the Lease, with the wording of
// client-go's elector.
func (d *display) record(lease *coordinationv1.Lease, what string) {
	if d.events == nil || lease == nil {
		return
	}
	ref := &corev1.ObjectReference{
		APIVersion: coordinationv1.SchemeGroupVersion.String(), Kind: "Lease",
		Namespace: d.lease.Namespace, Name: d.lease.Name, UID: lease.UID, ResourceVersion: lease.ResourceVersion,
	}
	d.events.Eventf(ref, corev1.EventTypeNormal, "LeaderElection", "%s %s", d.status.Identity, what)
}

func (d *display) serverFence() ServerFence {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.status.ServerFence
}

// snapshot returns the status, including the fields that depend on the current time.
func (d *display) snapshot() status {
	now := d.clock.Now()
	d.mu.Lock()
	defer d.mu.Unlock()
	s := d.status
	s.History = append([]transition{}, s.History...)
	if left := s.deadline - now; s.holding() && left > 0 {
		s.Valid = left.Seconds()
	}
	if err := d.problemLocked(now); err != nil {
		s.Problem = err.Error()
	}
	return s
}

func (d *display) serveHTTP(w http.ResponseWriter, req *http.Request) {
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
