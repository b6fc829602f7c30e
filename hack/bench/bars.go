// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"math"
	"strings"
)

// bar is a value that ours must not exceed.
type bar struct {
	name      string
	elsewhere string // values of other programs, measured earlier
	limit     float64
	unit      string
	value     func(t table) (float64, bool)
}

// table looks up rows.
type table []row

func (t table) row(bench, subject string) (row, bool) {
	for _, r := range t {
		if r.Bench == bench && r.Subject == subject {
			return r, true
		}
	}
	return row{}, false
}

type statistic func(row) float64

func median(r row) float64  { return r.Median }
func p99(r row) float64     { return r.P99 }
func highest(r row) float64 { return r.Max }

// of returns a statistic of one row.
func of(bench, subject string, s statistic) func(table) (float64, bool) {
	return func(t table) (float64, bool) {
		r, ok := t.row(bench, subject)
		return s(r), ok
	}
}

// both combines two values.
func both(a, b func(table) (float64, bool), combine func(a, b float64) float64) func(table) (float64, bool) {
	return func(t table) (float64, bool) {
		x, okX := a(t)
		y, okY := b(t)
		return combine(x, y), okX && okY
	}
}

func minus(a, b float64) float64 { return a - b }
func ratio(a, b float64) float64 { return a / b }

// apart returns by how many percent a differs from b.
func apart(a, b float64) float64 { return 100 * math.Abs(a-b) / b }

// besidePeer returns what a row of widgets has for ours in proportion to controller-runtime's.
func besidePeer(row string) func(table) (float64, bool) {
	row = "widgets/10000 Widgets, " + row
	return both(of(row, ours, median), of(row, peer, median), ratio)
}

