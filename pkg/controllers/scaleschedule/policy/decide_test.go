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

// Now is inside of N and outside of X.
var now = at("2026-11-25T12:00:00Z") // a Wednesday

const (
	N  = "Mon-Fri 11:00-13:00 UTC"
	X  = "Mon-Fri 13:00-15:00 UTC"
	ds = "downscaler/"
	qs = "quartermaster.dev/scale-"
	R  = ds + "original-replicas"

	zero = -1 // replicas
	none = ""
	D    = `{"metadata":{"annotations":{"downscaler/original-replicas":"3"},"resourceVersion":"7"},"spec":{"replicas":0}}`
	U    = `{"metadata":{"annotations":{"downscaler/original-replicas":null},"resourceVersion":"7"},"spec":{"replicas":3}}`
)

func options() Options {
	return Options{Compat: true, GracePeriod: 15 * time.Minute, Hold: 15 * time.Minute, OwnNamespaces: []string{"manager"}}
}

func rulesOf(t *testing.T, o Options) *Evaluator {
	t.Helper()
	return NewEvaluator(o, func(flag, format string, args ...any) { t.Fatalf("--"+flag+": "+format, args...) })
}

type annotations map[string]string

// given is a state of a workload; without a kind, the Deployment shop/a, an hour old.
type given struct {
	kind        Kind
	replicas    int64 // 3 if it is not set
	max         int64
	age         time.Duration
	annotations annotations
	namespace   annotations
	options     func(*Options)
	rival       Rival
	remembered  History
	owned       bool // by a ScaledObject
}

func (g *given) object() runtime.Object {
	if g.kind == "" {
		g.kind = Deployment
	}
	if g.age == 0 {
		g.age = time.Hour
	}
	m := metav1.ObjectMeta{Namespace: "shop", Name: "a", CreationTimestamp: metav1.NewTime(now.Add(-g.age)), Annotations: g.annotations,
		Labels: map[string]string{"app": "a"}}
	if g.owned {
		m.OwnerReferences = []metav1.OwnerReference{{APIVersion: "keda.sh/v1alpha1", Kind: "ScaledObject", Controller: ptrTo(true)}}
	}
	n := int32(g.replicas)
	switch g.kind {
	case Deployment:
		return &appsv1.Deployment{ObjectMeta: m, Spec: appsv1.DeploymentSpec{Replicas: &n}}
	case StatefulSet:
		return &appsv1.StatefulSet{ObjectMeta: m, Spec: appsv1.StatefulSetSpec{Replicas: &n}}
	case CronJob:
		return &batchv1.CronJob{ObjectMeta: m, Spec: batchv1.CronJobSpec{Suspend: ptrTo(n == 0)}}
	case Autoscaler:
		return &autoscalingv2.HorizontalPodAutoscaler{ObjectMeta: m, Spec: autoscalingv2.HorizontalPodAutoscalerSpec{MinReplicas: &n, MaxReplicas: int32(g.max)}}
	}
	u := &unstructured.Unstructured{Object: map[string]any{"spec": map[string]any{}}}
	if g.kind == Rollout {
		u.Object["spec"] = map[string]any{"replicas": g.replicas}
	}
	u.SetGroupVersionKind(schema.GroupVersionKind{Group: "example.com", Version: "v1", Kind: string(g.kind)})
	u.SetAnnotations(m.Annotations)
	u.SetCreationTimestamp(m.CreationTimestamp)
	return u
}

// decide passes the state through the cache, and returns the verdict, the plan, the patch and the reasons of
// the warnings.
func (g *given) decide(t *testing.T, now time.Time) (v Verdict, p Plan, patch, reasons string) {
	t.Helper()
	o := options()
	if g.options != nil {
		g.options(&o)
	}
	r := rulesOf(t, o)
	w := Decode(r.Digest(g.object()))
	ns := Decode(r.DigestNamespace(&metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Annotations: g.namespace}}))
	v = r.Decide(&w, &ns, now)
	p = r.Plan(&w, g.kind, &v, g.rival, g.remembered, now)
	var all []string
	for _, problem := range v.Problems {
		all = append(all, problem.Reason)
	}
	if p.Problem != nil {
		all = append(all, p.Problem.Reason)
	}
	if p.Action != Nothing {
		patch = string(r.Patch(&w, g.kind, &p, "7"))
	}
	return v, p, patch, strings.Join(all, " ")
}

