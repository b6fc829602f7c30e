// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package protocol

import (
	"hash/fnv"
	"math"
	"math/rand/v2"
	"time"
)

const (
	// MaxLease is the longest lease duration, also for electors of client-go that compete for the Lease. A
	// longer duration in a Lease must be an edit, and counts as MaxLease: a standby remembers the duration even
	// after the Lease is repaired, and would otherwise not lead before it is restarted.
	MaxLease = 10 * time.Minute

	// ClockRateError is by how much, as a fraction, the clock of a replica may run too fast or too
	// slow: one percent, twenty times what the kernel corrects by slewing. chrony may slew by 8 %, after a
	// large offset, unless its maxslewrate is 10,000 ppm or less. Of two replicas, one may be fast and the
	// other slow.
	ClockRateError = 0.01

	// SettleTime is how long the Lease still covers the holder after its fence has closed, if both
	// clocks are off by ClockRateError. In this time the API server also drops the requests that the
	// fence cancelled.
	SettleTime = 250 * time.Millisecond

	// MaxBackoff limits the time between two requests of one kind that are refused. With the
	// jitter, a standby makes less than six requests a minute.
	MaxBackoff = 40 * time.Second

	// never is a time that never comes.
	never = time.Duration(math.MaxInt64)
)

// Clock returns the time since some fixed moment before the process began. It must neither stop nor
// go back, and should advance while the machine is suspended, as other machines' clocks do.
type Clock interface {
	Now() time.Duration
}

// Timing holds the durations of an election.
type Timing struct {
	Lease    time.Duration // how long others wait after a write by the holder
	Deadline time.Duration // how long the holder acts after its own write
	Retry    time.Duration // between two renewals
}

// SafeLease returns the shortest lease duration, in whole seconds, that is safe with the renew
// deadline. On a slow clock, the leader's deadline takes up to deadline/(1-e); on a fast clock, a
// standby waits as little as lease/(1+e). The first must end before the second, by SettleTime.
func SafeLease(deadline time.Duration) time.Duration {
	needed := float64(deadline)*(1+ClockRateError)/(1-ClockRateError) + float64(SettleTime)
	return time.Duration(math.Ceil(needed/float64(time.Second))) * time.Second
}

// RequestTimeout returns the limit for one request. After a renewal that hangs there is time for
// another before the deadline: Retry + 2 x RequestTimeout = Deadline.
func (t Timing) RequestTimeout() time.Duration {
	return (t.Deadline - t.Retry) / 2
}

// Covered returns for how long after a write by the holder, on the holder's own clock, no standby
// can have taken over.
func (t Timing) Covered() time.Duration {
	return time.Duration(float64(t.Lease) * (1 - ClockRateError) / (1 + ClockRateError))
}

// Failure says what follows from the error of a request.
type Failure struct {
	Kind  FailureKind
	After time.Duration // how long the API server asks to wait
}

// FailureKind is a kind of Failure.
type FailureKind int

// The kinds of failures.
const (
	FailNone         FailureKind = iota
	FailConflict                 // another version than the known one is current
	FailRefused                  // the request was not executed, and will be refused again
	FailUnauthorized             // refused, since the credentials of this replica are not accepted
	FailUnanswered               // it may have been executed, or the API server is in trouble
)

// failures counts the failures of one kind in a row.
type failures struct {
	kind FailureKind
	n    int
}

func (c *failures) count(f Failure) {
	if c.kind != f.Kind {
		c.n = 0
	}
	c.kind = f.Kind
	c.n++
}

// NewJitter returns a source of random delays. Replicas have different ones.
func NewJitter(name string) *rand.Rand {
	hash := fnv.New64a()
	_, _ = hash.Write([]byte(name)) // never fails
	return rand.New(rand.NewPCG(hash.Sum64(), 0))
}
