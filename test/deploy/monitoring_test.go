// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package deploy

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

type alert struct {
	Alert, Expr, For    string
	Labels, Annotations map[string]string
}

func ruleAlerts(t *testing.T, o *unstructured.Unstructured) []alert {
	t.Helper()
	var rule struct {
		Spec struct{ Groups []struct{ Rules []alert } }
	}
	text, err := o.MarshalJSON()
	if err == nil {
		err = json.Unmarshal(text, &rule)
	}
	assert.NoError(t, err)
	var all []alert
	for _, group := range rule.Spec.Groups {
		all = append(all, group.Rules...)
	}
	return all
}

// metric is a metric in a list, or on a manager's page.
type metric struct {
	Type, Help string
	Labels     []string // sorted, without those that Prometheus adds
}

// listedMetrics reads the list of pkg/app. later are the metrics that have no series in the beginning.
func listedMetrics(t *testing.T) (list map[string]metric, later map[string]bool) {
	t.Helper()
	text, err := os.ReadFile("../../pkg/app/testdata/metrics.golden")
	assert.NoError(t, err)
	list, later = map[string]metric{}, map[string]bool{}
	name := ""
	for line := range strings.Lines(string(text)) {
		text, indented := strings.CutPrefix(strings.TrimSuffix(line, "\n"), "    ")
		if !indented {
			first, mark, _ := strings.Cut(text, ", ")
			n, kind, _ := strings.Cut(first, " ")
			name, list[n], later[n] = n, metric{Type: kind}, mark != ""
			continue
		}
		m := list[name]
		if m.Help == "" {
			m.Help = text
		} else {
			label, _, _ := strings.Cut(text, ":")
			m.Labels = append(m.Labels, label)
		}
		list[name] = m
	}
	if len(list) < 60 {
		t.Fatalf("%d metrics are listed: the test does not see them", len(list))
	}
	return list, later
}

var (
	comment         = regexp.MustCompile(`^# (HELP|TYPE) (\S+) (.*)`)
	series          = regexp.MustCompile(`^([a-z0-9_]+)(?:\{(.*)\})? `)
	label           = regexp.MustCompile(`([a-z_]+)="(?:[^"\\]|\\.)*"`)
	histogramSuffix = regexp.MustCompile(`_(bucket|sum|count)$`)
)

// exportedMetrics reads a manager's page. A metric whose series differ in their labels has no help.
func exportedMetrics(page string) map[string]metric {
	all := map[string]metric{}
	seen := map[string]bool{}
	for line := range strings.Lines(page) {
		if match := comment.FindStringSubmatch(line); match != nil {
			m := all[match[2]]
			if match[1] == "HELP" {
				m.Help = match[3]
			} else {
				m.Type = match[3]
			}
			all[match[2]] = m
			continue
		}
		match := series.FindStringSubmatch(line)
		if match == nil {
			continue
		}
		name := match[1]
		if all[name].Type == "" {
			name = histogramSuffix.ReplaceAllString(name, "")
		}
		var labels []string
		for _, l := range label.FindAllStringSubmatch(match[2], -1) {
			if l[1] != "le" {
				labels = append(labels, l[1])
			}
		}
		slices.Sort(labels)
		m := all[name]
		if seen[name] && !slices.Equal(labels, m.Labels) {
			m.Help = ""
		}
		seen[name], m.Labels = true, labels
		all[name] = m
	}
	return all
}

// listed matches the names of the metrics that the list has.
var listed = regexp.MustCompile(`^(quartermaster|informer|process|rest_client|workqueue)_`)

