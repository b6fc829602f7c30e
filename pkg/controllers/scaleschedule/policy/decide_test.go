// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"fmt"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	autoscalingv2 "k8s.io/api/autoscaling/v2"
	batchv1 "k8s.io/api/batch/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// Now is inside of spanNow and outside of spanLater.
var now = mustTime("2026-11-25T12:00:00Z") // a Wednesday

const (
	spanNow   = "Mon-Fri 11:00-13:00 UTC"
	spanLater = "Mon-Fri 13:00-15:00 UTC"
	ds        = "downscaler/"
	qs        = "quartermaster.dev/scale-"
	recordKey = ds + "original-replicas"

	zero      = -1 // replicas
	none      = ""
	downPatch = `{"metadata":{"annotations":{"downscaler/original-replicas":"3"},"resourceVersion":"7"},"spec":{"replicas":0}}`
	upPatch   = `{"metadata":{"annotations":{"downscaler/original-replicas":null},"resourceVersion":"7"},"spec":{"replicas":3}}`
)

func testOptions() Options {
	return Options{Compat: true, GracePeriod: 15 * time.Minute, Hold: 15 * time.Minute, OwnNamespaces: []string{"manager"}}
}

func mustEvaluator(t *testing.T, o Options) *Evaluator {
	t.Helper()
	return NewEvaluator(o, func(flag, format string, args ...any) { t.Fatalf("--"+flag+": "+format, args...) })
}

type annotations map[string]string

// state is a state of a workload; without a kind, the Deployment shop/a, an hour old.
type state struct {
	kind        Kind
	replicas    int64 // 3 if it is not set
	max         int64
	age         time.Duration
	annotations annotations
	namespace   annotations
	options     func(*Options)
	rival       Rival
	history     History
	owned       bool // by a ScaledObject
}

func (s *state) object() runtime.Object {
	if s.kind == "" {
		s.kind = Deployment
	}
	if s.age == 0 {
		s.age = time.Hour
	}
	metadata := metav1.ObjectMeta{Namespace: "shop", Name: "a", CreationTimestamp: metav1.NewTime(now.Add(-s.age)), Annotations: s.annotations,
		Labels: map[string]string{"app": "a"}}
	if s.owned {
		metadata.OwnerReferences = []metav1.OwnerReference{{APIVersion: "keda.sh/v1alpha1", Kind: "ScaledObject", Controller: ptrTo(true)}}
	}
	n := int32(s.replicas)
	switch s.kind {
	case Deployment:
		return &appsv1.Deployment{ObjectMeta: metadata, Spec: appsv1.DeploymentSpec{Replicas: &n}}
	case StatefulSet:
		return &appsv1.StatefulSet{ObjectMeta: metadata, Spec: appsv1.StatefulSetSpec{Replicas: &n}}
	case CronJob:
		return &batchv1.CronJob{ObjectMeta: metadata, Spec: batchv1.CronJobSpec{Suspend: ptrTo(n == 0)}}
	case Autoscaler:
		return &autoscalingv2.HorizontalPodAutoscaler{ObjectMeta: metadata, Spec: autoscalingv2.HorizontalPodAutoscalerSpec{MinReplicas: &n, MaxReplicas: int32(s.max)}}
	}
	u := &unstructured.Unstructured{Object: map[string]any{"spec": map[string]any{}}}
	if s.kind == Rollout {
		u.Object["spec"] = map[string]any{"replicas": s.replicas}
	}
	u.SetGroupVersionKind(schema.GroupVersionKind{Group: "example.com", Version: "v1", Kind: string(s.kind)})
	u.SetAnnotations(metadata.Annotations)
	u.SetCreationTimestamp(metadata.CreationTimestamp)
	return u
}

// decide passes the state through the cache, and returns the verdict, the plan, the patch and the reasons of
// the warnings.
func (s *state) decide(t *testing.T, now time.Time) (verdict Verdict, plan Plan, patch, reasons string) {
	t.Helper()
	o := testOptions()
	if s.options != nil {
		s.options(&o)
	}
	evaluator := mustEvaluator(t, o)
	workload := Decode(evaluator.Digest(s.object()))
	ns := Decode(evaluator.DigestNamespace(&metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Annotations: s.namespace}}))
	verdict = evaluator.Decide(&workload, &ns, now)
	plan = evaluator.Plan(&workload, s.kind, &verdict, s.rival, s.history, now)
	var warnings []string
	for _, problem := range verdict.Problems {
		warnings = append(warnings, problem.Reason)
	}
	if plan.Problem != nil {
		warnings = append(warnings, plan.Problem.Reason)
	}
	if plan.Action != Nothing {
		patch = string(evaluator.Patch(&workload, s.kind, &plan, "7"))
	}
	return verdict, plan, patch, strings.Join(warnings, " ")
}

