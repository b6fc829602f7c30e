// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package reload

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// markAsOriginal writes to a workload what stakater/Reloader writes when the source changes: only the
// mark, under its own field manager.
func (s testNamespace) markAsOriginal(object, strategy, source, hash string) {
	s.t.Helper()
	template := map[string]any{"spec": map[string]any{"containers": []any{map[string]any{
		"name": "web", "env": []any{map[string]any{"name": variableName(source), "value": hash}}}}}}
	if strategy == "annotations" {
		template = map[string]any{"metadata": map[string]any{"annotations": map[string]any{lastReloaded: reloadedFrom(s.namespace, source, hash)}}}
	}
	body, err := json.Marshal(map[string]any{"spec": map[string]any{"template": template}})
	assert.NoError(s.t, err)
	client, name := s.client(object)
	if _, err := client.Patch(s.t.Context(), name, types.StrategicMergePatchType, body, metav1.PatchOptions{FieldManager: "Reloader"}); err != nil {
		s.t.Fatal(err)
	}
}

// templates returns all pod templates, with the command of the documentation.
func (s testNamespace) templates() string {
	s.t.Helper()
	return s.kubectl("get", "deploy,sts,ds", "-o", `jsonpath={range .items[*]}{.kind}/{.metadata.name} {.spec.template}{"\n"}{end}`)
}

func TestMigrationRollsNothing(t *testing.T) {
	const cm, secret, other = "configmap/app-config", "secret/db", "configmap/other"
	stale := strings.Repeat("0", 40)
	for _, strategy := range []string{"env-vars", "annotations"} {
		t.Run("from a cluster with the strategy "+strategy, func(t *testing.T) {
			begin := time.Now()
			s := newTestNamespace(t, nil)
			for _, name := range []string{"app-config", "other", "late"} {
				s.configMap(name, "before")
			}
			s.secret("db", "before")
			s.create(
				newDeployment("web", annotated(auto, "true"), uses(cm), uses(secret)),
				newStatefulSet("web", annotated(configMapReload, "app-config", secretReload, "db")),
				newDaemonSet("web", annotated(search, "true", auto, "false", secretReload, "d.*"), mounts(cm, false)),
				newDeployment("fresh", annotated(auto, "true"), uses(cm)),
				newDeployment("missed", annotated(auto, "true"), uses(cm)),
				newDeployment("bystander", annotated(auto, "true"), uses(other)),
				newDeployment("silent", nil, uses(cm)),
			)
			s.patch("configmaps/app-config", `{"metadata":{"annotations":{"`+match+`":"true"}}}`)
			marked := []string{"deployments/web", "statefulsets/web", "daemonsets/web"}
			for _, object := range marked {
				s.markAsOriginal(object, strategy, cm, s.hash(cm))
				s.markAsOriginal(object, strategy, secret, s.hash(secret))
			}
			// Its last change came while the original was down.
			s.markAsOriginal("deployments/missed", strategy, cm, stale)

			before := s.templates()
			m := shared.RunLeader(fleet.Context(t), t, immediateArgs("--config-reload-strategy="+strategy)...)
			for _, object := range marked {
				s.waitForState(object, cm, secret)
			}
			s.waitForState("deployments/fresh", cm)
			s.waitForState("deployments/missed", cm)
			s.waitForState("deployments/bystander", other)
			// Once this workload was decided on, all others have been decided on.
			s.create(newDeployment("last", annotated(auto, "true"), uses("configmap/late")))
			s.waitForState("deployments/last", "configmap/late")
			readAuditLog(t, begin)
			for _, object := range rollouts.Objects() {
				for _, v := range rollouts.Find(object) {
					if v.Writer == m.Pod {
						t.Errorf("the switch alone has rolled %s at revision %d", object, v.Revision)
					}
				}
			}
			if diff := cmp.Diff(before, strings.Join(slices.DeleteFunc(strings.Split(s.templates(), "\n"), func(line string) bool {
				return strings.HasPrefix(line, "Deployment/last ")
			}), "\n")); diff != "" {
				t.Errorf("templates (-before +after the switch):\n%s", diff)
			}
			want := s.countRollouts() // by the original
			if t.Failed() {
				return
			}

			s.configMap("app-config", "after")
			concerned := append(marked, "deployments/fresh", "deployments/missed")
			for _, object := range concerned {
				s.waitForMark(object, cm)
			}
			s.configMap("late", "after")
			s.waitForMark("deployments/last", "configmap/late")
			for _, object := range append(concerned, "deployments/last") {
				want[object]++
			}
			// The API server logs a write after a watch has shown it.
			s.eventually(func() error {
				readAuditLog(t, begin)
				for object := range want {
					if list := s.rollouts(object); len(list) == 0 || list[len(list)-1].Writer == "" {
						return fmt.Errorf("the audit log does not say who has rolled %s last", object)
					}
				}
				return nil
			})
			assert.Equal(t, "rollouts after one change", want, s.countRollouts())
			for object := range want {
				if list := s.rollouts(object); list[len(list)-1].Writer != m.Pod {
					t.Errorf("the last rollout of %s is by %s", object, list[len(list)-1].Writer)
				}
			}
			if got := fmt.Sprint(s.countEvents("deployments/bystander", "Reloaded"), s.countEvents("deployments/silent", "Reloaded")); got != "0 0" {
				t.Errorf("Events Reloaded on those that were not rolled: %s", got)
			}
		})
	}
}
