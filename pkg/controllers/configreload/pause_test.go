// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package configreload

import (
	"errors"
	"math"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	clienttesting "k8s.io/client-go/testing"
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
	reloaded := []string{"Normal Reloaded Reloaded for ConfigMap shop/app-config"}
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
			objects: []runtime.Object{cm1(), deploy(web, kAuto, "true", kPause, "5m", nativeState, known1)},
			change: func(w *fixture) {
				changeCM(w)
				w.pass(time.Minute)
				w.put(cm3)
				w.pass(4*time.Minute + 500*time.Millisecond)
				if n := len(w.writes()); n != 2 {
					w.t.Errorf("%d writes before the pause is over, want 2: %v", n, w.writes())
				}
				if n := w.count("paused_deployments", nil); n != 1 {
					w.t.Errorf("paused_deployments = %v, want 1", n)
				}
			},
			want:   []string{patchWithPause, env(known3, "web/"+cmVar, h3), resume()},
			events: []string{reloaded[0], reloaded[0]},
		},
		"the pause ends in time though the manager restarts meanwhile": {
			objects: []runtime.Object{cm1(), deploy(web, kAuto, "true", kPause, "5m", nativeState, known1)},
			change: func(w *fixture) {
				changeCM(w)
				w.pass(2 * time.Minute)
				w.restart()
				w.pass(2*time.Minute + 59*time.Second)
				if n := len(w.writes()); n != 1 {
					w.t.Errorf("%d writes before the pause is over, want 1: %v", n, w.writes())
				}
			},
			want: []string{patchWithPause, resume()}, events: reloaded,
		},
		"a pause that ended while no manager ran ends at the start": {
			objects: []runtime.Object{cm1(), pausedBy(second(-600), kAuto, "true", kPause, "5m", nativeState, known1)},
			want:    []string{resume()}, events: []string{},
		},
		"a Deployment that somebody else paused is patched and never resumed": {
			objects: []runtime.Object{cm1(), byUser},
			change:  changeCM,
			want:    []string{env(known2, "web/"+cmVar, h2)}, events: reloaded,
		},
		"a pause that somebody ended leaves its time to be removed": {
			objects: []runtime.Object{cm1(), deploy(web, kAuto, "true", kPause, "5m", kPausedAt, second(0), nativeState, known1)},
			want:    []string{clearPause()}, events: []string{},
		},
		"a period that does not parse reloads without a pause": {
			objects: []runtime.Object{cm1(), deploy(web, kAuto, "true", kPause, "soon", nativeState, known1)},
			change:  changeCM,
			want:    []string{env(known2, "web/"+cmVar, h2)},
			events: []string{reloaded[0], "Warning InvalidPausePeriod Reloaded without a pause: " + kPause +
				`: time: invalid duration "soon"`},
		},
		"a period that is not positive reloads without a pause": {
			objects: []runtime.Object{cm1(), deploy(web, kAuto, "true", kPause, "-5m", nativeState, known1)},
			change:  changeCM,
			want:    []string{env(known2, "web/"+cmVar, h2)},
			events:  []string{reloaded[0], "Warning InvalidPausePeriod Reloaded without a pause: " + kPause + ": -5m0s is not positive"},
		},
		"a time that does not parse resumes now": {
			objects: []runtime.Object{cm1(), pausedBy("yesterday", kAuto, "true", kPause, "5m", nativeState, known1)},
			want:    []string{resume()}, events: []string{},
		},
		"a period that is gone resumes now": {
			objects: []runtime.Object{cm1(), pausedBy(second(0), kAuto, "true", nativeState, known1)},
			want:    []string{resume()}, events: []string{},
		},
		"a pause of a workload with native annotations is still resumed": {
			objects: []runtime.Object{pausedBy(second(0), nativeReload, "off", kPause, "5m")},
			want:    []string{resume()}, events: []string{},
		},
		"without compatibility a pause is not ours to end": {
			configure: func(c *Config) { c.Compat = false },
			objects:   []runtime.Object{pausedBy("yesterday", kPause, "5m")},
		},
	})
}

func TestPauseEndIsRetried(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := deploy(pod(), kPause, "5m", kPausedAt, second(-299))
		d.Spec.Paused = true
		w := newFixture(t, nil, d)
		w.stop()
		refuse := w.failPatches(3)
		w.start()
		w.pass(10 * time.Second)
		if diff := cmp.Diff([]string{resume(), resume(), resume(), resume()}, w.writes()); diff != "" {
			t.Errorf("writes differ (-want +got):\n%s", diff)
		}
		if *refuse != 0 || w.deployment("web").Spec.Paused {
			t.Errorf("still paused")
		}
	})
}

// The end of a pause does not wait for the back-off of a failing reload.
func TestPauseEndsInTimeThoughAReloadFails(t *testing.T) {
	for name, fail := range map[string]func(w *fixture){
		"as the patch is refused": func(w *fixture) {
			w.client.PrependReactor("patch", "deployments", func(a clienttesting.Action) (bool, runtime.Object, error) {
				if strings.Contains(string(a.(clienttesting.PatchAction).GetPatch()), "template") {
					return true, nil, apierrors.NewForbidden(deploymentResource.GroupResource(), "web", errors.New("no"))
				}
				return false, nil, nil
			})
			w.put(cm1())
		},
		"as the workload cannot be read after a conflict": func(w *fixture) {
			w.client.PrependReactor("patch", "deployments", func(a clienttesting.Action) (bool, runtime.Object, error) {
				conflicts := strings.Contains(string(a.(clienttesting.PatchAction).GetPatch()), "template")
				return conflicts, nil, apierrors.NewConflict(deploymentResource.GroupResource(), "web", errors.New("changed"))
			})
			w.client.PrependReactor("get", "deployments", func(clienttesting.Action) (bool, runtime.Object, error) {
				return true, nil, errors.New("no")
			})
			w.put(cm1())
		},
		"as the source cannot be read": func(w *fixture) {
			w.live.failures = math.MaxInt
			w.remove(cm2())
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				const period = 17 * time.Minute
				d := deploy(pod(reads("app-config")), kAuto, "true", kPause, period.String(), nativeState, stateOf(cmKey, h1))
				w := newFixture(t, onDelete, cm1(), d)
				var ends atomic.Int32
				w.client.PrependReactor("patch", "deployments", func(a clienttesting.Action) (bool, runtime.Object, error) {
					if !strings.Contains(string(a.(clienttesting.PatchAction).GetPatch()), `"paused":false`) {
						return false, nil, nil
					}
					return ends.Add(1) <= 2, nil, errors.New("not yet")
				})
				changeCM(w)
				w.pass(2 * time.Second)
				fail(w)
				w.pass(period - 3*time.Second)
				if !w.deployment("web").Spec.Paused {
					t.Error("resumed too early")
				}
				w.pass(3 * time.Second)
				if n := ends.Load(); n != 1 {
					t.Errorf("tried to end the pause %d times when it was over, want 1", n)
				}
				w.pass(2 * pauseRetry)
				if w.deployment("web").Spec.Paused {
					t.Error("resumed too late")
				}
			})
		})
	}
}
