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

	"github.com/google/uuid"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"
	apiruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/internal/panics"
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
	assert.NoError(tb, err)
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
	r, err := newInformer(p, klog.Background(), func(string) {}).reduce(obj)
	assert.NoError(tb, err)
	return r.(*Object)
}

// A Secret may cost 700 bytes of RSS, store and index included. With the garbage collector's
// default goal RSS is about twice the live heap.
func TestObjectOfASecretTakesAtMost260Bytes(t *testing.T) {
	p := mustPlan(t,
		Need{controller: "config-reload", Resource: Secrets, Annotations: []string{"reload.example.com/match"}, Digest: DigestOf(digestSHA1)},
		Need{controller: "replication", Resource: Secrets, Annotations: []string{"copy.example.com/to"}, Digest: DigestOf(digestHMAC)})
	const n = 50_000
	before := liveHeap()
	i := newInformer(p, klog.Background(), func(string) {})
	i.objects.addIndex(byNamespace, func(o *Object) []string { return []string{o.GetNamespace()} })
	f := &feed{informer: i, state: newState("secrets", klog.Background())}
	put := func() {
		for n := range n {
			assert.NoError(t, i.put(f, secret(n, 1024), true))
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
			assert.Equal(t, "entry", tc.want, describe(e))
			again, err := newInformer(e.plan, klog.Background(), func(string) {}).reduce(e)
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
	defer func() { assert.Equal(t, "SetLabels panics", true, recover() != nil) }()
	e.SetLabels(nil)
}

func TestIndexFollowsTheObjects(t *testing.T) {
	s := newStore()
	// An object with the version v has the digits of v as its values. The function may read the store.
	digits := func(o *Object) []string { s.get("a"); return strings.Split(o.GetResourceVersion(), "") }
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
		assert.Equal(t, "objects by value", want, got)
	}
	check(map[string]string{"1": "a@12", "2": "a@12 b@23", "3": "b@23"})
	put("a", 42)
	check(map[string]string{"4": "a@42", "2": "a@42 b@23", "3": "b@23"})
	s.put("b", nil)
	s.put("b", nil)
	check(map[string]string{"4": "a@42", "2": "a@42"})
	_, exists := s.byIndex("other", "2")
	assert.Equal(t, "an index that was not added exists, and b", []bool{false, false}, []bool{exists, s.get("b") != nil})
	assert.Equal(t, "objects", "[a]", fmt.Sprint(s.list()))
}

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

var rollouts = schema.GroupVersionResource{Group: "example.com", Version: "v1", Resource: "rollouts"}

func TestNeedsThatCannotBeMetAreErrors(t *testing.T) {
	widgets := schema.GroupVersionResource{Group: "example.com", Version: "v1", Resource: "widgets"}
	for name, tc := range map[string]struct {
		needs []Need
		want  string
	}{
		"no controller":                               {[]Need{{Resource: Secrets}}, "without a controller"},
		"no resource":                                 {[]Need{{controller: "a"}}, "without resource"},
		"a namespace that leads elsewhere":            {[]Need{{controller: "a", Resource: Secrets, Namespace: "x/../y"}}, "may not contain '/'"},
		"typed Secrets":                               {[]Need{{controller: "a", Resource: Secrets, Form: Typed, LabelSelector: "a=b"}}, "Content: true"},
		"the data of all ConfigMaps":                  {[]Need{{controller: "a", Resource: ConfigMaps, Form: Typed, Content: true}}, "must have a selector"},
		"Content of anything else":                    {[]Need{{controller: "a", Resource: Deployments, Form: Typed, Content: true}}, "have Content"},
		"a selector that is none":                     {[]Need{{controller: "a", Resource: Jobs, LabelSelector: "=,"}}, "label selector"},
		"a field selector that is none":               {[]Need{{controller: "a", Resource: Jobs, FieldSelector: "x"}}, "field selector"},
		"a history without a digest":                  {[]Need{{controller: "a", Resource: Jobs, History: true}}, "the need has History, but no Digest"},
		"the data of all Secrets but Helm's":          {[]Need{{controller: "a", Resource: Secrets, Form: Typed, Content: true, FieldSelector: NotHelm}}, "must have a selector"},
		"last-applied":                                {[]Need{{controller: "a", Resource: Secrets, Annotations: []string{corev1.LastAppliedConfigAnnotation}}}, "never cached"},
		"typed form without a version":                {[]Need{{controller: "a", Resource: schema.GroupVersionResource{Resource: "pods"}, Form: Typed}}, "Resource.Version must be set"},
		"digest without a version":                    {[]Need{{controller: "a", Resource: widgets.GroupResource().WithVersion(""), Digest: DigestOf(digestSHA1)}}, "Resource.Version must be set"},
		"the same controller twice":                   {[]Need{{controller: "a", Resource: Secrets}, {controller: "a", Resource: Secrets}}, "twice"},
		"a digest of another type":                    {[]Need{{controller: "a", Resource: Secrets, Digest: DigestOf(func(*corev1.ConfigMap) []byte { return nil })}}, "its Digest takes *v1.ConfigMap, but these are of the kind Secret"},
		"a digest of a type of another version":       {[]Need{{controller: "a", Resource: Secrets, Digest: DigestOf(func(*appsv1.Deployment) []byte { return nil })}}, "its Digest takes *v1.Deployment, but that is a type of apps/v1, not of v1"},
		"a digest of a Go type that the scheme lacks": {[]Need{{controller: "a", Resource: widgets, Digest: DigestOf(func(*corev1.ConfigMap) []byte { return nil })}}, "its Digest takes *v1.ConfigMap, but the objects are *unstructured.Unstructured"},
		"a digest of metadata as a whole object":      {[]Need{{controller: "a", Resource: Secrets, Form: Metadata, Digest: DigestOf(func(*corev1.Secret) []byte { return nil })}}, "must be metav1.Object"},
		"the typed form of an unknown type":           {[]Need{{controller: "a", Resource: widgets, Form: Typed}}, "cannot be had in typed form"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := (&Caches{}).AddCluster(CacheConfig{Scheme: scheme.Scheme, needs: tc.needs}, &rest.Config{}, func(string) {})
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("error %v, want one with %q", err, tc.want)
			}
		})
	}
}

