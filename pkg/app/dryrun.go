// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"mime"
	"net/http"
	"net/url"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/election/writefence"
)

// dryRun turns the requests of controllers into dry runs. The API server reads the option dryRun from the
// query and, for a DELETE with a body, which client-go always sends, from the body. Requests that may have an
// effect nevertheless are refused: some subresources ignore the option, and a proxied connection or an
// aggregated API may not support dry runs.
type dryRun struct {
	prefix      string // of every path, if the API server is behind another server
	paths       request.RequestInfoFactory
	builtIn     *runtime.Scheme
	apiServices rest.Interface
}

func newDryRun(c clientConfigs) (*dryRun, error) {
	base, _, err := rest.DefaultServerUrlFor(c.base)
	if err != nil {
		return nil, err
	}
	client, err := kubernetes.NewForConfig(c.named("dry-run"))
	if err != nil {
		return nil, err
	}
	builtIn, err := NewScheme(nil)
	if err != nil {
		return nil, err
	}
	return &dryRun{
		prefix: strings.TrimSuffix(base.Path, "/"),
		paths: request.RequestInfoFactory{
			APIPrefixes: sets.NewString("api", "apis"), GrouplessAPIPrefixes: sets.NewString("api"),
		},
		builtIn:     builtIn,
		apiServices: client.RESTClient(),
	}, nil
}

// wrap returns a transport that sends requests to next as dry runs.
func (d *dryRun) wrap(next http.RoundTripper) http.RoundTripper {
	return transport{next, func(r *http.Request) (*http.Response, error) {
		if !writefence.IsWrite(r) {
			return next.RoundTrip(r)
		}
		reason := d.reasonNotTo(r)
		if reason == "" {
			r, reason = d.asDryRun(r)
		}
		if reason != "" {
			if r.Body != nil {
				_ = r.Body.Close() // a RoundTripper must close it, and cannot report an error
			}
			return nil, &controllers.DryRunError{Method: r.Method, Path: r.URL.Path, Reason: reason}
		}
		return next.RoundTrip(r)
	}}
}

// reasonNotTo returns why a write must not be sent, or "" if it may.
func (d *dryRun) reasonNotTo(r *http.Request) string {
	path := url.URL{Path: strings.TrimPrefix(r.URL.Path, d.prefix), RawQuery: r.URL.RawQuery}
	info, err := d.paths.NewRequestInfo(&http.Request{Method: r.Method, URL: &path})
	if err != nil {
		return err.Error()
	}
	if !info.IsResourceRequest {
		return "only requests for resources can be dry runs"
	}
	builtIn := info.APIGroup == "" || d.builtIn.IsGroupRegistered(info.APIGroup)
	switch info.Subresource {
	case "", "status", "scale":
	case "attach", "exec", "portforward", "proxy":
		return "what it connects to does not know dry runs" // for any method: exec by websocket is a GET
	default:
		if !builtIn {
			return "it is not a subresource of custom resources"
		}
		// For instance, the API server would issue a valid token of a ServiceAccount.
		if r.Method == http.MethodPost && info.Subresource != "binding" && info.Subresource != "eviction" {
			return "the API server might create this subresource despite dryRun"
		}
	}
	if builtIn {
		return ""
	}
	return d.aggregated(r.Context(), schema.GroupVersion{Group: info.APIGroup, Version: info.APIVersion})
}

// aggregated returns "" if gv is a group of custom resources, and a reason not to send a write if an
// aggregated API server serves it: that server may ignore dryRun, as KubeVirt's does when it restarts a
// machine. The APIService says who serves the group.
func (d *dryRun) aggregated(ctx context.Context, gv schema.GroupVersion) string {
	name := gv.Version + "." + gv.Group
	raw, err := d.apiServices.Get().AbsPath("/apis/apiregistration.k8s.io/v1/apiservices", name).Do(ctx).Raw()
	var apiService struct {
		Spec *struct{ Service *struct{} }
	}
	if err == nil {
		err = json.Unmarshal(raw, &apiService)
	}
	switch {
	case err != nil:
		return fmt.Sprintf("it is not known whether an aggregated API server serves it: get APIService %s: %v", name, err)
	case apiService.Spec == nil || apiService.Spec.Service != nil:
		return "an aggregated API server serves it, which may not know dry runs"
	}
	return ""
}

// asDryRun returns the request as a dry run. If that is not possible, it returns r and the reason.
func (d *dryRun) asDryRun(r *http.Request) (*http.Request, string) {
	dry := r.Clone(r.Context())
	query := dry.URL.Query()
	query.Set("dryRun", metav1.DryRunAll)
	dry.URL.RawQuery = query.Encode()
	switch r.Method {
	case http.MethodPost, http.MethodPut, http.MethodPatch:
		return dry, ""
	case http.MethodDelete:
	default:
		return r, "the method is not known"
	}
	if r.Body == nil {
		return dry, ""
	}

	body, err := io.ReadAll(r.Body)
	if err != nil {
		return r, err.Error()
	}
	if len(body) > 0 {
		body, err = deleteOptions(body, r.Header.Get("Content-Type"))
		if err != nil {
			return r, err.Error()
		}
		dry.Header.Set("Content-Type", runtime.ContentTypeJSON)
	}
	_ = r.Body.Close() // it has been read to its end
	dry.GetBody = func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(body)), nil }
	dry.Body, _ = dry.GetBody()
	dry.ContentLength, dry.TransferEncoding = int64(len(body)), nil
	return dry, ""
}

// deleteOptions returns the DeleteOptions in a body, with dryRun. The clients of [controllers.Host] send
// JSON.
func deleteOptions(body []byte, contentType string) ([]byte, error) {
	if media, _, _ := mime.ParseMediaType(contentType); media != "" && media != runtime.ContentTypeJSON {
		return nil, fmt.Errorf("request body: content type %q must be %s", contentType, runtime.ContentTypeJSON)
	}
	var options metav1.DeleteOptions
	if err := json.Unmarshal(body, &options); err != nil {
		return nil, fmt.Errorf("request body: %w", err)
	}
	options.DryRun = []string{metav1.DryRunAll}
	return json.Marshal(options)
}
