// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package election

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"
)

// LeaderNamespace names the leader in the annotation of a Namespace, by which the fence in the API
// server judges who may write.
//
// A replica names itself only in this order: it reads the Namespace, then it takes the Lease or reads
// that it still holds it, then it patches the Namespace on the condition that this is the version that
// it has read. So the names follow each other in the order of the terms, whatever any clock does and
// however late a patch arrives: see docs/adr/0006-fence-namespace.md.
type LeaderNamespace struct {
	lock   *Lock
	name   string
	pod    string // of this replica
	client NamespaceClient

	leads  atomic.Bool   // between the begin and the end of lead
	again  chan struct{} // wakes keep
	gate   chan struct{} // held by the one who asks; a channel, since a Mutex knows no context
	asked  atomic.Int64  // rounds of asking that have begun, written with the gate held
	jitter *rand.Rand    // guarded by gate
	raised int64         // the last round in which the API server admitted this replica; guarded by gate

	ahead *corev1.Namespace // read before the Lease was taken, until it is used; may be nil
}

const (
	// A leader asks at such intervals, a standby at those of rereadPeriod, instead of reading the Lease.
	serverFencePeriod = 50 * time.Second // to serverFencePeriod + serverFenceJitter
	serverFenceJitter = 10 * time.Second

	// serverFenceAhead is for how long the read before the Lease is taken may hold that up. Without it,
	// to name the leader takes two requests more.
	serverFenceAhead = 250 * time.Millisecond

	// serverFenceAskAgain is after which time a standby asks again if it has found no fence; then twice as
	// long each time. No evidence counts before it has, and an API server goes by a new policy only
	// after a second or two.
	serverFenceAskAgain = time.Second

	// serverFencePatience is how long an API server may refuse the leader before something must be
	// wrong: its watch shows the name after milliseconds.
	serverFencePatience = 2 * time.Second

	// serverFenceLag is how late an API server may learn of the name before a leader that was silent,
	// but may be alive, can have a write admitted between those of its successor.
	serverFenceLag = 2 * time.Second

	serverFencePatchTimeout = 40 * time.Second // longer than the longest that a webhook may take

	serverFenceBackoffMin = 2 * time.Millisecond
	serverFenceBackoffMax = 10 * time.Second
)

// NewLeaderNamespace returns the Namespace of the lock's Lease, which has only one. It must be called
// before Run of the lock.
func NewLeaderNamespace(lock *Lock, client NamespaceClient) *LeaderNamespace {
	pod := lock.who.Identity
	if i := strings.LastIndex(pod, "_"); i >= 0 {
		pod = pod[:i]
	}
	n := &LeaderNamespace{lock: lock, name: LeaderNamespaceName(lock.lease), pod: pod, client: client,
		again: make(chan struct{}, 1), gate: make(chan struct{}, 1), jitter: newJitter(lock.who.Identity + "/raise")}
	lock.prepare = n.readAhead
	return n
}

// SupersededError ends the term of a replica that was to name itself in the Namespace and has found
// that it does not hold the Lease any more.
type SupersededError struct {
	Holder string // empty: the Lease was deleted or released
}

// Error implements error.
func (e *SupersededError) Error() string {
	return fmt.Sprintf("the lease is not held by this replica any more, but by %q", e.Holder)
}

// Run asks at once and then every 70 to 80 s whether the API server has a fence, until ctx ends; at
// first more often while it finds none. While lead runs, Lead does this.
func (n *LeaderNamespace) Run(ctx context.Context) {
	jitter := newJitter(n.lock.who.Identity + "/ask")
	backoff := serverFenceAskAgain
	for {
		pause := rereadPeriod + randomUpTo(jitter, rereadJitter)
		if !n.leads.Load() {
			judged, err := n.ask(ctx)
			if judged == verdictNone || judged == verdictAbsent {
				pause, backoff = min(pause, backoff), min(2*backoff, rereadPeriod)
			} else {
				backoff = serverFenceAskAgain
			}
			if err != nil && ctx.Err() == nil {
				klog.FromContext(ctx).V(2).Info("Failed to find out whether the API server has a fence", "lease", n.lock.lease, "err", err)
			}
			if !n.leads.Load() {
				n.set(ctx, judged)
			}
		}
		if !pauseFor(ctx, pause) {
			return
		}
	}
}

