// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package servers

import (
	"context"
	"fmt"
	"slices"
	"syscall"
	"testing"
	"time"

	"k8s.io/client-go/rest"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/test/internal/faultproxy"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
	"github.com/quartermaster-dev/quartermaster/test/internal/judge"
)

// managers are the managers of a case: the leader and a standby on the second API server, and a standby
// on the first.
type managers struct {
	leader *cluster.Manager
	proxy  *fleet.LeaderProxy // of standbys to the leader
}

func newManagers(ctx context.Context, t *testing.T, reportedDead bool) *managers {
	t.Helper()
	c := &managers{leader: startManager(ctx, t, shared.SecondConfig())}
	shared.WaitForLeader(ctx, t, c.leader)
	if reportedDead {
		c.proxy = shared.NewLeaderProxy(ctx, t)
	}
	for _, config := range []*rest.Config{shared.AdminConfig(), shared.SecondConfig()} {
		standby := startManager(ctx, t, config)
		fleet.Eventually(ctx, t, func() error { return fleet.Ready(standby) })
	}
	return c
}

// startManager starts a manager on an API server, through a proxy of its own. It trusts the API
// servers' certificates too.
func startManager(ctx context.Context, t *testing.T, server *rest.Config) *cluster.Manager {
	t.Helper()
	proxy, err := faultproxy.Start(server)
	assert.NoError(t, err)
	r := shared.NewReplica(ctx, t)
	assert.NoError(t, r.Via(proxy.URL(), slices.Concat(proxy.CA(), server.CAData)))
	m, err := shared.StartLife(r, 1, cluster.ManagerOptions{Args: []string{"--config-reload-quiet-period=0", "--kube-api-qps=500", "--kube-api-burst=1000"}})
	assert.NoError(t, err)
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("log of %s:\n%s", m.Pod, m.Tail(40))
		}
		_ = proxy.Close()
		_ = m.Signal(syscall.SIGCONT)
		m.Kill()
		shared.FreeLease(t, m)
	})
	return m
}

// succession says when another process than the leader has written first after begin.
func (m *managers) succession(got *judge.Judgement, begin time.Time) string {
	former := fleet.ProcessName(m.leader.Pod, 1)
	first := judge.Write{}
	for process, w := range got.First {
		if process != former && fleet.IsReplica(process) && (first.Writer == "" || w.Revision < first.Revision) {
			first = w
		}
	}
	if first.Writer == "" {
		return "the leader led on"
	}
	return fmt.Sprintf("the next leader's first write %v after the fault began", first.Done.Sub(begin).Round(time.Millisecond))
}
