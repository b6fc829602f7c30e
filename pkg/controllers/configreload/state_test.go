// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package configreload_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/controllertest"
)

var errForbidden = apierrors.NewForbidden(appsv1.Resource("deployments"), "web", errors.New("no"))

func TestReconcileKeepsTheStateRight(t *testing.T) {
	bare, inGit := deploy(web, kAuto, "true"), deploy(web, nativeState, state1)
	both := func(state string) runtime.Object { return autoWeb(pod(reads("app-config"), readsSecret("db")), state) }
	runCases(t, map[string]reconcileCase{
		"migration records and rolls nothing, whatever the variable holds": {objects: objectList{cm2(), deploy(marked(hash1), kAuto, "true")}, want: []string{statePatch(state2)}},
		"two changes within the quiet period are one patch": newCase(objectList{cm1(), db1(), both(stateOf(cmKey, hash1, dbKey, dbHash1))}, func(f *fixture) { changeCM(f); f.advance(700 * time.Millisecond); changeDB(f) },
			[]string{envPatch(stateOf(cmKey, hash2, dbKey, dbHash2), "web/"+cmVar, hash2, "web/"+dbVar, dbHash2)}, reloadedBothEvent),
		"the annotation names the source that changed last": newCase(objectList{cm1(), db1(), both(stateOf(cmKey, hash1, dbKey, dbHash1))}, func(f *fixture) { changeDB(f); f.advance(300 * time.Millisecond); changeCM(f) },
			[]string{annotationPatch(stateOf(cmKey, hash2, dbKey, dbHash2), compatMark, hash2, 1)}, "Normal Reloaded Reloaded for Secret shop/db, ConfigMap shop/app-config").withConfig(strategyAnnotations),
		"back and forth within the window is no change":                      {change: func(f *fixture) { changeCM(f); f.advance(900 * time.Millisecond); f.Put(cm1()) }},
		"creation is recorded":                                               {objects: objectList{autoWeb(web, stateAbsent)}, change: func(f *fixture) { f.Put(cm1()) }, want: []string{statePatch(state1)}},
		"creation while no manager ran rolls with on-create":                 {configure: onCreate, objects: objectList{cm2(), autoWeb(web, stateAbsent)}, want: rollPatches},
		"a source that a pattern names rolls with on-create when it appears": newCase(objectList{deploy(pod(), kCM, "app-.*")}, changeCM, rollPatches).withConfig(onCreate),
		"a source that is deleted and comes back the same rolls nothing":     {change: func(f *fixture) { deleteCM(f); f.advance(time.Minute); f.Put(cm1()) }},
		"under search, a source that comes back with other data is a change": newCase(objectList{annotated(cm1(), kMatch, "true"), deploy(web, kSearch, "true", nativeState, state1)}, func(f *fixture) { deleteCM(f); f.advance(time.Minute); f.Put(annotated(cm2(), kMatch, "true")) },
			rollPatches),
		"what only a pattern named is forgotten when it goes": newCase(objectList{cm1(), deploy(pod(), kCM, "app-.*", nativeState, state1)}, deleteCM, []string{statePatch("")}),
		"on-delete removes the variable, and without the variable is recorded": newCase(objectList{cm1(), autoWeb(marked(hash1), state1)}, func(f *fixture) {
			deleteCM(f)
			f.advance(time.Minute)
			f.put(time.Minute, cm1())
			deleteCM(f)
		}, []string{envPatch(stateAbsent, "web/"+cmVar, ""), statePatch(state1), statePatch(stateAbsent)}).withConfig(onDelete),
		"on-delete rolls for what only a pattern named, and forgets it": newCase(objectList{cm1(), deploy(pod(variableSet(cmVar, hash1)), kCM, "app-.*", nativeState, state1)}, deleteCM,
			[]string{envPatch("", "web/"+cmVar, "")}).withConfig(onDelete),
		"on-delete under the annotations strategy marks the deletion": newCase(nil, deleteCM,
			[]string{annotationPatch(stateAbsent, compatMark, deletedHash, 1)}).withConfig(func(c *config) { onDelete(c); strategyAnnotations(c) }),
		"on-delete rolls once for what is named by a pattern and referenced": newCase(objectList{cm1(), deploy(marked(hash1), kCM, "app-.*", nativeState, state1)}, deleteCM,
			[]string{envPatch(stateAbsent, "web/"+cmVar, "")}).withConfig(onDelete),
		"a new reference is recorded, and rolls nothing by itself": newCase(objectList{cm1(), db1(), both(state1)}, nil, []string{statePatch(stateOf(cmKey, hash1, dbKey, dbHash1))}),
		"a state that cannot be recorded is tried again, and reported each time": newCase(objectList{cm1()}, func(f *fixture) {
			f.refuseNext(3, "patch", "deployments", errForbidden)
			f.Put(bare)
			f.advance(5 * time.Second) // at once, and after 1 s and 3 s
			f.expectMetric(3, "state_writes_total", "result", "error")
			f.advance(5 * time.Second)
		}, slices.Repeat([]string{statePatch(state1)}, 4), slices.Repeat([]string{notRecordedEvent + errForbidden.Error()}, 3)...),
		"a state that is no state is reported and recorded anew": newCase(objectList{cm1(), autoWeb(web, "{")}, nil,
			[]string{statePatch(state1)}, invalidEvent+nativeState+": not a JSON object of strings: unexpected end of JSON input"),
		"a state that was copied from another workload is none": newCase(objectList{cm1(), autoWeb(web, stateOn("Deployment/other/web", cmKey, hash2))}, nil,
			[]string{statePatch(state1)}),
		"a state of the first release counts": {objects: objectList{cm2(), autoWeb(web, `{"configmap/app-config":"`+hash1[:stateDigits]+`"}`)}, want: rollPatches},
		"an empty state on a workload that asks for nothing is removed, once": newCase(objectList{cm1(), deploy(web, nativeState, "")}, func(f *fixture) { f.advance(time.Minute); f.touchWeb() },
			[]string{statePatch("")}),
		"a state that others remove is written again, but rarely": newCase(nil, func(f *fixture) {
			f.put(time.Second, bare).expectWrites(statePatch(state1))
			for range 20 { // ten minutes of removing and restoring
				f.put(29*time.Second, bare)
			}
			f.expectWriteCount(1)
			changeCM(f) // still rolls the workload, from memory, and writes the state with it
		}, []string{statePatch(state1), rollPatch}),
		"a state that others write back is no change": {
			change: func(f *fixture) {
				before := f.web()
				f.put(time.Minute, cm2())
				for range 15 { // all that a tool or an undo brings back
					f.put(time.Minute, before.DeepCopy())
				}
				f.expectWriteCount(3)
				// Its pods have read the second version, though the template has no mark of it.
				f.put(time.Minute, cm1()).expectWriteCount(4)
				// After a restart, what stands on the workload counts.
				f.Restart(func() { f.Put(before.DeepCopy(), cm2()) })
			},
			want:   []string{rollPatch, statePatch(state2), statePatch(state2), envWithoutState("web/"+cmVar, hash1), rollPatch}, // with the fourth, its state is there
			events: slices.Repeat([]string{reloadedEvent}, 3),
		},
		// Most workloads have not been rolled since the manager was last restarted or upgraded.
		"a state of an earlier run stands": newCase(nil, func(f *fixture) {
			before := f.web()
			f.put(time.Minute, cm2())
			f.Restart()
			f.advance(time.Minute)
			f.Put(before)
		}, []string{rollPatch, statePatch(state2)}),
		"a state that is in Git is removed, but rarely, if the workload asks for nothing any more": newCase(objectList{cm1(), inGit}, func(f *fixture) {
			for range 15 {
				f.advance(time.Minute)
				f.Put(inGit)
			}
			f.advance(time.Hour)
			f.expectWriteCount(4) // after 0, 1, 11 and 21 minutes
			// The workload asks again, and nobody else has written its state meanwhile.
			f.Put(annotated(f.web(), kAuto, "true"))
		}, append(slices.Repeat([]string{statePatch("")}, 4), statePatch(state1))),
	})
}

