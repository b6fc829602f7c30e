// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package healthz

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
)

type elector struct{ expired time.Duration }

func (e elector) Healthy(tolerance time.Duration) error {
	if e.expired > tolerance {
		return errors.New("past its Lease")
	}
	return nil
}

func get(h http.Handler, path string) (int, string) {
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, path, nil))
	return w.Code, w.Body.String()
}

func TestHandlerReportsEachCheck(t *testing.T) {
	broken := NamedCheck("broken", func(*http.Request) error { return errors.New("a reason") })
	fine := NamedCheck("fine", func(*http.Request) error { return nil })

	for name, tc := range map[string]struct {
		checks []Check
		path   string
		code   int
		want   []string
		absent string
	}{
		"without checks it answers ok":             {nil, "/livez", 200, []string{"ok"}, ""},
		"verbose lists every check":                {[]Check{fine}, "/livez?verbose", 200, []string{"[+]ping ok", "[+]fine ok"}, ""},
		"one failing check fails the path":         {[]Check{fine, broken}, "/livez", 500, []string{"[-]broken failed"}, "a reason"},
		"an excluded check does not count":         {[]Check{broken}, "/livez?exclude=broken&verbose", 200, []string{"[+]broken excluded"}, ""},
		"a check has a path of its own":            {[]Check{fine, broken}, "/livez/fine", 200, []string{"ok"}, ""},
		"a failing check's own path withholds why": {[]Check{broken}, "/livez/broken", 500, []string{"reason withheld"}, "a reason"},
		"verbose withholds why":                    {[]Check{broken}, "/livez?verbose", 500, []string{"[-]broken failed"}, "a reason"},
		"a check that does not exist is not found": {nil, "/livez/nothing", 404, nil, ""},
		"an overdue leader fails":                  {[]Check{LeaderWatchdog(20*time.Second, elector{0}, elector{21 * time.Second})}, "/livez/leader-election", 500, nil, "past its Lease"},
		"a leader a little late passes":            {[]Check{LeaderWatchdog(20*time.Second, elector{19 * time.Second})}, "/livez", 200, nil, ""},
	} {
		t.Run(name, func(t *testing.T) {
			code, body := get(NewHandler("/livez", tc.checks...), tc.path)
			if code != tc.code {
				t.Errorf("code %d, want %d; body:\n%s", code, tc.code, body)
			}
			for _, want := range tc.want {
				if !strings.Contains(body, want) {
					t.Errorf("body lacks %q:\n%s", want, body)
				}
			}
			if tc.absent != "" && strings.Contains(body, tc.absent) {
				t.Errorf("body shows %q to an anonymous client:\n%s", tc.absent, body)
			}
		})
	}
}

func TestHandlerTakesChecksWhileServing(t *testing.T) {
	h := NewHandler("/readyz")
	server := httptest.NewServer(h)
	defer server.Close()
	status := func() int {
		resp, err := http.Get(server.URL + "/readyz")
		assert.NoError(t, err)
		defer func() { _ = resp.Body.Close() }()
		return resp.StatusCode
	}
	if got := status(); got != 200 {
		t.Fatalf("before: %d", got)
	}
	late := NamedCheck("late", func(*http.Request) error { return errors.New("not yet") })
	assert.NoError(t, h.Add(late))
	if got := status(); got != 500 {
		t.Errorf("after a failing check was added: %d, want 500", got)
	}
	if err := h.Add(late); err == nil {
		t.Error("the same name was taken twice")
	}
}
