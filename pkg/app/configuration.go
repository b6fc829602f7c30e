// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"bytes"
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"strings"

	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	cliflag "k8s.io/component-base/cli/flag"
)

// groupVersion is the API group of the manager's own kinds.
var groupVersion = schema.GroupVersion{Group: "quartermaster.dev", Version: "v1alpha1"}

const configurationKind = "ManagerConfiguration"

// ManagerConfiguration is the configuration as --config reads it, and as --print-effective-config and /configz show
// it: per group of flags in --help, each flag's value under its name in camel case. It derives from the flags, so that
// no second list of them can drift away.
type ManagerConfiguration struct {
	metav1.TypeMeta
	Groups []SettingGroup
}

// SettingGroup is one group of flags, such as leaderElection.
type SettingGroup struct {
	Name     string
	Settings []Setting
}

// Setting is the value of one flag: a bool, an int64, a float64, a string, a []any of strings or int64s, or a
// map[string]any of strings or bools.
type Setting struct {
	Name  string
	Value any
}

func newManagerConfiguration(sets cliflag.NamedFlagSets) *ManagerConfiguration {
	c := &ManagerConfiguration{TypeMeta: metav1.TypeMeta{APIVersion: groupVersion.String(), Kind: configurationKind}}
	for _, name := range configurable(sets) {
		group := SettingGroup{Name: camelCase(name)}
		sets.FlagSets[name].VisitAll(func(f *pflag.Flag) {
			if f.Deprecated == "" {
				group.Settings = append(group.Settings, Setting{camelCase(f.Name), flagValue(f)})
			}
		})
		c.Groups = append(c.Groups, group)
	}
	return c
}

// configurable lists the groups of flags that are part of the configuration: all but those about the command line.
func configurable(sets cliflag.NamedFlagSets) []string {
	return slices.DeleteFunc(slices.Clone(sets.Order), func(name string) bool { return name == configurationFlags || name == globalFlags })
}

// DeepCopyObject implements runtime.Object. Values are never changed after they were read.
func (c *ManagerConfiguration) DeepCopyObject() runtime.Object { return c.copy() }

func (c *ManagerConfiguration) copy() *ManagerConfiguration {
	out := &ManagerConfiguration{TypeMeta: c.TypeMeta, Groups: slices.Clone(c.Groups)}
	for i := range out.Groups {
		out.Groups[i].Settings = slices.Clone(out.Groups[i].Settings)
	}
	return out
}

// change is a setting that differs between two configurations; its name is GROUP.FIELD.
type change struct {
	name     string
	old, new any
	at       *Setting // in the first of the two
}

// changes tells what differs in next, which must be made of the same flags.
func (c *ManagerConfiguration) changes(next *ManagerConfiguration) []change {
	var all []change
	for i, group := range c.Groups {
		for j, old := range group.Settings {
			if now := next.Groups[i].Settings[j]; !reflect.DeepEqual(old.Value, now.Value) {
				all = append(all, change{group.Name + "." + old.Name, old.Value, now.Value, &group.Settings[j]})
			}
		}
	}
	return all
}

// MarshalJSON writes the groups beside apiVersion and kind, in the order of --help.
func (c *ManagerConfiguration) MarshalJSON() ([]byte, error) {
	var out bytes.Buffer
	fmt.Fprintf(&out, `{"apiVersion":%q,"kind":%q`, c.APIVersion, c.Kind)
	for _, group := range c.Groups {
		fmt.Fprintf(&out, `,%q:{`, group.Name)
		for i, s := range group.Settings {
			if i > 0 {
				out.WriteByte(',')
			}
			value, err := json.Marshal(s.Value)
			if err != nil {
				return nil, fmt.Errorf("%s.%s: %w", group.Name, s.Name, err)
			}
			fmt.Fprintf(&out, `%q:%s`, s.Name, value)
		}
		out.WriteByte('}')
	}
	out.WriteByte('}')
	return out.Bytes(), nil
}

// yaml is MarshalJSON as YAML, in the same order.
func (c *ManagerConfiguration) yaml() ([]byte, error) {
	text, err := json.Marshal(c)
	if err != nil {
		return nil, err
	}
	var document yaml.Node
	if err := yaml.Unmarshal(text, &document); err != nil {
		return nil, err
	}
	plain(&document)
	var out bytes.Buffer
	encoder := yaml.NewEncoder(&out)
	encoder.SetIndent(2)
	if err := encoder.Encode(&document); err != nil {
		return nil, err
	}
	return out.Bytes(), encoder.Close()
}

// plain takes JSON's braces and quotes away, where they are not needed.
func plain(n *yaml.Node) {
	if n.Style = 0; len(n.Content) == 0 && n.Kind != yaml.ScalarNode {
		n.Style = yaml.FlowStyle // [] and {}
	}
	for _, child := range n.Content {
		plain(child)
	}
}

// camelCase turns "leader-elect-lease-duration" and "leader election" into names of fields.
func camelCase(name string) string {
	words := strings.FieldsFunc(name, func(r rune) bool { return r == '-' || r == ' ' || r == '_' })
	for i, w := range words[1:] {
		words[i+1] = strings.ToUpper(w[:1]) + w[1:]
	}
	return strings.Join(words, "")
}
