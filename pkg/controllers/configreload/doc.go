// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package configreload rolls workloads whose ConfigMaps or Secrets changed.
//
// A change of a source enqueues the workloads that it concerns and does nothing else. Reconciling a
// workload compares the sources that it watches with what was last recorded of them. If they differ,
// one patch marks the pod template and records the new state together, so that a crash neither
// loses nor repeats a reload. Package policy, which is pure, decides what is to be done. The files of
// this package:
//
//	events.go, index.go                events, and which keys each of them concerns
//	sources.go                         changes of sources, until a workload takes them
//	controller.go                      a reconcile
//	write.go                           writing, Events
//	kinds.go                           the kinds, and how each of them is reloaded
//	cronjobs.go, jobs.go, rollouts.go  the kinds that take more than a patch
//
// The state annotation of a workload has what is recorded of its sources. A run also remembers, in
// memory.go:
//
//	field             what it is                         set by                     cleared by
//	lastState         the newest recorded state that     a decision, once it is     never. A newer annotation
//	                  this run knows, and the version    carried out                takes precedence
//	                  of the workload that carries it
//	window            changes that wait for one reload,  events; a difference that  the reload; or the decision
//	                  with the data before them          no event announced         that nothing is to do
//	writtenVersion    the version of the last write      each patch                 the cache, when it has it
//	rewrittenAt       when a state that somebody else    that write                 rewriteInterval
//	                  changed was last written again
//	reportedProblems  the problems for which there was   a reconcile that finds     a reconcile that finds none
//	                  an Event                           other problems
//	lastRun           the Job that a CronJob was last    its creation               its hashes: when the state
//	                  run as, and for which data                                    is recorded, or by another
//	                                                                                change of a source
//	replacement       a Job that is replaced             its deletion               its creation
//	pause             the pause of a Deployment          a reload, a decision       its end
//
// All fields end with the workload and with the run.
//
// With Config.Compat, the annotations of stakater/Reloader count too.
package configreload
