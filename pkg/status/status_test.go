// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package status

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/rest"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
)

func respond(code int, body string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(code); fmt.Fprint(w, body) }
}

func TestEndpointWithoutAnAnswerHasARow(t *testing.T) {
	for name, tc := range map[string]struct {
		handler  http.HandlerFunc
		endpoint string // default: the handler's
		want     string
	}{
		"an endpoint that does not know the user": {respond(401, "Unauthorized"), "", "/debug/leader: 401 Unauthorized"},
		"an endpoint that refuses the user":       {respond(403, "no"), "", "/debug/leader: forbidden; /debug/controllers/: forbidden"},
		"an endpoint that is no manager's":        {respond(200, "<html>"), "", "/debug/leader: not a manager's response"},
		"an endpoint that redirects": {http.RedirectHandler("https://127.0.0.1:1/x", http.StatusTemporaryRedirect).ServeHTTP, "",
			"redirects to https://127.0.0.1:1/x, which is not followed"},
		"an endpoint at which nobody listens":     {nil, "https://127.0.0.1:1", "refused"},
		"an endpoint without TLS gets no request": {nil, "http://127.0.0.1:1", "must be https://HOST:PORT"},
		"an endpoint that is no URL":              {nil, "127.0.0.1:10357", "must be https://HOST:PORT"},
	} {
		t.Run(name, func(t *testing.T) {
			if tc.handler != nil {
				server := httptest.NewTLSServer(tc.handler)
				defer server.Close()
				tc.endpoint = server.URL
			}
			o := options{endpoints: []string{tc.endpoint}, endpointInsecure: true}
			r := report{Replicas: []replica{{Name: "pod-0"}}}
			o.askEndpoints(t.Context(), &rest.Config{Host: "https://unused", Timeout: 10 * time.Second}, &r)
			if len(r.Replicas) != 2 || r.Replicas[0].Error != "no --endpoint has answered for it" {
				t.Fatalf("replicas %+v", r.Replicas)
			}
			if got := r.Replicas[1]; got.label() != tc.endpoint || got.Reached || !strings.Contains(got.Error, tc.want) {
				t.Errorf("%+v, want %q", got, tc.want)
			}
		})
	}
}

// newManager responds like a manager to a user with the token t who may read the given paths.
func newManager(t *testing.T, allowed ...string) string {
	t.Helper()
	answers := map[string]string{
		"/debug/leader":       `{"identity":"pod-1_abc","phase":"Leading","serverFence":"Enforced","problem":"p"}`,
		"/debug/controllers/": `{"b":{"phase":"Stopped"},"a":{"phase":"Running","queueDepth":3}}`,
	}
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.Header.Get("Authorization") != "Bearer t":
			respond(401, "")(w, r)
		case !slices.Contains(allowed, r.URL.Path):
			respond(403, "")(w, r)
		default:
			respond(200, answers[r.URL.Path])(w, r)
		}
	}))
	t.Cleanup(server.Close)
	return server.URL
}

// writeKubeconfig writes a kubeconfig for a cluster, with the token t.
func writeKubeconfig(t *testing.T, cluster string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "kubeconfig")
	text := `{apiVersion: v1, kind: Config, current-context: c, contexts: [{name: c, context: {cluster: c, user: u}}],
clusters: [{name: c, cluster: {` + cluster + `}}], users: [{name: u, user: {token: t}}]}`
	assert.NoError(t, os.WriteFile(path, []byte(text), 0o600))
	return path
}

