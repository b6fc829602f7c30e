// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package election

import (
	"time"

	"golang.org/x/sys/unix"

	"github.com/quartermaster-dev/quartermaster/pkg/election/protocol"
)

// bootClock reads CLOCK_BOOTTIME.
type bootClock struct{}

// NewBootClock returns a clock that advances while the machine is suspended.
func NewBootClock() protocol.Clock { return bootClock{} }

// Now implements protocol.Clock.
func (bootClock) Now() time.Duration {
	var ts unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts) // it fails for clocks that the kernel lacks, not for this one
	return time.Duration(ts.Nano())
}
