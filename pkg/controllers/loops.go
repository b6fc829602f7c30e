// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package controllers

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"

	"github.com/quartermaster-dev/quartermaster/internal/panics"
)

// Loops are the loops of a controller that has several, and give it its Run and Status. Each is a [Loop], or
// embeds one.
type Loops []Controller

// Run runs the loops beside each other until ctx ends. If one ends earlier, all end. If one panics, Run does.
func (l Loops) Run(ctx context.Context) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	// All queues open before any loop runs. Otherwise a loop that begins late drops keys that another loop
	// enqueues at its start, and no watch shows their objects again: when a cluster has gone, federation's loop
	// of clusters enqueues the objects whose status names the cluster.
	for _, loop := range l {
		if one, ok := loop.(interface {
			openQueue()
			dropQueue()
		}); ok {
			one.openQueue()
			defer one.dropQueue()
		}
	}
	errs, panicked := make([]error, len(l)), make(chan panics.Raised, len(l))
	var running sync.WaitGroup
	for i, loop := range l {
		running.Go(func() {
			defer stop()
			defer func() {
				if r := recover(); r != nil {
					panicked <- panics.RaisedBy(r)
				}
			}()
			errs[i] = loop.Run(ctx)
		})
	}
	running.Wait()
	close(panicked)
	if first, ok := <-panicked; ok {
		for other := range panicked {
			first.Stack = append(first.Stack, other.Stack...)
		}
		panic(first) // the host contains it, and logs the stacks
	}
	return errors.Join(errs...)
}

// phasesOfLoops are the phases in the order in which one loop's hides that of others.
var phasesOfLoops = []Phase{PhaseDraining, PhaseSyncing, PhaseRunning, PhaseStopped}

// Status returns the sum of what the loops do, and the most recent of their errors. Details and Problem are
// the controller's to set.
func (l Loops) Status() Status {
	s := Status{Phase: PhaseStopped, InFlight: []InFlight{}}
	for _, loop := range l {
		one := loop.Status()
		if slices.Index(phasesOfLoops, one.Phase) < slices.Index(phasesOfLoops, s.Phase) {
			s.Phase, s.PhaseSince = one.Phase, one.PhaseSince
		}
		if _, name, found := strings.Cut(one.Name, "/"); found {
			one = one.In(" in loop " + name)
		}
		s.Add(one)
	}
	return s
}
