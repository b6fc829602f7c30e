// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package controllers

import (
	"bytes"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/component-base/metrics/testutil"
	"k8s.io/klog/v2/textlogger"
)

func TestMappingPanicWaitsForTheNextEvent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, "bad", "good")
		var log bytes.Buffer
		f.logger = textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(&log)))
		f.build(WatchMapped(f.configMaps, func(e Event[*corev1.ConfigMap]) []cache.ObjectName {
			if e.New.Name == "bad" && textOf(e.New) != "mended" {
				panic("cannot map this")
			}
			return []cache.ObjectName{nameOf(e)}
		}))
		f.run()
		f.put("2", "bad")
		f.put("2", "good")
		pass(time.Hour)
		f.expect("good", "good")
		if got := f.loop.Status(); got.Panics != 2 || got.LastError == nil || got.LastError.Key != "shop/bad" || !strings.HasPrefix(got.LastError.Text, "event mapping: panic") {
			t.Errorf("status %+v, want a panic on shop/bad for the cache and one for its change", got)
		}
		counted, err := testutil.GetCounterValuesFromGatherer(f.registry, "quartermaster_controller_panics_total", nil, "controller")
		if err != nil || counted["test"] != 2 {
			t.Errorf("panics counted: %v, error %v; want 2", counted, err)
		}
		if strings.Contains(log.String(), "cannot map this") {
			t.Errorf("the log has the panic's value, which may be part of a Secret:\n%s", &log)
		}
		for _, want := range []string{`object="shop/bad"`, "mapping_test.go", "panic: a value of type string"} {
			if !strings.Contains(log.String(), want) {
				t.Errorf("the log lacks %q:\n%s", want, &log)
			}
		}
		f.put("mended", "bad")
		f.expect("bad")
	})
}

func TestMappingEndsBeforeRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t)
		f.build(WatchMapped(f.configMaps, func(Event[*corev1.ConfigMap]) []cache.ObjectName {
			f.stop()
			letOthersRun() // such as Run, which would return if it did not wait
			f.say("mapped")
			return nil
		}))
		f.run()
		f.configMaps.put("1", "late")
		f.end()
		f.expect("mapped")
	})
}
