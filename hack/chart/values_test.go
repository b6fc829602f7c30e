// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package chart

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/pflag"
	"helm.sh/helm/v4/pkg/chart/v2/loader"
	"helm.sh/helm/v4/pkg/engine"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"

	"github.com/quartermaster-dev/quartermaster/pkg/app"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/builtin"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/ttl/policy/rules"
)

func TestSchemaRefusesMistakes(t *testing.T) {
	for name, values := range map[string]string{
		"a value that is not there":                     "replicas: 3",
		"a value in the wrong place":                    "image: {replicaCount: 3}",
		"a text for a number":                           `replicaCount: "3"`,
		"a negative number of replicas":                 "replicaCount: -1",
		"a text for a switch":                           `fence: {enabled: "true"}`,
		"a switch without its group":                    "fence: false",
		"an image as a text":                            "image: quartermaster:v1",
		"a field that Kubernetes does not know":         "tolerations: [{kye: a}]",
		"a field deep in one of Kubernetes":             "affinity: {nodeAffinity: {requiredDuringScheduling: {}}}",
		"resources with a typing error":                 "resources: {request: {cpu: 1}}",
		"an operator that nobody replaces":              "compat: [stakater]",
		"an operator that is not in a list":             "compat: reloader",
		"a controller that is not there":                "controllers: {reload: {enabled: true}}",
		"a controller that is only switched":            "controllers: {ttl: true}",
		"a flag of a controller outside of its flags":   "controllers: {ttl: {ttl-dry-run: true}}",
		"a flag of another controller":                  "controllers: {ttl: {flags: {replication-dry-run: true}}}",
		"a flag of a controller among the others":       "flags: {ttl-dry-run: true}",
		"a flag that is not there":                      "flags: {kube-api-qqs: 50}",
		"a flag that another value sets":                "flags: {controllers: ['*']}",
		"a flag that the namespace of the release sets": "flags: {leader-elect-resource-namespace: a}",
		"a flag that ends the manager":                  "flags: {version: true}",
		"a duration without a unit":                     `flags: {shutdown-timeout: "20"}`,
		"a duration as a number":                        "flags: {shutdown-timeout: 20}",
		"a text for a flag that takes several":          "controllers: {ttl: {flags: {ttl-include-resources: pods}}}",
		"a list for a flag that takes one":              "flags: {v: [2]}",
		"a map for a flag that takes a list":            "controllers: {replication: {flags: {replication-kinds: {Secret: true}}}}",
		"an annotation that is not text":                "podAnnotations: {a: 1}",
		"an argument that is not text":                  "extraArgs: [1]",
		"a field of a rule that is not there":           "controllers: {ttl: {rules: [{name: a, wen: b}]}}",
		"rules of a controller that has none":           "controllers: {replication: {rules: []}}",
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := render(values, "kube-system"); err == nil || !strings.Contains(err.Error(), "schema") {
				t.Errorf("not refused by the schema: %v", err)
			}
		})
	}
}

func TestValuesThatDoNotGoTogetherAreRefused(t *testing.T) {
	for values, want := range map[string]string{
		"namespaced: {additionalNamespaces: [team-b]}":                              "namespaced.additionalNamespaces needs namespaced.enabled",
		"networkPolicy: {enabled: false, restrictEgress: true}":                     "networkPolicy.restrictEgress needs networkPolicy.enabled",
		"flags: {leader-elect: false}":                                              "flags.leader-elect: false needs replicaCount: 1",
		"controllers: {ttl: {enabled: true, flags: null}}":                          "needs controllers.ttl.flags.ttl-include-resources",
		"controllers: {ttl: {enabled: true, flags: {ttl-include-resources: null}}}": "needs controllers.ttl.flags.ttl-include-resources",
	} {
		if _, err := render(values, "team-a"); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", values, err)
		}
	}
}

