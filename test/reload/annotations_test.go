// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package reload

import (
	"testing"

	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

func TestAnnotationsOnTheAPIServer(t *testing.T) {
	play(t, atOnce(), map[string]scenario{
		"search and match": {
			given: func(s shop) {
				s.configMap("other", "blue")
				s.create(annotated(newConfigMap("app-config", "blue"), is(match, "true")),
					newDeployment("web", is(search, "true"), uses(cm), uses("configmap/other")))
			},
			when: func(s shop) {
				s.waitForState(web, cm)
				s.configMap("other", "red")
				paint(s, "red")
			},
			rolled: map[string]int{web: 1},
		},
		"a source is named by an expression, and an exclusion wins": {
			given: func(s shop) {
				s.configMap("app-config", "blue")
				s.create(newDeployment("web", is(configMapReload, "x+, app-.*")),
					newDeployment("worker", is(configMapReload, "app-config", exclude, "other, app-config"), uses(cm)))
			},
			when:   func(s shop) { s.waitForState(web, cm); paint(s, "red") },
			rolled: map[string]int{web: 1},
		},
		"an item that does not parse has one Event, the other items and workloads go on": {
			given: func(s shop) {
				webUses(s)
				s.create(newDeployment("worker", is(configMapReload, "[, app-config")))
			},
			when: func(s shop) {
				s.waitForState(web, cm)
				s.waitForState(worker, cm)
				for _, color := range []string{"red", "green"} {
					paint(s, color)
					s.waitForMark(worker, cm)
				}
				s.waitForEvent(worker, "Reloaded", 2)
				s.waitForEvent(worker, "InvalidReloadAnnotation", 1)
			},
			rolled: map[string]int{web: 2, worker: 2},
		},
		"nothing of an annotation parses: one Event, nothing else, the others go on": {
			given: func(s shop) {
				webUses(s)
				s.create(newDeployment("worker", is(configMapReload, "["), uses(cm)), newDeployment("native", is(fleet.ReloadAnnotation, "configmaps/x"), uses(cm)))
			},
			when: func(s shop) {
				s.waitForState(web, cm)
				s.waitForEvent(worker, "InvalidReloadAnnotation", 1)
				s.waitForEvent("deployments/native", "InvalidReloadAnnotation", 1)
				paint(s, "red")
				for _, object := range []string{worker, "deployments/native"} {
					if got := s.annotation(object, fleet.StateAnnotation); got != "" {
						s.t.Errorf("%s has state %s", object, got)
					}
				}
			},
			rolled: map[string]int{web: 1},
		},
		"a source with ignore rolls nothing and is not recorded": {
			given: func(s shop) {
				s.create(annotated(newConfigMap("app-config", "blue"), is(ignore, "true")))
				s.configMap("other", "blue")
				s.create(newDeployment("web", is(auto, "true"), uses(cm), uses("configmap/other")))
			},
			when: func(s shop) {
				s.waitForState(web, "configmap/other")
				s.configMap("app-config", "red")
				s.configMap("other", "red")
				s.waitForMark(web, "configmap/other")
				s.waitForState(web, "configmap/other")
			},
			rolled: map[string]int{web: 1},
		},
		"an annotation on the template only counts, unless the workload has one": {
			given: func(s shop) {
				s.configMap("app-config", "blue")
				s.create(newDeployment("web", nil, uses(cm), onTemplate(auto, "true")),
					newDeployment("worker", is(auto, ""), uses(cm), onTemplate(auto, "true")))
			},
			when:   func(s shop) { s.waitForState(web, cm); paint(s, "red") },
			rolled: map[string]int{web: 1},
		},
		"the container that mounts a projected volume is marked, never an init container": {
			given: func(s shop) {
				s.configMap("app-config", "blue")
				s.create(newDeployment("web", is(auto, "true"), sidecar, mounts(cm, false)),
					newDeployment("worker", is(auto, "true"), sidecar, mounts(cm, true)))
			},
			when: func(s shop) {
				s.waitForState(web, cm)
				s.waitForState(worker, cm)
				paint(s, "red")
				s.waitForMark(worker, cm)
				for object, marked := range map[string]int{web: 1, worker: 0} {
					template := s.template(object)
					for i, c := range template.Spec.Containers {
						if has := len(c.Env) > 0; has != (i == marked) {
							s.t.Errorf("%s: container %s has variables: %v", object, c.Name, has)
						}
					}
					if n := len(template.Spec.InitContainers); n > 0 && len(template.Spec.InitContainers[0].Env) > 0 {
						s.t.Errorf("%s: the init container has a variable", object)
					}
				}
			},
			rolled: map[string]int{web: 1, worker: 1},
		},
		"native annotations switch the others off": {
			given: func(s shop) {
				s.configMap("app-config", "blue")
				s.secret("db", "s3cr3t")
				s.create(newDeployment("web", is(fleet.ReloadAnnotation, "auto,!secret/db", auto, "false"), uses(cm), uses(db)))
			},
			when: func(s shop) {
				s.waitForState(web, cm)
				s.secret("db", "n3wpass")
				paint(s, "red")
				if _, ok := s.template(web).Annotations[nativeMark]; !ok {
					s.t.Error("not marked by the native annotation")
				}
			},
			rolled: map[string]int{web: 1},
		},
	})
}
