// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package reload

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/utils/ptr"

	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

const (
	cm     = "configmap/app-config"
	db     = "secret/db"
	web    = "deployments/web"
	worker = "deployments/worker"
)

// createWeb creates the source app-config and Deployment web, which is rolled for everything that it
// references.
func createWeb(s testNamespace, options ...option) {
	s.configMap("app-config", "blue")
	s.create(newDeployment("web", annotated(auto, "true"), append([]option{uses(cm)}, options...)...))
}

func createPlainWeb(s testNamespace) { createWeb(s) }

// changeColor changes app-config and waits until web is marked.
func changeColor(s testNamespace, color string) {
	s.configMap("app-config", color)
	s.waitForMark(web, cm)
}

// makeTwoRevisions rolls web once.
func makeTwoRevisions(s testNamespace) {
	s.waitForState(web, cm)
	// kube-controller-manager keeps the template and the annotations of each revision.
	s.eventually(func() error {
		for _, name := range s.list("replicasets") {
			if s.annotation("replicasets/"+name, fleet.StateAnnotation) != "" {
				return nil
			}
		}
		return errors.New("no ReplicaSet with the state")
	})
	changeColor(s, "red")
	s.eventually(func() error {
		if n := len(s.list("replicasets")); n != 2 {
			return fmt.Errorf("%d ReplicaSets", n)
		}
		return nil
	})
}

func undoRollout(s testNamespace) {
	s.kubectl("rollout", "undo", "deployment/web")
	s.waitForState(web, cm) // the undo brings the older one back too
	if got := marks(s.template(web)); len(got) > 0 {
		s.t.Errorf("the template is marked with %v", got)
	}
}

