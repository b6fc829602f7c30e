// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package promql tests the queries of the alerts and of the dashboard: they parse, and ask for
// metrics, labels and values that the manager has, as pkg/app lists them.
package promql

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/promql/parser"
	"sigs.k8s.io/yaml"
)

// The files of the chart are copies of those in monitoring, see make generate.
var (
	root       = filepath.Join("..", "..")
	monitoring = filepath.Join(root, "deploy", "components", "monitoring")
)

// metric is a metric in the list of pkg/app.
type metric struct {
	kind   string
	labels map[string][]string // with the values that are listed, if any
}

func listedMetrics(t *testing.T) map[string]metric {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, "pkg", "app", "testdata", "metrics.golden"))
	if err != nil {
		t.Fatal(err)
	}
	list := map[string]metric{"up": {"gauge", map[string][]string{}}} // of Prometheus itself
	name, help := "", false
	for line := range strings.Lines(string(text)) {
		fields := strings.Fields(line)
		switch {
		case !strings.HasPrefix(line, " "):
			name, help = fields[0], true
			list[name] = metric{strings.TrimSuffix(fields[1], ","), map[string][]string{}}
		case help:
			help = false
		default:
			list[name].labels[strings.TrimSuffix(fields[0], ":")] = fields[1:]
		}
	}
	if len(list) < 80 {
		t.Fatalf("%d metrics are listed: the test does not see them", len(list))
	}
	return list
}

// fromPrometheus are the labels that the ServiceMonitor gives to every series.
var fromPrometheus = []string{"job", "instance", "namespace", "service", "pod", "container", "endpoint"}

// query checks an expression against the list.
type query struct {
	list     map[string]metric
	problems []string
	metrics  map[string]bool // that it asks for, without _bucket, _sum and _count
}

func (q *query) problem(format string, args ...any) {
	q.problems = append(q.problems, fmt.Sprintf(format, args...))
}

func parse(list map[string]metric, text string) (q *query, resulting []string) {
	q = &query{list: list, metrics: map[string]bool{}}
	expr, err := parser.NewParser(parser.Options{}).ParseExpr(text)
	if err != nil {
		q.problem("%v", err)
		return q, nil
	}
	return q, q.labels(expr)
}

// labels checks the expression and returns the labels of its result.
func (q *query) labels(node parser.Expr) []string {
	switch e := node.(type) {
	case *parser.NumberLiteral, *parser.StringLiteral:
		return nil
	case *parser.ParenExpr:
		return q.labels(e.Expr)
	case *parser.SubqueryExpr:
		return q.labels(e.Expr)
	case *parser.MatrixSelector:
		return q.labels(e.VectorSelector)
	case *parser.VectorSelector:
		return q.selector(e)
	case *parser.AggregateExpr:
		all := q.labels(e.Expr)
		if e.Without {
			q.problem("the test does not know without")
		}
		q.has(all, "by", e.Grouping)
		return e.Grouping
	case *parser.BinaryExpr:
		return q.binary(e)
	case *parser.Call:
		return q.call(e)
	}
	q.problem("the test does not know %T", node)
	return nil
}

// find returns the metric to which series of that name belong, and their type.
func (q *query) find(series string) (name, kind string, ok bool) {
	for _, suffix := range []string{"_bucket", "_sum", "_count"} {
		if name := strings.TrimSuffix(series, suffix); name != series && q.list[name].kind == "histogram" {
			return name, "counter", true
		}
	}
	m, ok := q.list[series]
	return series, m.kind, ok
}

// selector checks the metric and the matchers. It returns the labels of the series.
func (q *query) selector(e *parser.VectorSelector) []string {
	name, kind, ok := q.find(e.Name)
	if !ok {
		q.problem("the manager has no metric %s", e.Name)
		return nil
	}
	if kind == "histogram" {
		q.problem("%s is a histogram: its series end in _bucket, _sum and _count", e.Name)
	}
	q.metrics[name] = true
	m, all := q.list[name], slices.Clone(fromPrometheus)
	for label := range m.labels {
		all = append(all, label)
	}
	if strings.HasSuffix(e.Name, "_bucket") {
		all = append(all, labels.BucketLabel)
	}
	restricted := false
	for _, matcher := range e.LabelMatchers {
		restricted = restricted || matcher.String() == `job="quartermaster"`
		if matcher.Name == "__name__" {
			continue
		}
		q.has(all, e.Name, []string{matcher.Name})
		if known := m.labels[matcher.Name]; len(known) > 0 {
			for value := range strings.SplitSeq(matcher.Value, "|") {
				if !slices.Contains(known, value) {
					q.problem("%s has no series with %s=%q, only %q", e.Name, matcher.Name, value, known)
				}
			}
		}
	}
	if !restricted {
		q.problem("%s is not restricted to the manager", e.Name)
	}
	return all
}

func (q *query) has(all []string, what string, wanted []string) {
	for _, label := range wanted {
		if !slices.Contains(all, label) {
			q.problem("%s: there is no label %s", what, label)
		}
	}
}

func (q *query) binary(e *parser.BinaryExpr) []string {
	left, right := q.labels(e.LHS), q.labels(e.RHS)
	switch {
	case e.VectorMatching == nil || e.RHS.Type() == parser.ValueTypeScalar:
		return left
	case e.LHS.Type() == parser.ValueTypeScalar:
		return right
	case e.VectorMatching.On:
		q.has(left, "on", e.VectorMatching.MatchingLabels)
		q.has(right, "on", e.VectorMatching.MatchingLabels)
		if e.VectorMatching.Card == parser.CardOneToOne {
			return e.VectorMatching.MatchingLabels
		}
		return left
	}
	q.has(left, e.Op.String(), right)
	q.has(right, e.Op.String(), left)
	return left
}

