// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/wait"
	corev1ac "k8s.io/client-go/applyconfigurations/core/v1"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	clientscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/flowcontrol"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/internal/served"
	"github.com/quartermaster-dev/quartermaster/internal/subtest"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/builtin"
	"github.com/quartermaster-dev/quartermaster/pkg/election"
	"github.com/quartermaster-dev/quartermaster/pkg/election/writefence"
	"github.com/quartermaster-dev/quartermaster/pkg/informers"
)

// apiServer responds to every request with an empty ConfigMap, and records methods and credentials.
type apiServer struct {
	*httptest.Server
	mu       sync.Mutex
	requests []string // METHOD PATH?QUERY
}

func newAPIServer(t *testing.T) *apiServer {
	t.Helper()
	s := &apiServer{}
	s.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.mu.Lock()
		defer s.mu.Unlock()
		w.Header().Set("Content-Type", "application/json")
		body := `{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"x","namespace":"shop"}}`
		if strings.HasSuffix(r.URL.Path, "/token") {
			body = `{"apiVersion":"authentication.k8s.io/v1","kind":"TokenRequest","status":{"token":"t","expirationTimestamp":"2100-01-01T00:00:00Z"}}`
		} else {
			s.requests = append(s.requests, r.Method+" "+r.URL.RequestURI())
		}
		_, _ = w.Write([]byte(body))
	}))
	t.Cleanup(s.Close)
	return s
}

func (s *apiServer) take() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	got := s.requests
	s.requests = nil
	return got
}

// knownKinds is a Host.Mapping that needs no API server.
func knownKinds(_ context.Context, kind schema.GroupVersionKind) (*meta.RESTMapping, error) {
	m := meta.NewDefaultRESTMapper(nil)
	m.Add(corev1.SchemeGroupVersion.WithKind("ConfigMap"), meta.RESTScopeNamespace)
	m.Add(corev1.SchemeGroupVersion.WithKind("Namespace"), meta.RESTScopeRoot)
	return m.RESTMapping(kind.GroupKind(), kind.Version)
}

// TestClientsAllHaveTheFence builds controllers as Run does. While this replica
// does not lead, it tries to write with every client that they get.
func TestClientsAllHaveTheFence(t *testing.T) {
	for name, dryRun := range map[string]bool{"in earnest": false, "with --dry-run": true} {
		t.Run(name, func(t *testing.T) {
			server := newAPIServer(t)
			var host controllers.Host
			probe := withFunctions(controllers.Entry{Name: "probe", New: func(h controllers.Host) (controllers.Controller, error) { host = h; return &scripted{}, nil }})
			o := newOptions(t, With(probe))
			o.Client.Master, o.Client.ContentType, o.Generic.DryRun = server.URL, "application/json", dryRun
			_, err := builtProcess(t, o)
			assert.NoError(t, err)
			host.Scheme, host.Mapping = clientscheme.Scheme, knownKinds
			ctx := t.Context()
			dyn, err := dynamic.NewForConfig(host.RESTConfig)
			assert.NoError(t, err)
			configMaps, configMap := host.Client.CoreV1().ConfigMaps("shop"), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "x"}}
			remove := func(c dynamic.Interface) error {
				return c.Resource(informers.ConfigMaps).Namespace("shop").Delete(ctx, "x", metav1.DeleteOptions{})
			}
			for what, write := range map[string]func() error{
				"create": func() error { _, err := configMaps.Create(ctx, configMap, metav1.CreateOptions{}); return err },
				"update by a client of one type": func() error {
					_, err := controllers.ClientFor[*corev1.ConfigMap](host, informers.ConfigMaps).Namespace("shop").Update(ctx, configMap, metav1.UpdateOptions{})
					return err
				},
				"apply":                        func() error { return host.Apply(ctx, corev1ac.ConfigMap("x", "shop")) },
				"delete by the dynamic client": func() error { return remove(host.Dynamic) },
				"delete by another client made of the same configuration": func() error { return remove(dyn) },
			} {
				if err := write(); !errors.Is(err, writefence.ErrNotLeading) {
					t.Errorf("%s while not leading: %v, want ErrNotLeading", what, err)
				}
			}
			assert.Equal(t, "requests that the API server saw", 0, len(server.take()))
			if _, err := configMaps.Get(ctx, "x", metav1.GetOptions{}); err != nil {
				t.Errorf("a read was refused: %v", err)
			}
			assert.Equal(t, "requests that the API server saw of one read", 1, len(server.take()))
		})
	}
}

