// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
)

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// newTestDryRun returns a dry run for an API server that is reached below a prefix. It has the
// APIServices of a custom resource and of an aggregated API.
func newTestDryRun(t *testing.T) *dryRun {
	t.Helper()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/clusters/c/apis/apiregistration.k8s.io/v1/apiservices/v1.custom.example.com":
			_, _ = io.WriteString(w, `{"spec":{"group":"custom.example.com"}}`)
		case "/clusters/c/apis/apiregistration.k8s.io/v1/apiservices/v1.aggregated.example.com":
			_, _ = io.WriteString(w, `{"spec":{"service":{"name":"x"}}}`)
		default:
			http.NotFound(w, r)
		}
	}))
	t.Cleanup(server.Close)
	d, err := newDryRun(connection{base: &rest.Config{Host: server.URL + "/clusters/c"}})
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func TestDryRunSendsOrRefuses(t *testing.T) {
	d := newTestDryRun(t)
	for name, tc := range map[string]struct {
		request string
		query   string // of what is sent
		refused string // why it is not
	}{
		"a read passes as it is":                                      {"GET /api/v1/namespaces/a/pods/b?x=y", "x=y", ""},
		"a read of a subresource passes":                              {"GET /api/v1/namespaces/a/pods/b/log", "", ""},
		"a read of what is no resource passes":                        {"GET /version", "", ""},
		"a read of an aggregated API passes":                          {"GET /apis/aggregated.example.com/v1/things/a", "", ""},
		"a watch passes":                                              {"GET /api/v1/pods?watch=1", "watch=1", ""},
		"a create is made dry":                                        {"POST /api/v1/namespaces/a/pods?fieldManager=x", "dryRun=All&fieldManager=x", ""},
		"an update is made dry":                                       {"PUT /apis/apps/v1/namespaces/a/deployments/b", "dryRun=All", ""},
		"a patch is made dry":                                         {"PATCH /apis/apps/v1/namespaces/a/deployments/b", "dryRun=All", ""},
		"a delete without a body is made dry by its query":            {"DELETE /api/v1/namespaces/a/pods/b?gracePeriodSeconds=0", "dryRun=All&gracePeriodSeconds=0", ""},
		"a delete of a collection is made dry by its query":           {"DELETE /api/v1/namespaces/a/pods?labelSelector=x", "dryRun=All&labelSelector=x", ""},
		"another value of the option is replaced":                     {"PUT /api/v1/nodes/a?dryRun=&dryRun=None", "dryRun=All", ""},
		"a status is made dry":                                        {"PUT /api/v1/namespaces/a/pods/b/status", "dryRun=All", ""},
		"a scale is made dry":                                         {"PATCH /apis/apps/v1/namespaces/a/deployments/b/scale", "dryRun=All", ""},
		"the finalization of a namespace is made dry":                 {"PUT /api/v1/namespaces/a/finalize", "dryRun=All", ""},
		"an eviction is made dry":                                     {"POST /api/v1/namespaces/a/pods/b/eviction", "dryRun=All", ""},
		"a binding is made dry":                                       {"POST /api/v1/namespaces/a/pods/b/binding", "dryRun=All", ""},
		"a binding in its old form is made dry":                       {"POST /api/v1/namespaces/a/bindings", "dryRun=All", ""},
		"a custom resource is made dry":                               {"POST /apis/custom.example.com/v1/things", "dryRun=All", ""},
		"an update of a status is made dry":                           {"PUT /apis/custom.example.com/v1/things/a/status", "dryRun=All", ""},
		"another subresource cannot be its own":                       {"PUT /apis/custom.example.com/v1/things/a/restart", "", "not a subresource of custom resources"},
		"an aggregated API is refused":                                {"POST /apis/aggregated.example.com/v1/things", "", "aggregated"},
		"a group whose APIService cannot be read is refused":          {"POST /apis/other.example.com/v1/things", "", "APIService v1.other.example.com"},
		"a metric is read, though its name stands like a subresource": {"GET /apis/custom.metrics.k8s.io/v1beta2/namespaces/a/pods/*/http_requests?x=y", "x=y", ""},
		"the token of a ServiceAccount is refused":                    {"POST /api/v1/namespaces/a/serviceaccounts/b/token", "", "despite dryRun"},
		"a command in a container is refused":                         {"POST /api/v1/namespaces/a/pods/b/exec?command=rm", "", "connects"},
		"a command by websocket, which is a GET, is refused":          {"GET /api/v1/namespaces/a/pods/b/exec?command=rm", "", "connects"},
		"to attach to a container is refused":                         {"GET /api/v1/namespaces/a/pods/b/attach", "", "connects"},
		"to forward a port is refused":                                {"POST /api/v1/namespaces/a/pods/b/portforward", "", "connects"},
		"a proxy of a Service is refused":                             {"PUT /api/v1/namespaces/a/services/b/proxy/x/y", "", "connects"},
		"a proxy of a node is refused, whatever the method":           {"GET /api/v1/nodes/b/proxy/run", "", "connects"},
		"the console of a virtual machine by websocket is refused":    {"GET /apis/aggregated.example.com/v1/things/a/console", "", "not a subresource"},
		"anything that passes requests on is refused":                 {"GET /apis/aggregated.example.com/v1/things/a/proxy", "", "connects"},
		"a read of an aggregated API's status passes":                 {"GET /apis/aggregated.example.com/v1/things/a/status", "", ""},
		"a write to what is no resource is refused":                   {"PUT /debug/flags/v", "", "only requests for resources"},
		"a method that is not known is refused":                       {"MERGE /api/v1/namespaces/a/pods/b", "", "method"},
	} {
		t.Run(name, func(t *testing.T) {
			method, path, _ := strings.Cut(tc.request, " ")
			r := httptest.NewRequest(method, "https://example.com/clusters/c"+path, nil)
			before := r.URL.String()
			var sent *http.Request
			_, err := d.wrap(roundTripper(func(r *http.Request) (*http.Response, error) {
				sent = r
				return nil, nil
			})).RoundTrip(r) //nolint:bodyclose // there is no response
			if r.URL.String() != before {
				t.Errorf("the caller's request was changed to %s", r.URL)
			}
			if tc.refused == "" {
				if err != nil || sent == nil {
					t.Fatalf("not sent: %v", err)
				}
				if sent.URL.RawQuery != tc.query {
					t.Errorf("sent with %q, want %q", sent.URL.RawQuery, tc.query)
				}
				return
			}
			var refused *DryRunError
			if !errors.As(err, &refused) || sent != nil {
				t.Fatalf("sent %v, error %v", sent, err)
			}
			for _, part := range []string{tc.refused, "--dry-run", method, r.URL.Path} {
				if !strings.Contains(err.Error(), part) {
					t.Errorf("%q lacks %q", err, part)
				}
			}
		})
	}
}

