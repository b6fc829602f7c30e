// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/duration"
	"k8s.io/client-go/rest"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
)

// replicaReport is one replica: its Pod, and what it says of itself when it was reached.
type replicaReport struct {
	Name     string       `json:"name"`
	Node     string       `json:"node,omitempty"`
	PodPhase string       `json:"podPhase,omitempty"`
	Ready    bool         `json:"ready"`
	Restarts int32        `json:"restarts"`
	Started  *metav1.Time `json:"started,omitempty"`

	Endpoint string `json:"endpoint,omitempty"`
	Reached  bool   `json:"reached"`
	Error    string `json:"error,omitempty"` // why it was not reached
	// Phase is the election's: Leading, Standby, Draining, ...
	Phase       string               `json:"phase,omitempty"`
	Controllers []controllers.Status `json:"controllers,omitempty"`

	serverFence string
}

func newReplicaReport(pod *corev1.Pod) replicaReport {
	r := replicaReport{Name: pod.Name, Node: pod.Spec.NodeName, PodPhase: string(pod.Status.Phase), Started: pod.Status.StartTime}
	for _, c := range pod.Status.Conditions {
		r.Ready = r.Ready || c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	}
	for _, c := range pod.Status.ContainerStatuses {
		r.Restarts += c.RestartCount
	}
	return r
}

// askEndpoints asks all of --endpoint at once and adds what they say to the replicas of the report.
func (o *statusOptions) askEndpoints(ctx context.Context, config *rest.Config, report *statusReport) {
	answers := make([]replicaReport, len(o.endpoints))
	errs := make([]error, len(o.endpoints))
	var all sync.WaitGroup
	for i, endpoint := range o.endpoints {
		all.Go(func() { answers[i], errs[i] = o.ask(ctx, config, endpoint) })
	}
	all.Wait()
	for i, answer := range answers {
		if errs[i] != nil {
			report.problem("--endpoint %s: %v", o.endpoints[i], errs[i])
			continue
		}
		at := slices.IndexFunc(report.Replicas, func(r replicaReport) bool { return r.Name == answer.Name })
		if at < 0 {
			report.Replicas = append(report.Replicas, answer) // outside of the cluster, or its Pod is gone
			continue
		}
		r := &report.Replicas[at]
		r.Endpoint, r.Reached, r.Phase, r.Controllers, r.serverFence = answer.Endpoint, true, answer.Phase, answer.Controllers, answer.serverFence
	}
}

// ask asks the replica behind an endpoint who and how it is, with the credentials of config.
func (o *statusOptions) ask(ctx context.Context, config *rest.Config, endpoint string) (replicaReport, error) {
	base, err := url.Parse(endpoint)
	if err != nil || base.Scheme != "https" || base.Host == "" {
		return replicaReport{}, fmt.Errorf("must be https://HOST:PORT")
	}
	config = rest.CopyConfig(config)
	config.Host = endpoint
	config.TLSClientConfig = rest.TLSClientConfig{
		Insecure: o.endpointInsecure, CAFile: o.endpointCA,
		CertFile: config.CertFile, CertData: config.CertData, KeyFile: config.KeyFile, KeyData: config.KeyData,
	}
	config.Impersonate = rest.ImpersonationConfig{}
	client, err := rest.HTTPClientFor(config)
	if err != nil {
		return replicaReport{}, err
	}
	defer client.CloseIdleConnections()

	var leader struct{ Identity, Phase, ServerFence string }
	if err := getJSON(ctx, client, base, "/debug/leader", &leader); err != nil {
		return replicaReport{}, err
	}
	byName := map[string]controllers.Status{}
	if err := getJSON(ctx, client, base, "/debug/controllers/", &byName); err != nil {
		return replicaReport{}, err
	}
	r := replicaReport{Name: podOf(leader.Identity), Endpoint: endpoint, Reached: true, Phase: leader.Phase, serverFence: leader.ServerFence}
	for _, name := range slices.Sorted(maps.Keys(byName)) {
		status := byName[name]
		status.Name = name
		r.Controllers = append(r.Controllers, status)
	}
	return r, nil
}