func TestRulesAreMountedAndRollTheManager(t *testing.T) {
	checksums := map[string]bool{}
	for _, ttl := range []string{"1h", "2h"} {
		values := "{controllers: {ttl: {enabled: true, rules: [{name: a, resources: [pods], when: \"object.a == 'b'\", ttl: " + ttl + "}]}}, podAnnotations: {a: b}, extraVolumes: [{name: x, emptyDir: {}}]}"
		o := mustRender(t, values, "ops")
		text, _, _ := unstructured.NestedString(o["ConfigMap ops/quartermaster-ttl-rules"], "data", "rules.yaml")
		ruleSet, err := rules.Parse([]byte(text))
		if err != nil || len(ruleSet.Rules()) != 1 || ruleSet.Rules()[0].TTL != ttl || ruleSet.Rules()[0].When != "object.a == 'b'" {
			t.Fatalf("%v: the rules are %s", err, text)
		}
		if config := effectiveConfig(t, o.args(t)); !strings.Contains(config, "ttl-rules: /etc/quartermaster/ttl/rules.yaml") {
			t.Error("the flag is not set")
		}
		deployment := o["Deployment ops/quartermaster"]
		annotations, _, _ := unstructured.NestedStringMap(deployment, "spec", "template", "metadata", "annotations")
		volumes, _, _ := unstructured.NestedSlice(deployment, "spec", "template", "spec", "volumes")
		if annotations["a"] != "b" || len(volumes) != 2 {
			t.Errorf("annotations %v, volumes %v", annotations, volumes)
		}
		checksums[annotations["checksum/ttl-rules"]] = true
	}
	if len(checksums) != 2 {
		t.Error("a change of the rules does not change the Pods")
	}
	if o := mustRender(t, "controllers: {ttl: {rules: [{name: a, resources: [pods], ttl: 1h}]}}", "ops"); o["ConfigMap ops/quartermaster-ttl-rules"] != nil {
		t.Error("there are rules of a controller that is off")
	}
}

func TestNotesNameOriginalsThatNothingReplaces(t *testing.T) {
	chart, err := loader.LoadDir(chartDir)
	if err != nil {
		t.Fatal(err)
	}
	schema, err := readSchema()
	if err != nil {
		t.Fatal(err)
	}
	originals, _, err := unstructured.NestedStringSlice(schema, "properties", "compat", "items", "enum")
	if err != nil {
		t.Fatal(err)
	}
	// A controller that is not there would leave a gap between the dots.
	line := regexp.MustCompile(`(?m)^Nothing replaces (.+): compat names it, but controllers\.[a-z-]+\.enabled is false\.$`)
	for controllers, want := range map[string][]string{
		"{config-reload: {enabled: false}}": originals,
		"{ttl: {enabled: true}}":            {"downscaler", "reflector", "replicator"},
		"{config-reload: {enabled: false}, replication: {enabled: true}, ttl: {enabled: true}}": {"downscaler", "reloader"},
	} {
		values := fmt.Sprintf("{compat: [%s], controllers: %s}", strings.Join(originals, ", "), controllers)
		files, err := renderFiles(engine.Engine{Strict: true}, chart, values, "ops")
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, match := range line.FindAllStringSubmatch(files["quartermaster/templates/NOTES.txt"], -1) {
			got = append(got, match[1])
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s: the notes name %v, not %v", values, got, want)
		}
	}
}

// TestValuesThatAreEmptyMayBeNull leaves nothing but comments below a key, which is null in YAML.
func TestValuesThatAreEmptyMayBeNull(t *testing.T) {
	chart, err := loader.LoadDir(chartDir)
	if err != nil {
		t.Fatal(err)
	}
	want, err := renderFiles(engine.Engine{}, chart, "{}", "ops")
	if err != nil {
		t.Fatal(err)
	}
	tried := 0
	for name, value := range chart.Values {
		if v := reflect.ValueOf(value); v.Kind() != reflect.Map && v.Kind() != reflect.Slice || v.Len() > 0 {
			continue
		}
		tried++
		if got, err := renderFiles(engine.Engine{}, chart, name+":", "ops"); err != nil || !cmp.Equal(got, want) {
			t.Errorf("%s: %v%s", name, err, cmp.Diff(want, got))
		}
	}
	if tried < 10 {
		t.Errorf("%d values: the test does not see them", tried)
	}
}

