// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package controllertest

import (
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"sync"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/strategicpatch"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/kubernetes/scheme"
	clienttesting "k8s.io/client-go/testing"
)

// Versions makes a fake clientset keep resourceVersions as the API server does. Every write gets
// the next version. A patch or a deletion that names another than the current version is refused
// with a conflict. A write that changes nothing keeps the version, and a dry run stores nothing.
type Versions struct {
	client *fake.Clientset
	mu     sync.Mutex
	last   int
	// writes is held from the comparison of a version until the write that depends on it.
	writes sync.Mutex
}

// NewVersions adds its reactors to client, before those that client has.
func NewVersions(client *fake.Clientset) *Versions {
	v := &Versions{client: client, last: 100}
	client.PrependReactor("create", "*", v.create)
	client.PrependReactor("update", "*", v.update)
	client.PrependReactor("patch", "*", v.patch)
	client.PrependReactor("delete", "*", v.delete)
	return v
}

// Put creates or replaces an object behind the clientset's back: watches see it, but it is not
// among the clientset's actions. It stores a copy.
func (v *Versions) Put(t *testing.T, obj runtime.Object) {
	t.Helper()
	obj = obj.DeepCopyObject()
	resource, m := v.identify(t, obj)
	v.writes.Lock()
	defer v.writes.Unlock()
	m.SetResourceVersion(v.next())
	current, err := v.client.Tracker().Get(resource, m.GetNamespace(), m.GetName())
	if apierrors.IsNotFound(err) {
		if m.GetUID() == "" {
			m.SetUID(types.UID("uid-" + m.GetResourceVersion()))
		}
		err = v.client.Tracker().Create(resource, obj, m.GetNamespace())
	} else if err == nil {
		if old, accessErr := meta.Accessor(current); accessErr == nil {
			m.SetUID(old.GetUID())
		}
		err = v.client.Tracker().Update(resource, obj, m.GetNamespace())
	}
	if err != nil {
		t.Fatalf("put %s/%s: %v", m.GetNamespace(), m.GetName(), err)
	}
}

// Remove deletes an object behind the clientset's back.
func (v *Versions) Remove(t *testing.T, obj runtime.Object) {
	t.Helper()
	resource, m := v.identify(t, obj)
	if err := v.client.Tracker().Delete(resource, m.GetNamespace(), m.GetName()); err != nil {
		t.Fatalf("remove %s/%s: %v", m.GetNamespace(), m.GetName(), err)
	}
}

func (v *Versions) identify(t *testing.T, obj runtime.Object) (schema.GroupVersionResource, metav1.Object) {
	t.Helper()
	kinds, _, err := scheme.Scheme.ObjectKinds(obj)
	if err != nil {
		t.Fatal(err)
	}
	m, err := meta.Accessor(obj)
	if err != nil {
		t.Fatal(err)
	}
	resource, _ := meta.UnsafeGuessKindToResource(kinds[0])
	return resource, m
}

// Last returns the latest version.
func (v *Versions) Last() string {
	v.mu.Lock()
	defer v.mu.Unlock()
	return strconv.Itoa(v.last)
}

func (v *Versions) next() string {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.last++
	return strconv.Itoa(v.last)
}

func (v *Versions) create(action clienttesting.Action) (bool, runtime.Object, error) {
	a := action.(clienttesting.CreateActionImpl)
	m, err := meta.Accessor(a.Object)
	if err != nil {
		return false, nil, nil
	}
	if slices.Contains(a.CreateOptions.DryRun, metav1.DryRunAll) {
		return true, a.Object, nil
	}
	version := v.next()
	m.SetResourceVersion(version)
	if m.GetUID() == "" {
		m.SetUID(types.UID("uid-" + version))
	}
	return false, nil, nil
}

func (v *Versions) update(action clienttesting.Action) (bool, runtime.Object, error) {
	m, err := meta.Accessor(action.(clienttesting.UpdateAction).GetObject())
	if err != nil {
		return false, nil, nil
	}
	m.SetResourceVersion(v.next())
	return false, nil, nil
}

func (v *Versions) delete(action clienttesting.Action) (bool, runtime.Object, error) {
	a := action.(clienttesting.DeleteActionImpl)
	p := a.DeleteOptions.Preconditions
	if p == nil {
		return false, nil, nil
	}
	m, err := v.current(action, a.Name)
	if err != nil {
		return true, nil, err
	}
	if p.UID != nil && *p.UID != m.GetUID() || p.ResourceVersion != nil && *p.ResourceVersion != m.GetResourceVersion() {
		return true, nil, apierrors.NewConflict(action.GetResource().GroupResource(), a.Name, fmt.Errorf("preconditions"))
	}
	return false, nil, nil
}

func (v *Versions) current(action clienttesting.Action, name string) (metav1.Object, error) {
	obj, err := v.client.Tracker().Get(action.GetResource(), action.GetNamespace(), name)
	if err != nil {
		return nil, err
	}
	return meta.Accessor(obj)
}

func (v *Versions) patch(action clienttesting.Action) (bool, runtime.Object, error) {
	a := action.(clienttesting.PatchActionImpl)
	if a.PatchType != types.StrategicMergePatchType {
		return false, nil, nil
	}
	v.writes.Lock()
	defer v.writes.Unlock()
	current, err := v.client.Tracker().Get(a.Resource, a.Namespace, a.Name)
	if err != nil {
		return true, nil, err
	}
	m, err := meta.Accessor(current)
	if err != nil {
		return true, nil, err
	}
	var sent metav1.PartialObjectMetadata
	if err := json.Unmarshal(a.Patch, &sent); err != nil {
		return true, nil, err
	}
	if sent.ResourceVersion != "" && sent.ResourceVersion != m.GetResourceVersion() {
		return true, nil, apierrors.NewConflict(a.Resource.GroupResource(), a.Name, fmt.Errorf("version is %s", m.GetResourceVersion()))
	}
	changed, err := patched(current, a.Patch)
	if err != nil || changed == nil {
		return true, current, err
	}
	m, err = meta.Accessor(changed)
	if err != nil {
		return true, nil, err
	}
	m.SetResourceVersion(v.next())
	return true, changed, v.client.Tracker().Update(a.Resource, changed, a.Namespace)
}

// patched returns a patched copy of current, or nil if the patch changes nothing.
func patched(current runtime.Object, patch []byte) (runtime.Object, error) {
	before, err := json.Marshal(current)
	if err != nil {
		return nil, err
	}
	after, err := strategicpatch.StrategicMergePatch(before, patch, current)
	if err != nil {
		return nil, err
	}
	changed := reflect.New(reflect.TypeOf(current).Elem()).Interface().(runtime.Object)
	if err := json.Unmarshal(after, changed); err != nil {
		return nil, err
	}
	if again, err := json.Marshal(changed); err != nil || string(again) == string(before) {
		return nil, err
	}
	return changed, nil
}
