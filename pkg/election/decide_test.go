// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package election

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
)

var testTiming = timing{lease: 15 * time.Second, deadline: 10 * time.Second, retry: 2 * time.Second}

// testLease returns a Lease as renewed at the second that is its version.
func testLease(version string, transitions int32, holder string, change ...func(*coordinationv1.Lease)) *coordinationv1.Lease {
	lease := newLease(types.NamespacedName{Namespace: "ns", Name: "lease"}, holder, 15*time.Second, time.Unix(0, 0))
	lease.UID, lease.ResourceVersion = "uid", version
	lease.Spec.LeaseTransitions = ptr.To(transitions)
	seconds := time.Duration(len(version)) * time.Second
	lease.Spec.RenewTime = ptr.To(metav1.NewMicroTime(time.Unix(0, 0).Add(seconds)))
	for _, c := range change {
		c(lease)
	}
	return lease
}

func released(l *coordinationv1.Lease)  { *l = *releasedLease(l, time.Unix(99, 0)) }
func recreated(l *coordinationv1.Lease) { l.UID = "other" }
func lasting(d time.Duration) func(*coordinationv1.Lease) {
	return func(l *coordinationv1.Lease) { l.Spec.LeaseDurationSeconds = ptr.To(int32(d / time.Second)) }
}

func TestObserve(t *testing.T) {
	const s = time.Second
	type step struct {
		at    time.Duration
		lease *coordinationv1.Lease
		gap   bool
	}
	tests := map[string]struct {
		steps []step
		want  time.Duration // when the Lease is free
	}{
		"a held lease is free when its duration has passed since it was seen first": {
			[]step{{0, testLease("1", 1, "a"), false}, {5 * s, testLease("1", 1, "a"), false}}, 15 * s},
		"a renewal starts it anew": {
			[]step{{0, testLease("1", 1, "a"), false}, {5 * s, testLease("2", 1, "a"), false}}, 20 * s},
		"a late echo does not": {
			[]step{{0, testLease("2", 1, "a"), false}, {5 * s, testLease("1", 1, "a"), false}}, 15 * s},
		"the duration is the holder's": {
			[]step{{0, testLease("1", 1, "a", lasting(40*s)), false}}, 40 * s},
		"also if it is shorter than one's own": {
			[]step{{0, testLease("1", 1, "a", lasting(3*s)), false}}, 3 * s},
		"without a duration it is one's own": {
			[]step{{0, testLease("1", 1, "a", func(l *coordinationv1.Lease) { l.Spec.LeaseDurationSeconds = nil }), false}}, 15 * s},
		"a released lease is free": {
			[]step{{0, testLease("1", 1, "a"), false}, {5 * s, testLease("2", 1, "", released), false}}, 0},
		"also if the release was not seen as it happened": {
			[]step{{0, testLease("1", 1, "a"), false}, {5 * s, testLease("2", 1, "", released), true}}, 0},
		"also at first sight": {[]step{{0, testLease("1", 1, "", released), false}}, 0},
		"a lease that was never held is free": {
			[]step{{0, &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{UID: "uid", ResourceVersion: "1"}}, false}}, 0},
		"a lease whose holder was edited away is not": {
			[]step{{0, testLease("1", 1, ""), false}}, 15 * s},
		"nor one whose holder and duration were edited": {
			[]step{{0, testLease("1", 1, ""), false}, {5 * s, testLease("2", 1, "", lasting(s), func(l *coordinationv1.Lease) { l.Spec.AcquireTime = l.Spec.RenewTime }), false}}, 20 * s},
		"a released lease that is edited stays free": {
			[]step{{0, testLease("1", 1, "a"), false}, {5 * s, testLease("2", 1, "", released), false}, {6 * s, testLease("3", 1, "", released), false}}, 0},
		"an edit that shortens the duration does not count": {
			[]step{{0, testLease("1", 1, "a"), false}, {5 * s, testLease("2", 1, "a", lasting(s)), false}}, 20 * s},
		"a takeover after the expiry clears the earlier claim": {
			[]step{{0, testLease("1", 1, "a"), false}, {15 * s, testLease("2", 2, "b"), false},
				{16 * s, testLease("3", 2, "", released), false}}, 0},
		"so does a takeover after a release, seen or not": {
			[]step{{0, testLease("1", 1, "a"), false}, {5 * s, testLease("2", 1, "", released), false},
				{6 * s, testLease("4", 2, "b"), true}, {7 * s, testLease("5", 2, "", released), true}}, 0},
		"a takeover from a live holder does not": {
			[]step{{0, testLease("1", 1, "a"), false}, {5 * s, testLease("2", 2, "b"), false},
				{6 * s, testLease("3", 2, "", released), false}}, 20 * s},
		"nor does a takeover of which it is not known whether it was": {
			[]step{{0, testLease("1", 1, "a"), false}, {15 * s, testLease("2", 2, "b"), true},
				{16 * s, testLease("3", 2, "", released), false}}, 30 * s},
		"the release of another term than the last one seen": {
			[]step{{0, testLease("1", 1, "a"), false}, {5 * s, testLease("3", 2, "", released), true}}, 20 * s},
		"absence says nothing of who may lead": {[]step{{0, nil, false}}, 15 * s},
		"a deletion leaves what the holder may have renewed unseen": {
			[]step{{0, testLease("1", 1, "a"), false}, {5 * s, nil, false}}, 20 * s},
		"absence is counted from the first time": {[]step{{0, nil, false}, {5 * s, nil, false}}, 15 * s},
		"a lease that was replaced": {
			[]step{{0, testLease("1", 1, "a"), false}, {5 * s, testLease("2", 0, "", released, recreated), false}}, 20 * s},
		"a lease that was created after it was seen absent": {
			[]step{{0, nil, false}, {5 * s, testLease("2", 0, "b"), false}, {6 * s, testLease("3", 0, "", released), false}}, 15 * s},
		"versions that cannot be ordered count as newer": {
			[]step{{0, testLease("b", 1, "a"), false}, {5 * s, testLease("a", 1, "a"), false}}, 20 * s},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			var v view
			for _, step := range test.steps {
				v = v.observe(step.lease, step.at, !step.gap, testTiming)
			}
			if got := v.freeAt(); got != test.want {
				t.Errorf("free at %s, want %s", got, test.want)
			}
		})
	}
}

