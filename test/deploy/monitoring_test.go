// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package deploy

import (
	"encoding/json"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

var (
	// metricInQuery finds the metrics in a PromQL expression by the prefixes of the manager's
	// metrics.
	metricInQuery = regexp.MustCompile(`\b(?:quartermaster|workqueue|rest_client|process)_[a-z0-9_]+`)
	selector      = regexp.MustCompile(`([a-z_]+)\{([^}]*)\}`)
	label         = regexp.MustCompile(`([a-z_]+)(?:=~?|!=|!~)"`)
	series        = regexp.MustCompile(`(?m)^([a-z0-9_]+)(?:\{(.*)\})? `)
)

// queries returns the expressions of the alerts and of the dashboard, by where they are defined.
func queries(t *testing.T, manifests string) map[string]string {
	t.Helper()
	all := map[string]string{}
	for _, o := range objectsOf(t, manifests) {
		switch o.GetKind() + "/" + o.GetName() {
		case "PrometheusRule/quartermaster":
			for _, rule := range alertsOf(t, o) {
				all["alert "+rule.Alert] = rule.Expr
			}
		case "ConfigMap/quartermaster-dashboard":
			text, _, err := unstructured.NestedString(o.Object, "data", "quartermaster.json")
			if err != nil {
				t.Fatal(err)
			}
			var dashboard struct {
				Panels []struct {
					Title   string
					Targets []struct{ Expr string }
				}
			}
			if err := json.Unmarshal([]byte(text), &dashboard); err != nil {
				t.Fatal(err)
			}
			for _, panel := range dashboard.Panels {
				for _, target := range panel.Targets {
					all["panel "+panel.Title+": "+target.Expr] = target.Expr
				}
			}
		}
	}
	if len(all) < 30 {
		t.Fatalf("%d expressions were found: the test does not see them", len(all))
	}
	return all
}

type alert struct {
	Alert, Expr         string
	Labels, Annotations map[string]string
}

func alertsOf(t *testing.T, o *unstructured.Unstructured) []alert {
	t.Helper()
	var rule struct {
		Spec struct{ Groups []struct{ Rules []alert } }
	}
	text, err := o.MarshalJSON()
	if err == nil {
		err = json.Unmarshal(text, &rule)
	}
	if err != nil {
		t.Fatal(err)
	}
	var all []alert
	for _, group := range rule.Spec.Groups {
		all = append(all, group.Rules...)
	}
	return all
}

func TestAlertsAndDashboardAskForMetricsThatExist(t *testing.T) {
	ctx := fleet.Context(t)
	shared.InstallWith(ctx, t, "replication") // which has alerts and panels though it is off by default
	m := shared.RunLeader(ctx, t)
	token, err := shared.AdminToken(ctx)
	if err != nil {
		t.Fatal(err)
	}
	var page string
	fleet.Eventually(ctx, t, func() error {
		if err := fleet.Ready(m); err != nil {
			return err
		}
		_, page, err = fleet.Get(m.SecureURL+"/metrics", token)
		return err
	})
	labels := map[string][]string{} // by metric
	for _, match := range series.FindAllStringSubmatch(page, -1) {
		labels[match[1]] = append(labels[match[1]], "job", "instance", "pod") // added by Prometheus
		for _, l := range label.FindAllStringSubmatch(match[2], -1) {
			labels[match[1]] = append(labels[match[1]], l[1])
		}
	}
	for where, query := range queries(t, render(ctx, t, overlay(t, "monitoring"))) {
		for _, metric := range metricInQuery.FindAllString(query, -1) {
			if labels[metric] == nil {
				t.Errorf("%s: the manager has no metric %s", where, metric)
			}
		}
		for _, match := range selector.FindAllStringSubmatch(query, -1) {
			metric, matchers := match[1], match[2]
			if !strings.Contains(matchers, `job="quartermaster"`) {
				t.Errorf("%s: %s is not restricted to the manager", where, metric)
			}
			for _, l := range label.FindAllStringSubmatch(matchers, -1) {
				if metric != "up" && !slices.Contains(labels[metric], l[1]) {
					t.Errorf("%s: %s has no label %s", where, metric, l[1])
				}
			}
		}
	}
}

func TestEveryAlertIsExplained(t *testing.T) {
	ctx := fleet.Context(t)
	runbook, err := os.ReadFile("../../docs/operate/operating.md")
	if err != nil {
		t.Fatal(err)
	}
	found := 0
	for _, o := range objectsOf(t, render(ctx, t, overlay(t, "monitoring"))) {
		if o.GetKind() != "PrometheusRule" {
			continue
		}
		for _, a := range alertsOf(t, o) {
			found++
			if a.Labels["severity"] == "" || a.Annotations["summary"] == "" || a.Annotations["description"] == "" {
				t.Errorf("%s lacks its severity, summary or description", a.Alert)
			}
			if want := "docs/operate/operating.md#" + strings.ToLower(a.Alert); !strings.HasSuffix(a.Annotations["runbook_url"], want) {
				t.Errorf("%s: runbook_url is %q, want ...%s", a.Alert, a.Annotations["runbook_url"], want)
			}
			if !strings.Contains(string(runbook), "\n### "+a.Alert+"\n") {
				t.Errorf("docs/operate/operating.md has no section %s", a.Alert)
			}
		}
	}
	if found == 0 {
		t.Error("there are no alerts")
	}
}
