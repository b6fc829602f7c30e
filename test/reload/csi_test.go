// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package reload

import (
	"crypto/sha1"
	"errors"
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/utils/ptr"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/configreload"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

const class = "secretproviderclass/vault"

// mountsClass mounts the SecretProviderClass vault.
func mountsClass(t *corev1.PodTemplateSpec) {
	t.Spec.Volumes = append(t.Spec.Volumes, corev1.Volume{Name: "vault", VolumeSource: corev1.VolumeSource{CSI: &corev1.CSIVolumeSource{
		Driver: "secrets-store.csi.k8s.io", ReadOnly: ptr.To(true), VolumeAttributes: map[string]string{"secretProviderClass": "vault"}}}})
	t.Spec.Containers[0].VolumeMounts = append(t.Spec.Containers[0].VolumeMounts, corev1.VolumeMount{Name: "vault", MountPath: "/vault"})
}

// podStatus is what the driver writes about a pod.
func podStatus(pod, version string) *unstructured.Unstructured {
	u := &unstructured.Unstructured{Object: map[string]any{"status": map[string]any{
		"podName": pod, "secretProviderClassName": "vault", "mounted": true, "objects": []any{map[string]any{"id": "secret/db", "version": version}}}}}
	u.SetAPIVersion(configreload.PodStatusesResource.GroupVersion().String())
	u.SetKind("SecretProviderClassPodStatus")
	u.SetName(pod)
	return u
}

func classHash(version string) string {
	return fmt.Sprintf("%x", sha1.Sum([]byte("SecretProviderClassName=vault;secret/db="+version)))
}

func TestLongCSISecretRollsWhenItRotates(t *testing.T) {
	ctx := fleet.Context(t)
	begin := time.Now()
	shared.InstallWith(ctx, t, "csi-secrets")
	s := newTestNamespace(t, nil)
	s.create(newDeployment("web", annotated("secretproviderclass.reloader.stakater.com/auto", "true"), mountsClass),
		newDeployment("worker", annotated(fleet.ReloadAnnotation, "secretproviderclass/v*"), mountsClass),
		newDeployment("other", annotated("secret.reloader.stakater.com/auto", "true"), mountsClass))
	shared.RunLeader(ctx, t, immediateArgs()...)
	s.waitForAbsent(web, class) // the driver is not installed yet
	assert.NoError(t, shared.InstallResource(ctx, configreload.PodStatusesResource, "SecretProviderClassPodStatus"))
	waitForRecorded := func(version string) {
		t.Helper()
		for _, object := range []string{web, worker} {
			s.waitForStateOf(object, map[string]string{class: classHash(version)[:16]})
		}
	}
	statuses := configreload.PodStatusesResource.Resource + "/"
	// Pods come and mount what there is. That is no change, also if it is newer.
	s.createStatus(podStatus("web-1", "1"))
	waitForRecorded("1")
	s.createStatus(podStatus("web-2", "2"))
	waitForRecorded("2")
	// What a running pod gets anew is one.
	rotate := func(pod, version string) {
		t.Helper()
		s.patch(statuses+pod, fmt.Sprintf(`{"status":{"objects":[{"id":"secret/db","version":%q}]}}`, version))
	}
	rotate("web-1", "3")
	waitForRecorded("3")
	rotate("web-2", "3") // the other pod gets the same
	s.patch(statuses+"web-1", `{"metadata":{"labels":{"a":"b"}}}`)
	// The pods of the rollout come, and the old ones go.
	s.createStatus(podStatus("web-3", "3"))
	for _, pod := range []string{"web-1", "web-2"} {
		s.delete(statuses + pod)
	}
	rotate("web-3", "4")
	waitForRecorded("4")
	s.eventually(func() error {
		if got := marks(s.template(web))["STAKATER_VAULT_SECRETPROVIDERCLASS"]; got != classHash("4") {
			return errors.New("marked with " + got)
		}
		return nil
	})
	waitUntilIdle(t)
	readAuditLog(t, begin)
	assert.Equal(t, "rollouts", map[string]int{web: 2, worker: 2}, s.countRollouts())
}

func (s testNamespace) createStatus(o *unstructured.Unstructured) {
	s.t.Helper()
	o.SetNamespace(s.namespace)
	client, _ := s.client(configreload.PodStatusesResource.Resource + "/")
	s.eventually(func() error {
		_, err := client.Create(s.t.Context(), o, metav1.CreateOptions{})
		return err
	})
}