func TestNeedsShareAnInformer(t *testing.T) {
	digested := Need{controller: "c", Resource: Deployments, Digest: DigestOf(digestSHA1), History: true}
	with := func(n Need, of string, change func(*Need)) Need { n.controller = of; change(&n); return n }
	custom := schema.GroupVersionResource{Group: "example.org", Version: "v1", Resource: "customs"}
	types := apiruntime.NewScheme()
	assert.NoError(t, scheme.AddToScheme(types))
	types.AddKnownTypeWithName(custom.GroupVersion().WithKind("Custom"), &appsv1.Deployment{})
	for name, tc := range map[string]struct {
		needs []Need
		want  []string // plans
	}{
		"metadata suffices":                         {[]Need{{controller: "a", Resource: Secrets}}, []string{"a: metadata "}},
		"a digest of metadata needs no content":     {[]Need{{controller: "a", Resource: Secrets, Form: Metadata, Digest: DigestOf(digestSHA1)}}, []string{"a: metadata "}},
		"one digest needs the content":              {[]Need{{controller: "a", Resource: Secrets, FieldSelector: NotHelm}, reloadNeed}, []string{"a reload: content digest " + NotHelm}},
		"Helm's releases are left out for one only": {[]Need{reloadNeed, {controller: "b", Resource: Secrets}}, []string{"reload: content digest " + NotHelm, "b: metadata "}},
		"the whole object beside a digest":          {[]Need{digested, {controller: "b", Resource: Deployments, Form: Typed}}, []string{"c b: typed "}},
		"a history each": {[]Need{digested, with(digested, "d", func(*Need) {}), with(digested, "e", func(n *Need) { n.History = false })},
			[]string{"c e: content digest ", "d: content digest "}},
		"typed and unstructured": {[]Need{{controller: "a", Resource: Deployments, Form: Unstructured}, digested, {controller: "b", Resource: Deployments, Form: Typed}, {controller: "m", Resource: Deployments}},
			[]string{"a m: unstructured ", "c b: typed "}},
		"a digest of a custom resource and the whole": {[]Need{{controller: "a", Resource: rollouts, Form: Unstructured}, {controller: "b", Resource: rollouts, Digest: DigestOf(digestSHA1)}},
			[]string{"a b: unstructured "}},
		"a Go type of a custom resource, which some of the objects may not fit": {[]Need{{controller: "a", Resource: custom, Form: Typed}, {controller: "b", Resource: custom}},
			[]string{"a: typed ", "b: metadata "}},
		"a digest of unstructured objects, of which another needs Go types": {[]Need{{controller: "a", Resource: custom, Form: Typed}, {controller: "b", Resource: custom, Digest: DigestOf(func(*unstructured.Unstructured) []byte { return nil })}}, []string{"a: typed ", "b: content digest "}},
		"optional for one, required by another":                             {[]Need{{controller: "a", Resource: Jobs, Optional: true}, {controller: "b", Resource: Jobs}}, []string{"a: metadata ", "b: metadata "}},
		"two versions": {[]Need{{controller: "a", Resource: rollouts}, {controller: "c", Resource: rollouts.GroupResource().WithVersion("v2")}},
			[]string{"a: metadata ", "c: metadata "}},
		"selectors, for the data of the Secrets that they choose": {
			[]Need{reloadNeed, {controller: "b", Resource: Secrets, Form: Typed, Content: true, LabelSelector: "app=x"},
				{controller: "c", Resource: Secrets, FieldSelector: "metadata.name=x"}, {controller: "d", Resource: Secrets, Namespace: "shop"}},
			[]string{"reload: content digest " + NotHelm, "b: typed ", "c: metadata metadata.name=x", "d: metadata "}},
		"conditions": {[]Need{{controller: "a", Resource: Jobs}, with(ttlNeed, "b", func(n *Need) { n.Resource = Jobs }), with(ttlNeed, "c", func(n *Need) { n.Resource = Jobs })},
			[]string{"a: metadata ", "b: metadata ", "c: metadata "}},
	} {
		t.Run(name, func(t *testing.T) {
			plans, err := newPlans(tc.needs, types, nil)
			assert.NoError(t, err)
			var got []string
			for _, p := range plans {
				got = append(got, strings.Join(p.controllers(), " ")+": "+p.form()+" "+p.fieldSelector)
			}
			assert.Equal(t, "plans", tc.want, got)
		})
	}
}

