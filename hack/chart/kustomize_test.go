// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package chart

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"helm.sh/helm/v4/pkg/chart/v2/loader"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"
)

// counterparts are the values for each component, alone or with the components that it needs.
var counterparts = map[string]struct {
	components []string // besides
	values     string
}{
	"argo-rollouts":         {values: "controllers: {config-reload: {flags: {config-reload-argo-rollouts: true}}}"},
	"compat-reloader":       {values: "compat: [reloader]"},
	"csr-approver":          {values: "controllers: {csr-approver: {enabled: true}}"},
	"csi-secrets":           {values: "controllers: {config-reload: {flags: {config-reload-csi: true}}}"},
	"federation":            {values: "controllers: {federation: {enabled: true}}"},
	"federation-dns":        {[]string{"federation"}, "controllers: {federation: {enabled: true, flags: {federation-dns: true}}}"},
	"monitoring":            {values: "{serviceMonitor: {enabled: true}, prometheusRule: {enabled: true}, dashboards: {enabled: true}}"},
	"namespaced":            {values: "namespaced: {enabled: true}"},
	"replication":           {values: "controllers: {replication: {enabled: true}}"},
	"replication-compat":    {[]string{"replication"}, "{compat: [reflector, replicator], controllers: {replication: {enabled: true}}}"},
	"replication-policy":    {values: "replicationPolicy: {enabled: true}"},
	"restrict-egress":       {values: "networkPolicy: {restrictEgress: true}"},
	"scale-schedule":        {values: "controllers: {scale-schedule: {enabled: true}}"},
	"scale-schedule-compat": {[]string{"scale-schedule"}, "{compat: [downscaler], controllers: {scale-schedule: {enabled: true}}}"},
	"ttl-chosen-types":      {values: "controllers: {ttl: {enabled: true}}"},
	"ttl-compat":            {[]string{"ttl-chosen-types"}, "{compat: [ttl-controller, janitor], controllers: {ttl: {enabled: true}}}"},
	"ttl-rules": {[]string{"ttl-chosen-types"}, `{controllers: {ttl: {enabled: true, flags: {ttl-rules: /etc/quartermaster/ttl/rules.yaml}}},
		extraVolumes: [{name: ttl-rules, configMap: {name: quartermaster-ttl-rules}}],
		extraVolumeMounts: [{name: ttl-rules, mountPath: /etc/quartermaster/ttl, readOnly: true}]}`},
	"ttl-every-type": {[]string{"ttl-chosen-types"}, `controllers: {ttl: {enabled: true, flags: {ttl-include-resources: [
		namespaces., configmaps., persistentvolumeclaims., pods., services., deployments.apps, statefulsets.apps, jobs.batch,
		ingresses.networking.k8s.io, '*']}}}`},
}

func TestChartRendersWhatKustomizeDoes(t *testing.T) {
	compareWith := func(t *testing.T, want objects, values, namespace string) {
		t.Helper()
		want, got := want.comparable(t), mustRender(t, values, namespace).comparable(t)
		if len(want) < 10 {
			t.Errorf("%d objects: the test does not see them", len(want))
		}
		for key := range want {
			if diff := cmp.Diff(want[key], got[key]); diff != "" {
				t.Errorf("%s (-kustomize +chart):\n%s", key, diff)
			}
		}
		for key := range got {
			if want[key] == nil {
				t.Errorf("%s: kustomize renders no such object", key)
			}
		}
	}
	compare := func(t *testing.T, values, namespace string, components ...string) {
		t.Helper()
		want := kustomize(t, namespace, components...)
		if namespace == "" {
			namespace = "kube-system"
		}
		compareWith(t, want, values, namespace)
	}
	t.Run("default", func(t *testing.T) { compare(t, "", "") })
	t.Run("the example second-installation", func(t *testing.T) {
		compareWith(t, kustomizeDir(t, filepath.Join(deployDir, "examples", "second-installation")), "", "ops")
	})
	dirs, err := os.ReadDir(filepath.Join(deployDir, "components"))
	if err != nil {
		t.Fatal(err)
	}
	for _, dir := range dirs {
		if dir.Name() == "fence" || !dir.IsDir() {
			continue // a part of the default, the README
		}
		t.Run(dir.Name(), func(t *testing.T) {
			counterpart, ok := counterparts[dir.Name()]
			if !ok {
				t.Fatal("no values correspond to this component")
			}
			compare(t, counterpart.values, "", append(slices.Clone(counterpart.components), dir.Name())...)
		})
	}
	t.Run("namespaced elsewhere, with others", func(t *testing.T) {
		compare(t, `{namespaced: {enabled: true}, compat: [reloader], serviceMonitor: {enabled: true}, prometheusRule: {enabled: true},
			dashboards: {enabled: true},
			controllers: {config-reload: {flags: {config-reload-argo-rollouts: true}}}}`,
			"team-a", "monitoring", "compat-reloader", "argo-rollouts", "namespaced")
	})
}

