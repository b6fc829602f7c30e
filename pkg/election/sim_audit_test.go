// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package election

import (
	"fmt"
	"math"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"

	"github.com/quartermaster-dev/quartermaster/pkg/election/protocol"
)

// The invariants.
const (
	ruleOneLeader    = "no two replicas pass the fence at the same instant"
	ruleReplaced     = "a replica that another has replaced does not pass the fence"
	ruleAfterPause   = "a replica that was replaced while it was paused does not write when it goes on"
	ruleSent         = "the end of a body is not sent after another has taken the Lease"
	ruleCancelled    = "nobody waits for a write of its term when another takes the Lease"
	ruleLostCloses   = "a replica that has lost its term does not pass the fence"
	ruleTermsUnique  = "a term never repeats"
	ruleNoEarlySteal = "a Lease is not taken from a live holder"
	ruleOwnRelease   = "only the holder releases the Lease"
	ruleDrainFirst   = "the Lease is released after the drain"
	ruleAfterRelease = "no write is executed after its replica has released the Lease"
	ruleDrainWrites  = "a drain in good order can write"
	ruleNamedFirst   = "lead starts after the fence names its Pod"
	ruleNamesInOrder = "the fence never goes back to the Pod of a former leader"
	ruleStale        = "a stale write is executed at most the watch's lag and its time in the API server after the fence names another"
	ruleInOrder      = "no write of a former leader is stored after its successor's first one"
	ruleGivesUp      = "a holder that cannot lead gives the Lease up"
	ruleSomeoneLeads = "someone leads again within the bound"
	ruleFewRequests  = "the requests of a replica are bounded"
	ruleReturns      = "Run returns"
)

var allRules = []string{ruleOneLeader, ruleReplaced, ruleAfterPause, ruleSent, ruleCancelled, ruleLostCloses, ruleTermsUnique, ruleNoEarlySteal, ruleOwnRelease, ruleDrainFirst, ruleAfterRelease, ruleDrainWrites, ruleNamedFirst, ruleNamesInOrder, ruleStale, ruleInOrder, ruleGivesUp, ruleSomeoneLeads, ruleFewRequests, ruleReturns}

// auditor sees everything that happens, by the real time and in the order of the store, and knows
// the rules. A reign begins when the store executes the acquisition of a replica; the reigns are
// numbered, whatever the Lease says.
type auditor struct {
	sim *simulation

	mu             sync.Mutex
	history        []historyEntry
	violations     []violation
	unsureUntil    simTime                  // until then no client can tell what has happened, so no client's fence is judged
	pollingUntil   time.Time                // until then, standbys may read the Lease instead of watching it
	tamperedAt     time.Time                // when the Lease was last edited or deleted
	editWaitUntil  time.Time                // until then, a record that was edited may be waited for
	longestEdit    time.Duration            // the longest duration that was edited into the record
	renewable      bool                     // a renewal ends editWaitUntil: nothing but durations was edited
	fencelessUntil time.Time                // until when there is no fence in the API server
	era            int                      // counts the edits after which terms may repeat
	terms          map[eraTerm]string       // who led each term
	released       map[string]bool          // by identity
	renewed        map[string]ownWrite      // by identity, when the store saw it write the Lease
	created        map[string]protocol.Term // by identity, the term of the Lease that it created
	reigns         []*reign                 // in order
	replaced       map[*simProc]bool        // before its claim ended, so that its client's fence may be open
	requests       map[string][]simRequest  // by identity
	count          simCount
	strict         bool // ruleInOrder is judged
}

// simCount is what one seed has to show.
type simCount struct {
	terms  int
	writes int // executed
	// stale writes were executed after the reign of another began, overtaken ones after that reign's first
	// write.
	stale, overtaken int
	judged, waited   int           // overtaken ones within a limit, see limitOf
	admitted         int           // stale writes that passed the server's fence
	latest           time.Duration // the longest time of those after the fence had named another
	refused          int           // by the server's fence
	clock            int           // overtaken ones of replicas whose clocks stood still
	samePod          int           // stale writes of a former process of the Pod that the fence names
	early            int           // terms that began before the predecessor's claim had ended
	alive            int           // of these, terms whose predecessor was alive
}

