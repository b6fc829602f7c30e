// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package apifence

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"
)

// A replica names itself only in this order: it reads the Namespace, then it reads that it holds the
// Lease, then it patches the Namespace on the condition that its version has not changed. So the
// names follow each other in the order of the terms, whatever any clock does and however late a patch
// arrives: see docs/adr/0006-fence-namespace.md.

const (
	// lagTimeout is how long an API server may refuse the leader before something must be wrong: the API
	// server's watch shows the name after milliseconds.
	lagTimeout = 2 * time.Second

	backoffMin = 2 * time.Millisecond
	backoffMax = 2 * time.Second

	retryAfterMax = 10 * time.Second
)

// ErrSuperseded is the error of a replica that does not hold the Lease any more.
var ErrSuperseded = errors.New("this replica does not hold the Lease any more")

// errBarred is the error of a leader that the fence in the API server refuses for good.
var errBarred = errors.New("the fence in the API server does not admit this replica")

// NameLeader names this replica as the leader, and returns nil when the API server admits its writes or has
// no fence. It tries for as long as ctx lasts, unless it fails with ErrSuperseded.
func (f *Fence) NameLeader(ctx context.Context) error {
	return f.nameLeader(ctx, false)
}

// KeepNamed asks every minute, and whenever the API server has refused a write, whether this replica is
// still admitted, and names it again where its name has gone. It returns nil when ctx ends, and an error if
// the term must end: ErrSuperseded, or another error if the replica cannot be named.
func (f *Fence) KeepNamed(ctx context.Context) error {
	for {
		select {
		case <-time.After(f.between(50*time.Second, time.Minute)):
		case <-f.wake:
		case <-ctx.Done():
			return nil
		}
		if err := f.nameLeader(ctx, true); err != nil && ctx.Err() == nil {
			return err
		}
		// Writes that another API server refuses because it lags may come by the hundred.
		f.pauseFor(ctx, time.Second/2, time.Second)
	}
}

// nameLeader is NameLeader. For a leader it fails when the API server has not admitted it for
// AdmissionTimeout. Requests without an answer do not count.
func (f *Fence) nameLeader(ctx context.Context, leads bool) error {
	if !leads {
		f.OnTrouble(errors.New("the API server has not answered yet")) // a webhook may hold the answer up
	}
	barred := f.Clock.Now() // since when this replica is not admitted
	backoff := backoffMin
	if leads { // writes do not wait for this call, and each refused write causes another
		backoff = backoffMax / 4
	}
	for ; ; backoff = min(2*backoff, backoffMax) {
		reply, unnamed, err := f.nameAndAsk(ctx)
		if leads && reply == verdictAbsent && f.isRefused() {
			reply = verdictForeign
		}
		since := f.Clock.Now() - barred
		switch {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case errors.Is(err, ErrSuperseded):
			return err
		case reply == verdictAbsent, reply == verdictAdmits:
			f.reportState(ctx, reply)
			f.OnTrouble(nil)
			return nil
		case reply == verdictMisjudges, reply == verdictForeign, reply == verdictRefuses && since > lagTimeout:
			f.OnState(ctx, Misconfigured)
		}
		if err == nil {
			err = fmt.Errorf("the API server %s", reply)
		}
		switch {
		case leads && !unnamed && reply == verdictNone:
			barred = f.Clock.Now()
			f.OnTrouble(nil)
		case leads && since > f.AdmissionTimeout:
			return fmt.Errorf("%w for %s: %w", errBarred, since.Truncate(time.Second), err)
		default:
			f.OnTrouble(err)
		}
		if since > lagTimeout {
			klog.FromContext(ctx).Error(err, "Cannot name this replica as the leader", "lease", f.Lease, "namespace", f.name)
		}
		after := retryAfter(err)
		if !f.pauseFor(ctx, max(backoff/2, after), max(3*backoff/2, after+backoff)) {
			return context.Cause(ctx)
		}
	}
}

// retryAfter returns how long the API server asks to wait, within limits.
func retryAfter(err error) time.Duration {
	seconds, _ := apierrors.SuggestsClientDelay(err)
	return min(time.Duration(seconds)*time.Second, retryAfterMax)
}

// nameAndAsk names this replica if it is not named, and asks how the API server judges it. unnamed reports
// that it is certainly not named.
func (f *Fence) nameAndAsk(ctx context.Context) (reply verdict, unnamed bool, err error) {
	unnamed, err = f.nameSelf(ctx)
	switch {
	case apierrors.IsNotFound(err):
		return verdictAbsent, true, nil
	case apierrors.IsConflict(err), errors.Is(err, ErrSuperseded):
		return verdictNone, true, err
	}
	// Even if it could not be named, the API server may have no fence.
	reply, asked := f.askVerdict(ctx, f.Namespaces)
	return reply, unnamed, errors.Join(err, asked)
}

// nameSelf names this replica in the Namespace unless it is named already. The error is NotFound if
// there is no Namespace, and ErrSuperseded if this replica does not hold the Lease. unnamed reports that
// the Namespace does not name it. A patch that was cancelled does no harm if it is executed late, since it
// is conditional. A webhook that is away holds the patch up, for 10 s by default; a shorter timeout here
// would make every patch fail.
func (f *Fence) nameSelf(ctx context.Context) (unnamed bool, err error) {
	readCtx, cancel := context.WithTimeout(ctx, f.RequestTimeout)
	defer cancel()
	ns, err := f.Namespaces.Get(readCtx, f.name, metav1.GetOptions{})
	if err != nil || ns.Annotations[LeaderAnnotation] == f.value {
		return false, err
	}
	if err := f.confirmHolder(readCtx); err != nil {
		return true, err
	}
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{
		"uid": ns.UID, "resourceVersion": ns.ResourceVersion,
		"annotations": map[string]string{LeaderAnnotation: f.value},
	}})
	if err != nil {
		return true, err
	}
	ctx, cancelPatch := context.WithTimeout(ctx, f.AdmissionTimeout)
	defer cancelPatch()
	if _, err = f.Namespaces.Patch(ctx, f.name, types.MergePatchType, patch, metav1.PatchOptions{}); err != nil {
		return true, err
	}
	klog.FromContext(ctx).V(2).Info("Named this replica as the leader", "namespace", f.name, "identity", f.Identity)
	return false, nil
}

// confirmHolder reads the Lease and returns nil if this replica holds it.
func (f *Fence) confirmHolder(ctx context.Context) error {
	lease, err := f.Leases.Get(ctx, f.Lease.Name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return fmt.Errorf("%w: it was deleted", ErrSuperseded)
	}
	if err != nil {
		return fmt.Errorf("read Lease %s: %w", f.Lease, err)
	}
	if holder := ptr.Deref(lease.Spec.HolderIdentity, ""); holder != f.Identity {
		return fmt.Errorf("%w: the holder is %q", ErrSuperseded, holder)
	}
	return nil
}
