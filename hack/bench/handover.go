// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
)

// benchmarkHandovers ends idle leaders by SIGTERM.
func (b *bench) benchmarkHandovers(ctx context.Context) error {
	for _, s := range []struct {
		subject
		n int
	}{
		{managerSubject(b, b.binaries.manager), b.opts.scaled(50)},
		{peerSubject(peer), b.opts.scaled(50)},
		{peerSubject(peerWarm, "-warm"), b.opts.scaled(50)},
		{kcmSubject(kcmGate, "--feature-gates="+releaseGate+"=true"), b.opts.scaled(50)},
		{kcmSubject(kcm), b.opts.scaled(10)},
	} {
		if !b.opts.wants(s.name) {
			continue
		}
		takeovers, err := b.takeovers(ctx, s.subject, syscall.SIGTERM, s.n)
		if err != nil {
			return fmt.Errorf("%s: %w", s.name, err)
		}
		var observed, written, reconciled []float64
		for _, t := range takeovers {
			observed = append(observed, milliseconds(t.observed))
			written = append(written, milliseconds(t.written))
			if t.firstReconcile > 0 {
				reconciled = append(reconciled, milliseconds(t.firstReconcile))
			}
		}
		b.addRow("handover/SIGTERM to new holder, as a watch sees it", s.name, "ms", observed...)
		b.addRow("handover/SIGTERM to new holder, as the audit log has it", s.name, "ms", written...)
		b.addRow("handover/SIGTERM to first reconcile of the new leader", s.name, "ms", reconciled...)
	}
	return nil
}

// benchmarkFailovers ends leaders by SIGKILL, and stops them by SIGSTOP.
func (b *bench) benchmarkFailovers(ctx context.Context) error {
	short := timing{3 * time.Second, 2 * time.Second, 500 * time.Millisecond}
	for _, s := range []struct {
		subject
		timing
		sig syscall.Signal
		n   int
	}{
		{managerSubject(b, b.binaries.manager), timing{}, syscall.SIGKILL, b.opts.scaled(50)},
		{peerSubject(peer), timing{}, syscall.SIGKILL, b.opts.scaled(5)},
		{kcmSubject(kcm), timing{}, syscall.SIGKILL, b.opts.scaled(5)},
		{managerSubject(b, b.binaries.manager), short, syscall.SIGKILL, b.opts.scaled(5)},
		{peerSubject(peer), short, syscall.SIGKILL, b.opts.scaled(5)},
		{managerSubject(b, b.binaries.manager), timing{}, syscall.SIGSTOP, b.opts.scaled(10)},
	} {
		if !b.opts.wants(s.name) {
			continue
		}
		takeovers, err := b.takeovers(ctx, s.withTiming(s.timing), s.sig, s.n)
		if err != nil {
			return fmt.Errorf("%s: %w", s.name, err)
		}
		durations := "15/10/2"
		if s.timing == short {
			durations = "3/2/0.5"
		}
		var observed, reconciled, stale []float64
		for _, t := range takeovers {
			observed, stale = append(observed, t.observed.Seconds()), append(stale, float64(t.staleWrites))
			if t.firstReconcile > 0 {
				reconciled = append(reconciled, milliseconds(t.firstReconcile-t.observed))
			}
		}
		if s.sig == syscall.SIGSTOP {
			b.addRow("failover/"+durations+", writes of a stopped leader after SIGCONT", s.name, "", stale...)
		}
		row := "failover/" + durations + ", " + unix.SignalName(s.sig) + " to new holder"
		b.addRow(row, s.name, "s", observed...)
		b.addRow(row+", and from there to its first reconcile", s.name, "ms", reconciled...)
	}
	return b.restarts(ctx)
}

// restarts kills the only replica and starts the next process of its Pod, at the same port, as a kubelet
// restarts a container.
func (b *bench) restarts(ctx context.Context) (err error) {
	if !b.opts.wants(quartermaster) {
		return nil
	}
	s := managerSubject(b, b.binaries.manager)
	p := &pair{b: b, subject: s, lease: b.watchLease(ctx, s.lease)}
	b.logProgress("%s: starting one replica", s.name)
	if p.leader, err = p.startLeader(ctx, "a"); err != nil {
		return errors.Join(err, p.stop())
	}
	defer func() { err = errors.Join(err, p.stop()) }()
	port := "--secure-port=" + p.leader.manager.SecureURL[strings.LastIndex(p.leader.manager.SecureURL, ":")+1:]
	var times []float64
	for range b.opts.scaled(10) {
		// A renewal passes.
		if err := cluster.Sleep(ctx, 3*time.Second); err != nil {
			return err
		}
		p.leader.Kill()
		mark := p.lease.position()
		next, err := b.run(ctx, s, "a", port)
		if err != nil {
			return err
		}
		p.leader = next
		holder, err := p.lease.awaitHolder(ctx, mark, p.holder)
		if err != nil {
			return fmt.Errorf("%w; the last lines of %s:\n%s", err, next.Name, next.Tail(15))
		}
		p.holder = holder.name
		times = append(times, holder.at.Sub(next.started).Seconds())
		if _, err := next.waitReady(ctx); err != nil {
			return err
		}
	}
	b.addRow("failover/15/10/2, container restarted in the same Pod, its start to new holder", s.name, "s", times...)
	return nil
}

// takeovers ends a leader n times, each time with a fresh standby.
func (b *bench) takeovers(ctx context.Context, s subject, sig syscall.Signal, n int) (all []takeover, err error) {
	if err := b.ensureConfigMap(ctx, "trigger"); err != nil {
		return nil, err
	}
	b.logProgress("%s: starting a leader and a standby", s.name)
	p, err := b.startPair(ctx, s)
	if err != nil {
		return nil, err
	}
	defer func() {
		if stopErr := p.stop(); err == nil {
			err = stopErr
		}
	}()
	for i := range n {
		t, err := p.takeover(ctx, sig)
		if err != nil {
			return nil, err
		}
		all = append(all, t)
		b.logProgress("%s %d/%d: new holder after %s, written after %s, first reconcile after %s, %d writes refused before (load %s)", s.name, i+1, n,
			t.observed.Round(100*time.Microsecond), t.written.Round(100*time.Microsecond), t.firstReconcile.Round(100*time.Microsecond), t.refusedWrites, loadAverage())
		if err := p.startNewStandby(ctx); err != nil {
			return nil, err
		}
	}
	return all, nil
}

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