// TestDecideAndPlanFollowTheSchedule has the patch and the warnings for one state of a workload.
func TestDecideAndPlanFollowTheSchedule(t *testing.T) {
	explicit := func(o *Options) { o.Explicit = true }
	everyDay := func(o *Options) { o.Weekdays = "Mon-Sun" }
	for name, tc := range map[string]struct {
		state
		patch   string
		reasons string
		next    time.Duration // after now; 0 is not compared
	}{
		"a workload inside its downtime goes down":                                            {state{annotations: annotations{ds + "downtime": spanNow}}, downPatch, "", time.Hour},
		"a workload outside its uptime goes down":                                             {state{annotations: annotations{ds + "uptime": spanLater}}, downPatch, "", time.Hour},
		"a workload inside its uptime stays up":                                               {state{annotations: annotations{ds + "uptime": spanNow}}, none, "", time.Hour},
		"a workload outside its downtime stays up":                                            {state{annotations: annotations{ds + "downtime": spanLater}}, none, "", time.Hour},
		"a workload whose downtime has ended comes up":                                        {state{replicas: zero, annotations: annotations{ds + "downtime": spanLater, recordKey: "3"}}, upPatch, "", time.Hour},
		"the downtime of the Namespace scales its workloads down":                             {state{namespace: annotations{ds + "downtime": spanNow}}, downPatch, "", time.Hour},
		"a workload that is always up ignores the downtime of its Namespace":                  {state{annotations: annotations{ds + "uptime": "always"}, namespace: annotations{ds + "downtime": spanNow}}, none, "", 0},
		"the Namespace wins over the flag":                                                    {state{namespace: annotations{ds + "downtime": "never"}, options: func(o *Options) { o.DefaultDowntime = "always" }}, none, "", 0},
		"the flag counts where neither workload nor Namespace has a schedule":                 {state{options: func(o *Options) { o.DefaultDowntime = "always" }}, downPatch, "", 0},
		"downtime wins over uptime":                                                           {state{annotations: annotations{ds + "uptime": spanNow, ds + "downtime": spanNow}}, downPatch, "", 0},
		"a period makes the downtime of its scope void":                                       {state{annotations: annotations{ds + "downscale-period": spanLater, ds + "downtime": spanNow}}, none, "", time.Hour},
		"a workload inside its downscale period goes down":                                    {state{annotations: annotations{ds + "downscale-period": spanNow}}, downPatch, "", time.Hour},
		"a workload that is down stays down outside its downscale period":                     {state{replicas: zero, annotations: annotations{ds + "downscale-period": spanLater, recordKey: "3"}}, none, "", time.Hour},
		"a workload inside its upscale period comes up":                                       {state{replicas: zero, annotations: annotations{ds + "upscale-period": spanNow, recordKey: "3"}}, upPatch, "", time.Hour},
		"a workload inside both periods is left as it is":                                     {state{annotations: annotations{ds + "upscale-period": spanNow, ds + "downscale-period": spanNow}}, none, ConflictingSchedule, time.Hour},
		"a workload with both forces is left as it is":                                        {state{annotations: annotations{ds + "force-uptime": "true", ds + "force-downtime": "true"}}, none, ConflictingSchedule, 0},
		"force-uptime of the workload wins over its downtime":                                 {state{annotations: annotations{ds + "downtime": spanNow, ds + "force-uptime": "true"}}, none, "", 0},
		"force-uptime of the Namespace wins over the workload's downtime":                     {state{annotations: annotations{ds + "downtime": spanNow}, namespace: annotations{ds + "force-uptime": "true"}}, none, "", 0},
		"force-downtime of the Namespace wins over the workload's uptime":                     {state{annotations: annotations{ds + "uptime": "always"}, namespace: annotations{ds + "force-downtime": spanNow}}, downPatch, "", time.Hour},
		"force-uptime does not count outside its span":                                        {state{annotations: annotations{ds + "downtime": spanNow}, namespace: annotations{ds + "force-uptime": spanLater}}, downPatch, "", time.Hour},
		"a workload that its Namespace excludes is left as it is":                             {state{annotations: annotations{ds + "downtime": spanNow}, namespace: annotations{ds + "exclude": "true"}}, none, "", 0},
		"a workload can undo the exclusion of its Namespace":                                  {state{annotations: annotations{ds + "downtime": spanNow, ds + "exclude": "false"}, namespace: annotations{ds + "exclude": "true"}}, downPatch, "", 0},
		"a workload is left as it is inside the span of exclude":                              {state{annotations: annotations{ds + "downtime": "always", ds + "exclude": spanNow}}, none, "", time.Hour},
		"--scale-schedule-explicit leaves alone a workload without exclude":                   {state{annotations: annotations{ds + "downtime": spanNow}, options: explicit}, none, "", 0},
		"--scale-schedule-explicit counts a workload whose Namespace has exclude":             {state{annotations: annotations{ds + "downtime": spanNow}, namespace: annotations{ds + "exclude": "false"}, options: explicit}, downPatch, "", 0},
		"exclude-until may be a day":                                                          {state{annotations: annotations{ds + "downtime": "always", ds + "exclude-until": "2026-11-26"}}, none, "", 12 * time.Hour},
		"exclude-until may be a minute of a day":                                              {state{annotations: annotations{ds + "downtime": "always", ds + "exclude-until": "2026-11-25T12:30"}}, none, "", 30 * time.Minute},
		"exclude-until may have an offset from UTC":                                           {state{annotations: annotations{ds + "downtime": "always", ds + "exclude-until": "2026-11-25T12:30:00-01:00"}}, none, "", 90 * time.Minute},
		"an exclude-until in the past excludes nothing":                                       {state{annotations: annotations{ds + "downtime": spanNow, ds + "exclude-until": "2025-11-26"}}, downPatch, "", 0},
		"a past exclude-until of the workload lets the Namespace's count":                     {state{annotations: annotations{ds + "downtime": spanNow, ds + "exclude-until": "2025-11-26"}, namespace: annotations{ds + "exclude-until": "2026-11-26"}}, none, "", 12 * time.Hour},
		"an exclude-until that is no time is an invalid schedule":                             {state{annotations: annotations{ds + "downtime": spanNow, ds + "exclude-until": "tomorrow"}}, none, InvalidSchedule, 0},
		"a new workload is left as it is during the grace period":                             {state{age: time.Minute, annotations: annotations{ds + "downtime": spanNow}}, none, "", 14 * time.Minute},
		"a grace period of 30 seconds has ended after a minute":                               {state{age: time.Minute, annotations: annotations{ds + "downtime": spanNow, ds + "grace-period": "30"}}, downPatch, "", 0},
		"the grace period of the Namespace may be a duration":                                 {state{age: time.Minute, annotations: annotations{ds + "downtime": spanNow}, namespace: annotations{ds + "grace-period": "1m30s"}}, none, "", 30 * time.Second},
		"the grace period counts from the time in the annotation":                             {state{annotations: annotations{ds + "downtime": spanNow, "deployed": "2026-11-25T11:50:00Z"}, options: func(o *Options) { o.TimeAnnotation = "deployed" }}, none, "", 5 * time.Minute},
		"the grace period does not keep a workload down":                                      {state{age: time.Minute, replicas: zero, annotations: annotations{recordKey: "3"}}, upPatch, "", 0},
		"a negative grace period is an invalid schedule":                                      {state{annotations: annotations{ds + "downtime": spanNow, ds + "grace-period": "-1"}}, none, InvalidSchedule, 0},
		"downtime-replicas of 1 scales down to 1":                                             {state{annotations: annotations{ds + "downtime": spanNow, ds + "downtime-replicas": "1"}}, strings.Replace(downPatch, `s":0`, `s":1`, 1), "", 0},
		"downscale-replicas of 1 scales down to 1":                                            {state{annotations: annotations{ds + "downtime": spanNow, ds + "downscale-replicas": "1"}}, strings.Replace(downPatch, `s":0`, `s":1`, 1), "", 0},
		"a workload at its target is left as it is":                                           {state{replicas: 1, annotations: annotations{ds + "downtime": spanNow, ds + "downtime-replicas": "1"}}, none, "", 0},
		"a workload below its target is left as it is":                                        {state{replicas: zero, annotations: annotations{ds + "downtime": spanNow, ds + "downtime-replicas": "1"}}, none, "", 0},
		"two targets that differ are an invalid schedule":                                     {state{annotations: annotations{ds + "downtime": spanNow, ds + "downtime-replicas": "1", ds + "downscale-replicas": "0"}}, none, InvalidSchedule, 0},
		"two targets that agree count as one":                                                 {state{annotations: annotations{ds + "downtime": spanNow, ds + "downtime-replicas": "0", ds + "downscale-replicas": "0"}}, downPatch, "", 0},
		"a target below 0 is an invalid schedule":                                             {state{annotations: annotations{ds + "downtime": spanNow, ds + "downtime-replicas": "-1"}}, none, InvalidSchedule, 0},
		"a target above 2147483647 is an invalid schedule":                                    {state{annotations: annotations{ds + "downtime": spanNow, ds + "downtime-replicas": "2147483648"}}, none, InvalidSchedule, 0},
		"a workload whose schedule is gone comes up":                                          {state{replicas: zero, annotations: annotations{recordKey: "3"}}, upPatch, "", 0},
		"a workload that somebody stopped stays down in its uptime":                           {state{replicas: zero, annotations: annotations{ds + "uptime": spanNow}}, none, "", 0},
		"a workload that somebody raises is left alone at first":                              {state{replicas: 2, annotations: annotations{ds + "downtime": spanNow, recordKey: "3"}}, none, "", 0},
		"a workload that somebody raised 15 minutes ago goes down again":                      {state{replicas: 2, annotations: annotations{ds + "downtime": spanNow, recordKey: "3"}, history: History{RaisedAt: now.Add(-15 * time.Minute)}}, downPatch, "", 0},
		"the larger number of a raised workload becomes the record":                           {state{replicas: 5, annotations: annotations{ds + "downtime": spanNow, recordKey: "3"}, history: History{RaisedAt: now.Add(-15 * time.Minute), Contests: 2}}, strings.Replace(downPatch, "3", "5", 1), "", 0},
		"a workload that is raised for the fourth time is left alone":                         {state{replicas: 5, annotations: annotations{ds + "downtime": spanNow, recordKey: "3"}, history: History{RaisedAt: now.Add(-15 * time.Minute), Contests: 3}}, none, ScaleContested, 0},
		"a workload above its record keeps its number when it comes up":                       {state{replicas: 4, annotations: annotations{ds + "uptime": spanNow, recordKey: "3"}}, `{"metadata":{"annotations":{"downscaler/original-replicas":null},"resourceVersion":"7"}}`, "", 0},
		"a workload below its target keeps its number when it comes up":                       {state{replicas: zero, annotations: annotations{ds + "uptime": spanNow, ds + "downtime-replicas": "1", recordKey: "3"}}, `{"metadata":{"annotations":{"downscaler/original-replicas":null},"resourceVersion":"7"}}`, "", 0},
		"a record that somebody removed is put back":                                          {state{replicas: zero, annotations: annotations{ds + "downtime": spanNow}, history: History{LostRecord: 3}}, `{"metadata":{"annotations":{"downscaler/original-replicas":"3"},"resourceVersion":"7"}}`, "", 0},
		"a record that is removed again is not put back":                                      {state{replicas: zero, annotations: annotations{ds + "downtime": spanNow}, history: History{LostRecord: 3, RecordRestored: true}}, none, "", 0},
		"a record that is no number is an invalid schedule in the downtime":                   {state{annotations: annotations{ds + "downtime": spanNow, recordKey: "x"}}, none, InvalidSchedule, 0},
		"a record that is no number is an invalid schedule in the uptime":                     {state{annotations: annotations{recordKey: "x"}}, none, InvalidSchedule, 0},
		"a negative record is an invalid schedule":                                            {state{annotations: annotations{recordKey: "-1"}}, none, InvalidSchedule, 0},
		"a record above 2147483647 is an invalid schedule":                                    {state{annotations: annotations{recordKey: "2147483648"}}, none, InvalidSchedule, 0},
		"a record of 5,000 digits is an invalid schedule":                                     {state{annotations: annotations{recordKey: strings.Repeat("0", 5000)}}, none, InvalidSchedule, 0},
		"a zone by its abbreviation is an invalid schedule":                                   {state{annotations: annotations{ds + "downtime": "Mon-Fri 8-18 PST"}}, none, InvalidSchedule, 0},
		"the zone Local is an invalid schedule":                                               {state{annotations: annotations{ds + "downtime": "Mon-Fri 8-18 Local"}}, none, InvalidSchedule, 0},
		"a value of 3,000 bytes is an invalid schedule":                                       {state{annotations: annotations{ds + "downtime": strings.Repeat("always,", 430)}}, none, InvalidSchedule, 0},
		"values of more than 4 KiB together are invalid schedules":                            {state{annotations: annotations{ds + "downtime": "always", ds + "exclude": strings.Repeat(" ", 2048), ds + "grace-period": strings.Repeat(" ", 2048)}}, none, InvalidSchedule + " " + InvalidSchedule + " " + InvalidSchedule, 0},
		"an invalid schedule of the Namespace does not matter where the workload has its own": {state{annotations: annotations{ds + "downtime": spanNow}, namespace: annotations{ds + "uptime": "PST"}}, downPatch, "", 0},
		"an invalid schedule is reported beside an exclusion too":                             {state{annotations: annotations{ds + "exclude": "true", ds + "uptime": "PST"}}, none, InvalidSchedule, 0},
		"a span without days takes them from --scale-schedule-weekdays":                       {state{annotations: annotations{ds + "downtime": "11:00-13:00 UTC"}, options: everyDay}, downPatch, "", 0},
		"a CronJob inside its downtime is suspended":                                          {state{kind: CronJob, annotations: annotations{ds + "downtime": spanNow}}, `{"metadata":{"annotations":{"downscaler/original-replicas":"1"},"resourceVersion":"7"},"spec":{"suspend":true}}`, "", 0},
		"the target of a CronJob does not matter":                                             {state{kind: CronJob, annotations: annotations{ds + "downtime": spanNow, ds + "downtime-replicas": "1"}}, `{"metadata":{"annotations":{"downscaler/original-replicas":"1"},"resourceVersion":"7"},"spec":{"suspend":true}}`, "", 0},
		"a CronJob that somebody suspended is left as it is":                                  {state{kind: CronJob, replicas: zero, annotations: annotations{ds + "downtime": spanNow}}, none, "", 0},
		"a CronJob with any record goes on":                                                   {state{kind: CronJob, replicas: zero, annotations: annotations{recordKey: "false, so it ran"}}, `{"metadata":{"annotations":{"downscaler/original-replicas":null},"resourceVersion":"7"},"spec":{"suspend":false}}`, "", 0},
		"a HorizontalPodAutoscaler inside its downtime gets its target as minReplicas":        {state{kind: Autoscaler, replicas: 4, max: 6, annotations: annotations{ds + "downtime": spanNow, ds + "downtime-replicas": "1"}}, `{"metadata":{"annotations":{"downscaler/original-replicas":"4"},"resourceVersion":"7"},"spec":{"minReplicas":1}}`, "", 0},
		"a HorizontalPodAutoscaler comes up to its maxReplicas at most":                       {state{kind: Autoscaler, replicas: 1, max: 2, annotations: annotations{ds + "uptime": spanNow, ds + "downtime-replicas": "1", recordKey: "4"}}, `{"metadata":{"annotations":{"downscaler/original-replicas":null},"resourceVersion":"7"},"spec":{"minReplicas":2}}`, "", 0},
		"a HorizontalPodAutoscaler at its maxReplicas loses its record only":                  {state{kind: Autoscaler, replicas: 2, max: 2, annotations: annotations{ds + "uptime": spanNow, ds + "downtime-replicas": "1", recordKey: "4"}}, `{"metadata":{"annotations":{"downscaler/original-replicas":null},"resourceVersion":"7"}}`, "", 0},
		"a HorizontalPodAutoscaler that a ScaledObject owns is left alone":                    {state{kind: Autoscaler, replicas: 4, max: 6, owned: true, annotations: annotations{ds + "downtime": spanNow, ds + "downtime-replicas": "1"}}, none, "", 0},
		"a HorizontalPodAutoscaler with a target of 0 has an invalid schedule":                {state{kind: Autoscaler, replicas: 4, max: 6, annotations: annotations{ds + "downtime": spanNow}}, none, InvalidSchedule, 0},
		"a HorizontalPodAutoscaler is left as it is where its Namespace gives a target of 0":  {state{kind: Autoscaler, replicas: 4, max: 6, namespace: annotations{ds + "downtime": spanNow}}, none, "", 0},
		"a Deployment with a HorizontalPodAutoscaler and a target of 1 is left alone":         {state{annotations: annotations{ds + "downtime": spanNow, ds + "downtime-replicas": "1"}, rival: RivalAutoscaler}, none, ScaledByOther, 0},
		"a Deployment with a HorizontalPodAutoscaler goes down to 0":                          {state{annotations: annotations{ds + "downtime": spanNow}, rival: RivalAutoscaler}, downPatch, "", 0},
		"a ScaledObject inside its downtime is paused at 0":                                   {state{kind: ScaledObject, namespace: annotations{ds + "downtime": spanNow}}, `{"metadata":{"annotations":{"autoscaling.keda.sh/paused-replicas":"0","downscaler/original-replicas":"-1"},"resourceVersion":"7"}}`, "", 0},
		"the Deployment of a ScaledObject is left alone":                                      {state{namespace: annotations{ds + "downtime": spanNow}, rival: RivalKEDA}, none, "", 0},
		"a ScaledObject that was not paused before is resumed":                                {state{kind: ScaledObject, annotations: annotations{recordKey: "-1", pausedReplicas: "0"}}, `{"metadata":{"annotations":{"autoscaling.keda.sh/paused-replicas":null,"downscaler/original-replicas":null},"resourceVersion":"7"}}`, "", 0},
		"the number at which a ScaledObject was paused becomes the record":                    {state{kind: ScaledObject, annotations: annotations{ds + "downtime": spanNow, pausedReplicas: "2"}}, `{"metadata":{"annotations":{"autoscaling.keda.sh/paused-replicas":"0","downscaler/original-replicas":"2"},"resourceVersion":"7"}}`, "", 0},
		"a ScaledObject that was paused at 2 before is paused at 2 again":                     {state{kind: ScaledObject, annotations: annotations{recordKey: "2", pausedReplicas: "0"}}, `{"metadata":{"annotations":{"autoscaling.keda.sh/paused-replicas":"2","downscaler/original-replicas":null},"resourceVersion":"7"}}`, "", 0},
		"a ScaledObject that is paused at its target is left as it is":                        {state{kind: ScaledObject, annotations: annotations{ds + "downtime": spanNow, pausedReplicas: "0"}}, none, "", 0},
		"a ScaledObject that is paused at no number has an invalid schedule":                  {state{kind: ScaledObject, annotations: annotations{ds + "downtime": spanNow, pausedReplicas: "x"}}, none, InvalidSchedule, 0},
		"the native keys of a workload win over downscaler/ keys":                             {state{annotations: annotations{qs + "uptime": "always", ds + "downtime": "always"}}, none, "", 0},
		"a native record alone does not hide downscaler/ keys":                                {state{replicas: zero, annotations: annotations{qs + "original-replicas": "3", ds + "downtime": "always"}}, none, "", 0},
		"the native record counts if it is the larger of two":                                 {state{replicas: zero, annotations: annotations{qs + "original-replicas": "4", recordKey: "3"}}, `{"metadata":{"annotations":{"downscaler/original-replicas":null,"quartermaster.dev/scale-original-replicas":null},"resourceVersion":"7"},"spec":{"replicas":4}}`, "", 0},
		"the original's record counts if it is the larger of two":                             {state{replicas: zero, annotations: annotations{qs + "original-replicas": "2", recordKey: "3"}}, `{"metadata":{"annotations":{"downscaler/original-replicas":null,"quartermaster.dev/scale-original-replicas":null},"resourceVersion":"7"},"spec":{"replicas":3}}`, "", 0},
		"a native record, and down again":                                                     {state{replicas: 2, annotations: annotations{ds + "downtime": spanNow, qs + "original-replicas": "3"}, options: func(o *Options) { o.Hold = 0 }}, `{"metadata":{"annotations":{"downscaler/original-replicas":"3","quartermaster.dev/scale-original-replicas":null},"resourceVersion":"7"},"spec":{"replicas":0}}`, "", 0},
		"the originals' keys do not count without compat":                                     {state{annotations: annotations{ds + "downtime": "always"}, options: func(o *Options) { o.Compat = false }}, none, "", 0},
		"the originals' record does not count without compat":                                 {state{replicas: zero, annotations: annotations{recordKey: "3"}, options: func(o *Options) { o.Compat = false }}, none, "", 0},
		"a native key counts without compat":                                                  {state{annotations: annotations{qs + "downtime": spanNow}, options: func(o *Options) { o.Compat = false }}, strings.Replace(downPatch, ds, qs, 1), "", 0},
		"a StatefulSet":                                                                       {state{kind: StatefulSet, annotations: annotations{ds + "downtime": spanNow}}, downPatch, "", 0},
		"a Rollout":                                                                           {state{kind: Rollout, annotations: annotations{ds + "downtime": spanNow}}, downPatch, "", 0},
		"a forged record of a workload that is up":                                            {state{annotations: annotations{recordKey: "2147483647"}}, strings.Replace(upPatch, `s":3`, `s":2147483647`, 1), "", 0},
	} {
		t.Run(name, func(t *testing.T) {
			switch tc.replicas {
			case zero:
				tc.replicas = 0
			case 0:
				tc.replicas = 3
			}
			v, _, patch, reasons := tc.decide(t, now)
			if patch != tc.patch {
				t.Errorf("writes %s, want %s", patch, tc.patch)
			}
			if reasons != tc.reasons {
				t.Errorf("warns of %q, want %q", reasons, tc.reasons)
			}
			if tc.next != 0 && !v.Next.Equal(now.Add(tc.next)) {
				t.Errorf("comes up at %v, want in %v", v.Next, tc.next)
			}
		})
	}
}

