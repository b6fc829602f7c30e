// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package election

// NewBootClock returns the monotonic clock. A clock that advances while the machine is suspended is
// implemented on Linux only.
func NewBootClock() Clock {
	return NewMonotonicClock()
}
