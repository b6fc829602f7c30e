// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package clusters is an example of a controller that works in other clusters. Secrets in the namespace
// clusters, which no tenant may write, say how to reach them. Namespaces get the Secret's name as label.
package clusters

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/informers"
)

const name, namespace, label = "clusters", "clusters", "example.com/clusters"

// Entry describes the controller to the host.
func Entry() controllers.Entry {
	return controllers.Entry{
		Name: name, Summary: "labels the Namespaces of other clusters",
		Needs: func(controllers.Settings) ([]informers.Need, error) {
			return []informers.Need{{Resource: informers.Secrets, Namespace: namespace, LabelSelector: "example.com/cluster"}}, nil
		},
		NamespacePermissions: func(controllers.Settings) map[string][]rbacv1.PolicyRule {
			return map[string][]rbacv1.PolicyRule{namespace: {{APIGroups: []string{""}, Resources: []string{"secrets"}, Verbs: []string{"get"}}}}
		},
		New: func(h controllers.Host) (_ controllers.Controller, err error) {
			c := &controller{host: h, secrets: informers.For[metav1.Object](h, informers.Secrets), members: map[string]*member{}}
			c.Loop, err = controllers.NewLoop(h.LoopOptions, c.reconcile, controllers.WatchSelf(c.secrets))
			return c, err
		},
	}
}

type controller struct {
	*controllers.Loop[cache.ObjectName]
	host    controllers.Host
	secrets *informers.Informer[metav1.Object]
	// members are the open clusters, by the name of the Secret. One worker needs no lock.
	members map[string]*member
}

type member struct {
	version string // the resourceVersion of the Secret
	close   func()
}

// reconcile opens the cluster of a Secret, anew after a change, and closes it if the Secret has gone.
func (c *controller) reconcile(ctx context.Context, key cache.ObjectName) (time.Duration, error) {
	secret, exists := c.secrets.Get(key)
	if old := c.members[key.Name]; old != nil && (!exists || old.version != secret.GetResourceVersion()) {
		old.close()
		delete(c.members, key.Name)
	}
	if !exists || c.members[key.Name] != nil {
		return 0, nil
	}
	live, err := c.host.Client.CoreV1().Secrets(key.Namespace).Get(ctx, key.Name, metav1.GetOptions{})
	if err != nil {
		return 0, err
	}
	m := &member{version: live.ResourceVersion}
	if m.close, err = c.open(ctx, live); err == nil {
		c.members[key.Name] = m
	}
	return 0, err
}

// open runs a loop in the cluster of a Secret until the returned function is called.
func (c *controller) open(ctx context.Context, secret *corev1.Secret) (func(), error) {
	cluster, err := c.host.Cluster(secret.Name, &rest.Config{
		Host: string(secret.Data["server"]), BearerToken: string(secret.Data["token"]),
		TLSClientConfig: rest.TLSClientConfig{CAData: secret.Data["ca.crt"]}, QPS: 20, Burst: 40})
	if err != nil {
		return nil, err
	}
	namespaces, err := informers.Follow[metav1.Object](cluster, informers.Need{Resource: informers.Namespaces, ClusterScoped: true, LabelSelector: label + "!=" + secret.Name})
	if err != nil {
		cluster.Close()
		return nil, err
	}
	loop, err := controllers.NewLoop(cluster.LoopOptions, func(ctx context.Context, key cache.ObjectName) (time.Duration, error) {
		if _, exists := namespaces.Get(key); !exists {
			return 0, nil // it has the label or is gone
		}
		patch := fmt.Appendf(nil, `{"metadata":{"labels":{%q:%q}}}`, label, secret.Name)
		_, err := cluster.Client.CoreV1().Namespaces().Patch(ctx, key.Name, types.MergePatchType, patch, metav1.PatchOptions{FieldManager: name})
		return 0, err
	}, controllers.WatchSelf(namespaces.Informer))
	if err != nil {
		cluster.Close()
		return nil, err
	}
	cluster.Go(ctx, loop)
	return cluster.Close, nil
}

// Run forgets the clusters when it returns, since the host closes them then.
func (c *controller) Run(ctx context.Context) error {
	defer clear(c.members)
	return c.Loop.Run(ctx)
}
