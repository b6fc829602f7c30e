// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package healthz

import (
	"errors"
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