// TestCacheReportsTooManyRequests has an API server, or a proxy, that tells clients to come back in a month.
func TestCacheReportsTooManyRequests(t *testing.T) {
	probe := withFunctions(controllers.Entry{Name: "probe", Needs: needing(informers.Need{Resource: informers.ConfigMaps})})
	o := newOptions(t, With(probe))
	o.Client.RESTConfig = &rest.Config{Host: "http://api", Transport: roundTripper(func(r *http.Request) (*http.Response, error) {
		header := http.Header{"Retry-After": {fmt.Sprint(30 * 24 * 3600)}}
		return &http.Response{StatusCode: http.StatusTooManyRequests, Header: header, Body: http.NoBody, Request: r}, nil
	})}
	p, err := builtProcess(t, o)
	assert.NoError(t, err)
	p.cache.Start(t.Context())
	tells := func(context.Context) (bool, error) {
		err := p.cache.Problem("probe")
		return err != nil && strings.Contains(err.Error(), "TooManyRequests"), nil
	}
	if err := wait.PollUntilContextTimeout(t.Context(), 10*time.Millisecond, time.Minute, true, tells); err != nil {
		t.Errorf("the problem is %v", p.cache.Problem("probe"))
	}
}

func TestClientsShareOneLimit(t *testing.T) {
	server := newAPIServer(t)
	o := newOptions(t, With(builtin.Entries()...))
	o.Client.Master = server.URL
	open := func(next http.RoundTripper) http.RoundTripper { return next }
	for name, tc := range map[string]struct {
		qps     float32
		limited bool
	}{
		"a limit is shared by all clients": {7, true},
		"a negative one is none":           {-1, false},
	} {
		t.Run(name, func(t *testing.T) {
			o.Client.QPS, o.Client.Burst = tc.qps, 7
			configs, err := newClientConfigs(o.Client)
			assert.NoError(t, err)
			clients, err := newClientFactory(o, configs, open)
			assert.NoError(t, err)
			limiter := configs.base.RateLimiter
			if (limiter != nil) != tc.limited {
				t.Fatalf("limiter %v", limiter)
			}
			one, err := clients.typed(clients.forController("one"))
			assert.NoError(t, err)
			for what, got := range map[string]flowcontrol.RateLimiter{
				"a controller":         clients.forController("one").RateLimiter,
				"another":              clients.forController("two").RateLimiter,
				"a controller's typed": one.CoreV1().RESTClient().GetRateLimiter(),
				"the cache":            configs.builtIn(configs.named("informers")).RateLimiter,
				"Events":               configs.named("events").RateLimiter,
			} {
				if got != limiter {
					t.Errorf("%s: limiter %v, want the process's, %v", what, got, limiter)
				}
			}
			if elector := election.ClientConfig(configs.base); elector.RateLimiter != nil || elector.QPS <= 0 {
				t.Error("the elector's limit is not its own")
			}
		})
	}
}

func TestOnlyTypedClientsUseTheContentType(t *testing.T) {
	var sent []string
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		sent = append(sent, r.Header.Get("Content-Type"))
		w.Header().Set("Content-Type", "application/json") // which protobuf clients accept
		_, _ = w.Write([]byte(`{"apiVersion":"v1","kind":"ConfigMap"}`))
	}))
	defer server.Close()
	for _, contentType := range []string{"application/vnd.kubernetes.protobuf", "application/json"} {
		var config ClientConfig
		config.Master, config.ContentType = server.URL, contentType
		configs, err := newClientConfigs(config)
		assert.NoError(t, err)
		typed, err := configs.typed(configs.named("typed"))
		assert.NoError(t, err)
		others, err := kubernetes.NewForConfig(configs.named("others"))
		assert.NoError(t, err)
		dry, err := newClientFactory(&Options{Generic: GenericConfig{DryRun: true}}, configs, nil)
		if err != nil || dry.contentType != "application/json" {
			t.Errorf("under --dry-run, which reads what is sent, clients speak %v, error %v", dry, err)
		}
		sent = nil
		for _, client := range []kubernetes.Interface{typed, others} {
			if _, err := client.CoreV1().ConfigMaps("a").Create(t.Context(), &corev1.ConfigMap{}, metav1.CreateOptions{}); err != nil {
				t.Errorf("%s: %v", contentType, err)
			}
		}
		assert.Equal(t, "sent", []string{contentType, "application/json"}, sent)
	}
}

