// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"bytes"
	"crypto/sha1"
	"crypto/sha256"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	apiruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/clock"
)

// digestSHA1 and digestHMAC have the sizes of what config-reload and replication declare.
func digestSHA1(obj apiruntime.Object) []byte {
	sum := sha1.Sum(contentOf(obj))
	return sum[:]
}

func digestHMAC(obj apiruntime.Object) []byte {
	sum := sha256.Sum256(contentOf(obj))
	return sum[:16]
}

func contentOf(obj apiruntime.Object) []byte {
	switch o := obj.(type) {
	case *corev1.Secret:
		return o.Data["value"]
	case *corev1.ConfigMap:
		return []byte(o.Data["value"])
	}
	return nil
}

func mustPlan(tb testing.TB, needs ...Need) *plan {
	tb.Helper()
	plans, err := newPlans(needs, scheme.Scheme, nil)
	if err != nil {
		tb.Fatal(err)
	}
	if len(plans) != 1 {
		tb.Fatalf("got %d plans", len(plans))
	}
	return plans[0]
}

// secret returns Secret number i of a cluster with about 100 Secrets per namespace.
func secret(i, size int) *corev1.Secret {
	var id [16]byte
	r := rand.New(rand.NewPCG(uint64(i), 1))
	for j := range id {
		id[j] = byte(r.Uint32())
	}
	value := make([]byte, size)
	for j := range value {
		value[j] = byte(r.Uint32())
	}
	return &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{
			Namespace:       fmt.Sprintf("team-%03d-production", i/100),
			Name:            fmt.Sprintf("application-credentials-%06d", i),
			UID:             types.UID(uuid.UUID(id).String()),
			ResourceVersion: fmt.Sprint(1000000 + i),
			Labels:          map[string]string{"app.kubernetes.io/name": "shop", "app.kubernetes.io/part-of": "shop"},
			Annotations:     map[string]string{corev1.LastAppliedConfigAnnotation: "{...}", "example.com/unrelated": "x"},
			ManagedFields:   []metav1.ManagedFieldsEntry{{Manager: "kubectl", FieldsV1: metav1.NewFieldsV1(strings.Repeat("f", 400))}},
		},
		Type: corev1.SecretTypeOpaque,
		Data: map[string][]byte{"value": value},
	}
}

func reduced(tb testing.TB, p *plan, obj apiruntime.Object) *Object {
	tb.Helper()
	r, err := newReducer(p).reduce(obj)
	if err != nil {
		tb.Fatal(err)
	}
	return r.(*Object)
}

func newReducer(p *plan) *reducer {
	return &reducer{plan: p, bad: newBadObjects("", func(string) {}), cached: func(string, string) *Object { return nil }}
}

// A Secret may cost 700 bytes of RSS, store and index included. With the garbage collector's
// default goal RSS is about twice the live heap.
func TestObjectOfASecretTakesAtMost260Bytes(t *testing.T) {
	p := mustPlan(t,
		Need{controller: "config-reload", Resource: Secrets, Annotations: []string{"reload.example.com/match"}, Digest: DigestOf(digestSHA1)},
		Need{controller: "replication", Resource: Secrets, Annotations: []string{"copy.example.com/to"}, Digest: DigestOf(digestHMAC)})
	const n = 50_000
	before := liveHeap()
	i := newInformer(p, func(string) {})
	i.objects.addIndex(cache.NamespaceIndex, func(o *Object) []string { return []string{o.GetNamespace()} })
	f := &feed{informer: i, state: newState("secrets", clock.RealClock{})}
	put := func() {
		for n := range n {
			must(t, i.put(f, secret(n, 1024), true))
		}
	}
	put()
	added := (liveHeap() - before) / n
	put() // a change of every Secret leaves new keys behind
	changed := (liveHeap() - before) / n
	t.Logf("%d bytes of heap per Secret when added, %d after a change of each", added, changed)
	if added > 260 || changed > 300 {
		t.Errorf("a Secret costs %d bytes of heap, %d after a change; at most 260 and 300 are allowed", added, changed)
	}
	runtime.KeepAlive(i)
}

func liveHeap() int64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

