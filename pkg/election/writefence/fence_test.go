// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package writefence

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
)

// bubbleClock is the clock of a bubble.
type bubbleClock struct{ origin time.Time }

func (c bubbleClock) Now() time.Duration { return time.Since(c.origin) }

// setClock is a clock that shows the time it is set to.
type setClock struct{ now atomic.Int64 }

func (c *setClock) Now() time.Duration { return time.Duration(c.now.Load()) }

func (c *setClock) set(d time.Duration) { c.now.Store(int64(d)) }

func newTestFence(clock Clock) (*Fence, *int) {
	refused := new(int)
	return New(clock, func() { *refused++ }), refused
}

// roundTripper responds in place of a network.
type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(req *http.Request) (*http.Response, error) { return f(req) }

func TestFenceAdmits(t *testing.T) {
	opened := func(f *Fence) { f.OpenUntil(10 * time.Second) }
	tests := map[string]struct {
		method  string
		prepare func(*Fence)
		now     time.Duration
		want    bool
	}{
		"a replica that never led reads":                          {http.MethodGet, func(*Fence) {}, 0, true},
		"a replica that never led asks for headers":               {http.MethodHead, func(*Fence) {}, 0, true},
		"a replica that never led asks for options":               {http.MethodOptions, func(*Fence) {}, 0, true},
		"a replica that never led does not create":                {http.MethodPost, func(*Fence) {}, 0, false},
		"a replica that never led does not update":                {http.MethodPut, func(*Fence) {}, 0, false},
		"a replica that never led does not patch":                 {http.MethodPatch, func(*Fence) {}, 0, false},
		"a replica that never led does not delete":                {http.MethodDelete, func(*Fence) {}, 0, false},
		"a replica that never led does not do what nobody knows":  {"BREW", func(*Fence) {}, 0, false},
		"a leader writes":                                         {http.MethodPut, opened, 0, true},
		"a leader writes up to the deadline":                      {http.MethodPut, opened, 10*time.Second - 1, true},
		"a leader does not write at the deadline":                 {http.MethodPut, opened, 10 * time.Second, false},
		"a leader writes after a deadline that was extended":      {http.MethodPut, func(f *Fence) { opened(f); f.Extend(12 * time.Second) }, 11 * time.Second, true},
		"a leader does not write after the term was lost":         {http.MethodPut, func(f *Fence) { opened(f); f.Close() }, 1, false},
		"a leader does not write in a lost term that is extended": {http.MethodPut, func(f *Fence) { opened(f); f.Close(); f.Extend(12 * time.Second) }, 1, false},
		"a leader does not write when lead has returned":          {http.MethodPut, func(f *Fence) { opened(f); f.Drain() }, 1, false},
		"everybody writes if leader election is off":              {http.MethodPut, (*Fence).TurnOff, 1000 * time.Hour, true},
		"a term that has ended reads nevertheless":                {http.MethodGet, func(f *Fence) { opened(f); f.Close() }, 11 * time.Second, true},
		"an empty method is a GET as net/http has it":             {"", func(*Fence) {}, 0, true},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			clock := &setClock{}
			f, _ := newTestFence(clock)
			tc.prepare(f)
			clock.set(tc.now)
			sent := false
			transport := f.Transport(roundTripper(func(*http.Request) (*http.Response, error) {
				sent = true
				return &http.Response{Body: http.NoBody}, nil
			}))
			req, err := http.NewRequestWithContext(t.Context(), tc.method, "http://api/x", strings.NewReader("{}"))
			assert.NoError(t, err)
			req.Method = tc.method
			resp, err := transport.RoundTrip(req)
			if err == nil {
				err = resp.Body.Close()
			}
			if sent != tc.want || (err == nil) != tc.want || err != nil && !errors.Is(err, ErrNotLeading) {
				t.Errorf("sent %t, error %v; want sent %t", sent, err, tc.want)
			}
		})
	}
}

