// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package protocol

import (
	"math"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
)

var testTiming = Timing{Lease: 15 * time.Second, Deadline: 10 * time.Second, Retry: 2 * time.Second}

// testLease returns a Lease as renewed at the second that is its version.
func testLease(version string, transitions int32, holder string, change ...func(*coordinationv1.Lease)) *coordinationv1.Lease {
	lease := NewLease(types.NamespacedName{Namespace: "ns", Name: "lease"}, holder, 15*time.Second, time.Unix(0, 0))
	lease.UID, lease.ResourceVersion = "uid", version
	lease.Spec.LeaseTransitions = ptr.To(transitions)
	seconds := time.Duration(len(version)) * time.Second
	lease.Spec.RenewTime = ptr.To(metav1.NewMicroTime(time.Unix(0, 0).Add(seconds)))
	for _, c := range change {
		c(lease)
	}
	return lease
}

func released(l *coordinationv1.Lease) { *l = *ReleasedLease(l, time.Unix(99, 0)) }
func renewed(l *coordinationv1.Lease) {
	l.Spec.RenewTime = ptr.To(metav1.NewMicroTime(time.Unix(50, 0)))
}
func recreated(l *coordinationv1.Lease) { l.UID = "other" }
func lasting(d time.Duration) func(*coordinationv1.Lease) {
	return func(l *coordinationv1.Lease) { l.Spec.LeaseDurationSeconds = ptr.To(int32(d / time.Second)) }
}

