// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package controllers

import (
	"bytes"
	"context"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/component-base/metrics/testutil"
	"k8s.io/klog/v2/textlogger"
)

// version is what a test has written into the ConfigMap.
func version(cm *corev1.ConfigMap) string {
	if cm == nil {
		return "none"
	}
	return cm.Data["version"]
}

func TestMappingPanicWaitsForTheNextEvent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var reconciled []string
		var log bytes.Buffer
		var mended atomic.Bool
		h := newHarness(t, reconciling{Reconcile: func(_ context.Context, key cache.ObjectName) (time.Duration, error) {
			reconciled = append(reconciled, key.Name)
			return 0, nil
		}}, "bad", "good")
		h.logger = textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(&log)))
		h.runWith(t, WatchMapped(h.informer, func(e Event[*corev1.ConfigMap]) []cache.ObjectName {
			if e.New.Name == "bad" && !mended.Load() {
				panic("cannot map this")
			}
			return []cache.ObjectName{cache.MetaObjectToName(e.New)}
		}))
		change := func(name, version string) {
			t.Helper()
			cm := configMap(name, version)
			if _, err := h.client.CoreV1().ConfigMaps(cm.Namespace).Update(t.Context(), cm, metav1.UpdateOptions{}); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
		}
		change("bad", "2")
		change("good", "2")
		pass(time.Hour)
		if diff := cmp.Diff([]string{"good", "good"}, reconciled); diff != "" {
			t.Errorf("reconciles (-want +got):\n%s", diff)
		}
		if got := h.loop.Status(); got.Panics != 2 || got.LastError == nil || got.LastError.Key != "shop/bad" || !strings.HasPrefix(got.LastError.Text, "event mapping: panic") {
			t.Errorf("status %+v, want a panic on shop/bad for the cache and one for its change", got)
		}
		counted, err := testutil.GetCounterValuesFromGatherer(h.registry, "quartermaster_controller_panics_total", nil, "controller")
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
		mended.Store(true)
		change("bad", "3")
		if got := reconciled[len(reconciled)-1]; got != "bad" {
			t.Errorf("the next event was not mapped: %v", reconciled)
		}
		h.stop()
		if err := <-h.stopped; err != nil {
			t.Error(err)
		}
	})
}

func TestMappingEndsBeforeRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, reconciling{
			Reconcile: func(context.Context, cache.ObjectName) (time.Duration, error) { return 0, nil },
		})
		var returned atomic.Bool
		h.runWith(t, WatchMapped(h.informer, func(Event[*corev1.ConfigMap]) []cache.ObjectName {
			h.stop()
			for range 1000 {
				runtime.Gosched() // lets Run return if it does not wait
			}
			returned.Store(true)
			return nil
		}))
		create(t, h.client, "late")
		if err := <-h.stopped; err != nil || !returned.Load() {
			t.Errorf("Run returned (error %v) while its mapping was called", err)
		}
	})
}
