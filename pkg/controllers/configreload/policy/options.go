// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package policy decides what config-reload does with a workload. It is pure: nothing here reads a
// clock, a cache or the API server.
//
//	annotations.go, names.go, selection.go  what the annotations of a workload ask for
//	workload.go                             what its pod template refers to
//	source.go, digest.go                    sources, and what the cache keeps of them
//	state.go, window.go                     what is recorded of the sources, and which changes are collected
//	decide.go                               what to do, and when
//	pause.go, marks.go, patch.go            the bytes of the patch
package policy

import "time"

// Strategies: how a reload marks the pod template.
const (
	StrategyEnvVars     = "env-vars"
	StrategyAnnotations = "annotations"
)

// Options are the settings on which decisions depend.
type Options struct {
	// Strategy is env-vars or annotations. Workloads with native annotations are always marked by
	// annotation.
	Strategy string
	// AutoAll rolls every workload that does not opt out.
	AutoAll bool
	// OnCreate and OnDelete count the appearance and the disappearance of a source as a change.
	OnCreate, OnDelete bool
	// AnnotationKeys replaces keys of the compatible annotations, by logical name.
	AnnotationKeys map[string]string
	// A workload is rolled when QuietPeriod has passed without another change, or MaxDelay after
	// the first change, whichever comes first.
	QuietPeriod, MaxDelay time.Duration
	// Compat enables the annotations of stakater/Reloader. The host sets it.
	Compat bool
}