func TestConnectionsCountAsWrites(t *testing.T) {
	for path, want := range map[string]bool{
		"/api/v1/namespaces/ns/pods/p":     false,
		"/api/v1/namespaces/ns/pods/p/log": false,
		"/api/v1/namespaces/ns/pods/exec":  false,
		"/apis/subresources.kubevirt.io/v1/namespaces/ns/virtualmachineinstances/vm/console": true,
		"/k8s/c/apis/subresources.kubevirt.io/v1/namespaces/ns/virtualmachines/vm/vnc/x":     true,
		"/apis/proxy.example.com/v1/clusters/c/proxy":                                        true,
		"/apis/proxy.example.com/v1/watch/clusters/c/proxy":                                  true,
		"/apis/example.com/v1/namespaces/ns/widgets/w":                                       false,
		"/apis/example.com/v1/namespaces/ns/widgets/w/":                                      false,
		"/apis/example.com/v1/namespaces/ns/widgets":                                         false,
		"/apis/example.com/v1/namespaces/ns":                                                 false,
		"/apis/example.com/v1/namespaces/ns/widgets/w/status":                                false,
		"/apis/example.com/v1/widgets/w/scale":                                               false,
		"/apis/example.com/v1":                                                               false,
		"/apis/example.com":                                                                  false,
		"/apis":                                                                              false,
		"/apis/custom.metrics.k8s.io/v1beta2/namespaces/ns/pods/*/http_requests":             false,
		"/apis/apps/v1/namespaces/ns/deployments/d/scale":                                    false,
		"/api/v1/namespaces/ns/pods/p/exec":                                                  true,
		"/api/v1/namespaces/ns/pods/p/attach":                                                true,
		"/api/v1/namespaces/ns/pods/p/portforward":                                           true,
		"/api/v1/namespaces/ns/pods/http:p:80/proxy/admin":                                   true,
		"/api/v1/namespaces/ns/services/s/proxy":                                             true,
		"/api/v1/nodes/n/proxy/run":                                                          true,
		"/k8s/clusters/c/api/v1/nodes/n/proxy/":                                              true,
	} {
		req := assert.Must(http.NewRequestWithContext(t.Context(), http.MethodGet, "http://api"+path, nil))
		if got := IsWrite(req); got != want {
			t.Errorf("GET %s: got %t", path, got)
		}
	}
}

func TestFenceCountsRefusals(t *testing.T) {
	f, refused := newTestFence(&setClock{})
	client := &http.Client{Transport: f.Transport(http.DefaultTransport)}
	for _, method := range []string{http.MethodPatch, http.MethodPatch, http.MethodDelete, "BREW"} {
		req, err := http.NewRequestWithContext(t.Context(), method, "http://api/x", nil)
		assert.NoError(t, err)
		if _, err := client.Do(req); !errors.Is(err, ErrNotLeading) { //nolint:bodyclose // there is no response
			t.Fatal(err)
		}
	}
	if got := *refused; got != 4 {
		t.Errorf("it has counted %d", got)
	}
}

// closeRecorder is a body that records whether it was closed.
type closeRecorder struct {
	io.Reader
	closed bool
}

func (c *closeRecorder) Close() error {
	c.closed = true
	return nil
}

func TestFenceClosesTheBodyThatItRefuses(t *testing.T) {
	f, _ := newTestFence(&setClock{})
	body := &closeRecorder{Reader: strings.NewReader("{}")}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPut, "http://api/x", body)
	assert.NoError(t, err)
	if _, err := f.Transport(http.DefaultTransport).RoundTrip(req); !errors.Is(err, ErrNotLeading) || !body.closed { //nolint:bodyclose // there is no response
		t.Errorf("error %v, closed %t", err, body.closed)
	}
}

func TestFenceEndsWritesInFlight(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		clock := bubbleClock{time.Now()}
		f, _ := newTestFence(clock)
		f.OpenUntil(clock.Now() + time.Minute)
		time.AfterFunc(10*time.Second, f.Close)
		transport := f.Transport(roundTripper(func(req *http.Request) (*http.Response, error) {
			<-req.Context().Done() // hangs
			return nil, req.Context().Err()
		}))
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPut, "http://api/x", nil)
		assert.NoError(t, err)
		start := clock.Now()
		_, err = transport.RoundTrip(req) //nolint:bodyclose // there is no response
		var unknown interface{ OutcomeUnknown() bool }
		if !errors.Is(err, ErrNotLeading) || !errors.As(err, &unknown) || !unknown.OutcomeUnknown() || !strings.Contains(err.Error(), "is unknown") {
			t.Error(err)
		}
		if took := clock.Now() - start; took != 10*time.Second {
			t.Errorf("ended after %s", took)
		}
		if len(f.inFlight) != 0 {
			t.Error("it is in flight still")
		}
	})
}

// TestFenceAsksAgainBeforeTheBodyEnds pauses the process between the check and the sending. The API
// server must not get a complete request.
func TestFenceAsksAgainBeforeTheBodyEnds(t *testing.T) {
	clock := &setClock{}
	f, _ := newTestFence(clock)
	f.OpenUntil(10 * time.Second)
	defer f.Close()
	executed := make(chan string, 1)
	server := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, req *http.Request) {
		if body, err := io.ReadAll(req.Body); err == nil {
			executed <- string(body)
		}
	}))
	defer server.Close()
	transport := f.Transport(roundTripper(func(req *http.Request) (*http.Response, error) {
		clock.set(10 * time.Second)
		return http.DefaultTransport.RoundTrip(req)
	}))
	for name, body := range map[string]io.Reader{"of known length": strings.NewReader("{}"), "of unknown length": io.MultiReader(strings.NewReader("{}"))} {
		t.Run(name, func(t *testing.T) {
			clock.set(0)
			req, err := http.NewRequestWithContext(t.Context(), http.MethodPut, server.URL, body)
			assert.NoError(t, err)
			if _, err = transport.RoundTrip(req); !errors.Is(err, ErrNotLeading) { //nolint:bodyclose // there is no response
				t.Error(err)
			}
		})
	}
	server.Close() // waits for the handlers
	select {
	case body := <-executed:
		t.Errorf("the server got %q", body)
	default:
	}
}