func TestStandbyLearnsFromEachRead(t *testing.T) {
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
		"a renewal starts the wait anew": {
			[]step{{0, testLease("1", 1, "a"), false}, {5 * s, testLease("2", 1, "a"), false}}, 20 * s},
		"a late echo does not start the wait anew": {
			[]step{{0, testLease("2", 1, "a"), false}, {5 * s, testLease("1", 1, "a"), false}}, 15 * s},
		"the duration of the wait is the holder's": {
			[]step{{0, testLease("1", 1, "a", lasting(40*s)), false}}, 40 * s},
		"a duration that no replica may have is an edit, and ends the wait however it is repaired": {
			[]step{{0, testLease("1", 1, "a", lasting(math.MaxInt32*s)), false}, {5 * s, nil, false}, {20 * s, testLease("9", 1, "b", recreated), false}}, 605 * s},
		"the duration of the wait is the holder's, also if that is shorter than one's own": {
			[]step{{0, testLease("1", 1, "a", lasting(3*s)), false}}, 3 * s},
		"without a duration of the holder, the wait is one's own duration": {
			[]step{{0, testLease("1", 1, "a", func(l *coordinationv1.Lease) { l.Spec.LeaseDurationSeconds = nil }), false}}, 15 * s},
		"a released lease is free": {
			[]step{{0, testLease("1", 1, "a"), false}, {5 * s, testLease("2", 1, "", released), false}}, 0},
		"a released lease is free, also if the release was not seen as it happened": {
			[]step{{0, testLease("1", 1, "a"), false}, {5 * s, testLease("2", 1, "", released), true}}, 0},
		"a released lease is free at first sight": {[]step{{0, testLease("1", 1, "", released), false}}, 0},
		"a Lease that was never held is free": {
			[]step{{0, &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{UID: "uid", ResourceVersion: "1"}}, false}}, 0},
		"a Lease whose holder was edited away is not free": {
			[]step{{0, testLease("1", 1, ""), false}}, 15 * s},
		"a Lease whose holder and duration were edited is not free": {
			[]step{{0, testLease("1", 1, ""), false}, {5 * s, testLease("2", 1, "", lasting(s), func(l *coordinationv1.Lease) { l.Spec.AcquireTime = l.Spec.RenewTime }), false}}, 20 * s},
		"a released lease that is edited stays free": {
			[]step{{0, testLease("1", 1, "a"), false}, {5 * s, testLease("2", 1, "", released), false}, {6 * s, testLease("3", 1, "", released), false}}, 0},
		"an edit that shortens the duration does not count": {
			[]step{{0, testLease("1", 1, "a"), false}, {5 * s, testLease("2", 1, "a", lasting(s)), false}}, 20 * s},
		"an edit that lengthens the duration does not count": {
			[]step{{0, testLease("1", 1, "a"), false}, {5 * s, testLease("2", 1, "a", lasting(86400*s)), false}}, 20 * s},
		"an edit that changes the holder too, and is undone, does not count": {
			[]step{{0, testLease("1", 1, "a"), false}, {5 * s, testLease("2", 1, "b", lasting(86400*s)), false},
				{6 * s, testLease("3", 1, "b"), false}, {9 * s, testLease("4", 2, "c", renewed), false},
				{10 * s, testLease("5", 2, "", released), false}}, 24 * s},
		"a renewal replaces the claim, also one that was edited before": {
			[]step{{0, testLease("1", 1, "a", lasting(86400*s)), false}, {5 * s, testLease("2", 1, "a", renewed), false}}, 20 * s},
		"a renewal that was edited unseen does not shorten the claim": {
			[]step{{0, testLease("1", 1, "a"), false}, {5 * s, testLease("3", 1, "a", renewed, lasting(s)), true}}, 20 * s},
		"a renewal that was edited before and after it does not shorten the claim": {
			[]step{{0, testLease("1", 1, "a"), false}, {5 * s, testLease("2", 1, "a", lasting(s)), false},
				{9 * s, testLease("4", 1, "a", renewed, lasting(s)), true}}, 24 * s},
		"the transitions wrap": {
			[]step{{0, testLease("1", math.MaxInt32, "a"), false}, {15 * s, testLease("2", 0, "b"), false},
				{16 * s, testLease("3", 0, "", released), false}}, 0},
		"a takeover after the expiry clears the earlier claim": {
			[]step{{0, testLease("1", 1, "a"), false}, {15 * s, testLease("2", 2, "b"), false},
				{16 * s, testLease("3", 2, "", released), false}}, 0},
		"a takeover after a release, seen or not, clears the earlier claim": {
			[]step{{0, testLease("1", 1, "a"), false}, {5 * s, testLease("2", 1, "", released), false},
				{6 * s, testLease("4", 2, "b"), true}, {7 * s, testLease("5", 2, "", released), true}}, 0},
		"a takeover from a live holder does not clear the earlier claim": {
			[]step{{0, testLease("1", 1, "a"), false}, {5 * s, testLease("2", 2, "b"), false},
				{6 * s, testLease("3", 2, "", released), false}}, 20 * s},
		"a takeover that may be from a live holder does not clear the earlier claim": {
			[]step{{0, testLease("1", 1, "a"), false}, {15 * s, testLease("2", 2, "b"), true},
				{16 * s, testLease("3", 2, "", released), false}}, 30 * s},
		"the release of another term than the last one seen": {
			[]step{{0, testLease("1", 1, "a"), false}, {5 * s, testLease("3", 2, "", released), true}}, 20 * s},
		"absence says nothing of who may lead": {[]step{{0, nil, false}}, 15 * s},
		"a deletion leaves what the holder may have renewed unseen": {
			[]step{{0, testLease("1", 1, "a"), false}, {5 * s, nil, false}}, 20 * s},
		"absence is counted from the first time": {[]step{{0, nil, false}, {5 * s, nil, false}}, 15 * s},
		"a Lease that was replaced": {
			[]step{{0, testLease("1", 1, "a"), false}, {5 * s, testLease("2", 0, "", released, recreated), false}}, 20 * s},
		"a Lease that was created after it was seen absent": {
			[]step{{0, nil, false}, {5 * s, testLease("2", 0, "b"), false}, {6 * s, testLease("3", 0, "", released), false}}, 15 * s},
		"versions that cannot be ordered count as newer": {
			[]step{{0, testLease("b", 1, "a"), false}, {5 * s, testLease("a", 1, "a"), false}}, 20 * s},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			state := New("me", testTiming, "", false)
			for _, step := range tc.steps {
				state.learn(step.lease, step.at, !step.gap)
			}
			if got := state.freeAt(); got != tc.want {
				t.Errorf("free at %s, want %s", got, tc.want)
			}
		})
	}
}

