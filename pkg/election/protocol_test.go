// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package election

import (
	"math"
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

func released(l *coordinationv1.Lease) { *l = *releasedLease(l, time.Unix(99, 0)) }
func renewed(l *coordinationv1.Lease) {
	l.Spec.RenewTime = ptr.To(metav1.NewMicroTime(time.Unix(50, 0)))
}
func recreated(l *coordinationv1.Lease) { l.UID = "other" }
func lasting(d time.Duration) func(*coordinationv1.Lease) {
	return func(l *coordinationv1.Lease) { l.Spec.LeaseDurationSeconds = ptr.To(int32(d / time.Second)) }
}

func TestLearn(t *testing.T) {
	const s = time.Second
	type step struct {
		at    time.Duration
		lease *coordinationv1.Lease
		gap   bool
		back  bool // the answer to a read
	}
	tests := map[string]struct {
		steps []step
		want  time.Duration // when the Lease is free
	}{
		"a held lease is free when its duration has passed since it was seen first": {
			[]step{{0, testLease("1", 1, "a"), false, false}, {5 * s, testLease("1", 1, "a"), false, false}}, 15 * s},
		"a renewal starts it anew": {
			[]step{{0, testLease("1", 1, "a"), false, false}, {5 * s, testLease("2", 1, "a"), false, false}}, 20 * s},
		"a late echo does not": {
			[]step{{0, testLease("2", 1, "a"), false, false}, {5 * s, testLease("1", 1, "a"), false, false}}, 15 * s},
		"the duration is the holder's": {
			[]step{{0, testLease("1", 1, "a", lasting(40*s)), false, false}}, 40 * s},
		"also if it is shorter than one's own": {
			[]step{{0, testLease("1", 1, "a", lasting(3*s)), false, false}}, 3 * s},
		"without a duration it is one's own": {
			[]step{{0, testLease("1", 1, "a", func(l *coordinationv1.Lease) { l.Spec.LeaseDurationSeconds = nil }), false, false}}, 15 * s},
		"a released lease is free": {
			[]step{{0, testLease("1", 1, "a"), false, false}, {5 * s, testLease("2", 1, "", released), false, false}}, 0},
		"also if the release was not seen as it happened": {
			[]step{{0, testLease("1", 1, "a"), false, false}, {5 * s, testLease("2", 1, "", released), true, false}}, 0},
		"also at first sight": {[]step{{0, testLease("1", 1, "", released), false, false}}, 0},
		"a lease that was never held is free": {
			[]step{{0, &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{UID: "uid", ResourceVersion: "1"}}, false, false}}, 0},
		"a lease whose holder was edited away is not": {
			[]step{{0, testLease("1", 1, ""), false, false}}, 15 * s},
		"nor one whose holder and duration were edited": {
			[]step{{0, testLease("1", 1, ""), false, false}, {5 * s, testLease("2", 1, "", lasting(s), func(l *coordinationv1.Lease) { l.Spec.AcquireTime = l.Spec.RenewTime }), false, false}}, 20 * s},
		"a released lease that is edited stays free": {
			[]step{{0, testLease("1", 1, "a"), false, false}, {5 * s, testLease("2", 1, "", released), false, false}, {6 * s, testLease("3", 1, "", released), false, false}}, 0},
		"an edit that shortens the duration does not count": {
			[]step{{0, testLease("1", 1, "a"), false, false}, {5 * s, testLease("2", 1, "a", lasting(s)), false, false}}, 20 * s},
		"nor does one that lengthens it": {
			[]step{{0, testLease("1", 1, "a"), false, false}, {5 * s, testLease("2", 1, "a", lasting(86400*s)), false, false}}, 20 * s},
		"nor does one that changes the holder too, and is undone": {
			[]step{{0, testLease("1", 1, "a"), false, false}, {5 * s, testLease("2", 1, "b", lasting(86400*s)), false, false},
				{6 * s, testLease("3", 1, "b"), false, false}, {9 * s, testLease("4", 2, "c", renewed), false, false},
				{10 * s, testLease("5", 2, "", released), false, false}}, 24 * s},
		"a renewal replaces the claim, also one that was edited before": {
			[]step{{0, testLease("1", 1, "a", lasting(86400*s)), false, false}, {5 * s, testLease("2", 1, "a", renewed), false, false}}, 20 * s},
		"a renewal that was edited unseen does not shorten it": {
			[]step{{0, testLease("1", 1, "a"), false, false}, {5 * s, testLease("3", 1, "a", renewed, lasting(s)), true, false}}, 20 * s},
		"nor one that was edited before and after it": {
			[]step{{0, testLease("1", 1, "a"), false, false}, {5 * s, testLease("2", 1, "a", lasting(s)), false, false},
				{9 * s, testLease("4", 1, "a", renewed, lasting(s)), true, false}}, 24 * s},
		"the transitions wrap": {
			[]step{{0, testLease("1", math.MaxInt32, "a"), false, false}, {15 * s, testLease("2", 0, "b"), false, false},
				{16 * s, testLease("3", 0, "", released), false, false}}, 0},
		"a read that returns an earlier version is believed, and the lost holder may act": {
			[]step{{0, testLease("7", 3, "a"), false, false}, {5 * s, testLease("4", 2, "", released), false, true}}, 20 * s},
		"also if that version is held": {
			[]step{{0, testLease("7", 3, "a", lasting(40*s)), false, false}, {5 * s, testLease("4", 2, "b"), false, true}}, 45 * s},
		"versions that go on from there are in order": {
			[]step{{0, testLease("7", 3, "a"), false, false}, {5 * s, testLease("4", 2, "b"), false, true},
				{6 * s, testLease("5", 2, "b", renewed), false, false}}, 21 * s},
		"a takeover after the expiry clears the earlier claim": {
			[]step{{0, testLease("1", 1, "a"), false, false}, {15 * s, testLease("2", 2, "b"), false, false},
				{16 * s, testLease("3", 2, "", released), false, false}}, 0},
		"so does a takeover after a release, seen or not": {
			[]step{{0, testLease("1", 1, "a"), false, false}, {5 * s, testLease("2", 1, "", released), false, false},
				{6 * s, testLease("4", 2, "b"), true, false}, {7 * s, testLease("5", 2, "", released), true, false}}, 0},
		"a takeover from a live holder does not": {
			[]step{{0, testLease("1", 1, "a"), false, false}, {5 * s, testLease("2", 2, "b"), false, false},
				{6 * s, testLease("3", 2, "", released), false, false}}, 20 * s},
		"nor does a takeover of which it is not known whether it was": {
			[]step{{0, testLease("1", 1, "a"), false, false}, {15 * s, testLease("2", 2, "b"), true, false},
				{16 * s, testLease("3", 2, "", released), false, false}}, 30 * s},
		"the release of another term than the last one seen": {
			[]step{{0, testLease("1", 1, "a"), false, false}, {5 * s, testLease("3", 2, "", released), true, false}}, 20 * s},
		"absence says nothing of who may lead": {[]step{{0, nil, false, false}}, 15 * s},
		"a deletion leaves what the holder may have renewed unseen": {
			[]step{{0, testLease("1", 1, "a"), false, false}, {5 * s, nil, false, false}}, 20 * s},
		"absence is counted from the first time": {[]step{{0, nil, false, false}, {5 * s, nil, false, false}}, 15 * s},
		"a lease that was replaced": {
			[]step{{0, testLease("1", 1, "a"), false, false}, {5 * s, testLease("2", 0, "", released, recreated), false, false}}, 20 * s},
		"a lease that was created after it was seen absent": {
			[]step{{0, nil, false, false}, {5 * s, testLease("2", 0, "b"), false, false}, {6 * s, testLease("3", 0, "", released), false, false}}, 15 * s},
		"versions that cannot be ordered count as newer": {
			[]step{{0, testLease("b", 1, "a"), false, false}, {5 * s, testLease("a", 1, "a"), false, false}}, 20 * s},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			p := newProtocol("me", testTiming)
			for _, step := range test.steps {
				if step.back {
					p.readFrom = p.lease
					p.onRead(step.lease, step.at)
				} else {
					p.learn(step.lease, step.at, !step.gap)
				}
			}
			if got := p.freeAt(); got != test.want {
				t.Errorf("free at %s, want %s", got, test.want)
			}
		})
	}
}

