// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package deploy

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// TestConfigurationFileRollsTheManager applies the example as a user does and edits the
// ConfigMap. The leader rolls its own Deployment, and the new replicas have read the new file.
func TestConfigurationFileRollsTheManager(t *testing.T) {
	ctx := fleet.Within(t.Context(), t, 2*fleet.Patience)
	stop := startKubelet(ctx, t, map[string]string{"quartermaster:latest": shared.Binary})
	if _, err := shared.Kubectl(ctx, "apply", "-k", filepath.Join(deployDir, "examples", "config-file")); err != nil {
		t.Fatal(err)
	}
	waitForVersion(ctx, t, "latest")
	deployments, configMaps := shared.Admin.AppsV1().Deployments(metav1.NamespaceSystem), shared.Admin.CoreV1().ConfigMaps(metav1.NamespaceSystem)
	fleet.Eventually(ctx, t, func() error {
		d, err := deployments.Get(ctx, "quartermaster", metav1.GetOptions{})
		if err == nil && d.Annotations[fleet.StateAnnotation] == "" {
			err = errors.New("the Deployment has no state")
		}
		return err
	})

	file, err := configMaps.Get(ctx, "quartermaster-config", metav1.GetOptions{})
	assert.NoError(t, err)
	file.Data["config.yaml"] += "  leader-elect-lease-duration: 16s\n"
	if _, err := configMaps.Update(ctx, file, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	fleet.Eventually(ctx, t, func() error {
		if got := ptr.Deref(shared.Lease(ctx, t).Spec.LeaseDurationSeconds, 0); got != 16 {
			return fmt.Errorf("the Lease is for %d s, not for the 16 s of the new file", got)
		}
		return nil
	})
	waitForVersion(ctx, t, "latest")
	d, err := deployments.Get(ctx, "quartermaster", metav1.GetOptions{})
	assert.NoError(t, err)
	if revision := d.Annotations["deployment.kubernetes.io/revision"]; revision != "2" {
		t.Errorf("the Deployment is of revision %s: it was not rolled once", revision)
	}

	removeDeployment(ctx, t)
	pods, err := stop()
	if err != nil {
		t.Error(err)
	}
	if len(pods) != 4 {
		t.Errorf("%d Pods have run, want 2 before the change and 2 after it: %v", len(pods), pods)
	}
	if err := configMaps.Delete(ctx, "quartermaster-config", metav1.DeleteOptions{}); err != nil {
		t.Error(err)
	}
}

// mount writes the Pod's ConfigMaps to disk, and returns the arguments with the paths of the files.
func mount(ctx context.Context, pod *corev1.Pod, args []string) ([]string, error) {
	for _, volume := range pod.Spec.Volumes {
		if volume.ConfigMap == nil {
			continue
		}
		c, err := shared.Admin.CoreV1().ConfigMaps(pod.Namespace).Get(ctx, volume.ConfigMap.Name, metav1.GetOptions{})
		if err != nil {
			return nil, err
		}
		dir := filepath.Join(shared.Dir(), pod.Name+"-"+volume.Name)
		err = os.Mkdir(dir, 0o700)
		for name, text := range c.Data {
			err = errors.Join(err, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600))
		}
		if err != nil {
			return nil, err
		}
		for _, at := range pod.Spec.Containers[0].VolumeMounts {
			for i := range args {
				if at.Name == volume.Name {
					args[i] = strings.Replace(args[i], "="+at.MountPath+"/", "="+dir+"/", 1)
				}
			}
		}
	}
	return args, nil
}
