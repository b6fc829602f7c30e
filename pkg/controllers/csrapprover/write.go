// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package csrapprover

import (
	"context"
	"fmt"
	"strings"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/csrapprover/policy"
)

// The reasons of conditions and Events.
const (
	conditionReasonApproved = "QuartermasterApproved"
	conditionReasonDenied   = "QuartermasterDenied"
	reasonApproved          = "ServingCertificateApproved"
	reasonNotApproved       = "ServingCertificateNotApproved"
	reasonForbidden         = "ServingCertificateForbidden"
)

// The delays after the API server has refused a request: permissions seldom change soon.
const (
	minRefusalDelay = 5 * time.Minute
	maxRefusalDelay = time.Hour
)

// maxMessage is the longest message of an Event that every API server accepts, in bytes.
const maxMessage = 1024

// write approves or denies exactly the request that was read.
func (c *controller) write(ctx context.Context, key requestKey, csr *certificatesv1.CertificateSigningRequest,
	condition certificatesv1.RequestConditionType, message string,
) error {
	conditionReason, result, eventType, reason := conditionReasonApproved, resultApproved, corev1.EventTypeNormal, reasonApproved
	if condition == certificatesv1.CertificateDenied {
		conditionReason, result, eventType, reason = conditionReasonDenied, resultDenied, corev1.EventTypeWarning, reasonNotApproved
	}
	csr.Status.Conditions = append(csr.Status.Conditions, certificatesv1.CertificateSigningRequestCondition{
		Type: condition, Status: corev1.ConditionTrue, Reason: conditionReason, Message: message,
	})
	_, err := c.client.CertificatesV1().CertificateSigningRequests().UpdateApproval(ctx, key.name, csr, metav1.UpdateOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("update the approval of request %s: %w", key, err)
	}
	logger := klog.FromContext(ctx).V(2).WithValues("node", policy.NodeName(csr), "message", message)
	c.metrics.requests.WithLabelValues(result).Inc()
	if condition == certificatesv1.CertificateDenied {
		logger.Info("Denied a request")
	} else {
		logger.Info("Approved a request")
		c.metrics.lag.Observe(time.Since(csr.CreationTimestamp.Time).Seconds())
	}
	c.recordEvent(key, eventType, reason, fmt.Sprintf("request %s is %s: %s", key, strings.ToLower(string(condition)), message))
	return nil
}

// reportWait records why a request waits, reports it once in the log and by an Event, and returns when to
// decide again if no event comes.
func (c *controller) reportWait(ctx context.Context, key requestKey, problems []policy.Problem) time.Duration {
	if c.memory.recordWait(key.name, problems) {
		logger := klog.FromContext(ctx)
		if len(problems) == 0 {
			logger.Info("Dry run: would approve")
			c.metrics.requests.WithLabelValues(resultDryRun).Inc()
		} else {
			logger.V(4).Info("Request not approved", "problems", describe(problems))
			if problems[0].Check != policy.CheckNodeExists {
				c.recordEvent(key, corev1.EventTypeWarning, reasonNotApproved, fmt.Sprintf("request %s is not approved: %s", key, describe(problems)))
			}
		}
	}
	for _, p := range problems {
		if p.Check >= policy.CheckAPIServer {
			return recheckInterval
		}
	}
	return 0
}

// handleRefusal reports that the API server refused a request of ours, and returns when to try again.
func (c *controller) handleRefusal(ctx context.Context, key requestKey, err error) time.Duration {
	pod := c.cfg.Pod
	if c.notices.Due(reasonForbidden, time.Now()) {
		klog.FromContext(ctx).Error(err, "The API server refuses a request that an approval needs")
		if pod.Name != "" {
			c.events.Event(&corev1.ObjectReference{APIVersion: "v1", Kind: "Pod", Namespace: pod.Namespace, Name: pod.Name},
				corev1.EventTypeWarning, reasonForbidden, truncate(err.Error()))
		}
	}
	return min(minRefusalDelay<<min(c.memory.recordRefusal(key.name), 10), maxRefusalDelay)
}

func describe(problems []policy.Problem) string {
	var texts []string
	for _, p := range problems {
		texts = append(texts, p.String())
	}
	return strings.Join(texts, "; ")
}

func truncate(text string) string { return strings.ToValidUTF8(text[:min(len(text), maxMessage)], "") }

// recordEvent records an Event on the Node of a request, if the Node exists: so the API server, which limits
// the Events of an object, limits them for each node.
func (c *controller) recordEvent(key requestKey, eventType, reason, text string) {
	if obj := c.node(key.node); obj != nil {
		c.events.Event(&corev1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: obj.GetName(), UID: obj.GetUID()}, eventType, reason, truncate(text))
	}
}