func TestDecideChoosesTheNextAction(t *testing.T) {
	const s = time.Second
	// Without jitter in the cases: a read and the watch are done.
	standby := func(change ...func(*State)) *State {
		state := New("me", testTiming, "", false)
		state.learn(testLease("1", 1, "a"), 0, true)
		state.readAt, state.watching, state.watchUp = never, true, true
		for _, c := range change {
			c(state)
		}
		return state
	}
	leader := func(change ...func(*State)) *State {
		state := standby()
		state.OnAcquired(testLease("2", 2, "me"), 100*s, 100*s)
		state.OnAdmitted()
		state.OnLeadStarted()
		for _, c := range change {
			c(state)
		}
		return state
	}
	// holder has taken the Lease early and has not begun to lead.
	holder := func(change ...func(*State)) *State {
		state := standby(func(state *State) { state.acquiringProofUntil = 110 * s })
		state.OnAcquired(testLease("2", 2, "me"), 100*s, 100*s)
		for _, c := range change {
			c(state)
		}
		return state
	}
	end := func(r Reason) Action { return Action{Kind: ActEnd, Reason: r} }
	wait := func(until time.Duration) Action { return Action{Kind: ActWait, Until: until} }
	tests := map[string]struct {
		state *State
		now   time.Duration
		want  Action
	}{
		"a replica that knows nothing reads":                               {New("me", testTiming, "", false), 0, Action{Kind: ActRead}},
		"a replica that reads waits for the answer":                        {standby(func(state *State) { state.known, state.reading = false, true }), 0, wait(never)},
		"a replica that knows the Lease watches it":                        {standby(func(state *State) { state.watching = false }), 0, Action{Kind: ActWatch}},
		"a replica whose reads fail does not watch":                        {standby(func(state *State) { state.watching, state.readFails.n = false, 1 }), 5 * s, wait(15 * s)},
		"a replica whose watch is up reads once more":                      {standby(func(state *State) { state.OnWatchUp(5 * s) }), 5 * s, Action{Kind: ActRead}},
		"a standby waits for the expiry":                                   {standby(), 5 * s, wait(15 * s)},
		"a standby waits for the next read":                                {standby(func(state *State) { state.readAt = 7 * s }), 5 * s, wait(7 * s)},
		"a standby takes an expired lease":                                 {standby(), 15 * s, Action{Kind: ActAcquire}},
		"a standby takes a released lease at once":                         {standby(func(state *State) { state.learn(testLease("2", 1, "", released), 1, true) }), 1, Action{Kind: ActAcquire}},
		"a standby does not take a Lease while an earlier holder may lead": {standby(func(state *State) { state.distrustUntil = 20 * s }), 16 * s, wait(20 * s)},
		"a standby does not take a Lease while another write is under way": {standby(func(state *State) { state.writing = true }), 15 * s, wait(never)},
		"a standby does not take a Lease right after a write that failed":  {standby(func(state *State) { state.writeAt = 16 * s }), 15 * s, wait(16 * s)},
		"a standby does not take a Lease before a conflict is explained":   {standby(func(state *State) { state.known, state.reading = false, true }), 15 * s, wait(never)},
		"a standby creates a Lease that is absent":                         {standby(func(state *State) { state.learn(nil, 0, true) }), 0, Action{Kind: ActCreate}},
		"its own name in the Lease gives a standby nothing":                {standby(func(state *State) { state.identity = "a" }), 0, wait(15 * s)},
		"a standby that is to stop stops":                                  {standby(func(state *State) { state.OnStop(never, 15*s) }), 15 * s, end(ReasonNeverLed)},
		"a standby does not stop before it knows what its write did":       {standby(func(state *State) { state.OnStop(never, 15*s); state.writing = true }), 15 * s, wait(never)},
		"a leader renews":                                                             {leader(), 102 * s, Action{Kind: ActRenew}},
		"a leader does not renew earlier":                                             {leader(), 101 * s, wait(102 * s)},
		"a leader does not renew while a renewal is under way":                        {leader(func(state *State) { state.writing = true }), 102 * s, wait(110 * s)},
		"a leader watches its own lease":                                              {leader(func(state *State) { state.watching = false }), 101 * s, Action{Kind: ActWatch}},
		"a conflict is explained by a read":                                           {leader(func(state *State) { state.known, state.readAt = false, 102*s }), 102 * s, Action{Kind: ActRead}},
		"nothing is written before a conflict is explained":                           {leader(func(state *State) { state.known, state.reading = false, true }), 105 * s, wait(110 * s)},
		"a leader ends at the renew deadline":                                         {leader(), 110 * s, end(ReasonRenewDeadline)},
		"a leader ends at the renew deadline although a renewal is under way":         {leader(func(state *State) { state.writing = true }), 110 * s, end(ReasonRenewDeadline)},
		"a leader ends when its Lease is lost":                                        {leader(func(state *State) { state.learn(nil, 101*s, true) }), 101 * s, end(ReasonLeaseDeleted)},
		"a leader that drains renews":                                                 {leader(func(state *State) { state.OnStop(130*s, 101*s) }), 102 * s, Action{Kind: ActRenew}},
		"a drain has an end":                                                          {leader(func(state *State) { state.OnStop(103*s, 101*s) }), 103 * s, end(ReasonDrainTimeout)},
		"work that was left behind ends a drain":                                      {leader(func(state *State) { state.OnLeadReturned(130*s, 101*s, true) }), 101 * s, end(ReasonDrainTimeout)},
		"the Lease is released when lead is quiet":                                    {leader(func(state *State) { state.OnQuiet(101*s, 101*s) }), 101 * s, Action{Kind: ActRelease}},
		"the Lease is not released before lead is quiet":                              {leader(func(state *State) { state.OnQuiet(161*s, 101*s) }), 101 * s, wait(102 * s)},
		"the Lease is renewed until lead is quiet":                                    {leader(func(state *State) { state.OnQuiet(161*s, 101*s) }), 102 * s, Action{Kind: ActRenew}},
		"the Lease is not renewed if the drain may not last until lead is quiet":      {leader(func(state *State) { state.OnStop(131*s, 101*s); state.OnQuiet(161*s, 101*s) }), 101 * s, end(ReasonDrainTimeout)},
		"the Lease is not released while a renewal is under way":                      {leader(func(state *State) { state.OnQuiet(0, 101*s); state.writing = true }), 101 * s, wait(110 * s)},
		"the Lease is not released before a conflict is explained":                    {leader(func(state *State) { state.OnQuiet(0, 101*s); state.known, state.reading = false, true }), 101 * s, wait(110 * s)},
		"a release has an end":                                                        {leader(func(state *State) { state.OnQuiet(0, 101*s) }), 110 * s, end(ReasonReleaseFailed)},
		"a holder that is not admitted yet renews":                                    {holder(), 102 * s, Action{Kind: ActRenew}},
		"a holder that is not admitted does not lead when it needs no proof any more": {holder(func(state *State) { state.writing = true }), 110*s - 1, wait(110 * s)},
		"a holder that is admitted does not lead while it needs a proof":              {holder((*State).OnAdmitted), 101 * s, wait(102 * s)},
		"a holder leads at once when every API server refuses the predecessors":       {holder((*State).OnAdmitted, (*State).OnProved), 101 * s, Action{Kind: ActLead}},
		"a holder leads when the claims of the predecessors have ended":               {holder((*State).OnAdmitted, func(state *State) { state.sent = 109 * s }), 110 * s, Action{Kind: ActLead}},
		"a holder that is not admitted gives up after a lease duration":               {holder(func(state *State) { state.sent = 114 * s }), 115 * s, Action{Kind: ActGiveUp}},
		"a holder that has given up releases the Lease":                               {holder(func(state *State) { state.sent = 114 * s; state.OnGiveUp(115 * s) }), 115 * s, Action{Kind: ActRelease}},
		"a holder that is stopped does not release the Lease while it needs a proof":  {holder(func(state *State) { state.OnStop(130*s, 101*s) }), 101 * s, wait(102 * s)},
		"a holder that is stopped renews the Lease while it needs a proof":            {holder(func(state *State) { state.OnStop(130*s, 101*s) }), 102 * s, Action{Kind: ActRenew}},
		"a holder that is stopped releases the Lease when it needs no proof any more": {holder(func(state *State) { state.OnStop(130*s, 101*s); state.sent = 109 * s }), 110 * s, Action{Kind: ActRelease}},
		"a holder that is stopped releases the Lease when the refusal is proved":      {holder(func(state *State) { state.OnStop(130*s, 101*s) }, (*State).OnProved), 101 * s, Action{Kind: ActRelease}},
		"a holder that may not drain that long lets the Lease expire":                 {holder(func(state *State) { state.OnStop(105*s, 101*s) }), 105 * s, end(ReasonDrainTimeout)},
		"a replica whose store was restored waits, whatever it knows":                 {standby(func(state *State) { state.onRestored(5 * s) }), 16 * s, wait(20 * s)},
		"a replica whose store was restored ends":                                     {standby(func(state *State) { state.onRestored(5 * s) }), 20 * s, end(ReasonStoreRestored)},
		"a leader whose store was restored ends":                                      {leader(func(state *State) { state.onRestored(101 * s) }), 101 * s, end(ReasonStoreRestored)},
		"a leader whose credentials are not accepted ends":                            {leader(func(state *State) { state.OnWriteFailed(state.lease, Failure{Kind: FailUnauthorized}, 102*s) }), 102 * s, end(ReasonUnauthorized)},
		"a releasing replica does not watch":                                          {leader(func(state *State) { state.OnQuiet(0, 101*s); state.watching, state.writing = false, true }), 101 * s, wait(110 * s)},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			assert.Equal(t, "decision", tc.want, tc.state.Decide(tc.now))
		})
	}
}