// TestEndpointOnLoopbackNeedsNoProxy fails if the client uses a proxy, since none listens
// at the address in the kubeconfig. Proxies of the environment are bypassed in the same way, but Go
// reads them only once, so no test can set them.
func TestEndpointOnLoopbackNeedsNoProxy(t *testing.T) {
	kubeconfig := writeKubeconfig(t, `server: "https://unused", proxy-url: "http://127.0.0.1:1"`)
	o := options{kubeconfig: kubeconfig, endpointInsecure: true, timeout: 10 * time.Second}
	config, err := o.clientConfig()
	assert.NoError(t, err)
	url := newManager(t, "/debug/leader", "/debug/controllers/")
	for _, endpoint := range []string{url, strings.Replace(url, "127.0.0.1", "localhost", 1)} {
		o.endpoints = []string{endpoint}
		r := report{Replicas: []replica{{Name: "pod-1", Node: "n"}}}
		o.askEndpoints(t.Context(), config, &r)
		if got := r.Replicas[0]; len(r.Replicas) != 1 || !got.Reached || got.Error != "" || got.Node != "n" {
			t.Errorf("%+v", r.Replicas)
		}
	}
	if r := o.ask(t.Context(), config, "https://192.0.2.1:10357"); !strings.Contains(r.Error, "proxyconnect") {
		t.Errorf("elsewhere the proxy is not used: %+v", r)
	}
}

func TestStatusTrustsAHolderThatSaysItLeads(t *testing.T) {
	const late = "<none>: pod-1_abc has not renewed in time"
	for name, tc := range map[string]struct {
		replica replica
		leads   bool // by the Lease
		want    string
	}{
		"the holder, reached and leading":    {replica{Name: "pod-1", answer: answer{Reached: true, Phase: "Leading"}}, false, "pod-1 (pod-1_abc)"},
		"the holder, which has stopped":      {replica{Name: "pod-1", answer: answer{Reached: true, Phase: "Stopped"}}, false, late},
		"the holder, which is starting":      {replica{Name: "pod-1", answer: answer{Reached: true, Phase: "Starting"}}, true, "<none>: pod-1_abc holds the Lease and does not lead yet"},
		"a replica that is not the holder":   {replica{Name: "pod-2", answer: answer{Reached: true, Phase: "Leading"}}, false, late},
		"the holder, which nobody could ask": {replica{Name: "pod-1"}, false, late},
	} {
		t.Run(name, func(t *testing.T) {
			r := report{Leader: leader{Holder: "pod-1_abc", Pod: "pod-1", Leads: tc.leads}, Replicas: []replica{tc.replica}}
			r.trustLeader()
			var out strings.Builder
			if err := r.write(&out, "", time.Now()); err != nil || !strings.Contains(out.String(), "Leader:      "+tc.want+"\n") {
				t.Errorf("error %v, want the leader %s:\n%s", err, tc.want, out.String())
			}
		})
	}
}

