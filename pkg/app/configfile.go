// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"bytes"
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"slices"
	"strings"

	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/json"
	sigsyaml "sigs.k8s.io/yaml"
)

// These groups of flags concern the command line only and cannot be in the configuration file.
const (
	configurationFlags = "configuration"
	globalFlags        = "global"
)

const configurationKind = "ManagerConfiguration"

var groupVersion = schema.GroupVersion{Group: "quartermaster.dev", Version: "v1alpha1"}

// ConfigFile is the file that --config names.
type ConfigFile struct {
	Path string
	// Print is --print-effective-config.
	Print bool

	lines map[string]int // the line in which the file sets a flag, by the flag's name
}

// settings returns the flags that can be in the configuration file, by name.
func (o *Options) settings() map[string]*pflag.Flag {
	all := map[string]*pflag.Flag{}
	for group, flags := range o.flags.FlagSets {
		if group != configurationFlags && group != globalFlags {
			flags.VisitAll(func(f *pflag.Flag) { all[f.Name] = f })
		}
	}
	return all
}

// readConfigFile sets the flags that are in the file of --config and not on the command line. The
// error lists every mistake in the file.
func (o *Options) readConfigFile() error {
	if o.File.Path == "" {
		return nil
	}
	text, err := os.ReadFile(o.File.Path)
	if err != nil {
		return fmt.Errorf("--config: %w", err)
	}
	var document, second yaml.Node
	decoder := yaml.NewDecoder(bytes.NewReader(text))
	if err := decoder.Decode(&document); errors.Is(err, io.EOF) {
		return fmt.Errorf("%s: the file is empty", o.File.Path)
	} else if err != nil {
		return fmt.Errorf("%s: %w", o.File.Path, err) // it names the line
	}
	o.File.lines = map[string]int{}
	r := configReader{file: o.File, flags: o.settings()}
	r.document(document.Content[0])
	if err := decoder.Decode(&second); err == nil {
		r.bad(&second, "the file must be a single document")
	} else if !errors.Is(err, io.EOF) {
		r.errs = append(r.errs, fmt.Errorf("%s: %w", o.File.Path, err))
	}
	return errors.Join(r.errs...)
}

// configReader collects the mistakes in a configuration file.
type configReader struct {
	file  ConfigFile
	flags map[string]*pflag.Flag
	errs  []error
}

func (r *configReader) bad(n *yaml.Node, format string, args ...any) {
	r.errs = append(r.errs, fmt.Errorf("%s:%d: %s", r.file.Path, n.Line, fmt.Sprintf(format, args...)))
}

// fields calls each with every key of a map and its value. A repeated key is a mistake.
func (r *configReader) fields(name string, n *yaml.Node, each func(key, value *yaml.Node)) {
	if n.Kind != yaml.MappingNode {
		r.bad(n, "%s must be a map", name)
		return
	}
	lines := map[string]int{}
	for field := range slices.Chunk(n.Content, 2) {
		key := field[0]
		if first, twice := lines[key.Value]; twice {
			r.bad(key, "%s is set twice, first in line %d", key.Value, first)
			continue
		}
		lines[key.Value] = key.Line
		each(key, field[1])
	}
}

func (r *configReader) document(root *yaml.Node) {
	var version, kind string
	r.fields("the file", root, func(key, value *yaml.Node) {
		switch key.Value {
		case "apiVersion":
			version = value.Value
		case "kind":
			kind = value.Value
		case "flags":
			r.fields(key.Value, value, r.flag)
		default:
			r.bad(key, "%q is not known; the file has apiVersion, kind and flags", key.Value)
		}
	})
	if version != groupVersion.String() || kind != configurationKind {
		r.bad(root, "must have apiVersion %s and kind %s, got %q and %q", groupVersion, configurationKind, version, kind)
	}
}

