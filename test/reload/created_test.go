// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package reload

import (
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// pairs are Deployments, each with a ConfigMap of its own, which changes right after the
// Deployment was created.
type pairs struct {
	testNamespace
	n int
}

func (p pairs) name(i int) string   { return fmt.Sprintf("app-%d", i) }
func (p pairs) object(i int) string { return "deployments/" + p.name(i) }

// create creates the i-th pair and changes the ConfigMap after the delay.
func (p pairs) create(i int, delay time.Duration) {
	p.t.Helper()
	p.configMap(p.name(i), "before")
	p.testNamespace.create(newDeployment(p.name(i), annotated(auto, "true"), uses("configmap/"+p.name(i))))
	// The delay is what is tested: where the change falls between the steps of the manager.
	<-time.After(delay)
	p.configMap(p.name(i), "after")
}

// expectOneRolloutEach waits until all are marked, and expects one rollout of each.
func (p pairs) expectOneRolloutEach(begin time.Time) {
	p.t.Helper()
	p.eventually(func() error {
		var errs []error
		for i := range p.n {
			if got := marks(p.template(p.object(i)))[variableName("configmap/"+p.name(i))]; got != hashOf("after") {
				errs = append(errs, fmt.Errorf("%s is marked with %q: its change is lost so far", p.object(i), got))
			}
		}
		return errors.Join(errs...)
	})
	readAuditLog(p.t, begin)
	want := map[string]int{}
	for i := range p.n {
		want[p.object(i)] = 1
	}
	assert.Equal(p.t, "rollouts", want, p.countRollouts())
}

func TestCreationThenChangeRolls(t *testing.T) {
	begin := time.Now()
	p := pairs{newTestNamespace(t, nil), 200}
	shared.RunLeader(fleet.Context(t), t, immediateArgs()...)
	var creating sync.WaitGroup
	const workers = 10
	for worker := range workers {
		creating.Go(func() {
			for i := worker; i < p.n; i += workers {
				p.create(i, time.Duration(i%21)*time.Millisecond)
			}
		})
	}
	creating.Wait()
	p.expectOneRolloutEach(begin)
}

// A standby has seen what happened while nobody led.
func TestCreationThenChangeRollsAfterACrash(t *testing.T) {
	for name, killAt := range map[string]int{ // before which pair the leader is killed
		"which is killed before":  0,
		"which is killed between": 15,
	} {
		t.Run(name, func(t *testing.T) {
			ctx := fleet.Context(t)
			begin := time.Now()
			p := pairs{newTestNamespace(t, nil), 30}
			old := shared.RunLeader(ctx, t, immediateArgs(fleet.ShortTimings...)...)
			next := shared.RunStandby(ctx, t, immediateArgs(fleet.ShortTimings...)...)
			for i := range p.n {
				if i == killAt {
					assert.NoError(t, old.Signal(syscall.SIGKILL))
				}
				p.create(i, time.Duration(i%21)*time.Millisecond)
			}
			shared.WaitForLeader(ctx, t, next)
			p.expectOneRolloutEach(begin)
		})
	}
}

func TestCreationAfterTheChangeRollsNothing(t *testing.T) {
	begin := time.Now()
	p := pairs{newTestNamespace(t, nil), 30}
	shared.RunLeader(fleet.Context(t), t, immediateArgs()...)
	for i := range p.n {
		p.configMap(p.name(i), "before")
		p.configMap(p.name(i), "after")
		p.testNamespace.create(newDeployment(p.name(i), annotated(auto, "true"), uses("configmap/"+p.name(i))))
	}
	for i := range p.n {
		p.waitForState(p.object(i), "configmap/"+p.name(i))
	}
	waitUntilIdle(t)
	readAuditLog(t, begin)
	assert.Equal(t, "rollouts", map[string]int{}, p.countRollouts())
}

// Whoever asks to be rolled from now on is not rolled for what changed before.
func TestAnnotatingRollsNothing(t *testing.T) {
	begin := time.Now()
	s := newTestNamespace(t, nil)
	shared.RunLeader(fleet.Context(t), t, immediateArgs()...)
	s.configMap("app-config", "blue")
	s.create(newDeployment("web", nil, uses(cm)), newDeployment("worker", annotated(auto, "true"), uses("configmap/other")))
	s.configMap("app-config", "red")
	s.patch(web, `{"metadata":{"annotations":{"`+auto+`":"true"}}}`)
	s.waitForState(web, cm)
	s.configMap("other", "blue")
	s.waitForState(worker, "configmap/other")
	s.configMap("other", "red")
	s.patch(worker, `{"spec":{"template":{"spec":{"containers":[{"name":"web","image":"web","envFrom":[{"configMapRef":{"name":"app-config"}}]}]}}}}`)
	s.waitForState(worker, cm)
	waitUntilIdle(t)
	readAuditLog(t, begin)
	got := s.countRollouts()
	delete(got, worker) // of its old source, unless its new one was faster
	assert.Equal(t, "rollouts", map[string]int{}, got)
}

// A tool that brings everything back to what an exported manifest says does not make a loop.
func TestRevertingToolIsNoLoop(t *testing.T) {
	begin := time.Now()
	s := newTestNamespace(t, nil)
	s.configMap("app-config", "blue")
	s.configMap("last", "blue")
	const last, lastSource = "deployments/last", "configmap/last"
	s.create(newDeployment("web", annotated(auto, "true"), uses(cm)),
		// This takes longer than what is rolled at once.
		newDeployment("last", annotated(fleet.ReloadAnnotation, "auto", "quartermaster.dev/reload-delay", "2s"), uses(lastSource)))
	shared.RunLeader(fleet.Context(t), t, immediateArgs()...)
	s.waitForState(web, cm)
	s.waitForState(last, lastSource)
	changeColor(s, "green") // so that the manifest has a mark
	exported := s.get(web)
	manifest, err := json.Marshal(map[string]any{"spec": exported.Object["spec"], "metadata": map[string]any{"annotations": exported.GetAnnotations()}})
	assert.NoError(t, err)
	for _, color := range []string{"red", "yellow"} {
		changeColor(s, color)
		for range 20 {
			s.patch(web, string(manifest))
		}
		s.configMap("last", color)
		s.waitForMark(last, lastSource) // what has not been rolled by then will not be
	}
	readAuditLog(t, begin)
	assert.Equal(t, "rollouts for three changes", map[string]int{web: 3, last: 2}, s.countRollouts())
	if n := s.countEvents(web, "Reloaded"); n != 3 {
		t.Errorf("%d Events Reloaded, want 3", n)
	}
}

func TestLongBurstIsOneRolloutEach(t *testing.T) {
	const workers = 10
	begin := time.Now()
	p := pairs{newTestNamespace(t, nil), 1000}
	forEach := func(do func(i int)) {
		var running sync.WaitGroup
		for worker := range workers {
			running.Go(func() {
				for i := worker; i < p.n; i += workers {
					do(i)
				}
			})
		}
		running.Wait()
	}
	forEach(func(i int) {
		p.configMap(p.name(i), "before")
		p.testNamespace.create(newDeployment(p.name(i), annotated(auto, "true"), uses("configmap/"+p.name(i))))
	})
	shared.RunLeader(fleet.Context(t), t, immediateArgs("--config-reload-concurrent-syncs=16")...)
	forEach(func(i int) { p.waitForState(p.object(i), "configmap/"+p.name(i)) })
	first := time.Now()
	forEach(func(i int) { p.configMap(p.name(i), "after") })
	changed := time.Since(first)
	p.eventually(func() error { return burst{p.testNamespace, p.n}.checkRolled(p.n) })
	t.Logf("%d ConfigMaps were changed within %v, and all Deployments were rolled after %v", p.n, changed, time.Since(first))
	p.expectOneRolloutEach(begin)
}