func TestSourcesRollTheirWorkloads(t *testing.T) {
	scenarios := map[string]scenario{
		"a ConfigMap and a Secret roll every kind that references them, once each": {
			given: func(s testNamespace) {
				s.secret("db", "s3cr3t")
				createWeb(s, uses(db))
				s.create(newStatefulSet("web", annotated(auto, "true"), uses(cm), uses(db)), newDaemonSet("web", annotated(auto, "true"), uses(cm), uses(db)))
			},
			when: func(s testNamespace) {
				all := []string{web, "statefulsets/web", "daemonsets/web"}
				for _, object := range all {
					s.waitForState(object, cm, db)
				}
				s.configMap("app-config", "red")
				for _, object := range all {
					s.waitForMark(object, cm)
				}
				s.secret("db", "n3wpass")
				for _, object := range all {
					s.waitForMark(object, db)
				}
			},
			rolled: map[string]int{web: 2, "statefulsets/web": 2, "daemonsets/web": 2},
		},
		"what is in a source's metadata rolls nothing": {
			given: createPlainWeb,
			when: func(s testNamespace) {
				s.waitForState(web, cm)
				s.patch("configmaps/app-config", `{"metadata":{"labels":{"a":"b"},"annotations":{"c":"d"}}}`)
			},
		},
		"changes while no manager runs are one rollout after the start": {
			given: createPlainWeb,
			when:  func(s testNamespace) { s.waitForState(web, cm) },
			whileDown: func(s testNamespace) {
				for _, color := range []string{"red", "green", "yellow"} {
					s.configMap("app-config", color)
				}
			},
			then:   func(s testNamespace) { s.waitForMark(web, cm) },
			rolled: map[string]int{web: 1},
		},
		"a change there and back while no manager runs rolls nothing": {
			given: createPlainWeb,
			when:  func(s testNamespace) { s.waitForState(web, cm) },
			whileDown: func(s testNamespace) {
				s.configMap("app-config", "red")
				s.configMap("app-config", "blue")
			},
			then: func(s testNamespace) { s.waitForState(web, cm) },
		},
		"a source that is created again with the same data rolls nothing, with other data once": {
			given: createPlainWeb,
			when: func(s testNamespace) {
				s.waitForState(web, cm)
				s.delete("configmaps/app-config")
				s.configMap("app-config", "blue")
				s.waitForState(web, cm)
				s.delete("configmaps/app-config")
				changeColor(s, "red")
			},
			rolled: map[string]int{web: 1},
		},
		"a source that is created again while no manager runs rolls nothing with the same data": {
			given: func(s testNamespace) {
				createWeb(s)
				s.configMap("other", "blue")
				s.create(newDeployment("worker", annotated(auto, "true"), uses("configmap/other")))
			},
			when: func(s testNamespace) { s.waitForState(web, cm); s.waitForState(worker, "configmap/other") },
			whileDown: func(s testNamespace) {
				s.delete("configmaps/app-config")
				s.configMap("app-config", "red")
				s.delete("configmaps/other")
				s.configMap("other", "blue")
			},
			then:   func(s testNamespace) { s.waitForMark(web, cm) },
			rolled: map[string]int{web: 1},
		},
		"a source that appears is recorded, its next change rolls": {
			given: func(s testNamespace) { s.create(newDeployment("web", annotated(auto, "true"), uses(cm))) },
			when: func(s testNamespace) {
				s.waitForAbsent(web, cm)
				s.configMap("app-config", "blue")
				s.waitForState(web, cm)
				changeColor(s, "red")
			},
			rolled: map[string]int{web: 1},
		},
		"an immutable ConfigMap is changed by deleting and creating it": {
			given: func(s testNamespace) {
				c := newConfigMap("app-config", "blue")
				c.Immutable = ptr.To(true)
				s.create(c, newDeployment("web", annotated(auto, "true"), uses(cm)))
			},
			when: func(s testNamespace) {
				s.waitForState(web, cm)
				s.delete("configmaps/app-config")
				changeColor(s, "red")
			},
			rolled: map[string]int{web: 1},
		},
		"a workload that is created again begins anew, also while no manager runs": {
			given: createPlainWeb,
			when: func(s testNamespace) {
				s.waitForState(web, cm)
				s.delete(web)
				s.configMap("app-config", "red")
				recreateWeb(s)
				s.waitForState(web, cm)
				changeColor(s, "green")
			},
			whileDown: func(s testNamespace) {
				s.delete(web)
				s.configMap("app-config", "yellow")
				recreateWeb(s)
			},
			then:   func(s testNamespace) { s.waitForState(web, cm) },
			rolled: map[string]int{web: 1},
		},
		"a state that somebody removes is written again, and rolls nothing": {
			given: createPlainWeb,
			when: func(s testNamespace) {
				s.waitForState(web, cm)
				s.patch(web, `{"metadata":{"annotations":{"`+fleet.StateAnnotation+`":null}}}`)
				s.waitForState(web, cm)
				changeColor(s, "red")
			},
			whileDown: func(s testNamespace) { s.patch(web, `{"metadata":{"annotations":{"`+fleet.StateAnnotation+`":null}}}`) },
			then:      func(s testNamespace) { s.waitForState(web, cm) },
			rolled:    map[string]int{web: 1},
		},
		"a rollout that is undone stays undone, and what is recorded stands": {
			given: createPlainWeb,
			when: func(s testNamespace) {
				makeTwoRevisions(s)
				undoRollout(s)
			},
			rolled: map[string]int{web: 1},
		},
		"a rollout of another manager that is undone stays undone": {
			given: createPlainWeb,
			when:  makeTwoRevisions,
			then: func(s testNamespace) {
				// What was there at the start comes first.
				s.create(newDeployment("worker", annotated(auto, "true"), uses(cm)))
				s.waitForState(worker, cm)
				undoRollout(s)
			},
			rolled: map[string]int{web: 1},
		},
		"a release of Helm rolls nothing": {
			given: func(s testNamespace) {
				release := newSecret("release", "1")
				release.Type = "helm.sh/release.v1"
				s.create(release, newDeployment("web", annotated(auto, "true"), uses("secret/release")))
			},
			when:      func(s testNamespace) { s.waitForAbsent(web, "secret/release"); s.secret("release", "2") },
			whileDown: func(s testNamespace) { s.secret("release", "3") },
		},
		"a token of a ServiceAccount that is rotated rolls": {
			given: func(s testNamespace) {
				token := newSecret("token", "1")
				token.Type = corev1.SecretTypeServiceAccountToken
				token.Annotations = annotated(corev1.ServiceAccountNameKey, "default")
				s.eventually(func() error {
					if !slices.Contains(s.list("serviceaccounts"), "default") {
						return errors.New("no ServiceAccount default")
					}
					return nil
				})
				s.create(token)
				s.eventually(func() error {
					if _, issued, _ := unstructured.NestedString(s.get("secrets/token").Object, "data", "token"); !issued {
						return errors.New("no token")
					}
					return nil
				})
				s.create(newDeployment("web", annotated(auto, "true"), uses("secret/token")))
			},
			when: func(s testNamespace) {
				s.waitForState(web, "secret/token")
				s.secret("token", "2")
				s.waitForMark(web, "secret/token")
			},
			rolled: map[string]int{web: 1},
		},
		"a manifest that is copied with its state begins anew": {
			given: createPlainWeb,
			when: func(s testNamespace) {
				s.waitForState(web, cm)
				other := newTestNamespace(s.t, nil)
				other.configMap("app-config", "red")
				copied := newDeployment("web", annotated(auto, "true", fleet.StateAnnotation, s.annotation(web, fleet.StateAnnotation)), uses(cm))
				other.create(copied)
				other.waitForState(web, cm)
				if got := other.countEvents(web, "Reloaded"); got != 0 {
					s.t.Errorf("the copy was rolled %d times", got)
				}
			},
		},
		"the container that mounts a projected volume is marked, never an init container": {
			given: func(s testNamespace) {
				s.configMap("app-config", "blue")
				s.create(newDeployment("web", annotated(auto, "true"), sidecar, mounts(cm, false)),
					newDeployment("worker", annotated(auto, "true"), sidecar, mounts(cm, true)))
			},
			when: func(s testNamespace) {
				s.waitForState(web, cm)
				s.waitForState(worker, cm)
				changeColor(s, "red")
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
		"nothing of an annotation parses: one Event, nothing else, the others go on": {
			given: func(s testNamespace) {
				createWeb(s)
				s.create(newDeployment("worker", annotated(configMapReload, "["), uses(cm)), newDeployment("native", annotated(fleet.ReloadAnnotation, "configmaps/x"), uses(cm)))
			},
			when: func(s testNamespace) {
				s.waitForState(web, cm)
				s.waitForEvent(worker, "InvalidReloadAnnotation", 1)
				s.waitForEvent("deployments/native", "InvalidReloadAnnotation", 1)
				changeColor(s, "red")
				for _, object := range []string{worker, "deployments/native"} {
					if got := s.annotation(object, fleet.StateAnnotation); got != "" {
						s.t.Errorf("%s has state %s", object, got)
					}
				}
			},
			rolled: map[string]int{web: 1},
		},
	}
	maps.Copy(scenarios, jobScenarios())
	maps.Copy(scenarios, pauseScenarios)
	playScenarios(t, immediateArgs(), scenarios)
}

func recreateWeb(s testNamespace) { s.create(newDeployment("web", annotated(auto, "true"), uses(cm))) }

func diffError(want, got any) error {
	if d := cmp.Diff(want, got); d != "" {
		return fmt.Errorf("(-want +got):\n%s", d)
	}
	return nil
}
