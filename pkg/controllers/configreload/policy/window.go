// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"maps"
	"time"
)

// Window collects the changes for one reload. The zero value means that there is no window.
type Window struct {
	First, Last time.Time
	// Changes holds the sources that were seen to change.
	Changes map[SourceKey]Change
	// ChangeCount counts the changes, so that a change during the write of a reload is not dropped with the
	// window.
	ChangeCount int
	// WaitReported is set when the Event about waiting for a Job was sent.
	WaitReported bool
}

// Change is the change of a source during a window.
type Change struct {
	At     time.Time // of the last change
	Before string    // as recorded in a state, before the first change
}

// IsOpen reports whether there is a window.
func (w *Window) IsOpen() bool { return !w.First.IsZero() }

// Open begins a window for a difference that no event announced.
func (w *Window) Open(now time.Time) {
	if !w.IsOpen() {
		w.First, w.Last = now, now
	}
}

// Add notes changes of a source, from first to last, if they are not noted yet. It returns true if they
// join changes that are already waiting.
func (w *Window) Add(key SourceKey, before string, first, last time.Time) (joined bool) {
	earlier, ok := w.Changes[key]
	switch {
	case ok && !last.After(earlier.At):
		return false
	case ok:
		before = earlier.Before
	}
	joined = w.IsOpen()
	w.Open(first)
	if last.After(w.Last) {
		w.Last = last
	}
	if w.Changes == nil {
		w.Changes = map[SourceKey]Change{}
	}
	w.Changes[key] = Change{At: last, Before: before}
	w.ChangeCount++
	return joined
}

// Close ends the window in which a decision was made. Changes since then keep a window open.
func (w *Window) Close(decided *Window, now time.Time) {
	if w.ChangeCount == decided.ChangeCount {
		*w = Window{ChangeCount: w.ChangeCount}
		return
	}
	w.First, w.WaitReported = now, false
}

// Clone returns a copy that shares nothing with w.
func (w *Window) Clone() Window {
	c := *w
	c.Changes = maps.Clone(w.Changes)
	return c
}
