// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package faultproxy

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"
	"k8s.io/client-go/rest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// backend stands in for the API server.
type backend struct {
	*httptest.Server
	requests atomic.Int32  // to any path
	next     chan struct{} // each value lets /watch send one line
}

// start returns a backend, a proxy in front of it, and a client of the proxy.
func start(t *testing.T) (*backend, *Proxy, *http.Client) {
	t.Helper()
	b := &backend{next: make(chan struct{})}
	b.Server = httptest.NewUnstartedServer(http.HandlerFunc(b.serve))
	b.EnableHTTP2 = true
	b.StartTLS()
	t.Cleanup(b.Close)
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: b.Certificate().Raw})
	p, err := Start(&rest.Config{Host: b.URL, TLSClientConfig: rest.TLSClientConfig{CAData: ca}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	})
	return b, p, newClient(t, p)
}

// newClient returns a client with connections of its own.
func newClient(t *testing.T, p *Proxy) *http.Client {
	t.Helper()
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(p.CA()) {
		t.Fatal("no certificate")
	}
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots}, ForceAttemptHTTP2: true}}
	t.Cleanup(client.CloseIdleConnections)
	return client
}

func (b *backend) serve(w http.ResponseWriter, r *http.Request) {
	b.requests.Add(1)
	if r.URL.Path != "/watch" {
		_, _ = io.WriteString(w, r.Proto+" "+r.Header.Get("Authorization"))
		return
	}
	w.WriteHeader(http.StatusOK)
	for {
		w.(http.Flusher).Flush()
		select {
		case <-b.next:
			_, _ = io.WriteString(w, "event\n")
		case <-r.Context().Done():
			return
		}
	}
}

func get(ctx context.Context, client *http.Client, url string) (status int, body string, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return 0, "", err
	}
	req.Header.Set("Authorization", "Bearer token")
	req.Header.Set("User-Agent", "client")
	resp, err := client.Do(req)
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	return resp.StatusCode, string(text), err
}

func TestRules(t *testing.T) {
	for name, test := range map[string]struct {
		rule     Rule
		status   int // 0: an error
		reached  int32
		secondOK bool
	}{
		"an answer instead of the server's":      {rule: Rule{Status: 429, RetryAfter: time.Second}, status: 429},
		"one time only":                          {rule: Rule{Status: 500, Times: 1}, status: 500, secondOK: true},
		"a request that does not match":          {rule: Rule{Status: 500, Match: Path("", "/other")}, status: 200, reached: 1, secondOK: true},
		"a method that does not match":           {rule: Rule{Status: 500, Match: Path("PUT", "/a")}, status: 200, reached: 1, secondOK: true},
		"a response that is lost on the way":     {rule: Rule{DropResponse: true}, reached: 1},
		"a delay changes nothing but the time":   {rule: Rule{Delay: time.Millisecond}, status: 200, reached: 1, secondOK: true},
		"a delay before an answer by the proxy":  {rule: Rule{Delay: time.Millisecond, Status: 500}, status: 500},
		"a hold that was released before it was": {rule: Rule{Hold: closed()}, status: 200, reached: 1, secondOK: true},
	} {
		t.Run(name, func(t *testing.T) {
			b, p, client := start(t)
			rule := p.Add(test.rule)
			status, _, err := get(t.Context(), client, p.URL()+"/a")
			if status != test.status || (err != nil) != (test.status == 0) {
				t.Errorf("status %d, error %v, want status %d", status, err, test.status)
			}
			if got := b.requests.Load(); got != test.reached {
				t.Errorf("%d requests reached the server, want %d", got, test.reached)
			}
			if status, _, _ := get(t.Context(), client, p.URL()+"/a"); (status == 200) != test.secondOK {
				t.Errorf("the second request: status %d", status)
			}
			rule.Remove()
			if status, _, err := get(t.Context(), client, p.URL()+"/a"); status != 200 {
				t.Errorf("after Remove: status %d, error %v", status, err)
			}
		})
	}
}

func closed() <-chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}

// openWatch opens a stream and returns a function that reads its next line.
func openWatch(t *testing.T, p *Proxy, client *http.Client) func() (string, error) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, p.URL()+"/watch", nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = resp.Body.Close() })
	r := bufio.NewReader(resp.Body)
	return func() (string, error) { return r.ReadString('\n') }
}

func TestPartitionThatHangs(t *testing.T) {
	b, p, client := start(t)
	next := openWatch(t, p, client)
	b.next <- struct{}{}
	if line, err := next(); line != "event\n" {
		t.Fatalf("%q, %v", line, err)
	}

	p.Partition(Hang)
	b.next <- struct{}{} // sent now; it arrives after the end of the partition
	got := make(chan string, 1)
	go func() { line, _ := next(); got <- line }()
	// There is no event for "nothing arrives". A request with a deadline lets time pass.
	short, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if _, _, err := get(short, client, p.URL()+"/a"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a request during the partition: %v", err)
	}
	short2, cancel2 := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel2()
	if _, _, err := get(short2, newClient(t, p), p.URL()+"/a"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a new connection during the partition: %v", err)
	}
	select {
	case line := <-got:
		t.Errorf("%q arrived during the partition", line)
	default:
	}

	p.Heal()
	if line := <-got; line != "event\n" {
		t.Errorf("after the partition: %q", line)
	}
	if _, _, err := get(t.Context(), client, p.URL()+"/a"); err != nil {
		t.Errorf("after the partition: %v", err)
	}
}
