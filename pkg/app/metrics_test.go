// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"
)

// TestMetricsGolden lists the metrics that a manager with all controllers and dialects can export:
// its own, with the values that labels have from the start, and the metrics of libraries that say something
// about it. Its own metrics without series before their first observation are marked. test/deploy
// compares the list with a real manager's /metrics, and hack/promql the alerts and the dashboard with
// the list.
func TestMetricsGolden(t *testing.T) {
	own, libraries := allControllers(t), legacyregistry.DefaultGatherer.(metrics.KubeRegistry)
	list := map[string]string{} // by name
	describe(t, list, own, true)
	describe(t, list, libraries, false)
	var text strings.Builder
	for _, name := range slices.Sorted(maps.Keys(list)) {
		text.WriteString(list[name])
	}
	golden := filepath.Join("testdata", "metrics.golden")
	if *update {
		must(t, os.WriteFile(golden, []byte(text.String()), 0o644))
	}
	want, err := os.ReadFile(golden)
	must(t, err)
	if diff := cmp.Diff(string(want), text.String()); diff != "" {
		t.Errorf("the metrics differ from %s (make generate writes it):\n%s", golden, diff)
	}
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
	must(t, err)
	types := map[string]string{}              // by name
	values := map[[2]string]map[string]bool{} // by name and label
	for _, family := range gathered {
		types[family.GetName()] = strings.ToLower(family.GetType().String())
		for _, metric := range family.GetMetric() {
			for _, label := range metric.GetLabel() {
				key := [2]string{family.GetName(), label.GetName()}
				if values[key] == nil {
					values[key] = map[string]bool{}
				}
				values[key][label.GetValue()] = true
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
			for _, value := range slices.Sorted(maps.Keys(values[[2]string{name, label}])) {
				if own && value != "" {
					entry += " " + value
				}
			}
			entry += "\n"
		}
		list[name] = entry
	}
}

// allControllers builds all controllers as Run does, and returns their registry.
func allControllers(t *testing.T) metrics.KubeRegistry {
	t.Helper()
	o := newOptions(t)
	must(t, o.Parse([]string{"--controllers=" + strings.Join(o.controllerNames(), ","), "--compat=" + strings.Join(o.originals(), ","),
		"--csr-approver-ip-ranges=10.0.0.0/8"}))
	o.Client.Master = newAPIServer(t).URL
	must(t, o.Validate())
	p, err := builtProcess(t, o)
	must(t, err)

	// The libraries register their metrics with the first request and the first queue.
	client, err := p.connection.typed(p.connection.named("test"))
	must(t, err)
	_, err = client.CoreV1().ConfigMaps("shop").Get(t.Context(), "x", metav1.GetOptions{})
	must(t, err)
	workqueue.NewNamed("test").ShutDown()
	return p.registry
}
