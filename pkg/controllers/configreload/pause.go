// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package configreload

import (
	"fmt"
	"time"
)

// pauseRetry is how soon the end of a pause is retried after a failure, also if other failures of
// the workload have made its back-off longer.
const pauseRetry = 10 * time.Second

// pauseStep is what has to be done for a Deployment's pause, apart from any reload.
type pauseStep int

const (
	pauseStands pauseStep = iota // nothing to do now
	pauseEnds                    // resume, and remove the time
	pauseOver                    // somebody resumed it: remove the time only
)

// pauseState decides on a pause by the annotations alone, so that a restart or another leader comes
// to the same decision. The duration says when to check again; zero means that no pause of ours is
// active.
func (k *keys) pauseState(w *workload, r *rules, now time.Time) (pauseStep, time.Duration) {
	since, ours := w.meta[k.pauseAt]
	if !k.compat || w.kind != "Deployment" || !ours {
		return pauseStands, 0
	}
	if !w.Paused {
		return pauseOver, 0
	}
	started, err := time.Parse(time.RFC3339, since)
	period, _ := k.pausePeriod(w, r)
	if left := started.Add(period).Sub(now); err == nil && period > 0 && left > 0 {
		return pauseStands, left
	}
	return pauseEnds, 0
}

// pausePeriod returns how long a reload pauses the Deployment; zero means not at all. The problem
// is nil unless the annotation is there and invalid.
func (k *keys) pausePeriod(w *workload, r *rules) (time.Duration, *problem) {
	value, set := w.meta[k.pause]
	if !k.compat || r.native || w.kind != "Deployment" || !set {
		return 0, nil
	}
	d, err := time.ParseDuration(value)
	if err != nil {
		return 0, &problem{k.pause, err.Error()}
	}
	if d <= 0 {
		return 0, &problem{k.pause, fmt.Sprintf("%v is not positive", d)}
	}
	return d, nil
}
