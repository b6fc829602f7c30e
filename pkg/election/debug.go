// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package election

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"text/tabwriter"
	"time"

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
	phaseStopped    = "Stopped"
)

// historySize is how many changes of holder are remembered.
const historySize = 32

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
	ServerFence ServerFence  `json:"serverFence"`
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

func (s *status) holding() bool {
	return s.Phase == phaseLeading || s.Phase == phaseDraining || s.Phase == phaseReleasing
}

// publish makes the state visible to other goroutines.
func (l *Lock) publish(e *elector) {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := &l.status
	s.Watching = e.watchUp
	switch {
	case e.phase == standingBy:
		s.Phase = phaseStandby
	case e.phase == releasing || e.idle != nil:
		s.Phase = phaseReleasing
	case e.stopping:
		s.Phase = phaseDraining
	default:
		s.Phase = phaseLeading
	}
	s.deadline, s.expires = 0, 0
	if e.tenure != nil {
		s.deadline, s.expires = e.tenure.sent+e.deadline, e.tenure.sent+e.lease
	}
	l.publishHolder(e)
	setBool(l.metrics.watching.WithLabelValues(l.name.Name), e.watchUp)
	setBool(l.metrics.leading.WithLabelValues(l.name.Name), e.phase == leading)
}

// publishHolder publishes the holder of the Lease and remembers it if it has changed.
func (l *Lock) publishHolder(e *elector) {
	s := &l.status
	lease := e.newest()
	if lease == nil {
		if e.view.known && (s.Term != nil || len(s.History) == 0) {
			s.Holder, s.Term, s.Acquired = "", nil, nil
			s.remember("the Lease does not exist")
		}
		return
	}
	term, holder := termOf(lease), holderOf(lease)
	if s.Term != nil && *s.Term == term && s.Holder == holder {
		return
	}
	reason := "first seen"
	switch {
	case e.tenure != nil:
		reason = "acquired by this replica"
	case len(s.History) == 0:
	case holder == "":
		reason = "released"
	default:
		reason = "acquired by another replica"
	}
	s.Holder, s.Term, s.Acquired = holder, &term, nil
	if lease.Spec.AcquireTime != nil && holder != "" {
		s.Acquired = ptr.To(lease.Spec.AcquireTime.Time)
	}
	l.metrics.transitions.WithLabelValues(l.name.Name).Set(float64(term.Transitions))
	s.remember(reason)
}

func (s *status) remember(reason string) {
	if len(s.History) == historySize {
		s.History = s.History[1:]
	}
	s.History = append(s.History, transition{Time: time.Now(), Holder: s.Holder, Term: s.Term, Reason: reason})
}

// renewed publishes an acknowledged write.
func (l *Lock) renewed(took time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	sent := time.Now().Add(-took)
	l.status.LastRenewal = &renewal{Sent: sent, Latency: took.Seconds()}
	l.metrics.renewed.WithLabelValues(l.name.Name).Set(float64(sent.UnixMilli()) / 1000)
}

// ended publishes the end of Run, and of its term if it had one.
func (l *Lock) ended(reason Reason) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.status.Phase = phaseStopped
	l.status.Watching = false
	l.status.remember("this replica stopped: " + string(reason))
	l.metrics.leading.WithLabelValues(l.name.Name).Set(0)
	l.metrics.watching.WithLabelValues(l.name.Name).Set(0)
	l.status.lost = reason != ReasonReleased && reason != ReasonNeverLed
	if reason != ReasonNeverLed {
		l.metrics.ended.WithLabelValues(l.name.Name, string(reason)).Inc()
	}
}

// leadUnelected publishes that leader election is off, and opens the fence.
func (l *Lock) leadUnelected() {
	l.fence.turnOff()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.status.Phase = phaseUnelected
	l.metrics.leading.WithLabelValues(l.name.Name).Set(1)
}

// snapshot returns the status, including the fields that depend on the current time.
func (l *Lock) snapshot() status {
	now := l.clock.Now()
	l.mu.Lock()
	defer l.mu.Unlock()
	s := l.status
	s.History = append([]transition{}, s.History...)
	if left := s.deadline - now; s.holding() && left > 0 {
		s.Valid = left.Seconds()
	}
	return s
}

// ServeHTTP implements http.Handler for /debug/leader. It writes JSON if the request accepts it or
// has ?format=json, else text.
func (l *Lock) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	s := l.snapshot()
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
	row("server fence", "%s", s.ServerFence)
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