func TestAnotherTermEndsTheOwnOne(t *testing.T) {
	tests := map[string]struct {
		lease *coordinationv1.Lease
		read  bool // the answer to a read that was sent when the newest version was known
		want  Reason
	}{
		"a renewal of its own":                           {testLease("8", 2, "me"), false, ""},
		"an echo of the holder before":                   {testLease("6", 1, "a"), false, ""},
		"another holder":                                 {testLease("8", 3, "b"), false, ReasonHolderChanged},
		"another holder in the same term":                {testLease("8", 2, "b"), false, ReasonHolderChanged},
		"itself in another term":                         {testLease("8", 3, "me"), false, ReasonHolderChanged},
		"a release that it has not sent":                 {testLease("8", 2, "", released), false, ReasonHolderChanged},
		"another Lease":                                  {testLease("8", 2, "me", recreated), false, ReasonLeaseReplaced},
		"none":                                           {nil, false, ReasonLeaseDeleted},
		"an echo of the Lease before that":               {testLease("5", 2, "me", recreated), false, ""},
		"an earlier version, read from a restored store": {testLease("6", 2, "me"), true, ReasonStoreRestored},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			state := New("me", testTiming, "", false)
			state.learn(testLease("6", 1, "a"), 0, true)
			state.OnAcquired(testLease("7", 2, "me"), 100*time.Second, 100*time.Second)
			if tc.read {
				state.OnReading()
				state.OnRead(tc.lease, 101*time.Second)
			} else {
				state.learn(tc.lease, 101*time.Second, true)
			}
			if state.endReason != tc.want {
				t.Errorf("got %q, want %q", state.endReason, tc.want)
			}
			if state.sent != 100*time.Second {
				t.Error("what was seen has extended the term")
			}
		})
	}
}

