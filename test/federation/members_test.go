// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package federation

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/hack/cluster/sandbox"
	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/federation/policy"
	"github.com/quartermaster-dev/quartermaster/test/internal/faultproxy"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// members are two control planes: c1 is the host.
type members struct {
	*testing.T
	ctx    context.Context
	c1, c2 dynamic.Interface
	second *cluster.Cluster     // c2
	admin2 kubernetes.Interface // of c2
	proxy  *faultproxy.Proxy    // in front of c2, after useProxy
	shop   string               // the namespace of federated objects
}

var (
	namespaces  = schema.GroupVersionResource{Version: "v1", Resource: "namespaces"}
	configMaps  = schema.GroupVersionResource{Version: "v1", Resource: "configmaps"}
	secrets     = schema.GroupVersionResource{Version: "v1", Resource: "secrets"}
	services    = schema.GroupVersionResource{Version: "v1", Resource: "services"}
	deployments = schema.GroupVersionResource{Group: "apps", Version: "v1", Resource: "deployments"}
	jobs        = schema.GroupVersionResource{Group: "batch", Version: "v1", Resource: "jobs"}
)

// newMembers joins two control planes. In c2 the manager may work with some resources, or do
// everything if none are named.
func newMembers(t *testing.T, patience time.Duration, o cluster.Options, resources ...string) *members {
	t.Helper()
	m := newPlanes(t, patience, o)
	role := "cluster-admin"
	if len(resources) > 0 {
		role = memberRole
		m.permitResources(resources...)
	}
	m.joinBoth(role)
	return m
}

// newPlanes starts a second control plane, and joins none.
func newPlanes(t *testing.T, patience time.Duration, o cluster.Options) *members {
	t.Helper()
	ctx := fleet.Within(t.Context(), t, patience)
	o.AuditPolicy = auditPolicy
	second, err := cluster.Start(ctx, o)
	assert.NoError(t, err)
	t.Cleanup(func() { _ = second.Stop() })
	m := &members{T: t, ctx: ctx, c1: shared.Objects, second: second, admin2: second.Admin, shop: "shop"}
	if m.c2, err = dynamic.NewForConfig(second.AdminConfig()); err != nil {
		t.Fatal(err)
	}
	shared.InstallWith(ctx, t, "federation")
	return m
}

// joinBoth joins both control planes. The manager is an administrator in c1 and has the ClusterRole in c2.
func (m *members) joinBoth(role string) {
	m.Helper()
	for name, c := range map[string]*cluster.Cluster{"c1": shared.Cluster, "c2": m.second} {
		clusterRole := role
		if name == "c1" {
			clusterRole = "cluster-admin"
		}
		token, err := c.NewAccount(m.ctx, metav1.NamespaceSystem, account, clusterRole)
		assert.NoError(m, err)
		m.join(name, c.URL(), c.AdminConfig().CAData, token)
	}
}

// forSubtest returns the members for a subtest.
func (m *members) forSubtest(t *testing.T) *members {
	t.Helper()
	copied := *m
	copied.T = t
	return &copied
}

const (
	// account is the manager's ServiceAccount in members, in kube-system.
	account = "federation"
	// memberAccount is its user name.
	memberAccount = "system:serviceaccount:" + metav1.NamespaceSystem + ":" + account
)

// memberRole is a ClusterRole of the manager in c2.
const memberRole = "federation-member"

// permitResources lets the manager work with these resources in c2, and with no others, if its role there is
// memberRole.
func (m *members) permitResources(resources ...string) {
	m.Helper()
	role := &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: memberRole}, Rules: []rbacv1.PolicyRule{
		{APIGroups: []string{"*"}, Resources: resources, Verbs: []string{"get", "list", "watch", "create", "update", "patch", "delete"}},
		{NonResourceURLs: []string{"/healthz", "/version"}, Verbs: []string{"get"}}}}
	_, err := m.admin2.RbacV1().ClusterRoles().Create(m.ctx, role, metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		_, err = m.admin2.RbacV1().ClusterRoles().Update(m.ctx, role, metav1.UpdateOptions{})
	}
	assert.NoError(m, err)
}

