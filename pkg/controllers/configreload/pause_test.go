// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package configreload_test

import (
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/controllertest"
)

// second formats a time of the bubble like a pause annotation.
func second(n int) string { return time.Unix(started+int64(n), 0).UTC().Format(time.RFC3339) }

// paused adds a pause to the body of a reload.
func paused(body object, since string) object {
	body["spec"].(object)["paused"] = true
	body["metadata"].(object)["annotations"].(object)[kPausedAt] = since
	return body
}

func resume() string {
	return "patch deployments/web " + toJSON(object{
		"metadata": object{"annotations": object{kPausedAt: nil}}, "spec": object{"paused": false},
	})
}

func clearPause() string {
	return "patch deployments/web " + toJSON(object{"metadata": object{"annotations": object{kPausedAt: nil}}})
}

func TestReconcilePause(t *testing.T) {
	known1, known2 := stateOf(cmKey, h1), stateOf(cmKey, h2)
	web := pod(reads("app-config"))
	cm3 := cm("app-config", "color", "green")
	h3 := hashOf("color", "green")
	known3 := stateOf(cmKey, h3)
	pausedBy := func(since string, annotations ...string) runtime.Object {
		d := deploy(web, append(annotations, kPausedAt, since)...)
		d.Spec.Paused = true
		return d
	}
	byUser := deploy(web, kAuto, "true", kPause, "5m", nativeState, known1)
	byUser.Spec.Paused = true

	patchWithPause := "patch deployments/web " + toJSON(paused(envBody(known2, "web/"+cmVar, h2), second(1)))
	runCases(t, map[string]reconcileCase{
		"the first change pauses, the second does not extend the pause": {
			objects: objs{cm1(), deploy(web, kAuto, "true", kPause, "5m", nativeState, known1)},
			change: func(f *fixture) {
				changeCM(f)
				f.pass(time.Minute)
				f.Put(cm3)
				f.pass(4*time.Minute + 500*time.Millisecond)
				f.written(2)
				f.count(1, "paused_deployments")
			},
			want:   []string{patchWithPause, env(known3, "web/"+cmVar, h3), resume()},
			events: []string{reloaded, reloaded},
		},
		"the pause ends in time though the manager restarts meanwhile": {
			objects: objs{cm1(), deploy(web, kAuto, "true", kPause, "5m", nativeState, known1)},
			change: func(f *fixture) {
				changeCM(f)
				f.pass(2 * time.Minute)
				f.Restart()
				f.pass(2*time.Minute + 59*time.Second)
				f.written(1)
			},
			want: []string{patchWithPause, resume()},
		},
		"a pause that ended while no manager ran ends at the start": {
			objects: objs{cm1(), pausedBy(second(-600), kAuto, "true", kPause, "5m", nativeState, known1)},
			want:    []string{resume()},
		},
		"a Deployment that somebody else paused is patched and never resumed": {objects: objs{cm1(), byUser}, change: changeCM, want: []string{env(known2, "web/"+cmVar, h2)}},
		"a pause that somebody ended leaves its time to be removed": {
			objects: objs{cm1(), deploy(web, kAuto, "true", kPause, "5m", kPausedAt, second(0), nativeState, known1)},
			want:    []string{clearPause()},
		},
		"a period that does not parse reloads without a pause": {
			objects: objs{cm1(), deploy(web, kAuto, "true", kPause, "soon", nativeState, known1)},
			change:  changeCM,
			want:    []string{env(known2, "web/"+cmVar, h2)},
			events: []string{reloaded, "Warning InvalidPausePeriod Reloaded without a pause: " + kPause +
				`: time: invalid duration "soon"`},
		},
		"a period that is not positive reloads without a pause": {
			objects: objs{cm1(), deploy(web, kAuto, "true", kPause, "-5m", nativeState, known1)},
			change:  changeCM,
			want:    []string{env(known2, "web/"+cmVar, h2)},
			events:  []string{reloaded, "Warning InvalidPausePeriod Reloaded without a pause: " + kPause + ": -5m0s is not positive"},
		},
		"a time that does not parse resumes now":                         {objects: objs{cm1(), pausedBy("yesterday", kAuto, "true", kPause, "5m", nativeState, known1)}, want: []string{resume()}},
		"a period that is gone resumes now":                              {objects: objs{cm1(), pausedBy(second(0), kAuto, "true", nativeState, known1)}, want: []string{resume()}},
		"a pause of a workload with native annotations is still resumed": {objects: objs{pausedBy(second(0), nativeReload, "off", kPause, "5m")}, want: []string{resume()}},
		"without compatibility a pause is not ours to end":               {configure: func(c *config) { c.Compat = false }, objects: objs{pausedBy("yesterday", kPause, "5m")}},
	})
}

