// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package election

import (
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
)

// execute is called when the API server executes a write.
func (s *simulation) execute(p *simProc) int {
	if s.store.holder() == p.identity {
		return http.StatusOK
	}
	if s.serverFence {
		return http.StatusForbidden
	}
	s.mu.Lock()
	s.stale++
	s.mu.Unlock()
	s.log(p.identity, "a write is executed although %q holds the lease", s.store.holder())
	return http.StatusOK
}

// leads is called when lead starts.
func (s *simulation) leads(p *simProc) {
	s.mu.Lock()
	term := s.acquired[p.identity]
	before, repeated := s.terms[term]
	s.terms[term] = p.identity
	s.mu.Unlock()
	s.log(p.identity, "leads term %s", term)
	if repeated {
		s.violate(ruleTermsUnique, "%s leads term %s, which %s has led", p.identity, term, before)
	}
}

// leaseChanged checks every write to the Lease. It is called under the store's mu.
func (s *simulation) leaseChanged(writer string, before, after *coordinationv1.Lease) {
	now := time.Now()
	s.log(writer, "LEASE %s -> %s", describe(before), describe(after))
	if !strings.HasPrefix(writer, "r") {
		s.mu.Lock()
		s.tampered = now
		s.mu.Unlock()
		return
	}
	s.mu.Lock()
	last, known := time.Time{}, false
	if before != nil {
		last, known = s.renewed[holderOf(before)]
	}
	tampered := !s.tampered.IsZero() && now.Sub(s.tampered) < s.cfg.LeaseDuration.Duration
	s.renewed[writer] = now
	if holderOf(after) == writer {
		s.acquired[writer] = termOf(after)
	}
	proc := s.find(writer)
	s.mu.Unlock()

	from := ""
	if before != nil {
		from = holderOf(before)
	}
	switch {
	case holderOf(after) == "":
		s.checkRelease(proc, writer, from)
	case from != "" && from != writer && known && !tampered:
		least := time.Duration(float64(durationOf(before, 0)) / (1 + clockRateError))
		if now.Sub(last) < least {
			s.violate(ruleNoEarlySteal, "%s takes the lease from %s, %s after its last renewal", writer, from, now.Sub(last))
		}
	}
}

func (s *simulation) checkRelease(proc *simProc, writer, from string) {
	if from != "" && from != writer {
		s.violate(ruleOwnRelease, "%s releases a lease that %q holds", writer, from)
	}
	if proc == nil {
		return
	}
	proc.mu.Lock()
	defer proc.mu.Unlock()
	if proc.leading || proc.inFlight > 0 {
		s.violate(ruleDrainFirst, "%s releases the lease while lead runs (%t) or writes (%d)", writer, proc.leading, proc.inFlight)
	}
}

func (s *simulation) find(identity string) *simProc {
	for _, r := range s.replicas {
		if r.proc != nil && r.proc.identity == identity {
			return r.proc
		}
	}
	return nil
}

func describe(lease *coordinationv1.Lease) string {
	if lease == nil {
		return "<none>"
	}
	return fmt.Sprintf("{rv %s, term %s, holder %q, %s}", lease.ResourceVersion, termOf(lease), holderOf(lease), durationOf(lease, 0))
}

// returned is called when Run has returned.
func (p *simProc) returned(err error) {
	p.sim.log(p.identity, "Run returns: %v", err)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.gone = true // the process exits
	var lost *LostError
	if !errors.As(err, &lost) && p.refused > 0 {
		p.sim.violate(ruleDrainWrites, "%s left in good order but %d of its writes were refused", p.identity, p.refused)
	}
}

// ledBy returns the holder of the Lease if it has led.
func (s *simulation) ledBy() string {
	lease, err := s.store.get()
	s.mu.Lock()
	defer s.mu.Unlock()
	if err != nil || s.terms[termOf(lease)] != holderOf(lease) {
		return ""
	}
	return holderOf(lease)
}