func TestAnswersToWritesSetTheTerm(t *testing.T) {
	const s = time.Second
	// acquiring has sent an acquisition from version 1.
	acquiring := func() (*State, *coordinationv1.Lease) {
		state := New("me", testTiming, "", false)
		state.learn(testLease("1", 1, "a"), 0, true)
		lease := state.Proposal(Action{Kind: ActAcquire}, 0, time.Unix(1000, 0))
		state.OnSent(Action{Kind: ActAcquire})
		return state, lease
	}
	// stored returns what was written as a version.
	stored := func(lease *coordinationv1.Lease, version string) *coordinationv1.Lease {
		lease = lease.DeepCopy()
		lease.ResourceVersion = version
		return lease
	}
	noAnswer, conflict := Failure{Kind: FailUnanswered}, Failure{Kind: FailConflict}
	t.Run("an answer in time begins a term from before it was asked for", func(t *testing.T) {
		state, wrote := acquiring()
		if !state.OnAcquired(stored(wrote, "2"), 20*s, 29*s) || state.sent != 20*s || state.term != (Term{"uid", 2}) {
			t.Errorf("sent %s, term %s", state.sent, state.term)
		}
	})
	t.Run("an answer that comes too late begins none", func(t *testing.T) {
		state, wrote := acquiring()
		if state.OnAcquired(stored(wrote, "2"), 20*s, 30*s) || state.holding {
			t.Fatal("it leads")
		}
		state.watching, state.readAt = true, never
		if got := state.Decide(30 * s); got.Kind != ActWait {
			t.Errorf("then it takes its own record for more than anybody's: %+v", got)
		}
	})
	t.Run("the watch may be ahead of the answer", func(t *testing.T) {
		for name, ahead := range map[string]*coordinationv1.Lease{"with a thief": testLease("3", 3, "thief"), "with a deletion": nil} {
			state, wrote := acquiring()
			state.learn(ahead, 21*s, true)
			state.OnAcquired(stored(wrote, "2"), 20*s, 22*s)
			if got := state.Decide(22 * s); got.Kind != ActEnd {
				t.Errorf("%s: got %+v", name, got)
			}
		}
	})
	t.Run("an acquisition without an answer counts as anybody's", func(t *testing.T) {
		state, wrote := acquiring()
		state.OnWriteFailed(state.lease, noAnswer, 16*s)
		state.learn(stored(wrote, "2"), 17*s, true)
		state.reading, state.watching = true, true
		if got := state.Decide(17 * s); got.Kind != ActWait || got.Until != 32*s {
			t.Errorf("got %+v", got)
		}
	})
	t.Run("a conflict that the watch has explained needs no read", func(t *testing.T) {
		state, _ := acquiring()
		base := state.lease
		state.learn(testLease("2", 2, "b"), 21*s, true)
		state.OnWriteFailed(base, conflict, 22*s)
		if !state.known {
			t.Error("it reads")
		}
	})
	t.Run("a conflict is explained by a read, once", func(t *testing.T) {
		state, _ := acquiring()
		state.watching = true
		state.OnWriteFailed(state.lease, conflict, 22*s)
		if got := state.Decide(state.readAt).Kind; got != ActRead || state.readAt > 22*s+testTiming.Retry/8 {
			t.Fatalf("got %s at %s", got, state.readAt)
		}
		state.OnReading()
		state.OnRead(testLease("2", 2, "b"), 23*s)
		if got := state.Decide(23 * s); got.Kind != ActWait || got.Until < 24*s {
			t.Errorf("then %+v", got)
		}
	})
	t.Run("a conflict that a read does not explain is not tried again at once", func(t *testing.T) {
		state, _ := acquiring()
		state.watching = true
		now := 22 * s
		for range 10 {
			state.OnWriteFailed(state.lease, conflict, now)
			now = state.readAt
			state.OnReading()
			state.OnRead(state.lease, now)
			state.OnSent(Action{Kind: ActAcquire})
		}
		if now < 2*time.Minute {
			t.Errorf("10 attempts in %s", now-22*s)
		}
	})
	t.Run("a late answer to a read does not undo what the watch has shown since", func(t *testing.T) {
		for name, late := range map[string]*coordinationv1.Lease{"an earlier version": testLease("1", 1, "a"), "none": nil} {
			state := New("me", testTiming, "", false)
			state.learn(testLease("1", 1, "a"), 0, true)
			state.OnReading()
			state.learn(testLease("2", 2, "b"), s, true)
			state.OnRead(late, 2*s)
			if state.lease == late || state.distrustUntil > 16*s {
				t.Errorf("%s: the Lease is %v, distrust until %s", name, state.lease, state.distrustUntil)
			}
		}
	})
	t.Run("a renewal that was answered after the deadline does not extend the term", func(t *testing.T) {
		state, wrote := acquiring()
		state.OnAcquired(stored(wrote, "2"), 20*s, 21*s)
		state.OnRenewed(stored(wrote, "3"), 29*s, 30*s)
		if got := state.Decide(30 * s); got.Reason != ReasonRenewDeadline {
			t.Errorf("got %+v", got)
		}
	})
	t.Run("the echo of a release counts as its answer", func(t *testing.T) {
		state, wrote := acquiring()
		state.OnStop(never, 20*s)
		state.OnAcquired(stored(wrote, "2"), 20*s, 21*s)
		state.learn(testLease("3", 2, "", released), 22*s, true)
		if got := state.Decide(22 * s); got.Reason != ReasonReleased {
			t.Errorf("got %+v", got)
		}
	})
}

