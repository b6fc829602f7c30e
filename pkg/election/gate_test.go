// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package election

import (
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
)

// answering is a transport that answers every request.
type answering struct{ seen []string }

func (a *answering) RoundTrip(r *http.Request) (*http.Response, error) {
	a.seen = append(a.seen, r.Method)
	return &http.Response{StatusCode: http.StatusOK, Body: http.NoBody}, nil
}

// closeable notes that it was closed.
type closeable struct {
	io.Reader
	closed bool
}

func (c *closeable) Close() error { c.closed = true; return nil }

func TestAGateRefusesWritesUntilItOpens(t *testing.T) {
	var refused []string
	next := &answering{}
	g := &Gate{refused: func(method string) { refused = append(refused, method) }}
	gated := g.Fence(next)
	send := func(method string) (*closeable, error) {
		body := &closeable{Reader: strings.NewReader("{}")}
		resp, err := gated.RoundTrip(httptest.NewRequest(method, "/api/v1/namespaces/shop/configmaps/x", body))
		if err == nil {
			_ = resp.Body.Close()
		}
		return body, err
	}
	if _, err := send(http.MethodGet); err != nil {
		t.Errorf("a read: %v", err)
	}
	if body, err := send(http.MethodPut); !errors.Is(err, ErrNotLeading) || !body.closed {
		t.Errorf("a write before it opens: %v, and its body is closed: %v", err, body.closed)
	}
	g.Open()
	if _, err := send(http.MethodPatch); err != nil {
		t.Errorf("a write after it has opened: %v", err)
	}
	if want := []string{"GET", "PATCH"}; !slices.Equal(next.seen, want) || !slices.Equal(refused, []string{"PUT"}) {
		t.Errorf("sent %v, want %v; counted as refused %v", next.seen, want, refused)
	}
}
