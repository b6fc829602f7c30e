// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package election

import (
	"time"

	"github.com/quartermaster-dev/quartermaster/pkg/election/protocol"
)

// monotonicClock reads Go's clock from a moment on.
type monotonicClock time.Time

// NewBootClock returns Go's monotonic clock. A clock that advances while the machine is suspended is
// implemented on Linux only.
func NewBootClock() protocol.Clock { return monotonicClock(time.Now()) }

// Now implements protocol.Clock.
func (c monotonicClock) Now() time.Duration { return time.Since(time.Time(c)) }
