// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package manager

import (
	"crypto/tls"
	"os"
	"path/filepath"
	"strings"
	"testing"

	certutil "k8s.io/client-go/util/cert"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

func TestSecurePortAuthorizes(t *testing.T) {
	ctx := fleet.Context(t)
	m := shared.RunLeader(ctx, t, "--profiling=true")
	// There are SLIs only of checks that were called.
	fleet.Eventually(ctx, t, func() error { return fleet.Ready(m) })
	nobody := shared.NewToken(ctx, t, "nobody")
	scraper := shared.NewToken(ctx, t, "scraper", "quartermaster-metrics-reader")
	everything := shared.NewToken(ctx, t, "everything", "cluster-admin")

	for name, tc := range map[string]struct {
		path, token string
		code        int
		body        string // a part of it
	}{
		"anyone sees /healthz":                        {"/healthz", "", 200, "ok"},
		"anyone sees /livez":                          {"/livez?verbose", "", 200, "[+]leader-election ok"},
		"anyone sees /readyz":                         {"/readyz?verbose", "", 200, "[+]informers-sync ok"},
		"anyone sees a check's own path":              {"/healthz/controller-config-reload", "", 200, "ok"},
		"anonymous does not see /metrics":             {"/metrics", "", 403, "forbidden"},
		"a token that is none is refused":             {"/metrics", "no-token", 401, "Unauthorized"},
		"a token without permission does not either":  {"/metrics", nobody, 403, "forbidden"},
		"a token with permission sees /metrics":       {"/metrics", scraper, 200, "quartermaster_controller_reconciles_total"},
		"build info is among the metrics":             {"/metrics", scraper, 200, "kubernetes_build_info"},
		"client-go's metrics are among them":          {"/metrics", scraper, 200, "rest_client_requests_total"},
		"the queues' metrics are among them":          {"/metrics", scraper, 200, `workqueue_depth{name="config-reload"}`},
		"leadership is among them":                    {"/metrics", scraper, 200, "quartermaster_leader_election_"},
		"a scraper sees SLIs":                         {"/metrics/slis", scraper, 200, "kubernetes_healthcheck"},
		"a scraper sees no more than it may":          {"/debug/leader", scraper, 403, "forbidden"},
		"/debug/leader names the holder":              {"/debug/leader", everything, 200, m.Pod},
		"/debug/informers lists resources":            {"/debug/informers", everything, 200, "configmaps"},
		"/debug/controllers/NAME shows the loop":      {"/debug/controllers/config-reload", everything, 200, `"phase": "Running"`},
		"/debug/controllers/ lists all of them":       {"/debug/controllers/", everything, 200, "config-reload"},
		"a controller that does not run is not found": {"/debug/controllers/nothing", everything, 404, "not enabled"},
		"/configz shows the configuration":            {"/configz", everything, 200, `"leader-elect-lease-duration": "15s"`},
		"/flagz shows the flags":                      {"/flagz", everything, 200, "leader-elect-lease-duration"},
		"/statusz shows the paths":                    {"/statusz", everything, 200, "/debug"},
		"profiles are there":                          {"/debug/pprof/", everything, 200, "goroutine"},
		"goroutines carry their controller":           {"/debug/pprof/goroutine?debug=1", everything, 200, `"controller":"config-reload"`},
		"what does not exist is not found":            {"/nothing", everything, 404, ""},
	} {
		t.Run(name, func(t *testing.T) {
			code, body, err := fleet.Get(m.SecureURL+tc.path, tc.token)
			assert.NoError(t, err)
			if code != tc.code || !strings.Contains(body, tc.body) {
				t.Errorf("%s: %d, want %d and %q; body:\n%.3000s", tc.path, code, tc.code, tc.body, body)
			}
		})
	}

	t.Run("the insecure port serves health only", func(t *testing.T) {
		for path, want := range map[string]int{"/healthz": 200, "/livez": 200, "/readyz": 200, "/metrics": 404, "/debug/leader": 404, "/configz": 404} {
			if err := fleet.Answers(m.InsecureURL+path, everything, want); err != nil {
				t.Error(err)
			}
		}
	})
}

func TestServingCertificateIsReloaded(t *testing.T) {
	ctx := fleet.Context(t)
	cert, key := filepath.Join(t.TempDir(), "tls.crt"), filepath.Join(t.TempDir(), "tls.key")
	write := func(host string) {
		t.Helper()
		certPEM, keyPEM, err := certutil.GenerateSelfSignedCertKey(host, nil, nil)
		assert.NoError(t, err)
		for file, content := range map[string][]byte{cert: certPEM, key: keyPEM} {
			assert.NoError(t, os.WriteFile(file, content, 0o600))
		}
	}
	served := func(m *cluster.Manager, host string) error {
		conn, err := tls.Dial("tcp", strings.TrimPrefix(m.SecureURL, "https://"), &tls.Config{InsecureSkipVerify: true})
		if err != nil {
			return err
		}
		defer func() { _ = conn.Close() }()
		return conn.ConnectionState().PeerCertificates[0].VerifyHostname(host)
	}

	write("before.example.com")
	m := shared.RunReplica(ctx, t, "--tls-cert-file="+cert, "--tls-private-key-file="+key)
	fleet.Eventually(ctx, t, func() error { return served(m, "before.example.com") })
	write("after.example.com")
	fleet.Eventually(ctx, t, func() error { return served(m, "after.example.com") })
	if m.ExitCode() != -1 {
		t.Errorf("the manager ended with %d", m.ExitCode())
	}
}
