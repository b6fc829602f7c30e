// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package promql

import (
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/model/value"
	"github.com/prometheus/prometheus/promql"
	"github.com/prometheus/prometheus/promql/parser"
	"github.com/prometheus/prometheus/storage"
	"github.com/prometheus/prometheus/util/annotations"
)

// incidents are what Prometheus has scraped before, during and after what each alert is for: nothing is
// wrong in the first ten minutes nor at the end. A line has the value of each minute; 0+1x5 are 0, 1, 2, 3,
// 4, 5, and _ is a series that has ended. The prefix quartermaster_, the label job and, of
// kube-state-metrics, the label namespace are left out.
var incidents = map[string][]string{
	"QuartermasterDown":                      {`up{instance="a"} 1x10 0x20 1x10`},
	"QuartermasterNoStandby":                 {`up{instance="a"} 1x60`, `up{instance="b"} 1x10 0x30 1x20`},
	"QuartermasterNoLeader":                  {`leader_election_is_leader 1x10 0x3 1x5`},
	"QuartermasterTwoLeaders":                {`leader_election_is_leader{instance="a"} 1x40`, `leader_election_is_leader{instance="b"} 0x10 1x10 0x20`},
	"QuartermasterLeaderChanges":             {`leader_election_transitions 5x10 6+1x5 11x90`},
	"QuartermasterRenewalsFail":              {`leader_election_renewal_duration_seconds_count{result="error"} 0x10 0+2x20 40x30`},
	"QuartermasterFenceNotEnforced":          {`leader_election_server_fence{state="Absent"} 0x10 1x20 0x10`},
	"QuartermasterLeaderUnreachable":         {`leader_election_leader_process{state="Unreachable"} 0x10 1x20 0x10`},
	"QuartermasterControllerStuck":           {`controller_longest_running_reconcile_seconds 0x10 60+60x15 0x10`},
	"QuartermasterControllerProblem":         {`controller_problem 0x10 1x20 0x10`},
	"QuartermasterControllerRestarts":        {`controller_restarts_total 0x10 0+1x10 10x30`},
	"QuartermasterReconcilesFail":            {`controller_reconciles_total{result="success"} 0+10x150`, `controller_reconciles_total{result="error"} 0x10 0+10x60 600x80`},
	"QuartermasterControllerPanics":          {`controller_panics_total 0x10 1x40`},
	"QuartermasterObjectsLeftOut":            {`informer_misfits 0x10 1x20 0x10`},
	"QuartermasterQueueGrows":                {`workqueue_depth{name="ttl"} 0x10 200x20 0x10`},
	"QuartermasterCacheNotSynced":            {`informer_synced 1x10 0x20 1x10`, `leader_election_is_leader 1x50`},
	"QuartermasterCacheFails":                {`informer_failures_total 0x10 0+1x40 40x40`},
	"QuartermasterForbidden":                 {`rest_client_requests_total{code="403"} 0x10 0+1x40 40x40`},
	"QuartermasterThrottled":                 {`rest_client_rate_limiter_duration_seconds_bucket{le="5"} 0+10x10 100x40 110+10x40`, `rest_client_rate_limiter_duration_seconds_bucket{le="15"} 0+10x92`, `rest_client_rate_limiter_duration_seconds_bucket{le="+Inf"} 0+10x92`},
	"QuartermasterConfigReloadFails":         {`config_reload_reloads_total{result="error"} 0x10 0+1x40 40x40`},
	"QuartermasterConfigReloadLostJob":       {`config_reload_lost_jobs_total 0x10 1x80`},
	"QuartermasterReplicationFails":          {`replication_writes_total{result="error"} 0x10 0+1x40 40x40`},
	"QuartermasterReplicationBehind":         {`replication_targets{state="due"} 0x10 3x40 0x10`},
	"QuartermasterReplicationPatternTimeout": {`replication_problems_total{reason="PatternTimeout"} 0x10 1x80`},
	"QuartermasterScaleScheduleFails":        {`scale_schedule_writes_total{result="conflict"} 0x10 0+1x40 40x50`},
	"QuartermasterTTLDeletionsFail":          {`ttl_deletions_total{result="error"} 0x10 0+1x40 40x40`},
	"QuartermasterTTLRuleFails":              {`ttl_rule_errors_total 0x10 1x80`},
	"QuartermasterTTLBreakerOpen":            {`ttl_breaker_trips_total 0x10 1x40`},
	"QuartermasterCSRApproverWaiting":        {`csr_approver_waiting_requests 0x10 2x80 0x10`},
	"QuartermasterFederationClusterNotReady": {`federation_cluster_ready{cluster="c1"} 1x40`, `federation_cluster_ready{cluster="c2"} 1x10 0x20 1x10`},
	"QuartermasterFederationRemovalsHeld":    {`federation_held_removals{cluster="c2"} 0x10 50x20 0x10`},
	"QuartermasterFederationRemovalsPending": {`federation_pending_removals{cluster="c2"} 0x80`, `federation_held_removals{cluster="c2"} 0x80`, `federation_written_off_removals{cluster="c2"} 0x10 3x50 0x20`},

	"QuartermasterCacheListsAgain":        {`informer_relists_total 0x10 0+1x40 40x40`},
	"QuartermasterClocksDiffer":           {`scale_schedule_clock_skew_seconds 0x40`, `ttl_clock_skew_seconds 1x10 -90x20 1x10`},
	"QuartermasterTTLOverdue":             {`ttl_overdue_objects 0x10 2x40 0x10`},
	"QuartermasterTTLTypeFails":           {`ttl_failing_types 0x10 1x20 0x10`},
	"QuartermasterWorkloadNotScaled":      {`scale_schedule_writes_total{result="error"} 0x10 1x80`},
	"QuartermasterScaleScheduleContested": {`scale_schedule_contested_objects 0x10 1x20 0x10`},
	"QuartermasterAnnotationInvalid":      {`config_reload_invalid_annotations_total 0x40`, `replication_problems_total{reason="InvalidPattern"} 0x10 1x30`},
	"QuartermasterCopyRefused":            {`replication_targets{state="refused"} 0x10 1x20 0x10`},
	"QuartermasterObjectGivenUp":          {`controller_reconciles_total{result="terminal_error"} 0x10 1x40`},
	"QuartermasterObjectsFail":            {`controller_failing_keys 0x10 2x80 0x10`},
	"QuartermasterObjectsBlocked":         {`controller_blocked_keys{instance="a"} 0x10 2x80 0x10`, `controller_blocked_keys{instance="b"} 5x100`, `leader_election_is_leader{instance="a"} 1x100`, `leader_election_is_leader{instance="b"} 0x100`},
	"QuartermasterReplicaNotReady":        {`kube_deployment_status_replicas_unavailable{deployment="quartermaster"} 0x10 1x20 0x10`},
	"QuartermasterReplicasOnOneNode":      {`kube_pod_info{pod="quartermaster-a",node="n1"} 1x60`, `kube_pod_info{pod="quartermaster-b",node="n1"} _x10 1x20 _x30`, `kube_pod_info{pod="quartermaster-b",node="n2"} 1x10 _x20 1x30`},
}

