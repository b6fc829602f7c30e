// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package federation

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"
	"k8s.io/client-go/dynamic"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/federation/policy"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// scenario is what happens in one namespace, in which the federated ConfigMap f is in both members.
type scenario struct {
	*members
	f       *unstructured.Unstructured
	fixture *fixture
}

// fixture is what all scenarios share.
type fixture struct {
	*members
	manager *cluster.Manager
}

// forEachMember calls a function for each member.
func (s *scenario) forEachMember(visit func(member dynamic.Interface)) {
	s.Helper()
	for _, member := range []dynamic.Interface{s.c1, s.c2} {
		visit(member)
	}
}

// waitForContent waits until f has the content in a member.
func (s *scenario) waitForContent(member dynamic.Interface, want string) {
	s.Helper()
	s.waitForObject(member, configMaps, s.shop, "f", hasField(want, "data", "a"))
}

// change gives the template of f a content, and perhaps changes other fields of its spec.
func (s *scenario) change(content, others string) {
	s.Helper()
	s.patch(s.f, fmt.Sprintf(`{"spec":{"template":{"data":{"a":%q}}%s}}`, content, others))
}

// patchByHand changes an object of the scenario in a member, as a person would.
func (s *scenario) patchByHand(member dynamic.Interface, resource schema.GroupVersionResource, namespace, name, patch string) {
	s.Helper()
	if _, err := member.Resource(resource).Namespace(namespace).Patch(s.ctx, name, types.MergePatchType, []byte(patch), metav1.PatchOptions{}); err != nil {
		s.Fatal(err)
	}
}

// waitForReason waits until f is not propagated for a reason.
func (s *scenario) waitForReason(want string) {
	s.Helper()
	s.waitForObject(s.c1, schema.GroupVersionResource{Group: "types.kubefed.io", Version: "v1beta1", Resource: "federatedconfigmaps"}, s.shop, "f", func(u *unstructured.Unstructured) bool {
		conditions := policy.ReadFederated(u).Status.Conditions
		return len(conditions) == 1 && conditions[0].Reason == want
	})
}

// waitForType waits until a type runs or does not.
func (s *scenario) waitForType(name, want string) {
	s.Helper()
	s.waitForObject(s.c1, typeConfigs, namespace, name, func(u *unstructured.Unstructured) bool {
		state, _, _ := unstructured.NestedString(u.Object, "status", "propagationController")
		return state == want && policy.ReadTypeConfig(u).Status.ObservedGeneration == u.GetGeneration()
	})
}

// expectWrites checks how many writes of the scenario there were in a member.
func (s *scenario) expectWrites(tails map[string][]*cluster.AuditTail, member string, want int) {
	s.Helper()
	var writes []string
	for _, w := range s.memberWrites(tails) {
		if strings.HasPrefix(w, member) && strings.Contains(w, "/namespaces/"+s.shop+"/") {
			writes = append(writes, w)
		}
	}
	if len(writes) != want {
		s.Errorf("%d writes in %s, want %d:\n%s", len(writes), member, want, strings.Join(writes, "\n"))
	}
}

// federateMany federates 50 ConfigMaps in the clusters with the label of the scenario, which c2 has.
func (s *scenario) federateMany() (last *unstructured.Unstructured) {
	s.Helper()
	s.forbidRemovals()
	s.patch(object(s.T, "kind: KubeFedCluster, metadata: {name: c2}"), fmt.Sprintf(`{"metadata":{"labels":{%q:""}}}`, s.shop))
	for i := range 50 {
		last = s.create(fmt.Sprintf("kind: FederatedConfigMap, metadata: {name: many-%d}, spec: {template: {data: {a: b}}, placement: {clusterSelector: {matchLabels: {%s: ''}}}}", i, s.shop))
	}
	s.waitForStatus(last, "c2=")
	return last
}

// allowRemovals allows what federateMany has made to be removed and, since this counts for a minute, what
// placement removes in the scenarios that follow.
func (m *members) allowRemovals() {
	m.Helper()
	until := time.Now().Add(time.Hour).UTC().Format(time.RFC3339)
	m.patch(object(m.T, "kind: KubeFedCluster, metadata: {name: c2}"), fmt.Sprintf(`{"metadata":{"annotations":{%q:%q}}}`, policy.AllowRemovalsAnnotation, until))
}

// forbidRemovals ends what allowRemovals has allowed.
func (m *members) forbidRemovals() {
	m.Helper()
	m.patch(object(m.T, "kind: KubeFedCluster, metadata: {name: c2}"), fmt.Sprintf(`{"metadata":{"annotations":{%q:null}}}`, policy.AllowRemovalsAnnotation))
}