// The end of a pause does not wait for the back-off of a failing reload.
func TestPauseEndsInTimeThoughAReloadFails(t *testing.T) {
	for name, fail := range map[string]func(f *fixture){
		"as the patch is refused": func(f *fixture) {
			f.before("patch", "deployments", func(r controllertest.Request) error {
				if strings.Contains(string(r.Body), "template") {
					return errTryAgain
				}
				return nil
			})
			f.Put(cm1())
		},
		"as the workload cannot be read after a conflict": func(f *fixture) {
			f.before("patch", "deployments", func(r controllertest.Request) error {
				if strings.Contains(string(r.Body), "template") {
					return apierrors.NewConflict(appsv1.Resource("deployments"), "web", errTryAgain)
				}
				return nil
			})
			f.before("get", "deployments", func(controllertest.Request) error { return errTryAgain })
			f.Put(cm1())
		},
		"as the source cannot be read": func(f *fixture) {
			f.before("list", "configmaps", func(controllertest.Request) error { return errTryAgain })
			f.Delete(cm2())
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				const period = 17 * time.Minute
				d := deploy(pod(reads("app-config")), kAuto, "true", kPause, period.String(), nativeState, stateOf(cmKey, h1))
				f := newFixture(t, onDelete, cm1(), d)
				var ends atomic.Int32
				f.before("patch", "deployments", func(r controllertest.Request) error {
					if strings.Contains(string(r.Body), `"paused":false`) && ends.Add(1) <= 2 {
						return errTryAgain
					}
					return nil
				})
				changeCM(f)
				f.pass(2 * time.Second)
				fail(f)
				f.pass(period - 3*time.Second)
				if !f.deployment("web").Spec.Paused {
					t.Error("resumed too early")
				}
				f.pass(3 * time.Second)
				if n := ends.Load(); n != 1 {
					t.Errorf("tried to end the pause %d times when it was over, want 1", n)
				}
				f.pass(20 * time.Second) // for the second refusal
				if f.deployment("web").Spec.Paused {
					t.Error("resumed too late")
				}
			})
		})
	}
}

func TestPauseLastsItsPeriodAtMost(t *testing.T) {
	const year = 365 * 24 * 3600
	for name, since := range map[string]string{
		"a pause that begins in a year":    second(year),
		"a pause that begins in a century": second(100 * year),
		"a pause that begins in a minute":  second(60),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				d := deploy(pod(), kPause, "5m", kPausedAt, since)
				d.Spec.Paused = true
				f := newFixture(t, nil, d)
				for i := range 4 { // it is looked at again and again
					f.pass(time.Minute)
					f.Put(annotated(f.deployment("web"), "example.org/touched", fmt.Sprint(i)))
				}
				f.pass(50 * time.Second)
				if !f.deployment("web").Spec.Paused {
					t.Error("resumed too early")
				}
				f.pass(11 * time.Second)
				if f.deployment("web").Spec.Paused {
					t.Error("still paused after its period")
				}
			})
		})
	}
}