// bases are values with which every template is in use, in one of them.
var bases = map[string]string{
	"in the cluster": `{serviceMonitor: {enabled: true}, prometheusRule: {enabled: true}, dashboards: {enabled: true},
		replicationPolicy: {enabled: true}, controllers: {replication: {enabled: true}, ttl: {enabled: true}, federation: {enabled: true},
		csr-approver: {enabled: true}, scale-schedule: {enabled: true}}}`,
	"namespaced": "namespaced: {enabled: true}",
}

// samples are values for what is empty by default.
var samples = map[string]any{
	"compat":                          []any{"reloader"},
	"controllers.config-reload.flags": map[string]any{"config-reload-csi": true},
	"controllers.replication.flags":   map[string]any{"replication-concurrent-syncs": 1},
	"controllers.ttl.rules":           []any{map[string]any{"name": "a", "resources": []any{"pods."}, "ttl": "1h"}},
	"controllers.csr-approver.flags":  map[string]any{"csr-approver-concurrent-syncs": 1},
	"controllers.federation.flags":    map[string]any{"federation-cluster-qps": 1},
	"extraArgs":                       []any{"--v=1"},
	"extraEnv":                        []any{map[string]any{"name": "A", "value": "b"}},
	"extraVolumes":                    []any{map[string]any{"name": "a", "emptyDir": map[string]any{}}},
	"extraVolumeMounts":               []any{map[string]any{"name": "a", "mountPath": "/a"}},
	"flags":                           map[string]any{"v": 1},
	"image.digest":                    "sha256:0123",
	"image.pullPolicy":                "Always",
	"imagePullSecrets":                []any{map[string]any{"name": "a"}},
	"namespaced.additionalNamespaces": []any{"team-b"},
	"nodeSelector":                    map[string]any{"a": "b"},
	"serviceMonitor.tlsConfig":        map[string]any{"serverName": "a"},
	"tolerations":                     []any{map[string]any{"key": "a"}},
}

// TestValuesAreAllUsed changes each value of values.yaml in turn, which must change what is rendered.
func TestValuesAreAllUsed(t *testing.T) {
	var defaults map[string]any
	text, err := os.ReadFile(filepath.Join(chartDir, "values.yaml"))
	if err == nil {
		err = yaml.Unmarshal(text, &defaults)
	}
	if err != nil {
		t.Fatal(err)
	}
	before := map[string]objects{}
	for name, base := range bases {
		before[name] = mustRender(t, base, "kube-system")
	}
	changed := 0
	var walk func(path []string, values map[string]any)
	walk = func(path []string, values map[string]any) {
		for key, value := range values {
			path := append(slices.Clone(path), key)
			if child, ok := value.(map[string]any); ok && len(child) > 0 {
				walk(path, child)
				continue
			}
			changedTo := changedValue(strings.Join(path, "."), value)
			changed++
			used := false
			for name, base := range bases {
				var values map[string]any
				if err := yaml.Unmarshal([]byte(base), &values); err != nil {
					t.Fatal(err)
				}
				setPath(values, changedTo, path...)
				text, err := yaml.Marshal(values)
				if err != nil {
					t.Fatal(err)
				}
				after, err := render(string(text), "kube-system")
				if err != nil && !strings.Contains(err.Error(), " needs ") { // a value that another base has
					t.Errorf("%s: %v", path, err)
				}
				used = used || err == nil && !cmp.Equal(before[name], after)
			}
			if !used {
				t.Errorf("no template uses %s", strings.Join(path, "."))
			}
		}
	}
	walk(nil, defaults)
	if changed < 40 {
		t.Errorf("%d values: the test does not see them", changed)
	}

	schema, err := readSchema()
	if err != nil {
		t.Fatal(err)
	}
	for name := range schema["properties"].(map[string]any) {
		if _, ok := defaults[name]; !ok && name != "global" {
			t.Errorf("%s is in values.schema.json, but not in values.yaml", name)
		}
	}
}

