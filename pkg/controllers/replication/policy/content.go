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

// desiredContent returns what a target holds after a write; V is a value or the hash of a value. The
// replicator dialect keeps the target's content except for the replicated keys, and lays the source's content
// over it; each key is then in one section only. The other dialects replace everything.
func desiredContent[V any](dialect Dialect, source, target map[Slot]V, copied []string) map[Slot]V {
	if dialect != Replicator {
		return source
	}
	all := withoutKeys(target, append(slices.Clone(copied), keysOf(source)...))
	maps.Copy(all, source)
	return all
}

func withoutKeys[V any](content map[Slot]V, keys []string) map[Slot]V {
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

// copiedKeys returns the keys of a target that came from a source: all keys in a dialect that replaces
// everything.
func copiedKeys(target *Object, role role) []string {
	if role.kind == pushCopy && role.dialect != Replicator {
		return keysOf(target.Content)
	}
	return parseKeys(target.Annotations[replicatedKeys])
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

// overlayLabels returns the labels of a target without the labels that were copied before, and with the
// labels that are copied now.
func overlayLabels(labels map[string]string, before *marker, copied map[string]string) map[string]string {
	all := maps.Clone(labels)
	if all == nil {
		all = map[string]string{}
	}
	if before != nil {
		for _, key := range before.Labels {
			delete(all, key)
		}
	}
	maps.Copy(all, copied)
	return all
}

// Apply returns the target as the plan wants it. The source is nil for Strip and Empty, and the
// target is nil for Create. Apply changes neither.
func (e *Evaluator) Apply(plan *Plan, digester *Digester, key Key, source, target *Body, now time.Time) *Body {
	body := &Body{ObjectMeta: metav1.ObjectMeta{Namespace: key.Namespace, Name: key.Name}, Kind: key.Kind, Content: map[Slot][]byte{}}
	var before role
	var keys []string
	if target != nil && plan.Action != Recreate {
		body.ObjectMeta, body.Type, body.Immutable, body.Content = *target.DeepCopy(), target.Type, target.Immutable, target.Content
		described := digester.Describe(target)
		before = e.roleOf(described)
		if before.kind == unmarkedCopy {
			before.kind = pushCopy
		}
		keys = copiedKeys(described, before)
	} else if source != nil {
		body.Type = source.Type
	}
	if body.Annotations == nil {
		body.Annotations = map[string]string{}
	}
	if plan.Action == Strip || plan.Action == Empty {
		body.Content = withoutKeys(body.Content, keys)
		if plan.Action == Empty {
			body.Annotations[replicatedKeys] = ""
			return body
		}
		body.Labels = overlayLabels(body.Labels, before.marker, nil)
		for _, key := range append(slices.Clone(copyAnnotations[Replicator]), Marker) {
			delete(body.Annotations, key)
		}
		return body
	}
	m := &marker{Copy: key.NamespacedName.String(), Dialect: plan.Dialect, Mode: plan.Mode, Source: plan.Source.NamespacedName.String(), UID: string(source.UID)}
	if plan.Mode == Push && plan.Dialect == Replicator {
		labels := e.copiedLabels(source.Annotations, source.Labels)
		m.Labels = slices.Sorted(maps.Keys(labels))
		if plan.Action != Mark {
			if before.marker == nil && len(labels) > 0 {
				body.Labels = nil // the replicator replaces them too
			}
			body.Labels = overlayLabels(body.Labels, before.marker, labels)
		}
	}
	if plan.Action != Mark {
		body.Content = desiredContent(plan.Dialect, source.Content, body.Content, keys)
		setLegacyAnnotations(plan, body, source, now)
	}
	body.Annotations[Marker] = m.text()
	return body
}

// setLegacyAnnotations sets the annotations that the original of the dialect writes, so that the original can
// be put back, and removes the annotations of other dialects.
func setLegacyAnnotations(plan *Plan, body, source *Body, now time.Time) {
	for dialect, keys := range copyAnnotations {
		for _, key := range keys {
			if dialect != plan.Dialect && (plan.Mode == Push || key != reflects) {
				delete(body.Annotations, key)
			}
		}
	}
	switch plan.Dialect {
	case Reflector:
		body.Annotations[autoReflects] = map[Mode]string{Push: "True", Pull: "False"}[plan.Mode]
		body.Annotations[reflectedVersion] = source.ResourceVersion
		body.Annotations[reflectedAt] = now.UTC().Format("2006-01-02T15:04:05-07:00")
		if plan.Mode == Push {
			body.Annotations[reflects] = plan.Source.NamespacedName.String()
		}
	case Replicator:
		body.Annotations[replicatedAt] = now.UTC().Format(time.RFC3339)
		body.Annotations[replicatedFrom] = source.ResourceVersion
		body.Annotations[replicatedKeys] = strings.Join(keysOf(source.Content), ",")
	}
}
