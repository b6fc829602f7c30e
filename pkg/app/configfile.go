// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strings"

	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"
	cliflag "k8s.io/component-base/cli/flag"
	"k8s.io/klog/v2"
)

// Groups of flags that are about the command line and so no part of the configuration.
const (
	configurationFlags = "configuration"
	globalFlags        = "global"
)

// lineError is about one line of the file.
type lineError struct {
	line int
	err  error
}

func (e lineError) Error() string { return fmt.Sprintf("%d: %v", e.line, e.err) }
func (e lineError) Unwrap() error { return e.err }

// fileSetting is a setting as the file has it.
type fileSetting struct {
	flag  *pflag.Flag
	field string // GROUP.FIELD
	line  int
	value any
}

// ConfigFile is what --config names.
type ConfigFile struct {
	Path string
	// Print is --print-effective-config.
	Print bool

	text       []byte
	settings   map[string]fileSetting // in effect, by flag
	overridden []fileSetting          // for which the command line has another value
}

// readConfigFile reads --config into the flags, except those of the command line: they win. Without --config it does
// nothing.
func (o *Options) readConfigFile() error {
	if o.File.Path == "" {
		return nil
	}
	text, err := os.ReadFile(o.File.Path)
	if err != nil {
		return fmt.Errorf("--config: %w", err)
	}
	return o.applyConfigFile(text)
}

func (o *Options) applyConfigFile(text []byte) error {
	settings, err := decodeConfigFile(o.File.Path, text, o.flags)
	if err != nil {
		return err
	}
	o.File.text, o.File.settings, o.File.overridden = text, map[string]fileSetting{}, nil
	var errs []error
	for _, s := range settings {
		if s.flag.Changed {
			if !reflect.DeepEqual(flagValue(s.flag), s.value) {
				o.File.overridden = append(o.File.overridden, s)
			}
			continue
		}
		o.File.settings[s.flag.Name] = s
		if err := setFlagValue(s.flag, s.value); err != nil {
			errs = append(errs, fmt.Errorf("%s:%d: %s: %w", o.File.Path, s.line, s.field, err))
		}
	}
	return errors.Join(errs...)
}

// logOverridden tells what of the file the command line has decided otherwise.
func (f *ConfigFile) logOverridden(ctx context.Context) {
	for _, s := range f.overridden {
		klog.FromContext(ctx).Info("The command line wins over a setting of the configuration file", "file", f.Path, "line", s.line,
			"setting", s.field, "flag", "--"+s.flag.Name, "running", flagValue(s.flag), "ignored", s.value)
	}
}

// withConfigFile returns what the options would be with another text in the file: the same defaults and the same
// command line. The controllers of the result must not be built: those of a build of one's own have their closures
// over the first options.
func (o *Options) withConfigFile(text []byte) (*Options, error) {
	entries := slices.Clone(o.added)
	for i := range entries {
		var err error
		if entries[i].Config, err = copyConfig(entries[i].Config); err != nil {
			return nil, err
		}
	}
	next, err := NewOptions(entries...)
	if err != nil {
		return nil, err
	}
	next.File.Path = o.File.Path
	var errs []error
	for _, group := range configurable(o.flags) {
		o.flags.FlagSets[group].VisitAll(func(f *pflag.Flag) {
			if f.Changed {
				again := next.flags.FlagSets[group].Lookup(f.Name)
				again.Changed = true
				errs = append(errs, setFlagValue(again, flagValue(f)))
			}
		})
	}
	errs = append(errs, next.applyConfigFile(text))
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return next, next.Validate()
}

// copyConfig copies the configuration of a controller as it is before any flag was parsed.
func copyConfig(c Config) (Config, error) {
	if c == nil {
		return nil, nil
	}
	v := reflect.ValueOf(c)
	if v.Kind() != reflect.Pointer || v.IsNil() {
		return nil, fmt.Errorf("app.Entry.Config must be a pointer, got %T", c)
	}
	out := reflect.New(v.Type().Elem())
	out.Elem().Set(v.Elem())
	return out.Interface().(Config), nil
}

// decodeConfigFile reads a ManagerConfiguration and reports everything in it that is not as it must be, each with file,
// line and field. A setting that is left out is not in the result.
func decodeConfigFile(path string, text []byte, sets cliflag.NamedFlagSets) ([]fileSetting, error) {
	decoder := yaml.NewDecoder(bytes.NewReader(text))
	var document, second yaml.Node
	if err := decoder.Decode(&document); errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("%s: is empty, must be of apiVersion %s and kind %s", path, groupVersion, configurationKind)
	} else if err != nil {
		return nil, syntaxError(path, err)
	}
	if err := decoder.Decode(&second); err == nil {
		return nil, fmt.Errorf("%s:%d: must be a single document", path, second.Line)
	} else if !errors.Is(err, io.EOF) {
		return nil, syntaxError(path, err)
	}

	d := &fileDecoder{path: path, sets: sets}
	d.document(document.Content[0])
	return d.settings, errors.Join(d.errs...)
}

// syntaxError puts the line of the YAML parser's error where the other errors have it.
func syntaxError(path string, err error) error {
	match := regexp.MustCompile(`(?s)^yaml: line (\d+): (.*)$`).FindStringSubmatch(err.Error())
	if match == nil {
		return fmt.Errorf("%s: is not YAML: %w", path, err)
	}
	return fmt.Errorf("%s:%s: is not YAML: %s", path, match[1], match[2])
}

