// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package controllers

import "context"

// Controller is what the host runs while this replica leads.
type Controller interface {
	// Run works until ctx ends, finishes what is in flight, and returns nil when none of its work
	// goes on. The host waits for this as long as --shutdown-timeout says. If Run returns an error,
	// the host assumes that some work goes on and does not release the Lease; ctx.Err() counts as nil.
	// If Run returns before ctx ends, the host starts it again.
	Run(ctx context.Context) error

	// Status returns what the controller is doing. It may be called at any time, also before Run.
	Status() Status
}
