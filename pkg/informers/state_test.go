// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	testingclock "k8s.io/utils/clock/testing"
)

// TestFailuresAreAProblemInTime has a resource that was listed before its lists fail.
func TestFailuresAreAProblemInTime(t *testing.T) {
	slow := apierrors.NewTimeoutError("slow", 1)
	for name, tc := range map[string]struct {
		err       error
		after     time.Duration
		absent    bool
		problem   bool
		failsLong bool
	}{
		"a time-out is no problem within the first minute": {err: slow, after: failingAfter - 1},
		"a time-out is a problem after a minute":           {err: slow, after: failingAfter, problem: true, failsLong: true},
		"a 401 is a problem at once":                       {err: apierrors.NewUnauthorized("revoked"), problem: true},
		"a 403 is a problem at once":                       {err: apierrors.NewForbidden(schema.GroupResource{}, "", nil), problem: true},
		"a resource that no server has is no problem":      {err: slow, after: time.Hour, absent: true, failsLong: true},
	} {
		t.Run(name, func(t *testing.T) {
			clock := testingclock.NewFakePassiveClock(time.Now())
			s := newState("secrets", clock)
			s.recordList("1")
			if tc.absent {
				s.markAbsent(true)
			}
			s.recordFailure("list", tc.err)
			clock.SetTime(clock.Now().Add(tc.after))
			if err := s.problem(); (err != nil) != tc.problem {
				t.Errorf("the problem is %v", err)
			}
			if got := s.failsLong(); got != tc.failsLong {
				t.Errorf("it fails long: %t, want %t", got, tc.failsLong)
			}
		})
	}
}