func TestEndpointsAreShownWithoutALease(t *testing.T) {
	forbidden := httptest.NewTLSServer(respond(403, "no"))
	defer forbidden.Close()
	absent := httptest.NewTLSServer(respond(404, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"NotFound","code":404}`))
	defer absent.Close()
	gone := httptest.NewTLSServer(nil)
	gone.Close()
	leading := newManager(t, "/debug/leader", "/debug/controllers/")
	unnamed := newManager(t, "/debug/controllers/")
	for name, tc := range map[string]struct {
		server, endpoint string
		want             []string
		err              error
	}{
		"the user may not read the Lease, and a replica says that it leads": {forbidden.URL, leading,
			[]string{"Leader:      pod-1, as it says itself", "API fence:   Enforced (tested by the leader)", "Leading", "Running", "  read Lease kube-system/quartermaster: "}, nil},
		"the user may not read the Lease, and no replica says that it leads": {forbidden.URL, unnamed,
			[]string{"Leader:      <none>", "API fence:   Unknown", "Running", "  read Lease kube-system/quartermaster: "}, errNobodyLeads},
		"the API server is gone, and a replica says that it leads": {gone.URL, leading,
			[]string{"Leader:      pod-1, as it says itself", "Leading", "Running", "refused"}, nil},
		"the Lease does not exist, and a replica says that it leads": {absent.URL, leading,
			[]string{"Leader:      <none>", "Leading", "Running", "no Lease kube-system/quartermaster; see --namespace and --lease-name"}, errNobodyLeads},
	} {
		t.Run(name, func(t *testing.T) {
			kubeconfig := writeKubeconfig(t, fmt.Sprintf("server: %q, insecure-skip-tls-verify: true", tc.server))
			var out strings.Builder
			cmd := NewCommand("manager", types.NamespacedName{Namespace: "kube-system", Name: "quartermaster"})
			cmd.SetOut(&out)
			cmd.SetErr(io.Discard)
			cmd.SetArgs([]string{"--kubeconfig", kubeconfig, "--endpoint", tc.endpoint, "--endpoint-insecure"})
			if err := cmd.ExecuteContext(t.Context()); !errors.Is(err, tc.err) {
				t.Errorf("error %v, want %v", err, tc.err)
			}
			for _, want := range tc.want {
				if !strings.Contains(out.String(), want) {
					t.Errorf("no %q in\n%s", want, out.String())
				}
			}
			if a, b := strings.Index(out.String(), "\na "), strings.Index(out.String(), "\nb "); a < 0 || b < a {
				t.Errorf("the controllers are not in order:\n%s", out.String())
			}
		})
	}
}

func TestFenceIsFoundByItsNamespace(t *testing.T) {
	binding := func(name, policy, namespace string, action admissionregistrationv1.ValidationAction) runtime.Object {
		return &admissionregistrationv1.ValidatingAdmissionPolicyBinding{ObjectMeta: metav1.ObjectMeta{Name: name},
			Spec: admissionregistrationv1.ValidatingAdmissionPolicyBindingSpec{PolicyName: policy,
				ParamRef: &admissionregistrationv1.ParamRef{Name: namespace}, ValidationActions: []admissionregistrationv1.ValidationAction{action}}}
	}
	own := binding("fence", "quartermaster-fence-w", "w-leader", admissionregistrationv1.Deny)
	for name, tc := range map[string]struct {
		bindings []runtime.Object
		want     fence
	}{
		"a binding under any name":                       {[]runtime.Object{own}, fence{"Installed", "ValidatingAdmissionPolicyBinding fence, not tested"}},
		"a binding that denies nothing":                  {[]runtime.Object{binding("fence", "quartermaster-fence-w", "w-leader", admissionregistrationv1.Audit)}, fence{"Off", "ValidatingAdmissionPolicyBinding fence does not deny"}},
		"no binding":                                     {nil, fence{"Absent", "no ValidatingAdmissionPolicyBinding goes by Namespace w-leader"}},
		"a binding for another Lease":                    {[]runtime.Object{binding("quartermaster-fence", "quartermaster-fence", "quartermaster-leader", admissionregistrationv1.Deny)}, fence{"Absent", "no ValidatingAdmissionPolicyBinding goes by Namespace w-leader"}},
		"a binding of another policy":                    {[]runtime.Object{binding("fence", "theirs", "w-leader", admissionregistrationv1.Deny)}, fence{"Absent", "no ValidatingAdmissionPolicyBinding goes by Namespace w-leader"}},
		"a binding that denies and a binding that warns": {[]runtime.Object{own, binding("warns", "quartermaster-fence-w", "w-leader", admissionregistrationv1.Warn)}, fence{"Installed", "ValidatingAdmissionPolicyBinding fence, not tested"}},
	} {
		t.Run(name, func(t *testing.T) {
			o := options{namespace: metav1.NamespaceSystem, leaseName: "w"}
			assert.Equal(t, "fence", tc.want, o.readFence(t.Context(), fake.NewClientset(tc.bindings...), &report{}))
		})
	}
}

func TestControlCharactersAreNotPrinted(t *testing.T) {
	const bad = "e\x1b[2J\tx\r\u009b\u202e"
	r := report{
		Leader:   leader{Lease: bad, Holder: bad, Pod: bad, Leads: true, LeaseUID: bad},
		Fence:    fence{bad, bad},
		Replicas: []replica{{Name: bad, Node: bad, answer: answer{Reached: true, Error: bad, Controllers: []controllers.Status{{Name: bad, Problem: bad}}}}},
		Problems: []string{bad + "\n" + bad},
	}
	var out strings.Builder
	assert.NoError(t, r.write(&out, "", time.Now()))
	if strings.ContainsAny(out.String(), "\x1b\t\r\u009b\u202e") || strings.Count(out.String(), "e\ufffd[2J\ufffdx") != 14 {
		t.Errorf("%q", out.String())
	}
}

func TestStatusIsPrintedForPeople(t *testing.T) {
	now := time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC)
	before := func(d time.Duration) *metav1.Time { return &metav1.Time{Time: now.Add(-d)} }
	r := report{
		Leader: leader{Lease: "kube-system/quartermaster", Leads: true, Holder: "pod-1_abc", Pod: "pod-1", LeaseUID: "uid", Term: 3,
			Since: before(time.Hour), Renewed: before(time.Second), LeaseDurationSeconds: 15},
		Fence: fence{"Enforced", "tested by the leader"},
		Replicas: []replica{
			{Name: "pod-1", PodPhase: "Running", Ready: true, Started: before(2 * time.Hour), answer: answer{Endpoint: "https://e", Reached: true, Phase: "Leading",
				Controllers: []controllers.Status{{Name: "c", Phase: "Running", Workers: 4, QueueDepth: 2, Failing: 1, Reconciles: 10, Errors: 1, Restarts: 3, Problem: "cannot list a\ncannot list b",
					LastError: &controllers.LastError{Key: "ns/o", Text: "no\nluck", Time: now.Add(-time.Minute)}}}}},
			{Name: "pod-2", PodPhase: "Pending", answer: answer{Error: "no --endpoint has answered for it"}},
			{answer: answer{Endpoint: "https://f", Error: "refused"}},
			{answer: answer{Endpoint: "https://g", Reached: true, Error: "/debug/leader: forbidden"}},
			{answer: answer{Endpoint: "https://h", Reached: true, Problem: "the webhook is away", LeaderProcess: "Answers"}},
			{answer: answer{Endpoint: "https://i", Reached: true, LeaderProcess: "Unreachable"}},
			{answer: answer{Endpoint: "https://j", Reached: true, LeaderProcess: "Answers"}},
		},
		Problems: []string{"list Pods: forbidden"},
	}
	want := `Lease:         kube-system/quartermaster
Leader:        pod-1 (pod-1_abc)
Leads since:   2030-01-02T02:04:05Z (60m ago)
Term:          3 of the Lease with UID uid
Renewed:       2030-01-02T03:04:04Z (1s ago), for 15s each time
API fence:     Enforced (tested by the leader)

REPLICA     PHASE     POD       READY   RESTARTS   AGE      NODE     ENDPOINT
pod-1       Leading   Running   yes     0          120m     <none>   https://e
pod-2       <none>    Pending   no      0          <none>   <none>   not reached: no --endpoint has answered for it
https://f   <none>    <none>    no      0          <none>   <none>   not reached: refused
https://g   <none>    <none>    no      0          <none>   <none>   https://g, but /debug/leader: forbidden
https://h   <none>    <none>    no      0          <none>   <none>   https://h, but the webhook is away
https://i   <none>    <none>    no      0          <none>   <none>   https://i, but it cannot reach the leader's
https://j   <none>    <none>    no      0          <none>   <none>   https://j

CONTROLLER   REPLICA   PHASE     WORKERS   QUEUE   BUSY   FAILING   RECONCILES   ERRORS   PANICS   RESTARTS   PROBLEM                        LAST ERROR
c            pod-1     Running   4         2       0      1         10           1        0        3          cannot list a; cannot list b   60s ago, ns/o: no; luck

Not all could be read:
  list Pods: forbidden
`
	var got strings.Builder
	assert.NoError(t, r.write(&got, "", now))
	assert.Equal(t, "table", want, got.String())
}