// TestListByLabelsNeedsThem has another controller whose need keeps the labels, so that it would work by
// accident.
func TestListByLabelsNeedsThem(t *testing.T) {
	for name, tc := range map[string]struct {
		need     Need
		selector labels.Selector
		want     any // what List panics with
	}{
		"no selector":                  {Need{}, nil, nil},
		"a selector that matches all":  {Need{}, labels.Everything(), nil},
		"a selector, without labels":   {Need{}, labels.Set{"app": "x"}.AsSelector(), panics.Mistake("lists secrets by labels, but its need has no Fields: Labels")},
		"a selector, of metadata":      {Need{Form: Metadata}, labels.Set{"app": "x"}.AsSelector(), panics.Mistake("lists secrets by labels, but its need has no Fields: Labels")},
		"a selector, with labels":      {Need{Fields: Labels}, labels.Set{"app": "x"}.AsSelector(), nil},
		"a selector, of whole objects": {Need{Form: Typed, Content: true, Namespace: "shop"}, labels.Set{"app": "x"}.AsSelector(), nil},
	} {
		t.Run(name, func(t *testing.T) {
			tc.need.controller, tc.need.Resource = "a", Secrets
			f := newTestCache(t, newCluster(), tc.need, Need{controller: "b", Resource: Secrets, Fields: Labels})
			informer := For[metav1.Object](f.ForController("a"), Secrets)
			defer func() { assert.Equal(t, "panics with", tc.want, recover()) }()
			informer.List("", tc.selector)
		})
	}
}

func TestTypedObjectIsTrimmed(t *testing.T) {
	p := mustPlan(t, Need{controller: "a", Resource: Namespaces, Form: Typed}, Need{controller: "b", Resource: Namespaces, Digest: DigestOf(func(namespace *corev1.Namespace) []byte {
		return []byte(namespace.Name)
	})})
	o := reduced(t, p, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop", Finalizers: []string{"f"}, Generation: 3, ManagedFields: []metav1.ManagedFieldsEntry{{}},
		Annotations: map[string]string{corev1.LastAppliedConfigAnnotation: "{}", "k": "v"}, Labels: map[string]string{"l": "1"}}})
	want := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop", Finalizers: []string{"f"}, Generation: 3, Annotations: map[string]string{"k": "v"}, Labels: map[string]string{"l": "1"}}}
	assert.Equal(t, "object", want, objectAs[*corev1.Namespace](o))
	if len(o.GetFinalizers()) != 1 || o.GetGeneration() != 3 {
		t.Errorf("finalizers %v, generation %d", o.GetFinalizers(), o.GetGeneration())
	}
	if objectAs[metav1.Object](o) != o || string(o.Digest("b")) != "shop" || o.GetLabels()["l"] != "1" || o.GetAnnotations()["k"] != "v" {
		t.Errorf("digest %q, labels %v, annotations %v", o.Digest("b"), o.GetLabels(), o.GetAnnotations())
	}
}