// What a workload is first seen with, or a source begins to count with, is no change; what happens right
// afterwards is, in whatever order the caches learn of it.
func TestFirstSightIsNoChange(t *testing.T) {
	const little = 100 * time.Millisecond
	asksForAuto := func() runtime.Object { return deploy(web, kAuto, "true") }
	onlyLabelled := func(c *config) { c.SourceSelector = []string{"env=prod"} }
	namespace := func() *corev1.Namespace { return &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop"}} }
	runCases(t, map[string]reconcileCase{
		"a change after the creation rolls, although the workload reaches the cache after it": newCase(objectList{cm1()}, func(f *fixture) { f.Lag(little, "deployments"); f.Put(asksForAuto()); changeCM(f) },
			rollPatches),
		"a change after the creation rolls, although the source reaches the cache late, from its creation on": newCase(objectList{}, func(f *fixture) { f.Lag(little, "configmaps"); f.Put(cm1()); f.Put(asksForAuto()); changeCM(f) },
			[]string{statePatch(stateAbsent), rollPatch}),
		"a change before the creation does not, although the source reaches the cache after the workload": newCase(objectList{cm1()}, func(f *fixture) { f.Lag(little, "configmaps"); changeCM(f); f.Put(asksForAuto()) },
			[]string{statePatch(state1), statePatch(state2)}),
		"a change before the workload asks to be rolled rolls nothing": newCase(objectList{cm1(), deploy(web)}, func(f *fixture) { changeCM(f); f.advance(10 * time.Millisecond); f.Put(asksForAuto()) },
			[]string{statePatch(state2)}),
		"a change right after the source was added to the template rolls": newCase(objectList{cm1(), db1(), autoWeb(pod(readsSecret("db")), stateOf(dbKey, dbHash1))}, func(f *fixture) {
			f.Lag(little, "deployments")
			d := f.web()
			reads("app-config")(&d.Spec.Template)
			f.Put(d)
			changeCM(f)
		}, []string{envPatch(stateOf(cmKey, hash2, dbKey, dbHash1), "web/"+cmVar, hash2)}),
		"next to the original, which is first, the template stays as it is though the cache does not know yet": {
			change: func(f *fixture) {
				f.Lag(10*time.Second, "deployments")
				f.advance(20 * time.Second)
				changeCM(f)
				f.put(time.Minute, autoWeb(marked(hash2), state1))
			},
			want: []string{rollPatch, rollPatch}, // the first is refused
		},
		"a source that has changed while it did not count rolls with on-create": newCase(objectList{}, func(f *fixture) {
			f.put(time.Second, labelled(cm1()))
			f.Put(asksForAuto())
			f.advance(time.Minute)
			f.put(time.Minute, cm2())
			f.Put(labelled(cm2()))
		}, []string{statePatch(state1), rollPatch}).withConfig(onlyLabelled),
		"a change that comes with the end of ignore rolls": {objects: objectList{annotated(cm1(), kIgnore, "true"), asksForAuto()}, change: changeCM, want: rollPatches},
		"a change before the source matches rolls nothing": newCase(objectList{cm1(), deploy(web, kSearch, "true")}, func(f *fixture) { f.put(time.Minute, cm2()); f.Put(annotated(cm2(), kMatch, "true")) },
			[]string{statePatch(state2)}),
		"a change that comes with the annotation that makes the source count rolls": newCase(objectList{cm1(), deploy(web, kSearch, "true")}, func(f *fixture) { f.Put(annotated(cm2(), kMatch, "true")) },
			rollPatches),
		"a change before the namespace is selected rolls nothing": newCase(objectList{namespace(), cm1(), asksForAuto()}, func(f *fixture) { f.put(time.Minute, cm2()); f.Put(labelled(namespace())) },
			[]string{statePatch(state2)}).withConfig(func(c *config) { c.NamespaceSelector = []string{"env=prod"} }),
	})
}

func TestMaxDelayEndsAWindow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		// The source changes every 1.9 s, so a quiet period of 3 s never passes.
		f := newFixture(t, quietPeriod(3*time.Second), cm1(), autoWeb(web, state1))
		var patchTimes []time.Duration
		start := time.Now()
		f.beforeRequest("patch", "deployments", func(controllertest.Request) error {
			patchTimes = append(patchTimes, time.Since(start).Truncate(100*time.Millisecond))
			return nil
		})
		for i := range 33 {
			f.put(1900*time.Millisecond, cm("app-config", "i", fmt.Sprint(i)))
		}
		f.advance(time.Minute)
		// The second window opens with the first change after the first patch, at 30.4 s. The
		// changes after the second window are quiet at 60.8 + 3 s.
		want := []time.Duration{30 * time.Second, 60400 * time.Millisecond, 63800 * time.Millisecond}
		assert.Equal(t, "patches", want, patchTimes)
		f.expectMetric(30, "coalesced_changes_total")
	})
}

