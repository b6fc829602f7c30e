// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"bytes"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/scheme"
)

func TestLeanDecoderDecodesAsTheSerializerBelowIt(t *testing.T) {
	list := &corev1.SecretList{Items: []corev1.Secret{*named("a", "1"), *named("b", "2")}, ListMeta: metav1.ListMeta{ResourceVersion: "7"}}
	unknown := runtime.Unknown{TypeMeta: runtime.TypeMeta{APIVersion: "other.com/v1", Kind: "Other"}, Raw: []byte{1}}
	unregistered, err := unknown.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	encoded := unknown
	encoded.TypeMeta = runtime.TypeMeta{APIVersion: "v1", Kind: "Secret"}
	encoded.ContentEncoding = "gzip"
	compressed, err := encoded.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	managed := named("a", "1")
	managed.Generation, managed.Finalizers = 7, []string{"example.com/kept"}
	managed.ManagedFields = []metav1.ManagedFieldsEntry{{Manager: "kubectl", FieldsV1: metav1.NewFieldsV1("{}")}, {Manager: "helm"}}
	managedList := &corev1.SecretList{Items: []corev1.Secret{*named("a", "1"), *managed, *managed}}
	secret := encode(convert(named("a", "1"), false))
	for name, data := range map[string][]byte{
		"a Secret":                  secret,
		"a list":                    encode(convert(list, false)),
		"managed fields":            encode(convert(managed, false)),
		"managed fields in a list":  encode(convert(managedList, false)),
		"metadata":                  encode(convert(named("a", "1"), true)),
		"a status":                  encode(&metav1.Status{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}, Reason: "Expired"}),
		"an unregistered type":      append(bytes.Clone(protobufPrefix), unregistered...),
		"an encoding of the object": append(bytes.Clone(protobufPrefix), compressed...),
		"half an object":            secret[:len(secret)/2],
		"only the prefix":           protobufPrefix,
		"no protobuf":               []byte("{}"),
		"nothing":                   nil,
	} {
		t.Run(name, func(t *testing.T) {
			want, wantKind, wantErr := info().Serializer.Decode(data, nil, nil)
			withoutManagedFields(want)
			input := bytes.Clone(data)
			got, kind, err := leanDecoder{info().Serializer, scheme.Scheme}.Decode(input, nil, nil)
			for i := range input {
				input[i] = 0xff // what was decoded must not refer to it
			}
			if (err == nil) != (wantErr == nil) {
				t.Errorf("error %v, want %v", err, wantErr)
			}
			if diff := cmp.Diff(wantKind, kind); diff != "" && wantErr == nil {
				t.Errorf("kind (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("object (-want +got):\n%s", diff)
			}
		})
	}
}

func withoutManagedFields(obj runtime.Object) {
	if m, err := meta.Accessor(obj); err == nil {
		m.SetManagedFields(nil)
	}
	if meta.IsListType(obj) {
		_ = meta.EachListItem(obj, func(item runtime.Object) error {
			withoutManagedFields(item)
			return nil
		})
	}
}

func TestLeanEventDecoderDecodesAsTheSerializerBelowIt(t *testing.T) {
	event := func(kind string, raw []byte) []byte {
		data, err := (&metav1.WatchEvent{Type: kind, Object: runtime.RawExtension{Raw: raw}}).Marshal()
		if err != nil {
			t.Fatal(err)
		}
		return data
	}
	added := event("ADDED", encode(convert(named("a", "1"), false)))
	for name, data := range map[string][]byte{
		"an event":             added,
		"a bookmark":           event("BOOKMARK", encode(convert(named("", "7"), false))),
		"an event of no type":  event("", []byte("object")),
		"no object":            event("ADDED", nil),
		"two objects":          append(bytes.Clone(added), added...),
		"an unknown field":     append(bytes.Clone(added), 0x1a, 0x01, 'x'),
		"a field of no length": append(bytes.Clone(added), 0x18, 0x01),
		"half an event":        added[:len(added)/2],
		"no protobuf":          []byte("{}"),
		"nothing":              nil,
	} {
		t.Run(name, func(t *testing.T) {
			var want, got metav1.WatchEvent
			_, _, wantErr := info().StreamSerializer.Decode(data, nil, &want)
			_, _, err := leanEventDecoder{info().StreamSerializer.Serializer}.Decode(data, nil, &got)
			if (err == nil) != (wantErr == nil) {
				t.Errorf("error %v, want %v", err, wantErr)
			}
			if wantErr == nil && (got.Type != want.Type || !bytes.Equal(got.Object.Raw, want.Object.Raw)) {
				t.Errorf("got %s of %q, want %s of %q", got.Type, got.Object.Raw, want.Type, want.Object.Raw)
			}
		})
	}
}
