// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package election

import "time"

// Clock returns the time since some fixed moment before the process began. It must neither stop nor
// go back, and should advance while the machine is suspended, as other machines' clocks do.
type Clock interface {
	Now() time.Duration
}

// MonotonicClock reads Go's monotonic clock, which on Linux stops while the machine is suspended.
// In a testing/synctest bubble it is the bubble's clock.
type MonotonicClock struct {
	origin time.Time
}

// NewMonotonicClock returns a clock that starts at zero now.
func NewMonotonicClock() MonotonicClock {
	return MonotonicClock{origin: time.Now()}
}

// Now implements Clock.
func (c MonotonicClock) Now() time.Duration {
	return time.Since(c.origin)
}
