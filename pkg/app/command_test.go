// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"
	"sigs.k8s.io/yaml"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/builtin"
)

var update = flag.Bool("update", false, "write the golden files")

// execute runs the command line of the manager. It returns what the command printed and its error. The
// command must not get as far as Run.
func execute(t *testing.T, args ...string) (string, error) {
	t.Helper()
	return executeBuild([]BuildOption{With(builtin.Entries()...)}, args...)
}

// executeBuild runs the command line of a build.
func executeBuild(build []BuildOption, args ...string) (string, error) {
	var out bytes.Buffer
	cmd := NewCommand(build...)
	cmd.SetOut(&out)
	cmd.SetErr(&out)
	cmd.SetArgs(args)
	err := cmd.Execute()
	return out.String(), err
}

func TestHelpGolden(t *testing.T) {
	for name, args := range map[string][]string{
		"help":             {"--help"},
		"help-status":      {"status", "--help"},
		"help-ttl-test":    {"ttl", "test", "--help"},
		"help-join":        {"federation", "join", "--help"},
		"help-unjoin":      {"federation", "unjoin", "--help"},
		"help-controllers": {"controllers", "--help"},
		"help-rbac":        {"rbac", "--help"},
	} {
		t.Run(name, func(t *testing.T) {
			out, err := execute(t, args...)
			assert.NoError(t, err)
			golden := filepath.Join("testdata", name+".golden")
			if *update {
				assert.NoError(t, os.WriteFile(golden, []byte(out), 0o644))
			}
			want, err := os.ReadFile(golden)
			assert.NoError(t, err)
			assert.Equal(t, golden+", which make generate writes", string(want), out)
			for line := range strings.Lines(out) {
				if n := len([]rune(strings.TrimRight(line, "\n"))); n > helpColumns && strings.Contains(strings.TrimSpace(line), " ") && !strings.HasPrefix(strings.TrimSpace(line), "--") {
					t.Errorf("line of %d columns, more than %d: %s", n, helpColumns, line)
				}
			}
		})
	}
}

func TestCommandLineIsChecked(t *testing.T) {
	for name, tc := range map[string]struct {
		args []string
		want []string
	}{
		"a stray argument is an error":                                            {[]string{"stray"}, []string{`"stray"`}},
		"a command takes no arguments":                                            {[]string{"status", "stray"}, []string{`"stray"`}},
		"an output format that does not exist is refused":                         {[]string{"status", "-o", "xml"}, []string{"json or yaml"}},
		"the flags that controllers takes are checked":                            {[]string{"controllers", "--compat=helm"}, []string{"--compat", `"helm"`}},
		"the flags that rbac takes are checked":                                   {[]string{"rbac", "--namespaces=a,a"}, []string{`--namespaces: "a" is named twice`}},
		"a namespace has a name, and not every name":                              {[]string{"--namespaces=a,,B_c"}, []string{`--namespaces: "": `, `--namespaces: "B_c": `}},
		"namespaces cannot be selected by labels where Namespaces cannot be read": {[]string{"--namespaces=a", "--config-reload-namespace-selector=x=y"}, []string{"--config-reload-namespace-selector", "--namespaces"}},
		"a controller works in no namespace that is not read":                     {[]string{"--namespaces=a,b", "--config-reload-include-namespaces=b,c"}, []string{"--config-reload-include-namespaces", `"c"`, "--namespaces"}},
		"an unknown controller is an error that lists the known ones":             {[]string{"--controllers=*,-nothing"}, []string{"--controllers", `"-nothing"`, "config-reload"}},
		"an unknown original is an error that lists the known ones":               {[]string{"--compat=helm"}, []string{"--compat", `"helm"`, "reloader"}},
		"all problems are reported at once, each with its flag": {[]string{"--shutdown-timeout=0s", "--insecure-port=70000", "--leader-elect-renew-deadline=20s", "--standby=tepid", "--kube-api-qps=0", "--tls-cert-file=x"},
			[]string{"--shutdown-timeout", "--insecure-port", "--leader-elect-renew-deadline", "--standby", "--kube-api-qps", "--tls-private-key-file"}},
		"a limit that is no number is refused":                     {[]string{"--kube-api-qps=NaN"}, []string{"--kube-api-qps", "at least 0.1"}},
		"a limit without end is refused":                           {[]string{"--kube-api-qps=+Inf"}, []string{"--kube-api-qps", "negative for no limit"}},
		"a limit with which the start would take hours is refused": {[]string{"--kube-api-qps=0.001"}, []string{"--kube-api-qps", "at least 0.1"}},
		"what would be no client is refused":                       {[]string{"--kube-api-qps=7", "--kube-api-burst=0", "--kube-api-content-type=text/plain"}, []string{"--kube-api-burst", "--kube-api-content-type", "text/plain"}},
		"what TLS cannot be is reported at once": {[]string{"--secure-port=-1", "--tls-min-version=VersionTLS9", "--tls-cipher-suites=ROT13"},
			[]string{"--secure-port", "--tls-min-version", "--tls-cipher-suites"}},
		"a lock type of the past is refused with what to use":              {[]string{"--leader-elect-resource-lock=endpoints"}, []string{"--leader-elect-resource-lock", "leases"}},
		"a log format that does not exist is refused":                      {[]string{"--logging-format=xml"}, []string{"xml"}},
		"levels at which client-go logs the values of Secrets are refused": {[]string{"--v=8", "--vmodule=request=10"}, []string{"--v: must be at most 7", "--vmodule: request: must be at most 7"}},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := execute(t, tc.args...)
			if err == nil {
				t.Fatal("accepted")
			}
			for _, want := range tc.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("error lacks %q:\n%v", want, err)
				}
			}
		})
	}
}

