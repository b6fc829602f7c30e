// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package election

import (
	"context"
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
)

// The fence in the API server is a ValidatingAdmissionPolicy, deploy/components/fence. Its parameter
// is an empty Namespace with an annotation that names the one replica that may write. This file asks
// how the policy judges this replica, serverfence_lead.go names the leader, and
// serverfence_retry.go handles writes that the policy has refused.
const (
	// ServerFenceName is the name of the policy and of its binding.
	ServerFenceName = "quartermaster-fence"

	// LeaderAnnotation is the annotation of the Namespace. Its value is the leader's identity, see
	// NewIdentity. The policy compares the Pod in it with the one that the caller's token is bound
	// to.
	LeaderAnnotation = "quartermaster.dev/leader-pod"

	// With these words the policy refuses a write. It answers a dry run, the probe, in the same way,
	// and always.
	serverFenceRefusal   = ServerFenceName + ": written by "
	serverFencePod       = serverFenceRefusal + "Pod %s, "
	serverFenceAdmission = serverFencePod + "the leader is '%s'"
)

// LeaderNamespaceName returns the name of the Namespace that names the holder of the Lease. Only
// the default installation's does not end in the Lease's namespace.
func LeaderNamespaceName(lease types.NamespacedName) string {
	name := lease.Name + "-leader"
	if lease.Namespace != metav1.NamespaceSystem {
		name += "-" + lease.Namespace
	}
	return name
}

// ServerFence says whether the API server refuses writes of replicas that do not lead.
type ServerFence string

// The possible states of the fence in the API server.
const (
	ServerFenceUnknown       ServerFence = "Unknown"       // no response yet, or not asked
	ServerFenceEnforced      ServerFence = "Enforced"      // it judges this replica correctly
	ServerFenceAbsent        ServerFence = "Absent"        // there is none
	ServerFenceCannotJudge   ServerFence = "CannotJudge"   // controllers use other ServiceAccounts
	ServerFenceMisconfigured ServerFence = "Misconfigured" // it refuses the leader, or any replica
)

var serverFences = []ServerFence{ServerFenceUnknown, ServerFenceEnforced, ServerFenceAbsent,
	ServerFenceCannotJudge, ServerFenceMisconfigured}

// SetServerFence sets what is known of the fence in the API server. A LeaderNamespace calls it. Call
// it instead of using one if each controller has its own ServiceAccount: no token is bound to a Pod
// then and the policy does not apply to it, ServerFenceCannotJudge.
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
	select {
	case l.fenceChanged <- struct{}{}:
	default:
	}
	logger := klog.FromContext(ctx).WithValues("lease", l.lease, "serverFence", found)
	switch found {
	case ServerFenceEnforced:
		logger.Info("The API server refuses writes of replicas that do not lead")
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
		logger.Error(nil, "The fence in the API server refuses the writes of this replica even if it leads; check the Namespace "+
			"that the policy and its binding name, that the token is bound to the Pod, and the Pod's name in the identity",
			"identity", l.who.Identity, "namespace", LeaderNamespaceName(l.lease), "annotation", LeaderAnnotation)
	}
}

// NamespaceClient is the part of a client for Namespaces that the fence needs, and the permissions
// to grant by RBAC: get and patch of the one Namespace. It must have the credentials of the
// controllers' clients, because those are judged, and must not pass the fence of the Lock: a standby
// asks as well.
type NamespaceClient interface {
	Get(ctx context.Context, name string, opts metav1.GetOptions) (*corev1.Namespace, error)
	Patch(ctx context.Context, name string, kind types.PatchType, patch []byte, opts metav1.PatchOptions,
		subresources ...string) (*corev1.Namespace, error)
}

// verdict says how the API server judges this replica.
type verdict int

const (
	verdictNone      verdict = iota // no answer
	verdictAbsent                   // there is no fence
	verdictAdmits                   // this replica writes
	verdictRefuses                  // another writes, or nobody
	verdictMisjudges                // it does not recognise the Pod of this replica
)

// ask finds out how the API server judges this replica: by a dry run that changes nothing and that
// the policy answers with what it sees, whoever asks. This shows more than reading the policy would:
// that it is bound and enforced, recognises the replica's token, and how far the API server's watch
// of the Namespace is.
func (n *LeaderNamespace) ask(ctx context.Context) (verdict, error) {
	ctx, cancel := context.WithTimeout(ctx, n.lock.cfg.timing().requestTimeout())
	defer cancel()
	_, err := n.client.Patch(ctx, n.name, types.MergePatchType, []byte("{}"), metav1.PatchOptions{DryRun: []string{metav1.DryRunAll}})
	switch {
	case err == nil, apierrors.IsNotFound(err):
		return verdictAbsent, nil
	case strings.Contains(err.Error(), fmt.Sprintf(serverFenceAdmission, n.pod, n.lock.who.Identity)):
		return verdictAdmits, nil
	case strings.Contains(err.Error(), fmt.Sprintf(serverFencePod, n.pod)):
		return verdictRefuses, nil
	case strings.Contains(err.Error(), serverFenceRefusal):
		return verdictMisjudges, nil
	case apierrors.IsForbidden(err) && strings.Contains(err.Error(), "cannot patch resource"):
		// By the authorizer: the permission is installed with the policy. Webhooks and other policies
		// refuse with the same code.
		return verdictAbsent, nil
	}
	return verdictNone, fmt.Errorf("dry-run patch of Namespace %s: %w", n.name, err)
}
