// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package configreload_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/controllertest"
)

func TestReconcileState(t *testing.T) {
	known1, known2, absent := stateOf(cmKey, h1), stateOf(cmKey, h2), stateOf(cmKey, "")
	rolled := []string{env(known2, "web/"+cmVar, h2)}
	web := pod(reads("app-config"))
	marked := func(hash string) corev1.PodTemplateSpec { return pod(reads("app-config"), variableSet(cmVar, hash)) }
	annotationMark := func(hash string) string {
		return `{"type":"CONFIGMAP","name":"app-config","namespace":"shop","hash":"` + hash + `","containerRefs":["web"],"observedAt":1}`
	}

	runCases(t, map[string]reconcileCase{
		"a variable of a source without a name, which the API server takes, is no reference": {
			objects: objs{cm1(), auto(pod(reads("app-config"), reads("")), known1)},
			change:  changeCM,
			want:    rolled,
		},
		"a change while no manager ran rolls once":                         {objects: objs{cm2(), auto(web, known1)}, want: rolled},
		"migration records and rolls nothing, whatever the variable holds": {objects: objs{cm2(), deploy(marked(h1), kAuto, "true")}, want: []string{stateOnly(known2)}},

		"two changes within the quiet period are one patch": {
			objects: objs{cm1(), db1(), auto(pod(reads("app-config"), readsSecret("db")), stateOf(cmKey, h1, dbKey, p1))},
			change:  func(f *fixture) { changeCM(f); f.pass(700 * time.Millisecond); changeDB(f) },
			want:    []string{env(stateOf(cmKey, h2, dbKey, p2), "web/"+cmVar, h2, "web/"+dbVar, p2)},
			events:  []string{"Normal Reloaded Reloaded for ConfigMap shop/app-config, Secret shop/db"},
		},
		"the annotation names the source that changed last": {
			configure: strategyAnnotations,
			objects:   objs{cm1(), db1(), auto(pod(reads("app-config"), readsSecret("db")), stateOf(cmKey, h1, dbKey, p1))},
			change:    func(f *fixture) { changeDB(f); f.pass(300 * time.Millisecond); changeCM(f) },
			want: []string{ann(stateOf(cmKey, h2, dbKey, p2), compatMark,
				strings.Replace(annotationMark(h2), `"observedAt":1`, `"observedAt":`+fmt.Sprint(started+1), 1))},
			events: []string{"Normal Reloaded Reloaded for Secret shop/db, ConfigMap shop/app-config"},
		},
		"back and forth within the window is no change": {
			objects: objs{cm1(), auto(web, known1)},
			change:  func(f *fixture) { changeCM(f); f.pass(900 * time.Millisecond); f.Put(cm1()) },
		},
		"next to the original, which is first, the template stays as it is": {
			objects: objs{cm1(), auto(web, known1)},
			change:  func(f *fixture) { changeCM(f); f.Put(auto(marked(h2), known1)) },
			want:    rolled,
		},
		"creation is recorded":                               {objects: objs{auto(web, absent)}, change: func(f *fixture) { f.Put(cm1()) }, want: []string{stateOnly(known1)}},
		"creation rolls with on-create":                      {configure: onCreate, objects: objs{auto(web, absent)}, change: changeCM, want: rolled},
		"creation while no manager ran rolls with on-create": {configure: onCreate, objects: objs{cm2(), auto(web, absent)}, want: rolled},
		"a source that a pattern names rolls with on-create when it appears": {
			configure: onCreate,
			objects:   objs{deploy(pod(), kCM, "app-.*")},
			change:    changeCM,
			want:      rolled,
		},
		"a source that is deleted and comes back the same rolls nothing": {
			objects: objs{cm1(), auto(web, known1)},
			change:  func(f *fixture) { f.Delete(cm1()); f.pass(time.Minute); f.Put(cm1()) },
		},
		"coming back with other data is a change": {
			objects: objs{cm1(), auto(web, known1)},
			change:  func(f *fixture) { f.Delete(cm1()); f.pass(time.Minute); changeCM(f) },
			want:    rolled,
		},
		"under search, a source that comes back with other data is a change": {
			objects: objs{annotated(cm1(), kMatch, "true"), deploy(web, kSearch, "true", nativeState, known1)},
			change:  func(f *fixture) { f.Delete(cm1()); f.pass(time.Minute); f.Put(annotated(cm2(), kMatch, "true")) },
			want:    rolled,
		},
		"what only a pattern named is forgotten when it goes": {
			objects: objs{cm1(), deploy(pod(), kCM, "app-.*", nativeState, known1)},
			change:  deleteCM,
			want:    []string{stateOnly("")},
		},
		"on-delete removes the variable": {
			configure: onDelete,
			objects:   objs{cm1(), auto(marked(h1), known1)},
			change:    deleteCM,
			want:      []string{env(absent, "web/"+cmVar, "")},
		},
		"on-delete without the variable is recorded": {
			configure: onDelete,
			objects:   objs{cm1(), auto(marked(h1), known1)},
			change: func(f *fixture) {
				f.Delete(cm1())
				f.pass(time.Minute)
				f.Put(cm1())
				f.pass(time.Minute)
				f.Delete(cm1())
			},
			want: []string{env(absent, "web/"+cmVar, ""), stateOnly(known1), stateOnly(absent)},
		},
		"on-delete rolls for what only a pattern named, and forgets it": {
			configure: onDelete,
			objects:   objs{cm1(), deploy(pod(variableSet(cmVar, h1)), kCM, "app-.*", nativeState, known1)},
			change:    deleteCM,
			want:      []string{env("", "web/"+cmVar, "")},
		},
		"on-delete under the annotations strategy marks the deletion": {
			configure: func(c *config) { onDelete(c); strategyAnnotations(c) },
			objects:   objs{cm1(), auto(web, known1)},
			change:    deleteCM,
			want: []string{ann(absent, compatMark, strings.Replace(annotationMark(deletedHash), `"observedAt":1`,
				`"observedAt":`+fmt.Sprint(started+1), 1))},
		},
		"on-delete rolls once for what is named by a pattern and referenced": {
			configure: onDelete,
			objects:   objs{cm1(), deploy(marked(h1), kCM, "app-.*", nativeState, known1)},
			change:    deleteCM,
			want:      []string{env(absent, "web/"+cmVar, "")},
		},
		"a new reference is recorded, and rolls nothing by itself": {
			objects: objs{cm1(), db1(), auto(pod(reads("app-config"), readsSecret("db")), known1)},
			want:    []string{stateOnly(stateOf(cmKey, h1, dbKey, p1))},
		},
		"a change right after the workload's creation is not swallowed by recording": {
			configure: func(c *config) { c.QuietPeriod = 10 * time.Second },
			objects:   objs{cm1()},
			change: func(f *fixture) {
				// Writing the state fails until the change is there.
				f.refuse("patch", "deployments", errTryAgain)
				f.Put(deploy(web, kAuto, "true"))
				f.pass(100 * time.Millisecond)
				changeCM(f)
				f.pass(time.Minute)
			},
			want: []string{stateOnly(known1), env(known2, "web/"+cmVar, h2)}, // the first write fails
			events: []string{
				"Normal Reloaded Reloaded for ConfigMap shop/app-config",
				"Warning ReloadStateFail The state of its sources could not be recorded, so a change while no manager runs may be missed: " + errTryAgain.Error(),
			},
		},
		"a state that is no state is reported and recorded anew": {
			objects: objs{cm1(), auto(web, "{")},
			want:    []string{stateOnly(known1)},
			events:  []string{"Warning InvalidReloadAnnotation quartermaster.dev/reload-state: not a JSON object of strings: unexpected end of JSON input"},
		},
		"an empty state on a workload that asks for nothing is removed, once": {
			objects: objs{cm1(), deploy(web, nativeState, "")},
			change: func(f *fixture) {
				f.pass(time.Minute)
				f.Put(annotated(f.deployment("web"), "example.org/touched", "1"))
			},
			want: []string{stateOnly("")},
		},
		"a change that comes with the annotation that makes the source count rolls": {
			objects: objs{cm1(), deploy(web, kSearch, "true")},
			change:  func(f *fixture) { f.Put(annotated(cm2(), kMatch, "true")) },
			want:    rolled,
		},
		"a change that comes with the end of ignore rolls": {objects: objs{annotated(cm1(), kIgnore, "true"), deploy(web, kAuto, "true")}, change: changeCM, want: rolled},
	})
}

func TestFailingWorkloadHoldsUpNoOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		known1 := stateOf(cmKey, h1)
		api := auto(pod(reads("app-config")), stateOn("Deployment/shop/api", cmKey, h1))
		api.Name = "api"
		f := newFixture(t, nil, cm1(), auto(pod(reads("app-config")), known1), api)
		f.before("patch", "deployments", func(r controllertest.Request) error {
			if r.Name == "web" {
				return apierrors.NewForbidden(appsv1.Resource("deployments"), "web", errors.New("no"))
			}
			return nil
		})
		changeCM(f)
		f.pass(4500 * time.Millisecond) // due after 1 s, again 1 s and 3 s later
		web, other := env(stateOf(cmKey, h2), "web/"+cmVar, h2), envOn("deployments/api", stateOn("Deployment/shop/api", cmKey, h2), "web/"+cmVar, h2)
		got := f.writes()
		slices.Sort(got)
		if diff := cmp.Diff([]string{other, web, web, web}, got); diff != "" {
			t.Errorf("writes differ (-want +got):\n%s", diff)
		}
		failed := "Warning ReloadFail Reload for ConfigMap shop/app-config failed: deployments.apps \"web\" is forbidden: no"
		f.told("Normal Reloaded Reloaded for ConfigMap shop/app-config", failed, failed, failed)
		f.count(3, "reloads_total", "kind", "Deployment", "result", "error")
	})
}

