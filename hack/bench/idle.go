// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
)

// idleWarmUp is the time that managers get to become quiet after their start.
const idleWarmUp = time.Minute

// benchmarkIdle counts the requests of leaders and standbys while nothing happens. All subjects run at the
// same time.
func (b *bench) benchmarkIdle(ctx context.Context) (err error) {
	var pairs []*pair
	defer func() {
		for _, p := range pairs {
			err = errors.Join(err, p.stop())
		}
	}()
	for _, s := range []subject{managerSubject(b, b.binaries.manager), peerSubject(peer), kcmSubject(kcm)} {
		if !b.opts.wants(s.name) {
			continue
		}
		b.logProgress("%s: starting a leader and a standby", s.name)
		p, err := b.startPair(ctx, s)
		if err != nil {
			return fmt.Errorf("%s: %w", s.name, err)
		}
		pairs = append(pairs, p)
	}
	if len(pairs) == 0 {
		return nil
	}
	minutes := int(b.opts.idle / time.Minute)
	b.logProgress("Waiting for %s, then counting requests for %d minutes", idleWarmUp, minutes)
	if err := cluster.Sleep(ctx, idleWarmUp); err != nil {
		return err
	}
	audit, err := b.tailAudit()
	if err != nil {
		return err
	}
	before, err := cpuTimes(pairs)
	if err != nil {
		return err
	}
	begin := time.Now()
	if err := cluster.Sleep(ctx, time.Duration(minutes)*time.Minute); err != nil {
		return err
	}
	after, err := cpuTimes(pairs)
	if err != nil {
		return err
	}
	events, err := audit.read()
	if err != nil {
		return err
	}
	for i, p := range pairs {
		b.addIdle("leader", p.subject.name, p.leader, events, begin, minutes)
		b.addIdle("standby", p.subject.name, p.standby, events, begin, minutes)
		for j, role := range []string{"leader", "standby"} {
			b.addRow("idle/"+role+", CPU time", p.subject.name, "ms per second", 1000*(after[i][j]-before[i][j])/b.opts.idle.Seconds())
			memory, err := readResidence([]*process{p.leader, p.standby}[j].PID())
			if err != nil {
				return err
			}
			b.addRow("idle/"+role+", RSS", p.subject.name, "MiB", memory.current)
		}
	}
	return nil
}

// cpuTimes returns the CPU time in seconds of the leader and the standby of each pair.
func cpuTimes(pairs []*pair) ([][2]float64, error) {
	all := make([][2]float64, len(pairs))
	for i, p := range pairs {
		for j, process := range []*process{p.leader, p.standby} {
			var err error
			if all[i][j], err = cpuSeconds(process.PID()); err != nil {
				return nil, err
			}
		}
	}
	return all, nil
}

// addIdle adds a row of requests per minute.
func (b *bench) addIdle(role, subject string, p *process, events []auditv1.Event, begin time.Time, minutes int) {
	all, leases := make([]float64, minutes), make([]float64, minutes)
	otherRequests := map[string]int{}
	for _, e := range events {
		minute := int(e.RequestReceivedTimestamp.Sub(begin) / time.Minute)
		if !p.madeRequest(e) || !isRequest(e) || e.RequestReceivedTimestamp.Time.Before(begin) || minute >= minutes {
			continue
		}
		all[minute]++
		if isLeaseRequest(e) {
			leases[minute]++
		} else {
			otherRequests[e.Verb+" "+e.RequestURI]++
		}
	}
	b.addRow("idle/"+role+", requests but watches", subject, "per minute", all...)
	b.addRow("idle/"+role+", of them for the Lease", subject, "per minute", leases...)
	for request, n := range otherRequests {
		b.logProgress("%s %s: %d times %s", subject, role, n, request)
	}
}