func (q *query) call(e *parser.Call) []string {
	var all []string
	for _, arg := range e.Args {
		all = append(all, q.labels(arg)...)
	}
	switch e.Func.Name {
	case "rate", "increase":
		if matrix, ok := e.Args[0].(*parser.MatrixSelector); ok {
			series := matrix.VectorSelector.(*parser.VectorSelector).Name
			if _, kind, ok := q.find(series); ok && kind != "counter" {
				q.problem("%s of %s, which is a %s", e.Func.Name, series, kind)
			}
		}
	case "histogram_quantile":
		q.has(all, e.Func.Name, []string{labels.BucketLabel})
		all = slices.DeleteFunc(all, func(label string) bool { return label == labels.BucketLabel })
	case "max_over_time", "min_over_time", "absent":
	default:
		q.problem("the test does not know %s", e.Func.Name)
	}
	return all
}

var (
	inAlert  = regexp.MustCompile(`\$labels\.(\w+)`)
	inLegend = regexp.MustCompile(`\{\{(\w+)\}\}`)
)

// explained checks that the labels that the text names are among those of the result.
func explained(t *testing.T, pattern *regexp.Regexp, text string, all []string) {
	t.Helper()
	for _, match := range pattern.FindAllStringSubmatch(text, -1) {
		if !slices.Contains(all, match[1]) {
			t.Errorf("%q names label %s, and the result of the query has %q", text, match[1], all)
		}
	}
}

func TestAlertsAskForMetricsThatExist(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(monitoring, "alerts.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var rules struct {
		Spec struct {
			Groups []struct {
				Rules []struct {
					Alert, Expr string
					Annotations map[string]string
				}
			}
		}
	}
	if err := yaml.Unmarshal(text, &rules); err != nil {
		t.Fatal(err)
	}
	list, found := listedMetrics(t), 0
	for _, group := range rules.Spec.Groups {
		for _, rule := range group.Rules {
			found++
			t.Run(rule.Alert, func(t *testing.T) {
				q, all := parse(list, rule.Expr)
				for _, problem := range q.problems {
					t.Error(problem)
				}
				for _, annotation := range rule.Annotations {
					explained(t, inAlert, annotation, all)
				}
			})
		}
	}
	if found < 20 {
		t.Errorf("%d alerts: the test does not see them", found)
	}
}

type dashboard struct {
	Templating struct{ List []struct{ Name string } }
	Panels     []struct {
		ID          int
		Type, Title string
		GridPos     struct{ X, Y, W, H int }
		Targets     []struct{ Expr, LegendFormat string }
	}
}

func readDashboard(t *testing.T) (d dashboard, text string) {
	t.Helper()
	content, err := os.ReadFile(filepath.Join(monitoring, "dashboard.json"))
	if err == nil {
		err = json.Unmarshal(content, &d)
	}
	if err != nil {
		t.Fatal(err)
	}
	return d, string(content)
}

// TestPanelsAskForMetricsThatExist also looks for panels of each controller: the metrics that begin
// with its name are below the row with its name.
func TestPanelsAskForMetricsThatExist(t *testing.T) {
	d, _ := readDashboard(t)
	list, row, panels := listedMetrics(t), "", map[string]map[string]bool{}
	for _, p := range d.Panels {
		if p.Type == "row" {
			row, panels[p.Title] = p.Title, map[string]bool{}
			continue
		}
		t.Run(p.Title, func(t *testing.T) {
			if len(p.Targets) == 0 {
				t.Error("it has no query")
			}
			for _, target := range p.Targets {
				q, all := parse(list, strings.ReplaceAll(target.Expr, "$__rate_interval", "5m"))
				for _, problem := range q.problems {
					t.Errorf("%s: %s", target.Expr, problem)
				}
				explained(t, inLegend, target.LegendFormat, all)
				for name := range q.metrics {
					panels[row][name] = true
				}
			}
		})
	}
	controllers := list["quartermaster_controller_reconciles_total"].labels["controller"]
	if len(controllers) < 3 {
		t.Fatalf("the controllers are %q: the test does not see them", controllers)
	}
	for _, controller := range controllers {
		prefix, shown := "quartermaster_"+strings.ReplaceAll(controller, "-", "_")+"_", 0
		for name := range panels[controller] {
			if strings.HasPrefix(name, prefix) {
				shown++
			}
		}
		if shown < 4 {
			t.Errorf("the row %s has panels of %d metrics %s...", controller, shown, prefix)
		}
	}
}

var variable = regexp.MustCompile(`\$\{?(\w+)`)

func TestTheDashboardIsInOrder(t *testing.T) {
	d, text := readDashboard(t)
	used, defined := map[string]bool{"__rate_interval": true}, map[string]bool{"__rate_interval": true}
	for _, match := range variable.FindAllStringSubmatch(text, -1) {
		used[match[1]] = true
	}
	for _, v := range d.Templating.List {
		defined[v.Name] = true
		if !used[v.Name] {
			t.Errorf("nothing uses the variable %s", v.Name)
		}
	}
	for name := range used {
		if !defined[name] {
			t.Errorf("the variable %s is not defined", name)
		}
	}
	at, ids := map[[2]int]string{}, map[int]string{}
	for _, p := range d.Panels {
		if other := ids[p.ID]; other != "" {
			t.Errorf("%s and %s have the same ID", p.Title, other)
		}
		ids[p.ID] = p.Title
		for x := range p.GridPos.W {
			for y := range p.GridPos.H {
				place := [2]int{p.GridPos.X + x, p.GridPos.Y + y}
				if other := at[place]; other != "" || place[0] >= 24 {
					t.Fatalf("%s is over %s or beyond the edge", p.Title, other)
				}
				at[place] = p.Title
			}
		}
	}
}
