// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package configreload

import (
	"context"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/configreload/policy"
)

// originalLease is the Lease that the original holds if it runs with several replicas.
const originalLease = "stakater-reloader-lock"

// warnOfOriginal warns if stakater/Reloader is also running. Somebody meant to switch it
// off.
func (c *Controller) warnOfOriginal(ctx context.Context) {
	logger := klog.FromContext(ctx)
	const warning = "The operator that this controller replaces is still running"
	if k := c.kinds["Deployment"]; k != nil && cache.WaitFor(ctx, "", k.informer.HasSyncedChecker()) {
		for _, obj := range k.informer.GetIndexer().List() {
			w, err := policy.NewWorkload(&k.Kind, obj, Name)
			if err != nil || !looksLikeOriginal(w) {
				continue
			}
			live, err := k.get(ctx, w.ObjectName)
			if err != nil {
				logger.Info("Could not check whether this is the operator that this controller replaces", "deployment", w.ObjectName, "reason", err.Error())
				continue
			}
			if d, ok := live.(*appsv1.Deployment); ok && controllers.Runs(d, "stakater/reloader") {
				logger.Info("Warning: "+warning, "deployment", w.ObjectName)
			}
		}
	}
	scope := c.cfg.Scope
	if len(scope) == 0 {
		scope = []string{metav1.NamespaceAll}
	}
	for _, namespace := range scope {
		leases, err := c.client.CoordinationV1().Leases(namespace).List(ctx,
			metav1.ListOptions{FieldSelector: "metadata.name=" + originalLease})
		if err != nil {
			logger.Info("Could not get the lease of the operator that this controller replaces", "lease", klog.KRef(namespace, originalLease), "reason", err.Error())
			continue
		}
		for i := range leases.Items {
			l := &leases.Items[i]
			if l.Name != originalLease || l.Spec.RenewTime == nil || l.Spec.LeaseDurationSeconds == nil {
				continue
			}
			end := l.Spec.RenewTime.Add(time.Duration(*l.Spec.LeaseDurationSeconds) * time.Second)
			if end.After(c.clock.Now()) {
				logger.Info("Warning: "+warning, "lease", klog.KObj(l))
			}
		}
	}
}

// looksLikeOriginal filters by names, since the cache has nothing else.
func looksLikeOriginal(w *policy.Workload) bool {
	if strings.Contains(w.Name, "reloader") {
		return true
	}
	for _, ctr := range w.Containers {
		if strings.Contains(ctr.Name, "reloader") {
			return true
		}
	}
	return false
}
