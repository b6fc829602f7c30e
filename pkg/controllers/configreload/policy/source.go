// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/util/resourceversion"
)

// SourceType is the type of a source.
type SourceType int

// The types of sources.
const (
	ConfigMap SourceType = iota
	Secret
	// SecretProviderClass is a class of secrets that a CSI driver mounts.
	SecretProviderClass
	NumTypes
)

// SourceTypes are all types.
var SourceTypes = []SourceType{ConfigMap, Secret, SecretProviderClass}

// String returns the type as used in keys of the state and in metrics.
func (t SourceType) String() string {
	return [NumTypes]string{"configmap", "secret", "secretproviderclass"}[t]
}

// markType returns the type as used in marks.
func (t SourceType) markType() string { return strings.ToUpper(t.Kind()) }

// Kind returns the type as people write it.
func (t SourceType) Kind() string {
	return [NumTypes]string{"ConfigMap", "Secret", "SecretProviderClass"}[t]
}

// SourceKey names a source in the namespace of the workload at hand.
type SourceKey struct {
	Type SourceType
	Name string
}

// String returns the key as used in the state.
func (k SourceKey) String() string { return k.Type.String() + "/" + k.Name }

// MarshalText returns String, for what the cache keeps of a workload.
func (k SourceKey) MarshalText() ([]byte, error) { return []byte(k.String()), nil }

// UnmarshalText reads what MarshalText writes. The name may be empty, since the API server does not
// require one in env.
func (k *SourceKey) UnmarshalText(text []byte) error {
	t, name, _ := strings.Cut(string(text), "/")
	i := slices.IndexFunc(SourceTypes, func(s SourceType) bool { return s.String() == t })
	if i < 0 {
		return fmt.Errorf("%q does not begin with the type of a source", text)
	}
	*k = SourceKey{SourceTypes[i], name}
	return nil
}

func compareKeys(a, b SourceKey) int {
	return cmp.Or(cmp.Compare(a.Type, b.Type), strings.Compare(a.Name, b.Name))
}

// parseSourceKey reads what String writes.
func parseSourceKey(text string) (SourceKey, bool) {
	var key SourceKey
	err := key.UnmarshalText([]byte(text))
	return key, err == nil && key.Name != ""
}

// Source is what the decision needs of a source. The zero value is absent. A source that does not
// count is absent too, but its version is known.
type Source struct {
	Hash    string // 40 hex digits; empty if it does not exist
	Ignored bool
	Matched bool
	Version string // resourceVersion
	// ChangedVersion is the version at which this process last saw the data change; empty if it did not.
	ChangedVersion string
}

// Same reports whether another version has the same data, and they count in the same way.
func (s Source) Same(o Source) bool {
	return s.Hash == o.Hash && s.Ignored == o.Ignored && s.Matched == o.Matched
}

// Exists reports whether the source exists and counts.
func (s Source) Exists() bool { return s.Hash != "" }

// RecordedHash returns the hash as recorded in the state; empty for an absent source.
func (s Source) RecordedHash() string { return s.Hash[:min(len(s.Hash), stateDigits)] }

// Newer reports whether version a is later than b. It is false if one of them is unknown.
func Newer(a, b string) bool {
	order, err := resourceversion.CompareResourceVersion(a, b)
	return err == nil && order > 0
}