// TestDecideAndPlan has the patch and the warnings for one state of a workload.
func TestDecideAndPlan(t *testing.T) {
	explicit := func(o *Options) { o.Explicit = true }
	everyDay := func(o *Options) { o.Weekdays = "Mon-Sun" }
	for name, test := range map[string]struct {
		given
		then    string // the patch
		reasons string
		next    time.Duration // after now; 0 is not compared
	}{
		"a workload inside its downtime goes down":                                            {given{annotations: annotations{ds + "downtime": N}}, D, "", time.Hour},
		"a workload outside its uptime goes down":                                             {given{annotations: annotations{ds + "uptime": X}}, D, "", time.Hour},
		"a workload inside its uptime stays up":                                               {given{annotations: annotations{ds + "uptime": N}}, none, "", time.Hour},
		"a workload outside its downtime stays up":                                            {given{annotations: annotations{ds + "downtime": X}}, none, "", time.Hour},
		"a workload whose downtime has ended comes up":                                        {given{replicas: zero, annotations: annotations{ds + "downtime": X, R: "3"}}, U, "", time.Hour},
		"the downtime of the Namespace scales its workloads down":                             {given{namespace: annotations{ds + "downtime": N}}, D, "", time.Hour},
		"a workload that is always up ignores the downtime of its Namespace":                  {given{annotations: annotations{ds + "uptime": "always"}, namespace: annotations{ds + "downtime": N}}, none, "", 0},
		"the Namespace wins over the flag":                                                    {given{namespace: annotations{ds + "downtime": "never"}, options: func(o *Options) { o.DefaultDowntime = "always" }}, none, "", 0},
		"the flag counts where neither workload nor Namespace has a schedule":                 {given{options: func(o *Options) { o.DefaultDowntime = "always" }}, D, "", 0},
		"downtime wins over uptime":                                                           {given{annotations: annotations{ds + "uptime": N, ds + "downtime": N}}, D, "", 0},
		"a period makes the downtime of its scope void":                                       {given{annotations: annotations{ds + "downscale-period": X, ds + "downtime": N}}, none, "", time.Hour},
		"a workload inside its downscale period goes down":                                    {given{annotations: annotations{ds + "downscale-period": N}}, D, "", time.Hour},
		"a workload that is down stays down outside its downscale period":                     {given{replicas: zero, annotations: annotations{ds + "downscale-period": X, R: "3"}}, none, "", time.Hour},
		"a workload inside its upscale period comes up":                                       {given{replicas: zero, annotations: annotations{ds + "upscale-period": N, R: "3"}}, U, "", time.Hour},
		"a workload inside both periods is left as it is":                                     {given{annotations: annotations{ds + "upscale-period": N, ds + "downscale-period": N}}, none, ConflictingSchedule, time.Hour},
		"a workload with both forces is left as it is":                                        {given{annotations: annotations{ds + "force-uptime": "true", ds + "force-downtime": "true"}}, none, ConflictingSchedule, 0},
		"force-uptime of the workload wins over its downtime":                                 {given{annotations: annotations{ds + "downtime": N, ds + "force-uptime": "true"}}, none, "", 0},
		"force-uptime of the Namespace wins over the workload's downtime":                     {given{annotations: annotations{ds + "downtime": N}, namespace: annotations{ds + "force-uptime": "true"}}, none, "", 0},
		"force-downtime of the Namespace wins over the workload's uptime":                     {given{annotations: annotations{ds + "uptime": "always"}, namespace: annotations{ds + "force-downtime": N}}, D, "", time.Hour},
		"force-uptime does not count outside its span":                                        {given{annotations: annotations{ds + "downtime": N}, namespace: annotations{ds + "force-uptime": X}}, D, "", time.Hour},
		"a workload that its Namespace excludes is left as it is":                             {given{annotations: annotations{ds + "downtime": N}, namespace: annotations{ds + "exclude": "true"}}, none, "", 0},
		"a workload can undo the exclusion of its Namespace":                                  {given{annotations: annotations{ds + "downtime": N, ds + "exclude": "false"}, namespace: annotations{ds + "exclude": "true"}}, D, "", 0},
		"a workload is left as it is inside the span of exclude":                              {given{annotations: annotations{ds + "downtime": "always", ds + "exclude": N}}, none, "", time.Hour},
		"--scale-schedule-explicit leaves alone a workload without exclude":                   {given{annotations: annotations{ds + "downtime": N}, options: explicit}, none, "", 0},
		"--scale-schedule-explicit counts a workload whose Namespace has exclude":             {given{annotations: annotations{ds + "downtime": N}, namespace: annotations{ds + "exclude": "false"}, options: explicit}, D, "", 0},
		"exclude-until may be a day":                                                          {given{annotations: annotations{ds + "downtime": "always", ds + "exclude-until": "2026-11-26"}}, none, "", 12 * time.Hour},
		"exclude-until may be a minute of a day":                                              {given{annotations: annotations{ds + "downtime": "always", ds + "exclude-until": "2026-11-25T12:30"}}, none, "", 30 * time.Minute},
		"exclude-until may have an offset from UTC":                                           {given{annotations: annotations{ds + "downtime": "always", ds + "exclude-until": "2026-11-25T12:30:00-01:00"}}, none, "", 90 * time.Minute},
		"an exclude-until in the past excludes nothing":                                       {given{annotations: annotations{ds + "downtime": N, ds + "exclude-until": "2025-11-26"}}, D, "", 0},
		"a past exclude-until of the workload lets the Namespace's count":                     {given{annotations: annotations{ds + "downtime": N, ds + "exclude-until": "2025-11-26"}, namespace: annotations{ds + "exclude-until": "2026-11-26"}}, none, "", 12 * time.Hour},
		"an exclude-until that is no time is an invalid schedule":                             {given{annotations: annotations{ds + "downtime": N, ds + "exclude-until": "tomorrow"}}, none, InvalidSchedule, 0},
		"a new workload is left as it is during the grace period":                             {given{age: time.Minute, annotations: annotations{ds + "downtime": N}}, none, "", 14 * time.Minute},
		"a grace period of 30 seconds has ended after a minute":                               {given{age: time.Minute, annotations: annotations{ds + "downtime": N, ds + "grace-period": "30"}}, D, "", 0},
		"the grace period of the Namespace may be a duration":                                 {given{age: time.Minute, annotations: annotations{ds + "downtime": N}, namespace: annotations{ds + "grace-period": "1m30s"}}, none, "", 30 * time.Second},
		"the grace period counts from the time in the annotation":                             {given{annotations: annotations{ds + "downtime": N, "deployed": "2026-11-25T11:50:00Z"}, options: func(o *Options) { o.TimeAnnotation = "deployed" }}, none, "", 5 * time.Minute},
		"the grace period does not keep a workload down":                                      {given{age: time.Minute, replicas: zero, annotations: annotations{R: "3"}}, U, "", 0},
		"a negative grace period is an invalid schedule":                                      {given{annotations: annotations{ds + "downtime": N, ds + "grace-period": "-1"}}, none, InvalidSchedule, 0},
		"downtime-replicas of 1 scales down to 1":                                             {given{annotations: annotations{ds + "downtime": N, ds + "downtime-replicas": "1"}}, strings.Replace(D, `s":0`, `s":1`, 1), "", 0},
		"downscale-replicas of 1 scales down to 1":                                            {given{annotations: annotations{ds + "downtime": N, ds + "downscale-replicas": "1"}}, strings.Replace(D, `s":0`, `s":1`, 1), "", 0},
		"a workload at its target is left as it is":                                           {given{replicas: 1, annotations: annotations{ds + "downtime": N, ds + "downtime-replicas": "1"}}, none, "", 0},
		"a workload below its target is left as it is":                                        {given{replicas: zero, annotations: annotations{ds + "downtime": N, ds + "downtime-replicas": "1"}}, none, "", 0},
		"two targets that differ are an invalid schedule":                                     {given{annotations: annotations{ds + "downtime": N, ds + "downtime-replicas": "1", ds + "downscale-replicas": "0"}}, none, InvalidSchedule, 0},
		"two targets that agree count as one":                                                 {given{annotations: annotations{ds + "downtime": N, ds + "downtime-replicas": "0", ds + "downscale-replicas": "0"}}, D, "", 0},
		"a target below 0 is an invalid schedule":                                             {given{annotations: annotations{ds + "downtime": N, ds + "downtime-replicas": "-1"}}, none, InvalidSchedule, 0},
		"a target above 2147483647 is an invalid schedule":                                    {given{annotations: annotations{ds + "downtime": N, ds + "downtime-replicas": "2147483648"}}, none, InvalidSchedule, 0},
		"a workload whose schedule is gone comes up":                                          {given{replicas: zero, annotations: annotations{R: "3"}}, U, "", 0},
		"a workload that somebody stopped stays down in its uptime":                           {given{replicas: zero, annotations: annotations{ds + "uptime": N}}, none, "", 0},
		"a workload that somebody raises is left alone at first":                              {given{replicas: 2, annotations: annotations{ds + "downtime": N, R: "3"}}, none, "", 0},
		"a workload that somebody raised 15 minutes ago goes down again":                      {given{replicas: 2, annotations: annotations{ds + "downtime": N, R: "3"}, remembered: History{Raised: now.Add(-15 * time.Minute)}}, D, "", 0},
		"the larger number of a raised workload becomes the record":                           {given{replicas: 5, annotations: annotations{ds + "downtime": N, R: "3"}, remembered: History{Raised: now.Add(-15 * time.Minute), Contests: 2}}, strings.Replace(D, "3", "5", 1), "", 0},
		"a workload that is raised for the fourth time is left alone":                         {given{replicas: 5, annotations: annotations{ds + "downtime": N, R: "3"}, remembered: History{Raised: now.Add(-15 * time.Minute), Contests: 3}}, none, ScaleContested, 0},
		"a workload above its record keeps its number when it comes up":                       {given{replicas: 4, annotations: annotations{ds + "uptime": N, R: "3"}}, `{"metadata":{"annotations":{"downscaler/original-replicas":null},"resourceVersion":"7"}}`, "", 0},
		"a workload below its target keeps its number when it comes up":                       {given{replicas: zero, annotations: annotations{ds + "uptime": N, ds + "downtime-replicas": "1", R: "3"}}, `{"metadata":{"annotations":{"downscaler/original-replicas":null},"resourceVersion":"7"}}`, "", 0},
		"a record that somebody removed is put back":                                          {given{replicas: zero, annotations: annotations{ds + "downtime": N}, remembered: History{LostRecord: 3}}, `{"metadata":{"annotations":{"downscaler/original-replicas":"3"},"resourceVersion":"7"}}`, "", 0},
		"a record that is removed again is not put back":                                      {given{replicas: zero, annotations: annotations{ds + "downtime": N}, remembered: History{LostRecord: 3, RecordRestored: true}}, none, "", 0},
		"a record that is no number is an invalid schedule in the downtime":                   {given{annotations: annotations{ds + "downtime": N, R: "x"}}, none, InvalidSchedule, 0},
		"a record that is no number is an invalid schedule in the uptime":                     {given{annotations: annotations{R: "x"}}, none, InvalidSchedule, 0},
		"a negative record is an invalid schedule":                                            {given{annotations: annotations{R: "-1"}}, none, InvalidSchedule, 0},
		"a record above 2147483647 is an invalid schedule":                                    {given{annotations: annotations{R: "2147483648"}}, none, InvalidSchedule, 0},
		"a record of 5,000 digits is an invalid schedule":                                     {given{annotations: annotations{R: strings.Repeat("0", 5000)}}, none, InvalidSchedule, 0},
		"a zone by its abbreviation is an invalid schedule":                                   {given{annotations: annotations{ds + "downtime": "Mon-Fri 8-18 PST"}}, none, InvalidSchedule, 0},
		"the zone Local is an invalid schedule":                                               {given{annotations: annotations{ds + "downtime": "Mon-Fri 8-18 Local"}}, none, InvalidSchedule, 0},
		"a value of 3,000 bytes is an invalid schedule":                                       {given{annotations: annotations{ds + "downtime": strings.Repeat("always,", 430)}}, none, InvalidSchedule, 0},
		"values of more than 4 KiB together are invalid schedules":                            {given{annotations: annotations{ds + "downtime": "always", ds + "exclude": strings.Repeat(" ", 2048), ds + "grace-period": strings.Repeat(" ", 2048)}}, none, InvalidSchedule + " " + InvalidSchedule + " " + InvalidSchedule, 0},
		"an invalid schedule of the Namespace does not matter where the workload has its own": {given{annotations: annotations{ds + "downtime": N}, namespace: annotations{ds + "uptime": "PST"}}, D, "", 0},
		"an invalid schedule is reported beside an exclusion too":                             {given{annotations: annotations{ds + "exclude": "true", ds + "uptime": "PST"}}, none, InvalidSchedule, 0},
		"a span without days takes them from --scale-schedule-weekdays":                       {given{annotations: annotations{ds + "downtime": "11:00-13:00 UTC"}, options: everyDay}, D, "", 0},
		"a CronJob inside its downtime is suspended":                                          {given{kind: CronJob, annotations: annotations{ds + "downtime": N}}, `{"metadata":{"annotations":{"downscaler/original-replicas":"1"},"resourceVersion":"7"},"spec":{"suspend":true}}`, "", 0},
		"the target of a CronJob does not matter":                                             {given{kind: CronJob, annotations: annotations{ds + "downtime": N, ds + "downtime-replicas": "1"}}, `{"metadata":{"annotations":{"downscaler/original-replicas":"1"},"resourceVersion":"7"},"spec":{"suspend":true}}`, "", 0},
		"a CronJob that somebody suspended is left as it is":                                  {given{kind: CronJob, replicas: zero, annotations: annotations{ds + "downtime": N}}, none, "", 0},
		"a CronJob with any record goes on":                                                   {given{kind: CronJob, replicas: zero, annotations: annotations{R: "false, so it ran"}}, `{"metadata":{"annotations":{"downscaler/original-replicas":null},"resourceVersion":"7"},"spec":{"suspend":false}}`, "", 0},
		"a HorizontalPodAutoscaler inside its downtime gets its target as minReplicas":        {given{kind: Autoscaler, replicas: 4, max: 6, annotations: annotations{ds + "downtime": N, ds + "downtime-replicas": "1"}}, `{"metadata":{"annotations":{"downscaler/original-replicas":"4"},"resourceVersion":"7"},"spec":{"minReplicas":1}}`, "", 0},
		"a HorizontalPodAutoscaler comes up to its maxReplicas at most":                       {given{kind: Autoscaler, replicas: 1, max: 2, annotations: annotations{ds + "uptime": N, ds + "downtime-replicas": "1", R: "4"}}, `{"metadata":{"annotations":{"downscaler/original-replicas":null},"resourceVersion":"7"},"spec":{"minReplicas":2}}`, "", 0},
		"a HorizontalPodAutoscaler at its maxReplicas loses its record only":                  {given{kind: Autoscaler, replicas: 2, max: 2, annotations: annotations{ds + "uptime": N, ds + "downtime-replicas": "1", R: "4"}}, `{"metadata":{"annotations":{"downscaler/original-replicas":null},"resourceVersion":"7"}}`, "", 0},
		"a HorizontalPodAutoscaler that a ScaledObject owns is left alone":                    {given{kind: Autoscaler, replicas: 4, max: 6, owned: true, annotations: annotations{ds + "downtime": N, ds + "downtime-replicas": "1"}}, none, "", 0},
		"a HorizontalPodAutoscaler with a target of 0 has an invalid schedule":                {given{kind: Autoscaler, replicas: 4, max: 6, annotations: annotations{ds + "downtime": N}}, none, InvalidSchedule, 0},
		"a HorizontalPodAutoscaler is left as it is where its Namespace gives a target of 0":  {given{kind: Autoscaler, replicas: 4, max: 6, namespace: annotations{ds + "downtime": N}}, none, "", 0},
		"a Deployment with a HorizontalPodAutoscaler and a target of 1 is left alone":         {given{annotations: annotations{ds + "downtime": N, ds + "downtime-replicas": "1"}, rival: RivalAutoscaler}, none, ScaledByOther, 0},
		"a Deployment with a HorizontalPodAutoscaler goes down to 0":                          {given{annotations: annotations{ds + "downtime": N}, rival: RivalAutoscaler}, D, "", 0},
		"a ScaledObject inside its downtime is paused at 0":                                   {given{kind: ScaledObject, namespace: annotations{ds + "downtime": N}}, `{"metadata":{"annotations":{"autoscaling.keda.sh/paused-replicas":"0","downscaler/original-replicas":"-1"},"resourceVersion":"7"}}`, "", 0},
		"the Deployment of a ScaledObject is left alone":                                      {given{namespace: annotations{ds + "downtime": N}, rival: RivalKEDA}, none, "", 0},
		"a ScaledObject that was not paused before is resumed":                                {given{kind: ScaledObject, annotations: annotations{R: "-1", pausedReplicas: "0"}}, `{"metadata":{"annotations":{"autoscaling.keda.sh/paused-replicas":null,"downscaler/original-replicas":null},"resourceVersion":"7"}}`, "", 0},
		"the number at which a ScaledObject was paused becomes the record":                    {given{kind: ScaledObject, annotations: annotations{ds + "downtime": N, pausedReplicas: "2"}}, `{"metadata":{"annotations":{"autoscaling.keda.sh/paused-replicas":"0","downscaler/original-replicas":"2"},"resourceVersion":"7"}}`, "", 0},
		"a ScaledObject that was paused at 2 before is paused at 2 again":                     {given{kind: ScaledObject, annotations: annotations{R: "2", pausedReplicas: "0"}}, `{"metadata":{"annotations":{"autoscaling.keda.sh/paused-replicas":"2","downscaler/original-replicas":null},"resourceVersion":"7"}}`, "", 0},
		"a ScaledObject that is paused at its target is left as it is":                        {given{kind: ScaledObject, annotations: annotations{ds + "downtime": N, pausedReplicas: "0"}}, none, "", 0},
		"a ScaledObject that is paused at no number has an invalid schedule":                  {given{kind: ScaledObject, annotations: annotations{ds + "downtime": N, pausedReplicas: "x"}}, none, InvalidSchedule, 0},
		"the native keys of a workload win over downscaler/ keys":                             {given{annotations: annotations{qs + "uptime": "always", ds + "downtime": "always"}}, none, "", 0},
		"a native record alone does not hide downscaler/ keys":                                {given{replicas: zero, annotations: annotations{qs + "original-replicas": "3", ds + "downtime": "always"}}, none, "", 0},
		"the native record counts if it is the larger of two":                                 {given{replicas: zero, annotations: annotations{qs + "original-replicas": "4", R: "3"}}, `{"metadata":{"annotations":{"downscaler/original-replicas":null,"quartermaster.dev/scale-original-replicas":null},"resourceVersion":"7"},"spec":{"replicas":4}}`, "", 0},
		"the original's record counts if it is the larger of two":                             {given{replicas: zero, annotations: annotations{qs + "original-replicas": "2", R: "3"}}, `{"metadata":{"annotations":{"downscaler/original-replicas":null,"quartermaster.dev/scale-original-replicas":null},"resourceVersion":"7"},"spec":{"replicas":3}}`, "", 0},
		"a native record, and down again":                                                     {given{replicas: 2, annotations: annotations{ds + "downtime": N, qs + "original-replicas": "3"}, options: func(o *Options) { o.Hold = 0 }}, `{"metadata":{"annotations":{"downscaler/original-replicas":"3","quartermaster.dev/scale-original-replicas":null},"resourceVersion":"7"},"spec":{"replicas":0}}`, "", 0},
		"the originals' keys do not count without compat":                                     {given{annotations: annotations{ds + "downtime": "always"}, options: func(o *Options) { o.Compat = false }}, none, "", 0},
		"the originals' record does not count without compat":                                 {given{replicas: zero, annotations: annotations{R: "3"}, options: func(o *Options) { o.Compat = false }}, none, "", 0},
		"a native key counts without compat":                                                  {given{annotations: annotations{qs + "downtime": N}, options: func(o *Options) { o.Compat = false }}, strings.Replace(D, ds, qs, 1), "", 0},
		"a StatefulSet":                                                                       {given{kind: StatefulSet, annotations: annotations{ds + "downtime": N}}, D, "", 0},
		"a Rollout":                                                                           {given{kind: Rollout, annotations: annotations{ds + "downtime": N}}, D, "", 0},
		"a forged record of a workload that is up":                                            {given{annotations: annotations{R: "2147483647"}}, strings.Replace(U, `s":3`, `s":2147483647`, 1), "", 0},
	} {
		t.Run(name, func(t *testing.T) {
			switch test.replicas {
			case zero:
				test.replicas = 0
			case 0:
				test.replicas = 3
			}
			v, _, patch, reasons := test.decide(t, now)
			if patch != test.then {
				t.Errorf("writes %s, want %s", patch, test.then)
			}
			if reasons != test.reasons {
				t.Errorf("warns of %q, want %q", reasons, test.reasons)
			}
			if test.next != 0 && !v.Next.Equal(now.Add(test.next)) {
				t.Errorf("comes up at %v, want in %v", v.Next, test.next)
			}
		})
	}
}