// TestAlertsFireAndEnd evaluates each alert every 5 s, as its group is, with Prometheus' own engine.
func TestAlertsFireAndEnd(t *testing.T) {
	engine := promql.NewEngine(promql.EngineOpts{MaxSamples: 1e6, Timeout: time.Minute, Parser: parser.NewParser(parser.Options{})})
	alerts := readAlerts(t)
	for _, alert := range alerts {
		t.Run(alert.Alert, func(t *testing.T) {
			var all seriesStorage
			for _, line := range incidents[alert.Alert] {
				all = append(all, parse(t, line))
			}
			if len(all) == 0 {
				t.Fatal("there is no incident for it")
			}
			var hold time.Duration
			if alert.For != "" {
				d, err := model.ParseDuration(alert.For)
				if err != nil {
					t.Fatal(err)
				}
				hold = time.Duration(d)
			}
			const step = 5 * time.Second
			query, err := engine.NewRangeQuery(t.Context(), &storage.MockQueryable{MockQuerier: &storage.MockQuerier{SelectMockFunction: all.selectSeries}}, nil, alert.Expr, time.UnixMilli(0), time.UnixMilli(all.end()), step)
			if err != nil {
				t.Fatal(err)
			}
			defer query.Close()
			result, err := query.Exec(t.Context()).Matrix()
			if err != nil {
				t.Fatal(err)
			}
			fired := false
			for _, series := range result {
				pendingSince := series.Floats[0].T // when the condition began to hold
				for i, point := range series.Floats {
					if i > 0 && point.T-series.Floats[i-1].T > step.Milliseconds() {
						pendingSince = point.T
					}
					if point.T-pendingSince < hold.Milliseconds() {
						continue // pending
					}
					fired = true
					if point.T < 10*time.Minute.Milliseconds() || point.T == all.end() {
						t.Fatalf("it fires after %d s, when nothing is wrong", point.T/1000)
					}
				}
			}
			if !fired {
				t.Error("it does not fire")
			}
		})
	}
	if len(incidents) != len(alerts) {
		t.Errorf("%d incidents for %d alerts", len(incidents), len(alerts))
	}
}

// seriesStorage has all series. It is the storage of a query.
type seriesStorage []promql.Series

func parse(t *testing.T, line string) promql.Series {
	t.Helper()
	if !strings.HasPrefix(line, "up") && !strings.HasPrefix(line, "workqueue_") && !strings.HasPrefix(line, "rest_client_") && !strings.HasPrefix(line, "kube_") {
		line = "quartermaster_" + line
	}
	l, values, err := parser.NewParser(parser.Options{}).ParseSeriesDesc(line)
	if err != nil {
		t.Fatal(err)
	}
	s := promql.Series{Metric: labels.NewBuilder(l).Set("job", "quartermaster").Set("namespace", "kube-system").Labels()}
	for minute, v := range values {
		if v.Omitted {
			v.Value = math.Float64frombits(value.StaleNaN)
		}
		s.Floats = append(s.Floats, promql.FPoint{T: int64(minute) * time.Minute.Milliseconds(), F: v.Value})
	}
	return s
}

// end is when the shortest series ends.
func (s seriesStorage) end() (ms int64) {
	for _, series := range s {
		if last := series.Floats[len(series.Floats)-1].T; ms == 0 || last < ms {
			ms = last
		}
	}
	return ms
}

func (s seriesStorage) selectSeries(_ bool, _ *storage.SelectHints, matchers ...*labels.Matcher) storage.SeriesSet {
	set := &selectedSeries{}
	for _, series := range s {
		if !slices.ContainsFunc(matchers, func(m *labels.Matcher) bool { return !m.Matches(series.Metric.Get(m.Name)) }) {
			set.remaining = append(set.remaining, promql.NewStorageSeries(series))
		}
	}
	return set
}

// selectedSeries implements storage.SeriesSet.
type selectedSeries struct {
	current   storage.Series
	remaining []storage.Series
}

func (s *selectedSeries) Next() bool {
	if len(s.remaining) == 0 {
		return false
	}
	s.current, s.remaining = s.remaining[0], s.remaining[1:]
	return true
}

func (s *selectedSeries) At() storage.Series              { return s.current }
func (*selectedSeries) Err() error                        { return nil }
func (*selectedSeries) Warnings() annotations.Annotations { return nil }
