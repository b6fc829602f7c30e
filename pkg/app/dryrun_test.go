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

// send lets a request pass the dry run. It returns what is sent.
func (d *dryRun) send(r *http.Request) (sent *http.Request, err error) {
	_, err = d.wrap(roundTripper(func(r *http.Request) (*http.Response, error) { sent = r; return nil, nil })).RoundTrip(r) //nolint:bodyclose // there is no response
	return sent, err
}

// newTestDryRun returns a dry run for an API server that is reached below a prefix. It has the
// APIServices of a custom resource and of an aggregated API.
func newTestDryRun(t *testing.T) *dryRun {
	t.Helper()
	const services = "/clusters/c/apis/apiregistration.k8s.io/v1/apiservices/"
	d, err := newDryRun(connection{base: &rest.Config{Host: "http://api/clusters/c", Transport: roundTripper(func(r *http.Request) (*http.Response, error) {
		w := httptest.NewRecorder()
		switch r.URL.Path {
		case services + "v1.custom.example.com":
			_, _ = io.WriteString(w, `{"spec":{"group":"custom.example.com"}}`)
		case services + "v1.aggregated.example.com":
			_, _ = io.WriteString(w, `{"spec":{"service":{"name":"x"}}}`)
		default:
			http.NotFound(w, r)
		}
		return w.Result(), nil
	})}})
	must(t, err)
	return d
}

func TestDryRunSendsOrRefuses(t *testing.T) {
	d := newTestDryRun(t)
	for name, tc := range map[string]struct {
		request string
		query   string // of what is sent
		refused string // why it is not
	}{
		"a read passes as it is":                                   {"GET /api/v1/namespaces/a/pods/b?x=y", "x=y", ""},
		"a create is made dry":                                     {"POST /api/v1/namespaces/a/pods?fieldManager=x", "dryRun=All&fieldManager=x", ""},
		"a delete without a body is made dry by its query":         {"DELETE /api/v1/namespaces/a/pods/b?gracePeriodSeconds=0", "dryRun=All&gracePeriodSeconds=0", ""},
		"another value of the option is replaced":                  {"PUT /api/v1/nodes/a?dryRun=&dryRun=None", "dryRun=All", ""},
		"a scale is made dry":                                      {"PATCH /apis/apps/v1/namespaces/a/deployments/b/scale", "dryRun=All", ""},
		"the finalization of a namespace is made dry":              {"PUT /api/v1/namespaces/a/finalize", "dryRun=All", ""},
		"an eviction is made dry":                                  {"POST /api/v1/namespaces/a/pods/b/eviction", "dryRun=All", ""},
		"a binding is made dry":                                    {"POST /api/v1/namespaces/a/pods/b/binding", "dryRun=All", ""},
		"a custom resource is made dry":                            {"POST /apis/custom.example.com/v1/things", "dryRun=All", ""},
		"an update of a status is made dry":                        {"PUT /apis/custom.example.com/v1/things/a/status", "dryRun=All", ""},
		"another subresource cannot be its own":                    {"PUT /apis/custom.example.com/v1/things/a/restart", "", "not a subresource of custom resources"},
		"an aggregated API is refused":                             {"POST /apis/aggregated.example.com/v1/things", "", "aggregated"},
		"a group whose APIService cannot be read is refused":       {"POST /apis/other.example.com/v1/things", "", "APIService v1.other.example.com"},
		"the token of a ServiceAccount is refused":                 {"POST /api/v1/namespaces/a/serviceaccounts/b/token", "", "despite dryRun"},
		"a command by websocket, which is a GET, is refused":       {"GET /api/v1/namespaces/a/pods/b/exec?command=rm", "", "connects"},
		"to attach to a container is refused":                      {"GET /api/v1/namespaces/a/pods/b/attach", "", "connects"},
		"to forward a port is refused":                             {"POST /api/v1/namespaces/a/pods/b/portforward", "", "connects"},
		"a proxy of a Service is refused":                          {"PUT /api/v1/namespaces/a/services/b/proxy/x/y", "", "connects"},
		"the console of a virtual machine by websocket is refused": {"GET /apis/aggregated.example.com/v1/things/a/console", "", "not a subresource"},
		"a write to what is no resource is refused":                {"PUT /debug/flags/v", "", "only requests for resources"},
		"a method that is not known is refused":                    {"MERGE /api/v1/namespaces/a/pods/b", "", "method"},
	} {
		t.Run(name, func(t *testing.T) {
			method, path, _ := strings.Cut(tc.request, " ")
			r := httptest.NewRequest(method, "https://example.com/clusters/c"+path, nil)
			before := r.URL.String()
			sent, err := d.send(r)
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
	const given = `{"kind":"DeleteOptions","apiVersion":"apps/v1","gracePeriodSeconds":7,"preconditions":{"uid":"u"}`
	want := metav1.DeleteOptions{TypeMeta: metav1.TypeMeta{APIVersion: "apps/v1", Kind: "DeleteOptions"}, GracePeriodSeconds: ptr.To[int64](7),
		Preconditions: metav1.NewUIDPreconditions("u"), DryRun: []string{metav1.DryRunAll}}
	for name, tc := range map[string]struct {
		contentType string
		body        string
		refused     string
	}{
		"a body in JSON with a charset":                             {"application/json; charset=utf-8", given + "}", ""},
		"a body without a content type":                             {"", given + "}", ""},
		"a body with dryRun twice is sent with dryRun=All":          {"application/json", given + `,"dryRun":["All"],"dryRun":[]}`, ""},
		"a body that is not JSON is refused":                        {"application/yaml", "gracePeriodSeconds: 7", `"application/yaml" must be application/json`},
		"a body that does not parse as its content type is refused": {"application/json", "k8s\x00x", "request body"},
	} {
		t.Run(name, func(t *testing.T) {
			r := httptest.NewRequest(http.MethodDelete, "https://example.com/clusters/c/api/v1/namespaces/a/pods/b", strings.NewReader(tc.body))
			r.Header.Set("Content-Type", tc.contentType)
			sent, err := d.send(r)
			if tc.refused != "" {
				var refused *DryRunError
				if !errors.As(err, &refused) || sent != nil || !strings.Contains(err.Error(), tc.refused) {
					t.Fatalf("sent %v, error %v, want one about %s", sent, err, tc.refused)
				}
				return
			}
			must(t, err)
			again, err := sent.GetBody() // as for a second attempt on another connection
			must(t, err)
			for _, body := range []io.Reader{sent.Body, again} {
				text, err := io.ReadAll(body)
				if err != nil || sent.ContentLength != int64(len(text)) {
					t.Errorf("length %d: %q, %v", sent.ContentLength, text, err)
				}
				got := metav1.DeleteOptions{}
				if err := json.Unmarshal(text, &got); err != nil {
					t.Fatalf("%s: %v", text, err)
				}
				if diff := cmp.Diff(want, got); diff != "" {
					t.Errorf("the options that are sent:\n%s", diff)
				}
			}
		})
	}
}
