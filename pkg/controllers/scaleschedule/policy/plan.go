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

// History is what others did to a workload while it is to be down, and what was done about it. It begins anew
// with each run and each downtime.
type History struct {
	// RaisedAt is when it was first seen above its target, with a record.
	RaisedAt time.Time
	// Contests is how often it was scaled down again.
	Contests int
	// LostRecord is a record that somebody has removed while nothing else changed; 0 if there is none.
	// RecordRestored says that one was put back.
	LostRecord     int64
	RecordRestored bool
}

// Contested reports whether the workload is left to whoever has raised it.
func (h *History) Contested() bool { return h.Contests >= maxContests && !h.RaisedAt.IsZero() }

// Action is what is written.
type Action uint8

// The actions. RemoveRecord and RestoreRecord leave the number of replicas alone.
const (
	Nothing Action = iota
	ScaleDown
	ScaleUp
	RemoveRecord
	RestoreRecord
)

// Plan is what to do about a workload.
type Plan struct {
	Action Action
	// Number and Record are what is written. A record is written by ScaleDown and RestoreRecord.
	Number, Record int64
	// Repeated says that the workload is scaled down again, after somebody has raised it.
	Repeated bool
	// Wait is when to look again; 0 is at the next change.
	Wait time.Duration
	// History is what is to be remembered before anything is written.
	History History
	Problem *Problem
}

// Rival says what else scales the workload.
type Rival uint8

// The rivals.
const (
	RivalNone Rival = iota
	RivalAutoscaler
	RivalKEDA
)

// Plan returns what to do about a workload.
func (e *Evaluator) Plan(workload *Object, kind Kind, verdict *Verdict, rival Rival, history History, now time.Time) (plan Plan) {
	if verdict.Desired == AsIs {
		return plan
	}
	recorded, err := workload.record(kind)
	if err == nil && workload.Unreadable {
		err = errors.New("the present number of replicas cannot be understood")
	}
	if err != nil {
		plan.Problem = &Problem{ScopeWorkload, InvalidSchedule, Record, fmt.Sprintf("%s: %v; it is not scaled", recordName, err)}
		return plan
	}
	target := verdict.Target
	if kind == CronJob {
		target = 0
	}
	if verdict.Desired == Up {
		return workload.planUp(kind, recorded, target)
	}
	plan.History = history
	switch {
	case rival == RivalKEDA, kind == Autoscaler && workload.Owned:
		return plan
	case kind == Autoscaler && target == 0:
		if workload.has(Uptime, Downtime, UpscalePeriod, DownscalePeriod, ForceUptime, ForceDowntime, DowntimeReplicas, DownscaleReplicas) {
			plan.Problem = &Problem{ScopeWorkload, InvalidSchedule, DowntimeReplicas, workload.annotation(DowntimeReplicas) + " must be at least 1 for a HorizontalPodAutoscaler; it is not scaled"}
		}
		return plan
	case rival == RivalAutoscaler && target > 0:
		plan.Problem = &Problem{ScopeWorkload, ScaledByOther, DowntimeReplicas, "a HorizontalPodAutoscaler scales it, so it is not scaled to more than 0; annotate the HorizontalPodAutoscaler"}
		return plan
	}
	e.planDown(&plan, workload, recorded, target, now)
	return plan
}

// planUp returns the plan for a workload that is to be up. Without a record it is left as it is, even if it
// is stopped. With the record 3, a workload at 0 gets 3 replicas. One at 5, which somebody has raised, keeps
// them and only loses its record; so does one below its target, which somebody has lowered.
func (o *Object) planUp(kind Kind, recorded, target int64) (plan Plan) {
	if !o.HasRecord() {
		return plan
	}
	plan.Action, plan.Number = ScaleUp, recorded
	if kind == Autoscaler {
		plan.Number = min(recorded, o.Max)
	}
	if o.Number >= recorded || o.Number < target || o.Number == plan.Number {
		plan.Action = RemoveRecord
	}
	return plan
}

// planDown completes the plan for a workload that is to be down. With the target 0, a workload at 3 goes to 0
// with the record 3. One at 0 stays, and gets a record back that somebody has removed, once in a downtime.
// One at 5 with the record 3 was raised by somebody: after the hold it goes down again, with the record 5.
// After maxContests times it is left alone.
func (e *Evaluator) planDown(plan *Plan, workload *Object, recorded, target int64, now time.Time) {
	history := &plan.History
	if workload.Number <= target {
		history.RaisedAt = time.Time{}
		if !workload.HasRecord() && history.LostRecord > target && !history.RecordRestored {
			plan.Action, plan.Record = RestoreRecord, history.LostRecord
		}
		return
	}
	if workload.HasRecord() {
		if history.RaisedAt.IsZero() {
			history.RaisedAt = now
		}
		if history.Contested() {
			plan.Problem = &Problem{ScopeWorkload, ScaleContested, DowntimeReplicas, fmt.Sprintf(
				"it was scaled down again %d times and raised each time, so it is left as it is until the next boundary", maxContests)}
			return
		}
		if plan.Wait = history.RaisedAt.Add(e.Hold).Sub(now); plan.Wait > 0 {
			return
		}
		plan.Wait, plan.Repeated = 0, true
	}
	plan.Action, plan.Number, plan.Record = ScaleDown, target, max(recorded, workload.Number)
}

// Patch returns the JSON merge patch of a plan. It applies to that version of the object and no other.
func (e *Evaluator) Patch(workload *Object, kind Kind, plan *Plan, version string) []byte {
	own, other := recordNames(e.Compat)
	annotations := map[string]any{}
	if workload.has(Record) {
		annotations[own] = nil
	}
	if workload.has(OtherRecord) {
		annotations[other] = nil
	}
	if plan.Action == ScaleDown || plan.Action == RestoreRecord {
		annotations[own] = formatNumber(plan.Record)
	}
	patch := map[string]any{"metadata": map[string]any{"resourceVersion": version, "annotations": annotations}}
	if plan.Action == ScaleDown || plan.Action == ScaleUp {
		switch kind {
		case CronJob:
			patch["spec"] = map[string]any{"suspend": plan.Number == 0}
		case Autoscaler:
			patch["spec"] = map[string]any{"minReplicas": plan.Number}
		case ScaledObject:
			annotations[pausedReplicas] = nil
			if plan.Number != Unpaused {
				annotations[pausedReplicas] = formatNumber(plan.Number)
			}
		default:
			patch["spec"] = map[string]any{"replicas": plan.Number}
		}
	}
	data, _ := json.Marshal(patch) // strings and numbers always marshal
	return data
}

// DescribeNumber returns a number of a kind for people.
func DescribeNumber(kind Kind, n int64) string {
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
