// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package configreload_test

import (
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apimachinery/pkg/runtime"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/controllertest"
)

// TestStandbyLeads changes something while nobody leads, or lets the predecessor roll the workload just
// before it ends, while the caches of the standby are late.
func TestStandbyLeads(t *testing.T) {
	const little, long = 200 * time.Millisecond, 2 * time.Second
	web := func() runtime.Object { return deploy(pod(reads("app-config")), kAuto, "true") }
	green, known := hashOf("color", "green"), auto(pod(reads("app-config")), stateOf(cmKey, h1))
	rolled := env(stateOf(cmKey, h2), "web/"+cmVar, h2)
	record := func(w *fixture, hash string) {
		on := w.deployment("web").ResourceVersion
		w.Put(auto(pod(reads("app-config"), variableSet(cmVar, hash)), recordedOn(on, stateOf(cmKey, hash))))
	}
	roll := func(w *fixture) { changeCM(w); record(w, h2) }
	for name, tc := range map[string]struct {
		sources, workloads time.Duration    // lags
		before             func(w *fixture) // what both caches have
		change             func(w *fixture)
		want               []string
		rolls              bool // else all of want is refused
	}{
		"a change of a source rolls":                 {change: changeCM, want: []string{rolled}, rolls: true},
		"a change that was taken back rolls nothing": {change: func(w *fixture) { changeCM(w); w.Put(cm1()) }},
		"a change after the creation of a workload that nobody has recorded rolls": {
			workloads: little,
			before:    func(w *fixture) { w.Delete(known) },
			change:    func(w *fixture) { w.Put(web()); changeCM(w) },
			want:      []string{rolled}, rolls: true,
		},
		"a change before that creation is only recorded": {
			workloads: little,
			before:    func(w *fixture) { w.Delete(known) },
			change:    func(w *fixture) { changeCM(w); w.Put(web()) },
			want:      []string{stateOnly(stateOf(cmKey, h2))}, rolls: true,
		},
		"the workload arrives first":         {sources: long, workloads: little, change: roll},
		"the source arrives first":           {sources: little, workloads: long, change: roll, want: []string{rolled}},
		"workload and source arrive at once": {sources: long, workloads: long, change: roll},
		"only the workload is late":          {workloads: long, change: roll, want: []string{rolled}},
		"only the source is late":            {sources: long, change: roll},
		"two rollouts are on their way":      {sources: long, workloads: little, change: func(w *fixture) { roll(w); w.Put(cm1()); record(w, h1) }},
		"the source is back where it was, and the predecessor did not roll for that any more": {
			sources: little, workloads: long,
			change: func(w *fixture) { roll(w); w.Put(cm1()) },
			want:   []string{env(stateOf(cmKey, h1), "web/"+cmVar, h1)}, rolls: true,
		},
		"of a workload that was created after another change, only the source is late": {
			sources: long,
			before:  func(w *fixture) { w.Delete(known); changeCM(w); w.Put(web()) },
			change:  func(w *fixture) { w.Put(cm("app-config", "color", "green")); record(w, green) },
		},
		"the deletion of the source is late": {sources: long, change: func(w *fixture) { w.Delete(cm1()); record(w, "") }},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				w := begin(t, controllertest.Setup{Standby: true}, onDelete, objs{cm1(), known})
				if tc.before != nil {
					tc.before(w)
					w.pass(time.Minute)
					w.forget()
				}
				w.Lag(tc.sources, "configmaps")
				w.Lag(tc.workloads, "deployments")
				version := ""
				w.Restart(func() {
					tc.change(w)
					version = w.deployment("web").ResourceVersion
				})
				w.pass(2 * time.Minute)
				w.expect(tc.want...)
				if got := w.deployment("web").ResourceVersion; (got != version) != tc.rolls {
					t.Errorf("version %s becomes %s", version, got)
				}
			})
		})
	}
}
