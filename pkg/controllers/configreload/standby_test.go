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

// TestWhatAStandbyHasSeen changes something while the caches run and the controller does not.
func TestWhatAStandbyHasSeen(t *testing.T) {
	web := func() runtime.Object { return deploy(pod(reads("app-config")), kAuto, "true") }
	known := func() runtime.Object {
		return deploy(pod(reads("app-config")), kAuto, "true", nativeState, stateOf(cmKey, h1))
	}
	rolled := env(stateOf(cmKey, h2), "web/"+cmVar, h2)
	for name, tc := range map[string]struct {
		objects []runtime.Object
		led     bool // the process led before
		change  func(w *world)
		want    []string // at once after it leads
	}{
		"a change of a source rolls": {
			objects: []runtime.Object{cm1(), known()}, change: changeCM, want: []string{rolled},
		},
		"so it does between two terms of a process": {
			objects: []runtime.Object{cm1(), known()}, led: true, change: changeCM, want: []string{rolled},
		},
		"a change that was taken back rolls nothing": {
			objects: []runtime.Object{cm1(), known()},
			change:  func(w *world) { changeCM(w); w.pass(time.Second); w.put(cm1()) },
		},
		"a change after the creation of a workload that nobody has recorded rolls": {
			objects: []runtime.Object{cm1()},
			change:  func(w *world) { w.put(web()); w.pass(time.Second); changeCM(w) },
			want:    []string{rolled},
		},
		"a change before that creation is only recorded": {
			objects: []runtime.Object{cm1()},
			change:  func(w *world) { changeCM(w); w.pass(time.Second); w.put(web()) },
			want:    []string{stateOnly(stateOf(cmKey, h2))},
		},
		"what was deleted is left alone": {
			objects: []runtime.Object{cm1(), known()},
			change:  func(w *world) { changeCM(w); w.remove(known()) },
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

func newStandby(t *testing.T, objects ...runtime.Object) *world {
	t.Helper()
	w := &world{t: t, cfg: DefaultConfig(), client: fake.NewClientset(), recorder: record.NewFakeRecorder(100), standby: true}
	w.cfg.Compat = true
	w.begin(nil, nil, objects)
	return w
}
