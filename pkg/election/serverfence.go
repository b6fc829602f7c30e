// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package election

import (
	"context"
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
)

// The fence in the API server is a ValidatingAdmissionPolicy with the Lease as its parameter. To
// find out whether it is in force, a replica sends a write that changes nothing in any case: a
// dry-run update of a ConfigMap that is installed with the policy for this purpose. The policy
// always refuses it, and the refusal says what the policy would do with a write of this replica.
// This shows more than reading the policy would: that it is bound and enforced, recognises the
// replica's token, and uses the right Lease. And it needs no permission except to update that one
// ConfigMap.
const (
	// ServerFenceName is the name of the policy, of its binding, and of the ConfigMap in the
	// Lease's namespace.
	ServerFenceName = "quartermaster-fence"

	serverFenceAdmits  = "probe: admits"
	serverFenceRefuses = "probe: refuses"
	serverFenceCannot  = "probe: cannot judge"
)

// ServerFence says whether the API server refuses writes of replicas that do not hold the Lease.
type ServerFence string

// The possible states of the fence in the API server.
const (
	ServerFenceUnknown       ServerFence = "Unknown"       // no response yet, or not probed
	ServerFenceEnforced      ServerFence = "Enforced"      // it judges this replica correctly
	ServerFenceAbsent        ServerFence = "Absent"        // there is none
	ServerFenceCannotJudge   ServerFence = "CannotJudge"   // controllers use other ServiceAccounts
	ServerFenceMisconfigured ServerFence = "Misconfigured" // it refuses the leader, or admits another
)

var serverFences = []ServerFence{ServerFenceUnknown, ServerFenceEnforced, ServerFenceAbsent,
	ServerFenceCannotJudge, ServerFenceMisconfigured}

// ConfigMapUpdater is the part of a client for ConfigMaps that the probe needs. The client must
// have the credentials of the controllers' clients, because those are judged, but not the client's
// fence.
type ConfigMapUpdater interface {
	Update(ctx context.Context, configMap *corev1.ConfigMap, opts metav1.UpdateOptions) (*corev1.ConfigMap, error)
}

// ProbeServerFence makes Run find out, when it starts and when it leads, whether the API server has
// a fence. It must be called before Run.
func (l *Lock) ProbeServerFence(client ConfigMapUpdater) {
	l.probe = client
}

// SetServerFence sets what is known without a probe. If each controller has its own ServiceAccount,
// no token is bound to a Pod and the policy does not apply to it: ServerFenceCannotJudge.
func (l *Lock) SetServerFence(ctx context.Context, found ServerFence) {
	l.shown.mu.Lock()
	before := l.shown.status.ServerFence
	l.shown.status.ServerFence = found
	l.shown.mu.Unlock()
	for _, state := range serverFences {
		l.shown.metrics.set(l.shown.metrics.serverFence, state == found, string(state))
	}
	if found == before {
		return
	}
	logger := klog.FromContext(ctx).WithValues("lease", l.lease, "serverFence", found)
	switch found {
	case ServerFenceEnforced:
		logger.Info("The API server refuses writes of replicas that do not hold the lease")
	case ServerFenceAbsent:
		logger.Info("The API server has no fence: a write that a replica sent before it was paused or cut off may be " +
			"executed after another leads; install deploy/components/fence, which " +
			"needs tokens that are bound to Pods")
	case ServerFenceCannotJudge:
		logger.Info("The API server cannot tell replicas apart, since their tokens are not bound to their Pods: " +
			"a write that a replica sent before it was paused or cut off may be executed after another leads")
	case ServerFenceMisconfigured:
		if !l.cfg.LeaderElect {
			logger.Error(nil, "The fence in the API server refuses every write of this replica, since --leader-elect=false: "+
				"remove deploy/components/fence, or elect a leader")
			return
		}
		logger.Error(nil, "The fence in the API server would refuse the writes of this replica although it holds the lease, "+
			"or admit them although it does not; check the lease that the policy's binding names, that the token is bound to the Pod, and the Pod's name in the identity",
			"identity", l.who.Identity)
	}
}

// startProbe starts to probe for the fence in the API server. The returned function ends it.
func (l *Lock) startProbe(ctx context.Context) (stop func()) {
	if l.probe == nil {
		return func() {}
	}
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		l.probeServerFence(ctx, l.cfg.timing().requestTimeout())
	}()
	return func() { cancel(); <-done }
}

// probeServerFence probes until there is a reliable result. A wrong verdict may be due to an old
// version of the Lease, so it is not accepted at once; and an absent policy may be applied together
// with this replica.
func (l *Lock) probeServerFence(ctx context.Context, timeout time.Duration) {
	const attempts, pause = 8, 250 * time.Millisecond
	for attempt := range attempts {
		request, cancel := context.WithTimeout(ctx, timeout)
		found, err := l.askServerFence(request)
		cancel()
		if ctx.Err() != nil {
			return
		}
		last := attempt == attempts-1
		believed := err == nil && (found != ServerFenceMisconfigured || attempt >= attempts/2)
		if err != nil && last {
			klog.FromContext(ctx).Error(err, "Failed to find out whether the API server has a fence", "lease", l.lease)
		}
		if believed || last {
			l.SetServerFence(ctx, found)
		}
		if believed && found != ServerFenceAbsent || last || !pauseFor(ctx, pause<<attempt) {
			return
		}
	}
}

func (l *Lock) askServerFence(ctx context.Context) (ServerFence, error) {
	probe := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: l.lease.Namespace, Name: ServerFenceName}}
	leads, follows := l.fence.admits(), l.follows()
	_, err := l.probe.Update(ctx, probe, metav1.UpdateOptions{DryRun: []string{metav1.DryRunAll}})
	leads, follows = leads && l.fence.admits(), follows && l.follows()
	switch {
	case err == nil, apierrors.IsNotFound(err):
		return ServerFenceAbsent, nil
	case !isVerdict(err):
		if apierrors.IsForbidden(err) { // by RBAC: the permission is installed with the policy
			return ServerFenceAbsent, nil
		}
		return ServerFenceUnknown, fmt.Errorf("dry-run update of ConfigMap %s: %w", ServerFenceName, err)
	case strings.Contains(err.Error(), serverFenceCannot), // and so it refuses every write
		leads && strings.Contains(err.Error(), serverFenceRefuses),
		follows && strings.Contains(err.Error(), serverFenceAdmits):
		return ServerFenceMisconfigured, nil
	}
	return ServerFenceEnforced, nil
}

// follows reports whether another replica is known to hold the Lease.
func (l *Lock) follows() bool {
	s := l.shown.snapshot()
	return s.Holder != "" && s.Holder != s.Identity
}

// isVerdict reports whether the error is the policy's response to the probe.
func isVerdict(err error) bool {
	text := err.Error()
	for _, verdict := range []string{serverFenceAdmits, serverFenceRefuses, serverFenceCannot} {
		if strings.Contains(text, ServerFenceName) && strings.Contains(text, verdict) {
			return true
		}
	}
	return false
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
