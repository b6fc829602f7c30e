// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/quartermaster-dev/quartermaster/pkg/election/writefence"
)

// elsewhereOf returns a process that has not been elected, and changes its options before.
func elsewhereOf(t *testing.T, change func(*Options)) *process {
	t.Helper()
	o := newOptions(t, WithoutBuiltIns())
	o.Client.RESTConfig = &rest.Config{Host: newAPIServer(t).URL, BearerToken: "our own"}
	change(o)
	p, err := builtProcess(t, o)
	must(t, err)
	t.Cleanup(p.openClusters.close)
	return p
}

func TestClustersThatCanBeOpened(t *testing.T) {
	p := elsewhereOf(t, func(*Options) {})
	if _, err := p.openCluster("other", "open", &rest.Config{Host: "x"}); err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		cluster string
		config  *rest.Config
		err     string // "" if it can
	}{
		"a cluster with a token":       {"far", &rest.Config{Host: "far.example.com", BearerToken: "its", Timeout: time.Minute}, ""},
		"a cluster with a certificate": {"far.example.com", &rest.Config{Host: "https://far.example.com", TLSClientConfig: rest.TLSClientConfig{Insecure: true}}, ""},
		"a name that is no label":      {"a/b", &rest.Config{Host: "x"}, "a lowercase RFC 1123 subdomain"},
		"none":                         {"far", nil, "names no API server"},
		"no address":                   {"far", &rest.Config{}, "names no API server"},
		"our own token":                {"far", &rest.Config{Host: "x", BearerToken: "our own"}, "has the token of this process"},
		"a program":                    {"far", &rest.Config{Host: "x", ExecProvider: &clientcmdapi.ExecConfig{Command: "sh"}}, "runs a program"},
		"a plugin":                     {"far", &rest.Config{Host: "x", AuthProvider: &clientcmdapi.AuthProviderConfig{}}, "runs a program"},
		"a transport":                  {"far", &rest.Config{Host: "x", WrapTransport: withoutLongWaits}, "has a WrapTransport"},
		"a file with the token":        {"far", &rest.Config{Host: "x", BearerTokenFile: "/token"}, "names a file"},
		"a file with the authority":    {"far", &rest.Config{Host: "x", TLSClientConfig: rest.TLSClientConfig{CAFile: "/ca"}}, "names a file"},
		"a file with the key":          {"far", &rest.Config{Host: "x", TLSClientConfig: rest.TLSClientConfig{KeyFile: "/key"}}, "names a file"},
		"an authority that is none":    {"far", &rest.Config{Host: "x", TLSClientConfig: rest.TLSClientConfig{CAData: []byte("x")}}, "unable to load root certificates"},
		"a name that is open already":  {"open", &rest.Config{Host: "x"}, "a cluster of this name is already open"},
	} {
		t.Run(name, func(t *testing.T) {
			c, err := p.openCluster("one", tc.cluster, tc.config)
			if tc.err == "" {
				must(t, err)
				same(t, "timeout", tc.config.Timeout, c.RESTConfig.Timeout)
				if got := c.RESTConfig.Host; !strings.HasPrefix(got, "https://") {
					t.Errorf("its address is %s", got)
				}
				c.Close()
				again, err := p.openCluster("one", tc.cluster, tc.config)
				if err != nil {
					t.Fatalf("it cannot be opened again: %v", err)
				}
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

func (l recordedLoop) Close() { l <- "is closed" }

func TestClusterRunsALoopUntilItIsClosed(t *testing.T) {
	p := elsewhereOf(t, func(*Options) {})
	c, err := p.openCluster("one", "far", &rest.Config{Host: "x"})
	must(t, err)
	reconcile, end := context.WithCancel(t.Context())
	end()
	loop := make(recordedLoop, 3)
	c.Go(reconcile, loop)
	same(t, "the loop", "begins, <nil>", <-loop)
	for range 2 {
		c.Close()
	}
	if len(loop) != 2 || <-loop != "ends" || <-loop != "is closed" {
		t.Error("Close has not waited until the loop was closed")
	}
}

func TestClusterNeverGetsTheTokenOfThisProcess(t *testing.T) {
	own := &rest.Config{BearerToken: "at the start", BearerTokenFile: filepath.Join(t.TempDir(), "token")}
	must(t, os.WriteFile(own.BearerTokenFile, []byte("an hour later\n"), 0o600))
	for token, refused := range map[string]bool{"at the start": true, "an hour later": true, "its": false, "": false} {
		if err := checkOtherCluster(&rest.Config{Host: "x", BearerToken: token}, own); (err != nil) != refused {
			t.Errorf("the token %q: error %v", token, err)
		}
	}
}

func TestClusterClientWritesOnlyWhileLeading(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(*Options)
		answer func(http.ResponseWriter, *http.Request) // nil: not found
		write  bool
		leads  bool
		sent   []string
		is     error // of the error, if it is to be a certain one
	}{
		"a replica that does not lead reads":              {sent: []string{"GET its"}},
		"a replica that does not lead does not write":     {write: true, is: writefence.ErrNotLeading},
		"a replica that leads writes":                     {write: true, leads: true, sent: []string{"POST its"}},
		"a replica that leads writes dry under --dry-run": {change: func(o *Options) { o.Generic.DryRun = true }, write: true, leads: true, sent: []string{"POST its dry"}},
		"a redirect of a write is not followed": {answer: func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, "/elsewhere", http.StatusPermanentRedirect)
		}, write: true, leads: true, sent: []string{"POST its"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var sent []string
			server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				line := r.Method + " " + strings.TrimPrefix(r.Header.Get("Authorization"), "Bearer ")
				if r.URL.Query().Get("dryRun") != "" {
					line += " dry"
				}
				sent = append(sent, line)
				if tc.answer == nil {
					http.NotFound(w, r)
					return
				}
				tc.answer(w, r)
			}))
			defer server.Close()
			p := elsewhereOf(t, func(o *Options) {
				o.Election.LeaderElect = !tc.leads
				if tc.change != nil {
					tc.change(o)
				}
			})
			request := func() (err error) {
				c, err := p.openCluster("one", "far", &rest.Config{Host: server.URL, BearerToken: "its", TLSClientConfig: rest.TLSClientConfig{Insecure: true}})
				must(t, err)
				client := kubernetes.NewForConfigOrDie(c.RESTConfig).CoreV1().ConfigMaps("shop")
				if tc.write {
					_, err = client.Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "a"}}, metav1.CreateOptions{})
				} else {
					_, err = client.Get(t.Context(), "a", metav1.GetOptions{})
				}
				return err
			}
			var err error
			if tc.leads {
				end, stop := context.WithCancel(t.Context())
				if runErr := p.lock.Run(end, func(context.Context) error { err = request(); stop(); return nil }); runErr != nil {
					t.Fatal(runErr)
				}
			} else {
				err = request()
			}
			if err == nil || tc.is != nil && !errors.Is(err, tc.is) || tc.is == nil && errors.Is(err, writefence.ErrNotLeading) {
				t.Errorf("error %v", err)
			}
			if !slices.Equal(sent, tc.sent) {
				t.Errorf("sent %q, want %q", sent, tc.sent)
			}
		})
	}
}
