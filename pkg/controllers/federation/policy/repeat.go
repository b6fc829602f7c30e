// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import "time"

const (
	repeatWindow = 10 * time.Minute
	freeRepeats  = 5
	minRepeat    = 30 * time.Second
	maxRepeat    = 10 * time.Minute
)

// Repeats are the writes of the same content to an object. Somebody who reverts each of them would
// otherwise have it written without end. The zero value has no writes.
type Repeats struct {
	content uint64
	// at has the times of the last five writes.
	at   []time.Time
	wait time.Duration
}

// Next returns when the content may be written; the zero time is at once.
func (r *Repeats) Next(content uint64) time.Time {
	if content != r.content || r.wait == 0 {
		return time.Time{}
	}
	return r.at[len(r.at)-1].Add(r.wait)
}

// Wrote counts a write. It reports whether the next one of the same content has to wait.
func (r *Repeats) Wrote(content uint64, now time.Time) bool {
	if content != r.content || r.Idle(now) {
		*r = Repeats{content: content}
	}
	if len(r.at) == freeRepeats {
		r.at = append(r.at[:0], r.at[1:]...)
	}
	r.at = append(r.at, now)
	switch {
	case r.wait > 0:
		r.wait = min(2*r.wait, maxRepeat)
	case len(r.at) == freeRepeats && now.Sub(r.at[0]) < repeatWindow:
		r.wait = minRepeat
	}
	return r.wait > 0
}

// Idle reports whether the writes are so long ago that they need not be remembered.
func (r *Repeats) Idle(now time.Time) bool {
	return len(r.at) == 0 || now.Sub(r.at[len(r.at)-1]) >= r.wait+repeatWindow
}
