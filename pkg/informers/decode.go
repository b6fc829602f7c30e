// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	stdjson "encoding/json"
	"fmt"
	"strings"

	metainternalversion "k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/json"

	"github.com/quartermaster-dev/quartermaster/internal/panics"
)

// misfit is the metadata of an object that does not fit its Go type: a CustomResourceDefinition may
// permit more than the type does, such as the time 2024-01-01t00:00:00z. Or the server sent another kind.
type misfit struct {
	metav1.PartialObjectMetadata
	err error
}

// tolerant decodes an object in JSON that does not fit its Go type as a misfit, alone or in a list.
// Otherwise anybody who may create such an object could stop the cache of all objects.
type tolerant struct{ runtime.NegotiatedSerializer }

func (t tolerant) DecoderToVersion(d runtime.Decoder, gv runtime.GroupVersioner) runtime.Decoder {
	return tolerantDecoder{t.NegotiatedSerializer.DecoderToVersion(d, gv)}
}

type tolerantDecoder struct{ runtime.Decoder }

// decode makes a panic, such as one of a Go type's own UnmarshalJSON, an error with the stack. It is not
// logged here: a tenant can bring it about with each write, and a misfit is logged once.
func (d tolerantDecoder) decode(
	data []byte, defaults *schema.GroupVersionKind, into runtime.Object,
) (obj runtime.Object, gvk *schema.GroupVersionKind, err error) {
	stack, panicked := panics.Recover(func() error { obj, gvk, err = d.Decoder.Decode(data, defaults, into); return nil })
	if stack != nil {
		err = fmt.Errorf("%w\n%s", panicked, stack)
	}
	return obj, gvk, err
}

func (d tolerantDecoder) Decode(
	data []byte, defaults *schema.GroupVersionKind, into runtime.Object,
) (runtime.Object, *schema.GroupVersionKind, error) {
	obj, gvk, err := d.decode(data, defaults, into)
	if err == nil || into != nil || runtime.IsNotRegisteredError(err) { // the scheme lacks the type of all objects
		return obj, gvk, err
	}
	// As client-go decodes: "Metadata" is another field than "metadata", and a CRD may keep both.
	var raw struct {
		metav1.TypeMeta `json:",inline"`
		Metadata        struct {
			metav1.ListMeta `json:",inline"`
			Name            string `json:"name"`
		} `json:"metadata"`
		Items stdjson.RawMessage `json:"items"`
	}
	if json.Unmarshal(data, &raw) != nil {
		return obj, gvk, err
	}
	if raw.Items == nil || raw.Metadata.Name != "" { // an object may have a field items, a list has no name
		m := &misfit{err: err}
		if json.Unmarshal(data, &m.PartialObjectMetadata) != nil || m.Name == "" {
			return obj, gvk, err
		}
		return m, gvk, nil
	}
	var items []stdjson.RawMessage
	if json.Unmarshal(raw.Items, &items) != nil {
		return obj, gvk, err
	}
	list := &metainternalversion.List{ListMeta: raw.Metadata.ListMeta}
	kind := raw.GroupVersionKind()
	kind.Kind = strings.TrimSuffix(kind.Kind, "List")
	for _, item := range items {
		obj, _, err := d.Decode(item, &kind, nil)
		if err != nil {
			return nil, gvk, err
		}
		list.Items = append(list.Items, obj)
	}
	return list, gvk, nil
}
