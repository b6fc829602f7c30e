// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package retrystale runs a decision again if the object that it was made on has changed meanwhile.
package retrystale

import "time"

// attempts is how often one reconcile decides at most. With an object that changes all the time,
// the back-off of the queue takes over.
const attempts = 4

// Do calls step, and calls it again while it returns a stale error, attempts times at most. stale reports
// that the object had changed since it was read, so that step has to decide again: it should read the object
// live unless first is set. last says that the error will be returned.
func Do(stale func(error) bool, step func(first, last bool) (time.Duration, error)) (time.Duration, error) {
	for i := 1; ; i++ {
		after, err := step(i == 1, i == attempts)
		if i == attempts || !stale(err) {
			return after, err
		}
	}
}
