// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package election

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/pkg/election/apifence"
	"github.com/quartermaster-dev/quartermaster/pkg/election/protocol"
)

func TestDebugLeaderShowsHolderAndStandby(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := freeStore()
		first := startReplica(t, store, "first", testConfig())
		<-first.led
		second := startReplica(t, store, "second", testConfig())
		pass(3 * time.Second)

		s := shown(first.lock)
		if s.Phase != "Leading" || s.Holder != "first" || s.Identity != "first" || *s.Term != (protocol.Term{LeaseUID: "uid-1", Transitions: 1}) ||
			s.Valid < 8 || s.Valid > 10 || !s.Watching || s.ServerFence != apifence.Unknown {
			t.Errorf("the leader shows %+v", s)
		}
		rec := httptest.NewRecorder()
		second.lock.ServeHTTP(rec, httptest.NewRequest(http.MethodGet, "/debug/leader", nil))
		for _, want := range []string{`"phase": "Standby"`, `"holder": "first"`, `"leaseUID": "uid-1"`} {
			if !strings.Contains(rec.Body.String(), want) || rec.Header().Get("Content-Type") != "application/json" {
				t.Errorf("the standby shows no %s:\n%s", want, rec.Body)
			}
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

func TestLockBeforeRunHasNoState(t *testing.T) {
	lock := assert.Must(NewLock(testConfig(), Candidate{Identity: "r"}))
	if s := shown(lock); s.Phase != "NotStarted" {
		t.Errorf("it shows %+v", s)
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

func TestBootClockAdvances(t *testing.T) {
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