func TestObjectKeepsWhatItsNeedNames(t *testing.T) {
	const id = "6ba7b810-9dad-11d1-80b4-00c04fd430c8"
	deleted := metav1.Unix(1700000000, 0)
	secrets := func(of string, n Need) Need { n.controller, n.Resource = of, Secrets; return n }
	for name, tc := range map[string]struct {
		needs  []Need
		object metav1.ObjectMeta
		want   map[string]any
	}{
		"keeps identity and deletion, and drops everything that nobody declared": {[]Need{secrets("a", Need{})},
			metav1.ObjectMeta{Namespace: "shop", Name: "db", UID: id, ResourceVersion: "42", DeletionTimestamp: &deleted,
				Labels: map[string]string{"l": "1"}, Annotations: map[string]string{"k": "v"}, OwnerReferences: []metav1.OwnerReference{{Name: "o"}}},
			map[string]any{"namespace": "shop", "name": "db", "uid": id, "rv": "42", "deleted": deleted.Unix()}},
		"keeps the union of declared annotations that the object has": {
			[]Need{secrets("a", Need{Annotations: []string{"one", "absent"}}), secrets("b", Need{Annotations: []string{"one", "two"}})},
			metav1.ObjectMeta{Name: "n", Annotations: map[string]string{"one": "1", "two": "", "three": "3"}},
			map[string]any{"name": "n", "annotations": map[string]string{"one": "1", "two": ""}}},
		"keeps a byte more than the longest value, where no other need wants it whole": {
			[]Need{secrets("a", Need{Annotations: []string{"cut", "whole", "short"}, MaxAnnotation: 3}), secrets("b", Need{Annotations: []string{"whole"}}),
				secrets("c", Need{Annotations: []string{"whole"}, MaxAnnotation: 2})},
			metav1.ObjectMeta{Name: "n", Annotations: map[string]string{"cut": strings.Repeat("x", 256<<10), "whole": "12345", "short": "123"}},
			map[string]any{"name": "n", "annotations": map[string]string{"cut": "xxxx", "whole": "12345", "short": "123"}}},
		"keeps labels, owners and times": {[]Need{secrets("a", Need{Fields: Labels | OwnerReferences | CreationTimestamp})},
			metav1.ObjectMeta{Name: "n", Labels: map[string]string{"l": "1"}, CreationTimestamp: deleted, OwnerReferences: []metav1.OwnerReference{{Name: "o"}}},
			map[string]any{"name": "n", "labels": map[string]string{"l": "1"}, "owners": []metav1.OwnerReference{{Name: "o"}}, "created": deleted.Unix()}},
		"keeps one digest for each need that declares one": {
			[]Need{secrets("a", Need{Digest: DigestOf(digestSHA1)}), secrets("none", Need{}), secrets("b", Need{Digest: DigestOf(digestHMAC)})},
			metav1.ObjectMeta{Name: "n"},
			map[string]any{"name": "n", "digest a": "7a38d8cbd20d9932ba948efaa364bb62651d5ad4", "digest b": "4c94485e0c21ae6c41ce1dfe7b6bfaceea5ab68e40a2476f50208e526f506080"[:32]}},
		"keeps a digest of more than 127 bytes and an empty one": {
			[]Need{secrets("a", Need{Digest: DigestOf(func(apiruntime.Object) []byte { return bytes.Repeat([]byte{7}, 300) })}),
				secrets("b", Need{Digest: DigestOf(func(apiruntime.Object) []byte { return nil })})},
			metav1.ObjectMeta{Namespace: "shop", Name: "db"},
			map[string]any{"namespace": "shop", "name": "db", "digest a": fmt.Sprintf("%x", bytes.Repeat([]byte{7}, 300))}},
		"keeps UIDs and resourceVersions of any form": {[]Need{secrets("a", Need{})}, metav1.ObjectMeta{Name: "n", UID: "UPPER-6BA7", ResourceVersion: "007"},
			map[string]any{"name": "n", "uid": "UPPER-6BA7", "rv": "007"}},
		"does not change the case of a UID": {[]Need{secrets("a", Need{})}, metav1.ObjectMeta{Name: "n", UID: "6BA7B810-9DAD-11D1-80B4-00C04FD430C8", ResourceVersion: "0"},
			map[string]any{"name": "n", "uid": "6BA7B810-9DAD-11D1-80B4-00C04FD430C8", "rv": "0"}},
	} {
		t.Run(name, func(t *testing.T) {
			e := reduced(t, mustPlan(t, tc.needs...), &corev1.Secret{ObjectMeta: tc.object, Data: map[string][]byte{"value": []byte("v")}})
			same(t, "entry", tc.want, describe(e))
			again, err := newReducer(e.plan).reduce(e)
			if err != nil || again != any(e) {
				t.Errorf("a reduced object was reduced again: %v, %v", again, err)
			}
		})
	}
}

