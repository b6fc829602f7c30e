// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package reload

import (
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/test/internal/faultproxy"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// runBehindProxy starts a manager that reaches the API server through a proxy, and waits until it has
// read everything.
func runBehindProxy(t *testing.T, args []string) *faultproxy.Proxy {
	t.Helper()
	ctx := fleet.Context(t)
	replica, proxy := shared.NewReplicaBehindProxy(ctx, t)
	m := shared.Run(t, replica, cluster.ManagerOptions{Args: args})
	shared.WaitForLeader(ctx, t, m)
	if _, err := m.WaitForLine(ctx, "Loop started"); err != nil {
		t.Fatal(err)
	}
	return proxy
}

// requestsTo returns a matcher of requests for an object of the namespace.
func (s testNamespace) requestsTo(object string) func(*http.Request) bool {
	path := "/namespaces/" + s.namespace + "/" + object
	return func(r *http.Request) bool { return strings.HasSuffix(r.URL.Path, path) }
}

// expectRollouts waits until an object is marked for the source as it is now, and checks that it has
// been rolled n times in all, each time for other data.
func (s testNamespace) expectRollouts(begin time.Time, n int, sources map[string]string) {
	s.t.Helper()
	for object, source := range sources {
		s.waitForMark(object, source)
	}
	readAuditLog(s.t, begin)
	for object := range sources {
		all := s.rollouts(object)
		if len(all) != n {
			s.t.Errorf("%s was rolled %d times, want %d", object, len(all), n)
		}
		for i := range all[min(1, len(all)):] {
			if maps.Equal(marks(all[i].PodTemplateSpec), marks(all[i+1].PodTemplateSpec)) {
				s.t.Errorf("%s was rolled twice for the same data, at revisions %d and %d", object, all[i].Revision, all[i+1].Revision)
			}
		}
	}
}

func TestFailuresAreRetriedToOneRollout(t *testing.T) {
	// What happens to the first requests about a Deployment, by its name.
	const patch, get = http.MethodPatch, http.MethodGet
	faults := map[string][]faultproxy.Rule{
		"nothing":                    nil,
		"conflict":                   {{Match: hasMethod(patch), Times: 1, Status: 409}},
		"many-conflicts":             {{Match: hasMethod(patch), Times: 5, Status: 409}},
		"conflict-and-read-fails":    {{Match: hasMethod(patch), Times: 1, Status: 409}, {Match: hasMethod(get), Times: 1, Status: 500}},
		"conflict-and-read-hangs":    {{Match: hasMethod(patch), Times: 1, Status: 409}, {Match: hasMethod(get), Times: 1, Delay: 2 * time.Second}},
		"told-to-wait":               {{Match: hasMethod(patch), Times: 2, Status: 429, RetryAfter: time.Second}},
		"internal-error":             {{Match: hasMethod(patch), Times: 2, Status: 500}},
		"unavailable":                {{Match: hasMethod(patch), Times: 2, Status: 503}},
		"timed-out-by-server":        {{Match: hasMethod(patch), Times: 2, Status: 504}},
		"forbidden":                  {{Match: hasMethod(patch), Times: 2, Status: 403}},
		"slow":                       {{Match: hasMethod(patch), Times: 1, Delay: 3 * time.Second}},
		"done-but-never-answered":    {{Match: hasMethod(patch), Times: 1, DropResponse: true}},
		"conflict-then-not-answered": {{Match: hasMethod(patch), Times: 1, Status: 409}, {Match: hasMethod(patch), Times: 1, DropResponse: true}},
	}
	begin := time.Now()
	s := newTestNamespace(t, nil)
	sources := map[string]string{}
	for name := range faults {
		s.configMap(name, "0")
		// A mark by annotation contains the time, so that a repetition is a rollout even with the
		// same hash.
		s.create(newDeployment(name, annotated(auto, "true"), uses("configmap/"+name)),
			newDeployment(name+"-annotated", annotated(fleet.ReloadAnnotation, "auto"), uses("configmap/"+name)))
		sources["deployments/"+name], sources["deployments/"+name+"-annotated"] = "configmap/"+name, "configmap/"+name
	}
	proxy := runBehindProxy(t, immediateArgs("--config-reload-concurrent-syncs=32"))
	for object, source := range sources {
		s.waitForState(object, source)
	}

	activeRules := map[string]*faultproxy.ActiveRule{}
	for object, source := range sources {
		for i, rule := range faults[strings.TrimPrefix(source, "configmap/")] {
			matchesMethod, matchesObject := rule.Match, s.requestsTo(object)
			rule.Match = func(r *http.Request) bool { return matchesMethod(r) && matchesObject(r) }
			activeRules[fmt.Sprintf("%s, rule %d", object, i)] = proxy.Add(rule)
		}
	}
	for name := range faults {
		s.configMap(name, "1")
	}
	s.expectRollouts(begin, 1, sources)
	for name, rule := range activeRules {
		if rule.Hits() == 0 {
			t.Errorf("%s was never applied", name)
		}
	}
	s.waitForEvent("deployments/forbidden", "ReloadFail", 2)

	names := slices.Sorted(maps.Keys(faults))
	for i, mode := range []faultproxy.Mode{faultproxy.Reset, faultproxy.Hang} {
		round := fmt.Sprint(i + 2)
		patched := proxy.Add(faultproxy.Rule{Match: hasMethod(patch)})
		for _, name := range names[:3] {
			s.configMap(name, round)
		}
		assert.NoError(t, patched.WaitHits(fleet.Context(t), 1))
		proxy.Partition(mode)
		for _, name := range names[3:] {
			s.configMap(name, round)
		}
		if mode == faultproxy.Hang {
			s.eventually(func() error {
				if since := time.Since(shared.Lease(t.Context(), t).Spec.RenewTime.Time); since < 3*time.Second {
					return fmt.Errorf("the manager has renewed its Lease %s ago", since)
				}
				return nil
			})
		}
		proxy.Heal()
		s.expectRollouts(begin, i+2, sources)
		patched.Remove()
	}
}

func TestJobSurvivesALostAnswer(t *testing.T) {
	s := newTestNamespace(t, nil)
	create := func(r *http.Request) bool {
		return hasMethod(http.MethodPost)(r) && s.requestsTo("jobs")(r) && r.URL.Query().Get("dryRun") == ""
	}
	remove := func(r *http.Request) bool { return hasMethod(http.MethodDelete)(r) && s.requestsTo("jobs/import")(r) }
	s.configMap("app-config", "0")
	s.create(newJob("import", annotated(auto, "true"), uses("configmap/app-config")))
	proxy := runBehindProxy(t, immediateArgs())
	deletion := func(r faultproxy.Request) bool { return r.Method == http.MethodDelete }
	round := 0
	for _, fault := range []struct {
		name      string
		rule      faultproxy.Rule
		finalizer bool // delays the deletion
	}{
		{name: "the deletion is done but gets no response", rule: faultproxy.Rule{Match: remove, Times: 1, DropResponse: true}},
		{name: "the deletion is not done and times out", rule: faultproxy.Rule{Match: remove, Times: 1, Status: 504}},
		{name: "the deletion waits for a finalizer and gets no response", rule: faultproxy.Rule{Match: remove, Times: 1, DropResponse: true}, finalizer: true},
		{name: "the creation is done but gets no response", rule: faultproxy.Rule{Match: create, Times: 1, DropResponse: true}},
		{name: "the creation is not done and times out", rule: faultproxy.Rule{Match: create, Times: 1, Status: 504}},
	} {
		round++
		before := s.get("jobs/import").GetUID()
		deletions := proxy.Count(deletion)
		if fault.finalizer {
			s.patch("jobs/import", `{"metadata":{"finalizers":["example.org/wait"]}}`)
		}
		applied := proxy.Add(fault.rule)
		s.configMap("app-config", fmt.Sprint(round))
		if fault.finalizer {
			s.eventually(func() error {
				if n := proxy.Count(deletion); n < deletions+2 {
					return fmt.Errorf("%s: %d deletions", fault.name, n-deletions)
				}
				return nil
			})
			s.patch("jobs/import", `{"metadata":{"finalizers":null}}`)
		}
		s.waitForReplacement("jobs/import", before)
		if fault.finalizer {
			s.patch("jobs/import", `{"metadata":{"finalizers":null}}`) // the new Job has it too
		}
		s.waitForMark("jobs/import", "configmap/app-config")
		if applied.Hits() != 1 {
			t.Errorf("%s: applied %d times", fault.name, applied.Hits())
		}
	}
}

func hasMethod(m string) func(*http.Request) bool {
	return func(r *http.Request) bool { return r.Method == m }
}