func TestBackoffGrowsToItsLimit(t *testing.T) {
	const s = time.Second
	after := func(state *State, n int, first time.Duration, f Failure) time.Duration {
		var c failures
		for range n {
			c.count(f)
		}
		return state.backoff(c, first, state.backoffLimit(f), f)
	}
	leads := func(state *State) { state.holding = true }
	tests := map[string]struct {
		prepare  func(*State)
		n        int
		f        Failure
		min, max time.Duration
	}{
		"the first refusal":               {nil, 1, Failure{Kind: FailRefused}, s, 3 * s},
		"the second":                      {nil, 2, Failure{Kind: FailRefused}, 4 * s, 12 * s},
		"the hundredth":                   {nil, 100, Failure{Kind: FailRefused}, 20 * s, 60 * s},
		"a wish of the API server":        {nil, 1, Failure{Kind: FailRefused, After: 20 * s}, 20 * s, 20 * s},
		"no answer, for the tenth time":   {nil, 10, Failure{Kind: FailUnanswered}, s, 3 * s},
		"a leader's tenth refusal":        {leads, 10, Failure{Kind: FailRefused}, s, 3 * s},
		"a wish that would cost the term": {leads, 1, Failure{Kind: FailRefused, After: 20 * s}, 2 * s, 3 * s},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			state := New("me", testTiming, "", false)
			if tc.prepare != nil {
				tc.prepare(state)
			}
			for range 100 {
				if d := after(state, tc.n, state.timing.Retry, tc.f); d < tc.min || d > tc.max {
					t.Fatalf("got %s, want %s to %s", d, tc.min, tc.max)
				}
			}
		})
	}
}

