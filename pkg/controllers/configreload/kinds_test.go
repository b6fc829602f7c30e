// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package configreload_test

import (
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func TestKindsAreRolledAlike(t *testing.T) {
	set := &appsv1.StatefulSet{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web"}}
	set.Spec.Template = pod(reads("app-config"))
	daemon := &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web"}}
	daemon.Spec.Template = pod(reads("app-config"))
	known := func(kind, hash string) string { return stateOn(kind+"/shop/web", cmKey, hash) }
	// Only Deployments can be paused.
	annotations := []string{kAuto, "true", kPause, "5m"}
	runCases(t, map[string]reconcileCase{
		"a StatefulSet": {
			objects: objs{cm1(), annotated(set, append(annotations, nativeState, known("StatefulSet", h1))...)}, change: changeCM,
			want:   []string{envOn("statefulsets/web", known("StatefulSet", h2), "web/"+cmVar, h2)},
			events: []string{"Normal Reloaded Reloaded for ConfigMap shop/app-config"},
		},
		"a DaemonSet": {
			objects: objs{cm1(), annotated(daemon, append(annotations, nativeState, known("DaemonSet", h1))...)}, change: changeCM,
			want:   []string{envOn("daemonsets/web", known("DaemonSet", h2), "web/"+cmVar, h2)},
			events: []string{"Normal Reloaded Reloaded for ConfigMap shop/app-config"},
		},
	})
}
