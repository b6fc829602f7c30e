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

// olderRecheck is how often a KubeFedCluster looks whether one that may come first has been probed.
const olderRecheck = 200 * time.Millisecond

// identify returns the result of a probe of a cluster that is well, once it is known which cluster that is.
// While this is false, the cluster must not be opened: another KubeFedCluster may lead to it.
func (l *clusterLoop) identify(ctx context.Context, p *probedCluster, object *unstructured.Unstructured, timeout time.Duration) (result policy.Result, problem string, known bool) {
	if !p.asked {
		uid, result, problem := p.client.identity(ctx, timeout)
		if result != policy.Well {
			return result, problem, false
		}
		l.mu.Lock()
		p.uid, p.asked = uid, true
		l.mu.Unlock()
	}
	if p.uid == "" {
		return policy.Well, "", true
	}
	recorded := types.UID(object.GetAnnotations()[policy.ClusterUIDAnnotation])
	replaced := recorded != "" && recorded != p.uid
	if replaced && !p.replaced {
		l.c.host.Events.Eventf(object, corev1.EventTypeWarning, policy.ClusterReplaced, "another cluster is behind the endpoint than before; placement deletes nothing there until the annotation %s is deleted", policy.ClusterUIDAnnotation)
	}
	l.mu.Lock()
	p.replaced = replaced
	l.mu.Unlock()
	switch first, known := l.first(object, p.uid); {
	case first != "":
		return policy.NoClient, fmt.Sprintf("it leads to the same cluster as the KubeFedCluster %s, which did so before", first), false
	case !known:
		return policy.Well, "", false
	}
	return policy.Well, "", true
}

// first returns the KubeFedCluster that led to the same cluster before, or "": it is the one with the
// recorded UID, or else the older one. known is false while another KubeFedCluster has not been probed,
// because it may lead to the same cluster.
func (l *clusterLoop) first(object *unstructured.Unstructured, uid types.UID) (name string, known bool) {
	recorded := func(o *unstructured.Unstructured) types.UID {
		return types.UID(o.GetAnnotations()[policy.ClusterUIDAnnotation])
	}
	known = true
	for _, other := range l.c.informers.clusters.List(l.c.cfg.Namespace, nil) {
		before := policy.OlderCluster(other, object)
		if its := recorded(other) == uid; its != (recorded(object) == uid) {
			before = its
		}
		if !before {
			continue
		}
		state := l.state(other.GetName())
		is := cmp.Or(state.uid, recorded(other))
		if is == uid {
			return other.GetName(), true
		}
		known = known && (is != "" || state.probed)
	}
	return "", known
}

// writeIdentity records which cluster a KubeFedCluster leads to, if nothing is recorded.
func (l *clusterLoop) writeIdentity(ctx context.Context, p *probedCluster, object *unstructured.Unstructured) error {
	if p.uid == "" || !p.health.Ready() || object.GetAnnotations()[policy.ClusterUIDAnnotation] != "" {
		return nil
	}
	_, err := patch(ctx, l.c.ofFederation(kubeFedClusters), object.GetName(), map[string]any{
		"metadata": map[string]any{"annotations": map[string]any{policy.ClusterUIDAnnotation: p.uid}}})
	return err
}

// identity asks the cluster which one it is. The UID is empty if it may not be read.
func (c *client) identity(ctx context.Context, timeout time.Duration) (uid types.UID, result policy.Result, problem string) {
	t := c.newTransport()
	defer t.CloseIdleConnections()
	code, body, err := c.get(ctx, t, "/api/v1/namespaces/"+metav1.NamespaceSystem, timeout, maxBody)
	switch {
	case err != nil:
		return "", policy.NoAnswer, err.Error()
	case code == http.StatusForbidden, code == http.StatusNotFound && isStatus(body):
		return "", policy.Well, ""
	case code != http.StatusOK:
		return "", policy.Unwell, ""
	}
	var namespace metav1.PartialObjectMetadata
	if json.Unmarshal(body, &namespace) != nil {
		return "", policy.Unwell, ""
	}
	return namespace.UID, policy.Well, ""
}

// isStatus reports whether a body is of an API server. A load balancer without a backend may answer 404 too.
func isStatus(body []byte) bool {
	var status metav1.Status
	return json.Unmarshal(body, &status) == nil && status.Kind == "Status"
}
