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
	need := Need{For: "reload", Resource: Secrets, Annotations: []string{"match", "other"}, Digest: DigestOf(digestSHA1),
		Fields: Labels | OwnerReferences | CreationTimestamp}
	small, whole := newReducer(mustPlan(f, need)), newReducer(mustPlan(f, Need{For: "a", Resource: Deployments, Form: Typed}))
	small.panics.count = func(string) { f.Error("a panic was contained") }
	lenient := tolerant{scheme.Codecs.WithoutConversion()}.DecoderToVersion(jsonInfo.Serializer, nil)
	f.Fuzz(func(t *testing.T, data []byte) {
		for _, decoder := range []runtime.Decoder{info().Serializer, jsonInfo.Serializer, lenient, unstructured.UnstructuredJSONScheme} {
			obj, _, err := decoder.Decode(data, nil, nil)
			if err != nil {
				continue
			}
			if _, err := meta.Accessor(obj); err != nil {
				continue
			}
			if _, bad := obj.(*misfit); bad {
				continue
			}
			for _, r := range []*reducer{small, whole} {
				got, err := r.reduce(obj.DeepCopyObject())
				if err != nil {
					t.Fatal(err)
				}
				o := got.(*Object)
				describe(o)
				if o.GetName() != nameOf(obj) {
					t.Errorf("name %q, want %q", o.GetName(), nameOf(obj))
				}
			}
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