// TestWarningNamesItsObject says which object a warning is about, and what it says.
func TestWarningNamesItsObject(t *testing.T) {
	for name, tc := range map[string]struct {
		state
		scope Scope
		text  string
	}{
		"on the workload": {state{annotations: annotations{ds + "downtime": "8-18 PST"}}, ScopeWorkload,
			`downscaler/downtime: "8-18 PST" names no time zone of the IANA database, such as Europe/Berlin; what it is for is not scaled`},
		"on the Namespace": {state{namespace: annotations{qs + "exclude": ""}}, ScopeNamespace,
			`quartermaster.dev/scale-exclude: "" is none of "Mon-Fri 07:30-20:30 Europe/Berlin", a span of RFC 3339 times, always, never; what it is for is not scaled`},
		"by the flags": {state{options: func(o *Options) { o.ForceUptime, o.ForceDowntime = "always", "always" }}, ScopeFlags,
			"both --scale-schedule-force-uptime and --scale-schedule-force-downtime hold now; nothing is scaled for them"},
		"a value that is too long": {state{annotations: annotations{ds + "downtime": strings.Repeat("x", 2049)}}, ScopeWorkload,
			"downscaler/downtime is longer than 2048 bytes, or all together are longer than 4096; what it is for is not scaled"},
	} {
		v, _, _, _ := tc.decide(t, now)
		if len(v.Problems) != 1 || v.Problems[0].Scope != tc.scope || v.Problems[0].Text != tc.text {
			t.Errorf("%s: %+v, want %q", name, v.Problems, tc.text)
		}
	}
}

