// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"errors"
	"io"
	"reflect"
	"unsafe"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes/scheme"
)

// wipingSerializer overwrites what client-go decodes from, as soon as it is decoded: the buffer in which the
// decoder of a watch keeps the last event until a longer one comes, and the copies that it makes of the object
// in between.
type wipingSerializer struct {
	runtime.NegotiatedSerializer
}

func (s wipingSerializer) SupportedMediaTypes() []runtime.SerializerInfo {
	infos := s.NegotiatedSerializer.SupportedMediaTypes()
	wiping := make([]runtime.SerializerInfo, len(infos))
	for i, info := range infos {
		if info.MediaType == runtime.ContentTypeProtobuf {
			info.Serializer = wipingDecoder{info.Serializer}
		}
		if stream := info.StreamSerializer; stream != nil {
			wrapped := *stream
			wrapped.Framer = wipingFramer{stream.Framer}
			info.StreamSerializer = &wrapped
		}
		wiping[i] = info
	}
	return wiping
}

// wipingDecoder decodes from protobuf. What it returns shares no memory with data.
type wipingDecoder struct {
	runtime.Serializer
}

// Decode overwrites data, and the copy that it is decoded from.
func (d wipingDecoder) Decode(data []byte, defaults *schema.GroupVersionKind, into runtime.Object) (runtime.Object, *schema.GroupVersionKind, error) {
	defer clear(data)
	var content runtime.Unknown // holds the copy
	_, gvk, err := d.Serializer.Decode(data, defaults, &content)
	if err != nil {
		return nil, gvk, err
	}
	defer clear(content.Raw)
	obj, err := scheme.Scheme.New(*gvk)
	if err != nil {
		return nil, gvk, err
	}
	if into != nil && reflect.TypeOf(into) == reflect.TypeOf(obj) {
		obj = into
	}
	message, ok := obj.(interface{ Unmarshal([]byte) error })
	if !ok {
		return d.Serializer.Decode(data, defaults, into)
	}
	if err := message.Unmarshal(content.Raw); err != nil {
		return nil, gvk, err
	}
	obj.GetObjectKind().SetGroupVersionKind(*gvk)
	dropLastApplied(obj)
	return obj, gvk, nil
}

// dropLastApplied overwrites the annotation of a Secret that has just been decoded in which kubectl keeps the
// whole of what it applied. Nobody else has that string.
func dropLastApplied(obj runtime.Object) {
	secret, ok := obj.(*corev1.Secret)
	if !ok {
		return
	}
	if value := secret.Annotations[corev1.LastAppliedConfigAnnotation]; value != "" {
		delete(secret.Annotations, corev1.LastAppliedConfigAnnotation)
		clear(unsafe.Slice(unsafe.StringData(value), len(value)))
	}
}

type wipingFramer struct {
	runtime.Framer
}

func (f wipingFramer) NewFrameReader(r io.ReadCloser) io.ReadCloser {
	return &wipingReader{ReadCloser: f.Framer.NewFrameReader(r)}
}

// wipingReader relies on how the decoder reads: it passes its whole buffer for the beginning of a frame, and for
// the continuation of one that did not fit the rest of a buffer twice as long, which begins with a copy.
type wipingReader struct {
	io.ReadCloser
	frame     []byte // what of the last frame is in the decoder's buffer
	continues bool
}

// Read overwrites the last frame, which has been decoded by now, before it waits for the next one.
func (r *wipingReader) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return r.ReadCloser.Read(p)
	}
	begin, used := &p[0], 0
	// Of a frame that is too long for it the decoder reads on into the whole of its buffer.
	if r.continues && begin != &r.frame[0] {
		used = len(r.frame)
		begin = (*byte)(unsafe.Add(unsafe.Pointer(begin), -used))
	}
	if len(r.frame) > 0 && (used == 0 || begin != &r.frame[0]) {
		clear(r.frame)
	}
	n, err := r.ReadCloser.Read(p)
	r.frame = unsafe.Slice(begin, used+n)
	r.continues = errors.Is(err, io.ErrShortBuffer) && len(r.frame) > 0
	return n, err
}
