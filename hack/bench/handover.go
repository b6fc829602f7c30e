// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"syscall"
	"time"
)

// handovers ends idle leaders by SIGTERM.
func (b *bench) handovers(ctx context.Context) error {
	for _, s := range []struct {
		subject
		n int
	}{
		{managerSubject(b, ours, b.binaries.manager), b.opts.handovers},
		{peerSubject(peer), b.opts.handovers},
		{peerSubject(peerWarm, "-warm"), b.opts.handovers},
		{kcmSubject(kcmGate, "--feature-gates="+releaseGate+"=true"), b.opts.handovers},
		{kcmSubject(kcm), b.opts.slowHandovers},
	} {
		if !b.opts.wants(s.name) {
			continue
		}
		all, err := b.takeOvers(ctx, s.subject, syscall.SIGTERM, s.n)
		if err != nil {
			return fmt.Errorf("%s: %w", s.name, err)
		}
		var seen, written, first []float64
		for _, t := range all {
			seen = append(seen, milliseconds(t.seen))
			written = append(written, milliseconds(t.written))
			if t.first > 0 {
				first = append(first, milliseconds(t.first))
			}
		}
		b.add("handover/SIGTERM to new holder, as a watch sees it", s.name, "ms", seen...)
		b.add("handover/SIGTERM to new holder, as the audit log has it", s.name, "ms", written...)
		b.add("handover/SIGTERM to first reconcile of the new leader", s.name, "ms", first...)
	}
	return nil
}

// failovers ends leaders by SIGKILL, and stops them by SIGSTOP.
func (b *bench) failovers(ctx context.Context) error {
	short := timing{3 * time.Second, 2 * time.Second, 500 * time.Millisecond}
	for _, s := range []struct {
		subject
		timing
		signal syscall.Signal
		n      int
	}{
		{managerSubject(b, ours, b.binaries.manager), timing{}, syscall.SIGKILL, b.opts.failovers},
		{peerSubject(peer), timing{}, syscall.SIGKILL, b.opts.crashes},
		{kcmSubject(kcm), timing{}, syscall.SIGKILL, b.opts.crashes},
		{managerSubject(b, ours, b.binaries.manager), short, syscall.SIGKILL, b.opts.crashes},
		{peerSubject(peer), short, syscall.SIGKILL, b.opts.crashes},
		{managerSubject(b, ours, b.binaries.manager), timing{}, syscall.SIGSTOP, b.opts.stops},
	} {
		if !b.opts.wants(s.name) {
			continue
		}
		all, err := b.takeOvers(ctx, s.with(s.timing), s.signal, s.n)
		if err != nil {
			return fmt.Errorf("%s: %w", s.name, err)
		}
		var seen, first, stale []float64
		for _, t := range all {
			seen = append(seen, t.seen.Seconds())
			if t.first > 0 {
				first = append(first, milliseconds(t.first-t.seen))
			}
			stale = append(stale, float64(t.stale))
		}
		at := "15/10/2"
		if s.timing == short {
			at = "3/2/0.5"
		}
		what := "failover/" + at + ", SIGKILL to new holder"
		if s.signal == syscall.SIGSTOP {
			what = "failover/" + at + ", SIGSTOP to new holder"
			b.add("failover/"+at+", writes of a stopped leader after SIGCONT", s.name, "", stale...)
		}
		b.add(what, s.name, "s", seen...)
		b.add(what+", and from there to its first reconcile", s.name, "ms", first...)
	}
	return nil
}

// takeOvers ends a leader n times, each time with a fresh standby.
func (b *bench) takeOvers(ctx context.Context, s subject, sig syscall.Signal, n int) (all []takeover, err error) {
	if err := b.ensureConfigMap(ctx, "trigger"); err != nil {
		return nil, err
	}
	b.progress("%s: starting a leader and a standby", s.name)
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
		t, err := p.takeOver(ctx, sig)
		if err != nil {
			return nil, err
		}
		all = append(all, t)
		b.progress("%s %d/%d: new holder after %s, written after %s, first reconcile after %s, %d writes refused before (load %s)", s.name, i+1, n,
			t.seen.Round(100*time.Microsecond), t.written.Round(100*time.Microsecond), t.first.Round(100*time.Microsecond), t.refused, loadAverage())
		if err := p.respawn(ctx); err != nil {
			return nil, err
		}
	}
	return all, nil
}

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
