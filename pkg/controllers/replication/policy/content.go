// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/internal/glob"
)

// Body is a Secret or ConfigMap with its values. It is read live for one write and not kept.
type Body struct {
	metav1.ObjectMeta
	Kind      Kind
	Type      string
	Immutable *bool
	Content   map[Slot][]byte
}

// Key returns the object's key.
func (b *Body) Key() Key { return NewKey(b.Kind, b.Namespace, b.Name) }

// NewBody returns the body of a Secret or ConfigMap; nil for anything else.
func NewBody(obj runtime.Object) *Body {
	b := &Body{Content: map[Slot][]byte{}}
	switch o := obj.(type) {
	case *corev1.Secret:
		b.ObjectMeta, b.Kind, b.Type, b.Immutable = o.ObjectMeta, Secret, string(o.Type), o.Immutable
		for key, value := range o.Data {
			b.Content[Slot(inData+key)] = value
		}
	case *corev1.ConfigMap:
		b.ObjectMeta, b.Kind, b.Immutable = o.ObjectMeta, ConfigMap, o.Immutable
		for key, value := range o.Data {
			b.Content[Slot(inData+key)] = []byte(value)
		}
		for key, value := range o.BinaryData {
			b.Content[Slot(inBinaryData+key)] = value
		}
	default:
		return nil
	}
	return b
}

// Secret returns the body as a Secret.
func (b *Body) Secret() *corev1.Secret {
	s := &corev1.Secret{ObjectMeta: b.ObjectMeta, Type: corev1.SecretType(b.Type), Immutable: b.Immutable, Data: map[string][]byte{}}
	for slot, value := range b.Content {
		s.Data[slot.key()] = value
	}
	return s
}

// ConfigMap returns the body as a ConfigMap.
func (b *Body) ConfigMap() *corev1.ConfigMap {
	cm := &corev1.ConfigMap{ObjectMeta: b.ObjectMeta, Immutable: b.Immutable, Data: map[string]string{}, BinaryData: map[string][]byte{}}
	for slot, value := range b.Content {
		if strings.HasPrefix(string(slot), inBinaryData) {
			cm.BinaryData[slot.key()] = value
		} else {
			cm.Data[slot.key()] = string(value)
		}
	}
	return cm
}

// desired returns what a target holds after a write, of values or of their hashes. The replicator
// dialect keeps the target's content except for the replicated keys, and lays the source's content over
// it; a key is in one section only. The other dialects replace everything.
func desired[V any](d Dialect, source, target map[Slot]V, replicated []string) map[Slot]V {
	if d != Replicator {
		return source
	}
	all := without(target, append(slices.Clone(replicated), keysOf(source)...))
	maps.Copy(all, source)
	return all
}

func without[V any](content map[Slot]V, keys []string) map[Slot]V {
	rest := maps.Clone(content)
	if rest == nil {
		rest = map[Slot]V{}
	}
	for _, key := range keys {
		delete(rest, Slot(inData+key))
		delete(rest, Slot(inBinaryData+key))
	}
	return rest
}

func keysOf[V any](content map[Slot]V) []string {
	keys := make([]string, 0, len(content))
	for slot := range content {
		keys = append(keys, slot.key())
	}
	slices.Sort(keys)
	return keys
}

// replicated returns the keys of a target that came from a source: all keys in a dialect that replaces
// everything.
func replicated(target *Object, role role) []string {
	if role.kind == pushCopy && role.dialect != Replicator {
		return keysOf(target.Content)
	}
	return keyList(target.Annotations[replicatedKeys])
}

// copiedLabels returns the labels of a source that a replicator push copies.
func (e *Evaluator) copiedLabels(annotations, labels map[string]string) map[string]string {
	if strip, has := annotations[stripLabels]; has && strip != "false" {
		return nil
	}
	labels = maps.Clone(labels)
	maps.DeleteFunc(labels, func(key, value string) bool {
		return glob.MatchAny(e.DeniedLabels, key) || key == "owner" && value == "helm" // Helm finds its releases by this label alone
	})
	return labels
}

// overlaid returns the labels of a target without the labels that were copied before, and with the labels
// that are copied now.
func overlaid(labels map[string]string, before *marker, now map[string]string) map[string]string {
	all := maps.Clone(labels)
	if all == nil {
		all = map[string]string{}
	}
	if before != nil {
		for _, key := range before.Labels {
			delete(all, key)
		}
	}
	maps.Copy(all, now)
	return all
}

// Apply returns the target as the plan wants it. The source is nil for Strip and Empty, and the
// target is nil for Create. Apply changes neither.
func (e *Evaluator) Apply(p *Plan, d *Digester, key Key, source, target *Body, now time.Time) *Body {
	b := &Body{ObjectMeta: metav1.ObjectMeta{Namespace: key.Namespace, Name: key.Name}, Kind: key.Kind, Content: map[Slot][]byte{}}
	var was role
	var keys []string
	if target != nil && p.Action != Recreate {
		b.ObjectMeta, b.Type, b.Immutable, b.Content = *target.DeepCopy(), target.Type, target.Immutable, target.Content
		described := d.Describe(target)
		was = e.roleOf(described)
		if was.kind == unmarkedCopy {
			was.kind = pushCopy
		}
		keys = replicated(described, was)
	} else if source != nil {
		b.Type = source.Type
	}
	if b.Annotations == nil {
		b.Annotations = map[string]string{}
	}
	if p.Action == Strip || p.Action == Empty {
		b.Content = without(b.Content, keys)
		if p.Action == Empty {
			b.Annotations[replicatedKeys] = ""
			return b
		}
		b.Labels = overlaid(b.Labels, was.marker, nil)
		for _, key := range append(slices.Clone(written[Replicator]), Marker) {
			delete(b.Annotations, key)
		}
		return b
	}
	m := &marker{Copy: key.NamespacedName.String(), Dialect: p.Dialect, Mode: p.Mode, Source: p.Source.NamespacedName.String(), UID: string(source.UID)}
	if p.Mode == Push && p.Dialect == Replicator {
		labels := e.copiedLabels(source.Annotations, source.Labels)
		m.Labels = slices.Sorted(maps.Keys(labels))
		if p.Action != Mark {
			if was.marker == nil && len(labels) > 0 {
				b.Labels = nil // the replicator replaces them too
			}
			b.Labels = overlaid(b.Labels, was.marker, labels)
		}
	}
	if p.Action != Mark {
		b.Content = desired(p.Dialect, source.Content, b.Content, keys)
		legacy(p, b, source, now)
	}
	b.Annotations[Marker] = m.text()
	return b
}

// legacy sets the annotations that the original of the dialect writes, so that the original can be put
// back, and removes the annotations of other dialects.
func legacy(p *Plan, b, source *Body, now time.Time) {
	for d, keys := range written {
		for _, key := range keys {
			if d != p.Dialect && (p.Mode == Push || key != reflects) {
				delete(b.Annotations, key)
			}
		}
	}
	switch p.Dialect {
	case Reflector:
		b.Annotations[autoReflects] = map[Mode]string{Push: "True", Pull: "False"}[p.Mode]
		b.Annotations[reflectedVersion] = source.ResourceVersion
		b.Annotations[reflectedAt] = now.UTC().Format("2006-01-02T15:04:05-07:00")
		if p.Mode == Push {
			b.Annotations[reflects] = p.Source.NamespacedName.String()
		}
	case Replicator:
		b.Annotations[replicatedAt] = now.UTC().Format(time.RFC3339)
		b.Annotations[replicatedFrom] = source.ResourceVersion
		b.Annotations[replicatedKeys] = strings.Join(keysOf(source.Content), ",")
	}
}
