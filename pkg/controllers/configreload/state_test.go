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

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/controllertest"
)

var errForbidden = apierrors.NewForbidden(appsv1.Resource("deployments"), "web", errors.New("no"))

func TestReconcileState(t *testing.T) {
	bare, inGit := deploy(web, kAuto, "true"), deploy(web, nativeState, known1)
	both := func(state string) runtime.Object { return auto(pod(reads("app-config"), readsSecret("db")), state) }
	runCases(t, map[string]reconcileCase{
		"migration records and rolls nothing, whatever the variable holds": {objects: objs{cm2(), deploy(marked(h1), kAuto, "true")}, want: []string{stateOnly(known2)}},
		"two changes within the quiet period are one patch": given(objs{cm1(), db1(), both(stateOf(cmKey, h1, dbKey, p1))}, func(f *fixture) { changeCM(f); f.pass(700 * time.Millisecond); changeDB(f) },
			[]string{env(stateOf(cmKey, h2, dbKey, p2), "web/"+cmVar, h2, "web/"+dbVar, p2)}, reloadedBoth),
		"the annotation names the source that changed last": given(objs{cm1(), db1(), both(stateOf(cmKey, h1, dbKey, p1))}, func(f *fixture) { changeDB(f); f.pass(300 * time.Millisecond); changeCM(f) },
			[]string{ann(stateOf(cmKey, h2, dbKey, p2), compatMark, h2, 1)}, "Normal Reloaded Reloaded for Secret shop/db, ConfigMap shop/app-config").with(strategyAnnotations),
		"back and forth within the window is no change":                      {change: func(f *fixture) { changeCM(f); f.pass(900 * time.Millisecond); f.Put(cm1()) }},
		"creation is recorded":                                               {objects: objs{auto(web, absent)}, change: func(f *fixture) { f.Put(cm1()) }, want: []string{stateOnly(known1)}},
		"creation while no manager ran rolls with on-create":                 {configure: onCreate, objects: objs{cm2(), auto(web, absent)}, want: rolled},
		"a source that a pattern names rolls with on-create when it appears": given(objs{deploy(pod(), kCM, "app-.*")}, changeCM, rolled).with(onCreate),
		"a source that is deleted and comes back the same rolls nothing":     {change: func(f *fixture) { deleteCM(f); f.pass(time.Minute); f.Put(cm1()) }},
		"under search, a source that comes back with other data is a change": given(objs{annotated(cm1(), kMatch, "true"), deploy(web, kSearch, "true", nativeState, known1)}, func(f *fixture) { deleteCM(f); f.pass(time.Minute); f.Put(annotated(cm2(), kMatch, "true")) },
			rolled),
		"what only a pattern named is forgotten when it goes": given(objs{cm1(), deploy(pod(), kCM, "app-.*", nativeState, known1)}, deleteCM, []string{stateOnly("")}),
		"on-delete removes the variable, and without the variable is recorded": given(objs{cm1(), auto(marked(h1), known1)}, func(f *fixture) {
			deleteCM(f)
			f.pass(time.Minute)
			f.put(time.Minute, cm1())
			deleteCM(f)
		}, []string{env(absent, "web/"+cmVar, ""), stateOnly(known1), stateOnly(absent)}).with(onDelete),
		"on-delete rolls for what only a pattern named, and forgets it": given(objs{cm1(), deploy(pod(variableSet(cmVar, h1)), kCM, "app-.*", nativeState, known1)}, deleteCM,
			[]string{env("", "web/"+cmVar, "")}).with(onDelete),
		"on-delete under the annotations strategy marks the deletion": given(nil, deleteCM,
			[]string{ann(absent, compatMark, deletedHash, 1)}).with(func(c *config) { onDelete(c); strategyAnnotations(c) }),
		"on-delete rolls once for what is named by a pattern and referenced": given(objs{cm1(), deploy(marked(h1), kCM, "app-.*", nativeState, known1)}, deleteCM,
			[]string{env(absent, "web/"+cmVar, "")}).with(onDelete),
		"a new reference is recorded, and rolls nothing by itself": given(objs{cm1(), db1(), both(known1)}, nil, []string{stateOnly(stateOf(cmKey, h1, dbKey, p1))}),
		"a state that cannot be recorded is tried again, and reported each time": given(objs{cm1()}, func(f *fixture) {
			f.refuse(3, "patch", "deployments", errForbidden)
			f.Put(bare)
			f.pass(5 * time.Second) // at once, and after 1 s and 3 s
			f.count(3, "state_writes_total", "result", "error")
			f.pass(5 * time.Second)
		}, slices.Repeat([]string{stateOnly(known1)}, 4), slices.Repeat([]string{notRecorded + errForbidden.Error()}, 3)...),
		"a state that is no state is reported and recorded anew": given(objs{cm1(), auto(web, "{")}, nil,
			[]string{stateOnly(known1)}, invalid+nativeState+": not a JSON object of strings: unexpected end of JSON input"),
		"a state that was copied from another workload is none": given(objs{cm1(), auto(web, stateOn("Deployment/other/web", cmKey, h2))}, nil,
			[]string{stateOnly(known1)}),
		"a state of the first release counts": {objects: objs{cm2(), auto(web, `{"configmap/app-config":"`+h1[:stateDigits]+`"}`)}, want: rolled},
		"an empty state on a workload that asks for nothing is removed, once": given(objs{cm1(), deploy(web, nativeState, "")}, func(f *fixture) { f.pass(time.Minute); f.touch() },
			[]string{stateOnly("")}),
		"a state that others remove is written again, but rarely": given(nil, func(f *fixture) {
			f.put(time.Second, bare).expect(stateOnly(known1))
			for range 20 { // ten minutes of removing and restoring
				f.put(29*time.Second, bare)
			}
			f.written(1)
			changeCM(f) // still rolls the workload, from memory, and writes the state with it
		}, []string{stateOnly(known1), roll}),
		"a state that others write back is no change": {
			change: func(f *fixture) {
				before := f.web()
				f.put(time.Minute, cm2())
				for range 15 { // all that a tool or an undo brings back
					f.put(time.Minute, before.DeepCopy())
				}
				f.written(3)
				// Its pods have read the second version, though the template has no mark of it.
				f.put(time.Minute, cm1()).written(4)
				// After a restart, what stands on the workload counts.
				f.Restart(func() { f.Put(before.DeepCopy(), cm2()) })
			},
			want:   []string{roll, stateOnly(known2), stateOnly(known2), envAlone("web/"+cmVar, h1), roll}, // with the fourth, its state is there
			events: slices.Repeat([]string{reloaded}, 3),
		},
		// Most workloads have not been rolled since the manager was last restarted or upgraded.
		"a state of an earlier run stands": given(nil, func(f *fixture) {
			before := f.web()
			f.put(time.Minute, cm2())
			f.Restart()
			f.pass(time.Minute)
			f.Put(before)
		}, []string{roll, stateOnly(known2)}),
		"a state that is in Git is removed, but rarely, if the workload asks for nothing any more": given(objs{cm1(), inGit}, func(f *fixture) {
			for range 15 {
				f.pass(time.Minute)
				f.Put(inGit)
			}
			f.pass(time.Hour)
			f.written(4) // after 0, 1, 11 and 21 minutes
			// The workload asks again, and nobody else has written its state meanwhile.
			f.Put(annotated(f.web(), kAuto, "true"))
		}, append(slices.Repeat([]string{stateOnly("")}, 4), stateOnly(known1))),
	})
}