// join creates a KubeFedCluster and its Secret for the rest of the test.
func (m *members) join(name, url string, ca []byte, token string) {
	m.Helper()
	tokens := shared.Admin.CoreV1().Secrets(namespace)
	_, err := tokens.Create(m.ctx, &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: name}, StringData: map[string]string{"token": token}}, metav1.CreateOptions{})
	assert.NoError(m, err)
	u := object(m.T, fmt.Sprintf("kind: KubeFedCluster, metadata: {name: %s}, spec: {apiEndpoint: '%s', secretRef: {name: %s}}", name, url, name))
	assert.NoError(m, unstructured.SetNestedField(u.Object, strings.Trim(string(marshal(m.T, ca)), `"`), "spec", "caBundle"))
	if _, err := client(u).Create(m.ctx, u, metav1.CreateOptions{}); err != nil {
		m.Fatal(err)
	}
	m.Cleanup(func() { m.leave(name) })
}

// leave deletes a KubeFedCluster and its Secret, if they exist.
func (m *members) leave(name string) {
	m.Helper()
	u := object(m.T, "kind: KubeFedCluster, metadata: {name: "+name+"}")
	for _, err := range []error{client(u).Delete(context.Background(), name, metav1.DeleteOptions{}),
		shared.Admin.CoreV1().Secrets(namespace).Delete(context.Background(), name, metav1.DeleteOptions{})} {
		if err != nil && !apierrors.IsNotFound(err) {
			m.Error(err)
		}
	}
}

// useProxy leads the manager to c2 by a proxy.
func (m *members) useProxy() {
	m.Helper()
	var err error
	if m.proxy, err = faultproxy.Start(m.second.AdminConfig()); err != nil {
		m.Fatal(err)
	}
	m.Cleanup(func() { _ = m.proxy.Close() })
	m.patch(object(m.T, "kind: KubeFedCluster, metadata: {name: c2}"), fmt.Sprintf(`{"spec":{"apiEndpoint":%q,"caBundle":%s}}`, m.proxy.URL(), marshal(m.T, m.proxy.CA())))
}

// configure changes the spec of the KubeFedConfig for the rest of the test.
func (m *members) configure(spec string) {
	m.Helper()
	config := object(m.T, "kind: KubeFedConfig, metadata: {name: kubefed}")
	before, err := client(config).Get(m.ctx, config.GetName(), metav1.GetOptions{})
	assert.NoError(m, err)
	m.patch(config, `{"spec":`+spec+`}`)
	m.Cleanup(func() {
		patch := fmt.Appendf(nil, `[{"op":"replace","path":"/spec","value":%s}]`, marshal(m.T, before.Object["spec"]))
		if _, err := client(config).Patch(context.Background(), config.GetName(), types.JSONPatchType, patch, metav1.PatchOptions{}); err != nil {
			m.Error(err)
		}
	})
}

// tailAudits begins to read the audit logs of the members.
func (m *members) tailAudits() map[string][]*cluster.AuditTail {
	m.Helper()
	first, err := shared.TailAudit()
	second, secondErr := m.second.TailAudit()
	assert.NoError(m, errors.Join(err, secondErr))
	return map[string][]*cluster.AuditTail{"c1": first, "c2": second}
}

// isWrite reports whether whoever manages a member has written there.
func isWrite(e auditv1.Event) bool {
	return e.User.Username == memberAccount && cluster.AuditWrite(e)
}

// memberWrites returns what was written in the members by whoever manages them, since the tails were
// made.
func (m *members) memberWrites(tails map[string][]*cluster.AuditTail) (writes []string) {
	m.Helper()
	for member, tails := range tails {
		for _, tail := range tails {
			events, err := tail.Read()
			assert.NoError(m, err)
			for _, e := range events {
				if isWrite(e) {
					writes = append(writes, fmt.Sprintf("%s: %s %s", member, e.Verb, e.RequestURI))
				}
			}
		}
	}
	slices.Sort(writes)
	return writes
}

// stop ends a manager gracefully.
func (m *members) stop(p *sandbox.Process) {
	m.Helper()
	assert.NoError(m, p.Stop(m.ctx, 30*time.Second))
}