func (c *simCount) add(other simCount) {
	c.terms += other.terms
	c.writes += other.writes
	c.stale += other.stale
	c.overtaken += other.overtaken
	c.judged += other.judged
	c.waited += other.waited
	c.admitted += other.admitted
	c.latest = max(c.latest, other.latest)
	c.refused += other.refused
	c.clock += other.clock
	c.samePod += other.samePod
	c.early += other.early
	c.alive += other.alive
}

// reign is the time of one replica between its acquisition and the next one's.
type reign struct {
	number    int
	proc      *simProc
	term      eraTerm
	began     time.Time
	claimEnds time.Time // when the predecessor's claim ends, if the reign began before that; else zero
	ledAt     time.Time // when lead started
	proved    bool      // lead started before claimEnds, so every API server had been asked
	stored    time.Time // when its first write was stored
	named     time.Time // when the fence named its Pod
}

// ownWrite is a replica's own write of the Lease.
type ownWrite struct {
	at       time.Time
	duration time.Duration
}

type eraTerm struct {
	era  int
	term protocol.Term
}

// simWrite is a write of a controller.
type simWrite struct {
	proc     *simProc
	rng      *rand.Rand
	passed   time.Time // the client's fence
	sent     time.Time
	server   *simServer
	admitted time.Time // by the server's fence
	unjudged bool      // there was none
}

type simRequest struct {
	at   time.Time
	verb string
}

type historyEntry struct {
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

func newAuditor(s *simulation) *auditor {
	return &auditor{sim: s, terms: map[eraTerm]string{}, replaced: map[*simProc]bool{}, renewed: map[string]ownWrite{},
		released: map[string]bool{}, created: map[string]protocol.Term{}, requests: map[string][]simRequest{}}
}

func (a *auditor) log(who, what string, args ...any) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.logLocked(who, what, args...)
}

func (a *auditor) logLocked(who, what string, args ...any) {
	a.history = append(a.history, historyEntry{at: time.Since(a.sim.start), who: who, what: what, args: args})
}

func (a *auditor) violate(rule, format string, args ...any) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.violateLocked(rule, format, args...)
}

func (a *auditor) violateLocked(rule, format string, args ...any) {
	a.logLocked("VIOLATION", rule+": "+format, args...)
	a.violations = append(a.violations, violation{rule: rule, text: fmt.Sprintf(format, args...)})
}

// report prints the end of the history, oldest first.
func (a *auditor) report() string {
	const last = 400
	var out strings.Builder
	notes := a.history
	if len(notes) > last {
		fmt.Fprintf(&out, "... %d earlier events\n", len(notes)-last)
		notes = notes[len(notes)-last:]
	}
	for _, n := range notes {
		fmt.Fprintf(&out, "%14s  %-10s  %s\n", n.at, n.who, fmt.Sprintf(n.what, n.args...))
	}
	return out.String()
}

// suspend says that something happens now that no client can tell from a regular event: no client's
// fence is judged for two lease durations. After a restore, watches are refused for a while.
func (a *auditor) suspend() {
	a.mayPoll()
	a.mu.Lock()
	defer a.mu.Unlock()
	a.unsureUntil.set(time.Now().Add(2 * a.sim.cfg.LeaseDuration.Duration))
	a.logLocked("auditor", "does not judge the fences of the clients until %s", a.unsureUntil.get().Sub(a.sim.start))
}

// mayPoll says that a standby may be without its watch for a while.
func (a *auditor) mayPoll() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.pollingUntil = time.Now().Add(80 * time.Second)
}

// patience returns for how long an edited record may still be waited for.
func (a *auditor) patience() time.Duration {
	a.mu.Lock()
	defer a.mu.Unlock()
	return max(0, time.Until(a.editWaitUntil))
}

// noFence says that there is no fence in the API server until the duration has passed.
func (a *auditor) noFence(duration time.Duration) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.fencelessUntil = latest(a.fencelessUntil, time.Now().Add(duration))
}

// newEra says that terms may repeat from now on.
func (a *auditor) newEra() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.era++
}

// simTime is a time that is read without the auditor's mu.
type simTime struct{ nanos atomic.Int64 }

