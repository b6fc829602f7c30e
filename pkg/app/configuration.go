// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"strings"

	"github.com/spf13/pflag"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	cliflag "k8s.io/component-base/cli/flag"
)

// ManagerConfiguration is the effective configuration as /configz shows it: per group of flags, each flag's value
// under its name in camel case. It derives from the flags, so that no second list of them can drift away.
type ManagerConfiguration struct {
	metav1.TypeMeta `json:",inline"`
	Settings        map[string]map[string]any `json:"settings"`
}

// GroupVersion is the API group of the manager's own kinds.
var groupVersion = schema.GroupVersion{Group: "quartermaster.dev", Version: "v1alpha1"}

func newManagerConfiguration(sets cliflag.NamedFlagSets) *ManagerConfiguration {
	c := &ManagerConfiguration{
		TypeMeta: metav1.TypeMeta{APIVersion: groupVersion.String(), Kind: "ManagerConfiguration"},
		Settings: map[string]map[string]any{},
	}
	for _, name := range sets.Order {
		group := map[string]any{}
		sets.FlagSets[name].VisitAll(func(f *pflag.Flag) {
			if f.Deprecated == "" {
				group[camelCase(f.Name)] = flagValue(f.Value)
			}
		})
		c.Settings[camelCase(strings.ReplaceAll(name, " ", "-"))] = group
	}
	return c
}

// DeepCopyObject implements runtime.Object. The values are never changed after they were read from the flags.
func (c *ManagerConfiguration) DeepCopyObject() runtime.Object {
	out := *c
	return &out
}

func flagValue(v pflag.Value) any {
	if s, ok := v.(pflag.SliceValue); ok {
		return s.GetSlice()
	}
	switch v.Type() {
	case "bool":
		return v.String() == "true"
	default:
		return v.String()
	}
}

// camelCase turns "leader-elect-lease-duration" into "leaderElectLeaseDuration".
func camelCase(name string) string {
	words := strings.Split(name, "-")
	for i, w := range words[1:] {
		if w != "" {
			words[i+1] = strings.ToUpper(w[:1]) + w[1:]
		}
	}
	return strings.Join(words, "")
}