// TestWaitForAPIServer answers /readyz with one code after the other, the last one for ever.
func TestWaitForAPIServer(t *testing.T) {
	for name, tc := range map[string]struct {
		codes []int
		asks  int
	}{
		"a ready API server is not waited for":                                   {[]int{200}, 1},
		"an API server that is not ready is asked until it is":                   {[]int{500, 500, 200}, 3},
		"an API server that lacks the roles is asked until it has them":          {[]int{403, 401, 403, 500, 403, 200}, 6},
		"an API server that forbids for good counts as answering":                {[]int{500, 403}, 1 + maxRefusals},
		"an API server that accepts no credentials for good counts as answering": {[]int{401}, maxRefusals},
	} {
		subtest.InBubble(t, name, func(t *testing.T) {
			asked := 0
			config := &rest.Config{QPS: -1, Transport: roundTripper(func(*http.Request) (*http.Response, error) {
				code := tc.codes[min(asked, len(tc.codes)-1)]
				asked++
				return &http.Response{StatusCode: code, Header: http.Header{}, Body: http.NoBody}, nil
			})}
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			assert.NoError(t, waitForAPIServer(ctx, config))
			assert.Equal(t, "times asked", tc.asks, asked)
		})
	}
}

// TestWebhookHoldsUpAWorkerForTenSeconds answers as the API server does if a webhook refuses with a code and
// a delay of its own. client-go would wait that long in the request, ten times.
func TestWebhookHoldsUpAWorkerForTenSeconds(t *testing.T) {
	for seconds, want := range map[int]time.Duration{1: 10 * time.Second, 2: 0, 30 * 24 * 3600: 0} {
		subtest.InBubble(t, fmt.Sprint(seconds), func(t *testing.T) {
			refusal := apierrors.NewTooManyRequests("go away", seconds)
			refusal.ErrStatus.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}
			body, err := json.Marshal(refusal.ErrStatus)
			assert.NoError(t, err)
			server := roundTripper(func(r *http.Request) (*http.Response, error) {
				header := http.Header{"Content-Type": {"application/json"}, "Retry-After": {fmt.Sprint(seconds)}}
				return &http.Response{StatusCode: http.StatusTooManyRequests, Header: header, Body: io.NopCloser(bytes.NewReader(body)), Request: r}, nil
			})
			through := func(next http.RoundTripper) http.RoundTripper { return next }
			all := &clientFactory{clientConfigs: clientConfigs{base: &rest.Config{Host: "http://api", Transport: server, QPS: -1}}, fence: through}
			client, err := kubernetes.NewForConfig(all.forController("x"))
			assert.NoError(t, err)
			begun := time.Now()
			_, err = client.CoreV1().ConfigMaps("shop").Create(t.Context(), &corev1.ConfigMap{}, metav1.CreateOptions{})
			if after, ok := apierrors.SuggestsClientDelay(err); !ok || after != seconds {
				t.Errorf("the error is %v, with a delay of %d s", err, after)
			}
			assert.Equal(t, "time taken", want, time.Since(begun))
		})
	}
	response, _ := withoutLongWaits(roundTripper(func(*http.Request) (*http.Response, error) {
		return &http.Response{StatusCode: http.StatusOK, Header: http.Header{"Retry-After": {"5"}}, Body: http.NoBody}, nil
	})).RoundTrip(nil)
	defer response.Body.Close()
	assert.Equal(t, "wait that a proxied Pod names", "5", response.Header.Get("Retry-After"))
}

// discoveryServer answers discovery by path, with a status if the answer is one, and hangs at the others.
type discoveryServer struct {
	answers map[string]string
	asked   []string
}

func (s *discoveryServer) RoundTrip(r *http.Request) (*http.Response, error) {
	s.asked = append(s.asked, r.URL.Path)
	body, ok := s.answers[r.URL.Path]
	if !ok {
		<-r.Context().Done()
		return nil, r.Context().Err()
	}
	status := cmp.Or(map[string]int{"404": 404, "503": 503}[body], 200)
	return &http.Response{StatusCode: status, Header: http.Header{"Content-Type": {"application/json"}}, Body: io.NopCloser(strings.NewReader(body)), Request: r}, nil
}

const widgetsAlone = `{"kind":"APIResourceList","resources":[
	{"name":"widgets","kind":"Widget","namespaced":true},{"name":"widgets/scale","kind":"Scale","namespaced":true}]}`

// noServer stands for 404 at every path, noAnswer for a request that hangs.
const noServer, noAnswer, someGroups = "no server", "no answer", `{"kind":"APIGroupList","groups":[{"name":"apps","versions":[{"groupVersion":"apps/v1","version":"v1"}]}]}`

