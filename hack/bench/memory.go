// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"syscall"
	"time"

	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
)

const (
	sampleInterval = time.Second
	samples        = 10
)

// measuredProcess is a resident process of the memory benchmark.
type measuredProcess struct {
	subject
	row       string // the subject's name in the table
	slot      string
	leads     bool
	extraArgs []string // arguments in addition to the subject's

	*process
	pair *pair
}

// startsMeasured reports whether starts and takeovers of the process are measured.
func (m *measuredProcess) startsMeasured() bool { return !m.leads && m.name != kcm }

// measuredProcesses returns the processes with the given rows, all if rows is nil, in the order in which
// they start, so that the leaders lead. They run at the same time: the memory of one does not
// depend on the others, and all see the same cluster.
func (b *bench) measuredProcesses(rows []string) []*measuredProcess {
	manager := managerSubject(b, b.binaries.manager)
	controllerRuntime, controllerManager := peerSubject(peer), kcmSubject(kcm)
	all := []*measuredProcess{
		{subject: manager, row: quartermaster + ": leader", slot: "a", leads: true},
		{subject: manager, row: quartermaster + ": warm standby", slot: "b"},
		{subject: manager, row: quartermaster + ": cold standby", slot: "c", extraArgs: []string{"--standby=cold"}},
		{subject: controllerRuntime, row: peer + ": leader", slot: "a", leads: true},
		{subject: controllerRuntime, row: peerWarm + ": standby", slot: "b", extraArgs: []string{"-warm"}},
		{subject: controllerRuntime, row: peer + ": standby", slot: "c"},
		{subject: controllerManager, row: kcm + ": leader", slot: "a", leads: true},
		{subject: controllerManager, row: kcm + ": standby", slot: "b"},
	}
	var wanted []*measuredProcess
	for _, m := range all {
		if b.opts.wants(m.row) && (rows == nil || slices.Contains(rows, m.row)) {
			wanted = append(wanted, m)
		}
	}
	return wanted
}

// benchmarkMemory measures the memory of caches, on an empty cluster and on two full ones.
func (b *bench) benchmarkMemory(ctx context.Context) error {
	for name, path := range map[string]string{quartermaster: b.binaries.manager, peer: b.binaries.peer,
		kcm: b.cluster.Binary("kube-controller-manager")} {
		if b.opts.wants(name) {
			b.addRow("memory/size of the binary, stripped", name, "MiB", mebibytes(path))
		}
	}
	return b.measureDataSets(ctx, "memory", b.opts.dataSets(), nil)
}

// benchmarkScale measures how the manager and controller-runtime handle very many Secrets.
func (b *bench) benchmarkScale(ctx context.Context) error {
	sets := []dataSet{b.opts.largeSet()}
	if len(b.baseline) == 0 { // otherwise memory has measured it
		sets = append(b.opts.dataSets()[:1], sets...)
	}
	return b.measureDataSets(ctx, "scale", sets,
		[]string{quartermaster + ": leader", quartermaster + ": warm standby", peer + ": leader", peerWarm + ": standby"})
}

// measureDataSets measures the processes of the given rows, all if nil, on one data set after the other.
func (b *bench) measureDataSets(ctx context.Context, part string, sets []dataSet, rows []string) error {
	if err := b.ensureConfigMap(ctx, "trigger"); err != nil {
		return err
	}
	for i := range dataNamespaces {
		if err := b.createNamespace(ctx, dataNamespace(i)); err != nil {
			return err
		}
	}
	for _, d := range sets {
		d.rowPrefix = part + "/" + d.name + ", "
		if err := b.deleteObjects(ctx); err != nil { // deletes the data set before
			return err
		}
		b.logProgress("%s: filling the cluster (load %s)", d.name, loadAverage())
		if err := b.createDataSet(ctx, d); err != nil {
			return err
		}
		if err := b.measureMemory(ctx, d, b.measuredProcesses(rows)); err != nil {
			return fmt.Errorf("%s: %w", d.name, err)
		}
	}
	return nil
}