// changedValue returns another value.
func changedValue(path string, value any) any {
	if sample, ok := samples[path]; ok {
		return sample
	}
	switch value := value.(type) {
	case bool:
		return !value
	case string:
		return value + "x"
	case float64:
		return value + 1
	case []any:
		return append([]any{}, value[:len(value)-1]...)
	}
	return map[string]any{"a": "b"}
}

// setPath sets a value in a tree.
func setPath(values map[string]any, value any, path ...string) {
	for _, key := range path[:len(path)-1] {
		child, ok := values[key].(map[string]any)
		if !ok {
			child = map[string]any{}
			values[key] = child
		}
		values = child
	}
	values[path[len(path)-1]] = value
}

// flagSamples are valid values of flags that do not take any text, and differ from the default.
var flagSamples = map[string]any{
	"allow-metric-labels":              map[string]any{"metric1,label1": "v1"},
	"allow-metric-labels-manifest":     os.DevNull,
	"config":                           filepath.Join(deployDir, "examples", "config-file", "config.yaml"),
	"log-json-split-stream":            false, // true needs a feature gate
	"log-text-split-stream":            false,
	"bind-address":                     "127.0.0.1",
	"config-reload-annotation-key":     map[string]any{"auto": "example.com/auto"},
	"config-reload-exclude-kinds":      []any{"statefulsets", "jobs", "cronjobs"},
	"config-reload-exclude-sources":    []any{"secrets"},
	"config-reload-namespace-selector": []any{"a=b"},
	"config-reload-source-selector":    []any{"a=b"},
	"config-reload-strategy":           "annotations",
	"csr-approver-ip-ranges":           []any{"10.0.0.0/8", "fd00::/8"},
	"csr-approver-max-duration":        "1h",
	"feature-gates":                    map[string]any{"LoggingAlphaOptions": true},
	"insecure-bind-address":            "0.0.0.0",
	"kube-api-content-type":            "application/json",
	"leader-elect-lease-duration":      "30s",
	"leader-elect-renew-deadline":      "9s",
	"leader-elect-resource-lock":       "leases",
	"log-json-info-buffer-size":        0,
	"log-text-info-buffer-size":        0,
	"logging-format":                   "text",
	"replication-kinds":                []any{"ConfigMap"},
	"scale-schedule-default-downtime":  "never",
	"scale-schedule-default-uptime":    "always",
	"scale-schedule-downscale-period":  "never",
	"scale-schedule-force-downtime":    "never",
	"scale-schedule-force-uptime":      "never",
	"scale-schedule-upscale-period":    "never",
	"scale-schedule-allow-protected":   []any{"in:kube-system"},
	"scale-schedule-kinds":             []any{"cronjobs", "horizontalpodautoscalers", "rollouts.argoproj.io"},
	"scale-schedule-timezone":          "UTC",
	"scale-schedule-weekdays":          "Mon-Fri",
	"replication-max-spread":           "32Mi",
	"replication-push-namespaces":      "team-*",
	"show-hidden-metrics-for-version":  "",
	"standby":                          "cold",
	"tls-cipher-suites":                []any{"TLS_AES_128_GCM_SHA256"},
	"tls-min-version":                  "VersionTLS13",
	"ttl-allow-protected":              []any{"nodes"},
	"ttl-annotations":                  []any{"native", "ttl-controller"},
	"ttl-exclude-resources":            []any{"events"},
	"ttl-include-resources":            []any{"pods.", "jobs", "*.example.com"},
	"vmodule":                          "a=2",
}