var deployDir = filepath.Join("..", "..", "deploy")

// TestManifestsParse parses the arguments of the Deployment in deploy/ with the flags that the
// manager really has.
func TestManifestsParse(t *testing.T) {
	file, err := os.ReadFile(filepath.Join(deployDir, "base", "deployment.yaml"))
	assert.NoError(t, err)
	var deployment appsv1.Deployment
	assert.NoError(t, yaml.UnmarshalStrict(file, &deployment))
	pod := deployment.Spec.Template.Spec
	manager := pod.Containers[0]

	o := newOptions(t, With(builtin.Entries()...))
	assert.NoError(t, errors.Join(o.Parse(manager.Args), o.Check()))
	if grace := time.Duration(*pod.TerminationGracePeriodSeconds) * time.Second; grace <= o.Generic.ShutdownTimeout {
		t.Errorf("terminationGracePeriodSeconds: %s is not longer than --shutdown-timeout=%s", grace, o.Generic.ShutdownTimeout)
	}
	assert.Equal(t, "containerPort, as --secure-port", int32(o.Secure.BindPort), manager.Ports[0].ContainerPort)
	assert.Equal(t, "the Deployment, and the account to which the roles are bound", []string{defaultName, defaultName}, []string{deployment.Name, pod.ServiceAccountName})
}

// argument matches an item of args, or what a JSON patch adds to them.
var argument = regexp.MustCompile(`(?m)^\s*(?:- |value: )['"]?(--[^\s'"]+)['"]?$`)

