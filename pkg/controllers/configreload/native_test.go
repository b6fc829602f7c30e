// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package configreload_test

import (
	"testing"
	"time"
)

func TestReconcileNative(t *testing.T) {
	known1, known2 := stateOf(cmKey, h1), stateOf(cmKey, h2)
	both := pod(reads("app-config"), readsSecret("db"))
	nativeANN := ann(known2, nativeMark,
		`{"type":"CONFIGMAP","name":"app-config","namespace":"shop","hash":"`+h2+`","containerRefs":["web"],"observedAt":946684801}`)
	runCases(t, map[string]reconcileCase{
		"native annotations beat the others and mark by annotation": {
			objects: objs{cm1(), db1(), deploy(both, nativeReload, "auto,!secret/db", kAuto, "false", nativeState, known1)},
			change:  func(f *fixture) { changeDB(f); f.pass(time.Minute); changeCM(f) },
			want: []string{ann(known2, nativeMark,
				`{"type":"CONFIGMAP","name":"app-config","namespace":"shop","hash":"`+h2+`","containerRefs":["web"],"observedAt":946684861}`)},
		},
		"off beats auto-all": {configure: autoAll, objects: objs{cm1(), deploy(both, nativeReload, "off")}, change: changeCM},
		"native annotations count without compatibility": {
			configure: func(c *config) { c.Compat = false },
			objects:   objs{cm1(), deploy(pod(reads("app-config")), nativeReload, "auto", nativeState, known1)},
			change:    changeCM, want: []string{nativeANN},
		},
		"the template's native annotation counts if the workload has none": {
			objects: objs{cm1(), deploy(pod(reads("app-config"), onTemplate(nativeReload, "configmap/app-config")), nativeState, known1)},
			change:  changeCM, want: []string{nativeANN},
		},
		"a glob names sources that nobody references": {
			objects: objs{cm1(), deploy(pod(), nativeReload, "configmap/app-*", nativeState, known1)},
			change:  changeCM, want: []string{nativeANN},
		},
		"a dot in a glob is a dot": {objects: objs{cm1(), deploy(pod(), nativeReload, "configmap/app.*")}, change: changeCM},
		"never wins over a glob":   {objects: objs{cm1(), deploy(pod(reads("app-config")), nativeReload, "!configmap/app-*, configmap/*, auto")}, change: changeCM},
		"an item that is no good is reported once, and the others count": {
			objects: objs{cm1(), deploy(pod(reads("app-config")), nativeReload, "auto, pod/x", nativeState, known1)},
			change:  func(f *fixture) { f.pass(time.Minute); changeCM(f) },
			want: []string{ann(known2, nativeMark,
				`{"type":"CONFIGMAP","name":"app-config","namespace":"shop","hash":"`+h2+`","containerRefs":["web"],"observedAt":946684861}`)},
			events: []string{reloaded, "Warning InvalidReloadAnnotation quartermaster.dev/reload: " +
				`item "pod/x": is none of off, auto, TYPE/NAME, !TYPE/NAME with TYPE configmap, secret or secretproviderclass`},
		},
		"a delay of its own replaces the quiet period, and stretches the longest one": {
			objects: objs{cm1(), deploy(pod(reads("app-config")), nativeReload, "auto", nativeDelay, "1m", nativeState, known1)},
			change:  func(f *fixture) { changeCM(f); f.pass(59 * time.Second); f.written(0) },
			want: []string{ann(known2, nativeMark,
				`{"type":"CONFIGMAP","name":"app-config","namespace":"shop","hash":"`+h2+`","containerRefs":["web"],"observedAt":946684860}`)},
		},
		"a delay that is no good is reported": {
			objects: objs{deploy(pod(), nativeReload, "off", nativeDelay, "0s")},
			events:  []string{`Warning InvalidReloadAnnotation quartermaster.dev/reload-delay: "0s" is not a positive duration`},
		},
		"old variables stay as they are": {
			objects: objs{cm1(), deploy(pod(reads("app-config"), variableSet(cmVar, h1)), nativeReload, "auto", nativeState, known1)},
			change:  changeCM, want: []string{nativeANN},
		},
	})
}