// Lead returns a lead that does not begin before the API server admits the writes of this replica,
// or has no fence. It ends with a *SupersededError if somebody else turns out to hold the Lease.
func (n *LeaderNamespace) Lead(lead func(context.Context) error) func(context.Context) error {
	return func(ctx context.Context) error {
		n.leads.Store(true)
		defer n.leads.Store(false)
		ctx, end := context.WithCancelCause(ctx)
		defer end(nil)
		err := n.raise(ctx, 0)
		switch {
		case ctx.Err() != nil:
			return nil // the term ended before lead began
		case err != nil:
			return err
		case !n.awaitPredecessor(ctx), !n.lock.fence.admits():
			return nil // the same, and Run does not know yet
		}
		kept := make(chan struct{})
		go func() {
			defer close(kept)
			n.keep(ctx, end)
		}()
		err = lead(ctx)
		end(nil)
		<-kept
		var superseded *SupersededError
		if errors.As(context.Cause(ctx), &superseded) {
			return errors.Join(superseded, err)
		}
		return err
	}
}

// awaitPredecessor waits until the holder before cannot write any more, if this replica took the Lease
// before that one's claim had ended (rule 12). It reports whether ctx lasted.
func (n *LeaderNamespace) awaitPredecessor(ctx context.Context) bool {
	early := n.lock.early
	switch {
	case early.evidence == "":
	case n.lock.shown.serverFence() != ServerFenceEnforced: // it was when this replica asked last
		for left := early.claim - n.lock.who.Clock.Now(); left > 0 && ctx.Err() == nil; left = early.claim - n.lock.who.Clock.Now() {
			pauseFor(ctx, min(left, n.lock.cfg.RetryPeriod.Duration))
		}
	case early.evidence == LeaderSilent:
		return pauseFor(ctx, serverFenceLag)
	}
	return ctx.Err() == nil
}

// keep asks every minute, and whenever the API server has refused a write, whether this replica is
// still admitted, and names it again where its name has gone. It ends ctx if another leads.
func (n *LeaderNamespace) keep(ctx context.Context, end context.CancelCauseFunc) {
	jitter := newJitter(n.lock.who.Identity + "/keep")
	for {
		timer := time.NewTimer(serverFencePeriod + randomUpTo(jitter, serverFenceJitter))
		select {
		case <-timer.C:
		case <-n.again:
		case <-ctx.Done():
		}
		timer.Stop()
		if ctx.Err() != nil {
			return
		}
		if err := n.raise(ctx, 0); err != nil && ctx.Err() == nil {
			end(err)
			return
		}
	}
}