// TestKustomizationOfABuildIsAsInBase compares examples/widget/config, and what the commands of
// docs/extend/one-file.md make of it, with deploy/base. A build has other arguments, another image and
// another size.
func TestKustomizationOfABuildIsAsInBase(t *testing.T) {
	root, err := filepath.Abs(filepath.Join("..", ".."))
	if err != nil {
		t.Fatal(err)
	}
	page, err := os.ReadFile(filepath.Join(root, "docs", "extend", "one-file.md"))
	if err != nil {
		t.Fatal(err)
	}
	commands := regexp.MustCompile("```sh\n(mkdir config\n[^`]*)```").FindSubmatch(page)
	if commands == nil {
		t.Fatal("docs/extend/one-file.md has no such commands")
	}
	dir := t.TempDir()
	sh := exec.Command("sh", "-ec", `ln -s "$0" quartermaster; mkdir motd; cd motd`+"\n"+string(commands[1]), root)
	sh.Dir = dir
	if out, err := sh.CombinedOutput(); err != nil {
		t.Fatalf("%v:\n%s", err, out)
	}
	base := kustomizeDir(t, filepath.Join(deployDir, "base"))
	for build, config := range map[string]string{
		"widget": filepath.Join(root, "examples", "widget", "config"),
		"motd":   filepath.Join(dir, "motd", "config"),
	} {
		got := kustomizeDir(t, config)
		for _, key := range []string{"Deployment kube-system/quartermaster", "PodDisruptionBudget kube-system/quartermaster",
			"NetworkPolicy kube-system/quartermaster", "FlowSchema /quartermaster-leader-election"} {
			rename := strings.NewReplacer("quartermaster", build).Replace
			if diff := cmp.Diff(rename(ofAnyBuild(t, base, key)), ofAnyBuild(t, got, rename(key))); diff != "" {
				t.Errorf("%s (-base +build):\n%s", rename(key), diff)
			}
		}
	}
}

// ofAnyBuild returns an object without what differs between builds.
func ofAnyBuild(t *testing.T, objects objects, key string) string {
	t.Helper()
	object := objects[key]
	if object == nil {
		t.Fatalf("there is no %s", key)
	}
	unstructured.RemoveNestedField(object, "metadata", "labels")
	pod, isDeployment, err := unstructured.NestedMap(object, "spec", "template", "spec")
	if isDeployment {
		for _, field := range []string{"args", "image", "resources"} {
			delete(pod["containers"].([]any)[0].(map[string]any), field)
		}
		err = unstructured.SetNestedMap(object, pod, "spec", "template", "spec")
	}
	text, marshalErr := yaml.Marshal(object)
	if err := errors.Join(err, marshalErr); err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// kubeSystemNames matches the names that only an installation in kube-system has.
var kubeSystemNames = regexp.MustCompile(`kube-system|quartermaster-leader['"\n]|quartermaster-(fence|replication)\n`)

// TestChartElsewhereHasOtherNames renders the chart for another namespace, and compares
// its cluster-scoped objects with those of an installation in kube-system.
func TestChartElsewhereHasOtherNames(t *testing.T) {
	const values = "{replicationPolicy: {enabled: true}}"
	kubeSystem, elsewhere := mustRender(t, values, "kube-system"), mustRender(t, values, "ops")
	if len(kubeSystem) != len(elsewhere) {
		t.Errorf("%d objects here and %d there", len(kubeSystem), len(elsewhere))
	}
	for key, object := range elsewhere {
		switch _, name, _ := strings.Cut(key, " "); {
		case strings.HasPrefix(name, "ops/"), strings.HasSuffix(name, "-ops"), strings.HasSuffix(name, ".ops"):
		default:
			t.Errorf("%s is called as in kube-system", key)
		}
		if strings.Contains(key, "authentication-reader") || strings.Contains(key, "api-servers") {
			continue // of objects in kube-system
		}
		text, err := yaml.Marshal(object)
		if err != nil {
			t.Fatal(err)
		}
		if name := kubeSystemNames.Find(text); name != nil {
			t.Errorf("%s refers to %s:\n%s", key, name, text)
		}
	}
}

func TestRunbooksAreOfTheRelease(t *testing.T) {
	for version, ref := range map[string]string{"latest": "main", "v0.0.0-g0123456": "main", "v0.1.0-4-g0123456": "main", "v0.1.0": "v0.1.0"} {
		chart, err := loader.LoadDir(chartDir)
		if err != nil {
			t.Fatal(err)
		}
		chart.Metadata.AppVersion = version
		rendered, err := renderChart(chart, "prometheusRule: {enabled: true}", "kube-system")
		if err != nil {
			t.Fatal(err)
		}
		alerts := fmt.Sprint(rendered["PrometheusRule kube-system/quartermaster"])
		if urls, of := strings.Count(alerts, "/blob/"), strings.Count(alerts, "/blob/"+ref+"/docs/operate/alerts.md#"); of < 20 || of != urls {
			t.Errorf("version %s: %d of %d runbooks are at %s", version, of, urls, ref)
		}
	}
}

// TestChartWithoutElectionHasNoFence also checks that such a manager ends before the next one
// starts.
func TestChartWithoutElectionHasNoFence(t *testing.T) {
	rendered := mustRender(t, "{flags: {leader-elect: false}, replicaCount: 1, prometheusRule: {enabled: true}}", "kube-system")
	alerts := fmt.Sprint(rendered["PrometheusRule kube-system/quartermaster"])
	if strings.Contains(alerts, "QuartermasterFenceNotEnforced") || !strings.Contains(alerts, "QuartermasterNoLeader") {
		t.Errorf("the alert of a missing fence would fire for ever, or there are no alerts: %s", alerts)
	}
	strategy, _, _ := unstructured.NestedMap(rendered["Deployment kube-system/quartermaster"], "spec", "strategy")
	if want := map[string]any{"type": "Recreate"}; !cmp.Equal(strategy, want) {
		t.Errorf("strategy %v, not %v", strategy, want)
	}
	for key := range rendered {
		if strings.Contains(key, "quartermaster-fence") || strings.Contains(key, "quartermaster-leader") && !strings.HasPrefix(key, "FlowSchema") {
			t.Errorf("%s is there", key)
		}
	}
}
