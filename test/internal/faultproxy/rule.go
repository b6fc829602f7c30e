// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package faultproxy

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"time"
)

// ActiveRule is a rule that a proxy applies until Remove is called or its Times are used up.
type ActiveRule struct {
	Rule
	proxy *Proxy

	hits    int           // guarded by proxy.mu
	changed chan struct{} // closed and replaced at each hit, guarded by proxy.mu
}

// Add adds a rule after the existing rules. All rules that match a request apply to it in this order, until
// a rule responds.
func (p *Proxy) Add(r Rule) *ActiveRule {
	p.mu.Lock()
	defer p.mu.Unlock()
	active := &ActiveRule{Rule: r, proxy: p, changed: make(chan struct{})}
	p.rules = append(p.rules, active)
	return active
}

// Remove ends the rule. Requests that it holds stay held.
func (a *ActiveRule) Remove() {
	a.proxy.mu.Lock()
	defer a.proxy.mu.Unlock()
	a.remove()
}

func (a *ActiveRule) remove() {
	a.proxy.rules = slices.DeleteFunc(a.proxy.rules, func(other *ActiveRule) bool { return other == a })
}

// Hits returns the number of requests to which the rule has applied.
func (a *ActiveRule) Hits() int {
	a.proxy.mu.Lock()
	defer a.proxy.mu.Unlock()
	return a.hits
}

// WaitHits waits until the rule has applied to n requests. A request that it holds counts from its
// arrival.
func (a *ActiveRule) WaitHits(ctx context.Context, n int) error {
	for {
		a.proxy.mu.Lock()
		hits, changed := a.hits, a.changed
		a.proxy.mu.Unlock()
		if hits >= n {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("wait for request %d of the rule, %d came: %w", n, hits, context.Cause(ctx))
		}
	}
}

// applyingRules returns the rules that apply to the request, and counts the request for each of them.
func (p *Proxy) applyingRules(r *http.Request) []*ActiveRule {
	p.mu.Lock()
	defer p.mu.Unlock()
	var rules []*ActiveRule
	for _, a := range slices.Clone(p.rules) {
		if a.Match != nil && !a.Match(r) {
			continue
		}
		a.hits++
		close(a.changed)
		a.changed = make(chan struct{})
		if a.Times > 0 && a.hits >= a.Times {
			a.remove()
		}
		rules = append(rules, a)
		if a.Status != 0 {
			break // it responds, so later rules do not see the request
		}
	}
	return rules
}

// waitAsRuled waits as the rule says and reports whether the client is still connected.
func (a *ActiveRule) waitAsRuled(ctx context.Context) bool {
	if a.Delay > 0 {
		timer := time.NewTimer(a.Delay)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-ctx.Done():
			return false
		}
	}
	if a.Hold != nil {
		select {
		case <-a.Hold:
		case <-ctx.Done():
			return false
		}
	}
	return true
}
