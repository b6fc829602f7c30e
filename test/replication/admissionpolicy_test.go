// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package replication

import (
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// TestPolicyLimitsWhoAnnotates has a user with the role edit.
func TestPolicyLimitsWhoAnnotates(t *testing.T) {
	f := newFixture(t, "a", "b")
	shared.InstallWith(f.ctx, t, "replication-policy")
	config := rest.AnonymousClientConfig(shared.AdminConfig())
	config.BearerToken = shared.NewToken(f.ctx, t, "annotator-"+f.id, "edit")
	user, err := kubernetes.NewForConfig(config)
	assert.NoError(t, err)
	secrets := user.CoreV1().Secrets(f.namespaces["a"])
	create := func(name string, annotations ...string) error {
		s := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: name}, Data: dataOf("k=v")}
		f.annotated(annotations...)(s)
		_, err := secrets.Create(f.ctx, s, metav1.CreateOptions{})
		return err
	}
	expectRefusal := func(action string, err error) {
		t.Helper()
		if !apierrors.IsForbidden(err) {
			t.Errorf("%s: %v, want a refusal", action, err)
		}
	}
	fleet.Eventually(f.ctx, t, func() error { // the policy takes a moment
		err := create(fmt.Sprint("probe-", len(f.id)), "Q:source={}")
		if err == nil {
			_ = secrets.Delete(f.ctx, fmt.Sprint("probe-", len(f.id)), metav1.DeleteOptions{})
			return fmt.Errorf("a marker is accepted")
		}
		return nil
	})
	expectRefusal("a marker", create("marker", "Q:source={}"))
	for _, key := range []string{"Q:push-to={b}", "M:replicate-to={b}", "M:replicate-to-matching=", "R:reflection-auto-enabled=true"} {
		expectRefusal(key, create("push", key))
	}
	if err := create("s", "Q:allow-pull={b}", "x=y"); err != nil {
		t.Errorf("what does not push: %v", err)
	}

	// Of what pushes, only someone with the verb changes where to: a list that goes selects everything.
	update := func(name string, annotations ...string) error {
		s := f.get("a/" + name)
		f.annotated(annotations...)(s)
		_, err := secrets.Update(f.ctx, s, metav1.UpdateOptions{})
		return err
	}
	f.secret("a/auto", "k=v", f.annotated("R:reflection-allowed=true", "R:reflection-allowed-namespaces={b}",
		"R:reflection-auto-enabled=true", "R:reflection-auto-namespaces={b}"))
	f.secret("a/to", "k=v", f.annotated("M:replicate-to={b}", "M:replicate-to-matching=x=y", "M:replicate-from={b}/none"))
	for name, change := range map[string][]string{
		"a permission that is widened":   {"auto", "R:reflection-allowed-namespaces=.*"},
		"a permission that is removed":   {"auto", "R:reflection-allowed-namespaces"},
		"a selector that is added":       {"auto", "R:reflection-auto-namespaces-selector=x"},
		"a list that is removed":         {"auto", "R:reflection-auto-namespaces"},
		"a push key of two that goes":    {"to", "M:replicate-to"},
		"a push key that is changed":     {"to", "M:replicate-to=.*"},
		"a pull key that hinders a push": {"to", "M:replicate-from"},
	} {
		expectRefusal(name, update(change[0], change[1:]...))
	}
	for _, change := range [][]string{
		{"auto", "Q:allow-pull={b}", "x=y"},
		{"auto", "R:reflection-auto-enabled"},
		{"auto", "R:reflection-allowed-namespaces=.*"}, // which pushes no more
		{"to", "M:replicate-to", "M:replicate-to-matching", "M:replicate-from"},
	} {
		if err := update(change[0], change[1:]...); err != nil {
			t.Errorf("%q: %v", change, err)
		}
	}

	role := &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: "push-" + f.id}, Rules: []rbacv1.PolicyRule{
		{APIGroups: []string{"quartermaster.dev"}, Resources: []string{"replications"}, Verbs: []string{"push"}}}}
	if _, err := shared.Admin.RbacV1().ClusterRoles().Create(f.ctx, role, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	shared.NewToken(f.ctx, t, "annotator-"+f.id, role.Name)
	fleet.Eventually(f.ctx, t, func() error { return create("push", "Q:push-to={b}") })

	shared.RunLeader(f.ctx, t, args()...)
	f.waitForContent("b/push: k=v")
	// The copy can be edited by others, with its marker as it is.
	copies := user.CoreV1().Secrets(f.namespaces["b"])
	s, err := copies.Get(f.ctx, "push", metav1.GetOptions{})
	assert.NoError(t, err)
	s.Annotations["x"] = "y"
	if s, err = copies.Update(f.ctx, s, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	s.Annotations["quartermaster.dev/source"] += " "
	_, err = copies.Update(f.ctx, s, metav1.UpdateOptions{})
	expectRefusal("a changed marker", err)
	delete(s.Annotations, "quartermaster.dev/source")
	if _, err = copies.Update(f.ctx, s, metav1.UpdateOptions{}); err != nil {
		t.Errorf("a marker that is removed: %v", err)
	}
}
