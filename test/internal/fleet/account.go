// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"errors"
	"testing"

	authorizationv1 "k8s.io/api/authorization/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// AdminToken returns a token of a ServiceAccount that may do everything, for the managers' paths
// that need permission.
func (f *Fleet) AdminToken(ctx context.Context) (string, error) {
	return f.NewAccount(ctx, metav1.NamespaceDefault, "fleet-observer", "cluster-admin")
}

// NewToken returns a token of a ServiceAccount with the ClusterRoles.
func (f *Fleet) NewToken(ctx context.Context, t testing.TB, account string, clusterRoles ...string) string {
	t.Helper()
	token, err := f.NewAccount(ctx, metav1.NamespaceDefault, account, clusterRoles...)
	if err != nil {
		t.Fatal(err)
	}
	return token
}

// Grant gives the managers' account more permissions for the rest of the test.
func (f *Fleet) Grant(ctx context.Context, t testing.TB, rules ...rbacv1.PolicyRule) {
	t.Helper()
	rbac := f.Admin.RbacV1()
	role, err := rbac.ClusterRoles().Create(ctx, &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{GenerateName: "granted-"}, Rules: rules}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	_, err = rbac.ClusterRoleBindings().Create(ctx, &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: role.Name},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: role.Name},
		Subjects:   []rbacv1.Subject{{Kind: "ServiceAccount", Namespace: metav1.NamespaceSystem, Name: "quartermaster"}},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(
			rbac.ClusterRoleBindings().Delete(context.Background(), role.Name, metav1.DeleteOptions{}),
			rbac.ClusterRoles().Delete(context.Background(), role.Name, metav1.DeleteOptions{}),
		); err != nil {
			t.Error(err)
		}
	})
	Eventually(ctx, t, func() error {
		allowed, err := f.Allows(ctx, "system:serviceaccount:kube-system:quartermaster",
			authorizationv1.ResourceAttributes{Group: rules[0].APIGroups[0], Resource: rules[0].Resources[0], Verb: rules[0].Verbs[0]})
		if err == nil && !allowed {
			err = errors.New("the role does not count yet")
		}
		return err
	})
}

// Allows asks the API server whether a user may send a request. It learns of a changed role by a watch.
func (f *Fleet) Allows(ctx context.Context, user string, request authorizationv1.ResourceAttributes) (bool, error) {
	review, err := f.Admin.AuthorizationV1().SubjectAccessReviews().Create(ctx, &authorizationv1.SubjectAccessReview{
		Spec: authorizationv1.SubjectAccessReviewSpec{User: user, ResourceAttributes: &request},
	}, metav1.CreateOptions{})
	return err == nil && review.Status.Allowed, err
}
