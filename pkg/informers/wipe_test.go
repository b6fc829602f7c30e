// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"testing"
	"unsafe"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	proto "k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	"k8s.io/apimachinery/pkg/runtime/serializer/streaming"
	"k8s.io/client-go/kubernetes/scheme"
)

func isZero(b []byte) bool { return len(bytes.Trim(b, "\x00")) == 0 }

// withKind encodes as the server does.
func withKind(e runtime.Encoder) runtime.Encoder {
	return runtime.WithVersionEncoder{Version: corev1.SchemeGroupVersion, Encoder: e, ObjectTyper: scheme.Scheme}
}

func TestTheDecoderOverwritesWhatItDecodesFrom(t *testing.T) {
	plain := proto.NewSerializer(scheme.Scheme, scheme.Scheme)
	secret := named("a", "planted")
	secret.Annotations = map[string]string{"k": "v"}
	list := &corev1.SecretList{Items: []corev1.Secret{*secret}}
	status := &metav1.Status{Message: "gone"}
	for name, tc := range map[string]struct {
		in, into runtime.Object
	}{
		"an object":                          {in: secret},
		"a list":                             {in: list},
		"a list into one":                    {in: list, into: &corev1.SecretList{}},
		"a status where a list was expected": {in: status, into: &corev1.SecretList{}},
	} {
		t.Run(name, func(t *testing.T) {
			data, err := runtime.Encode(withKind(plain), tc.in)
			if err != nil {
				t.Fatal(err)
			}
			want, wantKind, err := plain.Decode(bytes.Clone(data), nil, nil)
			if err != nil {
				t.Fatal(err)
			}
			got, gotKind, err := wipingDecoder{plain}.Decode(data, nil, tc.into)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff([]any{want, wantKind}, []any{got, gotKind}); diff != "" {
				t.Errorf("decoded (-want +got):\n%s", diff)
			}
			if _, isList := tc.into.(*corev1.SecretList); isList && (got == tc.into) != (tc.in == list) {
				t.Errorf("decoded into %p, given %p", got, tc.into)
			}
			if !isZero(data) {
				t.Errorf("the data is still %q", data)
			}
		})
	}
	for name, data := range map[string][]byte{
		"data that is no protobuf": []byte("{}"),
		"no data":                  nil,
		"an unknown kind":          unknownKind(t),
	} {
		t.Run(name, func(t *testing.T) {
			if _, _, err := (wipingDecoder{plain}).Decode(data, nil, nil); err == nil {
				t.Error("no error")
			}
		})
	}
}

func unknownKind(t *testing.T) []byte {
	t.Helper()
	body, err := (&runtime.Unknown{TypeMeta: runtime.TypeMeta{APIVersion: "v1", Kind: "Nothing"}, Raw: []byte{0}}).Marshal()
	if err != nil {
		t.Fatal(err)
	}
	return append([]byte("k8s\x00"), body...)
}

func TestTheDecoderOverwritesWhatKubectlLeavesInAnAnnotation(t *testing.T) {
	plain := proto.NewSerializer(scheme.Scheme, scheme.Scheme)
	secret := named("a", "planted")
	secret.Annotations = map[string]string{corev1.LastAppliedConfigAnnotation: "{}", "k": "v"}
	data, err := runtime.Encode(withKind(plain), secret)
	if err != nil {
		t.Fatal(err)
	}
	got, _, err := wipingDecoder{plain}.Decode(data, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(map[string]string{"k": "v"}, got.(*corev1.Secret).Annotations); diff != "" {
		t.Errorf("annotations (-want +got):\n%s", diff)
	}

	value := string(append([]byte(nil), "planted"...)) // on the heap
	memory := unsafe.Slice(unsafe.StringData(value), len(value))
	dropLastApplied(&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{corev1.LastAppliedConfigAnnotation: value}}})
	if !isZero(memory) {
		t.Errorf("the annotation is still %q", memory)
	}
}

// keeper is a decoder that remembers the memory that it was given.
type keeper struct {
	runtime.Decoder
	given []byte
}

func (k *keeper) Decode(data []byte, _ *schema.GroupVersionKind, into runtime.Object) (runtime.Object, *schema.GroupVersionKind, error) {
	k.given = data
	return into, nil, nil
}

// spy remembers the memory that is read into.
type spy struct {
	io.Reader
	buffers [][]byte
}

func (s *spy) Read(p []byte) (int, error) {
	n, err := s.Reader.Read(p)
	if n > 4 { // not the length of a frame
		s.buffers = append(s.buffers, p[:n])
	}
	return n, err
}

func (s *spy) Close() error { return nil }

func TestNoFrameOfAWatchStaysInABuffer(t *testing.T) {
	var stream bytes.Buffer
	frame := func(size int) []byte { return bytes.Repeat([]byte("x"), size) }
	const tooLong = 17 << 20 // of which the decoder says so, and which it skips before the next one
	sizes := []int{100, 1024, 1025, 10, 9000, 5, 70_000, tooLong, 3, 40_000}
	for _, size := range sizes {
		_ = binary.Write(&stream, binary.BigEndian, uint32(size))
		stream.Write(frame(size))
	}
	source, kept := &spy{Reader: &stream}, &keeper{}
	d := streaming.NewDecoder(wipingFramer{proto.LengthDelimitedFramer}.NewFrameReader(source), kept)
	for _, size := range sizes {
		var want error
		if size == tooLong {
			want = streaming.ErrObjectTooLarge
		}
		if _, _, err := d.Decode(nil, nil); !errors.Is(err, want) {
			t.Fatalf("%d bytes: %v", size, err)
		}
		if want == nil && !bytes.Equal(kept.given, frame(size)) {
			t.Fatalf("%d bytes instead of %d", len(kept.given), size)
		}
	}
	if _, _, err := d.Decode(nil, nil); !errors.Is(err, io.EOF) {
		t.Fatalf("at the end: %v", err)
	}
	for i, buffer := range source.buffers {
		if !isZero(buffer) {
			t.Errorf("read %d of %d bytes is still in memory", i, len(buffer))
		}
	}
}