func TestDecide(t *testing.T) {
	const s = time.Second
	standby := func(change ...func(*state)) *state {
		st := newState("me", testTiming)
		st.readAt, st.watched = never, true
		st.view = view{known: true, lease: testLease("1", 1, "a"), claim: 15 * s}
		for _, c := range change {
			c(st)
		}
		return st
	}
	leader := func(change ...func(*state)) *state {
		st := standby()
		st.phase = leading
		st.tenure = &tenure{term: Term{"uid", 2}, lease: testLease("2", 2, "me"), sent: 100 * s}
		for _, c := range change {
			c(st)
		}
		return st
	}
	end := func(r Reason) action { return action{kind: actEnd, reason: r} }
	wait := func(until time.Duration) action { return action{kind: actWait, until: until} }
	tests := map[string]struct {
		state *state
		now   time.Duration
		want  action
	}{
		"a replica that knows nothing reads":       {newState("me", testTiming), 0, action{kind: actRead}},
		"it waits for the answer":                  {standby(func(st *state) { st.view, st.reading = view{}, true }), 0, wait(never)},
		"then it watches":                          {standby(func(st *state) { st.watched = false }), 0, action{kind: actWatch}},
		"a standby waits for the expiry":           {standby(), 5 * s, wait(15 * s)},
		"or for the next read":                     {standby(func(st *state) { st.readAt = 7 * s }), 5 * s, wait(7 * s)},
		"it takes an expired lease":                {standby(), 15 * s, action{kind: actAcquire}},
		"and a released one at once":               {standby(func(st *state) { st.view.claim = 0 }), 1, action{kind: actAcquire}},
		"but not while an earlier holder may lead": {standby(func(st *state) { st.view.distrust = 20 * s }), 16 * s, wait(20 * s)},
		"nor while another write is under way":     {standby(func(st *state) { st.writing = true }), 15 * s, wait(never)},
		"nor right after one that failed":          {standby(func(st *state) { st.writeAt = 16 * s }), 15 * s, wait(16 * s)},
		"nor before a conflict is explained":       {standby(func(st *state) { st.doubtful, st.reading = true, true }), 15 * s, wait(never)},
		"it creates a lease that is absent":        {standby(func(st *state) { st.view = view{known: true, distrust: 15 * s} }), 0, action{kind: actCreate}},
		"its own lost acquisition is resumed": {standby(func(st *state) {
			st.unanswered = &acquisition{term: Term{"uid", 1}, acquired: testLease("1", 1, "a").Spec.AcquireTime}
			st.identity = "a"
		}), 0, action{kind: actResume}},
		"but not while an earlier holder may act": {standby(func(st *state) {
			st.unanswered, st.identity = &acquisition{term: Term{"uid", 1}, acquired: testLease("1", 1, "a").Spec.AcquireTime}, "a"
			st.view.distrust = 9 * s
		}), 0, wait(9 * s)},
		"its own name alone gives it nothing":           {standby(func(st *state) { st.identity = "a" }), 0, wait(15 * s)},
		"a standby that is to stop stops":               {standby(func(st *state) { st.stopping = true }), 15 * s, end(ReasonNeverLed)},
		"but not before it knows what its write did":    {standby(func(st *state) { st.stopping, st.writing = true, true }), 15 * s, wait(never)},
		"a leader renews":                               {leader(), 102 * s, action{kind: actRenew}},
		"not earlier":                                   {leader(), 101 * s, wait(102 * s)},
		"nor while it does":                             {leader(func(st *state) { st.writing = true }), 102 * s, wait(110 * s)},
		"a leader watches its own lease":                {leader(func(st *state) { st.watched = false }), 101 * s, action{kind: actWatch}},
		"a conflict is explained by a read":             {leader(func(st *state) { st.doubtful, st.readAt = true, 102*s }), 102 * s, action{kind: actRead}},
		"and nothing is written meanwhile":              {leader(func(st *state) { st.doubtful, st.reading = true, true }), 105 * s, wait(110 * s)},
		"a leader ends at the renew deadline":           {leader(), 110 * s, end(ReasonRenewDeadline)},
		"also while a renewal is under way":             {leader(func(st *state) { st.writing = true }), 110 * s, end(ReasonRenewDeadline)},
		"a leader ends when its lease is lost":          {leader(func(st *state) { st.tenure.lost = ReasonLeaseDeleted }), 101 * s, end(ReasonLeaseDeleted)},
		"a leader that drains renews":                   {leader(func(st *state) { st.stopping, st.drainUntil = true, 130*s }), 102 * s, action{kind: actRenew}},
		"a drain has an end":                            {leader(func(st *state) { st.stopping, st.drainUntil = true, 103*s }), 103 * s, end(ReasonDrainTimeout)},
		"the lease is released when lead has returned":  {leader(func(st *state) { st.phase = releasing }), 101 * s, action{kind: actRelease}},
		"but not while a renewal is under way":          {leader(func(st *state) { st.phase, st.writing = releasing, true }), 101 * s, wait(110 * s)},
		"nor before a conflict is explained, as before": {leader(func(st *state) { st.phase, st.doubtful, st.reading = releasing, true, true }), 101 * s, wait(110 * s)},
		"a release has an end":                          {leader(func(st *state) { st.phase = releasing }), 110 * s, end(ReasonReleaseFailed)},
		"a releasing replica does not watch":            {leader(func(st *state) { st.phase, st.watched, st.writing = releasing, false, true }), 101 * s, wait(110 * s)},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(test.want, test.state.decide(test.now), cmp.AllowUnexported(action{})); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestTenureObserve(t *testing.T) {
	tests := map[string]struct {
		lease *coordinationv1.Lease
		want  Reason
	}{
		"a renewal of its own":             {testLease("8", 2, "me"), ""},
		"an echo of the holder before":     {testLease("6", 1, "a"), ""},
		"another holder":                   {testLease("8", 3, "b"), ReasonHolderChanged},
		"another holder in the same term":  {testLease("8", 2, "b"), ReasonHolderChanged},
		"itself in another term":           {testLease("8", 3, "me"), ReasonHolderChanged},
		"a release that it has not sent":   {testLease("8", 2, "", released), ReasonHolderChanged},
		"another lease":                    {testLease("8", 2, "me", recreated), ReasonLeaseReplaced},
		"none":                             {nil, ReasonLeaseDeleted},
		"an echo of the lease before that": {testLease("5", 2, "me", recreated), ""},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			own := tenure{term: Term{"uid", 2}, lease: testLease("7", 2, "me"), sent: 100 * time.Second}
			own.observe(test.lease, "me")
			if own.lost != test.want {
				t.Errorf("got %q, want %q", own.lost, test.want)
			}
			if own.sent != 100*time.Second {
				t.Error("what was seen has extended the term")
			}
		})
	}
}