func TestMaxDelayEndsAWindow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		// The source changes every 1.9 s, so a quiet period of 3 s never passes.
		f := newFixture(t, func(c *config) { c.QuietPeriod = 3 * time.Second },
			cm1(), auto(pod(reads("app-config")), stateOf(cmKey, h1)))
		var when []time.Duration
		begun := time.Now()
		f.before("patch", "deployments", func(controllertest.Request) error {
			when = append(when, time.Since(begun).Truncate(100*time.Millisecond))
			return nil
		})
		for i := range 33 {
			f.Put(cm("app-config", "i", fmt.Sprint(i)))
			f.pass(1900 * time.Millisecond)
		}
		f.pass(time.Minute)
		// The second window opens with the first change after the first patch, at 30.4 s. The
		// changes after the second window are quiet at 60.8 + 3 s.
		want := []time.Duration{30 * time.Second, 60400 * time.Millisecond, 63800 * time.Millisecond}
		if diff := cmp.Diff(want, when); diff != "" {
			t.Errorf("patches differ (-want +got):\n%s", diff)
		}
		f.count(30, "coalesced_changes_total")
	})
}

func TestStateRemovedByOthersIsWrittenAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		known1 := stateOf(cmKey, h1)
		bare := deploy(pod(reads("app-config")), kAuto, "true")
		f := newFixture(t, nil, cm1(), annotated(bare.DeepCopy(), nativeState, known1))
		f.Put(bare)
		f.pass(time.Second)
		f.expect(stateOnly(known1))
		for range 20 { // ten minutes of removing and restoring
			f.Put(bare)
			f.pass(29 * time.Second)
		}
		f.written(1)
		// A change still rolls the workload, from memory, and writes the state with it.
		changeCM(f)
		f.pass(2 * time.Second)
		f.expect(stateOnly(known1), env(stateOf(cmKey, h2), "web/"+cmVar, h2))
	})
}
