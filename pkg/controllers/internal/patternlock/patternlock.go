// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package patternlock keeps all but one processor free of tenants' patterns. Without it, as many workers as
// there are processors match the lists of one tenant against thousands of names, and everything else
// in the process waits 10 ms for a processor at each of its steps: a write of another tenant's copy, which
// takes a millisecond alone, then takes a quarter of a second.
package patternlock

import "sync"

// mu is for all controllers of the process, since they share its processors.
var mu sync.Mutex

// Do returns the result of matching one name, while no other call of Do runs. Callers that have
// many names call it for each, so that others have their turn in between.
func Do[T any](match func() T) T {
	mu.Lock()
	defer mu.Unlock()
	return match()
}