// TestProposalClaimsUntilNoProofIsNeeded checks that a record lasts for as long as its writer needs a proof,
// for who knows nothing but this record.
func TestProposalClaimsUntilNoProofIsNeeded(t *testing.T) {
	const s = time.Second
	state := New("me", testTiming, "10.0.0.2:10357", true)
	state.learn(testLease("1", 1, "a", lasting(60*s)), 0, true)
	act := Action{Kind: ActAcquire, ProofUntil: 60 * s}
	wrote := state.Proposal(act, 2500*time.Millisecond, time.Unix(1000, 0))
	if got := DurationOf(wrote, 0); got != 58*s {
		t.Errorf("it claims %s, and needs a proof for 57.5 s", got)
	}
	if got := noteOf(wrote); !got.Early {
		t.Errorf("the note is %+v", got)
	}
	state.OnSent(act)
	state.OnAcquired(wrote, 3*s, 3*s)
	for at, want := range map[time.Duration]time.Duration{5 * s: 55 * s, 50 * s: 15 * s, 60 * s: 15 * s} {
		if got := DurationOf(state.Proposal(Action{Kind: ActRenew}, at, time.Unix(1000, 0)), 0); got != want {
			t.Errorf("at %s a renewal claims %s, want %s", at, got, want)
		}
	}
}