func TestDecoderKeepsAnObjectThatDoesNotFit(t *testing.T) {
	object := func(name, replicas string) string {
		return fmt.Sprintf(`{"metadata":{"namespace":"shop","name":%q,"resourceVersion":"5"},"spec":{"replicas":%s}}`, name, replicas)
	}
	typed := func(text string) string {
		return strings.Replace(text, "{", `{"apiVersion":"apps/v1","kind":"Deployment",`, 1)
	}
	list := func(items ...string) string {
		return `{"apiVersion":"apps/v1","kind":"DeploymentList","metadata":{"resourceVersion":"9","continue":"c"},"items":[` + strings.Join(items, ",") + `]}`
	}
	codecs := rest.CodecFactoryForGeneratedClient(scheme.Scheme, scheme.Codecs)
	serializer, _ := apiruntime.SerializerInfoForMediaType(scheme.Codecs.SupportedMediaTypes(), apiruntime.ContentTypeJSON)
	decoder := tolerant{codecs.WithoutConversion()}.DecoderToVersion(serializer.Serializer, appsv1.SchemeGroupVersion)
	obj, _, err := tolerantDecoder{}.Decode([]byte(object("a", "1")), nil, nil) // it panics, since its Decoder is nil
	assert.Equal(t, "what a panic leaves", "*informers.misfit <nil>", fmt.Sprintf("%T %v", obj, err))
	for name, tc := range map[string]struct {
		in   string
		want []string // name and type
	}{
		"an object that fits":          {typed(object("a", "1")), []string{"a *v1.Deployment"}},
		"an object that does not":      {typed(object("a", `"many"`)), []string{"a *informers.misfit"}},
		"an object with items":         {`{"apiVersion":"apps/v1","kind":"Deployment","metadata":{"name":"a"},"spec":[],"items":["x"]}`, []string{"a *informers.misfit"}},
		"a kind that is called a list": {`{"apiVersion":"apps/v1","kind":"DeploymentList","metadata":{"name":"a"},"items":{"x":1}}`, []string{"a *informers.misfit"}},
		"a list of which all fit":      {list(object("a", "1"), object("b", "2")), []string{"a *v1.Deployment", "b *v1.Deployment"}},
		"a list of which one is bad":   {list(object("a", "1"), object("b", "[]"), typed(object("c", "3"))), []string{"a *v1.Deployment", "b *informers.misfit", "c *v1.Deployment"}},
		"a list of nothing":            {list(), nil},
		"a bad one with Metadata, too": {strings.Replace(typed(object("a", "[]")), "{", `{"Metadata":5,`, 1), []string{"a *informers.misfit"}},
		"such a one in a list":         {list(strings.Replace(object("a", "[]"), "{", `{"Metadata":5,`, 1)), []string{"a *informers.misfit"}},
		"what has no name":             {typed(object("", "[]")), []string{"error"}},
		"what is no object":            {`"x"`, []string{"error"}},
		"what is no JSON":              {`{`, []string{"error"}},
	} {
		t.Run(name, func(t *testing.T) {
			f := newTestCacheWith(t, CacheConfig{}, func(*plan, string) (source, error) { return source{}, nil }, Need{controller: "a", Resource: Deployments, Form: Typed})
			obj, _, err := decoder.Decode([]byte(tc.in), nil, nil)
			var got []string
			add := func(obj apiruntime.Object) error {
				m, err := meta.Accessor(obj)
				if err == nil {
					got = append(got, fmt.Sprintf("%s %T", m.GetName(), obj))
					_, err = f.informers[0].reduce(obj)
				}
				return err
			}
			switch {
			case err != nil:
				got = []string{"error"}
			case meta.IsListType(obj):
				if m, _ := meta.ListAccessor(obj); m.GetResourceVersion() != "9" || m.GetContinue() != "c" {
					t.Errorf("a list at %v", m)
				}
				err = meta.EachListItemWithAlloc(obj, add)
			default:
				err = add(obj)
			}
			assert.Equal(t, fmt.Sprint("decoded, with the error ", err), tc.want, got)
		})
	}
}