func TestDecide(t *testing.T) {
	const s = time.Second
	// Without jitter in the cases: a read and the watch are done.
	standby := func(change ...func(*protocol)) *protocol {
		p := newProtocol("me", testTiming)
		p.learn(testLease("1", 1, "a"), 0, true)
		p.readAt, p.watching, p.watchUp = never, true, true
		for _, c := range change {
			c(p)
		}
		return p
	}
	leader := func(change ...func(*protocol)) *protocol {
		p := standby()
		p.onAcquired(testLease("2", 2, "me"), 100*s, 100*s)
		for _, c := range change {
			c(p)
		}
		return p
	}
	attempted := func(p *protocol) {
		p.attempt = &attempt{term: Term{"uid", 2}, acquired: testLease("2", 2, "me").Spec.AcquireTime}
		p.learn(testLease("2", 2, "me"), 15*s, true)
	}
	end := func(r Reason) action { return action{kind: actEnd, reason: r} }
	wait := func(until time.Duration) action { return action{kind: actWait, until: until} }
	tests := map[string]struct {
		p    *protocol
		now  time.Duration
		want action
	}{
		"a replica that knows nothing reads":         {newProtocol("me", testTiming), 0, action{kind: actRead}},
		"it waits for the answer":                    {standby(func(p *protocol) { p.known, p.reading = false, true }), 0, wait(never)},
		"then it watches":                            {standby(func(p *protocol) { p.watching = false }), 0, action{kind: actWatch}},
		"but not while its reads fail":               {standby(func(p *protocol) { p.watching, p.readFails.n = false, 1 }), 5 * s, wait(15 * s)},
		"when the watch is up it reads once more":    {standby(func(p *protocol) { p.onWatchUp(5 * s) }), 5 * s, action{kind: actRead}},
		"a standby waits for the expiry":             {standby(), 5 * s, wait(15 * s)},
		"or for the next read":                       {standby(func(p *protocol) { p.readAt = 7 * s }), 5 * s, wait(7 * s)},
		"it takes an expired lease":                  {standby(), 15 * s, action{kind: actAcquire}},
		"and a released one at once":                 {standby(func(p *protocol) { p.learn(testLease("2", 1, "", released), 1, true) }), 1, action{kind: actAcquire}},
		"but not while an earlier holder may lead":   {standby(func(p *protocol) { p.distrust = 20 * s }), 16 * s, wait(20 * s)},
		"nor while another write is under way":       {standby(func(p *protocol) { p.writing = true }), 15 * s, wait(never)},
		"nor right after one that failed":            {standby(func(p *protocol) { p.writeAt = 16 * s }), 15 * s, wait(16 * s)},
		"nor before a conflict is explained":         {standby(func(p *protocol) { p.known, p.reading = false, true }), 15 * s, wait(never)},
		"it creates a lease that is absent":          {standby(func(p *protocol) { p.learn(nil, 0, true) }), 0, action{kind: actCreate}},
		"its own lost acquisition is resumed":        {standby(attempted), 15 * s, action{kind: actResume}},
		"but not while an earlier holder may act":    {standby(attempted, func(p *protocol) { p.distrust = 19 * s }), 15 * s, wait(19 * s)},
		"its own name alone gives it nothing":        {standby(func(p *protocol) { p.identity = "a" }), 0, wait(15 * s)},
		"a standby that is to stop stops":            {standby(func(p *protocol) { p.onStop(never) }), 15 * s, end(ReasonNeverLed)},
		"but not before it knows what its write did": {standby(func(p *protocol) { p.onStop(never); p.writing = true }), 15 * s, wait(never)},
		"a leader renews":                            {leader(), 102 * s, action{kind: actRenew}},
		"not earlier":                                {leader(), 101 * s, wait(102 * s)},
		"nor while it does":                          {leader(func(p *protocol) { p.writing = true }), 102 * s, wait(110 * s)},
		"a leader watches its own lease":             {leader(func(p *protocol) { p.watching = false }), 101 * s, action{kind: actWatch}},
		"a conflict is explained by a read":          {leader(func(p *protocol) { p.known, p.readAt = false, 102*s }), 102 * s, action{kind: actRead}},
		"and nothing is written meanwhile":           {leader(func(p *protocol) { p.known, p.reading = false, true }), 105 * s, wait(110 * s)},
		"a leader ends at the renew deadline":        {leader(), 110 * s, end(ReasonRenewDeadline)},
		"also while a renewal is under way":          {leader(func(p *protocol) { p.writing = true }), 110 * s, end(ReasonRenewDeadline)},
		"a leader ends when its lease is lost":       {leader(func(p *protocol) { p.learn(nil, 101*s, true) }), 101 * s, end(ReasonLeaseDeleted)},
		"a leader that drains renews":                {leader(func(p *protocol) { p.onStop(130 * s) }), 102 * s, action{kind: actRenew}},
		"a drain has an end":                         {leader(func(p *protocol) { p.onStop(103 * s) }), 103 * s, end(ReasonDrainTimeout)},
		"work that was left behind ends it":          {leader(func(p *protocol) { p.onLeadReturned(130*s, 101*s, true) }), 101 * s, end(ReasonDrainTimeout)},
		"the lease is released when lead is quiet":   {leader(func(p *protocol) { p.onQuiet(101 * s) }), 101 * s, action{kind: actRelease}},
		"not before":                                    {leader(func(p *protocol) { p.onQuiet(161 * s) }), 101 * s, wait(102 * s)},
		"it is renewed until then":                      {leader(func(p *protocol) { p.onQuiet(161 * s) }), 102 * s, action{kind: actRenew}},
		"but not for longer than the drain":             {leader(func(p *protocol) { p.onStop(105 * s); p.onQuiet(161 * s) }), 105 * s, end(ReasonDrainTimeout)},
		"nor while a renewal is under way":              {leader(func(p *protocol) { p.onQuiet(0); p.writing = true }), 101 * s, wait(110 * s)},
		"nor before a conflict is explained, as before": {leader(func(p *protocol) { p.onQuiet(0); p.known, p.reading = false, true }), 101 * s, wait(110 * s)},
		"a release has an end":                          {leader(func(p *protocol) { p.onQuiet(0) }), 110 * s, end(ReasonReleaseFailed)},
		"a releasing replica does not watch":            {leader(func(p *protocol) { p.onQuiet(0); p.watching, p.writing = false, true }), 101 * s, wait(110 * s)},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(test.want, test.p.decide(test.now), cmp.AllowUnexported(action{}, takeover{})); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestJudgeTerm(t *testing.T) {
	tests := map[string]struct {
		lease *coordinationv1.Lease
		read  bool // the answer to a read that was sent when the newest version was known
		want  Reason
	}{
		"a renewal of its own":             {testLease("8", 2, "me"), false, ""},
		"an echo of the holder before":     {testLease("6", 1, "a"), false, ""},
		"another holder":                   {testLease("8", 3, "b"), false, ReasonHolderChanged},
		"another holder in the same term":  {testLease("8", 2, "b"), false, ReasonHolderChanged},
		"itself in another term":           {testLease("8", 3, "me"), false, ReasonHolderChanged},
		"a release that it has not sent":   {testLease("8", 2, "", released), false, ReasonHolderChanged},
		"another lease":                    {testLease("8", 2, "me", recreated), false, ReasonLeaseReplaced},
		"none":                             {nil, false, ReasonLeaseDeleted},
		"an echo of the lease before that": {testLease("5", 2, "me", recreated), false, ""},
		"an earlier version of its own term, read from a restored store": {testLease("6", 2, "me"), true, ""},
		"an earlier holder, read from a restored store":                  {testLease("6", 1, "a"), true, ReasonHolderChanged},
		"an earlier release, read from a restored store":                 {testLease("6", 1, "", released), true, ReasonHolderChanged},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			p := newProtocol("me", testTiming)
			p.learn(testLease("6", 1, "a"), 0, true)
			p.onAcquired(testLease("7", 2, "me"), 100*time.Second, 100*time.Second)
			if test.read {
				p.onReading()
				p.onRead(test.lease, 101*time.Second)
				if test.want == "" && p.lease != test.lease {
					t.Error("its next renewal does not require the version that is true")
				}
			} else {
				p.learn(test.lease, 101*time.Second, true)
			}
			if p.lost != test.want {
				t.Errorf("got %q, want %q", p.lost, test.want)
			}
			if p.sent != 100*time.Second {
				t.Error("what was seen has extended the term")
			}
		})
	}
}