func (t *simTime) set(to time.Time) { t.nanos.Store(to.UnixNano()) }
func (t *simTime) get() time.Time   { return time.Unix(0, t.nanos.Load()) }

// judges reports whether the client's fences of these processes must hold now.
func (a *auditor) judges(procs ...*simProc) bool {
	if !a.sim.fences.client || time.Now().Before(a.unsureUntil.get()) {
		return false
	}
	for _, p := range procs {
		if p.clockStood() || a.replaced[p] && a.sim.fences.server {
			return false
		}
	}
	return true
}

// reignOf returns the last reign of the process, nil if there was none.
func (a *auditor) reignOf(p *simProc) *reign {
	for i := len(a.reigns) - 1; i >= 0; i-- {
		if a.reigns[i].proc == p {
			return a.reigns[i]
		}
	}
	return nil
}

// successor returns the reign that followed the last one of p, nil if there is none.
func (a *auditor) successor(p *simProc) *reign {
	if own := a.reignOf(p); own != nil && own.number < len(a.reigns) {
		return a.reigns[own.number]
	}
	return nil
}

// onPassed is called when a write passes the client's fence.
func (a *auditor) onPassed(p *simProc) *simWrite {
	a.checkAlone(p, ruleReplaced)
	p.mu.Lock()
	lost := p.lost
	p.mu.Unlock()
	a.mu.Lock()
	defer a.mu.Unlock()
	if lost && a.judges(p) {
		a.violateLocked(ruleLostCloses, "%s", p.identity)
	}
	return &simWrite{proc: p, rng: p.nextRNG("server"), passed: time.Now()}
}

// onSent is called when the end of the write's body leaves the process.
func (a *auditor) onSent(w *simWrite) {
	w.sent = time.Now()
	a.checkAlone(w.proc, ruleSent)
}

// checkAlone checks that nobody else leads.
func (a *auditor) checkAlone(p *simProc, rule string) {
	if !a.sim.fences.client || p.isGone() {
		return
	}
	for _, other := range a.sim.others(p) {
		if other.wouldPass() && a.judges(p, other) {
			a.violate(ruleOneLeader, "%s passes while %s would", p.identity, other.identity)
		}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if next := a.successor(p); next != nil && !a.replaced[p] && a.judges(p, next.proc) {
		a.violateLocked(rule, "%s writes although %s has taken the Lease", p.identity, next.proc.identity)
		if p.justResumed() {
			a.violateLocked(ruleAfterPause, "%s was replaced by %s", p.identity, next.proc.identity)
		}
	}
}

// onRefused is called when an API server's fence refuses the write.
func (a *auditor) onRefused(w *simWrite, server *simServer) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.count.refused++
	a.logLocked(w.proc.identity, "the fence of API server %d refuses a write", server.index)
}

// onExecuted is called when the store executes the write. This is where stale writes are judged: one of a
// former leader that is stored after the first one of a later leader counts, always.
func (a *auditor) onExecuted(w *simWrite) {
	a.mu.Lock()
	defer a.mu.Unlock()
	now := time.Now()
	a.count.writes++
	if own := a.reignOf(w.proc); own != nil && own.stored.IsZero() {
		own.stored = now
	}
	if a.released[w.proc.identity] && a.judges(w.proc) {
		a.violateLocked(ruleAfterRelease, "a write of %s that was sent %s ago", w.proc.identity, time.Since(w.sent))
	}
	next := a.successor(w.proc)
	if next == nil {
		return
	}
	a.count.stale++
	led, samePod, limits := false, false, map[simLimit]bool{}
	var named time.Time // when the fence first named a later leader
	for _, r := range a.reigns[next.number-1:] {
		if !r.stored.IsZero() {
			led, limits[a.limitOf(w, r)] = true, true
		}
		if !r.named.IsZero() && (named.IsZero() || r.named.Before(named)) {
			named = r.named
		}
		samePod = samePod || r.proc.pod == w.proc.pod
	}
	a.logLocked(w.proc.identity, "a write sent %s ago is executed although %s has taken the Lease", now.Sub(w.sent), next.proc.identity)
	if led {
		a.count.overtaken++
		if w.proc.clockStood() {
			a.count.clock++
		}
		switch {
		case !limits[limitNone] && limits[limitWaited]:
			a.count.waited++
		case !limits[limitNone]:
			a.count.judged++
		case a.strict && !samePod: // writes of a process that was restarted in its Pod are a limit, and counted below
			a.violateLocked(ruleInOrder, "%s, sent %s ago, judged %s ago by API server %d", w.proc.identity, now.Sub(w.sent), now.Sub(w.admitted), w.server.index)
		}
	}
	if samePod {
		a.count.samePod++ // the fence tells Pods apart, not processes
	}
	if !a.sim.fences.server {
		return
	}
	a.count.admitted++
	if w.unjudged || named.IsZero() || samePod || now.Before(a.unsureUntil.get()) {
		return // ruleNamedFirst judges whether the other may lead
	}
	late, lag := now.Sub(named), w.server.worstLag(named)+now.Sub(w.admitted)
	a.count.latest = max(a.count.latest, late)
	if late > lag {
		a.violateLocked(ruleStale, "%s writes %s after the fence has named another; bound %s", w.proc.identity, late, lag)
	}
}

