// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"fmt"
	"time"
)

// PauseStep is what has to be done for a Deployment's pause, apart from any reload.
type PauseStep int

// The steps of a pause.
const (
	PauseStands PauseStep = iota // nothing to do now
	PauseEnds                    // resume, and remove the time
	PauseOver                    // somebody resumed it: remove the time only
)

// PauseState decides on a pause by the annotations alone, so that a restart or another leader comes
// to the same decision. The duration says when to check again; zero means that no pause of ours is
// active.
func (k *Keys) PauseState(w *Workload, r *Rules, now time.Time) (PauseStep, time.Duration) {
	since, ours := w.Meta[k.pauseAt]
	if !k.compat || !w.Kind.Pauses || !ours {
		return PauseStands, 0
	}
	if !w.Paused {
		return PauseOver, 0
	}
	started, err := time.Parse(time.RFC3339, since)
	if left := started.Add(r.pause).Sub(now); err == nil && r.pause > 0 && left > 0 {
		return PauseStands, left
	}
	return PauseEnds, 0
}

// PausedByUs reports whether the workload carries the time of a pause.
func (k *Keys) PausedByUs(w *Workload) bool {
	_, ours := w.Meta[k.pauseAt]
	return ours && k.compat && w.Kind.Pauses
}

// parsePause reads how long a reload pauses a Deployment.
func (k *Keys) parsePause(r *Rules, meta map[string]string) {
	value, set := meta[k.pause]
	if !k.compat || !set {
		return
	}
	d, err := time.ParseDuration(value)
	if err == nil && d <= 0 {
		err = fmt.Errorf("%v is not positive", d)
	}
	if err != nil {
		r.BadPause = &Problem{k.pause, err.Error()}
		return
	}
	r.pause = d
}
