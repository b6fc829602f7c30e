// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
)

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
		"a list of which all fit":    {list(object("a", "1"), object("b", "2")), []string{"a *v1.Deployment", "b *v1.Deployment"}},
		"a list of which one is bad": {list(object("a", "1"), object("b", "[]"), typed(object("c", "3"))), []string{"a *v1.Deployment", "b *informers.misfit", "c *v1.Deployment"}},
		"a list of nothing":          {list(), nil},
		"what has no name":           {typed(object("", "[]")), []string{"error"}},
		"what is no object":          {`"x"`, []string{"error"}},
		"what is no JSON":            {`{`, []string{"error"}},
	} {
		t.Run(name, func(t *testing.T) {
			f := newTestCacheWith(t, Config{}, func(*plan, string) (source, error) { return source{}, nil }, Need{For: "a", Resource: Deployments, Form: Typed})
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
