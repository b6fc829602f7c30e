// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package reload

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// scenario is what happens in a namespace of its own. All fields are optional.
type scenario struct {
	labels    map[string]string     // of the namespace
	given     func(s testNamespace) // before the first manager starts
	when      func(s testNamespace) // while it runs
	whileDown func(s testNamespace) // while none runs
	then      func(s testNamespace) // while the second one runs
	// rolled is the number of rollouts by both managers together. Objects that are not in it are
	// not rolled.
	rolled map[string]int
}

// playScenarios runs all scenarios with the same two managers, one after the other, and returns the
// managers.
func playScenarios(t *testing.T, args []string, scenarios map[string]scenario) (managers []*cluster.Manager) {
	t.Helper()
	begin := time.Now()
	namespaces := map[string]testNamespace{}
	names := slices.Sorted(maps.Keys(scenarios))
	for _, name := range names {
		namespaces[name] = newTestNamespace(t, scenarios[name].labels)
	}
	forEach := func(title string, parallel bool, part func(scenario) func(testNamespace)) {
		t.Helper()
		ok := t.Run(title, func(t *testing.T) {
			for _, name := range names {
				do := part(scenarios[name])
				if do == nil {
					continue
				}
				t.Run(name, func(t *testing.T) {
					if parallel {
						t.Parallel()
					}
					do(namespaces[name].forSubtest(t))
				})
			}
		})
		if !ok {
			t.FailNow()
		}
	}
	startLeader := func() *cluster.Manager {
		t.Helper()
		ctx := fleet.Context(t)
		m := shared.RunLeader(ctx, t, args...)
		if _, err := m.WaitForLine(ctx, "Loop started"); err != nil {
			t.Fatal(err)
		}
		managers = append(managers, m)
		return m
	}

	forEach("given", false, func(s scenario) func(testNamespace) { return s.given })
	first := startLeader()
	forEach("when", true, func(s scenario) func(testNamespace) { return s.when })
	assert.NoError(t, first.Stop(t.Context(), fleet.Patience))
	forEach("while no manager runs", false, func(s scenario) func(testNamespace) { return s.whileDown })
	startLeader()
	forEach("then", true, func(s scenario) func(testNamespace) { return s.then })
	waitUntilIdle(t)
	readAuditLog(t, begin)
	for _, name := range names {
		t.Run("rollouts/"+name, func(t *testing.T) {
			want := scenarios[name].rolled
			if want == nil {
				want = map[string]int{}
			}
			assert.Equal(t, "rollouts", want, namespaces[name].forSubtest(t).countRollouts())
		})
	}
	return managers
}

// waitUntilIdle changes a source of a new Deployment until that is reloaded, and then one of a Deployment
// with a delay. What has not been rolled by then will not be rolled.
func waitUntilIdle(t *testing.T) {
	t.Helper()
	s := newTestNamespace(t, map[string]string{"team": "shop"}) // so that a selector selects it
	s.configMap("later", "0")
	// This takes longer than what is rolled at once.
	delayed := annotated(fleet.ReloadAnnotation, "auto", "quartermaster.dev/reload-delay", "2s")
	s.create(newDeployment("later", delayed, uses("configmap/later")), newDeployment("last", annotated(fleet.ReloadAnnotation, "auto"), uses("configmap/last")))
	reloaded := func(name string) bool {
		return s.countEvents("deployments/"+name, "Reloaded")+s.countEvents("deployments/"+name, "WouldReload") > 0
	}
	changes := 0
	s.eventually(func() error {
		changes++
		s.configMap("last", fmt.Sprint(changes))
		if !reloaded("last") {
			return fmt.Errorf("a new Deployment was not reloaded in %d changes", changes)
		}
		return nil
	})
	s.configMap("later", "1")
	s.eventually(func() error {
		if !reloaded("later") {
			return errors.New("a Deployment with a delay was not reloaded")
		}
		return nil
	})
}

// kubectl runs kubectl as administrator in the namespace and returns its stdout.
func (s testNamespace) kubectl(args ...string) string {
	s.t.Helper()
	out, err := shared.Kubectl(s.t.Context(), append([]string{"--namespace=" + s.namespace}, args...)...)
	assert.NoError(s.t, err)
	return out
}