func TestMetricsAreThoseListed(t *testing.T) {
	ctx := fleet.Context(t)
	installFederation(ctx, t)
	shared.InstallWith(ctx, t, "compat-reloader", "replication", "replication-compat", "ttl-chosen-types", "ttl-every-type", "ttl-compat", "federation", "csr-approver", "scale-schedule", "scale-schedule-compat")
	m := shared.RunLeader(ctx, t, "--csr-approver-ip-ranges=10.0.0.0/8")
	token, err := shared.AdminToken(ctx)
	assert.NoError(t, err)
	list, later := listedMetrics(t)
	var exported map[string]metric
	fleet.Eventually(ctx, t, func() error {
		_, page, err := fleet.Get(m.SecureURL+"/metrics", token)
		if err != nil {
			return err
		}
		exported = exportedMetrics(page)
		for name := range list {
			if _, ok := exported[name]; !ok && strings.HasPrefix(name, "quartermaster_") && !later[name] {
				return fmt.Errorf("the manager does not export %s", name)
			}
		}
		return nil
	})
	for name, got := range exported {
		if listed.MatchString(name) {
			if diff := cmp.Diff(list[name], got); diff != "" {
				t.Errorf("%s (-listed +exported):\n%s", name, diff)
			}
		}
	}
	for _, name := range []string{"workqueue_depth", "rest_client_requests_total", "process_resident_memory_bytes"} {
		if exported[name].Type == "" {
			t.Errorf("the manager does not export %s", name)
		}
	}
}

func TestAlertsAreExplained(t *testing.T) {
	ctx := fleet.Context(t)
	runbook, err := os.ReadFile("../../docs/operate/alerts.md")
	assert.NoError(t, err)
	count := 0
	for _, o := range parseObjects(t, render(ctx, t, overlay(t, "monitoring"))) {
		if o.GetKind() != "PrometheusRule" {
			continue
		}
		for _, a := range ruleAlerts(t, o) {
			count++
			if a.Labels["severity"] == "" || a.Annotations["summary"] == "" || a.Annotations["description"] == "" {
				t.Errorf("%s lacks its severity, summary or description", a.Alert)
			}
			if want := "docs/operate/alerts.md#" + strings.ToLower(a.Alert); !strings.HasSuffix(a.Annotations["runbook_url"], want) {
				t.Errorf("%s: runbook_url is %q, want ...%s", a.Alert, a.Annotations["runbook_url"], want)
			}
			severity := strings.ToUpper(a.Labels["severity"][:1]) + a.Labels["severity"][1:]
			delay := "at once"
			if n := len(a.For); n > 0 {
				delay = "after " + a.For[:n-1] + map[string]string{"s": " s", "m": " min", "h": " h"}[a.For[n-1:]]
			}
			begin := "\n## " + a.Alert + "\n\n" + severity + ", " + delay + ". **"
			_, urgency, found := strings.Cut(string(runbook), begin)
			if !found {
				t.Errorf("docs/operate/alerts.md has no section that begins with %q", begin)
			}
			canWait := severity == "Warning" && (strings.HasPrefix(urgency, "Can wait.**\n") || strings.HasPrefix(urgency, "Can wait**, unless "))
			if found && !canWait && !strings.HasPrefix(urgency, "Act now.**\n") {
				t.Errorf("docs/operate/alerts.md does not say whether %s can wait", a.Alert)
			}
		}
	}
	_, table, _ := strings.Cut(string(runbook), "\n## More alerts\n")
	for _, o := range parseObjects(t, render(ctx, t, filepath.Join(deployDir, "examples", "more-alerts"))) {
		for _, a := range ruleAlerts(t, o) {
			count++
			if a.Labels["severity"] != "warning" || a.Annotations["summary"] == "" || a.Annotations["description"] == "" ||
				!strings.HasSuffix(a.Annotations["runbook_url"], "docs/operate/alerts.md#more-alerts") {
				t.Errorf("%s lacks its summary or description, is no warning, or has another runbook", a.Alert)
			}
			if !strings.Contains(table, "\n| `"+a.Alert+"` |") {
				t.Errorf("%s is not in the table of docs/operate/alerts.md#more-alerts", a.Alert)
			}
		}
	}
	if count < 30 {
		t.Errorf("%d alerts: the test does not see them", count)
	}
}
