// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"bytes"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
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
	secret := encode(convert(named("a", "1"), false))
	for name, data := range map[string][]byte{
		"a Secret":                  secret,
		"a list":                    encode(convert(list, false)),
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