// defineType defines a type, its federated type, and a FederatedTypeConfig.
func (s *scenario) defineType(kind, plural string, target schema.GroupVersionResource) *unstructured.Unstructured {
	s.Helper()
	federated := schema.GroupVersionResource{Group: "types.kubefed.io", Version: "v1beta1", Resource: "federated" + plural}
	err := errors.Join(fleet.DefineResource(s.ctx, s.c1, target, kind), fleet.DefineResource(s.ctx, s.c1, federated, "Federated"+kind, "status"))
	assert.NoError(s, err)
	config := object(s.T, fmt.Sprintf("kind: FederatedTypeConfig, metadata: {name: %s}, spec: {propagation: Enabled, targetType: {version: %s, kind: %s, scope: Namespaced}, "+
		"federatedType: {group: types.kubefed.io, version: v1beta1, kind: Federated%s, scope: Namespaced}}", target.GroupResource(), target.Version, kind, kind))
	s.createConfig(config)
	s.waitForType(config.GetName(), "Running")
	return s.create(fmt.Sprintf("kind: Federated%s, metadata: {name: w}, spec: {template: {spec: {a: b}}, %s}", kind, bothMembers))
}

// createConfig creates a FederatedTypeConfig for the rest of the scenario.
func (s *scenario) createConfig(config *unstructured.Unstructured) {
	s.Helper()
	if _, err := client(config).Create(s.ctx, config, metav1.CreateOptions{}); err != nil {
		s.Fatal(err)
	}
	s.Cleanup(func() { _ = client(config).Delete(context.Background(), config.GetName(), metav1.DeleteOptions{}) })
}

// createStray creates a ConfigMap in c2 that the host does not know.
func (m *members) createStray(name string, labels map[string]string) {
	m.Helper()
	cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels}}
	if _, err := m.admin2.CoreV1().ConfigMaps(m.shop).Create(m.ctx, cm, metav1.CreateOptions{}); err != nil {
		m.Fatal(err)
	}
}

// startLeader starts the manager, and waits until it leads.
func (f *fixture) startLeader() {
	f.Helper()
	f.manager = shared.RunLeader(f.ctx, f.T, "--controllers=federation", "--federation-unsafe-endpoints")
}

// reinstallFederation deletes the federation namespace with all that is in it, installs the federation again,
// and joins the members without labels.
func (f *fixture) reinstallFederation() {
	f.Helper()
	begin := time.Now()
	client := shared.Admin.CoreV1().Namespaces()
	assert.NoError(f, client.Delete(f.ctx, namespace, metav1.DeleteOptions{}))
	fleet.Eventually(fleet.Within(f.ctx, f.T, fleet.Patience), f.T, func() error {
		_, err := client.Get(f.ctx, namespace, metav1.GetOptions{})
		switch {
		case apierrors.IsNotFound(err):
			return nil
		case err == nil:
			err = errors.New("the federation namespace is not gone")
		}
		if time.Since(begin) > quietTime {
			err = errors.Join(err, f.removeFinalizers())
		}
		return err
	})
	assert.NoError(f, errors.Join(shared.ApplyDir(f.ctx, "../../deploy/federation"), shared.InstallComponents(f.ctx, "federation")))
	expectRefusals(begin)
	f.configure(quickConfig)
	f.joinBoth("cluster-admin")
}

// expectRefusals expects that the manager's requests for the federation namespace were refused since then.
func expectRefusals(since time.Time) {
	end := time.Now()
	shared.ExpectRefusals(func(e auditv1.Event) bool {
		at := e.RequestReceivedTimestamp
		return e.ObjectRef != nil && e.ObjectRef.Namespace == namespace && at.After(since) && at.Time.Before(end)
	})
}

// removeFinalizers takes the finalizers off the FederatedTypeConfigs. The manager cannot, if its role in
// their namespace is deleted before them.
func (f *fixture) removeFinalizers() error {
	config := object(f.T, "kind: FederatedTypeConfig")
	list, err := client(config).List(f.ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	for _, u := range list.Items {
		_, err := client(config).Patch(f.ctx, u.GetName(), types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`), metav1.PatchOptions{})
		if err != nil && !apierrors.IsNotFound(err) {
			return err
		}
	}
	return nil
}

// quickConfig is a KubeFedConfig with which removals wait for no longer than a test.
const quickConfig = `{"controllerDuration":{"availableDelay":"2s"}}`
