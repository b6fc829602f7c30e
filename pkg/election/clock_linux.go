// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package election

import (
	"time"

	"golang.org/x/sys/unix"
)

// bootClock reads CLOCK_BOOTTIME.
type bootClock struct{}

// NewBootClock returns a clock that advances while the machine is suspended. It falls back to the
// monotonic clock if the kernel has no such clock.
func NewBootClock() Clock {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		return NewMonotonicClock()
	}
	return bootClock{}
}

// Now implements Clock.
func (bootClock) Now() time.Duration {
	var ts unix.Timespec
	// It worked in NewBootClock with the same arguments.
	_ = unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts)
	return time.Duration(ts.Nano())
}
