// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"bytes"
	"slices"
	"strings"

	"google.golang.org/protobuf/encoding/protowire"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// protobufPrefix begins every object in protobuf. A message runtime.Unknown follows, with the object in
// its field raw, see "Kubernetes Protobuf encoding" in the API concepts of the Kubernetes documentation.
var protobufPrefix = []byte("k8s\x00")

// leanSerializer decodes objects and events in protobuf as the serializer below it, without the two
// copies of each object that are made in between: half of what an update of a large Secret allocates.
type leanSerializer struct {
	runtime.NegotiatedSerializer
	scheme *runtime.Scheme
}

func (s leanSerializer) SupportedMediaTypes() []runtime.SerializerInfo {
	infos := slices.Clone(s.NegotiatedSerializer.SupportedMediaTypes())
	for i := range infos {
		if infos[i].MediaType == runtime.ContentTypeProtobuf {
			infos[i].Serializer = leanDecoder{infos[i].Serializer, s.scheme}
			if stream := infos[i].StreamSerializer; stream != nil {
				lean := *stream
				lean.Serializer = leanEventDecoder{stream.Serializer}
				infos[i].StreamSerializer = &lean
			}
		}
	}
	return infos
}

type leanDecoder struct {
	runtime.Serializer
	scheme *runtime.Scheme
}

// Decode leaves to the serializer below it what it does not expect. It may change data, and the object
// has no managed fields. It does not refer to data: the generated Unmarshal copies what it keeps.
func (d leanDecoder) Decode(data []byte, defaults *schema.GroupVersionKind, into runtime.Object) (runtime.Object, *schema.GroupVersionKind, error) {
	gvk, raw, ok := openEnvelope(data)
	if !ok || into != nil {
		return d.Serializer.Decode(data, defaults, into)
	}
	obj, err := d.scheme.New(gvk)
	if err != nil {
		return nil, &gvk, err
	}
	message, ok := obj.(interface{ Unmarshal([]byte) error })
	if !ok {
		return d.Serializer.Decode(data, defaults, into)
	}
	hideManagedFields(raw, strings.HasSuffix(gvk.Kind, "List"))
	if err := message.Unmarshal(raw); err != nil {
		return nil, &gvk, err
	}
	obj.GetObjectKind().SetGroupVersionKind(gvk)
	return obj, &gvk, nil
}

// leanEventDecoder decodes the events of a watch.
type leanEventDecoder struct {
	runtime.Serializer
}

// Decode leaves to the serializer below it what it does not expect. The object of the event is part of
// data: client-go decodes it before it reads the next event into the same memory.
func (d leanEventDecoder) Decode(data []byte, defaults *schema.GroupVersionKind, into runtime.Object) (runtime.Object, *schema.GroupVersionKind, error) {
	if event, ok := into.(*metav1.WatchEvent); ok && openEvent(data, event) {
		return event, &schema.GroupVersionKind{}, nil
	}
	return d.Serializer.Decode(data, defaults, into)
}

// openEvent sets event to what data holds, and reports whether it could. The object is part of data.
func openEvent(data []byte, event *metav1.WatchEvent) bool {
	const typeField, object, rawField = 1, 2, 1 // numbers of fields
	var opened metav1.WatchEvent
	ok := len(data) > 0
	ok = eachField(data, func(number protowire.Number, wire protowire.Type, _, value []byte) {
		ok = ok && wire == protowire.BytesType
		switch number {
		case typeField:
			opened.Type = string(value)
		case object:
			ok = eachField(value, func(number protowire.Number, wire protowire.Type, _, value []byte) {
				ok = ok && number == rawField && wire == protowire.BytesType
				opened.Object.Raw = value
			}) && ok
		default:
			ok = false
		}
	}) && ok
	if ok {
		*event = opened
	}
	return ok
}

// openEnvelope returns the kind and the encoding of an object in protobuf, which is part of data.
func openEnvelope(data []byte) (gvk schema.GroupVersionKind, raw []byte, ok bool) {
	const typeMeta, rawField, apiVersion, kind = 1, 2, 1, 2 // numbers of fields
	message, ok := bytes.CutPrefix(data, protobufPrefix)
	ok = ok && eachField(message, func(number protowire.Number, wire protowire.Type, _, value []byte) {
		ok = ok && wire == protowire.BytesType
		switch number {
		case typeMeta:
			ok = eachField(value, func(number protowire.Number, wire protowire.Type, _, value []byte) {
				ok = ok && wire == protowire.BytesType
				switch number {
				case apiVersion:
					gv, err := schema.ParseGroupVersion(string(value))
					gvk.Group, gvk.Version, ok = gv.Group, gv.Version, ok && err == nil
				case kind:
					gvk.Kind = string(value)
				}
			}) && ok
		case rawField:
			raw = value
		default: // an encoding or a content type within protobuf
			ok = ok && len(value) == 0
		}
	}) && ok
	return gvk, raw, ok && gvk.Version != "" && gvk.Kind != ""
}

// hideManagedFields makes Unmarshal skip the managed fields of an object, or of each item of a list: it
// changes the number of that field within raw. Nobody gets the managed fields from the cache, and
// to decode them takes half of what an object of a few fields takes.
func hideManagedFields(raw []byte, list bool) {
	const metadata, items, managedFields, unused = 1, 2, 17, 31 // numbers of fields
	eachField(raw, func(number protowire.Number, wire protowire.Type, _, value []byte) {
		switch {
		case wire != protowire.BytesType:
		case list && number == items:
			hideManagedFields(value, false)
		case !list && number == metadata:
			eachField(value, func(number protowire.Number, wire protowire.Type, tag, _ []byte) {
				if hidden := protowire.EncodeTag(unused, wire); number == managedFields && len(tag) == protowire.SizeVarint(hidden) {
					protowire.AppendVarint(tag[:0], hidden)
				}
			})
		}
	})
}

// eachField calls f with the tag of each field of a message, and with its value if that has the wire
// type of bytes. It reports whether the message is complete.
func eachField(message []byte, f func(number protowire.Number, wire protowire.Type, tag, value []byte)) bool {
	for len(message) > 0 {
		number, wire, n := protowire.ConsumeTag(message)
		if n < 0 {
			return false
		}
		tag := message[:n]
		message = message[n:]
		size := protowire.ConsumeFieldValue(number, wire, message)
		if size < 0 {
			return false
		}
		var value []byte
		if wire == protowire.BytesType {
			value, _ = protowire.ConsumeBytes(message)
		}
		message = message[size:]
		f(number, wire, tag, value)
	}
	return true
}