type fileDecoder struct {
	path     string
	sets     cliflag.NamedFlagSets
	settings []fileSetting
	errs     []error
}

func (d *fileDecoder) bad(line int, field, format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	if field != "" {
		text = field + ": " + text
	}
	d.errs = append(d.errs, fmt.Errorf("%s:%d: %s", d.path, line, text))
}

func (d *fileDecoder) document(root *yaml.Node) {
	if root.Kind != yaml.MappingNode {
		d.bad(root.Line, "", "must be a map with apiVersion and kind, got %s", describe(root))
		return
	}
	groups := map[string]string{}
	for _, name := range configurable(d.sets) {
		groups[camelCase(name)] = name
	}
	must := map[string]string{"apiVersion": groupVersion.String(), "kind": configurationKind}
	for key, value := range d.once(root, "") {
		if want, ok := must[key.Value]; ok {
			if value.Value != want {
				d.bad(value.Line, key.Value, "must be %s, got %s", want, describe(value))
			}
			delete(must, key.Value)
		} else if name, ok := groups[key.Value]; ok {
			d.group(key.Value, d.sets.FlagSets[name], value)
		} else {
			d.bad(key.Line, key.Value, "is not known; known are apiVersion, kind%s", d.elsewhere(key.Value))
		}
	}
	for _, name := range []string{"apiVersion", "kind"} {
		if want, missing := must[name]; missing {
			d.bad(root.Line, name, "is missing, must be %s", want)
		}
	}
}

func (d *fileDecoder) group(group string, flags *pflag.FlagSet, n *yaml.Node) {
	if n.Kind == yaml.ScalarNode && n.ShortTag() == "!!null" {
		return // all lines of the group are comments
	}
	if n.Kind != yaml.MappingNode {
		d.bad(n.Line, group, "must be a map, got %s", describe(n))
		return
	}
	fields := map[string]*pflag.Flag{}
	flags.VisitAll(func(f *pflag.Flag) {
		if f.Deprecated == "" {
			fields[camelCase(f.Name)] = f
		}
	})
	for key, value := range d.once(n, group+".") {
		field := group + "." + key.Value
		flag, ok := fields[key.Value]
		if !ok {
			d.bad(key.Line, field, "is not known%s", d.elsewhere(key.Value))
			continue
		}
		decoded, err := formOf(flag.Value).decode(value)
		if err != nil {
			line := value.Line
			if at := (lineError{}); errors.As(err, &at) {
				line, err = at.line, at.err
			}
			d.bad(line, field, "%v", err)
			continue
		}
		d.settings = append(d.settings, fileSetting{flag: flag, field: field, line: key.Line, value: decoded})
	}
}

// elsewhere says where a field belongs that is not known where it is: as a rule it is in the wrong group.
func (d *fileDecoder) elsewhere(field string) string {
	var known []string
	for _, name := range configurable(d.sets) {
		known = append(known, camelCase(name))
		found := ""
		d.sets.FlagSets[name].VisitAll(func(f *pflag.Flag) {
			if camelCase(f.Name) == field || f.Name == field {
				found = camelCase(name) + "." + camelCase(f.Name)
			}
		})
		if found != "" {
			return "; did you mean " + found + "?"
		}
	}
	return "; the groups are " + strings.Join(known, ", ")
}

// once yields the keys and values of a map, and complains about a key that is there twice.
func (d *fileDecoder) once(n *yaml.Node, prefix string) iter.Seq2[*yaml.Node, *yaml.Node] {
	return func(yield func(key, value *yaml.Node) bool) {
		lines := map[string]int{}
		for key, value := range pairs(n) {
			if first, twice := lines[key.Value]; twice {
				d.bad(key.Line, prefix+key.Value, "is there twice, first at line %d", first)
				continue
			}
			lines[key.Value] = key.Line
			if !yield(key, value) {
				return
			}
		}
	}
}

// pairs yields the keys and values of a map, references to anchors resolved.
func pairs(n *yaml.Node) iter.Seq2[*yaml.Node, *yaml.Node] {
	return func(yield func(key, value *yaml.Node) bool) {
		for pair := range slices.Chunk(n.Content, 2) {
			value := pair[1]
			if value.Kind == yaml.AliasNode {
				value = value.Alias
			}
			if !yield(pair[0], value) {
				return
			}
		}
	}
}

// locate says of each problem with a flag that the file has set where that was.
func (o *Options) locate(err error) error {
	if err == nil {
		return nil
	}
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		errs := joined.Unwrap()
		if errors.Join(errs...).Error() != err.Error() {
			return err // more than a list
		}
		errs = slices.Clone(errs)
		for i := range errs {
			errs[i] = o.locate(errs[i])
		}
		return errors.Join(errs...)
	}
	name := regexp.MustCompile(`^--([a-z0-9-]+)`).FindStringSubmatch(err.Error())
	if name == nil {
		return err
	}
	if s, ok := o.File.settings[name[1]]; ok {
		return fmt.Errorf("%s:%d: %s: %w", o.File.Path, s.line, s.field, err)
	}
	return err
}
