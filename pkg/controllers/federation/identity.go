// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package federation

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/federation/policy"
)

// olderRecheckInterval is how often a KubeFedCluster checks whether another one, which may precede it, has
// been probed.
const olderRecheckInterval = 200 * time.Millisecond

// identify returns the result of a probe of a cluster that is well, once it is known which cluster that is.
// While known is false, the cluster must not be opened: another KubeFedCluster may lead to it.
func (l *clusterLoop) identify(ctx context.Context, cluster *probedCluster, object *unstructured.Unstructured, timeout time.Duration) (result policy.ProbeResult, problem string, known bool) {
	if !cluster.identified {
		uid, result, problem := cluster.client.readIdentity(ctx, timeout)
		if result != policy.Healthy {
			return result, problem, false
		}
		l.mu.Lock()
		cluster.uid, cluster.identified = uid, true
		l.mu.Unlock()
	}
	if cluster.uid == "" {
		return policy.Healthy, "", true
	}
	recordedUID := types.UID(object.GetAnnotations()[policy.ClusterUIDAnnotation])
	replaced := recordedUID != "" && recordedUID != cluster.uid
	if replaced && !cluster.replaced {
		l.controller.host.Events.Eventf(object, corev1.EventTypeWarning, policy.ClusterReplaced, "another cluster is behind the endpoint than before; placement deletes nothing there until the annotation %s is deleted", policy.ClusterUIDAnnotation)
	}
	l.mu.Lock()
	cluster.replaced = replaced
	l.mu.Unlock()
	switch preceding, known := l.precedingCluster(object, cluster.uid); {
	case preceding != "":
		return policy.NoClient, fmt.Sprintf("it leads to the same cluster as the KubeFedCluster %s, which did so before", preceding), false
	case !known:
		return policy.Healthy, "", false
	}
	return policy.Healthy, "", true
}

// precedingCluster returns the KubeFedCluster that led to the same cluster before, or "": it is the one with
// the recorded UID, or else the older one. known is false while another KubeFedCluster has not been probed,
// because it may lead to the same cluster.
func (l *clusterLoop) precedingCluster(object *unstructured.Unstructured, uid types.UID) (name string, known bool) {
	recordedUID := func(o *unstructured.Unstructured) types.UID {
		return types.UID(o.GetAnnotations()[policy.ClusterUIDAnnotation])
	}
	known = true
	for _, other := range l.controller.informers.clusters.List(l.controller.cfg.Namespace, nil) {
		precedes := policy.OlderCluster(other, object)
		if otherMatches := recordedUID(other) == uid; otherMatches != (recordedUID(object) == uid) {
			precedes = otherMatches
		}
		if !precedes {
			continue
		}
		state := l.state(other.GetName())
		otherUID := cmp.Or(state.uid, recordedUID(other))
		if otherUID == uid {
			return other.GetName(), true
		}
		known = known && (otherUID != "" || state.probed)
	}
	return "", known
}

// writeIdentity records which cluster a KubeFedCluster leads to, if nothing is recorded.
func (l *clusterLoop) writeIdentity(ctx context.Context, cluster *probedCluster, object *unstructured.Unstructured) error {
	if cluster.uid == "" || !cluster.health.Ready() || object.GetAnnotations()[policy.ClusterUIDAnnotation] != "" {
		return nil
	}
	_, err := patch(ctx, l.controller.federationClient(kubeFedClusters), object.GetName(), map[string]any{
		"metadata": map[string]any{"annotations": map[string]any{policy.ClusterUIDAnnotation: cluster.uid}}})
	return err
}

// readIdentity asks the cluster which one it is. The UID is empty if it may not be read.
func (c *client) readIdentity(ctx context.Context, timeout time.Duration) (uid types.UID, result policy.ProbeResult, problem string) {
	t := c.newTransport()
	defer t.CloseIdleConnections()
	code, body, err := c.get(ctx, t, "/api/v1/namespaces/"+metav1.NamespaceSystem, timeout, maxBody)
	switch {
	case err != nil:
		return "", policy.NoAnswer, err.Error()
	case code == http.StatusForbidden, code == http.StatusNotFound && isStatus(body):
		return "", policy.Healthy, ""
	case code != http.StatusOK:
		return "", policy.Unhealthy, ""
	}
	var namespace metav1.PartialObjectMetadata
	if json.Unmarshal(body, &namespace) != nil {
		return "", policy.Unhealthy, ""
	}
	return namespace.UID, policy.Healthy, ""
}

// isStatus reports whether a body is an API server's Status: a load balancer without a backend may answer 404
// too.
func isStatus(body []byte) bool {
	var status metav1.Status
	return json.Unmarshal(body, &status) == nil && status.Kind == "Status"
}
