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
	record := func(f *fixture, hash string) {
		on := f.deployment("web").ResourceVersion
		f.Put(auto(pod(reads("app-config"), variableSet(cmVar, hash)), recordedOn(on, stateOf(cmKey, hash))))
	}
	roll := func(f *fixture) { changeCM(f); record(f, h2) }
	for name, tc := range map[string]struct {
		sources, workloads time.Duration    // lags
		before             func(f *fixture) // what both caches have
		change             func(f *fixture)
		want               []string
		rolls              bool // else all of want is refused
	}{
		"a change of a source rolls":                 {change: changeCM, want: []string{rolled}, rolls: true},
		"a change that was taken back rolls nothing": {change: func(f *fixture) { changeCM(f); f.Put(cm1()) }},
		"a change after the creation of a workload that nobody has recorded rolls": {
			workloads: little,
			before:    func(f *fixture) { f.Delete(known) },
			change:    func(f *fixture) { f.Put(web()); changeCM(f) },
			want:      []string{rolled}, rolls: true,
		},
		"a change before that creation is only recorded": {
			workloads: little,
			before:    func(f *fixture) { f.Delete(known) },
			change:    func(f *fixture) { changeCM(f); f.Put(web()) },
			want:      []string{stateOnly(stateOf(cmKey, h2))}, rolls: true,
		},
		"the workload arrives first":         {sources: long, workloads: little, change: roll},
		"the source arrives first":           {sources: little, workloads: long, change: roll, want: []string{rolled}},
		"workload and source arrive at once": {sources: long, workloads: long, change: roll},
		"only the workload is late":          {workloads: long, change: roll, want: []string{rolled}},
		"only the source is late":            {sources: long, change: roll},
		"two rollouts are on their way":      {sources: long, workloads: little, change: func(f *fixture) { roll(f); f.Put(cm1()); record(f, h1) }},
		"the source is back where it was, and the predecessor did not roll for that any more": {
			sources: little, workloads: long,
			change: func(f *fixture) { roll(f); f.Put(cm1()) },
			want:   []string{env(stateOf(cmKey, h1), "web/"+cmVar, h1)}, rolls: true,
		},
		"a workload was created after another change, and only the source is late": {
			sources: long,
			before:  func(f *fixture) { f.Delete(known); changeCM(f); f.Put(web()) },
			change:  func(f *fixture) { f.Put(cm("app-config", "color", "green")); record(f, green) },
		},
		"the deletion of the source is late": {sources: long, change: func(f *fixture) { f.Delete(cm1()); record(f, "") }},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				f := begin(t, controllertest.Setup{Standby: true}, onDelete, objs{cm1(), known})
				if tc.before != nil {
					tc.before(f)
					f.pass(time.Minute)
					f.forget()
				}
				f.Lag(tc.sources, "configmaps")
				f.Lag(tc.workloads, "deployments")
				version := ""
				f.Restart(func() {
					tc.change(f)
					version = f.deployment("web").ResourceVersion
				})
				f.pass(2 * time.Minute)
				f.expect(tc.want...)
				if got := f.deployment("web").ResourceVersion; (got != version) != tc.rolls {
					t.Errorf("version %s becomes %s", version, got)
				}
			})
		})
	}
}
