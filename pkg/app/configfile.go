// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"bytes"
	"cmp"
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"

	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"
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

// AddFlags adds the flags to fs.
func (f *ConfigFile) AddFlags(fs *pflag.FlagSet) {
	fs.StringVar(&f.Path, "config", f.Path, ""+
		"A file of kind "+configurationKind+" ("+groupVersion.String()+") with values of flags. "+
		"It is read at the start; a flag on the command line wins over it.")
	fs.BoolVar(&f.Print, "print-effective-config", f.Print,
		"Print the configuration that flags and --config result in, as a file for --config, and exit.")
}

// fileFlags returns the flags that can be in the configuration file, by name.
func (o *Options) fileFlags() map[string]*pflag.Flag {
	all := map[string]*pflag.Flag{}
	for group, flags := range o.flags.FlagSets {
		if group != configurationFlags && group != globalFlags {
			flags.VisitAll(func(f *pflag.Flag) { all[f.Name] = f })
		}
	}
	return all
}

// readConfigFile sets the flags that are in the file of --config and not on the command line. The
// error lists every flag that is wrong.
func (o *Options) readConfigFile() error {
	if o.File.Path == "" {
		return nil
	}
	text, err := os.ReadFile(o.File.Path)
	if err != nil {
		return fmt.Errorf("--config: %w", err)
	}
	var file managerConfiguration
	decoder := yaml.NewDecoder(bytes.NewReader(text))
	decoder.KnownFields(true)
	if err := decoder.Decode(&file); errors.Is(err, io.EOF) {
		return fmt.Errorf("%s: the file is empty", o.File.Path)
	} else if err != nil {
		return fmt.Errorf("%s: %w", o.File.Path, err) // it names the line
	}
	if err := decoder.Decode(&yaml.Node{}); !errors.Is(err, io.EOF) {
		return fmt.Errorf("%s: the file must be a single document", o.File.Path)
	}
	if file.APIVersion != groupVersion.String() || file.Kind != configurationKind {
		return fmt.Errorf("%s: must have apiVersion %s and kind %s, got %q and %q",
			o.File.Path, groupVersion, configurationKind, file.APIVersion, file.Kind)
	}
	o.File.lines = map[string]int{}
	flags := o.fileFlags()
	var errs []error
	for _, name := range slices.SortedFunc(maps.Keys(file.Flags), func(a, b string) int {
		return cmp.Or(cmp.Compare(file.Flags[a].Line, file.Flags[b].Line), strings.Compare(a, b))
	}) {
		value := file.Flags[name]
		err := errors.New("not a flag that the file can set")
		if f := flags[name]; f != nil {
			o.File.lines[name] = value.Line
			err = setFlag(f, &value)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("%s:%d: %s: %w", o.File.Path, value.Line, name, err))
		}
	}
	return errors.Join(errs...)
}

// managerConfiguration is the content of the file.
type managerConfiguration struct {
	APIVersion string               `yaml:"apiVersion"`
	Kind       string               `yaml:"kind"`
	Flags      map[string]yaml.Node `yaml:"flags"`
}

// setFlag sets a flag to a value of the file, unless the command line has set it. The value is a text as on
// the command line or, if the flag takes one, a list or a map. An empty map changes nothing.
func setFlag(f *pflag.Flag, value *yaml.Node) error {
	list, takesList := f.Value.(pflag.SliceValue)
	takesOne := !takesList && !takesMap(f.Value)
	switch {
	case value.ShortTag() == "!!null":
		return errors.New("has no value")
	case takesList && value.Kind == yaml.SequenceNode:
		var items []string
		if err := value.Decode(&items); err != nil || f.Changed {
			return err
		}
		return list.Replace(items)
	case takesMap(f.Value) && value.Kind == yaml.MappingNode:
		var pairs map[string]string
		if err := value.Decode(&pairs); err != nil || f.Changed || len(pairs) == 0 {
			return err
		}
		return f.Value.Set(joinPairs(pairs))
	}
	var text string
	err := value.Decode(&text)
	if !takesOne && strings.ContainsAny(text, "\r\n") { // the flag would take the first line and drop the others
		return errors.New("must be a list or a map, or a single line as on the command line")
	}
	if err != nil || f.Changed {
		return err
	}
	before := f.Value.String()
	if err = f.Value.Set(text); err != nil && takesOne {
		_ = f.Value.Set(before) // Set has left a zero value, which Validate would report too
	}
	return err
}

// takesMap reports whether a flag takes KEY=VALUE.
func takesMap(v pflag.Value) bool {
	return v.Type() == "mapStringBool" || strings.HasPrefix(v.Type(), "stringTo")
}

// joinPairs returns the pairs as on the command line. A single pair is written twice, since pflag does not
// read a text with one "=" as CSV.
func joinPairs(pairs map[string]string) string {
	var items []string
	for _, key := range slices.Sorted(maps.Keys(pairs)) {
		items = append(items, key+"="+pairs[key])
	}
	var text strings.Builder
	w := csv.NewWriter(&text)
	_ = w.Write(append(items, items[0]))
	w.Flush()
	return strings.TrimSuffix(text.String(), "\n")
}

// effectiveConfig returns what the flags and --config result in, in the form of the file.
func (o *Options) effectiveConfig() map[string]any {
	flags := map[string]any{}
	for name, f := range o.fileFlags() {
		flags[name] = fileValue(f.Value)
	}
	return map[string]any{"apiVersion": groupVersion.String(), "kind": configurationKind, "flags": flags}
}

// printConfig writes effectiveConfig as YAML.
func (o *Options) printConfig(w io.Writer) error {
	flags, err := sigsyaml.Marshal(map[string]any{"flags": o.effectiveConfig()["flags"]})
	if err == nil {
		_, err = fmt.Fprintf(w, "apiVersion: %s\nkind: %s\n%s", groupVersion, configurationKind, flags)
	}
	return err
}

// fileValue returns the value of a flag in the form of the file: a list, a map or a scalar.
func fileValue(v pflag.Value) any {
	if slice, ok := v.(pflag.SliceValue); ok {
		list := []any{}
		for _, item := range slice.GetSlice() {
			list = append(list, scalar(v, item))
		}
		return list
	}
	if !takesMap(v) {
		return scalar(v, v.String())
	}
	text := strings.TrimSuffix(strings.TrimPrefix(v.String(), "["), "]")
	pairs, _ := csv.NewReader(strings.NewReader(text)).Read() // fails only if there are none
	table := map[string]any{}
	for _, pair := range pairs {
		key, value, _ := strings.Cut(pair, "=")
		table[key] = scalar(v, value)
	}
	return table
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