// What a workload is first seen with, or a source begins to count with, is no change; what happens right
// afterwards is, in whatever order the caches learn of it.
func TestFirstSightIsNoChange(t *testing.T) {
	const little = 100 * time.Millisecond
	asks := func() runtime.Object { return deploy(web, kAuto, "true") }
	onlyLabelled := func(c *config) { c.SourceSelector = []string{"env=prod"} }
	namespace := func() *corev1.Namespace { return &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop"}} }
	runCases(t, map[string]reconcileCase{
		"a change after the creation rolls, although the workload reaches the cache after it": given(objs{cm1()}, func(f *fixture) { f.Lag(little, "deployments"); f.Put(asks()); changeCM(f) },
			rolled),
		"a change after the creation rolls, although the source reaches the cache late, from its creation on": given(objs{}, func(f *fixture) { f.Lag(little, "configmaps"); f.Put(cm1()); f.Put(asks()); changeCM(f) },
			[]string{stateOnly(absent), roll}),
		"a change before the creation does not, although the source reaches the cache after the workload": given(objs{cm1()}, func(f *fixture) { f.Lag(little, "configmaps"); changeCM(f); f.Put(asks()) },
			[]string{stateOnly(known1), stateOnly(known2)}),
		"a change before the workload asks to be rolled rolls nothing": given(objs{cm1(), deploy(web)}, func(f *fixture) { changeCM(f); f.pass(10 * time.Millisecond); f.Put(asks()) },
			[]string{stateOnly(known2)}),
		"a change right after the source was added to the template rolls": given(objs{cm1(), db1(), auto(pod(readsSecret("db")), stateOf(dbKey, p1))}, func(f *fixture) {
			f.Lag(little, "deployments")
			d := f.web()
			reads("app-config")(&d.Spec.Template)
			f.Put(d)
			changeCM(f)
		}, []string{env(stateOf(cmKey, h2, dbKey, p1), "web/"+cmVar, h2)}),
		"next to the original, which is first, the template stays as it is though the cache does not know yet": {
			change: func(f *fixture) {
				f.Lag(10*time.Second, "deployments")
				f.pass(20 * time.Second)
				changeCM(f)
				f.put(time.Minute, auto(marked(h2), known1))
			},
			want: []string{roll, roll}, // the first is refused
		},
		"a source that has changed while it did not count rolls with on-create": given(objs{}, func(f *fixture) {
			f.put(time.Second, labelled(cm1()))
			f.Put(asks())
			f.pass(time.Minute)
			f.put(time.Minute, cm2())
			f.Put(labelled(cm2()))
		}, []string{stateOnly(known1), roll}).with(onlyLabelled),
		"a change that comes with the end of ignore rolls": {objects: objs{annotated(cm1(), kIgnore, "true"), asks()}, change: changeCM, want: rolled},
		"a change before the source matches rolls nothing": given(objs{cm1(), deploy(web, kSearch, "true")}, func(f *fixture) { f.put(time.Minute, cm2()); f.Put(annotated(cm2(), kMatch, "true")) },
			[]string{stateOnly(known2)}),
		"a change that comes with the annotation that makes the source count rolls": given(objs{cm1(), deploy(web, kSearch, "true")}, func(f *fixture) { f.Put(annotated(cm2(), kMatch, "true")) },
			rolled),
		"a change before the namespace is selected rolls nothing": given(objs{namespace(), cm1(), asks()}, func(f *fixture) { f.put(time.Minute, cm2()); f.Put(labelled(namespace())) },
			[]string{stateOnly(known2)}).with(func(c *config) { c.NamespaceSelector = []string{"env=prod"} }),
	})
}

func TestMaxDelayEndsAWindow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		// The source changes every 1.9 s, so a quiet period of 3 s never passes.
		f := newFixture(t, quietPeriod(3*time.Second), cm1(), auto(web, known1))
		var when []time.Duration
		begun := time.Now()
		f.before("patch", "deployments", func(controllertest.Request) error {
			when = append(when, time.Since(begun).Truncate(100*time.Millisecond))
			return nil
		})
		for i := range 33 {
			f.put(1900*time.Millisecond, cm("app-config", "i", fmt.Sprint(i)))
		}
		f.pass(time.Minute)
		// The second window opens with the first change after the first patch, at 30.4 s. The
		// changes after the second window are quiet at 60.8 + 3 s.
		want := []time.Duration{30 * time.Second, 60400 * time.Millisecond, 63800 * time.Millisecond}
		same(t, "patches", want, when)
		f.count(30, "coalesced_changes_total")
	})
}

