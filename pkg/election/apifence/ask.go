// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package apifence

import (
	"context"
	"fmt"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
)

// The messages with which the policy refuses a write. It refuses the probe, a dry run, always and with the
// same messages.
const (
	refusal         = PolicyName + ": written by "
	refusalOfPod    = refusal + "Pod %s, "
	refusalAdmitted = refusalOfPod + "the leader is '%s'"
)

// verdict says how an API server judges this replica.
type verdict string

const (
	verdictNone      verdict = "has not answered"
	verdictAbsent    verdict = "has no fence"
	verdictAdmits    verdict = "admits this replica"
	verdictRefuses   verdict = "does not admit this replica yet" // another writes, or nobody
	verdictMisjudges verdict = "does not recognise this replica"
	verdictForeign   verdict = "has a fence of another installation, which refuses this ServiceAccount's writes"
)

// askVerdict finds out by a dry run how an API server judges this replica. The policy always refuses the dry
// run, with a message that says which Pod and which leader it sees. Reading the policy would not show whether
// it is bound, is enforced and recognises the replica's token, nor whether the API server's watch of the
// Namespace lags.
func (f *Fence) askVerdict(ctx context.Context, client NamespaceClient) (verdict, error) {
	ctx, cancel := context.WithTimeout(ctx, f.RequestTimeout)
	defer cancel()
	_, err := client.Patch(ctx, f.name, types.MergePatchType, []byte("{}"), metav1.PatchOptions{DryRun: []string{metav1.DryRunAll}})
	switch {
	case err == nil, apierrors.IsNotFound(err):
		return verdictAbsent, nil
	case strings.Contains(err.Error(), fmt.Sprintf(refusalAdmitted, f.pod, f.value)):
		return verdictAdmits, nil
	case strings.Contains(err.Error(), fmt.Sprintf(refusalOfPod, f.pod)):
		return verdictRefuses, nil
	case strings.Contains(err.Error(), refusal):
		return verdictMisjudges, nil
	case apierrors.IsForbidden(err) && strings.Contains(err.Error(), "cannot patch resource"):
		// The authorizer refused, so there is no policy: the permission is installed with it. The text tells, since
		// webhooks and other policies refuse with the same code.
		return verdictAbsent, nil
	}
	return verdictNone, fmt.Errorf("dry-run patch of Namespace %s: %w", f.name, err)
}

// Run asks at once and then every 70 to 80 s whether the API server has a fence, until ctx ends: less than
// once a minute, and often enough that the connection on which this replica will take the Lease is not
// closed as idle, which client and API server do after 90 s.
func (f *Fence) Run(ctx context.Context) {
	for {
		reply, err := f.askVerdict(ctx, f.Namespaces)
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			klog.FromContext(ctx).V(2).Info("Cannot find out whether the API server has a fence", "lease", f.Lease, "err", err)
		}
		f.reportState(ctx, reply)
		if !f.pauseFor(ctx, 70*time.Second, 80*time.Second) {
			return
		}
	}
}

// reportState calls OnState with the state that an answer shows; verdictNone shows none.
func (f *Fence) reportState(ctx context.Context, reply verdict) {
	switch {
	case reply == verdictAbsent:
		f.OnState(ctx, Absent)
	case reply == verdictMisjudges, reply == verdictForeign:
		f.OnState(ctx, Misconfigured)
	case reply != verdictNone: // a standby may be refused or, if it led before in the same Pod, admitted
		f.OnState(ctx, Enforced)
	}
}