// TestWarningNamesItsObject says which object a warning is about, and what it says.
func TestWarningNamesItsObject(t *testing.T) {
	for name, test := range map[string]struct {
		given
		scope Scope
		text  string
	}{
		"on the workload": {given{annotations: annotations{ds + "downtime": "8-18 PST"}}, ScopeWorkload,
			`downscaler/downtime: "8-18 PST" names no time zone of the IANA database, such as Europe/Berlin; what it is for is not scaled`},
		"on the Namespace": {given{namespace: annotations{qs + "exclude": ""}}, ScopeNamespace,
			`quartermaster.dev/scale-exclude: "" is none of "Mon-Fri 07:30-20:30 Europe/Berlin", a span of RFC 3339 times, always, never; what it is for is not scaled`},
		"by the flags": {given{options: func(o *Options) { o.ForceUptime, o.ForceDowntime = "always", "always" }}, ScopeFlags,
			"both --scale-schedule-force-uptime and --scale-schedule-force-downtime hold now; nothing is scaled for them"},
		"a value that is too long": {given{annotations: annotations{ds + "downtime": strings.Repeat("x", 2049)}}, ScopeWorkload,
			"downscaler/downtime is longer than 2048 bytes, or all together are longer than 4096; what it is for is not scaled"},
	} {
		v, _, _, _ := test.decide(t, now)
		if len(v.Problems) != 1 || v.Problems[0].Scope != test.scope || v.Problems[0].Text != test.text {
			t.Errorf("%s: %+v, want %q", name, v.Problems, test.text)
		}
	}
}

