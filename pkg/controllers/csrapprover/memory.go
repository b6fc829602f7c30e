// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package csrapprover

import (
	"sync"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/csrapprover/policy"
)

// memory is what a run remembers of requests, by name, until the cache shows that they are decided or gone.
type memory struct {
	mu         sync.Mutex
	waitStates map[string]waitState
	// sentApprovals has the nodes of requests of which an approval was sent. The cache may not show it yet.
	sentApprovals map[string]hash
}

// waitState says why a request waits. Its size matters, since there may be thousands.
type waitState struct {
	// checks has bit n set for each failed check n, and bit 0 once the request was decided on.
	checks uint16
	// refusals counts the answers 403 in a row.
	refusals uint8
}

func newMemory() *memory {
	return &memory{waitStates: map[string]waitState{}, sentApprovals: map[string]hash{}}
}

func (m *memory) forget(name string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.waitStates, name)
	delete(m.sentApprovals, name)
}

// recordWait notes why a request waits, and reports whether the failed checks are new.
func (m *memory) recordWait(name string, problems []policy.Problem) bool {
	current := waitState{checks: 1}
	for _, p := range problems {
		current.checks |= 1 << p.Check
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	before, waited := m.waitStates[name]
	m.waitStates[name] = current
	delete(m.sentApprovals, name)
	return !waited || before.checks != current.checks
}

// isFinal reports whether a request has failed a check for good. The checks before CheckNodeExists judge only
// the request, which never changes; their bits are 1 to CheckNodeExists-1.
func (m *memory) isFinal(name string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.waitStates[name].checks&(1<<policy.CheckNodeExists-2) != 0
}

// recordRefusal notes a refusal, and returns how many came before it.
func (m *memory) recordRefusal(name string) (before uint8) {
	m.mu.Lock()
	defer m.mu.Unlock()
	w := m.waitStates[name]
	before, w.refusals = w.refusals, min(w.refusals+1, 100) // the delay has long reached its maximum
	m.waitStates[name] = w
	return before
}

// count returns how many waiting requests match.
func (m *memory) count(matches func(waitState) bool) (n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, w := range m.waitStates {
		if matches(w) {
			n++
		}
	}
	return n
}
