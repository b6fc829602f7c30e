// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net/http"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
)

const (
	// Patience bounds every wait. It is generous: a test that passes does not use it up.
	Patience = 90 * time.Second

	// grace is longer than a manager's --shutdown-timeout.
	grace = 30 * time.Second
)

// Context ends with the test, or when Patience does.
func Context(t testing.TB) context.Context {
	t.Helper()
	return Within(t.Context(), t, Patience)
}

// Within ends with ctx, with the test, or after d.
func Within(ctx context.Context, t testing.TB, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeoutCause(ctx, d, fmt.Errorf("it took longer than %s", d))
	t.Cleanup(cancel)
	return ctx
}

// Poll calls check every 50 ms until it answers nil, or fails with its last answer when ctx ends.
func Poll(ctx context.Context, check func() error) error {
	last := errors.New("never checked")
	err := wait.PollUntilContextCancel(ctx, 50*time.Millisecond, true, func(context.Context) (bool, error) {
		last = check()
		return last == nil, nil
	})
	if err != nil {
		return fmt.Errorf("%w: %w", context.Cause(ctx), last)
	}
	return nil
}

// Eventually is Poll for what a test cannot go on without.
func Eventually(ctx context.Context, t testing.TB, check func() error) {
	t.Helper()
	if err := Poll(ctx, check); err != nil {
		t.Fatal(err)
	}
}

// Get asks a manager; the certificate is judged by a test of its own. token may be empty.
func Get(url, token string) (code int, body string, err error) {
	client := &http.Client{
		Timeout:   10 * time.Second,
		Transport: &http.Transport{DisableKeepAlives: true, TLSClientConfig: &tls.Config{InsecureSkipVerify: true}},
	}
	request, err := http.NewRequest(http.MethodGet, url, nil)
	if err != nil {
		return 0, "", err
	}
	if token != "" {
		request.Header.Set("Authorization", "Bearer "+token)
	}
	response, err := client.Do(request)
	if err != nil {
		return 0, "", err
	}
	defer func() { _ = response.Body.Close() }()
	text, err := io.ReadAll(response.Body)
	return response.StatusCode, string(text), err
}

// Answers tells what is wrong if url does not answer with the code.
func Answers(url, token string, code int) error {
	got, body, err := Get(url, token)
	if err != nil {
		return err
	}
	if got != code {
		return fmt.Errorf("%s answers %d, not %d: %s", url, got, code, body)
	}
	return nil
}

// Ready answers nil when m answers 200 on /readyz.
func Ready(m *cluster.Manager) error {
	return Answers(m.InsecureURL+"/readyz?verbose", "", http.StatusOK)
}