// simLimit is one of the limits in docs/adr/0003-leader-election.md within which a write of a former leader
// may be stored after the first one of its successor.
type simLimit int

const (
	limitNone   simLimit = iota
	limitJudged          // an API server had judged it before the successor led
	limitWaited          // the successor has asked no API server, and the write was under way since before the claim ended
)

// limitOf returns the limit within which a write that is stored now follows the first one of that reign.
func (a *auditor) limitOf(w *simWrite, r *reign) simLimit {
	// From the last moment at which a fence may be open, on a slow clock, to the first at which a standby may
	// take the Lease, on a fast one.
	least := float64(a.sim.cfg.LeaseDuration.Duration)/1.01 - float64(a.sim.cfg.RenewDeadline.Duration)/0.99
	switch {
	case w.admitted.Before(r.ledAt):
		return limitJudged
	case !r.proved && w.admitted.Sub(w.sent) >= time.Duration(least):
		return limitWaited
	}
	return limitNone
}

// onLead is called when lead starts.
func (a *auditor) onLead(p *simProc) {
	if p.wouldPass() { // else lead starts late, after a pause, and cannot write
		a.checkAlone(p, ruleReplaced)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	own := a.reignOf(p)
	if own == nil {
		own = a.beginReign(p, a.created[p.identity]) // client-go's elector leads by creating the Lease
	}
	own.ledAt, own.proved = time.Now(), time.Now().Before(own.claimEnds)
	a.count.terms++
	before, repeated := a.terms[own.term]
	a.terms[own.term] = p.identity
	a.logLocked(p.identity, "leads term %s", own.term.term)
	if repeated && !time.Now().Before(a.unsureUntil.get()) {
		a.violateLocked(ruleTermsUnique, "%s leads term %s, which %s has led", p.identity, own.term.term, before)
	}
	restored := time.Now().Before(a.unsureUntil.get()) // perhaps since it has named itself
	if a.sim.fences.server && own.named.IsZero() && a.fencelessUntil.Before(own.began) && !restored {
		a.violateLocked(ruleNamedFirst, "%s leads, but the fence has not named %s", p.identity, p.pod)
	}
}

// leaseChanged checks every write to the Lease. It is called under the store's mu.
func (a *auditor) leaseChanged(writer string, before, after *coordinationv1.Lease) {
	now := time.Now()
	proc := a.sim.find(writer)
	a.mu.Lock()
	defer a.mu.Unlock()
	a.logLocked(writer, "LEASE %s -> %s", describe(before), describe(after))
	var required int64
	if before != nil {
		required, _ = strconv.ParseInt(before.ResourceVersion, 10, 64)
	}
	if a.sim.store.rv <= a.sim.store.highest+1 || required > 0 && required <= a.sim.store.highest {
		// A restored store gives out versions a second time, and a write that requires the first may
		// succeed on the second.
		a.unsureUntil.set(now.Add(2 * a.sim.cfg.LeaseDuration.Duration))
		a.era++
	}
	if proc == nil {
		a.tamperedAt = now
		if writer == "backup" && after != nil {
			if holder := a.sim.find(protocol.HolderOf(after)); holder != nil && a.reignOf(holder) != nil {
				a.beginReign(holder, protocol.TermOf(after)) // it leads again
			}
		}
		a.renewable = before != nil && after != nil && protocol.TermOf(before) == protocol.TermOf(after) && protocol.HolderOf(before) == protocol.HolderOf(after) &&
			(a.renewable || !now.Before(a.editWaitUntil))
		a.longestEdit = max(a.longestEdit, protocol.DurationOf(before, 0), protocol.DurationOf(after, 0))
		a.editWaitUntil = latest(a.editWaitUntil, now.Add(2*a.longestEdit))
		return
	}
	from := ""
	if before != nil {
		from = protocol.HolderOf(before)
	}
	if from != "" && from != writer && protocol.HolderOf(after) == from && protocol.TermOf(before) == protocol.TermOf(after) {
		a.violateLocked(ruleOwnRelease, "%s edits the Lease of %s", writer, from)
		return
	}
	last := a.renewed[from]
	tampered := !a.tamperedAt.IsZero() && now.Sub(a.tamperedAt) < a.sim.cfg.LeaseDuration.Duration
	a.renewed[writer] = ownWrite{now, protocol.DurationOf(after, 0)}
	var claimEnds time.Time
	switch {
	case protocol.HolderOf(after) == "":
		a.checkRelease(proc, from)
		return
	case from != "" && from != writer && !last.at.IsZero():
		least := time.Duration(float64(last.duration) / 1.01) // whatever an edit says
		holder := a.sim.find(from)
		switch early := now.Sub(last.at) < least; {
		case early && holder != nil && proc.hasEvidence(holder):
			a.replaced[holder], claimEnds = true, last.at.Add(least)
			a.count.early++
			if !holder.isGone() {
				a.count.alive++
			}
			a.logLocked(writer, "takes the Lease early")
		case early && !tampered && !now.Before(a.unsureUntil.get()):
			a.violateLocked(ruleNoEarlySteal, "%s takes the Lease from %s, %s after its last renewal", writer, from, now.Sub(last.at))
		}
	}
	if before == nil {
		a.created[writer] = protocol.TermOf(after)
		return
	}
	if from == writer && protocol.TermOf(before) == protocol.TermOf(after) {
		if a.renewable && !now.Before(a.pollingUntil) {
			a.editWaitUntil = now // the holder has set its own duration again, and a watch shows it
		}
	} else {
		// Whoever saw an edited record later than the taker distrusts that for as long again.
		a.renewable = false
		if now.Before(a.editWaitUntil) || protocol.DurationOf(before, 0) > a.sim.cfg.LeaseDuration.Duration {
			a.editWaitUntil = now.Add(2 * a.longestEdit)
		}
	}
	if from != writer || protocol.TermOf(before) != protocol.TermOf(after) {
		a.beginReign(proc, protocol.TermOf(after)).claimEnds = claimEnds
		a.checkCancelled(proc)
	}
}

func (a *auditor) beginReign(p *simProc, term protocol.Term) *reign {
	r := &reign{number: len(a.reigns) + 1, proc: p, term: eraTerm{a.era, term}, began: time.Now()}
	a.reigns = append(a.reigns, r)
	return r
}

// checkCancelled checks that no former leader waits for a write. A paused one has stopped waiting
// when it goes on.
func (a *auditor) checkCancelled(taker *simProc) {
	for _, other := range a.sim.others(taker) {
		other.mu.Lock()
		waiting := other.inFlight > 0 && !other.gone && time.Since(other.paused) > 100*time.Millisecond
		other.mu.Unlock()
		if waiting && !a.replaced[other] && a.judges(taker, other) {
			a.violateLocked(ruleCancelled, "%s takes the Lease while a write of %s is in flight", taker.identity, other.identity)
		}
	}
}

func (a *auditor) checkRelease(proc *simProc, from string) {
	if from != "" && from != proc.identity && a.judges(proc) {
		a.violateLocked(ruleOwnRelease, "%s releases a Lease that %q holds", proc.identity, from)
	}
	a.released[proc.identity] = true
	proc.mu.Lock()
	defer proc.mu.Unlock()
	if proc.leading || proc.unfinished || proc.inFlight > 0 && a.sim.fences.client {
		a.violateLocked(ruleDrainFirst, "%s releases the Lease while lead runs (%t), writes (%d) or has left work behind (%t)",
			proc.identity, proc.leading, proc.inFlight, proc.unfinished)
	}
}

// namingChanged checks every change of the name in the fence's parameter. It is called under the
// store's mu.
func (a *auditor) namingChanged(n *simNaming) {
	proc, restored := a.sim.find(n.writer), a.sim.find(n.leader)
	a.mu.Lock()
	defer a.mu.Unlock()
	a.logLocked(n.writer, "FENCE names %q", n.leader)
	if own := a.reignOf(restored); proc == nil && own != nil && own.number == len(a.reigns) {
		own.named = n.written // it leads again, and its name is back
	}
	if proc == nil {
		return
	}
	own := a.reignOf(proc)
	if own == nil {
		a.violateLocked(ruleNamesInOrder, "%s names itself without having taken the Lease", n.writer)
		return
	}
	if own.named.IsZero() {
		own.named = n.written
	}
	for _, r := range a.reigns[own.number:] {
		if !r.named.IsZero() && !n.written.Before(a.unsureUntil.get()) { // whatever the clients' fences are worth
			a.violateLocked(ruleNamesInOrder, "%s names itself after %s, which took the Lease later", n.writer, r.proc.identity)
		}
	}
}

// onReturned is called when Run has returned.
func (a *auditor) onReturned(p *simProc, err error, refused int) {
	if err == nil && refused > 0 {
		a.violate(ruleDrainWrites, "%s left in good order but %d of its writes were refused", p.identity, refused)
	}
}

// onRequest is called before a request leaves the process.
func (a *auditor) onRequest(p *simProc, verb string) {
	if verb == "write" {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.requests[p.identity] = append(a.requests[p.identity], simRequest{at: time.Now(), verb: verb})
}

// checkRequests checks that no replica has flooded the API servers, whatever happened. A leader renews
// every retry period and a standby whose watch is dead reads as often; the rest is for what happens.
func (a *auditor) checkRequests() {
	a.mu.Lock()
	defer a.mu.Unlock()
	most := 100 + 2*int(time.Minute/a.sim.cfg.RetryPeriod.Duration)
	for who, calls := range a.requests {
		for first, last := 0, 0; last < len(calls); last++ {
			for calls[last].at.Sub(calls[first].at) >= time.Minute {
				first++
			}
			if last-first >= most {
				verbs := map[string]int{}
				for _, call := range calls[first : last+1] {
					verbs[call.verb]++
				}
				a.violateLocked(ruleFewRequests, "%s makes more than %d requests in the minute before %s: %v", who, most, calls[last].at.Sub(a.sim.start), verbs)
				break
			}
		}
	}
}

// writesOf returns how many writes of the Lease the process has sent.
func (a *auditor) writesOf(p *simProc) int {
	_, writes := a.requestsBetween(p, 0, math.MaxInt64)
	return writes
}

// requestsBetween returns how many requests the process made, and how many of them were writes of the
// Lease.
func (a *auditor) requestsBetween(p *simProc, from, to time.Duration) (all, writes int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, call := range a.requests[p.identity] {
		if at := call.at.Sub(a.sim.start); at < from || at >= to {
			continue
		}
		all++
		if call.verb == "create" || call.verb == "update" {
			writes++
		}
	}
	return all, writes
}

// described is a Lease in the history. It is only formatted when it is printed.
type described struct{ *coordinationv1.Lease }

func describe(lease *coordinationv1.Lease) described { return described{lease} }

// String implements fmt.Stringer.
func (d described) String() string {
	lease := d.Lease
	if lease == nil {
		return "<none>"
	}
	return fmt.Sprintf("{rv %s, term %s, holder %q, %s}", lease.ResourceVersion, protocol.TermOf(lease), protocol.HolderOf(lease), protocol.DurationOf(lease, 0))
}