// valuesOfFlags are flags that values of their own set, or the namespace of the release.
var valuesOfFlags = map[string]struct {
	values string
	args   []string
}{
	"compat": {"compat: [reloader]", []string{"--compat=reloader"}},
	"controllers": {"controllers: {config-reload: {enabled: false}, ttl: {enabled: true}}",
		[]string{"--controllers=*,ttl", "--controllers=-config-reload"}},
	"namespaces": {"namespaced: {enabled: true, additionalNamespaces: [team-b]}",
		[]string{"--namespaces=NAMESPACE", "--namespaces=team-b"}},
	"leader-elect-resource-namespace": {"namespaced: {enabled: true}", []string{"--leader-elect-resource-namespace=NAMESPACE"}},
}

// TestFlagsAreAllReached sets each flag of the manager by the value for it. The manager must get it,
// and the roles must be those that the manager prints for it.
func TestFlagsAreAllReached(t *testing.T) {
	reached := 0
	app.NewCommand(app.With(builtin.Entries()...)).Flags().VisitAll(func(flag *pflag.Flag) {
		if slices.Contains([]string{"help", "print-effective-config", "version"}, flag.Name) {
			return
		}
		reached++
		t.Run(flag.Name, func(t *testing.T) {
			values, wanted := valuesOfFlags[flag.Name].values, valuesOfFlags[flag.Name].args
			if values == "" {
				values, wanted = valuesFor(t, flag)
			}
			for _, namespace := range []string{"kube-system", "ops"} {
				o, err := render(values, namespace)
				if err != nil {
					t.Fatal(err)
				}
				args := o.args(t)
				for _, arg := range wanted {
					arg = strings.ReplaceAll(arg, "NAMESPACE", namespace)
					if !slices.Contains(args, arg) {
						t.Errorf("%s\ndoes not lead to %s in %q", values, arg, args)
					}
				}
				missing, further := compareRoles(t, o)
				if missing != "" || further != "" {
					t.Errorf("%s\nmanager rbac prints, and the chart does not grant:%s\nthe chart grants besides:%s", values, missing, further)
				}
			}
		})
	})
	if reached < 80 {
		t.Errorf("%d flags: the test does not see them", reached)
	}
}

// valuesFor returns values that set the flag to what it is not by default, and the arguments that they
// have to result in.
func valuesFor(t *testing.T, flag *pflag.Flag) (string, []string) {
	t.Helper()
	value, ok := flagSamples[flag.Name]
	if !ok {
		switch flag.Value.Type() {
		case "bool":
			value = flag.DefValue == "false"
		case "int", "int32", "Level", "float32":
			value = 3
			if strings.HasSuffix(flag.Name, "-port") {
				value = 0
			}
		case "duration":
			value = "3s"
		case "stringSlice":
			value = []any{"a", "b"}
		case "stringToString":
			value = map[string]any{"a": "b"}
		default:
			value = "a"
		}
	}
	values := map[string]any{"replicaCount": 1} // as many as do not need an election
	flags := []string{"flags"}
	for _, controller := range []string{"config-reload", "replication", "ttl", "federation", "csr-approver", "scale-schedule"} {
		if strings.HasPrefix(flag.Name, controller+"-") {
			flags = []string{"controllers", controller, "flags"}
			setPath(values, true, "controllers", controller, "enabled")
		}
	}
	setPath(values, value, append(flags, flag.Name)...)
	for _, needed := range companionFlags[flag.Name] {
		setPath(values, "a", append(flags, needed)...)
	}
	text, err := yaml.Marshal(values)
	if err != nil {
		t.Fatal(err)
	}
	var args []string
	switch value := value.(type) {
	case []any:
		for _, item := range value {
			args = append(args, fmt.Sprintf("--%s=%v", flag.Name, item))
		}
	case map[string]any:
		for key, item := range value {
			args = append(args, fmt.Sprintf("--%s=%s=%v", flag.Name, key, item))
		}
	default:
		args = []string{fmt.Sprintf("--%s=%v", flag.Name, value)}
	}
	return string(text), args
}