// flag sets the flag that key names, unless the command line has set it.
func (r *configReader) flag(key, value *yaml.Node) {
	f, ok := r.flags[key.Value]
	if !ok {
		r.bad(key, "%q is not a flag that the file can set", key.Value)
		return
	}
	r.file.lines[f.Name] = key.Line
	before := len(r.errs)
	var items []string
	add := func(key string, n *yaml.Node) {
		if n.Kind != yaml.ScalarNode || n.ShortTag() == "!!null" {
			r.bad(n, "%s: must be a single value here, such as a string", f.Name)
		}
		items = append(items, key+n.Value)
	}
	kind, was := getItems(f.Value)
	own := kind
	if value.Kind != kind {
		if value.Kind == yaml.ScalarNode && strings.ContainsAny(value.Value, "\r\n") {
			// The flag would take the first line and drop the others.
			r.bad(value, "%s: must be a list or a map, or a single line as on the command line", f.Name)
		}
		kind = yaml.ScalarNode // a text, as on the command line
	}
	switch kind {
	case yaml.SequenceNode:
		for _, item := range value.Content {
			add("", item)
		}
	case yaml.MappingNode:
		r.fields(f.Name, value, func(key, value *yaml.Node) { add(key.Value+"=", value) })
	default:
		add("", value)
	}
	if f.Changed || len(r.errs) > before {
		return
	}
	if err := setItems(f.Value, kind, items); err != nil {
		r.bad(value, "%s: %v", f.Name, err)
		_ = setItems(f.Value, own, was) // else Validate would also report the values that are zero now
	}
}

// getItems returns how the file represents a flag's value, and what the value consists of: the
// items of a list, KEY=VALUE for each key of a map, or a single text.
func getItems(v pflag.Value) (kind yaml.Kind, items []string) {
	if slice, ok := v.(pflag.SliceValue); ok {
		return yaml.SequenceNode, slice.GetSlice()
	}
	if t := v.Type(); t == "mapStringBool" || strings.HasPrefix(t, "stringTo") {
		text := strings.TrimSuffix(strings.TrimPrefix(v.String(), "["), "]")
		items, _ = csv.NewReader(strings.NewReader(text)).Read() // fails only if there are none
		return yaml.MappingNode, items
	}
	return yaml.ScalarNode, []string{v.String()}
}

// setItems sets v to items; it is the reverse of getItems. An empty map changes nothing.
func setItems(v pflag.Value, kind yaml.Kind, items []string) error {
	if slice, ok := v.(pflag.SliceValue); ok && kind == yaml.SequenceNode {
		return slice.Replace(items)
	}
	if kind == yaml.MappingNode && len(items) > 0 {
		var text strings.Builder
		w := csv.NewWriter(&text)
		// The first item twice, since pflag does not read a text with a single "=" as CSV.
		_ = w.Write(append(items, items[0]))
		w.Flush()
		items = []string{strings.TrimSuffix(text.String(), "\n")}
	}
	var errs []error
	for _, item := range items {
		errs = append(errs, v.Set(item))
	}
	return errors.Join(errs...)
}

// effectiveConfig returns what the flags and --config result in, in the form of the file.
func (o *Options) effectiveConfig() *unstructured.Unstructured {
	flags := map[string]any{}
	for name, f := range o.settings() {
		flags[name] = fileValue(f.Value)
	}
	return &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": groupVersion.String(), "kind": configurationKind, "flags": flags,
	}}
}

// printConfig writes effectiveConfig as YAML.
func (o *Options) printConfig(w io.Writer) error {
	flags, err := sigsyaml.Marshal(map[string]any{"flags": o.effectiveConfig().Object["flags"]})
	if err == nil {
		_, err = fmt.Fprintf(w, "apiVersion: %s\nkind: %s\n%s", groupVersion, configurationKind, flags)
	}
	return err
}

// fileValue returns the value of a flag in the form of the file.
func fileValue(v pflag.Value) any {
	kind, items := getItems(v)
	switch kind {
	case yaml.SequenceNode:
		list := []any{}
		for _, item := range items {
			list = append(list, scalar(v, item))
		}
		return list
	case yaml.MappingNode:
		table := map[string]any{}
		for _, pair := range items {
			key, value, _ := strings.Cut(pair, "=")
			table[key] = scalar(v, value)
		}
		return table
	}
	return scalar(v, items[0])
}

// scalar returns a number or a boolean as such, so that the file needs no quotes. The value of a
// string flag stays a string.
func scalar(v pflag.Value, text string) any {
	var value any
	if !strings.HasPrefix(v.Type(), "string") && json.Unmarshal([]byte(text), &value) == nil {
		switch value.(type) {
		case bool, int64, float64:
			return value
		}
	}
	return text
}

var flagOfError = regexp.MustCompile(`(?m)^--([a-z0-9-]+)`)

// locate puts file and line before each line of err that begins with a flag, if the file sets that
// flag.
func (f ConfigFile) locate(err error) error {
	if err == nil || len(f.lines) == 0 {
		return err
	}
	return errors.New(flagOfError.ReplaceAllStringFunc(err.Error(), func(flag string) string {
		if line, ok := f.lines[flag[len("--"):]]; ok {
			return fmt.Sprintf("%s:%d: %s", f.Path, line, flag)
		}
		return flag
	}))
}
