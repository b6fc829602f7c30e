// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package informers tests the shared cache on a real control plane: as part of managers that run as
// processes, judged by the API server's audit log and the responses of their ports, and as a
// library where no controller uses it yet.
package informers

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"testing"
	"time"

	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/pkg/informers"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// All tests of the package share a control plane, and a token for the managers' paths that need
// permission.
var (
	shared *fleet.Fleet
	token  string
)

// The managers have the controllers config-reload and greeter, which need ConfigMaps in different
// forms.
func TestMain(m *testing.M) {
	os.Exit(fleet.Main(m, &shared, fleet.Options{Program: "examples/manager"}, func(ctx context.Context) (err error) {
		if err := shared.ApplyDir(ctx, "../../examples/greeter"); err != nil {
			return err
		}
		token, err = shared.AdminToken(ctx)
		return err
	}))
}

// status returns what /debug/informers of m shows.
func status(m *cluster.Manager) (informers.Status, error) {
	var s informers.Status
	code, body, err := fleet.Get(m.SecureURL+"/debug/informers", token)
	if err != nil {
		return s, err
	}
	if code != http.StatusOK {
		return s, fmt.Errorf("/debug/informers returned %d: %s", code, body)
	}
	return s, json.Unmarshal([]byte(body), &s)
}

func mustStatus(t *testing.T, m *cluster.Manager) informers.Status {
	t.Helper()
	s, err := status(m)
	assert.NoError(t, err)
	return s
}

// cacheReads returns the URIs of the lists and watches in all namespaces with which the Pod's manager
// filled its cache, by resource. A watch is in the audit log twice, and counts once. The host
// itself watches only single objects: its Lease, and the ConfigMap with the authentication
// configuration.
func cacheReads(t *testing.T, pod string) map[string][]string {
	t.Helper()
	seen, uris := map[string]bool{}, map[string][]string{}
	for _, e := range auditedRequests(t, pod) {
		if id := string(e.AuditID); (e.Verb == "watch" || e.Verb == "list") && e.ObjectRef.Namespace == "" && !seen[id] {
			seen[id] = true
			uris[e.ObjectRef.Resource] = append(uris[e.ObjectRef.Resource], e.RequestURI)
		}
	}
	return uris
}

// auditedRequests returns the audit log's events of requests for objects by the Pod's manager.
func auditedRequests(t *testing.T, pod string) []auditv1.Event {
	t.Helper()
	return shared.AuditSince(t, time.Time{}, func(e auditv1.Event) bool { return cluster.AuditPod(e) == pod && e.ObjectRef != nil })
}
