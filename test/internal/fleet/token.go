// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// AdminToken returns a token of a ServiceAccount that may do everything, for the managers' paths
// that need permission.
func (f *Fleet) AdminToken(ctx context.Context) (string, error) {
	return f.newToken(ctx, "fleet-observer", "cluster-admin")
}

// NewToken returns a token of a ServiceAccount with the ClusterRoles.
func (f *Fleet) NewToken(ctx context.Context, t testing.TB, account string, clusterRoles ...string) string {
	t.Helper()
	token, err := f.newToken(ctx, account, clusterRoles...)
	if err != nil {
		t.Fatal(err)
	}
	return token
}

func (f *Fleet) newToken(ctx context.Context, account string, clusterRoles ...string) (string, error) {
	_, err := f.Admin.CoreV1().ServiceAccounts(metav1.NamespaceDefault).Create(ctx,
		&corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: account}}, metav1.CreateOptions{})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return "", err
	}
	for _, role := range clusterRoles {
		_, err := f.Admin.RbacV1().ClusterRoleBindings().Create(ctx, &rbacv1.ClusterRoleBinding{
			ObjectMeta: metav1.ObjectMeta{Name: account + "-" + role},
			RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: role},
			Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Name: account, Namespace: metav1.NamespaceDefault}},
		}, metav1.CreateOptions{})
		if err != nil && !apierrors.IsAlreadyExists(err) {
			return "", err
		}
	}
	return f.TokenOf(ctx, metav1.NamespaceDefault, account)
}

// TokenOf returns a token of a ServiceAccount that is bound to no Pod.
func (f *Fleet) TokenOf(ctx context.Context, namespace, account string) (string, error) {
	token, err := f.Admin.CoreV1().ServiceAccounts(namespace).CreateToken(ctx, account, &authenticationv1.TokenRequest{}, metav1.CreateOptions{})
	if err != nil {
		return "", err
	}
	return token.Status.Token, nil
}