// maxAnswer is far more than a replica says of itself.
const maxAnswer = 8 << 20

func getJSON(ctx context.Context, client *http.Client, base *url.URL, path string, into any) error {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, base.JoinPath(path).String(), nil)
	if err != nil {
		return err
	}
	request.Header.Set("Accept", "application/json")
	response, err := client.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(io.LimitReader(response.Body, maxAnswer))
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	if response.StatusCode != http.StatusOK {
		line, _, _ := strings.Cut(string(body), "\n")
		return fmt.Errorf("%s: %s: %.200s", path, response.Status, line)
	}
	if err := json.Unmarshal(body, into); err != nil {
		return fmt.Errorf("%s: not a manager's answer: %w", path, err)
	}
	return nil
}

// print writes the report for people.
func (r *statusReport) print(w io.Writer, now time.Time) {
	t := newTable(w)
	l := r.Leader
	t.row("Lease:", l.Lease)
	switch {
	case l.Holder == "":
		t.row("Leader:", "<none>")
	case !l.Leads:
		t.row("Leader:", "<none>: "+l.Holder+" has not renewed in time")
	default:
		t.row("Leader:", fmt.Sprintf("%s (%s)", l.Pod, l.Holder))
	}
	t.row("Leads since:", ago(l.Since, now))
	t.row("Term:", fmt.Sprintf("%d of the Lease with UID %s", l.Term, l.LeaseUID))
	t.row("Renewed:", fmt.Sprintf("%s, for %ds each time", ago(l.Renewed, now), l.LeaseDurationSeconds))
	t.row("API fence:", fmt.Sprintf("%s (%s)", r.Fence.State, r.Fence.Source))
	t.end()

	fmt.Fprintln(w)
	t.row("REPLICA", "PHASE", "POD", "READY", "RESTARTS", "AGE", "NODE", "ENDPOINT")
	for _, replica := range r.Replicas {
		endpoint := replica.Endpoint
		if !replica.Reached {
			endpoint = "not reached: " + replica.Error
		}
		t.row(replica.Name, orNone(replica.Phase), orNone(replica.PodPhase), yesNo(replica.Ready), fmt.Sprint(replica.Restarts),
			age(replica.Started, now), orNone(replica.Node), endpoint)
	}
	t.end()

	fmt.Fprintln(w)
	t.row("CONTROLLER", "REPLICA", "PHASE", "WORKERS", "QUEUE", "BUSY", "RECONCILES", "ERRORS", "PANICS", "RESTARTS", "PROBLEM", "LAST ERROR")
	for _, replica := range r.Replicas {
		for _, c := range replica.Controllers {
			last := "<none>"
			if e := c.LastError; e != nil {
				last = fmt.Sprintf("%s ago, %s: %s", duration.HumanDuration(now.Sub(e.Time)), e.Key, oneLine(e.Text))
			}
			t.row(c.Name, replica.Name, string(c.Phase), fmt.Sprint(c.Workers), fmt.Sprint(c.QueueDepth), fmt.Sprint(len(c.InFlight)),
				fmt.Sprint(c.Reconciles), fmt.Sprint(c.Errors), fmt.Sprint(c.Panics), fmt.Sprint(c.Restarts), orNone(oneLine(c.Problem)), last)
		}
	}
	t.end()
	if len(r.Problems) > 0 {
		fmt.Fprintf(w, "\nNot all could be read:\n")
	}
	for _, p := range r.Problems {
		fmt.Fprintf(w, "  %s\n", p)
	}
}

func oneLine(text string) string { return strings.ReplaceAll(text, "\n", "; ") }

// age is how long ago something was, as kubectl shows it.
func age(t *metav1.Time, now time.Time) string {
	if t == nil {
		return "<none>"
	}
	return duration.HumanDuration(now.Sub(t.Time))
}

func ago(t *metav1.Time, now time.Time) string {
	if t == nil {
		return "<none>"
	}
	return fmt.Sprintf("%s (%s ago)", t.UTC().Format(time.RFC3339), age(t, now))
}