// TestManifestsUseFlagsThatExist checks the flags in all manifests, also those in patches of
// components and examples.
func TestManifestsUseFlagsThatExist(t *testing.T) {
	found := 0
	err := filepath.WalkDir(deployDir, func(path string, _ fs.DirEntry, err error) error {
		if err != nil || filepath.Ext(path) != ".yaml" {
			return err
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		for _, match := range argument.FindAllStringSubmatch(string(text), -1) {
			found++
			o := newOptions(t, With(builtin.Entries()...))
			// The kubelet replaces variables of the environment, and mounts ConfigMaps.
			kubelet := strings.NewReplacer("$(POD_NAMESPACE)", "team-a", "/etc/quartermaster", filepath.Join(deployDir, "examples", "config-file"))
			if err := errors.Join(o.Parse([]string{kubelet.Replace(match[1])}), o.Check()); err != nil {
				t.Errorf("%s: %v", path, err)
			}
		}
		return nil
	})
	assert.NoError(t, err)
	if found < 5 {
		t.Errorf("%d flags were found: the test does not see them", found)
	}
}

// TestPodmanManifestsRunTheManagerAlike compares the units of systemd in deploy/podman with pod.yaml,
// whose flags TestManifestsUseFlagsThatExist checks.
func TestPodmanManifestsRunTheManagerAlike(t *testing.T) {
	read := func(name string) string {
		text, err := os.ReadFile(filepath.Join(deployDir, "podman", name))
		assert.NoError(t, err)
		return strings.ReplaceAll(string(text), "\\\n    ", "")
	}
	var pod corev1.Pod
	assert.NoError(t, yaml.UnmarshalStrict([]byte(read("pod.yaml")), &pod))
	manager, grace := pod.Spec.Containers[0], *pod.Spec.TerminationGracePeriodSeconds
	o := newOptions(t, With(builtin.Entries()...))
	assert.NoError(t, o.Parse(manager.Args))
	if time.Duration(grace)*time.Second <= o.Generic.ShutdownTimeout {
		t.Errorf("terminationGracePeriodSeconds: %d s is not longer than --shutdown-timeout=%s", grace, o.Generic.ShutdownTimeout)
	}
	args := strings.Join(manager.Args, " ")
	user, group := *manager.SecurityContext.RunAsUser, *manager.SecurityContext.RunAsGroup
	for name, wanted := range map[string][]string{
		"quartermaster.container": {"Image=" + manager.Image + "\n", "Exec=" + args + "\n", fmt.Sprintf("User=%d\nGroup=%d\n", user, group)},
		"quartermaster.service":   {" " + manager.Image + " " + args + "\n", fmt.Sprintf(" --user=%d:%d ", user, group)},
	} {
		// systemd waits longer than podman.
		wanted = append(wanted, fmt.Sprintf("--stop-timeout=%d", grace), fmt.Sprintf("TimeoutStopSec=%d\n", grace+10))
		for _, want := range wanted {
			if !strings.Contains(read(name), want) {
				t.Errorf("%s does not have %q", name, want)
			}
		}
	}
}

func TestLargeHeapIsCollectedOnlyForItsFreeMemory(t *testing.T) {
	const mib = 1 << 20
	for name, tc := range map[string]struct {
		inUse, idle, released uint64 // MiB
		want                  bool
	}{
		"a small heap":                               {200, 0, 0, true},
		"a large heap":                               {2000, 100, 0, false},
		"a large heap after a burst":                 {2000, 1000, 0, true},
		"a large heap whose free memory is the OS's": {2000, 1000, 900, false},
	} {
		t.Run(name, func(t *testing.T) {
			m := &runtime.MemStats{HeapInuse: tc.inUse * mib, HeapIdle: tc.idle * mib, HeapReleased: tc.released * mib}
			assert.Equal(t, "worth collecting", tc.want, isWorthCollecting(m))
		})
	}
}

// TestMetricsGolden lists the metrics that a manager with all controllers and dialects can export:
// its own, with the values that labels have from the start, and the metrics of libraries that say something
// about it. Its own metrics without series before their first observation are marked. test/deploy
// compares the list with a real manager's /metrics, and hack/promql the alerts and the dashboard with
// the list.
func TestMetricsGolden(t *testing.T) {
	p, libraries := allControllers(t), legacyregistry.DefaultGatherer.(metrics.KubeRegistry)
	list := map[string]string{} // by name
	describe(t, list, p.metrics.host, true)
	describe(t, list, p.metrics.KubeRegistry, true)
	describe(t, list, libraries, false)
	var text strings.Builder
	for _, name := range slices.Sorted(maps.Keys(list)) {
		text.WriteString(list[name])
	}
	golden := filepath.Join("testdata", "metrics.golden")
	if *update {
		assert.NoError(t, os.WriteFile(golden, []byte(text.String()), 0o644))
	}
	want, err := os.ReadFile(golden)
	assert.NoError(t, err)
	assert.Equal(t, golden+", which make generate writes", string(want), text.String())
}

var (
	// descText matches how the library prints a description, whose fields it does not export.
	descText  = regexp.MustCompile(`^Desc\{fqName: "(.*)", help: (".*"), unit: ".*", constLabels: \{(.*)\}, variableLabels: \{(.*)\}\}$`)
	labelName = regexp.MustCompile(`[a-z_]+`)

	ofLibraries = regexp.MustCompile(`^(informer|process|rest_client|workqueue)_`)

	// typesOfUnobserved are the types of metrics that have no series in this test, unless the name says
	// that the metric is a counter.
	typesOfUnobserved = map[string]string{
		"informer_processing_latency_seconds":              "histogram",
		"informer_queued_items":                            "gauge",
		"quartermaster_federation_lag_seconds":             "histogram",
		"quartermaster_federation_cluster_ready":           "gauge",
		"quartermaster_federation_held_removals":           "gauge",
		"quartermaster_federation_pending_removals":        "gauge",
		"quartermaster_federation_replica_writes_total":    "counter",
		"quartermaster_federation_written_off_removals":    "gauge",
		"quartermaster_informer_last_activity_age_seconds": "gauge",
		"rest_client_rate_limiter_duration_seconds":        "histogram",
	}
)

// describe adds what is registered to the list.
func describe(t *testing.T, list map[string]string, registry metrics.KubeRegistry, own bool) {
	t.Helper()
	gathered, err := registry.Gather()
	assert.NoError(t, err)
	types := map[string]string{}       // by name
	values := map[[2]string][]string{} // by name and label
	for _, family := range gathered {
		types[family.GetName()] = strings.ToLower(family.GetType().String())
		for _, metric := range family.GetMetric() {
			for _, label := range metric.GetLabel() {
				key := [2]string{family.GetName(), label.GetName()}
				values[key] = append(values[key], label.GetValue())
			}
		}
	}
	described := make(chan *prometheus.Desc)
	go func() {
		defer close(described)
		registry.Gatherer().(prometheus.Collector).Describe(described)
	}()
	for desc := range described {
		match := descText.FindStringSubmatch(desc.String())
		if match == nil {
			t.Fatalf("%s is printed in another way than the test knows", desc)
		}
		// Constant labels come with their values, name="value".
		name, labels := match[1], strings.Split(match[4], ",")
		for constant := range strings.SplitSeq(match[3], ",") {
			labels = append(labels, labelName.FindString(constant))
		}
		slices.Sort(labels)
		help, err := strconv.Unquote(match[2])
		if err != nil {
			t.Fatal(desc, err)
		}
		if !own && !ofLibraries.MatchString(name) {
			continue
		}
		kind, mark := types[name], ""
		if kind == "" {
			if kind = typesOfUnobserved[name]; strings.HasSuffix(name, "_total") {
				kind = "counter"
			}
			if own {
				mark = ", from its first observation"
			}
		}
		if kind == "" {
			t.Errorf("the test does not know the type of %s", name)
		}
		entry := fmt.Sprintf("%s %s%s\n    %s\n", name, kind, mark, help)
		for _, label := range labels {
			if label == "" {
				continue // there are no labels
			}
			entry += "    " + label + ":"
			// What the libraries have observed depends on which other tests have run.
			for _, value := range slices.Compact(slices.Sorted(slices.Values(values[[2]string{name, label}]))) {
				if own && value != "" {
					entry += " " + value
				}
			}
			entry += "\n"
		}
		list[name] = entry
	}
}

// allControllers builds all controllers as Run does, and returns their process.
func allControllers(t *testing.T) *process {
	t.Helper()
	o := newOptions(t, With(builtin.Entries()...))
	assert.NoError(t, o.Parse([]string{"--controllers=" + strings.Join(o.entries.names(), ","), "--compat=" + strings.Join(o.entries.originals(), ","),
		"--csr-approver-ip-ranges=10.0.0.0/8"}))
	o.Client.Master = newAPIServer(t).URL
	assert.NoError(t, o.Check())
	p, err := builtProcess(t, o)
	assert.NoError(t, err)

	// The libraries register their metrics with the first request and the first queue of theirs.
	workqueue.NewNamed("test").ShutDown()
	client, err := p.clientConfigs.typed(p.clientConfigs.named("test"))
	assert.NoError(t, err)
	_, err = client.CoreV1().ConfigMaps("shop").Get(t.Context(), "x", metav1.GetOptions{})
	assert.NoError(t, err)
	return p
}
