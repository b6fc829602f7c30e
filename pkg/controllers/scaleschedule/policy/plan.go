// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"time"
)

// Kind is a kind of workload.
type Kind string

// The kinds.
const (
	Deployment   Kind = "Deployment"
	StatefulSet  Kind = "StatefulSet"
	Rollout      Kind = "Rollout"
	CronJob      Kind = "CronJob"
	Autoscaler   Kind = "HorizontalPodAutoscaler"
	ScaledObject Kind = "ScaledObject"
)

// pausedReplicas is the annotation by which KEDA pauses a ScaledObject.
const pausedReplicas = "autoscaling.keda.sh/paused-replicas"

// maxContests is how often a workload that others raise is scaled down again in one downtime.
const maxContests = 3

// Remembered is what is remembered of a workload while it is to be down. It begins anew with each run.
type Remembered struct {
	// Raised is when it was first seen above its target, with a record.
	Raised time.Time
	// Contests is how often it was scaled down again.
	Contests int
	// Lost is a record that somebody has removed while nothing else changed; 0 if there is none. PutBack says
	// that one was put back.
	Lost    int64
	PutBack bool
}

// Contested reports whether the workload is left to whoever has raised it.
func (r *Remembered) Contested() bool { return r.Contests >= maxContests && !r.Raised.IsZero() }

// Action is what is written.
type Action uint8

// The actions. Forget only removes the record, PutBack only writes it.
const (
	Nothing Action = iota
	ScaleDown
	ScaleUp
	Forget
	PutBack
)

// Plan is what to do about a workload.
type Plan struct {
	Do Action
	// Number and Record are what is written. A record is written by ScaleDown and PutBack.
	Number, Record int64
	// Again says that the workload is scaled down again.
	Again bool
	// Wait is when to look again; 0 is at the next change.
	Wait time.Duration
	// Remembered is what is to be remembered before anything is written.
	Remembered Remembered
	Problem    *Problem
}

// Rival says who scales the workload besides.
type Rival uint8

// The rivals.
const (
	Nobody Rival = iota
	ByAutoscaler
	ByKEDA
)

// Plan returns what to do about a workload.
func (e *Evaluator) Plan(o *Object, kind Kind, v *Verdict, rival Rival, m Remembered, now time.Time) (p Plan) {
	if v.Wanted == Leave {
		return p
	}
	recorded, err := o.record(kind)
	if err == nil && o.Unreadable {
		err = errors.New("the present number of replicas cannot be understood")
	}
	if err != nil {
		p.Problem = &Problem{OfWorkload, InvalidSchedule, Record, fmt.Sprintf("%s: %v; it is not scaled", record, err)}
		return p
	}
	target := v.Target
	if kind == CronJob {
		target = 0
	}
	if v.Wanted == Up {
		return o.planUp(kind, recorded, target)
	}
	p.Remembered = m
	switch {
	case rival == ByKEDA, kind == Autoscaler && o.Owned:
		return p
	case kind == Autoscaler && target == 0:
		if o.has(Uptime, Downtime, UpscalePeriod, DownscalePeriod, ForceUptime, ForceDowntime, DowntimeReplicas, DownscaleReplicas) {
			p.Problem = &Problem{OfWorkload, InvalidSchedule, DowntimeReplicas, o.annotation(DowntimeReplicas) + " must be at least 1 for a HorizontalPodAutoscaler; it is not scaled"}
		}
		return p
	case rival == ByAutoscaler && target > 0:
		p.Problem = &Problem{OfWorkload, ScaledByOther, DowntimeReplicas, "a HorizontalPodAutoscaler scales it, so it is not scaled to more than 0; annotate the HorizontalPodAutoscaler"}
		return p
	}
	e.planDown(&p, o, recorded, target, now)
	return p
}

func (o *Object) planUp(kind Kind, recorded, target int64) (p Plan) {
	if !o.HasRecord() {
		return p
	}
	p.Do, p.Number = ScaleUp, recorded
	if kind == Autoscaler {
		p.Number = min(recorded, o.Max)
	}
	if o.Number >= recorded || o.Number < target || o.Number == p.Number {
		p.Do = Forget
	}
	return p
}

func (e *Evaluator) planDown(p *Plan, o *Object, recorded, target int64, now time.Time) {
	m := &p.Remembered
	if o.Number <= target {
		m.Raised = time.Time{}
		if !o.HasRecord() && m.Lost > target && !m.PutBack {
			p.Do, p.Record = PutBack, m.Lost
		}
		return
	}
	if o.HasRecord() {
		if m.Raised.IsZero() {
			m.Raised = now
		}
		if m.Contested() {
			p.Problem = &Problem{OfWorkload, ScaleContested, DowntimeReplicas, fmt.Sprintf(
				"it was scaled down again %d times and raised each time, so it is left as it is until the next boundary", maxContests)}
			return
		}
		if p.Wait = m.Raised.Add(e.Hold).Sub(now); p.Wait > 0 {
			return
		}
		p.Wait, p.Again = 0, true
	}
	p.Do, p.Number, p.Record = ScaleDown, target, max(recorded, o.Number)
}

// Patch returns the JSON merge patch of a plan. It applies to that version of the object and no other.
func (e *Evaluator) Patch(o *Object, kind Kind, p *Plan, version string) []byte {
	own, other := recordNames(e.Compat)
	annotations := map[string]any{}
	if o.has(Record) {
		annotations[own] = nil
	}
	if o.has(OtherRecord) {
		annotations[other] = nil
	}
	if p.Do == ScaleDown || p.Do == PutBack {
		annotations[own] = formatNumber(p.Record)
	}
	patch := map[string]any{"metadata": map[string]any{"resourceVersion": version, "annotations": annotations}}
	if p.Do == ScaleDown || p.Do == ScaleUp {
		switch kind {
		case CronJob:
			patch["spec"] = map[string]any{"suspend": p.Number == 0}
		case Autoscaler:
			patch["spec"] = map[string]any{"minReplicas": p.Number}
		case ScaledObject:
			annotations[pausedReplicas] = nil
			if p.Number != Unpaused {
				annotations[pausedReplicas] = formatNumber(p.Number)
			}
		default:
			patch["spec"] = map[string]any{"replicas": p.Number}
		}
	}
	data, _ := json.Marshal(patch) // strings and numbers always marshal
	return data
}

// Describe returns a number of a kind for people.
func Describe(kind Kind, n int64) string {
	switch {
	case kind == CronJob && n == 0:
		return "suspended"
	case kind == CronJob:
		return "not suspended"
	case kind == Autoscaler:
		return fmt.Sprintf("minReplicas %d", n)
	case kind == ScaledObject && n == Unpaused:
		return "not paused"
	case kind == ScaledObject:
		return fmt.Sprintf("paused at %d replicas", n)
	}
	return fmt.Sprintf("%d replicas", n)
}

func formatNumber(n int64) string {
	if n == Unpaused {
		return "-1"
	}
	return strconv.FormatInt(n, 10)
}
