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
			Term     *protocol.Term
			Watching bool
		}
		rec := get(first.lock, "/debug/leader", "application/json")
		if err := json.Unmarshal(rec.Body.Bytes(), &s); err != nil {
			t.Fatal(err)
		}
		if s.Phase != "Leading" || s.Holder != "first" || s.Identity != "first" || *s.Term != (protocol.Term{LeaseUID: "uid-1", Transitions: 1}) ||
			s.Valid < 8 || s.Valid > 10 || !s.Watching ||
			s.ServerFence != apifence.Unknown {
			t.Errorf("the leader shows %s", rec.Body)
		}
		text := get(second.lock, "/debug/leader", "*/*").Body.String()
		for _, want := range []string{"phase: Standby", "holder: first", "leaseUID: uid-1"} {
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
		if s := shown(first.lock); s.Phase != "Stopped" {
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

func TestTheBootClockAdvances(t *testing.T) {
	clock := NewBootClock()
	before := clock.Now()
	for clock.Now() == before {
	}
	if clock.Now() < before {
		t.Error("it goes back")
	}
}

func TestLostErrorIsTyped(t *testing.T) {
	err := errors.Join(&LostError{Reason: protocol.ReasonRenewDeadline, Term: protocol.Term{LeaseUID: "uid", Transitions: 3}}, errLead)
	if got := err.Error(); got != "leadership of term uid/3 ended: RenewDeadline\nlead failed" {
		t.Error(got)
	}
}
