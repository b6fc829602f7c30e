// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package healthz

import (
	"errors"
	"fmt"
	"net/http"
	"time"
)

// Elector is what LeaderWatchdog checks.
type Elector interface {
	// Healthy returns an error if this process still leads although its Lease expired more than
	// tolerance ago.
	Healthy(tolerance time.Duration) error
}

// LeaderWatchdog returns the check "leader-election". It fails when an elector leads more than
// tolerance past its Lease: the process should have ended by then, and a failing /livez makes the
// kubelet restart it. A standby passes.
func LeaderWatchdog(tolerance time.Duration, electors ...Elector) Check {
	return NamedCheck("leader-election", func(*http.Request) error {
		var errs []error
		for _, e := range electors {
			errs = append(errs, e.Healthy(tolerance))
		}
		return errors.Join(errs...)
	})
}

// Worker is what Controller checks.
type Worker interface {
	// LongestRunning returns the key of the reconcile that has been in flight for longest, and for
	// how long; "" and 0 if none is.
	LongestRunning(now time.Time) (key string, running time.Duration)
	// Problem returns what else keeps the controller from its work, for instance a permission that
	// its cache lacks, or nil.
	Problem() error
}

// Controller returns the check "controller-NAME". It fails while a reconcile has been running for
// longer than limit, since a stuck reconcile holds its worker and its key for ever and nothing else
// would show it. It also fails while worker has a problem.
func Controller(name string, worker Worker, limit time.Duration) Check {
	return NamedCheck("controller-"+name, func(*http.Request) error {
		if key, age := worker.LongestRunning(time.Now()); age > limit {
			return fmt.Errorf("reconciling %s for %s, longer than --controller-stuck-after=%s", key, age.Round(time.Second), limit)
		}
		return worker.Problem()
	})
}