func marshal(t *testing.T, v any) []byte {
	t.Helper()
	data, err := json.Marshal(v)
	assert.NoError(t, err)
	return data
}

// federateNamespace federates a namespace.
func (m *members) federateNamespace(name string) *unstructured.Unstructured {
	m.Helper()
	u := object(m.T, "kind: FederatedNamespace, metadata: {name: "+name+"}, spec: {"+bothMembers+"}")
	u.SetNamespace(name)
	if _, err := client(u).Create(m.ctx, u, metav1.CreateOptions{}); err != nil {
		m.Fatal(err)
	}
	return u
}

// create creates a federated object in the namespace.
func (m *members) create(text string) *unstructured.Unstructured {
	m.Helper()
	u := object(m.T, text)
	u.SetNamespace(m.shop)
	if _, err := client(u).Create(m.ctx, u, metav1.CreateOptions{}); err != nil {
		m.Fatal(err)
	}
	return u
}

func (m *members) patch(u *unstructured.Unstructured, patch string) {
	m.Helper()
	if _, err := client(u).Patch(m.ctx, u.GetName(), types.MergePatchType, []byte(patch), metav1.PatchOptions{}); err != nil {
		m.Fatal(err)
	}
}

// waitForObject waits until a member has an object of which the check is true; nil waits until it is gone.
func (m *members) waitForObject(member dynamic.Interface, resource schema.GroupVersionResource, namespace, name string, check func(*unstructured.Unstructured) bool) {
	m.Helper()
	fleet.Eventually(fleet.Within(m.ctx, m.T, fleet.Patience), m.T, func() error {
		u, err := member.Resource(resource).Namespace(namespace).Get(m.ctx, name, metav1.GetOptions{})
		switch {
		case apierrors.IsNotFound(err) && check == nil:
			return nil
		case err != nil:
			return err
		case check == nil:
			return fmt.Errorf("%s %s is still there: %v", resource.Resource, name, u.Object["status"])
		case !check(u):
			return fmt.Errorf("%s %s is %v", resource.Resource, name, u.Object)
		}
		return nil
	})
}

// waitForStatus waits until the federated object has a status, such as "c1= c2=APINotAvailable".
func (m *members) waitForStatus(f *unstructured.Unstructured, want string) {
	m.Helper()
	fleet.Eventually(fleet.Within(m.ctx, m.T, fleet.Patience), m.T, func() error {
		u, err := client(f).Get(m.ctx, f.GetName(), metav1.GetOptions{})
		if err != nil {
			return err
		}
		if got := strings.Join(statuses(u), " "); got != want {
			return fmt.Errorf("%s has the status %q, want %q", f.GetName(), got, want)
		}
		return nil
	})
}

// statuses returns the statuses of the clusters, such as "c1=".
func statuses(f *unstructured.Unstructured) (texts []string) {
	for _, c := range policy.ReadFederated(f).Status.Clusters {
		texts = append(texts, c.Name+"="+c.Status)
	}
	return texts
}

// waitForCondition waits until a KubeFedCluster has this condition.
func (m *members) waitForCondition(name, want string) {
	m.Helper()
	m.waitForObject(m.c1, schema.GroupVersionResource{Group: policy.CoreGroup, Version: "v1beta1", Resource: "kubefedclusters"}, namespace, name, func(u *unstructured.Unstructured) bool {
		conditions := policy.ReadCluster(u).Status.Conditions
		return len(conditions) > 0 && conditions[0].Type+"="+conditions[0].Status == want
	})
}

func managed(u *unstructured.Unstructured) bool { return u.GetLabels()[policy.ManagedLabel] == "true" }

// hasField returns a check of a field, which is also that the object is managed.
func hasField(want any, path ...string) func(*unstructured.Unstructured) bool {
	return func(u *unstructured.Unstructured) bool {
		value, _, err := unstructured.NestedFieldNoCopy(u.Object, path...)
		return err == nil && managed(u) && fmt.Sprint(value) == fmt.Sprint(want)
	}
}