// TestNoWarningIsLong has values of every length, since their owners read the warnings as Events.
func TestNoWarningIsLong(t *testing.T) {
	for k := range Record {
		for _, value := range []string{strings.Repeat("x", 99), strings.Repeat("\xff", 2048), strings.Repeat("8-18 ", 400), strings.Repeat("9", 2049)} {
			s := state{annotations: annotations{ds + k.String(): value}}
			v, _, _, _ := s.decide(t, now)
			if len(v.Problems) != 1 || len(v.Problems[0].Text) > 400 {
				t.Errorf("%s: %d warnings: %v", k, len(v.Problems), v.Problems)
			}
		}
	}
}

// TestFlagsExcludeWorkloads says which workloads are left alone because of flags.
func TestFlagsExcludeWorkloads(t *testing.T) {
	for name, tc := range map[string]struct {
		namespace, name string
		options         func(*Options)
		want            bool
	}{
		"a workload without flags is covered":      {"shop", "a", nil, true},
		"kube-system is protected":                 {"kube-system", "a", nil, false},
		"kube-system can be allowed":               {"kube-system", "a", func(o *Options) { o.AllowProtected = []string{"in:kube-system"} }, true},
		"the manager's own namespace is protected": {"manager", "a", nil, false},
		"included":                      {"shop", "a", func(o *Options) { o.IncludeNamespaces = []string{"sh*"} }, true},
		"not included":                  {"shop", "a", func(o *Options) { o.IncludeNamespaces = []string{"dev-*"} }, false},
		"included and excluded":         {"shop", "a", func(o *Options) { o.IncludeNamespaces, o.ExcludeNamespaces = []string{"*"}, []string{"shop"} }, false},
		"included, but protected":       {"kube-public", "a", func(o *Options) { o.IncludeNamespaces = []string{"*"} }, false},
		"a name that is excluded":       {"shop", "a", func(o *Options) { o.ExcludeNames = []string{"a*"} }, false},
		"a name that is not excluded":   {"shop", "b", func(o *Options) { o.ExcludeNames = []string{"a*"} }, true},
		"another namespace was allowed": {"kube-public", "a", func(o *Options) { o.AllowProtected = []string{"in:kube-system"} }, false},
	} {
		o := testOptions()
		if tc.options != nil {
			tc.options(&o)
		}
		if got := mustEvaluator(t, o).Covers(tc.namespace, tc.name); got != tc.want {
			t.Errorf("%s: %t", name, got)
		}
	}
}

