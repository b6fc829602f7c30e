// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
)

func TestAnEndpointThatCannotTellIsSaidToBe(t *testing.T) {
	answer := func(code int, body string) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(code); fmt.Fprint(w, body) }
	}
	for name, tc := range map[string]struct {
		handler  http.HandlerFunc
		endpoint string // default: that of the handler
		verify   bool
		want     string
	}{
		"one that does not know the user":    {answer(401, "Unauthorized"), "", false, "/debug/leader: 401 Unauthorized"},
		"one that refuses the user":          {answer(403, "forbidden: no"), "", false, "/debug/leader: 403 Forbidden: forbidden: no"},
		"one that is something else":         {answer(200, "<html>"), "", false, "/debug/leader: not a manager's answer"},
		"one with a certificate of nobody":   {answer(200, "{}"), "", true, "certificate"},
		"one that nobody listens at":         {nil, "https://127.0.0.1:1", false, "refused"},
		"one without TLS is not sent a word": {nil, "http://127.0.0.1:1", false, "must be https://HOST:PORT"},
		"one that is no URL":                 {nil, "127.0.0.1:10357", false, "must be https://HOST:PORT"},
	} {
		t.Run(name, func(t *testing.T) {
			if tc.handler != nil {
				server := httptest.NewUnstartedServer(tc.handler)
				server.Config.ErrorLog = log.New(io.Discard, "", 0) // of handshakes that fail on purpose
				server.StartTLS()
				defer server.Close()
				tc.endpoint = server.URL
			}
			o := statusOptions{endpoints: []string{tc.endpoint}, endpointInsecure: !tc.verify}
			var report statusReport
			o.askEndpoints(t.Context(), &rest.Config{Host: "https://unused", Timeout: 10 * time.Second}, &report)
			if len(report.Problems) != 1 || !strings.Contains(report.Problems[0], tc.want) || !strings.Contains(report.Problems[0], "--endpoint "+tc.endpoint) {
				t.Errorf("problems %q, want %q", report.Problems, tc.want)
			}
		})
	}
}

func TestAnEndpointIsAskedAsTheUserOfTheKubeconfig(t *testing.T) {
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "Bearer t" {
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		switch r.URL.Path {
		case "/debug/leader":
			fmt.Fprint(w, `{"identity":"pod-1_abc","phase":"Leading","serverFence":"Enforced"}`)
		case "/debug/controllers/":
			fmt.Fprint(w, `{"b":{"phase":"Stopped"},"a":{"phase":"Running","queueDepth":3}}`)
		}
	}))
	defer server.Close()
	o := statusOptions{endpoints: []string{server.URL}, endpointInsecure: true}
	report := statusReport{Replicas: []replicaReport{{Name: "pod-0"}, {Name: "pod-1", Node: "n"}}}
	o.askEndpoints(t.Context(), &rest.Config{Host: "https://unused", BearerToken: "t"}, &report)
	if len(report.Problems) > 0 {
		t.Fatal(report.Problems)
	}
	want := []replicaReport{{Name: "pod-0"}, {
		Name: "pod-1", Node: "n", Endpoint: server.URL, Reached: true, Phase: "Leading", serverFence: "Enforced",
		Controllers: []controllers.Status{{Name: "a", Phase: "Running", QueueDepth: 3}, {Name: "b", Phase: "Stopped"}},
	}}
	if diff := cmp.Diff(want, report.Replicas, cmp.AllowUnexported(replicaReport{})); diff != "" {
		t.Error(diff)
	}
}

func TestAHolderThatSaysSoLeads(t *testing.T) {
	for name, tc := range map[string]struct {
		replica replicaReport
		want    bool
	}{
		"the holder, reached and leading":    {replicaReport{Name: "pod-1", Reached: true, Phase: "Leading"}, true},
		"the holder, which has stopped":      {replicaReport{Name: "pod-1", Reached: true, Phase: "Stopped"}, false},
		"another one":                        {replicaReport{Name: "pod-2", Reached: true, Phase: "Leading"}, false},
		"the holder, which nobody could ask": {replicaReport{Name: "pod-1"}, false},
	} {
		t.Run(name, func(t *testing.T) {
			report := statusReport{Leader: leaderReport{Pod: "pod-1"}, Replicas: []replicaReport{tc.replica}}
			if report.trustLeader(); report.Leader.Leads != tc.want {
				t.Errorf("leads: %t", report.Leader.Leads)
			}
		})
	}
}

func TestStatusForPeople(t *testing.T) {
	now := time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC)
	before := func(d time.Duration) *metav1.Time { return &metav1.Time{Time: now.Add(-d)} }
	report := statusReport{
		Leader: leaderReport{Lease: "kube-system/quartermaster", Leads: true, Holder: "pod-1_abc", Pod: "pod-1", LeaseUID: "uid", Term: 3,
			Since: before(time.Hour), Renewed: before(time.Second), LeaseDurationSeconds: 15},
		Fence: fenceReport{"Enforced", "tested by the leader"},
		Replicas: []replicaReport{
			{Name: "pod-1", PodPhase: "Running", Ready: true, Started: before(2 * time.Hour), Endpoint: "https://e", Reached: true, Phase: "Leading",
				Controllers: []controllers.Status{{Name: "c", Phase: "Running", Workers: 4, QueueDepth: 2, Reconciles: 10, Errors: 1, Restarts: 3, Problem: "cannot list a\ncannot list b",
					LastError: &controllers.LastError{Key: "ns/o", Text: "no\nluck", Time: now.Add(-time.Minute)}}}},
			{Name: "pod-2", PodPhase: "Pending", Error: "no --endpoint for it"},
		},
		Problems: []string{"list Pods: forbidden"},
	}
	want := `Lease:         kube-system/quartermaster
Leader:        pod-1 (pod-1_abc)
Leads since:   2030-01-02T02:04:05Z (60m ago)
Term:          3 of the Lease with UID uid
Renewed:       2030-01-02T03:04:04Z (1s ago), for 15s each time
API fence:     Enforced (tested by the leader)

REPLICA   PHASE     POD       READY   RESTARTS   AGE      NODE     ENDPOINT
pod-1     Leading   Running   yes     0          120m     <none>   https://e
pod-2     <none>    Pending   no      0          <none>   <none>   not reached: no --endpoint for it

CONTROLLER   REPLICA   PHASE     WORKERS   QUEUE   BUSY   RECONCILES   ERRORS   PANICS   RESTARTS   PROBLEM                        LAST ERROR
c            pod-1     Running   4         2       0      10           1        0        3          cannot list a; cannot list b   60s ago, ns/o: no; luck

Not all could be read:
  list Pods: forbidden
`
	var got strings.Builder
	report.print(&got, now)
	if diff := cmp.Diff(want, got.String()); diff != "" {
		t.Error(diff)
	}
}