// second formats a time of the bubble like a pause annotation.
func second(n int) string { return time.Unix(startSecond+int64(n), 0).UTC().Format(time.RFC3339) }

// withPause adds a pause to the body of a reload.
func withPause(body object, since string) object {
	body["spec"].(object)["paused"] = true
	body["metadata"].(object)["annotations"].(object)[kPausedAt] = since
	return body
}

func resumePatch() string {
	return "patch deployments/web " + toJSON(object{"metadata": object{"annotations": object{kPausedAt: nil}}, "spec": object{"paused": false}})
}

func TestReconcileEndsItsOwnPauses(t *testing.T) {
	// row has a Deployment with these annotations besides; pausedRow has one that is paused.
	row := func(annotations ...string) objectList {
		return objectList{cm1(), deploy(web, append(annotations, kAuto, "true", nativeState, state1)...)}
	}
	pausedRow := func(annotations ...string) objectList {
		list := row(annotations...)
		list[1].(*appsv1.Deployment).Spec.Paused = true
		return list
	}
	h3 := hashOf("color", "green")
	patchWithPause := "patch deployments/web " + toJSON(withPause(envBody(state2, "web/"+cmVar, hash2), second(1)))
	runCases(t, map[string]reconcileCase{
		"the first change pauses, the second does not extend the pause": newCase(row(kPause, "5m"), func(f *fixture) {
			f.put(time.Minute, cm2())
			f.put(4*time.Minute+500*time.Millisecond, cm("app-config", "color", "green")).expectWriteCount(2)
			f.expectMetric(1, "paused_deployments")
		}, []string{patchWithPause, envPatch(stateOf(cmKey, h3), "web/"+cmVar, h3), resumePatch()}, reloadedEvent, reloadedEvent),
		"the pause ends in time though the manager restarts meanwhile": newCase(row(kPause, "5m"), func(f *fixture) {
			f.put(2*time.Minute, cm2())
			f.Restart()
			f.advance(2*time.Minute + 59*time.Second).expectWriteCount(1)
		}, []string{patchWithPause, resumePatch()}),
		"a pause that ended while no manager ran ends at the start":           {objects: pausedRow(kPause, "5m", kPausedAt, second(-600)), want: []string{resumePatch()}},
		"a Deployment that somebody else paused is patched and never resumed": {objects: pausedRow(kPause, "5m"), change: changeCM, want: rollPatches},
		"a pause that somebody ended leaves its time to be removed": newCase(row(kPause, "5m", kPausedAt, second(0)), nil,
			[]string{"patch deployments/web " + toJSON(object{"metadata": object{"annotations": object{kPausedAt: nil}}})}),
		"a period that does not parse reloads without a pause": newCase(row(kPause, "soon"), changeCM,
			rollPatches, reloadedEvent, "Warning InvalidPausePeriod Reloaded without a pause: "+kPause+`: time: invalid duration "soon"`),
		"a period that is not positive reloads without a pause": newCase(row(kPause, "-5m"), changeCM,
			rollPatches, reloadedEvent, "Warning InvalidPausePeriod Reloaded without a pause: "+kPause+": -5m0s is not positive"),
		"a pause lasts its period at most, though it is looked at again and again": newCase(pausedRow(kPause, "5m", kPausedAt, "2100-01-01T00:00:00Z"), func(f *fixture) {
			for range 4 {
				f.advance(time.Minute)
				f.touchWeb()
			}
			f.advance(50 * time.Second).expectPaused(true)
			f.advance(11 * time.Second).expectPaused(false)
		}, []string{resumePatch()}),
		"a time that does not parse resumes now": {objects: pausedRow(kPause, "5m", kPausedAt, "yesterday"), want: []string{resumePatch()}},
		"a period that is gone resumes now":      {objects: pausedRow(kPausedAt, second(0)), want: []string{resumePatch()}},
		"a pause of a workload with native annotations is still resumed": newCase(pausedRow(nativeReload, "off", kPause, "5m", kPausedAt, second(0)), nil,
			[]string{resumePatch(), statePatch("")}),
		"without compatibility a pause is not ours to end": newCase(pausedRow(nativeReload, "auto", kPause, "5m", kPausedAt, "yesterday"), nil, nil).withConfig(withoutCompat),
	})
}

