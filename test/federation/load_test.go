// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package federation

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/federation/policy"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
	"github.com/quartermaster-dev/quartermaster/test/internal/judge"
)

// record is what the audit logs of both sides show since it was made.
type record struct {
	*judge.Members
	*testing.T
	tails map[string][]*cluster.AuditTail // of the members
}

func (m *members) newRecord() *record {
	m.Helper()
	lease := types.NamespacedName{Namespace: metav1.NamespaceSystem, Name: fleet.LeaseName}
	return &record{judge.NewMembers(judge.New(lease, fleet.StateAnnotation, fleet.IsReplica)), m.T, m.tailAudits()}
}

// read adds what is new in the logs.
func (r *record) read() *record {
	r.Helper()
	for member, tails := range r.tails {
		for _, tail := range tails {
			events, err := tail.Read()
			for _, e := range events {
				if member == "c1" { // the host
					err = errors.Join(err, r.AddHost(e))
				}
				if e.User.Username == memberAccount {
					err = errors.Join(err, r.AddMember(member, e))
				}
			}
			assert.NoError(r, err)
		}
	}
	return r
}

// load is federated ConfigMaps in a namespace. Those with even numbers are always in both members, the
// others are deselected, deleted and created again. Each change has a content of its own, a number.
type load struct {
	*members
	size    int
	content int
}

// newLoad creates the objects, and deletes them at the end of the test.
func (m *members) newLoad(size int) *load {
	m.Helper()
	l := &load{members: m, size: size}
	m.shop = shared.NewNamespace(m.ctx, m.T, nil)
	objects := []*unstructured.Unstructured{m.federateNamespace(m.shop)}
	for i := range size {
		u := l.nextObject(i)
		if _, err := client(u).Create(m.ctx, u, metav1.CreateOptions{}); err != nil {
			m.Fatal(err)
		}
		objects = append(objects, u)
	}
	m.Cleanup(func() {
		for _, u := range objects {
			// No manager need be left.
			_, err := client(u).Patch(context.Background(), u.GetName(), types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`), metav1.PatchOptions{})
			if err == nil {
				err = client(u).Delete(context.Background(), u.GetName(), metav1.DeleteOptions{})
			}
			if err != nil && !apierrors.IsNotFound(err) {
				m.Error(err)
			}
		}
	})
	return l
}

// nextObject returns an object with the next content.
func (l *load) nextObject(i int) *unstructured.Unstructured {
	l.content++
	u := object(l.T, fmt.Sprintf("kind: FederatedConfigMap, metadata: {name: f-%d}, spec: {template: {data: {content: '%d'}}, %s}", i, l.content, bothMembers))
	u.SetNamespace(l.shop)
	return u
}

// change gives an object the next content.
func (l *load) change(ctx context.Context, i int) error {
	u := l.nextObject(i)
	patch := fmt.Appendf(nil, `{"spec":{"template":{"data":{"content":"%d"}}}}`, l.content)
	_, err := client(u).Patch(ctx, u.GetName(), types.MergePatchType, patch, metav1.PatchOptions{})
	return err
}

// run changes objects until ctx ends.
func (l *load) run(ctx context.Context) error {
	for ctx.Err() == nil {
		fleet.Wait(ctx, 40*time.Millisecond)
		err := l.changeByChance(context.WithoutCancel(ctx), rand.IntN(l.size), rand.IntN(100))
		if err != nil {
			return err
		}
	}
	return nil
}

// changeByChance does something to an object, depending on chance, which is below 100.
func (l *load) changeByChance(ctx context.Context, i, chance int) error {
	u := l.nextObject(i)
	current, err := client(u).Get(ctx, u.GetName(), metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		_, err = client(u).Create(ctx, u, metav1.CreateOptions{})
		return err
	case err != nil:
		return err
	case current.GetDeletionTimestamp() != nil:
		return nil
	case i%2 == 0 || chance >= 20:
		err = l.change(ctx, i)
	case chance >= 5:
		clusters := `[{"name":"c1"},{"name":"c2"}]`
		if len(policy.ReadFederated(current).Placement.Clusters) == 2 {
			clusters = fmt.Sprintf(`[{"name":"c%d"}]`, 1+chance%2)
		}
		_, err = client(u).Patch(ctx, u.GetName(), types.MergePatchType, []byte(`{"spec":{"placement":{"clusters":`+clusters+`}}}`), metav1.PatchOptions{})
	case len(current.GetFinalizers()) > 0: // otherwise the audit log would not show it
		err = client(u).Delete(ctx, u.GetName(), metav1.DeleteOptions{})
	}
	if apierrors.IsNotFound(err) {
		return nil // it was gone before
	}
	return err
}

// settle waits until each member has exactly what the host wants.
func (l *load) settle() {
	l.Helper()
	assert.NoError(l, l.waitUntilSettled())
}

func (l *load) waitUntilSettled() error {
	l.Helper()
	return fleet.Poll(fleet.Within(l.ctx, l.T, 2*fleet.Patience), func() error {
		list, err := client(l.nextObject(0)).List(l.ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		want := map[string]map[string]string{"c1": {}, "c2": {}}
		for _, u := range list.Items {
			content, _, _ := unstructured.NestedString(u.Object, "spec", "template", "data", "content")
			if u.GetDeletionTimestamp() != nil {
				return fmt.Errorf("%s is not gone", u.GetName())
			}
			for _, name := range policy.ReadFederated(&u).Placement.Clusters {
				want[name][u.GetName()] = content
			}
		}
		got, err := l.contents()
		if err != nil {
			return err
		}
		for name, want := range want {
			if !maps.Equal(want, got[name]) {
				return fmt.Errorf("%s has %v, want %v", name, got[name], want)
			}
		}
		return nil
	})
}

// contents returns the contents of the managed ConfigMaps of each member, by name.
func (l *load) contents() (map[string]map[string]string, error) {
	contents := map[string]map[string]string{"c1": {}, "c2": {}}
	for name, admin := range map[string]kubernetes.Interface{"c1": shared.Admin, "c2": l.admin2} {
		list, err := admin.CoreV1().ConfigMaps(l.shop).List(l.ctx, metav1.ListOptions{LabelSelector: policy.ManagedLabel + "=true"})
		if err != nil {
			return nil, err
		}
		for _, cm := range list.Items {
			contents[name][cm.Name] = cm.Data["content"]
		}
	}
	return contents, nil
}