// measureMemory runs the processes on one data set.
func (b *bench) measureMemory(ctx context.Context, d dataSet, all []*measuredProcess) (err error) {
	defer func() {
		for _, m := range all {
			if m.process != nil {
				err = errors.Join(err, m.Stop(context.Background(), stopGrace))
			}
		}
	}()
	if err := b.startAll(ctx, all); err != nil {
		return err
	}
	if err := b.scrape(ctx, all); err != nil {
		return err
	}
	b.logProgress("%s: all started, waiting for %s", d.name, b.opts.settle)
	if err := cluster.Sleep(ctx, b.opts.settle); err != nil {
		return err
	}
	if err := b.addResident(ctx, d, all); err != nil {
		return err
	}
	if d.objects() > 0 {
		if err := b.addCPU(ctx, d, all); err != nil {
			return err
		}
	}
	if d.deployments > 0 {
		if err := b.addBurst(ctx, d, all); err != nil {
			return err
		}
	}
	return b.addStarts(ctx, d, all)
}

// startAll starts all one after the other, each when its predecessor is ready.
func (b *bench) startAll(ctx context.Context, all []*measuredProcess) (err error) {
	leaders := map[string]*pair{}
	for _, m := range all {
		b.logProgress("Starting %s", m.row)
		if m.leads {
			m.pair = &pair{b: b, subject: m.subject, lease: b.watchLease(ctx, m.lease)}
			if m.process, err = m.pair.startLeader(ctx, m.slot); err != nil {
				return err
			}
			m.pair.leader = m.process
			leaders[m.lease] = m.pair
		} else {
			p := &pair{b: b, subject: m.subject}
			if m.process, err = p.startStandby(ctx, m.slot, m.extraArgs...); err != nil {
				return err
			}
			m.pair = leaders[m.lease]
		}
	}
	return nil
}

// addResident samples the memory of all, and compares it with that on the empty cluster.
func (b *bench) addResident(ctx context.Context, d dataSet, all []*measuredProcess) error {
	values, anonymous, peaks := map[string][]float64{}, map[string][]float64{}, map[string]float64{}
	for range samples {
		for _, m := range all {
			r, err := readResidence(m.PID())
			if err != nil {
				return fmt.Errorf("%s: %w", m.row, err)
			}
			values[m.row] = append(values[m.row], r.current)
			anonymous[m.row] = append(anonymous[m.row], r.anonymous)
			peaks[m.row] = r.peak
		}
		if err := cluster.Sleep(ctx, sampleInterval); err != nil {
			return err
		}
	}
	for _, m := range all {
		steady := b.addRow(d.rowPrefix+"RSS steady", m.row, "MiB", values[m.row]...)
		b.addRow(d.rowPrefix+"RSS steady, of it not the program's file", m.row, "MiB", anonymous[m.row]...)
		b.addRow(d.rowPrefix+"RSS peak since the start", m.row, "MiB", peaks[m.row])
		if d.objects() == 0 {
			b.baseline[m.row] = steady.Median
			continue
		}
		b.addRow(d.rowPrefix+"RSS growth per object", m.row, "bytes", (steady.Median-b.baseline[m.row])*(1<<20)/float64(d.objects()))
	}
	return nil
}

// scrape fetches the metrics of all once, with a token. Their memory then includes the
// authentication and authorization of a scraper in use.
func (b *bench) scrape(ctx context.Context, all []*measuredProcess) error {
	client, err := b.scraper(ctx)
	if err != nil {
		return err
	}
	defer client.CloseIdleConnections()
	for _, m := range all {
		if m.metricsURL == "" {
			continue
		}
		// The metrics may be available a moment after it is ready.
		if err := eventually(ctx, 100*time.Millisecond, "the metrics of "+m.row, func(context.Context) error {
			_, err := get(client, m.metricsURL)
			return err
		}); err != nil {
			return err
		}
	}
	return nil
}

// addCPU measures the CPU time of all while unrelated objects are updated.
func (b *bench) addCPU(ctx context.Context, d dataSet, all []*measuredProcess) error {
	cpuTimes := func() (map[string]float64, error) {
		seconds := map[string]float64{}
		for _, m := range all {
			var err error
			if seconds[m.row], err = cpuSeconds(m.PID()); err != nil {
				return nil, err
			}
		}
		return seconds, nil
	}
	before, err := cpuTimes()
	if err != nil {
		return err
	}
	updates := b.opts.scaled(10000)
	took, err := b.updateObjects(ctx, d, updates)
	if err != nil {
		return err
	}
	if err := cluster.Sleep(ctx, quiescence); err != nil {
		return err
	}
	after, err := cpuTimes()
	if err != nil {
		return err
	}
	b.logProgress("%s: %d updates in %s", d.name, updates, took.Round(time.Second))
	for _, m := range all {
		b.addRow(d.rowPrefix+"CPU time of 10,000 updates", m.row, "s", (after[m.row]-before[m.row])*10000/float64(updates))
	}
	return nil
}