// TestNoWarningIsLong has values of every length, since their owners read the warnings as Events.
func TestNoWarningIsLong(t *testing.T) {
	for k := range Record {
		for _, value := range []string{strings.Repeat("x", 99), strings.Repeat("\xff", 2048), strings.Repeat("8-18 ", 400), strings.Repeat("9", 2049)} {
			g := given{annotations: annotations{ds + k.String(): value}}
			v, _, _, _ := g.decide(t, now)
			if len(v.Problems) != 1 || len(v.Problems[0].Text) > 400 {
				t.Errorf("%s: %d warnings: %v", k, len(v.Problems), v.Problems)
			}
		}
	}
}

// TestFlagsExcludeWorkloads says which workloads are left alone because of flags.
func TestFlagsExcludeWorkloads(t *testing.T) {
	for name, test := range map[string]struct {
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
		o := options()
		if test.options != nil {
			test.options(&o)
		}
		if got := rulesOf(t, o).Covers(test.namespace, test.name); got != test.want {
			t.Errorf("%s: %t", name, got)
		}
	}
}

// TestSelectorExcludesWorkloads compares labels.
func TestSelectorExcludesWorkloads(t *testing.T) {
	for selector, want := range map[string]bool{"app=a": false, "app!=a": true, "": false} {
		o := options()
		o.Selector = selector
		g := given{}
		if w := Decode(rulesOf(t, o).Digest(g.object())); w.Unselected != want {
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
	for name, test := range map[string]struct {
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
		if o := Decode(rulesOf(t, options()).Digest(test.obj)); o.ScaleTarget != test.want || o.Owned != test.owned {
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
		g := given{annotations: all}
		if n := len(rulesOf(t, options()).Digest(g.object())); n > maxTotal+100 {
			t.Errorf("annotations of %d bytes: the cache keeps %d", size, n)
		}
	}
	g := given{annotations: annotations{ds + "uptime": "Mon-Fri 07:30-20:30 Europe/Berlin"}}
	if n := len(rulesOf(t, options()).Digest(g.object())); n > 50 {
		t.Errorf("the cache keeps %d bytes of an ordinary workload", n)
	}
}

// TestLagCountsFromTheLastEffectiveBoundary says since when a workload is to be as it is.
func TestLagCountsFromTheLastEffectiveBoundary(t *testing.T) {
	for name, test := range map[string]struct {
		downtime string
		want     time.Duration
	}{
		"a boundary half an hour ago":     {"Mon-Fri 11:30-13:00 UTC", 30 * time.Minute},
		"two boundaries":                  {"Mon-Fri 11:10-11:20 UTC", 40 * time.Minute},
		"a boundary that changed nothing": {"Mon-Fri 11:10-13:00 UTC, Mon-Fri 11:30-13:00 UTC", 50 * time.Minute},
		"a boundary long ago":             {"Mon-Fri 10:00-13:00 UTC", -1},
		"no boundary":                     {"always", -1},
	} {
		r := rulesOf(t, options())
		w := Object{Values: valuesOf(annotations{ds + "downtime": test.downtime}, true), Created: now.Add(-24 * time.Hour)}
		since, known := r.LastBoundary(&w, &Object{}, now, time.Hour)
		if known != (test.want >= 0) || known && now.Sub(since) != test.want {
			t.Errorf("%s: since %v, %t", name, since, known)
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
		o, got := options(), []string{}
		change(&o)
		NewEvaluator(o, func(flag, format string, args ...any) { got = append(got, flag); _ = fmt.Errorf(format, args...) })
		if len(got) != 1 || got[0] != flag {
			t.Errorf("a mistake in --%s: %q", flag, got)
		}
	}
}
