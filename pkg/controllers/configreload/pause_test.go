// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package configreload_test

import (
	"strings"
	"sync/atomic"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"

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

func TestPauseLastsItsPeriodAtMost(t *testing.T) {
	const year = 365 * 24 * 3600
	bubbles(t, map[string]int{
		"a pause that begins in a century": 100 * year,
		"a pause that begins in a minute":  60,
	}, func(t bubble, since int) {
		d := deploy(pod(), kPause, "5m", kPausedAt, second(since))
		d.Spec.Paused = true
		f := newFixture(t.T, nil, d)
		for range 4 { // it is looked at again and again
			f.pass(time.Minute)
			f.touch()
		}
		f.pass(50 * time.Second).isPaused(true)
		f.pass(11 * time.Second).isPaused(false)
	})
}

func (f *fixture) isPaused(want bool) {
	f.t.Helper()
	same(f.t, "paused", want, f.web().Spec.Paused)
}