func TestDryRunOfADeleteWithABody(t *testing.T) {
	d := newTestDryRun(t)
	given := metav1.DeleteOptions{
		GracePeriodSeconds: ptr.To[int64](7),
		Preconditions:      metav1.NewUIDPreconditions("u"),
		DryRun:             []string{},
	}
	encode := func(apiVersion string) string {
		given := given
		given.TypeMeta = metav1.TypeMeta{APIVersion: apiVersion, Kind: "DeleteOptions"}
		text, err := json.Marshal(given)
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	want := given
	want.DryRun = []string{metav1.DryRunAll}
	for name, tc := range map[string]struct {
		contentType string
		body        string
		refused     string
	}{
		"a body in JSON":                                            {"application/json", encode("v1"), ""},
		"a body in the version of a group":                          {"application/json", encode("apps/v1"), ""},
		"a body in JSON with a charset":                             {"application/json; charset=utf-8", encode("apps/v1"), ""},
		"a body without kind":                                       {"application/json", `{"gracePeriodSeconds":7,"preconditions":{"uid":"u"}}`, ""},
		"a body without a content type":                             {"", encode("v1"), ""},
		"a body with dryRun twice is sent with dryRun=All":          {"application/json", `{"gracePeriodSeconds":7,"preconditions":{"uid":"u"},"dryRun":["All"],"dryRun":[]}`, ""},
		"a body that is not JSON is refused":                        {"application/yaml", "gracePeriodSeconds: 7", `"application/yaml" must be application/json`},
		"a body that does not parse as its content type is refused": {"application/json", "k8s\x00x", "request body"},
	} {
		t.Run(name, func(t *testing.T) {
			r := httptest.NewRequest(http.MethodDelete, "https://example.com/clusters/c/api/v1/namespaces/a/pods/b", strings.NewReader(tc.body))
			r.Header.Set("Content-Type", tc.contentType)
			var sent *http.Request
			_, err := d.wrap(roundTripper(func(r *http.Request) (*http.Response, error) {
				sent = r
				return nil, nil
			})).RoundTrip(r) //nolint:bodyclose // there is no response
			if tc.refused != "" {
				var refused *DryRunError
				if !errors.As(err, &refused) || sent != nil || !strings.Contains(err.Error(), tc.refused) {
					t.Fatalf("sent %v, error %v, want one about %s", sent, err, tc.refused)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			again, err := sent.GetBody() // as for a second attempt on another connection
			if err != nil {
				t.Fatal(err)
			}
			for _, body := range []io.Reader{sent.Body, again} {
				text, err := io.ReadAll(body)
				if err != nil || sent.ContentLength != int64(len(text)) {
					t.Errorf("length %d: %q, %v", sent.ContentLength, text, err)
				}
				got := metav1.DeleteOptions{}
				if err := json.Unmarshal(text, &got); err != nil {
					t.Fatalf("%s: %v", text, err)
				}
				got.TypeMeta = metav1.TypeMeta{}
				if diff := cmp.Diff(want, got); diff != "" {
					t.Errorf("the options that are sent:\n%s", diff)
				}
			}
		})
	}
}
