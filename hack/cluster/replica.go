// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
)

const (
	serviceAccount = "quartermaster"

	// tokenSeconds is longer than any cluster of this package lives, because nothing renews a token.
	tokenSeconds = 30 * 24 * 60 * 60
)

// Replica is the identity of a manager in the API server: a Pod and a token bound to it.
type Replica struct {
	Pod        string // name, in kube-system
	UID        types.UID
	Kubeconfig string // path; mode 0600, like the token's file

	cluster *Cluster
	token   string // path
}

// NewReplica creates the Pod quartermaster-NAME in kube-system with ServiceAccount quartermaster,
// which must exist: call InstallComponents first. No kubelet runs the Pod: it gives a process its
// identity, and stays Pending unless there are simulated nodes. The token is valid for 30 days or
// until the Pod is deleted.
func (c *Cluster) NewReplica(ctx context.Context, name string) (*Replica, error) {
	pod, err := c.Admin.CoreV1().Pods(metav1.NamespaceSystem).Create(ctx, &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Name:   "quartermaster-" + name,
			Labels: map[string]string{"app.kubernetes.io/name": "quartermaster"},
		},
		Spec: corev1.PodSpec{
			ServiceAccountName: serviceAccount,
			Containers:         []corev1.Container{{Name: "manager", Image: "quartermaster"}},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		return nil, fmt.Errorf("create the Pod of replica %s: %w", name, err)
	}
	return c.ReplicaOf(ctx, pod)
}

// ReplicaOf is like NewReplica for an existing Pod.
func (c *Cluster) ReplicaOf(ctx context.Context, pod *corev1.Pod) (*Replica, error) {
	token, err := c.newToken(ctx, pod.Namespace, pod.Spec.ServiceAccountName,
		&authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: "Pod", Name: pod.Name, UID: pod.UID})
	if err != nil {
		return nil, fmt.Errorf("create the token of Pod %s: %w", pod.Name, err)
	}
	r := &Replica{Pod: pod.Name, UID: pod.UID, cluster: c, token: filepath.Join(c.box.Dir, pod.Name+".token")}
	if err := os.WriteFile(r.token, []byte(token), 0o600); err != nil {
		return nil, err
	}
	r.Kubeconfig = filepath.Join(c.box.Dir, pod.Name+".kubeconfig")
	return r, WriteKubeconfig(r.Kubeconfig, r.Config())
}

// NewAccount creates a ServiceAccount with the ClusterRoles, unless it exists, and returns a token
// of it.
func (c *Cluster) NewAccount(ctx context.Context, namespace, account string, clusterRoles ...string) (token string, err error) {
	_, err = c.Admin.CoreV1().ServiceAccounts(namespace).Create(ctx,
		&corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: account}}, metav1.CreateOptions{})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return "", err
	}
	for _, role := range clusterRoles {
		_, err := c.Admin.RbacV1().ClusterRoleBindings().Create(ctx, &rbacv1.ClusterRoleBinding{
			ObjectMeta: metav1.ObjectMeta{Name: account + "-" + role},
			RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: role},
			Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Name: account, Namespace: namespace}},
		}, metav1.CreateOptions{})
		if err != nil && !apierrors.IsAlreadyExists(err) {
			return "", err
		}
	}
	return c.TokenOf(ctx, namespace, account)
}

// TokenOf returns a token of a ServiceAccount that is bound to no Pod.
func (c *Cluster) TokenOf(ctx context.Context, namespace, account string) (string, error) {
	return c.newToken(ctx, namespace, account, nil)
}

func (c *Cluster) newToken(ctx context.Context, namespace, account string, pod *authenticationv1.BoundObjectReference) (string, error) {
	review, err := c.Admin.CoreV1().ServiceAccounts(namespace).CreateToken(ctx, account, &authenticationv1.TokenRequest{
		Spec: authenticationv1.TokenRequestSpec{ExpirationSeconds: ptr.To[int64](tokenSeconds), BoundObjectRef: pod},
	}, metav1.CreateOptions{})
	if err != nil {
		return "", err
	}
	return review.Status.Token, nil
}

// Config returns the configuration of a client with the replica's identity.
func (r *Replica) Config() *rest.Config {
	config := r.cluster.config()
	config.BearerTokenFile = r.token
	return config
}

// Via points the replica's kubeconfig to another server, such as a proxy, with the given CA
// certificates (PEM). It affects managers that start afterwards.
func (r *Replica) Via(server string, ca []byte) error {
	if server == "" || len(ca) == 0 {
		return errors.New("point the replica at another server: URL or CA is empty")
	}
	config := r.Config()
	config.Host, config.CAData = server, ca
	return WriteKubeconfig(r.Kubeconfig, config)
}