func TestAnswers(t *testing.T) {
	const s = time.Second
	// acquiring has sent an acquisition from version 1.
	acquiring := func() (*protocol, *coordinationv1.Lease) {
		p := newProtocol("me", testTiming)
		p.learn(testLease("1", 1, "a"), 0, true)
		lease := p.proposal(action{kind: actAcquire}, time.Unix(1000, 0))
		p.onSent(action{kind: actAcquire}, lease)
		return p, lease
	}
	// stored returns what was written as a version.
	stored := func(lease *coordinationv1.Lease, version string) *coordinationv1.Lease {
		lease = lease.DeepCopy()
		lease.ResourceVersion = version
		return lease
	}
	noAnswer, conflict := failure{kind: failUnanswered}, failure{kind: failConflict}
	t.Run("an answer in time begins a term from before it was asked for", func(t *testing.T) {
		p, wrote := acquiring()
		if !p.onAcquired(stored(wrote, "2"), 20*s, 29*s) || p.sent != 20*s || p.term != (Term{"uid", 2}) {
			t.Errorf("sent %s, term %s", p.sent, p.term)
		}
	})
	t.Run("an answer that comes too late begins none", func(t *testing.T) {
		p, wrote := acquiring()
		if p.onAcquired(stored(wrote, "2"), 20*s, 30*s) || p.holding {
			t.Fatal("it leads")
		}
		p.watching, p.readAt = true, never
		if got := p.decide(30 * s).kind; got != actResume {
			t.Errorf("then %s, want %s", got, actResume)
		}
	})
	t.Run("the watch may be ahead of the answer", func(t *testing.T) {
		for name, ahead := range map[string]*coordinationv1.Lease{"with a thief": testLease("3", 3, "thief"), "with a deletion": nil} {
			p, wrote := acquiring()
			p.learn(ahead, 21*s, true)
			p.onAcquired(stored(wrote, "2"), 20*s, 22*s)
			if got := p.decide(22 * s); got.kind != actEnd {
				t.Errorf("%s: got %+v", name, got)
			}
		}
	})
	t.Run("the first of two acquisitions without an answer is recognised too", func(t *testing.T) {
		p, first := acquiring()
		p.onWriteFailed(p.lease, noAnswer, 24*s)
		second := p.proposal(action{kind: actAcquire}, time.Unix(1005, 0))
		p.onSent(action{kind: actAcquire}, second)
		p.onWriteFailed(p.lease, noAnswer, 29*s)
		p.learn(stored(first, "2"), 29*s, true)
		p.reading, p.watching = true, true
		if got := p.decide(40 * s).kind; got != actResume {
			t.Errorf("got %s, want %s", got, actResume)
		}
		if second.Spec.RenewTime.Equal(first.Spec.RenewTime) {
			t.Error("the second has the renewTime of the first")
		}
	})
	t.Run("an acquisition without an answer is forgotten when another version is seen", func(t *testing.T) {
		p, wrote := acquiring()
		p.onWriteFailed(p.lease, noAnswer, 21*s)
		if p.attempt == nil {
			t.Fatal("forgotten at once")
		}
		p.learn(testLease("2", 2, "b"), 21*s, true)
		p.learn(stored(wrote, "3"), 22*s, true) // put back by hand
		if p.attempt != nil || p.isOwnAttempt(p.lease) {
			t.Error("it is taken for its own")
		}
	})
	t.Run("an edit that names this replica is not its acquisition", func(t *testing.T) {
		for name, gapless := range map[string]bool{"seen as it happened": true, "seen late": false} {
			p, _ := acquiring()
			p.onWriteFailed(p.lease, noAnswer, 21*s)
			// Another replica has acquired it in the meantime, in the same term.
			p.learn(testLease("3", 2, "me", func(l *coordinationv1.Lease) { hold(l, "me", 15*s, time.Unix(1002, 0)) }), 22*s, gapless)
			p.reading, p.watching = true, true
			if got := p.decide(22 * s); got.kind != actWait || p.attempt != nil {
				t.Errorf("%s: got %+v", name, got)
			}
		}
	})
	t.Run("a conflict that the watch has explained needs no read", func(t *testing.T) {
		p, _ := acquiring()
		base := p.lease
		p.learn(testLease("2", 2, "b"), 21*s, true)
		p.onWriteFailed(base, conflict, 22*s)
		if !p.known {
			t.Error("it reads")
		}
	})
	t.Run("a conflict is explained by a read, once", func(t *testing.T) {
		p, _ := acquiring()
		p.watching = true
		p.onWriteFailed(p.lease, conflict, 22*s)
		if got := p.decide(p.readAt).kind; got != actRead || p.readAt > 22*s+testTiming.retry/8 {
			t.Fatalf("got %s at %s", got, p.readAt)
		}
		p.onReading()
		p.onRead(testLease("2", 2, "b"), 23*s)
		if got := p.decide(23 * s); got.kind != actWait || got.until < 24*s {
			t.Errorf("then %+v", got)
		}
	})
	t.Run("a conflict that a read does not explain is not tried again at once", func(t *testing.T) {
		p, _ := acquiring()
		p.watching = true
		now := 22 * s
		for range 10 {
			p.onWriteFailed(p.lease, conflict, now)
			now = p.readAt
			p.onReading()
			p.onRead(p.lease, now)
			p.onSent(action{kind: actAcquire}, p.proposal(action{kind: actAcquire}, time.Unix(1000, 0)))
		}
		if now < 2*time.Minute {
			t.Errorf("10 attempts in %s", now-22*s)
		}
	})
	t.Run("a late answer to a read does not undo what the watch has shown since", func(t *testing.T) {
		for name, late := range map[string]*coordinationv1.Lease{"an earlier version": testLease("1", 1, "a"), "none": nil} {
			p := newProtocol("me", testTiming)
			p.learn(testLease("1", 1, "a"), 0, true)
			p.onReading()
			p.learn(testLease("2", 2, "b"), s, true)
			p.onRead(late, 2*s)
			if p.lease == late || p.distrust > 16*s {
				t.Errorf("%s: the lease is %v, distrust until %s", name, p.lease, p.distrust)
			}
		}
	})
	t.Run("a renewal that was answered after the deadline does not extend the term", func(t *testing.T) {
		p, wrote := acquiring()
		p.onAcquired(stored(wrote, "2"), 20*s, 21*s)
		p.onRenewed(stored(wrote, "3"), 29*s, 30*s)
		if got := p.decide(30 * s); got.reason != ReasonRenewDeadline {
			t.Errorf("got %+v", got)
		}
	})
	t.Run("the echo of a release counts as its answer", func(t *testing.T) {
		p, wrote := acquiring()
		p.onStop(never)
		p.onAcquired(stored(wrote, "2"), 20*s, 21*s)
		p.learn(testLease("3", 2, "", released), 22*s, true)
		if got := p.decide(22 * s); got.reason != ReasonReleased {
			t.Errorf("got %+v", got)
		}
	})
}