// addBurst changes the ConfigMaps of 100 Deployments and measures our leader's memory once all are
// rolled.
func (b *bench) addBurst(ctx context.Context, d dataSet, all []*measuredProcess) error {
	n := min(workloadCount, d.deployments, d.configMaps)
	for _, m := range all {
		if m.name != quartermaster || !m.leads {
			continue
		}
		audit, err := b.tailAudit()
		if err != nil {
			return err
		}
		if err := parallel(ctx, 16, n, func(ctx context.Context, i int) error {
			return b.changeConfigMap(ctx, dataNamespace(i), dataName("config", i))
		}); err != nil {
			return err
		}
		patches := func(e auditv1.Event) bool {
			return m.madeRequest(e) && e.Stage == auditv1.StageResponseComplete && e.Verb == "patch" && hasResource(e, "deployments")
		}
		if err := eventually(ctx, 100*time.Millisecond, "the patches of the burst", func(context.Context) error {
			got, err := audit.count(patches)
			if err == nil && got < n {
				err = fmt.Errorf("%d of %d", got, n)
			}
			return err
		}); err != nil {
			return err
		}
		if err := cluster.Sleep(ctx, quiescence); err != nil {
			return err
		}
		r, err := readResidence(m.PID())
		if err != nil {
			return err
		}
		b.addRow(d.rowPrefix+"RSS after a burst of 100 reloads", m.row, "MiB", r.current)
	}
	return nil
}

// addStarts measures warm and cold starts and takeovers of ours and of controller-runtime.
func (b *bench) addStarts(ctx context.Context, d dataSet, all []*measuredProcess) error {
	for _, m := range all { // the others would take over
		if m.leads {
			continue
		}
		if err := m.Stop(ctx, stopGrace); err != nil {
			return err
		}
	}
	// In turn, so that an hour in which the machine is slow slows them alike.
	ready := map[string][]float64{}
	for range b.opts.scaled(5) {
		for _, m := range all {
			if !m.startsMeasured() {
				continue
			}
			p, err := b.run(ctx, m.subject, m.slot, m.extraArgs...)
			if err != nil {
				return err
			}
			took, err := p.waitReady(ctx)
			if err != nil {
				return err
			}
			ready[m.row] = append(ready[m.row], took.Seconds())
			if err := p.Stop(ctx, stopGrace); err != nil {
				return err
			}
		}
	}
	for _, m := range all {
		if m.startsMeasured() {
			b.addRow(d.rowPrefix+"start to ready", m.row, "s", ready[m.row]...)
		}
	}
	if d.lateDeployments > 0 {
		if err := b.createDeployments(ctx, d.lateDeployments); err != nil {
			return err
		}
		if err := cluster.Sleep(ctx, quiescence); err != nil { // the leaders write to them
			return err
		}
		d.deployments += d.lateDeployments
		d.rowPrefix += fmt.Sprintf("with %d Deployments, ", d.lateDeployments)
	}
	for _, m := range all {
		if !m.startsMeasured() {
			continue
		}
		var reconciled, caughtUp []float64
		for range b.opts.scaled(5) {
			if err := m.pair.startNewStandby(ctx, m.extraArgs...); err != nil {
				return err
			}
			t, err := m.pair.takeover(ctx, syscall.SIGTERM)
			if err != nil {
				return err
			}
			if t.firstReconcile > 0 {
				reconciled = append(reconciled, milliseconds(t.firstReconcile-max(t.written, t.created)))
			}
		}
		b.addRow(d.rowPrefix+"new holder to first reconcile", m.row, "ms", reconciled...)
		if m.name != quartermaster || m.extraArgs != nil || d.deployments == 0 {
			continue
		}
		for range b.opts.scaled(5) {
			if err := m.pair.startNewStandby(ctx, m.extraArgs...); err != nil {
				return err
			}
			took, err := m.pair.catchUp(ctx, d.deployments)
			if err != nil {
				return err
			}
			caughtUp = append(caughtUp, milliseconds(took))
		}
		b.addRow(d.rowPrefix+"new holder to all Deployments looked at", m.row, "ms", caughtUp...)
	}
	for _, m := range all {
		if m.leads { // those that lead now
			m.process = m.pair.leader
		}
	}
	return nil
}
