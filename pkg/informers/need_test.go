// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"

	"github.com/quartermaster-dev/quartermaster/pkg/internal/panics"
)

var rollouts = schema.GroupVersionResource{Group: "example.com", Version: "v1", Resource: "rollouts"}

func TestNeedsThatCannotBeMetAreErrors(t *testing.T) {
	widgets := schema.GroupVersionResource{Group: "example.com", Version: "v1", Resource: "widgets"}
	clients := clientsOf(t, &rest.Config{})
	cases := map[string]struct {
		needs []Need
		want  string
	}{
		"no controller":                      {[]Need{{Resource: Secrets}}, "without a controller"},
		"no resource":                        {[]Need{{controller: "a"}}, "without resource"},
		"typed Secrets":                      {[]Need{{controller: "a", Resource: Secrets, Form: Typed, LabelSelector: "a=b"}}, "Content: true"},
		"the data of all ConfigMaps":         {[]Need{{controller: "a", Resource: ConfigMaps, Form: Typed, Content: true}}, "must have a selector"},
		"Content of anything else":           {[]Need{{controller: "a", Resource: Deployments, Form: Typed, Content: true}}, "have Content"},
		"a selector that is none":            {[]Need{{controller: "a", Resource: Jobs, LabelSelector: "=,"}}, "label selector"},
		"a field selector that is none":      {[]Need{{controller: "a", Resource: Jobs, FieldSelector: "x"}}, "field selector"},
		"a history without a digest":         {[]Need{{controller: "a", Resource: Jobs, History: true}}, "the need has History, but no Digest"},
		"the data of all Secrets but Helm's": {[]Need{{controller: "a", Resource: Secrets, Form: Typed, Content: true, FieldSelector: NotHelm}}, "must have a selector"},
		"a limit of lists that run at once":  {[]Need{{controller: "a", Resource: Jobs, ListSlots: make(chan struct{})}}, "ListSlots is for informers.Follow only"},
		"last-applied":                       {[]Need{{controller: "a", Resource: Secrets, Annotations: []string{corev1.LastAppliedConfigAnnotation}}}, "never cached"},
		"typed form without a version":       {[]Need{{controller: "a", Resource: schema.GroupVersionResource{Resource: "pods"}, Form: Typed}}, "Resource.Version must be set"},
		"digest without a version":           {[]Need{{controller: "a", Resource: widgets.GroupResource().WithVersion(""), Digest: DigestOf(digestSHA1)}}, "Resource.Version must be set"},
		"unstructured Secrets":               {[]Need{{controller: "a", Resource: Secrets, Form: Unstructured}}, "Content: true"},
		"the same controller twice":          {[]Need{{controller: "a", Resource: Secrets}, {controller: "a", Resource: Secrets}}, "twice"},
		"a digest of another type": {[]Need{{controller: "a", Resource: Secrets, Digest: DigestOf(func(*corev1.ConfigMap) []byte { return nil })}},
			"its Digest takes *v1.ConfigMap, but these are of the kind Secret"},
		"a digest of a type of another version": {[]Need{{controller: "a", Resource: Secrets, Digest: DigestOf(func(*appsv1.Deployment) []byte { return nil })}},
			"its Digest takes *v1.Deployment, but that is a type of apps/v1, not of v1"},
		"a digest of a Go type that the scheme lacks": {[]Need{{controller: "a", Resource: widgets, Digest: DigestOf(func(*corev1.ConfigMap) []byte { return nil })}},
			"its Digest takes *v1.ConfigMap, but the objects are *unstructured.Unstructured"},
		"a digest of metadata as a whole object": {[]Need{{controller: "a", Resource: Secrets, Form: Metadata, Digest: DigestOf(func(*corev1.Secret) []byte { return nil })}},
			"must be metav1.Object"},
		"the typed form of an unknown type": {[]Need{{controller: "a", Resource: widgets, Form: Typed}}, "cannot be had in typed form"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			_, err := (&Caches{}).AddCluster(Config{}, clients, tc.needs, clock.RealClock{}, func(string) {})
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("error %v, want one with %q", err, tc.want)
			}
		})
	}
}

// TestNeedsShareAnInformer checks that they do only if none changes what another gets.
func TestNeedsShareAnInformer(t *testing.T) {
	digested := Need{controller: "c", Resource: Deployments, Digest: DigestOf(digestSHA1), History: true}
	with := func(n Need, of string, change func(*Need)) Need { n.controller = of; change(&n); return n }
	cases := map[string]struct {
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
		"optional for one, required by another": {[]Need{{controller: "a", Resource: Jobs, Optional: true}, {controller: "b", Resource: Jobs}}, []string{"a: metadata ", "b: metadata "}},
		"two versions": {[]Need{{controller: "a", Resource: rollouts}, {controller: "c", Resource: rollouts.GroupResource().WithVersion("v2")}},
			[]string{"a: metadata ", "c: metadata "}},
		"selectors, for the data of the Secrets that they choose": {
			[]Need{reloadNeed, {controller: "b", Resource: Secrets, Form: Typed, Content: true, LabelSelector: "app=x"},
				{controller: "c", Resource: Secrets, FieldSelector: "metadata.name=x"}, {controller: "d", Resource: Secrets, Namespace: "shop"}},
			[]string{"reload: content digest " + NotHelm, "b: typed ", "c: metadata metadata.name=x", "d: metadata "}},
		"conditions": {[]Need{{controller: "a", Resource: Jobs}, with(ttlNeed, "b", func(n *Need) { n.Resource = Jobs }), with(ttlNeed, "c", func(n *Need) { n.Resource = Jobs })},
			[]string{"a: metadata ", "b: metadata ", "c: metadata "}},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			plans, err := newPlans(tc.needs, scheme.Scheme, nil)
			must(t, err)
			var got []string
			for _, p := range plans {
				got = append(got, strings.Join(p.controllers(), " ")+": "+p.form()+" "+p.fieldSelector)
			}
			same(t, "plans", tc.want, got)
		})
	}
}

