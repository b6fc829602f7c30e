// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package reload

import (
	"strings"
	"testing"
	"time"

	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"
	"k8s.io/utils/ptr"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

func TestOptionsTakeEffect(t *testing.T) {
	shared.InstallWith(t.Context(), t, "argo-rollouts")
	// --config-reload-namespace-selector needs it besides the manager's own roles.
	shared.Grant(t.Context(), t, rbacv1.PolicyRule{APIGroups: []string{""}, Resources: []string{"namespaces"}, Verbs: []string{"list", "watch"}})
	const rollout = "rollouts/web"
	shopLabels := map[string]string{"team": "shop"}
	givenRollout := func(annotations map[string]string) func(s testNamespace) {
		return func(s testNamespace) {
			s.configMap("app-config", "blue")
			s.create(newRollout("web", annotations, uses(cm)))
		}
	}
	expectUnknownField := func(s testNamespace) {
		s.t.Helper()
		if got, _, _ := unstructured.NestedString(s.get(rollout).Object, "spec", "strategy", "canary", "unknown"); got != "25" {
			s.t.Errorf("the field that nobody knows is %q", got)
		}
	}
	playScenarios(t, immediateArgs("--config-reload-namespace-selector=team:shop", "--config-reload-on-create", "--config-reload-on-delete", "--config-reload-auto-all",
		"--config-reload-source-selector=reload!=no"), map[string]scenario{
		"an Argo Rollout is marked by a variable, its other fields stay": {
			labels: shopLabels, given: givenRollout(annotated(auto, "true")),
			when: func(s testNamespace) {
				for _, color := range []string{"red", "green"} {
					s.waitForState(rollout, cm)
					s.configMap("app-config", color)
					s.waitForMark(rollout, cm)
				}
			},
			whileDown: func(s testNamespace) { s.configMap("app-config", "yellow") },
			then:      func(s testNamespace) { s.waitForMark(rollout, cm); expectUnknownField(s) },
			rolled:    map[string]int{rollout: 3},
		},
		"an Argo Rollout by annotation": {
			labels: shopLabels, given: givenRollout(annotated(fleet.ReloadAnnotation, "auto")),
			when: func(s testNamespace) {
				s.waitForState(rollout, cm)
				s.configMap("app-config", "red")
				s.waitForMark(rollout, cm)
				expectUnknownField(s)
			},
			rolled: map[string]int{rollout: 1},
		},
		"an Argo Rollout that wants to be restarted": {
			labels: shopLabels, given: givenRollout(annotated(auto, "true", "reloader.stakater.com/rollout-strategy", "restart")),
			when: func(s testNamespace) {
				s.waitForState(rollout, cm)
				s.configMap("app-config", "red")
				s.waitForState(rollout, cm)
				restartAt, _, _ := unstructured.NestedString(s.get(rollout).Object, "spec", "restartAt")
				if _, err := time.Parse(time.RFC3339, restartAt); err != nil {
					s.t.Errorf("restartAt: %v", err)
				}
				expectUnknownField(s)
			},
		},
		"a namespace outside of the selector is left alone, until it has the label": {
			given: createPlainWeb,
			when:  func(s testNamespace) { s.configMap("app-config", "red") },
			// This happens while no manager runs, which might see it only after the label.
			whileDown: func(s testNamespace) { s.configMap("app-config", "green") },
			then: func(s testNamespace) {
				if got := s.annotation(web, fleet.StateAnnotation); got != "" {
					s.t.Errorf("state %s", got)
				}
				if _, err := shared.Admin.CoreV1().Namespaces().Patch(s.t.Context(), s.namespace, "application/merge-patch+json",
					[]byte(`{"metadata":{"labels":{"team":"shop"}}}`), metav1.PatchOptions{}); err != nil {
					s.t.Fatal(err)
				}
				s.waitForState(web, cm)
				changeColor(s, "yellow")
			},
			rolled: map[string]int{web: 1},
		},
		"a source that appears rolls, and so does one that disappears": {
			labels: shopLabels,
			given:  func(s testNamespace) { recreateWeb(s) },
			when: func(s testNamespace) {
				s.waitForAbsent(web, cm)
				s.configMap("app-config", "blue")
				s.waitForMark(web, cm)
				s.delete("configmaps/app-config")
				s.eventually(func() error { return diffError(map[string]string{}, marks(s.template(web))) })
			},
			rolled: map[string]int{web: 2},
		},
		"a source outside of the selector counts as absent, and as created when it gets into it": {
			labels: shopLabels,
			given: func(s testNamespace) {
				c := newConfigMap("app-config", "blue")
				c.Labels = map[string]string{"reload": "no"}
				s.create(c, newDeployment("web", annotated(auto, "true"), uses(cm)))
			},
			when: func(s testNamespace) {
				s.waitForAbsent(web, cm)
				s.configMap("app-config", "red")
			},
			then: func(s testNamespace) {
				s.patch("configmaps/app-config", `{"metadata":{"labels":{"reload":null}}}`)
				s.waitForMark(web, cm)
			},
			rolled: map[string]int{web: 1},
		},
		"all workloads are rolled that do not opt out": {
			labels: shopLabels,
			given: func(s testNamespace) {
				s.configMap("app-config", "blue")
				s.create(newDeployment("web", nil, uses(cm)), newDeployment("worker", annotated(auto, "no"), uses(cm)),
					newDeployment("native", annotated(fleet.ReloadAnnotation, "off"), uses(cm)))
			},
			when:   func(s testNamespace) { s.waitForState(web, cm); changeColor(s, "red") },
			rolled: map[string]int{web: 1},
		},
	})
}

func TestQuietPeriodMergesChanges(t *testing.T) {
	playScenarios(t, []string{"--controllers=config-reload", "--config-reload-quiet-period=2s", "--config-reload-max-delay=3s"}, map[string]scenario{
		"changes within it are one rollout": {
			given: createPlainWeb,
			when: func(s testNamespace) {
				s.waitForState(web, cm)
				for _, color := range []string{"red", "green", "yellow"} {
					s.configMap("app-config", color)
				}
				s.waitForMark(web, cm)
			},
			rolled: map[string]int{web: 1},
		},
		"what the original, which still runs, has rolled is not rolled again": {
			given: func(s testNamespace) {
				createWeb(s)
				s.configMap("other", "blue")
				s.create(newDeployment("worker", annotated(auto, "true"), uses("configmap/other")))
			},
			when: func(s testNamespace) {
				s.waitForState(web, cm)
				s.waitForState(worker, "configmap/other")
				s.configMap("app-config", "red")
				s.markAsOriginal(web, "env-vars", cm, s.hash(cm))
				s.waitForState(web, cm)
				s.configMap("other", "red")
				s.waitForMark(worker, "configmap/other")
			},
			rolled: map[string]int{worker: 1},
		},
	})
}

func TestDryRunSendsNothing(t *testing.T) {
	begin := time.Now()
	managers := playScenarios(t, immediateArgs("--config-reload-dry-run"), map[string]scenario{
		"a dry run tells what it would do": {
			given: func(s testNamespace) {
				createWeb(s)
				s.create(newJob("import", annotated(auto, "true"), uses(cm)), newCronJob("report", annotated(auto, "true"), uses(cm)))
			},
			when: func(s testNamespace) {
				s.configMap("app-config", "red")
				for _, object := range []string{web, "jobs/import", "cronjobs/report"} {
					s.waitForEvent(object, "WouldReload", 1)
				}
			},
		},
	})
	for _, e := range shared.AuditSince(t, begin, func(e auditv1.Event) bool {
		return e.User.Extra != nil && e.ObjectRef != nil && (e.ObjectRef.APIGroup == "apps" || e.ObjectRef.APIGroup == "batch")
	}) {
		for _, m := range managers {
			if fleet.IsControllerWrite(e, m.Pod) || (e.Verb == "patch" || e.Verb == "create" || e.Verb == "delete") && strings.Contains(e.UserAgent, "config-reload") {
				t.Errorf("%s %s by %s", e.Verb, e.RequestURI, m.Pod)
			}
		}
	}
}

func TestOriginalThatStillRunsIsNamed(t *testing.T) {
	ctx := fleet.Context(t)
	s := newTestNamespace(t, nil)
	original := newDeployment("reloader-reloader", nil)
	original.Spec.Replicas = ptr.To[int32](1)
	original.Spec.Template.Spec.Containers[0].Image = "ghcr.io/stakater/reloader:v1.4.21"
	stopped := newDeployment("off-reloader", nil)
	stopped.Spec.Template.Spec.Containers[0].Image = "ghcr.io/stakater/reloader:v1.4.21"
	s.create(original, stopped, newDeployment("reloader-of-something-else", nil))
	m := shared.RunLeader(ctx, t, immediateArgs()...)
	line, err := m.WaitForLine(ctx, `deployment="`+s.namespace+`/reloader-reloader"`)
	assert.NoError(t, err)
	if !strings.Contains(line, "is still running") {
		t.Errorf("no warning: %s", line)
	}
	assert.NoError(t, m.Stop(ctx, fleet.Patience))
	warnings := 0
	for line := range m.Lines(ctx) {
		if strings.Contains(line, "is still running") {
			warnings++
		}
	}
	if warnings != 1 {
		t.Errorf("%d warnings, want 1", warnings)
	}
}
