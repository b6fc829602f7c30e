// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	corev1ac "k8s.io/client-go/applyconfigurations/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"k8s.io/component-base/metrics"
	"k8s.io/utils/ptr"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/internal/loopmetrics"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/election/writefence"
	"github.com/quartermaster-dev/quartermaster/pkg/informers"
)

// elsewhereOf returns the clusters of a controller in a process that has not been elected, and changes the
// process's options before.
func elsewhereOf(t *testing.T, change func(*Options)) *openClusters {
	t.Helper()
	o := newOptions(t, With())
	o.Client.RESTConfig = &rest.Config{Host: newAPIServer(t).URL, BearerToken: "our own"}
	change(o)
	p, err := builtProcess(t, o)
	assert.NoError(t, err)
	o.workers["one"] = new(int)
	one := &openClusters{process: p, controller: "one"}
	t.Cleanup(func() { hostedControllers{{clusters: one}}.releaseClusters() })
	return one
}

func TestOpenRefusesABadNameOrConfig(t *testing.T) {
	one := elsewhereOf(t, func(*Options) {})
	_, err := one.open("open", &rest.Config{Host: "x"})
	assert.NoError(t, err)
	one.process.options.workers["other"] = ptr.To(3)
	theirs, err := (&openClusters{process: one.process, controller: "other"}).open("theirs", &rest.Config{Host: "x"})
	assert.NoError(t, err)
	assert.Equal(t, "workers of a loop in another cluster, and the time of a reconcile", []any{3, otherClusterTimeout}, []any{theirs.LoopOptions.Workers, theirs.LoopOptions.Timeout})
	defer theirs.Close()
	send := map[string]func() error{"/api/v1/nodes/n": func() error { panic("x") }, "/api/v1/namespaces/shop/pods/p": func() error { return syscall.ECONNREFUSED }}
	broken, err := one.open("broken", &rest.Config{Host: "http://x", Transport: roundTripper(func(r *http.Request) (*http.Response, error) { return nil, send[r.URL.Path]() })})
	assert.NoError(t, err)
	_, panicked := broken.Client.CoreV1().Nodes().Get(t.Context(), "n", metav1.GetOptions{})
	_, refused := broken.Client.CoreV1().Pods("shop").Get(t.Context(), "p", metav1.GetOptions{})
	assert.Equal(t, "a panic is an error, and errors keep their type", []bool{true, true}, []bool{strings.Contains(fmt.Sprint(panicked), "panic"), errors.Is(refused, syscall.ECONNREFUSED)})
	for name, tc := range map[string]struct {
		cluster string
		config  *rest.Config
		err     string // "" if it can
	}{
		"a cluster with a token":                  {"far", &rest.Config{Host: "far.example.com", BearerToken: "its", Timeout: time.Minute}, ""},
		"a cluster with a certificate":            {"far.example.com", &rest.Config{Host: "https://far.example.com", TLSClientConfig: rest.TLSClientConfig{Insecure: true}}, ""},
		"a name that another controller has open": {"theirs", &rest.Config{Host: "x"}, ""},
		"a name that is no label":                 {"a/b", &rest.Config{Host: "x"}, "a lowercase RFC 1123 subdomain"},
		"none":                                    {"far", nil, "names no API server"},
		"no address":                              {"far", &rest.Config{}, "names no API server"},
		"our own token":                           {"far", &rest.Config{Host: "x", BearerToken: "our own"}, "has the token of this process"},
		"a program":                               {"far", &rest.Config{Host: "x", ExecProvider: &clientcmdapi.ExecConfig{Command: "sh"}}, "runs a program"},
		"a plugin":                                {"far", &rest.Config{Host: "x", AuthProvider: &clientcmdapi.AuthProviderConfig{}}, "runs a program"},
		"a transport":                             {"far", &rest.Config{Host: "x", WrapTransport: withoutLongWaits}, "has a WrapTransport"},
		"a file with the token":                   {"far", &rest.Config{Host: "x", BearerTokenFile: "/token"}, "names a file"},
		"a file with the authority":               {"far", &rest.Config{Host: "x", TLSClientConfig: rest.TLSClientConfig{CAFile: "/ca"}}, "names a file"},
		"a file with the key":                     {"far", &rest.Config{Host: "x", TLSClientConfig: rest.TLSClientConfig{KeyFile: "/key"}}, "names a file"},
		"an authority that is none":               {"far", &rest.Config{Host: "x", TLSClientConfig: rest.TLSClientConfig{CAData: []byte("x")}}, "unable to load root certificates"},
		"a name that is open already":             {"open", &rest.Config{Host: "x"}, "a cluster of this name is already open"},
	} {
		t.Run(name, func(t *testing.T) {
			c, err := one.open(tc.cluster, tc.config)
			if tc.err == "" {
				assert.NoError(t, err)
				assert.Equal(t, "timeout", tc.config.Timeout, c.RESTConfig.Timeout)
				if got := c.RESTConfig.Host; !strings.HasPrefix(got, "https://") {
					t.Errorf("its address is %s", got)
				}
				c.Close()
				again, err := one.open(tc.cluster, tc.config)
				assert.NoError(t, err)
				again.Close()
				return
			}
			if err == nil || !strings.Contains(err.Error(), tc.err) || !strings.HasPrefix(err.Error(), "cluster ") {
				t.Errorf("error %v", err)
			}
		})
	}
}

