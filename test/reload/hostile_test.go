// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package reload

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// TestLongHostileListKeepsNobodyWaiting measures another tenant's rollout, from the update of its
// source until a reader sees the new template, while the lists of 100 Deployments of a namespace
// with 300 ConfigMaps change all the time. The goal is 1 s; the bound leaves room for a busy
// machine.
func TestLongHostileListKeepsNobodyWaiting(t *testing.T) {
	ctx := fleet.Within(t.Context(), t, 3*fleet.Patience)
	hostile, victim := newTestNamespace(t, nil), newTestNamespace(t, nil)
	for i := range 300 {
		hostile.configMap(strings.Repeat("a", 200)+fmt.Sprint(i), "x")
	}
	for i := range 100 {
		hostile.create(newDeployment(fmt.Sprint("app-", i), nil))
	}
	victim.configMap("app-config", "0")
	victim.create(newDeployment("web", annotated(auto, "true"), uses("configmap/app-config")))
	shared.RunReleased(ctx, t, immediateArgs()...)
	victim.waitForState("deployments/web", "configmap/app-config")
	deployments := shared.Admin.AppsV1().Deployments
	median := rolloutMedian(ctx, victim, func(string) {})
	quiet := median("alone")
	for name, list := range map[string]func(i int) string{
		"a list of 200 KiB":          func(i int) string { return fmt.Sprint("n", i, ",") + strings.Repeat("(a?)*", 40<<10) },
		"200 KiB of names":           func(i int) string { return fmt.Sprint("n", i, ",") + strings.Repeat("a-name-xx,", 20<<10) },
		"costly regular expressions": func(i int) string { return fmt.Sprint("n", i) + strings.Repeat(",(a?){70}b", 60) },
		"many regular expressions":   func(i int) string { return fmt.Sprint("n", i) + strings.Repeat(",a.*a.*a.*b", 300) },
	} {
		writing, stop := context.WithCancel(ctx)
		var writers sync.WaitGroup
		for part := range 4 {
			writers.Go(func() {
				for i := part; writing.Err() == nil; i += 4 {
					patch, _ := json.Marshal(map[string]any{"metadata": map[string]any{"annotations": annotated(configMapReload, list(i))}}) // cannot fail
					_, _ = deployments(hostile.namespace).Patch(writing, fmt.Sprint("app-", i%100), types.MergePatchType, patch, metav1.PatchOptions{})
				}
			})
		}
		elapsed := median(name)
		stop()
		writers.Wait()
		if elapsed > quiet+3*time.Second {
			t.Errorf("%s: another namespace's rollout takes %v, alone %v", name, elapsed, quiet)
		}
	}
}

// TestLongDueWorkloadsKeepNobodyWaiting measures another tenant's rollout, from the update of its
// source until a reader sees the new template, just after a source of 300 Deployments changed, which
// takes seconds. The goal is 1 s.
func TestLongDueWorkloadsKeepNobodyWaiting(t *testing.T) {
	ctx := fleet.Within(t.Context(), t, 3*fleet.Patience)
	busy, victim := newTestNamespace(t, nil), newTestNamespace(t, nil)
	for _, ns := range []testNamespace{busy, victim} {
		ns.configMap("app-config", "0")
	}
	for i := range 300 {
		busy.create(newDeployment(fmt.Sprint("app-", i), annotated(auto, "true"), uses("configmap/app-config")))
	}
	victim.create(newDeployment("web", annotated(auto, "true"), uses("configmap/app-config")))
	shared.RunReleased(ctx, t, immediateArgs()...)
	for i := range 300 {
		busy.waitForState(fmt.Sprint("deployments/app-", i), "configmap/app-config")
	}
	victim.waitForState("deployments/web", "configmap/app-config")
	quiet := rolloutMedian(ctx, victim, func(string) {})("alone")
	elapsed := rolloutMedian(ctx, victim, func(value string) { busy.configMap("app-config", value) })("while 300 are due")
	if elapsed > quiet+time.Second {
		t.Errorf("another namespace's rollout takes %v, alone %v", elapsed, quiet)
	}
}

// rolloutMedian returns a function that measures rollouts of the victim's web. Each begins by calling begin.
func rolloutMedian(ctx context.Context, victim testNamespace, prepare func(value string)) func(during string) time.Duration {
	latency := shared.NewLatency(ctx, victim.t)
	generation := func() int64 {
		web, err := shared.Admin.AppsV1().Deployments(victim.namespace).Get(ctx, "web", metav1.GetOptions{})
		assert.NoError(victim.t, err)
		return web.Generation
	}
	return func(during string) time.Duration {
		victim.t.Helper()
		var before int64
		return latency.Median(during, func(value string) {
			prepare(value)
			before = generation()
			victim.configMap("app-config", value)
		}, func(string) bool { return generation() > before })
	}
}