// second formats a time of the bubble like a pause annotation.
func second(n int) string { return time.Unix(started+int64(n), 0).UTC().Format(time.RFC3339) }

// paused adds a pause to the body of a reload.
func paused(body object, since string) object {
	body["spec"].(object)["paused"] = true
	body["metadata"].(object)["annotations"].(object)[kPausedAt] = since
	return body
}

func resume() string {
	return "patch deployments/web " + toJSON(object{"metadata": object{"annotations": object{kPausedAt: nil}}, "spec": object{"paused": false}})
}

func TestReconcilePause(t *testing.T) {
	// row has a Deployment with these annotations besides; pausedBy is one that is paused.
	row := func(annotations ...string) objs {
		return objs{cm1(), deploy(web, append(annotations, kAuto, "true", nativeState, known1)...)}
	}
	pausedBy := func(annotations ...string) objs {
		list := row(annotations...)
		list[1].(*appsv1.Deployment).Spec.Paused = true
		return list
	}
	h3 := hashOf("color", "green")
	patchWithPause := "patch deployments/web " + toJSON(paused(envBody(known2, "web/"+cmVar, h2), second(1)))
	runCases(t, map[string]reconcileCase{
		"the first change pauses, the second does not extend the pause": given(row(kPause, "5m"), func(f *fixture) {
			f.put(time.Minute, cm2())
			f.put(4*time.Minute+500*time.Millisecond, cm("app-config", "color", "green")).written(2)
			f.count(1, "paused_deployments")
		}, []string{patchWithPause, env(stateOf(cmKey, h3), "web/"+cmVar, h3), resume()}, reloaded, reloaded),
		"the pause ends in time though the manager restarts meanwhile": given(row(kPause, "5m"), func(f *fixture) {
			f.put(2*time.Minute, cm2())
			f.Restart()
			f.pass(2*time.Minute + 59*time.Second).written(1)
		}, []string{patchWithPause, resume()}),
		"a pause that ended while no manager ran ends at the start":           {objects: pausedBy(kPause, "5m", kPausedAt, second(-600)), want: []string{resume()}},
		"a Deployment that somebody else paused is patched and never resumed": {objects: pausedBy(kPause, "5m"), change: changeCM, want: rolled},
		"a pause that somebody ended leaves its time to be removed": given(row(kPause, "5m", kPausedAt, second(0)), nil,
			[]string{"patch deployments/web " + toJSON(object{"metadata": object{"annotations": object{kPausedAt: nil}}})}),
		"a period that does not parse reloads without a pause": given(row(kPause, "soon"), changeCM,
			rolled, reloaded, "Warning InvalidPausePeriod Reloaded without a pause: "+kPause+`: time: invalid duration "soon"`),
		"a period that is not positive reloads without a pause": given(row(kPause, "-5m"), changeCM,
			rolled, reloaded, "Warning InvalidPausePeriod Reloaded without a pause: "+kPause+": -5m0s is not positive"),
		"a pause lasts its period at most, though it is looked at again and again": given(pausedBy(kPause, "5m", kPausedAt, "2100-01-01T00:00:00Z"), func(f *fixture) {
			for range 4 {
				f.pass(time.Minute)
				f.touch()
			}
			f.pass(50 * time.Second).isPaused(true)
			f.pass(11 * time.Second).isPaused(false)
		}, []string{resume()}),
		"a time that does not parse resumes now": {objects: pausedBy(kPause, "5m", kPausedAt, "yesterday"), want: []string{resume()}},
		"a period that is gone resumes now":      {objects: pausedBy(kPausedAt, second(0)), want: []string{resume()}},
		"a pause of a workload with native annotations is still resumed": given(pausedBy(nativeReload, "off", kPause, "5m", kPausedAt, second(0)), nil,
			[]string{resume(), stateOnly("")}),
		"without compatibility a pause is not ours to end": given(pausedBy(nativeReload, "auto", kPause, "5m", kPausedAt, "yesterday"), nil, nil).with(withoutCompat),
	})
}

