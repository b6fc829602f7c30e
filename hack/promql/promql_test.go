// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package promql tests the queries of the alerts and of the dashboard: they parse, and ask for
// metrics, labels and values that the manager has, as pkg/app lists them. Each alert fires and ends.
package promql

import (
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/prometheus/promql/parser"
	"sigs.k8s.io/yaml"
)

// The files of the chart are copies of those in monitoring, see make generate.
var (
	root       = filepath.Join("..", "..")
	monitoring = filepath.Join(root, "deploy", "components", "monitoring")
	moreAlerts = filepath.Join(root, "deploy", "examples", "more-alerts")
)

// metric has the labels of a metric in the list of pkg/app, with the values that are listed, if any.
type metric map[string][]string

// listedMetrics returns the metrics by the names of their series.
func listedMetrics(t *testing.T) map[string]metric {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, "pkg", "app", "testdata", "metrics.golden"))
	if err != nil {
		t.Fatal(err)
	}
	metrics := map[string]metric{
		"up": {}, // of Prometheus itself
		"kube_deployment_status_replicas_unavailable": {"deployment": {"quartermaster"}}, // of kube-state-metrics
		"kube_pod_info": {"node": nil},
	}
	var last metric
	help := false
	for line := range strings.Lines(string(text)) {
		fields := strings.Fields(line)
		switch {
		case !strings.HasPrefix(line, " "):
			last, help = metric{}, true
			if !strings.HasPrefix(fields[1], "histogram") {
				metrics[fields[0]] = last
				continue
			}
			for _, suffix := range []string{"_bucket", "_sum", "_count"} {
				metrics[fields[0]+suffix] = last
			}
		case help:
			help = false
		default:
			last[strings.TrimSuffix(fields[0], ":")] = fields[1:]
		}
	}
	if len(metrics) < 80 {
		t.Fatalf("%d series are listed: the test does not see them", len(metrics))
	}
	return metrics
}

// labelReference matches the labels that an alert or a legend names.
var labelReference = regexp.MustCompile(`\$labels\.(\w+)|\{\{(\w+)\}\}`)

// checkQuery checks a query, and the labels that the texts about its result name. It returns the series
// that the query asks for.
func checkQuery(t *testing.T, metrics map[string]metric, query string, texts ...string) (series []string) {
	t.Helper()
	expr, err := parser.NewParser(parser.Options{}).ParseExpr(query)
	if err != nil {
		t.Errorf("%s: %v", query, err)
		return nil
	}
	// What the ServiceMonitor gives to every series, and what histograms have.
	labels := []string{"__name__", "job", "instance", "namespace", "service", "pod", "container", "endpoint", "le"}
	var used []string
	parser.Inspect(expr, func(node parser.Node, _ []parser.Node) error {
		switch e := node.(type) {
		case *parser.VectorSelector:
			m, ok := metrics[e.Name]
			if !ok {
				t.Errorf("%s: the manager has no series %s", query, e.Name)
			}
			series = append(series, e.Name)
			restricted := false
			for label := range m {
				labels = append(labels, label)
			}
			for _, matcher := range e.LabelMatchers {
				restricted = restricted || matcher.String() == `job="quartermaster"` ||
					strings.HasPrefix(e.Name, "kube_") && matcher.String() == `namespace="kube-system"`
				used = append(used, matcher.Name)
				for value := range strings.SplitSeq(matcher.Value, "|") {
					if known := m[matcher.Name]; len(known) > 0 && !slices.Contains(known, value) {
						t.Errorf("%s: %s has no series with %s=%q, only %q", query, e.Name, matcher.Name, value, known)
					}
				}
			}
			if !restricted {
				t.Errorf("%s: %s is not restricted to the manager", query, e.Name)
			}
		case *parser.AggregateExpr:
			used = append(used, e.Grouping...)
		case *parser.BinaryExpr:
			if e.VectorMatching != nil {
				used = append(used, e.VectorMatching.MatchingLabels...)
			}
		case *parser.Call:
			if e.Func.Name == "rate" || e.Func.Name == "increase" {
				if argument := e.Args[0].String(); !counter.MatchString(argument) {
					t.Errorf("%s: %s of %s, which is no counter", query, e.Func.Name, argument)
				}
			}
		}
		return nil
	})
	for _, text := range texts {
		for _, match := range labelReference.FindAllStringSubmatch(text, -1) {
			used = append(used, match[1]+match[2])
		}
	}
	for _, label := range used {
		if !slices.Contains(labels, label) {
			t.Errorf("%s: there is no label %s", query, label)
		}
	}
	return series
}

var counter = regexp.MustCompile(`^\w+_(total|bucket|sum|count)\b`)

type alert struct {
	Alert, Expr, For string
	Annotations      map[string]string
}

func readAlerts(t *testing.T) (alerts []alert) {
	t.Helper()
	for _, dir := range []string{monitoring, moreAlerts} {
		text, err := os.ReadFile(filepath.Join(dir, "alerts.yaml"))
		if err != nil {
			t.Fatal(err)
		}
		var rules struct {
			Spec struct{ Groups []struct{ Rules []alert } }
		}
		if err := yaml.Unmarshal(text, &rules); err != nil {
			t.Fatal(err)
		}
		for _, group := range rules.Spec.Groups {
			alerts = append(alerts, group.Rules...)
		}
	}
	if len(alerts) < 30 {
		t.Fatalf("%d alerts: the test does not see them", len(alerts))
	}
	return alerts
}

func TestAlertsAskForMetricsThatExist(t *testing.T) {
	metrics := listedMetrics(t)
	for _, alert := range readAlerts(t) {
		checkQuery(t, metrics, alert.Expr, alert.Annotations["summary"], alert.Annotations["description"])
	}
}

// TestPanelsAskForMetricsThatExist also looks for panels of each controller: the metrics that begin
// with its name are below the row with its name.
func TestPanelsAskForMetricsThatExist(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(monitoring, "dashboard.json"))
	if err != nil {
		t.Fatal(err)
	}
	var dashboard struct {
		Panels []struct {
			Type, Title string
			Targets     []struct{ Expr, LegendFormat string }
		}
	}
	if err := json.Unmarshal(text, &dashboard); err != nil {
		t.Fatal(err)
	}
	metrics, row, shown := listedMetrics(t), "", map[string]map[string]bool{}
	for _, p := range dashboard.Panels {
		if p.Type == "row" {
			row, shown[p.Title] = p.Title, map[string]bool{}
		}
		for _, target := range p.Targets {
			for _, name := range checkQuery(t, metrics, strings.ReplaceAll(target.Expr, "$__rate_interval", "5m"), target.LegendFormat) {
				shown[row][name] = true
			}
		}
	}
	controllers := metrics["quartermaster_controller_problem"]["controller"]
	if len(controllers) < 3 {
		t.Fatalf("the controllers are %q: the test does not see them", controllers)
	}
	for _, controller := range controllers {
		prefix, count := "quartermaster_"+strings.ReplaceAll(controller, "-", "_")+"_", 0
		for name := range shown[controller] {
			if strings.HasPrefix(name, prefix) {
				count++
			}
		}
		if count < 3 {
			t.Errorf("the row %s has panels of %d metrics %s...", controller, count, prefix)
		}
	}
}
