// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package configreload

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/tools/record"
)

// TestStandbyKnowsWhatChanged changes something while the caches run and the controller does not.
func TestStandbyKnowsWhatChanged(t *testing.T) {
	web := func() runtime.Object { return deploy(pod(reads("app-config")), kAuto, "true") }
	known := func() runtime.Object {
		return deploy(pod(reads("app-config")), kAuto, "true", nativeState, stateOf(cmKey, h1))
	}
	rolled := env(stateOf(cmKey, h2), "web/"+cmVar, h2)
	for name, tc := range map[string]struct {
		objects []runtime.Object
		led     bool // the process led before
		change  func(w *fixture)
		want    []string // at once after it leads
	}{
		"a change of a source rolls": {
			objects: []runtime.Object{cm1(), known()}, change: changeCM, want: []string{rolled},
		},
		"a change of a source between two terms of a process rolls": {
			objects: []runtime.Object{cm1(), known()}, led: true, change: changeCM, want: []string{rolled},
		},
		"a change that was taken back rolls nothing": {
			objects: []runtime.Object{cm1(), known()},
			change:  func(w *fixture) { changeCM(w); w.pass(time.Second); w.put(cm1()) },
		},
		"a change after the creation of a workload that nobody has recorded rolls": {
			objects: []runtime.Object{cm1()},
			change:  func(w *fixture) { w.put(web()); w.pass(time.Second); changeCM(w) },
			want:    []string{rolled},
		},
		"a change before that creation is only recorded": {
			objects: []runtime.Object{cm1()},
			change:  func(w *fixture) { changeCM(w); w.pass(time.Second); w.put(web()) },
			want:    []string{stateOnly(stateOf(cmKey, h2))},
		},
		"what was deleted is left alone": {
			objects: []runtime.Object{cm1(), known()},
			change:  func(w *fixture) { changeCM(w); w.remove(known()) },
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newStandby(t, tc.objects...)
				if tc.led {
					w.lead()
					w.pass(time.Minute)
					w.resign()
				}
				tc.change(w)
				w.pass(time.Minute)
				if diff := cmp.Diff([]string(nil), w.writes()); diff != "" {
					t.Errorf("a standby wrote (-want +got):\n%s", diff)
				}
				if n := len(w.c.memory.entries); n != 0 {
					t.Errorf("a standby remembers %d workloads", n)
				}
				w.lead()
				w.pass(time.Minute)
				if diff := cmp.Diff(tc.want, w.writes()); diff != "" {
					t.Errorf("writes of the leader (-want +got):\n%s", diff)
				}
			})
		})
	}
}

// TestLeaderWithOldCaches lets a predecessor roll the workload just before it ends, while the
// caches of the standby are late.
func TestLeaderWithOldCaches(t *testing.T) {
	const little, long = 2 * time.Second, 20 * time.Second
	h3, rolled := hashOf("color", "green"), env(stateOf(cmKey, h2), "web/"+cmVar, h2)
	record := func(w *fixture, hash string) {
		on := w.deployment("web").ResourceVersion
		w.put(deploy(pod(reads("app-config"), variableSet(cmVar, hash)), kAuto, "true", nativeState, recordedOn(on, stateOf(cmKey, hash))))
	}
	roll := func(w *fixture) { changeCM(w); record(w, h2) }
	for name, tc := range map[string]struct {
		sources, workloads time.Duration
		before             func(w *fixture) // what both caches have
		change             func(w *fixture)
		rolls              bool
		want               []string // without rolls, they are refused
	}{
		"the workload arrives first":         {sources: long, workloads: little, change: roll},
		"the source arrives first":           {sources: little, workloads: long, change: roll, want: []string{rolled}},
		"workload and source arrive at once": {sources: long, workloads: long, change: roll},
		"only the workload is late":          {workloads: long, change: roll, want: []string{rolled}},
		"only the source is late":            {sources: long, change: roll},
		"two rollouts are on their way":      {sources: long, workloads: little, change: func(w *fixture) { roll(w); w.put(cm1()); record(w, h1) }},
		"the source is back where it was, and the predecessor did not roll for that any more": {
			sources: little, workloads: long,
			change: func(w *fixture) { roll(w); w.put(cm1()) },
			rolls:  true,
			want:   []string{env(stateOf(cmKey, h1), "web/"+cmVar, h1)},
		},
		"of a workload that was created after another change, only the source is late": {
			sources: long,
			before: func(w *fixture) {
				w.remove(deploy(pod()))
				changeCM(w)
				w.put(deploy(pod(reads("app-config")), kAuto, "true"))
				record(w, h2)
			},
			change: func(w *fixture) { w.put(cm("app-config", "color", "green")); record(w, h3) },
		},
		"the deletion of the source is late": {
			sources: long,
			change:  func(w *fixture) { w.remove(cm1()); record(w, "") },
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newLaggingStandby(t, onDelete, map[string]time.Duration{"configmaps": tc.sources, "deployments": tc.workloads},
					cm1(), deploy(pod(reads("app-config")), kAuto, "true", nativeState, stateOf(cmKey, h1)))
				w.pass(time.Minute)
				if tc.before != nil {
					tc.before(w)
					w.pass(time.Minute)
				}
				tc.change(w)
				version := w.deployment("web").ResourceVersion
				w.lead()
				w.pass(time.Hour)
				if got := w.deployment("web").ResourceVersion; (got != version) != tc.rolls {
					t.Errorf("version %s becomes %s", version, got)
				}
				if diff := cmp.Diff(tc.want, w.writes()); diff != "" {
					t.Errorf("writes differ (-want +got):\n%s", diff)
				}
			})
		})
	}
}

func newStandby(t *testing.T, objects ...runtime.Object) *fixture {
	t.Helper()
	return newLaggingStandby(t, nil, nil, objects...)
}

func newLaggingStandby(t *testing.T, configure func(*Config), lags map[string]time.Duration, objects ...runtime.Object) *fixture {
	t.Helper()
	w := &fixture{t: t, cfg: NewConfig(), client: fake.NewClientset(), recorder: record.NewFakeRecorder(100), standby: true}
	w.cfg.Compat = true
	w.begin(lags, configure, objects)
	return w
}
