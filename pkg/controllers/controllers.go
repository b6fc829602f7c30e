// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package controllers holds what all controllers share: the queue loop, the
// mapping from watch events to keys, the loop's metrics and its status.
//
// A controller is a package below this one. Its constructor builds a [Loop]
// around a reconcile function; its Run hands the loop the informers to watch:
//
//	func (c *Controller) Run(ctx context.Context) error {
//		return c.loop.Run(ctx, controllers.WatchSelf(c.informer))
//	}
package controllers

import "context"

// Controller is what the host runs while this replica leads.
type Controller interface {
	// Run works until ctx ends, finishes what is in flight and returns nil when
	// none of its work goes on. The host waits for that for as long as
	// --shutdown-timeout says. After an error it assumes that some work goes on and
	// does not release the lease. A Run that returns earlier is started again.
	Run(ctx context.Context) error

	// Status may be called at any time, also before Run.
	Status() Status
}
