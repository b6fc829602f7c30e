// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"crypto/x509"
	"fmt"
	"io"
	"path/filepath"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/quartermaster-dev/quartermaster/hack/cluster/controlplane"
	"github.com/quartermaster-dev/quartermaster/hack/cluster/sandbox"
)

// kubeletUser is the user of the simulated kubelets.
const kubeletUser = "simulated-kubelets"

// BuildNodes returns the paths of the programs that simulated nodes need: kube-scheduler, and
// hack/nodes, which acts as the kubelets. It builds what is missing and reports the progress to w.
func BuildNodes(ctx context.Context, w io.Writer) (scheduler, kubelets string, err error) {
	dir, err := controlplane.EnsureScheduler(ctx, w)
	if err != nil {
		return "", "", err
	}
	fmt.Fprintln(w, "Building the simulated nodes; the first time this can take a minute")
	if kubelets, err = BuildProgram(ctx, "hack/nodes", false); err != nil {
		return "", "", err
	}
	return filepath.Join(dir, "kube-scheduler"), kubelets, nil
}

// startNodes starts kube-scheduler and n simulated nodes, and waits until they are ready.
func (c *Cluster) startNodes(ctx context.Context, n int) (err error) {
	if err := c.createNodes(ctx, n); err != nil {
		return err
	}
	kubeconfig, err := c.userKubeconfig("scheduler", "system:kube-scheduler")
	if err != nil {
		return err
	}
	c.scheduler, err = c.box.Start(sandbox.Command{
		Name: "kube-scheduler",
		Path: c.schedulerBin,
		Args: []string{"--kubeconfig=" + kubeconfig, "--secure-port=0", "--leader-elect=false"},
		Env:  CleanEnv(),
	})
	if err != nil {
		return err
	}
	if kubeconfig, err = c.userKubeconfig("kubelets", kubeletUser); err != nil {
		return err
	}
	c.kubelets, err = c.box.Start(sandbox.Command{Name: "kubelets", Path: c.kubeletsBin, Args: []string{"--kubeconfig=" + kubeconfig}, Env: CleanEnv()})
	if err != nil {
		return err
	}
	return awaitReady(ctx, c.kubelets, func(ctx context.Context) error { return nodesReady(ctx, c.Admin) })
}

// createNodes creates what the administrator of a cluster does for kubelets that do not register
// themselves: their permissions, and Nodes.
func (c *Cluster) createNodes(ctx context.Context, n int) error {
	if err := permitKubelets(ctx, c.Admin); err != nil {
		return fmt.Errorf("permit what kubelets may: %w", err)
	}
	for i := range n {
		name := "node-" + strconv.Itoa(i+1)
		_, err := c.Admin.CoreV1().Nodes().Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{
			Name:   name,
			Labels: map[string]string{corev1.LabelHostname: name, corev1.LabelOSStable: "linux"},
		}}, metav1.CreateOptions{})
		if err != nil {
			return fmt.Errorf("create Node %s: %w", name, err)
		}
	}
	return nil
}

// permitKubelets grants the user of the simulated kubelets the rights of a kubelet, for all nodes, and to
// watch their Leases. A kubelet may only get its own Lease.
func permitKubelets(ctx context.Context, client kubernetes.Interface) error {
	_, err := client.RbacV1().ClusterRoles().Create(ctx, &rbacv1.ClusterRole{
		ObjectMeta: metav1.ObjectMeta{Name: kubeletUser},
		Rules:      []rbacv1.PolicyRule{{APIGroups: []string{"coordination.k8s.io"}, Resources: []string{"leases"}, Verbs: []string{"list", "watch"}}},
	}, metav1.CreateOptions{})
	if err != nil {
		return err
	}
	for _, role := range []string{"system:node", kubeletUser} {
		_, err := client.RbacV1().ClusterRoleBindings().Create(ctx, &rbacv1.ClusterRoleBinding{
			ObjectMeta: metav1.ObjectMeta{Name: kubeletUser + ":" + role},
			RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: role},
			Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: kubeletUser}},
		}, metav1.CreateOptions{})
		if err != nil {
			return err
		}
	}
	return nil
}

// nodesReady returns an error unless every Node is ready and without the taints that keep Pods away
// until kube-controller-manager has seen it.
func nodesReady(ctx context.Context, client kubernetes.Interface) error {
	nodes, err := client.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	for _, node := range nodes.Items {
		ready := false
		for _, condition := range node.Status.Conditions {
			ready = ready || condition.Type == corev1.NodeReady && condition.Status == corev1.ConditionTrue
		}
		if !ready || len(node.Spec.Taints) > 0 {
			return fmt.Errorf("node %s is not ready, or has taints", node.Name)
		}
	}
	return nil
}

// userKubeconfig writes a kubeconfig with a certificate of its own for a user.
func (c *Cluster) userKubeconfig(name, user string) (path string, err error) {
	config := c.config()
	if config.CertData, config.KeyData, err = c.pki.issue(c.pki.clientCA, name, user, "", x509.ExtKeyUsageClientAuth); err != nil {
		return "", err
	}
	path = filepath.Join(c.box.Dir, name+".kubeconfig")
	return path, WriteKubeconfig(path, config)
}