// recordedLoop is a loop that says what happens to it.
type recordedLoop chan string

func (l recordedLoop) Run(ctx context.Context) error {
	l <- fmt.Sprint("begins, ", context.Cause(ctx))
	<-ctx.Done()
	l <- "ends"
	return ctx.Err()
}

func (recordedLoop) Status() controllers.Status { return controllers.Status{} }
func (l recordedLoop) Close()                   { l <- "is closed" }

func TestClusterRunsALoopUntilItIsStoppedOrTheClusterIsClosed(t *testing.T) {
	c, err := elsewhereOf(t, func(o *Options) { o.Generic.ShutdownTimeout = time.Second }).open("far", &rest.Config{Host: "x"})
	assert.NoError(t, err)
	assert.Equal(t, "time to drain, so that the Lease is released", time.Second/2, c.LoopOptions.DrainTimeout)
	reconcile, end := context.WithCancel(t.Context())
	end()
	loop := make(recordedLoop, 3)
	for range 2 {
		stop := c.Go(reconcile, loop)
		assert.Equal(t, "the loop", "begins, <nil>", <-loop)
		stop()
		stop()
		if len(loop) != 2 || <-loop != "ends" || <-loop != "is closed" {
			t.Error("stop has not waited until the loop was closed")
		}
	}
	c.Go(reconcile, loop)
	assert.Equal(t, "the loop", "begins, <nil>", <-loop)
	c.Close()
	c.Close()
	if len(loop) != 2 || <-loop != "ends" || <-loop != "is closed" {
		t.Error("Close has not waited until the loop was closed")
	}
	c.Go(reconcile, loop)()
	if len(loop) != 1 || <-loop != "is closed" {
		t.Error("a closed cluster has run a loop")
	}
}

func TestClusterRestartsALoopThatEndsEarly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, end := context.WithCancel(t.Context())
		p := &process{loopMetrics: loopmetrics.New(metrics.NewKubeRegistry())}
		loop := &scripted{runs: []func(context.Context) error{fails, func(context.Context) error { panic("a bug") }, untilTheEnd},
			status: controllers.Status{Phase: controllers.PhaseDraining, PhaseSince: time.Now(), InFlight: []controllers.InFlight{{Key: "shop/a"}}, FailingKeys: []string{"shop/f"}}}
		one := &openClusters{process: p, controller: "one"}
		far := &otherCluster{openClusters: one, name: "far", cache: &informers.ClusterCache{}, life: ctx, end: end, release: func() {}}
		one.all = []*otherCluster{far}
		far.Go(t.Context(), loop)
		<-time.After(time.Minute)
		synctest.Wait()
		assert.Equal(t, "runs", 3, len(loop.starts))
		lines(t, one.problem(), "the loop of cluster far stopped unexpectedly, 2 times so far; it is restarted after 10s")
		h := newHosted("one", &informers.ClusterCache{}, one, p.loopMetrics, time.Hour)
		retained := []controllers.InFlight{{Key: "shop/b"}, {}}
		h.controller = &scripted{status: controllers.Status{InFlight: retained[:1]}}
		for range 2 {
			assert.Equal(t, "in flight", []controllers.InFlight{{Key: "shop/b"}, {Key: "shop/a in cluster far"}}, h.Status().InFlight)
		}
		assert.Equal(t, "the array of the controller, and a failing key", []any{controllers.InFlight{}, []string{"shop/f in cluster far"}}, []any{retained[1], h.Status().FailingKeys})
		<-time.After(2 * time.Hour)
		lines(t, h.health.Check(nil), "reconciling shop/a in cluster far for 2562047h47m16.854775807s, longer than --controller-stuck-after=1h0m0s", "the loop of cluster far has been draining for 2h1m0s, longer than --controller-stuck-after=1h0m0s")
		far.close()
		assert.Equal(t, "runs after the end", 3, len(loop.starts))
	})
}

