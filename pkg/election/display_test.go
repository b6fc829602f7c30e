// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package election

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"
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

		var s status
		rec := get(first.lock, "/debug/leader", "application/json")
		if err := json.Unmarshal(rec.Body.Bytes(), &s); err != nil {
			t.Fatal(err)
		}
		if s.Phase != phaseLeading || s.Holder != "first" || s.Identity != "first" || *s.Term != (Term{"uid-1", 1}) ||
			s.Valid < 8 || s.Valid > 10 || s.LastRenewal == nil || s.LastRenewal.Latency <= 0 || !s.Watching ||
			s.ServerFence != ServerFenceUnknown || len(s.History) != 2 {
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
		for _, transition := range second.lock.shown.snapshot().History {
			reasons = append(reasons, transition.Reason)
		}
		if got := strings.Join(reasons, ", "); got != "first seen, released, acquired by this replica" {
			t.Errorf("the second has seen: %s", got)
		}
		if s := first.lock.shown.snapshot(); s.Phase != phaseStopped || s.History[len(s.History)-1].Reason != "this replica stopped: Released" {
			t.Errorf("the first ends with %+v", s)
		}
		second.stop(nil)
		if err := <-second.done; err != nil {
			t.Error(err)
		}
		store.background.Wait()
	})
}

func TestHistoryIsBounded(t *testing.T) {
	var s status
	for i := range 3 * historySize {
		s.Holder = fmt.Sprint(i)
		s.remember("")
	}
	if len(s.History) != historySize || s.History[historySize-1].Holder != fmt.Sprint(3*historySize-1) {
		t.Errorf("%d entries, the last of %s", len(s.History), s.History[historySize-1].Holder)
	}
}

func TestBeforeRun(t *testing.T) {
	lock := must(NewLock(testConfig(), Candidate{Identity: "r"}))
	if text := get(lock, "/debug/leader", "").Body.String(); !strings.Contains(text, phaseNotStarted) {
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
	err := errors.Join(&LostError{Reason: ReasonRenewDeadline, Term: Term{"uid", 3}}, errLead)
	if got := err.Error(); got != "leadership of term uid/3 ended: RenewDeadline\nlead failed" {
		t.Error(got)
	}
}