// TestSelectorExcludesWorkloads compares labels.
func TestSelectorExcludesWorkloads(t *testing.T) {
	for selector, want := range map[string]bool{"app=a": false, "app!=a": true, "": false} {
		o := testOptions()
		o.Selector = selector
		s := state{}
		if w := Decode(mustEvaluator(t, o).Digest(s.object())); w.Unselected != want {
			t.Errorf("%q: unselected is %t", selector, w.Unselected)
		}
	}
}

// TestAutoscalerNamesTheWorkloadThatItScales says which workload an autoscaler scales.
func TestAutoscalerNamesTheWorkloadThatItScales(t *testing.T) {
	hpa := func(apiVersion, kind, name string) runtime.Object {
		h := &autoscalingv2.HorizontalPodAutoscaler{}
		h.Spec.ScaleTargetRef = autoscalingv2.CrossVersionObjectReference{APIVersion: apiVersion, Kind: kind, Name: name}
		return h
	}
	keda := func(ref map[string]any) runtime.Object {
		return &unstructured.Unstructured{Object: map[string]any{"kind": "ScaledObject", "spec": map[string]any{"scaleTargetRef": ref}}}
	}
	owned := hpa("apps/v1", "Deployment", "a").(*autoscalingv2.HorizontalPodAutoscaler)
	owned.OwnerReferences = []metav1.OwnerReference{{APIVersion: "keda.sh/v1alpha1", Kind: "ScaledObject", Name: "x", Controller: ptrTo(true)}}
	for name, tc := range map[string]struct {
		obj   runtime.Object
		want  string
		owned bool
	}{
		"a Deployment":                 {hpa("apps/v1", "Deployment", "a"), "Deployment/a", false},
		"a StatefulSet":                {hpa("apps/v1", "StatefulSet", "a"), "StatefulSet/a", false},
		"a Rollout":                    {hpa("argoproj.io/v1alpha1", "Rollout", "a"), "Rollout/a", false},
		"another kind":                 {hpa("example.com/v1", "Widget", "a"), "", false},
		"another Rollout":              {hpa("example.com/v1", "Rollout", "a"), "", false},
		"an autoscaler that KEDA owns": {owned, "Deployment/a", true},
		"KEDA, without a kind":         {keda(map[string]any{"name": "a"}), "Deployment/a", false},
		"KEDA, a StatefulSet":          {keda(map[string]any{"name": "a", "kind": "StatefulSet", "apiVersion": "apps/v1"}), "StatefulSet/a", false},
		"KEDA, a name of a MiB":        {keda(map[string]any{"name": strings.Repeat("a", 1<<20)}), "", false},
		"KEDA, a name of no text":      {keda(map[string]any{"name": int64(3)}), "Deployment/", false},
		"KEDA, without a target":       {keda(nil), "Deployment/", false},
		"a Rollout without number":     {&unstructured.Unstructured{Object: map[string]any{"kind": "Rollout"}}, "", false},
	} {
		if o := Decode(mustEvaluator(t, testOptions()).Digest(tc.obj)); o.ScaleTarget != tc.want || o.Owned != tc.owned {
			t.Errorf("%s: %q, owned: %t", name, o.ScaleTarget, o.Owned)
		}
	}
}

