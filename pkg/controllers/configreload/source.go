// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package configreload

import (
	"cmp"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
)

// sourceType is the type of a source.
type sourceType int

const (
	configMap sourceType = iota
	secret
)

var sourceTypes = []sourceType{configMap, secret}

// String returns the type as used in keys of the state and in metrics.
func (t sourceType) String() string { return [...]string{"configmap", "secret"}[t] }

// mark returns the type as used in marks.
func (t sourceType) mark() string { return strings.ToUpper(t.String()) }

// kind returns the type as people write it.
func (t sourceType) kind() string { return [...]string{"ConfigMap", "Secret"}[t] }

func (t sourceType) resource() schema.GroupVersionResource {
	return corev1.SchemeGroupVersion.WithResource(t.String() + "s")
}

// sourceKey names a source in the namespace of the workload at hand.
type sourceKey struct {
	typ  sourceType
	name string
}

// String returns the key as used in the state.
func (k sourceKey) String() string { return k.typ.String() + "/" + k.name }

// MarshalText returns String, for what the cache keeps of a workload.
func (k sourceKey) MarshalText() ([]byte, error) { return []byte(k.String()), nil }

// UnmarshalText reads what MarshalText writes. The name may be empty, since the API server does not
// require one in env.
func (k *sourceKey) UnmarshalText(text []byte) error {
	t, name, _ := strings.Cut(string(text), "/")
	at := slices.IndexFunc(sourceTypes, func(s sourceType) bool { return s.String() == t })
	if at < 0 {
		return fmt.Errorf("%q is not configmap/NAME or secret/NAME", text)
	}
	*k = sourceKey{sourceTypes[at], name}
	return nil
}

func compareKeys(a, b sourceKey) int {
	return cmp.Or(cmp.Compare(a.typ, b.typ), strings.Compare(a.name, b.name))
}

// parseSourceKey reads what String writes.
func parseSourceKey(text string) (sourceKey, bool) {
	var key sourceKey
	err := key.UnmarshalText([]byte(text))
	return key, err == nil && key.name != ""
}

// Source is what the controller reads of a cached ConfigMap or Secret.
type Source interface {
	GetNamespace() string
	GetName() string
	GetUID() types.UID
	GetResourceVersion() string
	// GetAnnotations returns at least those of SourceAnnotations.
	GetAnnotations() map[string]string
	// Digest returns the result of SourceDigest for the controller's Name; nil if the object does
	// not count.
	Digest(of string) []byte
}

// source is what the decision needs of a source. The zero value is absent. A source that does not
// count is absent too, but its version is known.
type source struct {
	hash    string // 40 hex digits; empty if it does not exist
	ignored bool
	matched bool
	version string // resourceVersion
}

func (s source) exists() bool { return s.hash != "" }

// short returns the hash as recorded in the state; empty for an absent source.
func (s source) short() string { return s.hash[:min(len(s.hash), stateDigits)] }

func (k *keys) source(obj Source) source {
	if obj == nil {
		return source{}
	}
	hash := obj.Digest(Name)
	if hash == nil {
		return source{version: obj.GetResourceVersion()}
	}
	a := obj.GetAnnotations()
	s := source{hash: hex.EncodeToString(hash), version: obj.GetResourceVersion()}
	s.ignored = a[nativeReload] == reloadOff
	if k.compat {
		s.ignored = s.ignored || a[k.ignore] == "true"
		s.matched = a[k.match] == "true"
	}
	return s
}