// describe returns everything that the getters of an Object return.
func describe(e *Object) map[string]any {
	d := map[string]any{}
	put := func(key string, value any, there bool) {
		if there {
			d[key] = value
		}
	}
	put("namespace", e.GetNamespace(), e.GetNamespace() != "")
	put("name", e.GetName(), e.GetName() != "")
	put("uid", string(e.GetUID()), e.GetUID() != "")
	put("rv", e.GetResourceVersion(), e.GetResourceVersion() != "")
	put("annotations", e.GetAnnotations(), e.GetAnnotations() != nil)
	put("labels", e.GetLabels(), e.GetLabels() != nil)
	put("owners", e.GetOwnerReferences(), e.GetOwnerReferences() != nil)
	put("created", e.GetCreationTimestamp().Unix(), !e.GetCreationTimestamp().Time.IsZero())
	if deleted := e.GetDeletionTimestamp(); deleted != nil {
		d["deleted"] = deleted.Unix()
	}
	for _, of := range []string{"a", "b", "none", "unknown"} {
		put("digest "+of, fmt.Sprintf("%x", e.Digest(of)), e.Digest(of) != nil)
	}
	return d
}

func TestObjectRefusesChanges(t *testing.T) {
	e := reduced(t, mustPlan(t, Need{controller: "a", Resource: Secrets}), secret(1, 10))
	defer func() {
		if recover() == nil {
			t.Error("SetLabels did not panic")
		}
	}()
	e.SetLabels(nil)
}

func TestIndexFollowsTheObjects(t *testing.T) {
	s := newStore()
	// An object with the version v has the digits of v as its values.
	digits := func(o *Object) []string { return strings.Split(o.GetResourceVersion(), "") }
	put := func(key string, version uint64) { s.put(key, &Object{plan: &plan{}, packed: key, version: version}) }
	put("a", 12)
	s.addIndex("digits", digits)
	s.addIndex("digits", nil) // it stays as it is
	put("b", 23)
	check := func(want map[string]string) {
		t.Helper()
		got := map[string]string{}
		for value := range s.indexes["digits"].objects {
			objects, _ := s.byIndex("digits", value)
			var names []string
			for _, o := range objects {
				names = append(names, o.GetName()+"@"+o.GetResourceVersion())
			}
			slices.Sort(names)
			got[value] = strings.Join(names, " ")
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("objects by value (-want +got):\n%s", diff)
		}
	}
	check(map[string]string{"1": "a@12", "2": "a@12 b@23", "3": "b@23"})
	put("a", 42)
	check(map[string]string{"4": "a@42", "2": "a@42 b@23", "3": "b@23"})
	s.put("b", nil)
	s.put("b", nil)
	check(map[string]string{"4": "a@42", "2": "a@42"})
	if _, exists := s.byIndex("other", "2"); exists {
		t.Error("there is an index that was not added")
	}
	if keys := s.keys(); !slices.Equal(keys, []string{"a"}) || len(s.list()) != 1 || s.get("b") != nil {
		t.Errorf("the store has %v", keys)
	}
}

// TestSetHasWhatAMapHas fills a set and empties it again, several times, with changes in random order.
func TestSetHasWhatAMapHas(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	s, want := set{}, map[string]*Object{}
	for i := range 20_000 {
		key := strconv.Itoa(random.IntN(1000))
		if grows := i%4000 < 2000; grows == (random.IntN(10) > 0) {
			want[key] = &Object{plan: &plan{}, packed: key}
			s.put(want[key])
		} else {
			delete(want, key)
			s.remove(key)
		}
		if got := s.get(key); got != want[key] || s.count != len(want) {
			t.Fatalf("change %d: object %v of %s in place of %v, %d objects in place of %d", i, got, key, want[key], s.count, len(want))
		}
		if i%100 > 0 {
			continue
		}
		if n := len(s.list()); n != len(want) || len(s.slots) > 4*n+5 {
			t.Fatalf("change %d: %d objects listed in place of %d, in %d slots", i, n, len(want), len(s.slots))
		}
		for key := range want {
			if s.get(key) != want[key] {
				t.Fatalf("change %d: %s is lost", i, key)
			}
		}
	}
}
