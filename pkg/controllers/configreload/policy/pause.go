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

// Pause is when a run expects a pause to end. Until stays the same as long as the annotations do, since
// clocks may jump.
type Pause struct {
	since  string
	period time.Duration
	Until  time.Time
}

// PauseState decides on a pause by the annotations and by the pause that the run knows, so that a restart or
// another leader comes to the same decision. The rest of a pause is at most its period, even if the pause
// began in the future. The zero Pause means that no pause of ours is active.
func (k *AnnotationKeys) PauseState(workload *Workload, s *Selection, known Pause, now time.Time) (PauseStep, Pause) {
	since, hasTime := workload.Annotations[k.pauseAt]
	if !k.compat || !workload.Kind.Pauses || !hasTime {
		return PauseStands, Pause{}
	}
	if !workload.Paused {
		return PauseOver, Pause{}
	}
	started, err := time.Parse(time.RFC3339, since)
	if err != nil || s.pause == 0 {
		return PauseEnds, Pause{}
	}
	if known.since != since || known.period != s.pause {
		known = Pause{since, s.pause, now.Add(min(started.Add(s.pause).Sub(now), s.pause))}
	}
	if !known.Until.After(now) {
		return PauseEnds, Pause{}
	}
	return PauseStands, known
}

// PausedByUs reports whether the workload carries the time of a pause.
func (k *AnnotationKeys) PausedByUs(workload *Workload) bool {
	_, hasTime := workload.Annotations[k.pauseAt]
	return hasTime && k.compat && workload.Kind.Pauses
}

// parsePause reads how long a reload pauses a Deployment.
func (k *AnnotationKeys) parsePause(s *Selection, meta map[string]string) {
	value, set := meta[k.pause]
	if !k.compat || !set {
		return
	}
	d, err := time.ParseDuration(value)
	if err == nil && d <= 0 {
		err = fmt.Errorf("%v is not positive", d)
	}
	if err != nil {
		s.BadPause = &Problem{k.pause, Truncate(err.Error())}
		return
	}
	s.pause = d
}
