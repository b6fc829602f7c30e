// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"fmt"
	"net/http"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/pkg/informers"
	"github.com/quartermaster-dev/quartermaster/test/internal/faultproxy"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// attemptedWrites returns the requests of the Pod's manager that are meant to change something: no reads, no
// reviews of permissions, and no dry runs such as the probe for the fence in the API server.
func attemptedWrites(t *testing.T, pod string) []string {
	t.Helper()
	var uris []string
	for _, e := range auditedRequests(t, pod) {
		review := e.ObjectRef.APIGroup == "authentication.k8s.io" || e.ObjectRef.APIGroup == "authorization.k8s.io"
		if e.Verb != "get" && e.Verb != "list" && e.Verb != "watch" && !review && !strings.HasSuffix(e.RequestURI, "?dryRun=All") {
			uris = append(uris, e.Verb+" "+e.RequestURI)
		}
	}
	return uris
}

// queueAdds returns how many keys were ever added to config-reload's queue, according to m's
// metrics.
func queueAdds(t *testing.T, m *cluster.Manager) string {
	t.Helper()
	_, body, err := fleet.Get(m.SecureURL+"/metrics", token)
	assert.NoError(t, err)
	for line := range strings.Lines(body) {
		if value, ok := strings.CutPrefix(line, `workqueue_adds_total{name="config-reload"} `); ok {
			return strings.TrimSpace(value)
		}
	}
	return "0" // the queue is created when the controller runs
}

// waitUntilLeading waits until m leads and its caches have synced.
func waitUntilLeading(t *testing.T, m *cluster.Manager) {
	t.Helper()
	ctx := fleet.Context(t)
	shared.WaitForLeader(ctx, t, m)
	fleet.Eventually(ctx, t, func() error {
		s, err := status(m)
		if err != nil {
			return err
		}
		for _, r := range s.Resources {
			if !r.Synced {
				return fmt.Errorf("%s has not synced", r.Resource)
			}
		}
		return nil
	})
}

// TestWarmStandbyHasCachesAndWaits checks that it does nothing until it leads.
func TestWarmStandbyHasCachesAndWaits(t *testing.T) {
	ctx := fleet.Context(t)
	s := shared.NewSample(ctx, t)
	leader := shared.RunLeader(ctx, t, fleet.ShortTimings...)
	s.WaitUntilKnown(ctx, t, "web")

	// It is not ready before it has synced.
	replica, proxy := shared.NewReplicaBehindProxy(ctx, t)
	release := make(chan struct{})
	secrets := proxy.Add(faultproxy.Rule{Match: faultproxy.Path(http.MethodGet, "/api/v1/secrets"), Hold: release})
	standby := shared.Run(t, replica, cluster.ManagerOptions{Args: fleet.ShortTimings})
	assert.NoError(t, secrets.WaitHits(ctx, 1))
	fleet.Eventually(ctx, t, func() error {
		return fleet.Answers(standby.InsecureURL+"/readyz/informers-sync", "", http.StatusInternalServerError)
	})
	secrets.Remove()
	close(release)
	fleet.Eventually(ctx, t, func() error { return fleet.Answers(standby.InsecureURL+"/readyz", "", http.StatusOK) })

	// It follows the changes and does nothing else.
	before := mustStatus(t, standby)
	for i := range 3 {
		s.Paint(ctx, t, fmt.Sprintf("red-%d", i))
		s.WaitForReplicaSets(ctx, t, "web", 2+i)
	}
	fleet.Eventually(ctx, t, func() error { // a ConfigMap and a Deployment, three times
		if n := events(mustStatus(t, standby)) - events(before); n < 6 {
			return fmt.Errorf("the standby has seen %d events", n)
		}
		return nil
	})
	if adds := queueAdds(t, leader); adds == "0" {
		t.Error("nothing was added to the leader's queue: the test does not see queues")
	}
	if adds := queueAdds(t, standby); adds != "0" {
		t.Errorf("%s keys were added to the standby's queue", adds)
	}
	if len(attemptedWrites(t, leader.Pod)) == 0 {
		t.Error("the leader has written nothing: the test does not see writes")
	}
	assert.Equal(t, "writes of the standby", []string(nil), attemptedWrites(t, standby.Pod))

	// When it leads, it needs nothing but its cache.
	read := cacheReads(t, standby.Pod)
	assert.NoError(t, leader.Signal(syscall.SIGTERM))
	waitUntilLeading(t, standby)
	s.Paint(ctx, t, "green")
	s.WaitForReplicaSets(ctx, t, "web", 5)
	if diff := cmp.Diff(read, cacheReads(t, standby.Pod)); diff != "" {
		t.Errorf("lists and watches of the new leader (-before +after):\n%s", diff)
	}
}

func events(s informers.Status) (n int64) {
	for _, r := range s.Resources {
		n += r.Events
	}
	return n
}

func TestColdStandbyReadsNothingUntilItLeads(t *testing.T) {
	ctx := fleet.Context(t)
	s := shared.NewSample(ctx, t)
	leader := shared.RunLeader(ctx, t, fleet.ShortTimings...)
	s.WaitUntilKnown(ctx, t, "web")
	standby := shared.RunReplica(ctx, t, append([]string{"--standby=cold"}, fleet.ShortTimings...)...)
	if _, err := standby.WaitForLine(ctx, "Competing for the Lease"); err != nil {
		t.Fatal(err)
	}
	fleet.Eventually(ctx, t, func() error { return fleet.Answers(standby.InsecureURL+"/readyz", "", http.StatusOK) })
	s.Paint(ctx, t, "red")
	s.WaitForReplicaSets(ctx, t, "web", 2)
	assert.Equal(t, "lists and watches", map[string][]string{}, cacheReads(t, standby.Pod))
	st := mustStatus(t, standby)
	for _, r := range st.Resources {
		if r.Synced || r.Objects != 0 {
			t.Errorf("%s: synced %t, %d objects", r.Resource, r.Synced, r.Objects)
		}
	}
	if st.Started || len(st.Resources) == 0 {
		t.Errorf("started %t, with %d resources", st.Started, len(st.Resources))
	}

	assert.NoError(t, leader.Signal(syscall.SIGTERM))
	waitUntilLeading(t, standby)
	for resource, uris := range cacheReads(t, standby.Pod) {
		checkStream(t, resource, uris)
	}
	if err := fleet.Answers(standby.InsecureURL+"/readyz", "", http.StatusOK, "ok"); err != nil {
		t.Error(err)
	}
	s.Paint(ctx, t, "green")
	s.WaitForReplicaSets(ctx, t, "web", 3)
}