// raise returns nil when the API server admits the writes of this replica or has no fence, and tries
// for as long as ctx lasts. A round of asking that is younger than the given one counts.
func (n *LeaderNamespace) raise(ctx context.Context, after int64) error {
	select {
	case n.gate <- struct{}{}:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	defer func() { <-n.gate }()
	if after > 0 && n.raised > after {
		return nil
	}
	round := n.asked.Add(1)
	began := n.lock.who.Clock.Now()
	logged := false
	// A webhook that is away holds the patch up, for 10 s by default, and to cut it off each time would
	// fail it for good. But an answer may have been lost.
	patience := n.lock.cfg.LeaseDuration.Duration
	for backoff := serverFenceBackoffMin; ; backoff = min(2*backoff, serverFenceBackoffMax) {
		judged, err := n.stand(ctx, min(patience, serverFencePatchTimeout))
		if errors.Is(err, context.DeadlineExceeded) {
			patience *= 2
		}
		var superseded *SupersededError
		late := n.lock.who.Clock.Now()-began > serverFencePatience
		switch {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case errors.As(err, &superseded):
			return superseded
		case judged == verdictAbsent, judged == verdictAdmits:
			n.set(ctx, judged)
			n.raised = round
			return nil
		case judged == verdictMisjudges, judged == verdictRefuses && late:
			n.lock.SetServerFence(ctx, ServerFenceMisconfigured)
		}
		if err != nil && late && !logged {
			logged = true
			klog.FromContext(ctx).Error(err, "Failed to name this replica as the leader, the fence in the API server may refuse its writes",
				"lease", n.lock.lease, "namespace", n.name)
		}
		asked := min(failureOf(err).after, serverFenceBackoffMax) // by the API server
		if !pauseFor(ctx, max(backoff/2+randomUpTo(n.jitter, backoff), asked)) {
			return context.Cause(ctx)
		}
	}
}

// set sets the state after an answer that does not show a mistake.
func (n *LeaderNamespace) set(ctx context.Context, judged verdict) {
	switch {
	case judged == verdictAbsent:
		n.lock.SetServerFence(ctx, ServerFenceAbsent)
	case judged == verdictMisjudges, judged == verdictRefuses && n.lock.fence.isOff():
		n.lock.SetServerFence(ctx, ServerFenceMisconfigured)
	case judged != verdictNone: // a standby may be refused or, if it led before in the same Pod, admitted
		n.lock.SetServerFence(ctx, ServerFenceEnforced)
	}
}

// stand names this replica if it is not named, and asks how the API server judges it.
func (n *LeaderNamespace) stand(ctx context.Context, patience time.Duration) (verdict, error) {
	err := n.nameSelf(ctx, patience)
	switch {
	case apierrors.IsNotFound(err):
		return verdictAbsent, nil
	case apierrors.IsConflict(err):
		return verdictNone, err
	}
	var superseded *SupersededError
	if errors.As(err, &superseded) {
		return verdictNone, err
	}
	// Even if it could not be named, the API server may have no fence.
	judged, asked := n.ask(ctx)
	return judged, errors.Join(err, asked)
}

// nameSelf names this replica in the Namespace unless it is named already. The error is NotFound if
// there is no Namespace, and a *SupersededError if this replica does not hold the Lease. A patch that
// was cut off after patience does no harm if it is executed late, since it is conditional.
func (n *LeaderNamespace) nameSelf(ctx context.Context, patience time.Duration) error {
	ns, err := n.readNames(ctx)
	if err != nil || n.isNamed(ns) {
		return err
	}
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{
		"uid": ns.UID, "resourceVersion": ns.ResourceVersion,
		"annotations": map[string]string{LeaderAnnotation: n.lock.who.Identity},
	}})
	if err != nil {
		return err
	}
	ctx, cancelPatch := context.WithTimeout(ctx, patience)
	defer cancelPatch()
	_, err = n.client.Patch(ctx, n.name, types.MergePatchType, patch, metav1.PatchOptions{})
	if err == nil {
		klog.FromContext(ctx).V(2).Info("Named this replica as the leader", "namespace", n.name, "identity", n.lock.who.Identity)
	}
	return err
}

// readNames returns a version of the Namespace. Unless this replica is named there, it held the Lease at
// some time after this was the newest version.
func (n *LeaderNamespace) readNames(ctx context.Context) (*corev1.Namespace, error) {
	if ahead := n.ahead; ahead != nil {
		n.ahead = nil
		return ahead, nil
	}
	ctx, cancel := context.WithTimeout(ctx, n.lock.cfg.timing().requestTimeout())
	defer cancel()
	ns, err := n.client.Get(ctx, n.name, metav1.GetOptions{})
	if err != nil || n.isNamed(ns) {
		return ns, err
	}
	return ns, n.lock.confirmHolder(ctx)
}

func (n *LeaderNamespace) isNamed(ns *corev1.Namespace) bool {
	return ns.Annotations[LeaderAnnotation] == n.lock.who.Identity
}

// readAhead reads the Namespace right before this replica tries to take the Lease, so that it can name
// itself at once when it has. However old the version is when it does, the patch is as safe; it only
// conflicts more easily.
func (n *LeaderNamespace) readAhead(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, serverFenceAhead)
	defer cancel()
	n.ahead = nil
	if ns, err := n.client.Get(ctx, n.name, metav1.GetOptions{}); err == nil {
		n.ahead = ns
	}
}

// confirmHolder reads the Lease and returns nil if this replica holds it.
func (l *Lock) confirmHolder(ctx context.Context) error {
	lease, err := l.who.Client.Get(ctx, l.lease.Name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return &SupersededError{}
	}
	if err != nil {
		return fmt.Errorf("read lease %s: %w", l.lease, err)
	}
	if holder := ptr.Deref(lease.Spec.HolderIdentity, ""); holder != l.who.Identity {
		return &SupersededError{Holder: holder}
	}
	return nil
}

// isOff reports whether every write passes because leader election is off.
func (f *fence) isOff() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.state == fenceOff
}

func randomUpTo(jitter *rand.Rand, d time.Duration) time.Duration {
	return time.Duration(jitter.Int64N(int64(d)))
}

// pauseFor waits for d and reports whether it passed before ctx ended.
func pauseFor(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}
