// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"
)

// dataNamespaces is the number of namespaces over which a data set is spread.
const dataNamespaces = 50

// dataSet is what a cluster is filled with.
type dataSet struct {
	name                             string
	rowPrefix                        string // the prefix of the names of its rows
	secrets, configMaps, deployments int
	lateDeployments                  int // Deployments that are added before the handovers
	size                             int // bytes of the content of a Secret or ConfigMap
}

// objects returns the number of objects by which the growth is divided.
func (d dataSet) objects() int { return d.secrets + d.configMaps }

// dataSets returns the empty cluster and two full ones.
func (o *options) dataSets() []dataSet {
	n := o.scaled
	mixed := dataSet{secrets: n(5000), configMaps: n(5000), deployments: n(500), size: 4096}
	mixed.name = fmt.Sprintf("%d Secrets and %d ConfigMaps of 4 KiB, %d Deployments", mixed.secrets, mixed.configMaps, mixed.deployments)
	many := dataSet{secrets: n(50000), lateDeployments: n(500), size: 1024}
	many.name = fmt.Sprintf("%d Secrets of 1 KiB", many.secrets)
	return []dataSet{{name: "empty cluster"}, mixed, many}
}

// largeSet returns a data set as large as in the largest clusters.
func (o *options) largeSet() dataSet {
	n := o.scaled(200000)
	return dataSet{name: fmt.Sprintf("%d Secrets of 256 bytes", n), secrets: n, size: 256}
}

func dataNamespace(i int) string { return fmt.Sprintf("data-%02d", i%dataNamespaces) }

// dataName returns a name of the usual length, about 30 characters.
func dataName(kind string, i int) string { return fmt.Sprintf("%s-%05d-of-an-application", kind, i) }

// content returns printable random bytes, in keys of at most 1 KiB.
func content(size int) map[string]string {
	const letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+/"
	data := map[string]string{}
	for i := 0; size > 0; i++ {
		value := make([]byte, min(size, 1024))
		for j := range value {
			value[j] = letters[rand.IntN(len(letters))]
		}
		data[fmt.Sprintf("key-%d", i)] = string(value)
		size -= len(value)
	}
	return data
}

func dataMeta(name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{Name: name, Labels: map[string]string{
		"app.kubernetes.io/name": "an-application", "app.kubernetes.io/managed-by": "bench",
	}}
}

// createDataSet creates a data set. It goes through the API server, so that the objects have everything that
// a client's objects have, such as managedFields.
func (b *bench) createDataSet(ctx context.Context, d dataSet) error {
	config := b.cluster.AdminConfig()
	config.ContentType = runtime.ContentTypeProtobuf // 200,000 objects take a while
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	begin := time.Now()
	err = parallel(ctx, 32, d.secrets, func(ctx context.Context, i int) error {
		_, err := client.CoreV1().Secrets(dataNamespace(i)).Create(ctx, &corev1.Secret{
			ObjectMeta: dataMeta(dataName("secret", i)), StringData: content(d.size)}, metav1.CreateOptions{})
		return err
	})
	if err != nil {
		return err
	}
	err = parallel(ctx, 32, d.configMaps, func(ctx context.Context, i int) error {
		_, err := client.CoreV1().ConfigMaps(dataNamespace(i)).Create(ctx, &corev1.ConfigMap{
			ObjectMeta: dataMeta(dataName("config", i)), Data: content(d.size)}, metav1.CreateOptions{})
		return err
	})
	if err != nil {
		return err
	}
	err = b.createDeployments(ctx, d.deployments)
	b.logProgress("Created %d objects in %s", d.objects()+d.deployments, time.Since(begin).Round(time.Second))
	return err
}

func (b *bench) createDeployments(ctx context.Context, n int) error {
	return parallel(ctx, 32, n, func(ctx context.Context, i int) error {
		_, err := b.admin.AppsV1().Deployments(dataNamespace(i)).Create(ctx, dataDeployment(i), metav1.CreateOptions{})
		return err
	})
}

// dataDeployment returns a Deployment with two containers, a ConfigMap as environment and a Secret
// as volume.
func dataDeployment(i int) *appsv1.Deployment {
	d := newDeployment(fmt.Sprintf("web-%05d-of-an-application", i), dataName("config", i))
	d.Labels = dataMeta("").Labels
	pod := &d.Spec.Template.Spec
	main := &pod.Containers[0]
	main.Env = []corev1.EnvVar{{Name: "LOG_LEVEL", Value: "info"}, {Name: "LISTEN", Value: "0.0.0.0:8080"}}
	main.Ports = []corev1.ContainerPort{{Name: "http", ContainerPort: 8080}}
	main.VolumeMounts = []corev1.VolumeMount{{Name: "credentials", MountPath: "/credentials"}}
	pod.Containers = append(pod.Containers, corev1.Container{Name: "proxy", Image: "proxy", Args: []string{"--upstream=127.0.0.1:8080"}})
	pod.Volumes = []corev1.Volume{{Name: "credentials", VolumeSource: corev1.VolumeSource{
		Secret: &corev1.SecretVolumeSource{SecretName: dataName("secret", i)}}}}
	return d
}

// updateObjects changes the content of n objects, one key each, and returns how long that took.
func (b *bench) updateObjects(ctx context.Context, d dataSet, n int) (time.Duration, error) {
	begin := time.Now()
	err := parallel(ctx, 16, n, func(ctx context.Context, i int) error {
		value := content(min(d.size, 1024))["key-0"]
		// Every second object is a ConfigMap if there are any. The changed objects come after the objects that
		// Deployments use.
		i, isSecret := i/2, i%2 == 0
		if d.configMaps == 0 {
			i, isSecret = 2*i, true
		}
		if isSecret {
			index := d.deployments + i%max(1, d.secrets-d.deployments)
			_, err := b.admin.CoreV1().Secrets(dataNamespace(index)).Patch(ctx, dataName("secret", index), types.MergePatchType,
				fmt.Appendf(nil, `{"stringData":{"key-0":%q}}`, value), metav1.PatchOptions{})
			return err
		}
		index := d.deployments + i%max(1, d.configMaps-d.deployments)
		_, err := b.admin.CoreV1().ConfigMaps(dataNamespace(index)).Patch(ctx, dataName("config", index), types.MergePatchType,
			fmt.Appendf(nil, `{"data":{"key-0":%q}}`, value), metav1.PatchOptions{})
		return err
	})
	return time.Since(begin), err
}

// deleteObjects deletes what createDataSet has created, and what controllers have created from it.
func (b *bench) deleteObjects(ctx context.Context) error {
	immediately := metav1.DeleteOptions{PropagationPolicy: ptr.To(metav1.DeletePropagationBackground), GracePeriodSeconds: ptr.To[int64](0)}
	everything := metav1.ListOptions{}
	begin := time.Now()
	err := parallel(ctx, 8, dataNamespaces, func(ctx context.Context, i int) error {
		ns := dataNamespace(i)
		return errors.Join(
			b.admin.AppsV1().Deployments(ns).DeleteCollection(ctx, immediately, everything),
			b.admin.AppsV1().ReplicaSets(ns).DeleteCollection(ctx, immediately, everything),
			b.admin.CoreV1().Secrets(ns).DeleteCollection(ctx, immediately, everything),
			b.admin.CoreV1().ConfigMaps(ns).DeleteCollection(ctx, immediately, everything),
		)
	})
	b.logProgress("Deleted all objects in %s", time.Since(begin).Round(time.Second))
	return err
}