// TestCustomGoTypeHasItsOwnInformer has a Go type of a custom resource, which some of the objects may not
// fit.
func TestCustomGoTypeHasItsOwnInformer(t *testing.T) {
	custom := runtime.NewScheme()
	custom.AddKnownTypeWithName(rollouts.GroupVersion().WithKind("Rollout"), &appsv1.Deployment{})
	plans, err := newPlans([]Need{{controller: "a", Resource: rollouts, Form: Typed}, {controller: "b", Resource: rollouts}}, custom, nil)
	if err != nil || len(plans) != 2 {
		t.Errorf("%d plans: %v", len(plans), err)
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
			defer func() {
				same(t, "panics with", tc.want, recover())
			}()
			informer.List("", tc.selector)
		})
	}
}

// TestTypedObjectIsTrimmed checks that a whole object loses managedFields and last-applied, and
// that the rest is kept once.
func TestTypedObjectIsTrimmed(t *testing.T) {
	p := mustPlan(t, Need{controller: "a", Resource: Namespaces, Form: Typed}, Need{controller: "b", Resource: Namespaces, Digest: DigestOf(func(namespace *corev1.Namespace) []byte {
		return []byte(namespace.Name)
	})})
	o := reduced(t, p, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop", Finalizers: []string{"f"}, Generation: 3, ManagedFields: []metav1.ManagedFieldsEntry{{}},
		Annotations: map[string]string{corev1.LastAppliedConfigAnnotation: "{}", "k": "v"}, Labels: map[string]string{"l": "1"}}})
	want := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop", Finalizers: []string{"f"}, Generation: 3, Annotations: map[string]string{"k": "v"}, Labels: map[string]string{"l": "1"}}}
	same(t, "object", want, objectAs[*corev1.Namespace](o))
	if len(o.GetFinalizers()) != 1 || o.GetGeneration() != 3 {
		t.Errorf("finalizers %v, generation %d", o.GetFinalizers(), o.GetGeneration())
	}
	if objectAs[metav1.Object](o) != o || string(o.Digest("b")) != "shop" || o.GetLabels()["l"] != "1" || o.GetAnnotations()["k"] != "v" {
		t.Errorf("digest %q, labels %v, annotations %v", o.Digest("b"), o.GetLabels(), o.GetAnnotations())
	}
}

func deployment(name string) appsv1.Deployment {
	return appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name, ResourceVersion: "5"}}
}

func TestMisfitIsDecodedFromJSON(t *testing.T) {
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
	serializer, _ := runtime.SerializerInfoForMediaType(scheme.Codecs.SupportedMediaTypes(), runtime.ContentTypeJSON)
	decoder := tolerant{codecs.WithoutConversion()}.DecoderToVersion(serializer.Serializer, appsv1.SchemeGroupVersion)
	for name, tc := range map[string]struct {
		in   string
		want []string // name and type
	}{
		"an object that fits":        {typed(object("a", "1")), []string{"a *v1.Deployment"}},
		"an object that does not":    {typed(object("a", `"many"`)), []string{"a *informers.misfit"}},
		"an object with items":       {`{"apiVersion":"apps/v1","kind":"Deployment","metadata":{"name":"a"},"spec":[],"items":["x"]}`, []string{"a *informers.misfit"}},
		"a list of which all fit":    {list(object("a", "1"), object("b", "2")), []string{"a *v1.Deployment", "b *v1.Deployment"}},
		"a list of which one is bad": {list(object("a", "1"), object("b", "[]"), typed(object("c", "3"))), []string{"a *v1.Deployment", "b *informers.misfit", "c *v1.Deployment"}},
		"a list of nothing":          {list(), nil},
		"what has no name":           {typed(object("", "[]")), []string{"error"}},
		"what is no object":          {`"x"`, []string{"error"}},
		"what is no JSON":            {`{`, []string{"error"}},
	} {
		t.Run(name, func(t *testing.T) {
			f := newTestCacheWith(t, Config{}, func(*plan, string) (source, error) { return source{}, nil }, Need{controller: "a", Resource: Deployments, Form: Typed})
			obj, _, err := decoder.Decode([]byte(tc.in), nil, nil)
			var got []string
			add := func(obj runtime.Object) error {
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
			if !slices.Equal(got, tc.want) {
				t.Errorf("decoded %q, error %v, want %q", got, err, tc.want)
			}
		})
	}
}