func TestAnswers(t *testing.T) {
	const s = time.Second
	standby := func() *state {
		st := newState("me", testTiming)
		st.view = view{known: true, lease: testLease("1", 1, "a")}
		st.writing = true
		return st
	}
	t.Run("an answer in time begins a term from before it was asked for", func(t *testing.T) {
		st := standby()
		if !st.hasAcquired(testLease("2", 2, "me"), 20*s, 29*s) || st.tenure.sent != 20*s {
			t.Errorf("got %+v", st.tenure)
		}
	})
	t.Run("an answer that comes too late begins none", func(t *testing.T) {
		st := standby()
		if st.hasAcquired(testLease("2", 2, "me"), 20*s, 30*s) || st.phase != standingBy {
			t.Fatalf("got %+v", st.tenure)
		}
		st.watched, st.readAt = true, never
		if got := st.decide(30 * s).kind; got != actResume {
			t.Errorf("then %s, want %s", got, actResume)
		}
	})
	t.Run("the watch may be ahead of the answer", func(t *testing.T) {
		st := standby()
		st.observe(testLease("3", 3, "thief"), 21*s, true)
		st.hasAcquired(testLease("2", 2, "me"), 20*s, 22*s)
		if got := st.decide(22 * s); got.kind != actEnd || got.reason != ReasonHolderChanged {
			t.Errorf("got %+v", got)
		}
	})
	t.Run("an acquisition without an answer is forgotten when another version is seen", func(t *testing.T) {
		st := standby()
		st.acquisitionFailed(testLease("1", 1, "a"), testLease("1", 2, "me"), false, 21*s)
		if st.unanswered == nil {
			t.Fatal("forgotten at once")
		}
		st.observe(testLease("2", 2, "b"), 21*s, true)
		st.observe(testLease("3", 2, "me"), 22*s, true) // edited by hand
		if st.unanswered != nil || st.decide(22*s).kind == actResume {
			t.Error("it is taken for its own")
		}
	})
	t.Run("an edit that names this replica is not its acquisition", func(t *testing.T) {
		st := standby()
		st.acquisitionFailed(testLease("1", 1, "a"), testLease("1", 2, "me"), false, 21*s)
		st.observe(testLease("3", 2, "me", func(l *coordinationv1.Lease) { hold(l, "me", 15*s, time.Unix(5, 0)) }), 22*s, false)
		if st.unanswered != nil {
			t.Error("it is taken for its own")
		}
	})
	t.Run("a conflict that the watch has explained needs no read", func(t *testing.T) {
		st := standby()
		st.observe(testLease("2", 2, "b"), 21*s, true)
		st.acquisitionFailed(testLease("1", 1, "a"), testLease("1", 2, "me"), true, 22*s)
		if st.doubtful {
			t.Error("doubtful")
		}
	})
	t.Run("a renewal that was answered after the deadline does not extend the term", func(t *testing.T) {
		st := standby()
		st.hasAcquired(testLease("2", 2, "me"), 20*s, 21*s)
		st.hasRenewed(testLease("3", 2, "me"), 29*s, 30*s)
		if got := st.decide(30 * s); got.reason != ReasonRenewDeadline {
			t.Errorf("got %+v", got)
		}
	})
	t.Run("the echo of a release counts as its answer", func(t *testing.T) {
		st := standby()
		st.stopping = true
		st.hasAcquired(testLease("2", 2, "me"), 20*s, 21*s)
		st.observe(testLease("3", 2, "", released), 22*s, true)
		if got := st.decide(22 * s); got.reason != ReasonReleased {
			t.Errorf("got %+v", got)
		}
	})
}