func TestPanicInAnotherClusterIsAProblemOfItsController(t *testing.T) {
	one, server := elsewhereOf(t, func(*Options) {}), httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprint(w, `{"type": "ADDED", "object": {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": {"namespace": "shop", "name": "a"}}}`)
	}))
	defer server.Close()
	c, err := one.open("far", &rest.Config{Host: server.URL})
	assert.NoError(t, err)
	defer c.Close()
	_, err = informers.Follow[*informers.Object](c, informers.Need{Resource: informers.Secrets, Filter: func(metav1.Object) bool { panic("a bug") }})
	assert.NoError(t, err)
	assert.NoError(t, wait.PollUntilContextTimeout(t.Context(), time.Millisecond, time.Minute, true, func(context.Context) (bool, error) { return one.problem() != nil, nil }))
	lines(t, one.problem(), "cluster far: Filter panics on 1 objects of secrets, one of them shop/a")
}

func TestClusterNeverGetsTheTokenOfThisProcess(t *testing.T) {
	own := &rest.Config{BearerToken: "at the start", BearerTokenFile: filepath.Join(t.TempDir(), "token")}
	assert.NoError(t, os.WriteFile(own.BearerTokenFile, []byte("an hour later\n"), 0o600))
	for token, refused := range map[string]bool{"at the start": true, "an hour later": true, "its": false, "": false} {
		if err := checkOtherCluster(&rest.Config{Host: "x", BearerToken: token}, own); (err != nil) != refused {
			t.Errorf("the token %q: error %v", token, err)
		}
	}
}

// writesOf writes with every client of a cluster, and returns their errors.
func writesOf(ctx context.Context, c *controllers.Cluster) []error {
	c.Mapping = knownKinds
	a := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "a", Namespace: "shop"}}
	_, created := kubernetes.NewForConfigOrDie(c.RESTConfig).CoreV1().ConfigMaps("shop").Create(ctx, a, metav1.CreateOptions{})
	_, updated := controllers.ClientFor[*corev1.ConfigMap](c, informers.ConfigMaps).Namespace("shop").Update(ctx, a, metav1.UpdateOptions{})
	return []error{created, updated, c.Apply(ctx, corev1ac.ConfigMap("a", "shop")), c.PatchFinalizers(ctx, informers.ConfigMaps, a, nil)}
}

