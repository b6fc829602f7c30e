// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"fmt"
	"slices"
	"sync"
)

// enable switches the controllers on that are among entries, and the others off. It answers errRestart, and changes
// nothing, when one of entries was not enabled at the start: the cache does not have what it needs.
func (cs hostedControllers) enable(entries []Entry) error {
	for _, e := range entries {
		if !slices.ContainsFunc(cs, func(c hosted) bool { return c.name == e.Name }) {
			return fmt.Errorf("%s was not enabled at the start: %w", e.Name, errRestart)
		}
	}
	for _, c := range cs {
		c.toggle.set(slices.ContainsFunc(entries, func(e Entry) bool { return e.Name == c.name }))
	}
	return nil
}

// toggle is the switch of one controller.
type toggle struct {
	mu      sync.Mutex
	on      bool
	changed chan struct{} // closed at the next change
}

func newToggle() *toggle { return &toggle{on: true, changed: make(chan struct{})} }

func (t *toggle) set(on bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.on == on {
		return
	}
	t.on = on
	close(t.changed)
	t.changed = make(chan struct{})
}

func (t *toggle) state() (on bool, changed <-chan struct{}) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.on, t.changed
}

// waitOn waits until the switch is on and answers true, or false when ctx ended first.
func (t *toggle) waitOn(ctx context.Context) bool {
	for {
		on, changed := t.state()
		if on {
			return ctx.Err() == nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return false
		}
	}
}

// whileOn returns a context that ends with ctx, by stop, or when the switch is turned off.
func (t *toggle) whileOn(parent context.Context) (ctx context.Context, stop context.CancelFunc) {
	ctx, stop = context.WithCancel(parent)
	on, changed := t.state()
	if !on {
		stop()
		return ctx, stop
	}
	go func() {
		select {
		case <-changed:
			stop()
		case <-ctx.Done():
		}
	}()
	return ctx, stop
}