// TestDigestIsBounded has annotations as long as they can be.
func TestDigestIsBounded(t *testing.T) {
	all := annotations{}
	for _, prefix := range []string{ds, qs} {
		for k := range keyCount {
			all[prefix+k.String()] = strings.Repeat("x", 10_000)
		}
	}
	for _, size := range []int{2048, 4000 / int(Record), 10_000} {
		for key := range all {
			all[key] = strings.Repeat("x", size)
		}
		s := state{annotations: all}
		if n := len(mustEvaluator(t, testOptions()).Digest(s.object())); n > maxTotal+100 {
			t.Errorf("annotations of %d bytes: the cache keeps %d", size, n)
		}
	}
	s := state{annotations: annotations{ds + "uptime": "Mon-Fri 07:30-20:30 Europe/Berlin"}}
	if n := len(mustEvaluator(t, testOptions()).Digest(s.object())); n > 50 {
		t.Errorf("the cache keeps %d bytes of an ordinary workload", n)
	}
}

// TestLagCountsFromTheLastEffectiveBoundary says since when a workload is to be as it is.
func TestLagCountsFromTheLastEffectiveBoundary(t *testing.T) {
	for name, tc := range map[string]struct {
		downtime string
		want     time.Duration
	}{
		"a boundary half an hour ago":     {"Mon-Fri 11:30-13:00 UTC", 30 * time.Minute},
		"two boundaries":                  {"Mon-Fri 11:10-11:20 UTC", 40 * time.Minute},
		"a boundary that changed nothing": {"Mon-Fri 11:10-13:00 UTC, Mon-Fri 11:30-13:00 UTC", 50 * time.Minute},
		"a boundary long ago":             {"Mon-Fri 10:00-13:00 UTC", -1},
		"no boundary":                     {"always", -1},
	} {
		evaluator := mustEvaluator(t, testOptions())
		workload := Object{Values: valuesOf(annotations{ds + "downtime": tc.downtime}, true), Created: now.Add(-24 * time.Hour)}
		boundary, known := evaluator.LastBoundary(&workload, &Object{}, now, time.Hour)
		if known != (tc.want >= 0) || known && now.Sub(boundary) != tc.want {
			t.Errorf("%s: since %v, %t", name, boundary, known)
		}
	}
}

