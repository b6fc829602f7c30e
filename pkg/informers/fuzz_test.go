// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"bytes"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/utils/clock"
)

// FuzzReduce decodes any bytes that may arrive over the wire, as protobuf and as JSON, and passes
// the object through every step between the decoder and the cache.
func FuzzReduce(f *testing.F) {
	jsonInfo, _ := runtime.SerializerInfoForMediaType(scheme.Codecs.SupportedMediaTypes(), runtime.ContentTypeJSON)
	for _, s := range hostileSecrets() {
		s.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("Secret"))
		f.Add(encode(s))
		var b bytes.Buffer
		if err := jsonInfo.Serializer.Encode(s, &b); err != nil {
			f.Fatal(err)
		}
		f.Add(b.Bytes())
	}
	need := Need{For: "reload", Resource: Secrets, Annotations: []string{"match", "other"}, Digest: digestSHA1,
		Fields: Labels | OwnerReferences | CreationTimestamp, When: func(m metav1.Object) bool { return len(m.GetAnnotations()) > 0 }}
	reduced := &reducer{plan: mustPlan(f, need), panics: newPanics("secrets", clock.RealClock{}, func(string) { f.Error("a panic was contained") })}
	whole := &reducer{plan: mustPlan(f, Need{For: "a", Resource: Deployments, Form: Typed}), panics: reduced.panics}
	detector := newMutationDetector(clock.RealClock{})
	f.Fuzz(func(t *testing.T, data []byte) {
		for _, decoder := range []runtime.Decoder{info().Serializer, leanDecoder{info().Serializer, scheme.Scheme}, jsonInfo.Serializer, unstructured.UnstructuredJSONScheme} {
			obj, _, err := decoder.Decode(data, nil, nil)
			if err != nil {
				continue
			}
			if _, err := meta.Accessor(obj); err != nil {
				continue
			}
			if _, err := whole.bookmark(obj); err != nil {
				t.Error(err)
			}
			bookmark, err := reduced.bookmark(obj.DeepCopyObject())
			if err != nil || bookmark.(*Object).GetName() == "" && nameOf(obj) != "" {
				t.Errorf("bookmark of %q: %v", nameOf(obj), err)
			}
			got, err := reduced.reduce(obj.DeepCopyObject())
			if err != nil {
				t.Fatal(err)
			}
			o := got.(*Object)
			describe(o)
			detector.checksum(o)
			if o.GetName() != nameOf(obj) || sizeOf(o) <= 0 {
				t.Errorf("name %q of size %d, want %q", o.GetName(), sizeOf(o), nameOf(obj))
			}
			if got, err = whole.reduce(obj); err != nil {
				t.Fatal(err)
			}
			detector.checksum(got)
			sizeOf(got)
		}
	})
}

func nameOf(obj runtime.Object) string {
	m, err := meta.Accessor(obj)
	if err != nil {
		return ""
	}
	return m.GetName()
}

// hostileSecrets are Secrets that a tenant may write.
func hostileSecrets() []*corev1.Secret {
	texts := []string{"", "x", strings.Repeat("x", 256<<10), "\xff\xfe", "\x00"}
	var all []*corev1.Secret
	for _, text := range texts {
		all = append(all, &corev1.Secret{
			ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "a", UID: "not-a-uuid", ResourceVersion: "007", Labels: map[string]string{"l": text},
				Annotations: map[string]string{corev1.LastAppliedConfigAnnotation: text, "match": text}},
			Data: map[string][]byte{"value": []byte(text), "": nil},
		})
	}
	return all
}