func TestClusterClientWritesOnlyWhileLeading(t *testing.T) {
	for name, tc := range map[string]struct {
		dryRun, redirects, write, leads bool
		sent                            []string
		is                              error // of the error, if it is to be a certain one
	}{
		"a replica that does not lead reads":              {sent: []string{"GET its"}},
		"a replica that does not lead does not write":     {write: true, is: writefence.ErrNotLeading},
		"a replica that leads writes":                     {write: true, leads: true, sent: []string{"POST its", "PUT its", "PATCH its one", "PATCH its one"}},
		"a replica that leads writes dry under --dry-run": {dryRun: true, write: true, leads: true, sent: []string{"POST its dry", "PUT its dry", "PATCH its one dry", "PATCH its one dry"}},
		"a redirect of a write is not followed":           {redirects: true, write: true, leads: true, sent: []string{"POST its", "PUT its", "PATCH its one", "PATCH its one"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var sent []string
			server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				line := r.Method + " " + strings.TrimPrefix(r.Header.Get("Authorization"), "Bearer ")
				if manager := r.URL.Query().Get("fieldManager"); manager != "" {
					line += " " + manager
				}
				if r.URL.Query().Get("dryRun") != "" {
					line += " dry"
				}
				sent = append(sent, line)
				if tc.redirects {
					http.Redirect(w, r, "/elsewhere", http.StatusPermanentRedirect)
				} else {
					http.NotFound(w, r)
				}
			}))
			defer server.Close()
			one := elsewhereOf(t, func(o *Options) { o.Election.LeaderElect, o.Generic.DryRun = !tc.leads, tc.dryRun })
			request := func() []error {
				c, err := one.open("far", &rest.Config{Host: server.URL, BearerToken: "its", TLSClientConfig: rest.TLSClientConfig{Insecure: true}})
				assert.NoError(t, err)
				if tc.write {
					return writesOf(t.Context(), c)
				}
				_, err = c.Client.CoreV1().ConfigMaps("shop").Get(t.Context(), "a", metav1.GetOptions{})
				return []error{err}
			}
			var errs []error
			if tc.leads {
				end, stop := context.WithCancel(t.Context())
				assert.NoError(t, one.process.lock.Run(end, func(context.Context) error { errs = request(); stop(); return nil }))
			} else {
				errs = request()
			}
			for _, err := range errs {
				if err == nil || tc.is != nil && !errors.Is(err, tc.is) || tc.is == nil && errors.Is(err, writefence.ErrNotLeading) {
					t.Errorf("errors %v", errs)
				}
			}
			assert.Equal(t, "sent", tc.sent, sent)
		})
	}
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// send returns what the dry run sends for a request, which it is to refuse if there is a reason.
func (d *dryRun) send(t *testing.T, r *http.Request, reason string) (sent *http.Request) {
	t.Helper()
	_, err := d.wrap(roundTripper(func(r *http.Request) (*http.Response, error) { sent = r; return nil, nil })).RoundTrip(r) //nolint:bodyclose // there is no response
	if reason == "" {
		assert.NoError(t, err)
		return sent
	}
	var refused *controllers.DryRunError
	if !errors.As(err, &refused) || sent != nil {
		t.Fatalf("sent %v, error %v", sent, err)
	}
	for _, part := range []string{reason, "--dry-run", r.Method, r.URL.Path} {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("%q lacks %q", err, part)
		}
	}
	return nil
}

// newTestDryRun returns a dry run for an API server that is reached below a prefix. It has the
// APIServices of a custom resource and of an aggregated API.
func newTestDryRun(t *testing.T) *dryRun {
	t.Helper()
	const services = "/clusters/c/apis/apiregistration.k8s.io/v1/apiservices/"
	d, err := newDryRun(clientConfigs{base: &rest.Config{Host: "http://api/clusters/c", Transport: roundTripper(func(r *http.Request) (*http.Response, error) {
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
	assert.NoError(t, err)
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
		"the finalization of a namespace is made dry":              {"PUT /api/v1/namespaces/a/finalize", "dryRun=All", ""},
		"an eviction is made dry":                                  {"POST /api/v1/namespaces/a/pods/b/eviction", "dryRun=All", ""},
		"a binding is made dry":                                    {"POST /api/v1/namespaces/a/pods/b/binding", "dryRun=All", ""},
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
			sent := d.send(t, r, tc.refused)
			assert.Equal(t, "the caller's request", before, r.URL.String())
			if tc.refused == "" {
				assert.Equal(t, "query", tc.query, sent.URL.RawQuery)
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
			sent := d.send(t, r, tc.refused)
			if tc.refused != "" {
				return
			}
			again, err := sent.GetBody() // as for a second attempt on another connection
			assert.NoError(t, err)
			for _, body := range []io.Reader{sent.Body, again} {
				text, err := io.ReadAll(body)
				if err != nil || sent.ContentLength != int64(len(text)) {
					t.Errorf("length %d: %q, %v", sent.ContentLength, text, err)
				}
				got := metav1.DeleteOptions{}
				assert.NoError(t, json.Unmarshal(text, &got))
				assert.Equal(t, "the options that are sent", want, got)
			}
		})
	}
}