// The end of a pause does not wait for the back-off of a failing reload.
func TestPauseEndsInTimeThoughAReloadFails(t *testing.T) {
	refuseTemplates := func(err error) func(f *fixture) {
		return func(f *fixture) {
			f.beforeRequest("patch", "deployments", func(r controllertest.Request) error {
				if strings.Contains(string(r.Body), "template") {
					return err
				}
				return nil
			})
			f.Put(cm1())
		}
	}
	bubbles(t, map[string]func(f *fixture){
		"as the patch is refused": refuseTemplates(errTryAgain),
		"as the workload cannot be read after a conflict": func(f *fixture) {
			f.refuseNext(999, "get", "deployments", errTryAgain)
			refuseTemplates(errConflict)(f)
		},
		"as the source cannot be read": func(f *fixture) { f.refuseNext(999, "list", "configmaps", errTryAgain); f.Delete(cm2()) },
	}, func(t bubble, fail func(f *fixture)) {
		const period = 17 * time.Minute
		f := newFixture(t.T, onDelete, cm1(), deploy(web, kAuto, "true", kPause, period.String(), nativeState, state1))
		var ends atomic.Int32
		f.beforeRequest("patch", "deployments", func(r controllertest.Request) error {
			if strings.Contains(string(r.Body), `"paused":false`) && ends.Add(1) <= 2 {
				return errTryAgain
			}
			return nil
		})
		f.put(2*time.Second, cm2())
		fail(f)
		f.advance(period - 3*time.Second).expectPaused(true)
		f.advance(3 * time.Second)
		assert.Equal(t, "attempts to end the pause when it was over", 1, ends.Load())
		f.advance(20 * time.Second) // for the second refusal
		f.expectPaused(false)
	})
}

func (f *fixture) expectPaused(want bool) {
	f.t.Helper()
	assert.Equal(f.t, "paused", want, f.web().Spec.Paused)
}