func TestFenceLeavesTheResponseReadable(t *testing.T) {
	clock := bubbleClock{time.Now()}
	f, _ := newTestFence(clock)
	f.OpenUntil(clock.Now() + time.Hour)
	defer f.Close()
	more := make(chan struct{})
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusOK)
		w.(http.Flusher).Flush()
		<-more
		_, _ = io.WriteString(w, "later")
	}))
	defer server.Close()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, server.URL, strings.NewReader("{}"))
	assert.NoError(t, err)
	resp, err := f.Transport(http.DefaultTransport).RoundTrip(req)
	assert.NoError(t, err)
	close(more)
	body, err := io.ReadAll(resp.Body)
	if err != nil || string(body) != "later" {
		t.Errorf("read %q, %v", body, err)
	}
	if err := resp.Body.Close(); err != nil {
		t.Error(err)
	}
}

// TestFenceDrainWaits checks the order of a release: refuse, wait, release.
func TestFenceDrainWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		clock := bubbleClock{time.Now()}
		f, _ := newTestFence(clock)
		f.OpenUntil(clock.Now() + time.Minute)
		defer f.Close()
		answer := make(chan struct{})
		transport := f.Transport(roundTripper(func(req *http.Request) (*http.Response, error) {
			if _, err := io.ReadAll(req.Body); err != nil {
				return nil, err
			}
			<-answer
			return &http.Response{Body: http.NoBody}, req.Context().Err()
		}))
		write := func() error {
			req, err := http.NewRequestWithContext(t.Context(), http.MethodPut, "http://api/x", strings.NewReader("{}"))
			if err != nil {
				return err
			}
			resp, err := transport.RoundTrip(req)
			if err != nil {
				return err
			}
			return resp.Body.Close()
		}
		done := make(chan error, 1)
		go func() { done <- write() }()
		synctest.Wait()
		idle := f.Drain()
		if err := write(); !errors.Is(err, ErrNotLeading) {
			t.Errorf("a new write got %v", err)
		}
		select {
		case <-idle:
			t.Error("idle while a write is in flight")
		default:
		}
		close(answer)
		if err := <-done; err != nil {
			t.Errorf("the write in flight got %v", err)
		}
		<-idle
	})
}

// TestFenceRefusalIsATypedErrorAtOnce checks how a controller sees a refusal: as a typed error, at once, and
// not retried by the client.
func TestFenceRefusalIsATypedErrorAtOnce(t *testing.T) {
	f, _ := newTestFence(&setClock{})
	var requests atomic.Int32
	config := &rest.Config{Host: "http://127.0.0.1:1"}
	config.Wrap(func(http.RoundTripper) http.RoundTripper {
		return roundTripper(func(req *http.Request) (*http.Response, error) {
			requests.Add(1)
			return f.Transport(http.DefaultTransport).RoundTrip(req)
		})
	})
	client, err := kubernetes.NewForConfig(config)
	assert.NoError(t, err)
	_, err = client.CoreV1().ConfigMaps("ns").Create(context.Background(), &corev1.ConfigMap{}, metav1.CreateOptions{})
	if !errors.Is(err, ErrNotLeading) || requests.Load() != 1 {
		t.Errorf("%d requests, error %v", requests.Load(), err)
	}
}

// TestFenceIgnoresWritesElsewhere has a write to another cluster in flight, and one that got no answer.
func TestFenceIgnoresWritesElsewhere(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, refused := newTestFence(bubbleClock{time.Now()})
		hangs := roundTripper(func(req *http.Request) (*http.Response, error) {
			<-req.Context().Done()
			return nil, context.Cause(req.Context())
		})
		write := func(ctx context.Context) error {
			req := assert.Must(http.NewRequestWithContext(ctx, http.MethodPut, "http://api/x", nil))
			_, err := f.TransportElsewhere(hangs).RoundTrip(req) //nolint:bodyclose // there is no response
			return err
		}
		if err := write(t.Context()); !errors.Is(err, ErrNotLeading) || *refused != 1 {
			t.Errorf("before the term: %v, %d refused", err, *refused)
		}
		f.OpenUntil(time.Hour)
		unanswered, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := write(unanswered); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("a write that nobody answered: %v", err)
		}
		done := make(chan error, 1)
		go func() { done <- write(t.Context()) }()
		synctest.Wait()
		<-f.Drain()
		if err := <-done; !errors.Is(err, ErrTermEnded) {
			t.Errorf("the write in flight: %v", err)
		}
		if f.QuietAt() != 0 {
			t.Errorf("the release waits until %s", f.QuietAt())
		}
	})
}