// The end of a pause does not wait for the back-off of a failing reload.
func TestPauseEndsInTimeThoughAReloadFails(t *testing.T) {
	refuseTemplates := func(err error) func(f *fixture) {
		return func(f *fixture) {
			f.before("patch", "deployments", func(r controllertest.Request) error {
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
			f.refuse(999, "get", "deployments", errTryAgain)
			refuseTemplates(errConflict)(f)
		},
		"as the source cannot be read": func(f *fixture) { f.refuse(999, "list", "configmaps", errTryAgain); f.Delete(cm2()) },
	}, func(t bubble, fail func(f *fixture)) {
		const period = 17 * time.Minute
		f := newFixture(t.T, onDelete, cm1(), deploy(web, kAuto, "true", kPause, period.String(), nativeState, known1))
		var ends atomic.Int32
		f.before("patch", "deployments", func(r controllertest.Request) error {
			if strings.Contains(string(r.Body), `"paused":false`) && ends.Add(1) <= 2 {
				return errTryAgain
			}
			return nil
		})
		f.put(2*time.Second, cm2())
		fail(f)
		f.pass(period - 3*time.Second).isPaused(true)
		f.pass(3 * time.Second)
		same(t, "attempts to end the pause when it was over", 1, ends.Load())
		f.pass(20 * time.Second) // for the second refusal
		f.isPaused(false)
	})
}

func (f *fixture) isPaused(want bool) {
	f.t.Helper()
	same(f.t, "paused", want, f.web().Spec.Paused)
}