func TestBackoff(t *testing.T) {
	const s = time.Second
	after := func(p *protocol, n int, first time.Duration, f failure) time.Duration {
		var c failures
		for range n {
			c.count(f)
		}
		return p.backoff(c, first, p.patience(f), f)
	}
	leads := func(p *protocol) { p.holding = true }
	tests := map[string]struct {
		prepare  func(*protocol)
		n        int
		f        failure
		min, max time.Duration
	}{
		"the first refusal":               {nil, 1, failure{kind: failRefused}, s, 3 * s},
		"the second":                      {nil, 2, failure{kind: failRefused}, 4 * s, 12 * s},
		"the hundredth":                   {nil, 100, failure{kind: failRefused}, 20 * s, 60 * s},
		"a wish of the API server":        {nil, 1, failure{kind: failRefused, after: 20 * s}, 20 * s, 20 * s},
		"no answer, for the tenth time":   {nil, 10, failure{kind: failUnanswered}, s, 3 * s},
		"a leader's tenth refusal":        {leads, 10, failure{kind: failRefused}, s, 3 * s},
		"a wish that would cost the term": {leads, 1, failure{kind: failRefused, after: 20 * s}, 2 * s, 3 * s},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			p := newProtocol("me", testTiming)
			if test.prepare != nil {
				test.prepare(p)
			}
			for range 100 {
				if d := after(p, test.n, p.own.retry, test.f); d < test.min || d > test.max {
					t.Fatalf("got %s, want %s to %s", d, test.min, test.max)
				}
			}
		})
	}
}