// TestMistakesNameTheirFlags names the flag of each.
func TestMistakesNameTheirFlags(t *testing.T) {
	for flag, change := range map[string]func(*Options){
		"timezone": func(o *Options) { o.Timezone = "PST" }, "weekdays": func(o *Options) { o.Weekdays = "Mon" },
		"default-uptime": func(o *Options) { o.DefaultUptime = "8-18 UTC" }, "default-downtime": func(o *Options) { o.DefaultDowntime = "x" },
		"upscale-period": func(o *Options) { o.UpscalePeriod = "x" }, "downscale-period": func(o *Options) { o.DownscalePeriod = "x" },
		"force-uptime": func(o *Options) { o.ForceUptime = "x" }, "force-downtime": func(o *Options) { o.ForceDowntime = "x" },
		"downtime-replicas": func(o *Options) { o.DowntimeReplicas = -1 }, "grace-period": func(o *Options) { o.GracePeriod = -1 },
		"hold": func(o *Options) { o.Hold = -1 }, "selector": func(o *Options) { o.Selector = "a in" },
		"include-namespaces": func(o *Options) { o.IncludeNamespaces = []string{""} }, "exclude-namespaces": func(o *Options) { o.ExcludeNamespaces = []string{"kube-.*"} },
		"exclude-names": func(o *Options) { o.ExcludeNames = []string{"a|b"} }, "allow-protected": func(o *Options) { o.AllowProtected = []string{"kube-system"} },
	} {
		o, got := testOptions(), []string{}
		change(&o)
		NewEvaluator(o, func(flag, format string, args ...any) { got = append(got, flag); _ = fmt.Errorf(format, args...) })
		if len(got) != 1 || got[0] != flag {
			t.Errorf("a mistake in --%s: %q", flag, got)
		}
	}
}
