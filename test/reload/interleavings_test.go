// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package reload

import (
	"fmt"
	"net/http"
	"testing"
	"time"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/test/internal/faultproxy"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// TestInterleavedChangesRollOnceEach holds the patch of a reload at the proxy and lets something
// happen meanwhile.
func TestInterleavedChangesRollOnceEach(t *testing.T) {
	const image, otherSource = `{"spec":{"template":{"spec":{"containers":[{"name":"web","image":"next","envFrom":[{"configMapRef":{"name":"app-config"}}]}]}}}}`,
		`{"spec":{"template":{"spec":{"containers":[{"name":"web","image":"web","envFrom":[{"configMapRef":{"name":"other"}}]}]}}}}`
	const other = "configmap/other"
	marked := func(s testNamespace) { s.waitForMark(web, cm) }
	recorded := func(s testNamespace) { s.waitForState(web, cm) }
	scenarios := map[string]struct {
		meanwhile func(s testNamespace) // while the patch is held
		then      func(s testNamespace) // after it was released
		colors    []string              // for which web is rolled, in order
	}{
		"nothing": {then: marked, colors: []string{"red"}},
		"somebody changes the template: both changes stand": {
			meanwhile: func(s testNamespace) { s.patch(web, image) },
			then: func(s testNamespace) {
				s.waitForMark(web, cm)
				if got := s.template(web).Spec.Containers[0].Image; got != "next" {
					s.t.Errorf("image %q", got)
				}
			},
			colors: []string{"red"}},
		"somebody changes the metadata": {
			meanwhile: func(s testNamespace) { s.patch(web, `{"metadata":{"labels":{"a":"b"}}}`) }, then: marked, colors: []string{"red"}},
		"the source changes again": {
			meanwhile: func(s testNamespace) { s.configMap("app-config", "green") }, then: marked, colors: []string{"red", "green"}},
		"source and workload change": {
			meanwhile: func(s testNamespace) { s.configMap("app-config", "green"); s.patch(web, image) }, then: marked, colors: []string{"green"}},
		"workload and source change": {
			meanwhile: func(s testNamespace) { s.patch(web, image); s.configMap("app-config", "green") }, then: marked, colors: []string{"green"}},
		"the source changes back: what the patch says is taken back": {
			meanwhile: func(s testNamespace) { s.configMap("app-config", "blue") }, then: marked, colors: []string{"red", "blue"}},
		"the source changes back and the workload changes: nothing is left to do": {
			meanwhile: func(s testNamespace) { s.configMap("app-config", "blue"); s.patch(web, image) }, then: recorded},
		"the source is deleted": {
			meanwhile: func(s testNamespace) { s.delete("configmaps/app-config") },
			then: func(s testNamespace) {
				s.waitForEvent(web, "Reloaded", 1)
				s.configMap("app-config", "red")
			}, colors: []string{"red"}},
		"the source is deleted and created": {
			meanwhile: func(s testNamespace) { s.delete("configmaps/app-config"); s.configMap("app-config", "green") }, then: marked, colors: []string{"red", "green"}},
		"the workload opts out": {
			meanwhile: func(s testNamespace) { s.patch(web, `{"metadata":{"annotations":{"`+auto+`":"false"}}}`) },
			then: func(s testNamespace) {
				s.eventually(func() error { return diffError("", s.annotation(web, fleet.StateAnnotation)) })
			}},
		"the workload comes to use another source": {
			meanwhile: func(s testNamespace) { s.patch(web, otherSource) },
			then:      func(s testNamespace) { s.waitForState(web, other) }},
		"the workload is deleted": {meanwhile: func(s testNamespace) { s.delete(web) }},
		"the workload is created again": {
			meanwhile: func(s testNamespace) { s.delete(web); recreateWeb(s) }, then: recorded},
		"the state is removed": {
			meanwhile: func(s testNamespace) { s.patch(web, `{"metadata":{"annotations":{"`+fleet.StateAnnotation+`":null}}}`) }, then: marked, colors: []string{"red"}},
		"the state is made to say that it was done, which only the manager says": {
			meanwhile: func(s testNamespace) {
				s.patch(web, fmt.Sprintf(`{"metadata":{"annotations":{%q:%q}}}`, fleet.StateAnnotation, `{"`+cm+`":"`+s.hash(cm)[:16]+`"}`))
			}, then: marked, colors: []string{"red"}},
	}
	begin := time.Now()
	namespaces := map[string]testNamespace{}
	proxy := runBehindProxy(t, immediateArgs("--config-reload-concurrent-syncs=32"))
	for name := range scenarios {
		s := newTestNamespace(t, nil)
		s.configMap("other", "blue")
		createWeb(s)
		namespaces[name] = s
	}
	t.Run("interleaved", func(t *testing.T) {
		for name, tc := range scenarios {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				s := namespaces[name].forSubtest(t)
				s.waitForState(web, cm)
				s.waitForController(web)
				release := make(chan struct{})
				matchesWeb := s.requestsTo(web)
				heldPatch := proxy.Add(faultproxy.Rule{Times: 1, Hold: release, Match: func(r *http.Request) bool {
					return r.Method == http.MethodPatch && matchesWeb(r)
				}})
				s.configMap("app-config", "red")
				err := heldPatch.WaitHits(fleet.Context(t), 1)
				if tc.meanwhile != nil && err == nil {
					tc.meanwhile(s)
				}
				close(release)
				assert.NoError(t, err)
				if tc.then != nil {
					tc.then(s)
				}
			})
		}
	})
	waitUntilIdle(t)
	readAuditLog(t, begin)
	for name, tc := range scenarios {
		t.Run("rollouts/"+name, func(t *testing.T) {
			var want, got []string
			for _, color := range tc.colors {
				want = append(want, hashOf(color))
			}
			for _, v := range namespaces[name].forSubtest(t).rollouts(web) {
				got = append(got, marks(v.PodTemplateSpec)[variableName(cm)])
			}
			assert.Equal(t, "hashes of the rollouts", want, got)
		})
	}
}
