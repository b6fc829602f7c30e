// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package election

import (
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/quartermaster-dev/quartermaster/pkg/election/apifence"
	"github.com/quartermaster-dev/quartermaster/pkg/election/protocol"
)

func get(lock *Lock, url, accept string) *httptest.ResponseRecorder {
	req := httptest.NewRequest(http.MethodGet, url, nil)
	req.Header.Set("Accept", accept)
	rec := httptest.NewRecorder()
	lock.ServeHTTP(rec, req)
	return rec
}

func TestServeHTTP(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := freeStore()
		first := startReplica(t, store, "first", testConfig())
		<-first.led
		second := startReplica(t, store, "second", testConfig())
		pass(3 * time.Second)

		var s struct {
			shownStatus
			Term        *protocol.Term
			LastRenewal *struct {
				Latency float64 `json:"latencySeconds"`
			}
			Watching bool
		}
		rec := get(first.lock, "/debug/leader", "application/json")
		if err := json.Unmarshal(rec.Body.Bytes(), &s); err != nil {
			t.Fatal(err)
		}
		if s.Phase != "Leading" || s.Holder != "first" || s.Identity != "first" || *s.Term != (protocol.Term{LeaseUID: "uid-1", Transitions: 1}) ||
			s.Valid < 8 || s.Valid > 10 || s.LastRenewal == nil || s.LastRenewal.Latency <= 0 || !s.Watching ||
			s.ServerFence != apifence.Unknown || len(s.History) != 2 {
			t.Errorf("the leader shows %s", rec.Body)
		}
		text := get(second.lock, "/debug/leader", "*/*").Body.String()
		for _, want := range []string{"phase:         Standby", "holder:        first", "term:          uid-1/1", "first seen"} {
			if !strings.Contains(text, want) {
				t.Errorf("the standby's text lacks %q:\n%s", want, text)
			}
		}
		if got := get(second.lock, "/debug/leader?format=json", "").Header().Get("Content-Type"); got != "application/json" {
			t.Errorf("?format=json returns %s", got)
		}
		if got := get(second.lock, "/debug/leader?format=text", "application/json").Header().Get("Content-Type"); got != "text/plain; charset=utf-8" {
			t.Errorf("?format=text returns %s", got)
		}

		first.stop(nil)
		<-second.led
		if err := <-first.done; err != nil {
			t.Error(err)
		}
		var reasons []string
		for _, transition := range shown(second.lock).History {
			reasons = append(reasons, transition.Reason)
		}
		if got := strings.Join(reasons, ", "); got != "first seen, released, acquired by this replica" {
			t.Errorf("the second has seen: %s", got)
		}
		if s := shown(first.lock); s.Phase != "Stopped" || s.History[len(s.History)-1].Reason != "this replica stopped: Released" {
			t.Errorf("the first ends with %+v", s)
		}
		second.stop(nil)
		if err := <-second.done; err != nil {
			t.Error(err)
		}
		store.background.Wait()
	})
}

func TestBeforeRun(t *testing.T) {
	lock := must(NewLock(testConfig(), Candidate{Identity: "r"}))
	if text := get(lock, "/debug/leader", "").Body.String(); !strings.Contains(text, "NotStarted") {
		t.Error(text)
	}
	if lock.IsLeading() || lock.Healthy(0) != nil {
		t.Error("it leads")
	}
	if _, err := NewLock(testConfig(), Candidate{}); err == nil {
		t.Error("an empty identity is accepted")
	}
}

func TestNewIdentity(t *testing.T) {
	a, b := NewIdentity("pod-0"), NewIdentity("pod-0")
	if a == b || !strings.HasPrefix(a, "pod-0_") || strings.Count(a, "_") != 1 {
		t.Errorf("got %s and %s", a, b)
	}
}

func TestClocksAdvance(t *testing.T) {
	for name, clock := range map[string]Clock{"boot": NewBootClock(), "monotonic": NewMonotonicClock()} {
		before := clock.Now()
		for clock.Now() == before {
		}
		if clock.Now() < before {
			t.Errorf("%s goes back", name)
		}
	}
}

func TestLostErrorIsTyped(t *testing.T) {
	err := errors.Join(&LostError{Reason: protocol.ReasonRenewDeadline, Term: protocol.Term{LeaseUID: "uid", Transitions: 3}}, errLead)
	if got := err.Error(); got != "leadership of term uid/3 ended: RenewDeadline\nlead failed" {
		t.Error(got)
	}
}