func TestMapperAsksForUnknownKinds(t *testing.T) {
	widget, scale, gadget := schema.GroupVersionKind{Group: "example.com", Version: "v1", Kind: "Widget"},
		schema.GroupVersionKind{Group: "example.com", Version: "v1", Kind: "Scale"}, schema.GroupVersionKind{Group: "example.com", Version: "v1", Kind: "Gadget"}
	away := schema.GroupVersionKind{Group: "away.example.com", Version: "v1", Kind: "Thing"}
	const path = "/apis/example.com/v1"
	for name, tc := range map[string]struct {
		answer string // at first
		ask    []schema.GroupVersionKind
		later  string // the answer after the first round; asked again after unknownKindTTL, or after pause
		want   []string
		asked  int
		pause  time.Duration
	}{
		"a kind is asked for once":          {widgetsAlone, []schema.GroupVersionKind{widget, widget}, widgetsAlone, []string{"widgets", "widgets", "widgets", "widgets"}, 1, 0},
		"an unknown one every 10 s at most": {widgetsAlone, []schema.GroupVersionKind{gadget, gadget}, widgetsAlone, []string{"none", "none", "none", "none"}, 2, 0},
		"one that comes is found":           {widgetsAlone, []schema.GroupVersionKind{gadget}, strings.ReplaceAll(strings.ReplaceAll(widgetsAlone, "widget", "gadget"), "Widget", "Gadget"), []string{"none", "gadgets"}, 2, 0},
		"one that is defined again with another plural is found after 10 min, once it has been asked for": {
			widgetsAlone, []schema.GroupVersionKind{widget, widget}, strings.Replace(widgetsAlone, "widgets", "widgetries", 1),
			[]string{"widgets", "widgets", "widgets", "widgetries"}, 2, knownKindTTL},
		"one that is defined again is not looked for before": {
			widgetsAlone, []schema.GroupVersionKind{widget}, strings.Replace(widgetsAlone, "widgets", "widgetries", 1), []string{"widgets", "widgets"}, 1, knownKindTTL - time.Second},
		"a subresource is none":                                    {widgetsAlone, []schema.GroupVersionKind{scale}, widgetsAlone, []string{"none", "none"}, 2, 0},
		"a version that comes is found":                            {"404", []schema.GroupVersionKind{widget, widget}, widgetsAlone, []string{"none", "none", "widgets", "widgets"}, 2, 0},
		"a version that goes is noticed after 10 min":              {widgetsAlone, []schema.GroupVersionKind{widget, widget}, "404", []string{"widgets", "widgets", "widgets", "none"}, 2, knownKindTTL},
		"a known kind does not wait for an answer":                 {widgetsAlone, []schema.GroupVersionKind{widget}, noAnswer, []string{"widgets", "widgets"}, 2, knownKindTTL},
		"a known kind outlasts a failure, and is not asked again":  {widgetsAlone, []schema.GroupVersionKind{widget, widget}, "503", []string{"widgets", "widgets", "widgets", "widgets"}, 2, knownKindTTL},
		"a known kind outlasts a load balancer that knows no path": {widgetsAlone, []schema.GroupVersionKind{widget, gadget}, noServer, []string{"widgets", "none", "widgets", "failure"}, 3, knownKindTTL},
		"a failure is not remembered":                              {"503", []schema.GroupVersionKind{widget, widget}, widgetsAlone, []string{"failure", "failure", "widgets", "widgets"}, 3, 0},
	} {
		subtest.InBubble(t, name, func(t *testing.T) {
			server := &discoveryServer{answers: map[string]string{path: tc.answer, "/api": "404", "/apis": someGroups}}
			m, err := newKindMapper(&rest.Config{Host: "http://api", Transport: server})
			assert.NoError(t, err)
			waits, giveUp := context.WithCancel(t.Context())
			gaveUp := make(chan error, 1)
			go func() { _, err := m.mapping(waits, away); gaveUp <- err }()
			synctest.Wait()
			var got []string
			for range 2 {
				for _, kind := range tc.ask {
					start := time.Now()
					found, err := m.mapping(t.Context(), kind)
					if d := time.Since(start); d > 0 {
						t.Errorf("it took %s to find %s", d, kind.Kind)
					}
					synctest.Wait() // for what is asked beside
					switch {
					case meta.IsNoMatchError(err):
						got = append(got, "none")
					case err != nil:
						got = append(got, "failure")
					default:
						got = append(got, found.Resource.Resource)
					}
				}
				server.answers[path] = tc.later
				switch tc.later {
				case noAnswer:
					delete(server.answers, path)
				case noServer:
					server.answers = map[string]string{path: "404", "/api": "404", "/apis": "404"}
				}
				<-time.After(max(unknownKindTTL, tc.pause))
			}
			asked := len(slices.DeleteFunc(slices.Clone(server.asked), func(p string) bool { return p != path }))
			if !slices.Equal(got, tc.want) || asked != tc.asked {
				t.Errorf("found %v with %d requests, want %v with %d", got, asked, tc.want, tc.asked)
			}
			giveUp()
			if err := <-gaveUp; tc.pause == 0 && !errors.Is(err, context.Canceled) {
				t.Errorf("who waits for a version that hangs gave up with %v", err)
			}
			<-time.After(served.Timeout)
			synctest.Wait()
		})
	}
}
