// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	local "github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// reloads changes a ConfigMap five times. It is a variable of the workload and a file in it.
func reloads(ctx context.Context, t *testing.T, c *cluster, _ installer) {
	const rounds, size = 5, 4
	namespace := c.newNamespace(ctx, t)
	maps := c.CoreV1().ConfigMaps(namespace)
	colors := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "colors"}, Data: map[string]string{"color": "0"}}
	_, err := maps.Create(ctx, colors, metav1.CreateOptions{})
	assert.NoError(t, err)
	shop := local.NewDeployment("shop", "colors", map[string]string{fleet.ReloadAnnotation: "auto"})
	shop.Spec.Replicas = ptr.To[int32](size)
	pod := &shop.Spec.Template.Spec
	pod.TerminationGracePeriodSeconds = ptr.To[int64](1)
	pod.SecurityContext = &corev1.PodSecurityContext{RunAsNonRoot: ptr.To(true), RunAsUser: ptr.To[int64](65532),
		SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault}}
	pod.Volumes = []corev1.Volume{{Name: "colors", VolumeSource: corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{
		LocalObjectReference: corev1.LocalObjectReference{Name: "colors"}}}}}
	web := &pod.Containers[0]
	web.Image, web.SecurityContext = c.workload, unprivileged()
	web.Command = []string{"sh", "-c", `echo "$color $(cat /colors/color)"; exec sleep 1000000`}
	web.VolumeMounts = []corev1.VolumeMount{{Name: "colors", MountPath: "/colors"}}
	_, err = c.AppsV1().Deployments(namespace).Create(ctx, shop, metav1.CreateOptions{})
	assert.NoError(t, err)
	fleet.Eventually(ctx, t, func() error {
		d, err := c.AppsV1().Deployments(namespace).Get(ctx, "shop", metav1.GetOptions{})
		if err == nil && d.Annotations[fleet.StateAnnotation] == "" {
			err = fmt.Errorf("no state on the Deployment")
		}
		return err
	})
	c.waitForRollout(ctx, t, namespace, "shop")
	for round := range rounds {
		color := fmt.Sprint(round + 1)
		if _, err := maps.Patch(ctx, "colors", types.MergePatchType, []byte(`{"data":{"color":"`+color+`"}}`), metav1.PatchOptions{}); err != nil {
			t.Fatal(err)
		}
		fleet.Eventually(ctx, t, func() error {
			sets, err := c.AppsV1().ReplicaSets(namespace).List(ctx, metav1.ListOptions{})
			if err == nil && len(sets.Items) != round+2 {
				err = fmt.Errorf("%d ReplicaSets after %d changes", len(sets.Items), round+1)
			}
			return err
		})
		c.waitForRollout(ctx, t, namespace, "shop")
		pods, logs := c.readLogs(ctx, t, namespace, "shop")
		if err := judgeReload(pods, logs, color+" "+color); err != nil {
			t.Error(err)
		}
	}
	fleet.Eventually(ctx, t, func() error { // Events are written in the background
		events, err := c.CoreV1().Events(namespace).List(ctx, metav1.ListOptions{})
		if err == nil && countEvents(events.Items, "Reloaded", "shop") != rounds {
			err = fmt.Errorf("%d Events Reloaded", countEvents(events.Items, "Reloaded", "shop"))
		}
		return err
	})
}

func unprivileged() *corev1.SecurityContext {
	return &corev1.SecurityContext{AllowPrivilegeEscalation: ptr.To(false), Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}}}
}

// readLogs returns what each Pod of an app has printed since its start.
func (c *cluster) readLogs(ctx context.Context, t *testing.T, namespace, app string) ([]corev1.Pod, map[string]string) {
	t.Helper()
	pods, err := c.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{LabelSelector: "app=" + app})
	assert.NoError(t, err)
	text := map[string]string{}
	for _, pod := range pods.Items {
		stream, err := c.CoreV1().Pods(namespace).GetLogs(pod.Name, &corev1.PodLogOptions{}).Stream(ctx)
		assert.NoError(t, err)
		log, err := io.ReadAll(stream)
		assert.NoError(t, errors.Join(err, stream.Close()))
		text[pod.Name] = string(log)
	}
	return pods.Items, text
}