func bars() []bar {
	sets, large := dataSets(1), "scale/"+largeSet(1).name+", "
	steady := func(set int, subject string) func(table) (float64, bool) {
		return of("memory/"+sets[set].name+", RSS steady", subject, median)
	}
	peak := func(set int, subject string) func(table) (float64, bool) {
		return of("memory/"+sets[set].name+", RSS peak since the start", subject, highest)
	}
	const leader, needsLeader, standby = ours + ": leader", oursNeeds + ": leader", ours + ": warm standby"
	const peerLeader, secureLeader, peerStandby = peer + ": leader", peerSecure + ": leader", peerWarm + ": standby"
	return []bar{
		{"graceful hand-over, signal to new holder, p99", "kube-controller-manager 17.6 s, with its alpha gate 0.4 to 1.8 s; controller-runtime with ReleaseOnCancel median 2.0 s, worst 3.3 s",
			50, "ms", of("handover/SIGTERM to new holder, as a watch sees it", ours, p99)},
		{"graceful hand-over, signal to first reconcile, p99", "controller-runtime with EnableWarmup median 2.0 s, worst 2.7 s; without 2.4 s, 3.7 s",
			100, "ms", of("handover/SIGTERM to first reconcile of the new leader", ours, p99)},
		{"SIGKILL at 15/10/2 to new holder, p99", "kube-controller-manager 17.8 to 18.3 s; controller-runtime 16.6 to 18.9 s",
			0.5, "s", of("failover/15/10/2, SIGKILL to new holder", ours, p99)},
		{"the same, median", "", 0.1, "s", of("failover/15/10/2, SIGKILL to new holder", ours, median)},
		{"from there to its first reconcile, p99", "", 15, "ms", of("failover/15/10/2, SIGKILL to new holder, and from there to its first reconcile", ours, p99)},
		{"SIGSTOP at 15/10/2 to new holder, worst", "kube-controller-manager: until the Lease has expired, and 899 writes in three pauses of its former leader",
			6, "s", of("failover/15/10/2, SIGSTOP to new holder", ours, highest)},
		{"all packets of the leader dropped at 15/10/2 to new holder, worst", "kube-controller-manager, controller-runtime: until the Lease has expired",
			6, "s", of("network/15/10/2, all packets of the leader dropped to new holder", ours, highest)},
		{"its writes when they pass again", "", 0, "", of("network/15/10/2, writes of a leader without a network when it is back", ours, highest)},
		{"replicas do not reach each other, changes of leader", "", 0, "", of("network/replicas do not reach each other, changes of leader", ours, highest)},
		{"container restarted in the same Pod, its start to new holder, worst", "as after a crash", 1, "s",
			of("failover/15/10/2, container restarted in the same Pod, its start to new holder", ours, highest)},
		{"writes of a stopped leader after SIGCONT", "", 0, "", of("failover/15/10/2, writes of a stopped leader after SIGCONT", ours, highest)},
		{"SIGKILL at 3/2/0.5, worst", "unsafe in client-go", 3.1, "s", of("failover/3/2/0.5, SIGKILL to new holder", ours, highest)},
		{"idle standby, requests but watches, worst minute", "kube-controller-manager 18.7, controller-runtime 18.4",
			1, "per minute", of("idle/standby, requests but watches", ours, highest)},
		{"idle standby, CPU time", "without early take-over 1.2 ms", 1.5, "ms per second", of("idle/standby, CPU time", ours, median)},
		{"idle standby, RSS, more than without early take-over", "", 2, "MiB",
			both(of("idle/standby, RSS", ours, median), of("idle/standby, RSS", oursLate, median), minus)},
		{"idle leader, requests but watches, median", "30, both; ours asks once a minute whether its fence stands", 32, "per minute", of("idle/leader, requests but watches", ours, median)},
		{"one change, ConfigMap update to Deployment patched, median", "Reloader 9.6 ms", 8, "ms", of("reload/one change, update received to patch written, by the audit log", ours, median)},
		{"the same, p99", "Reloader 16 ms", 16, "ms", of("reload/one change, update received to patch written, by the audit log", ours, p99)},
		{"one change, sent to patch seen, of what that takes without a controller, median", "8 ms are a third more than the 6 ms that it takes on this machine at its best", 1.33, "times",
			both(of("reload/one change, sent to patch seen by a watch", ours, median), of("reload/"+floorRow, apiserver, median), ratio)},
		{"one change, API requests", "Reloader 7, 5 of them LISTs of whole namespaces", 2, "requests", of("reload/one change, API requests", ours, highest)},
		{"burst of 100 ConfigMaps of 100 Deployments, worst", "Reloader 10.0 s, 700 requests", 1, "s", of("reload/burst of 100 ConfigMaps of 100 Deployments, all patched", ours, highest)},
		{"burst, patches of a Deployment", "", 1, "patches", of("reload/burst, patches of a Deployment", ours, highest)},
		{"changed while down, rolled exactly once: how far from 1", "Reloader: the change is lost", 0, "patches",
			both(of("reload/changed while down, patches of a Deployment concerned", ours, func(r row) float64 { return max(math.Abs(r.Max-1), math.Abs(r.Min-1)) }),
				of("reload/changed while down, patches after a second start", ours, highest), func(a, b float64) float64 { return a + b })},
		{"one Secret to 200 namespaces, created, worst", "replicator 38.0 s", 2, "s", of("replication/one Secret to 200 namespaces, all created", ours, highest)},
		{"the same, updated", "replicator 38.0 s", 2, "s", of("replication/one Secret to 200 namespaces, all updated", ours, highest)},
		{"one Secret to 2,000 namespaces, created, worst", "", 20, "s", of("replication/one Secret to 2000 namespaces, all created", ours, highest)},
		{"the same, updated", "", 20, "s", of("replication/one Secret to 2000 namespaces, all updated", ours, highest)},
		{"the same, PATCH by another user meanwhile / before, median", "", 2, "times", both(
			of("replication/one Secret to 2000 namespaces, PATCH by another user meanwhile", ours, median),
			of("replication/one Secret to 2000 namespaces, PATCH by another user before", ours, median), ratio)},
		{"pull, source updated to target updated, median", "replicator 4.4 ms", 4.4, "ms", of("replication/pull, source updated to target updated as a watch sees it", ours, median)},
		{"the same, p99", "replicator 9.3 ms", 9.3, "ms", of("replication/pull, source updated to target updated as a watch sees it", ours, p99)},
		{"requests of a new leader for copies in order", "replicator rewrites all", 0, "requests", func(t table) (float64, bool) {
			for _, r := range t {
				if strings.HasPrefix(r.Bench, "replication/a new leader among ") {
					return r.Max, true
				}
			}
			return 0, false
		}},
		{"RSS growth by 5,000 + 5,000 of 4 KiB, with replication", "replicator 154 MiB", 12, "MiB", of("replication/RSS growth by 5000 Secrets and 5000 ConfigMaps of 4 KiB", oursReplication, highest)},
		{"10,000 Widgets with two objects each, start to all reconciled / controller-runtime's in the same run", "", 1, "", besidePeer("start to all reconciled")},
		{"the same, RSS steady", "", 1, "", besidePeer("RSS steady")},
		{"the same, RSS peak since the start", "", 1, "", besidePeer("RSS peak since the start")},
		{"the same, API requests per Widget", "", 1, "", besidePeer("API requests per Widget")},
		{"empty cluster, leader", "kube-controller-manager 75 MiB, standby 71.5", 70, "MiB", steady(0, leader)},
		{"empty cluster, leader / controller-runtime's with secure metrics in the same run", "",
			1, "", both(steady(0, leader), steady(0, secureLeader), ratio)},
		{"5,000 + 5,000 of 4 KiB + 500 Deployments, leader with the needs of replication", "Reloader 126; replicator 188; controller-runtime 117; kube-controller-manager 121 MiB",
			70.4, "MiB", steady(1, needsLeader)}, // 64 and a tenth
		{"growth to that from the empty cluster", "Reloader 90; replicator 154; controller-runtime 87; kube-controller-manager 46 MiB",
			15, "MiB", both(steady(1, needsLeader), steady(0, needsLeader), minus)},
		{"CPU time of 10,000 updates at 5,000 + 5,000 + 500, leader / controller-runtime's in the same run", "controller-runtime 1.9 s", 1, "",
			both(of("memory/"+sets[1].name+", CPU time of 10,000 updates", leader, median),
				of("memory/"+sets[1].name+", CPU time of 10,000 updates", peerLeader, median), ratio)},
		{"peak since the start / steady, leader with the needs of replication", "controller-runtime 128 MiB / 117 MiB", 1.3, "", both(peak(1, needsLeader), steady(1, needsLeader), ratio)},
		{"per Secret of 1 KiB, leader with the needs of replication", "controller-runtime about 8 KiB of one of 4 KiB", 477, "bytes", // 434 and a tenth
			of("memory/"+sets[2].name+", RSS growth per object", needsLeader, median)},
		{"warm standby, off the leader", "controller-runtime 117 MiB (cold: 28)", 5, "%", both(steady(1, standby), steady(1, leader), apart)},
		{"warm standby at 5,000 + 5,000 of 4 KiB + 500 Deployments", "without handlers on a standby 62", 64, "MiB", steady(1, standby)},
		{"new holder to first reconcile, 50,000 Secrets of 1 KiB and 500 Deployments, median", "controller-runtime with EnableWarmup 6 ms; handlers registered on leading 148 ms",
			10, "ms", of("memory/"+sets[2].name+", with 500 Deployments, new holder to first reconcile", standby, median)},
		{"the same, to all Deployments looked at, worst", "", 100, "ms",
			of("memory/"+sets[2].name+", with 500 Deployments, new holder to all Deployments looked at", standby, highest)},
		{"growth without the needs of replication, burst of reloads included", "Reloader 123 MiB", 10, "MiB",
			both(of("memory/"+sets[1].name+", RSS after a burst of 100 reloads", leader, highest), steady(0, leader), minus)},
		{"200,000 Secrets of 256 bytes, start to ready, warm standby / controller-runtime's in the same run", "controller-runtime with EnableWarmup 4.6 s", 1, "",
			both(of(large+"start to ready", standby, median), of(large+"start to ready", peerStandby, median), ratio)},
		{"the same, new holder to first reconcile, median", "controller-runtime with EnableWarmup 4 ms; handlers registered on leading 490 ms", 10, "ms",
			of(large+"new holder to first reconcile", standby, median)},
		{"the same, RSS peak since the start, leader", "controller-runtime with EnableWarmup 654 MiB", 150, "MiB", of(large+"RSS peak since the start", leader, highest)},
		{"the same, RSS steady, leader", "controller-runtime with EnableWarmup 654 MiB", 130, "MiB", of(large+"RSS steady", leader, median)},
	}
}
