// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"fmt"
	"maps"
	"slices"
)

// Native annotations.
const (
	// StateKey holds what is recorded of a workload's sources.
	StateKey = "quartermaster.dev/reload-state"

	nativeReload = "quartermaster.dev/reload"
	nativeDelay  = "quartermaster.dev/reload-delay"
	nativeMark   = "quartermaster.dev/reloaded-from"

	reloadOff  = "off"
	reloadAuto = "auto"
)

// Annotations of stakater/Reloader (the original) whose keys cannot be replaced.
const (
	compatMark     = "reloader.stakater.com/last-reloaded-from"
	compatStrategy = "reloader.stakater.com/rollout-strategy"
	csiPrefix      = "secretproviderclass.reloader.stakater.com"
)

// defaultKeys maps a logical name, which is the name of the original's flag without "-annotation",
// to the original's annotation key.
var defaultKeys = map[string]string{
	"configmap":             "configmap.reloader.stakater.com/reload",
	"secret":                "secret.reloader.stakater.com/reload",
	"auto":                  "reloader.stakater.com/auto",
	"configmap-auto":        "configmap.reloader.stakater.com/auto",
	"secret-auto":           "secret.reloader.stakater.com/auto",
	"auto-search":           "reloader.stakater.com/search",
	"search-match":          "reloader.stakater.com/match",
	"ignore":                "reloader.stakater.com/ignore",
	"pause-deployment":      "deployment.reloader.stakater.com/pause-period",
	"pause-deployment-time": "deployment.reloader.stakater.com/paused-at",
}

// LogicalNames returns the names of the annotations whose keys can be replaced.
func LogicalNames() []string { return slices.Sorted(maps.Keys(defaultKeys)) }

// CheckKey returns an error if the replacement key of a logical annotation is already the key of another.
func (o *Options) CheckKey(logical string) error {
	key := o.AnnotationKeys[logical]
	k := NewAnnotationKeys(&Options{Compat: true}, nil)
	fixed := slices.Concat([]string{StateKey, nativeReload, nativeDelay, nativeMark, compatMark, compatStrategy}, k.exclude[:],
		[]string{k.typedAuto[SecretProviderClass], k.reload[SecretProviderClass]})
	if slices.Contains(fixed, key) {
		return fmt.Errorf("%s: %q has a meaning that cannot be replaced", logical, key)
	}
	for _, other := range LogicalNames() {
		if replaced, ok := o.AnnotationKeys[other]; other != logical && (ok && replaced == key || !ok && defaultKeys[other] == key) {
			return fmt.Errorf("%s: %q is the key of %s", logical, key, other)
		}
	}
	return nil
}

// AnnotationKeys are the annotation keys that count.
type AnnotationKeys struct {
	compat, autoAll                             bool
	ignoredTypes                                [NumTypes]bool
	auto, search, match, ignore, pause, pauseAt string
	typedAuto, reload, exclude                  [NumTypes]string
	// selectionKeys are the keys from which the selection of a workload is parsed; workloadKeys are all keys
	// that are read of a workload.
	selectionKeys, workloadKeys []string
}

// NewAnnotationKeys returns the keys of the options. Sources of the types that are not watched never match.
func NewAnnotationKeys(o *Options, watched []SourceType) *AnnotationKeys {
	keyOf := func(logical string) string {
		if key, ok := o.AnnotationKeys[logical]; ok {
			return key
		}
		return defaultKeys[logical]
	}
	k := &AnnotationKeys{
		compat: o.Compat, autoAll: o.AutoAll,
		auto: keyOf("auto"), search: keyOf("auto-search"), match: keyOf("search-match"), ignore: keyOf("ignore"),
		pause: keyOf("pause-deployment"), pauseAt: keyOf("pause-deployment-time"),
		typedAuto: [NumTypes]string{keyOf("configmap-auto"), keyOf("secret-auto"), csiPrefix + "/auto"},
		reload:    [NumTypes]string{keyOf("configmap"), keyOf("secret"), csiPrefix + "/reload"},
		exclude: [NumTypes]string{
			"configmaps.exclude.reloader.stakater.com/reload",
			"secrets.exclude.reloader.stakater.com/reload",
			"secretproviderclasses.exclude.reloader.stakater.com/reload",
		},
		selectionKeys: []string{nativeReload, nativeDelay},
	}
	for _, typ := range SourceTypes {
		k.ignoredTypes[typ] = !slices.Contains(watched, typ)
	}
	if o.Compat {
		k.selectionKeys = append(k.selectionKeys, k.auto, k.search, k.pause)
		k.selectionKeys = slices.Concat(k.selectionKeys, k.typedAuto[:], k.reload[:], k.exclude[:])
	}
	// A workload may carry the mark under either strategy's key, also without compat.
	k.workloadKeys = slices.Concat(k.selectionKeys, []string{StateKey, nativeMark, compatMark})
	if o.Compat {
		k.workloadKeys = append(k.workloadKeys, compatStrategy, k.pauseAt)
	}
	return k
}

// SourceKeys returns the keys that the cache must keep of sources.
func (k *AnnotationKeys) SourceKeys() []string {
	list := []string{nativeReload}
	if k.compat {
		list = append(list, k.ignore, k.match)
	}
	return list
}

// WorkloadKeys returns the keys that the cache must keep of workloads and, through
// [AnnotationKeys.DigestWorkload], of their pod templates.
func (k *AnnotationKeys) WorkloadKeys() []string { return k.workloadKeys }

// RequestsCSI reports whether an annotation asks for CSI secrets.
func (k *AnnotationKeys) RequestsCSI(workload *Workload) bool {
	const t = SecretProviderClass
	return k.compat && slices.ContainsFunc([]string{k.typedAuto[t], k.reload[t], k.exclude[t]}, func(key string) bool {
		_, ok := annotationOrTemplate(workload.Annotations, workload.TemplateAnnotations, key)
		return ok
	})
}

// Flags reads the annotations of a source.
func (k *AnnotationKeys) Flags(annotations map[string]string) (ignored, matched bool) {
	ignored = annotations[nativeReload] == reloadOff
	if k.compat {
		ignored = ignored || annotations[k.ignore] == "true"
		matched = annotations[k.match] == "true"
	}
	return ignored, matched
}