// companionFlags are the flags without which a flag is refused.
var companionFlags = map[string][]string{
	"tls-cert-file":        {"tls-private-key-file"},
	"tls-private-key-file": {"tls-cert-file"},
}

// compareRoles compares the roles with those that the manager prints for the arguments.
func compareRoles(t *testing.T, o objects) (missing, further string) {
	t.Helper()
	printed, err := manager(append([]string{"rbac"}, o.args(t)...)...)
	if err != nil {
		t.Fatal(err)
	}
	wanted, err := parse(printed)
	if err != nil {
		t.Fatal(err)
	}
	granted, needed := o.permissions(t), wanted.permissions(t)
	for _, permission := range slices.Sorted(maps.Keys(needed)) {
		if !granted[permission] {
			missing += "\n" + permission
		}
	}
	for _, permission := range slices.Sorted(maps.Keys(granted)) {
		if !needed[permission] {
			further += "\n" + permission
		}
	}
	return missing, further
}

// TestRolesFitEachPairOfSettings pairs all settings that change roles.
func TestRolesFitEachPairOfSettings(t *testing.T) {
	all := map[string]any{
		"compat":                             []any{"reloader", "reflector", "replicator", "ttl-controller", "janitor", "downscaler"},
		"controllers.replication.enabled":    true,
		"controllers.ttl.enabled":            true,
		"controllers.federation.enabled":     true,
		"controllers.csr-approver.enabled":   true,
		"controllers.scale-schedule.enabled": true,
		"controllers.config-reload.enabled":  false,
		"namespaced.enabled":                 true,
	}
	flags := map[string][]string{
		"config-reload": {"config-reload-argo-rollouts", "config-reload-csi", "config-reload-dry-run", "config-reload-exclude-kinds",
			"config-reload-exclude-sources", "config-reload-namespace-selector"},
		"replication": {"replication-kinds"}, "ttl": {"ttl-include-resources"}, "federation": {"federation-namespace"}, "scale-schedule": {"scale-schedule-kinds"},
		"": {"authentication-skip-lookup", "dry-run", "leader-elect",
			"leader-elect-resource-name", "secure-port"},
	}
	sample := func(flag string) any {
		switch flag {
		case "leader-elect":
			return false
		case "secure-port":
			return 0
		case "leader-elect-resource-name", "federation-namespace":
			return "a"
		}
		if value, ok := flagSamples[flag]; ok {
			return value
		}
		return true
	}
	for controller, names := range flags {
		for _, name := range names {
			path := "flags." + name
			if controller != "" {
				path = "controllers." + controller + ".flags." + name
			}
			all[path] = sample(name)
		}
	}
	paths := slices.Sorted(maps.Keys(all))
	for i, first := range paths {
		for _, second := range paths[:i] {
			values := map[string]any{"replicaCount": 1}
			for _, path := range []string{first, second} {
				setPath(values, all[path], strings.Split(path, ".")...)
			}
			pair := fmt.Sprint(first, " and ", second)
			if strings.Contains(pair, "namespaced") && (strings.Contains(pair, "namespace-selector") ||
				strings.Contains(pair, "csr-approver.enabled") || strings.Contains(pair, "federation.enabled")) {
				continue // the manager refuses this
			}
			text, err := yaml.Marshal(values)
			if err != nil {
				t.Fatal(err)
			}
			missing, further := compareRoles(t, mustRender(t, string(text), "kube-system"))
			if missing != "" {
				t.Errorf("%s: manager rbac prints, and the chart does not grant:%s", pair, missing)
			}
			if further != "" && !strings.Contains(pair, "dry-run") {
				t.Errorf("%s: the chart grants, and manager rbac does not print:%s", pair, further)
			}
		}
	}
}
