// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package status

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"

	"k8s.io/client-go/rest"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/election/protocol"
)

// answer is what a replica reports about itself.
type answer struct {
	Endpoint string `json:"endpoint,omitempty"`
	// Reached reports whether the endpoint returned anything. Error says what it did not return,
	// and why.
	Reached bool   `json:"reached"`
	Error   string `json:"error,omitempty"`
	// Phase is the replica's phase of the election: Leading, Standby, Draining, ...
	Phase string `json:"phase,omitempty"`
	// Problem is what keeps the replica from leading, or its election from working.
	Problem string `json:"problem,omitempty"`
	// LeaderProcess is what a standby sees of the leader's process: Answers, Gone, ...
	LeaderProcess string               `json:"leaderProcess,omitempty"`
	Controllers   []controllers.Status `json:"controllers,omitempty"`

	serverFence string
}

// askEndpoints queries every --endpoint at once and adds the results to the replicas of the report.
// An endpoint that does not name its replica gets a row of its own.
func (o *options) askEndpoints(ctx context.Context, config *rest.Config, r *report) {
	asked := make([]replica, len(o.endpoints))
	var all sync.WaitGroup
	for i, endpoint := range o.endpoints {
		all.Go(func() { asked[i] = o.ask(ctx, config, endpoint) })
	}
	all.Wait()
	unreached := "no --endpoint for it"
	for _, from := range asked {
		if from.Name == "" {
			unreached = "no --endpoint has answered for it"
		}
		at := slices.IndexFunc(r.Replicas, func(r replica) bool { return r.Name == from.Name })
		if at < 0 || from.Name == "" {
			r.Replicas = append(r.Replicas, from)
		} else {
			r.Replicas[at].answer = from.answer
		}
	}
	for i := range r.Replicas {
		if to := &r.Replicas[i]; to.Endpoint == "" {
			to.Error = unreached
		}
	}
}

// ask queries the replica behind an endpoint for its identity, its phase and its controllers.
func (o *options) ask(ctx context.Context, config *rest.Config, endpoint string) replica {
	r := replica{answer: answer{Endpoint: endpoint}}
	base, client, err := o.endpointClient(config, endpoint)
	if err != nil {
		r.Error = err.Error()
		return r
	}
	defer client.CloseIdleConnections()

	var election struct {
		Identity, Phase, ServerFence, LeaderProcess, Problem string
		Start                                                struct{ Why string }
	}
	electionErr := getJSON(ctx, client, base, "/debug/leader", &election)
	if electionErr != nil && !errors.Is(electionErr, errForbidden) {
		r.Error = electionErr.Error()
		return r
	}
	r.Name, r.Phase, r.serverFence = protocol.PodOf(election.Identity), election.Phase, election.ServerFence
	r.Problem = election.Problem
	switch election.Phase {
	case "Standby":
		r.LeaderProcess = election.LeaderProcess
	case starting:
		r.Problem = cmp.Or(r.Problem, election.Start.Why)
	}
	byName := map[string]controllers.Status{}
	controllersErr := getJSON(ctx, client, base, "/debug/controllers/", &byName)
	for _, name := range slices.Sorted(maps.Keys(byName)) {
		status := byName[name]
		status.Name = name
		r.Controllers = append(r.Controllers, status)
	}
	r.Reached = electionErr == nil || controllersErr == nil
	if err := errors.Join(electionErr, controllersErr); err != nil {
		r.Error = strings.ReplaceAll(err.Error(), "\n", "; ")
	}
	return r
}

// endpointClient returns the parsed endpoint and a client with the credentials of config. It
// returns an error unless the endpoint is https://HOST:PORT.
func (o *options) endpointClient(config *rest.Config, endpoint string) (*url.URL, *http.Client, error) {
	base, err := url.Parse(endpoint)
	if err != nil || base.Scheme != "https" || base.Host == "" {
		return nil, nil, errors.New("must be https://HOST:PORT")
	}
	config = rest.CopyConfig(config)
	config.Host = endpoint
	config.TLSClientConfig = rest.TLSClientConfig{
		Insecure: o.endpointInsecure, CAFile: o.endpointCA,
		CertFile: config.CertFile, CertData: config.CertData, KeyFile: config.KeyFile, KeyData: config.KeyData,
	}
	config.Impersonate = rest.ImpersonationConfig{}
	if host := base.Hostname(); host == "localhost" || net.ParseIP(host).IsLoopback() {
		// A proxy would connect to a loopback address of its own, where anything may listen.
		config.Proxy = func(*http.Request) (*url.URL, error) { return nil, nil }
	}
	client, err := rest.HTTPClientFor(config)
	if err != nil {
		return nil, nil, err
	}
	// The credentials are for this endpoint only.
	client.CheckRedirect = func(to *http.Request, _ []*http.Request) error {
		return fmt.Errorf("redirects to %s, which is not followed", to.URL.Redacted())
	}
	return base, client, nil
}

// errForbidden means that the user may not read a path. Other paths may be allowed.
var errForbidden = errors.New("forbidden")

// maxAnswer limits the bytes that are read from an endpoint. It is far more than a replica reports.
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
	switch {
	case response.StatusCode == http.StatusForbidden:
		return fmt.Errorf("%s: %w", path, errForbidden)
	case response.StatusCode != http.StatusOK:
		line, _, _ := strings.Cut(string(body), "\n")
		return fmt.Errorf("%s: %s: %.200s", path, response.Status, line)
	}
	if err := json.Unmarshal(body, into); err != nil {
		return fmt.Errorf("%s: not a manager's response: %w", path, err)
	}
	return nil
}
