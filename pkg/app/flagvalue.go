// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"encoding/csv"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"
)

// form is the type of a flag's value in the configuration file.
type form struct {
	// item is the YAML tag of the value, or of its items.
	item string
	// list and table are of items; a table's keys are strings.
	list, table bool
}

const (
	tagString = "!!str"
	tagBool   = "!!bool"
	tagInt    = "!!int"
	tagFloat  = "!!float"
)

func formOf(v pflag.Value) form {
	_, list := v.(pflag.SliceValue)
	switch t := strings.TrimSuffix(v.Type(), "Slice"); t {
	case "bool":
		return form{item: tagBool, list: list}
	case "int", "int8", "int16", "int32", "int64", "uint", "uint8", "uint16", "uint32", "uint64", "Level":
		return form{item: tagInt, list: list}
	case "float32", "float64":
		return form{item: tagFloat, list: list}
	case "stringToString":
		return form{item: tagString, table: true}
	case "mapStringBool":
		return form{item: tagBool, table: true}
	case "namedCertKey":
		return form{item: tagString, list: true}
	default:
		return form{item: tagString, list: list}
	}
}

func (f form) String() string {
	names := map[string]string{tagString: "string", tagBool: "true or false", tagInt: "whole number", tagFloat: "number"}
	switch {
	case f.list:
		return "a list, each item a " + names[f.item]
	case f.table:
		return "a map, each value a " + names[f.item]
	case f.item == tagBool:
		return names[f.item]
	}
	return "a " + names[f.item]
}

// decode reads a value of the form, or says at which line it is not one.
func (f form) decode(n *yaml.Node) (any, error) {
	wrong := func(n *yaml.Node) error { return lineError{n.Line, fmt.Errorf("must be %s, got %s", f, describe(n))} }
	switch {
	case f.list:
		if n.Kind != yaml.SequenceNode {
			return nil, wrong(n)
		}
		items := []any{}
		for _, child := range n.Content {
			item, ok := scalar(f.item, child)
			if !ok {
				return nil, wrong(child)
			}
			items = append(items, item)
		}
		return items, nil
	case f.table:
		if n.Kind != yaml.MappingNode {
			return nil, wrong(n)
		}
		table := map[string]any{}
		for key, child := range pairs(n) {
			if _, twice := table[key.Value]; twice {
				return nil, lineError{key.Line, fmt.Errorf("key %q is there twice", key.Value)}
			}
			item, ok := scalar(f.item, child)
			if !ok || key.ShortTag() != tagString {
				return nil, wrong(child)
			}
			table[key.Value] = item
		}
		return table, nil
	}
	value, ok := scalar(f.item, n)
	if !ok {
		return nil, wrong(n)
	}
	return value, nil
}

func scalar(tag string, n *yaml.Node) (value any, ok bool) {
	if n.Kind != yaml.ScalarNode {
		return nil, false
	}
	got := n.ShortTag()
	switch {
	case tag == tagFloat && (got == tagFloat || got == tagInt):
		return parse[float64](n)
	case tag != got:
		return nil, false
	case tag == tagBool:
		return parse[bool](n)
	case tag == tagInt:
		return parse[int64](n)
	}
	return n.Value, true
}

func parse[T any](n *yaml.Node) (any, bool) {
	var v T
	err := n.Decode(&v)
	return v, err == nil
}

// describe says what a node is, for people.
func describe(n *yaml.Node) string {
	switch n.Kind {
	case yaml.SequenceNode:
		return "a list"
	case yaml.MappingNode:
		return "a map"
	case yaml.ScalarNode:
		if n.ShortTag() == tagString {
			return fmt.Sprintf("the string %q", n.Value)
		}
		if n.ShortTag() == "!!null" {
			return "nothing"
		}
	}
	return n.Value
}

// flagValue reads the value of a flag in its form.
func flagValue(f *pflag.Flag) any {
	of, text := formOf(f.Value), f.Value.String()
	switch {
	case of.table:
		table := map[string]any{}
		// Its text is that of a CSV record of KEY=VALUE, in brackets or not.
		for _, pair := range csvFields(strings.TrimSuffix(strings.TrimPrefix(text, "["), "]")) {
			key, value, _ := strings.Cut(pair, "=")
			table[key] = scalarOf(of.item, value)
		}
		return table
	case of.list:
		items := []any{}
		for _, item := range itemsOf(f.Value) {
			items = append(items, scalarOf(of.item, item))
		}
		return items
	}
	return scalarOf(of.item, text)
}

func itemsOf(v pflag.Value) []string {
	if s, ok := v.(pflag.SliceValue); ok {
		return s.GetSlice()
	}
	// A list of --tls-sni-cert-key.
	return strings.FieldsFunc(strings.Trim(v.String(), "[]"), func(r rune) bool { return r == ';' })
}

func csvFields(text string) []string {
	if text == "" {
		return nil
	}
	fields, err := csv.NewReader(strings.NewReader(text)).Read()
	if err != nil {
		return []string{text}
	}
	return fields
}

// scalarOf reads the text of a flag's value; one that is not what its type says stays text.
func scalarOf(tag, text string) any {
	switch tag {
	case tagBool:
		return text == "true"
	case tagInt:
		if n, err := strconv.ParseInt(text, 0, 64); err == nil {
			return n
		}
	case tagFloat:
		if n, err := strconv.ParseFloat(text, 64); err == nil {
			return n
		}
	}
	return text
}

// setFlagValue sets a flag to a value of its form. The flag does not count as given on the command line.
func setFlagValue(f *pflag.Flag, value any) error {
	switch v := value.(type) {
	case []any:
		items := make([]string, 0, len(v))
		for _, item := range v {
			items = append(items, fmt.Sprint(item))
		}
		if s, ok := f.Value.(pflag.SliceValue); ok {
			return s.Replace(items)
		}
		var errs []error
		for _, item := range items {
			errs = append(errs, f.Value.Set(item))
		}
		return errors.Join(errs...)
	case map[string]any:
		if len(v) == 0 {
			return nil // as it is without the flag
		}
		var pairs []string
		for _, key := range slices.Sorted(maps.Keys(v)) {
			pairs = append(pairs, fmt.Sprintf("%s=%v", key, v[key]))
		}
		var text strings.Builder
		w := csv.NewWriter(&text)
		if err := w.Write(pairs); err != nil {
			return err
		}
		w.Flush()
		return f.Value.Set(strings.TrimSuffix(text.String(), "\n"))
	case float64:
		return f.Value.Set(strconv.FormatFloat(v, 'f', -1, 64))
	default:
		return f.Value.Set(fmt.Sprint(v))
	}
}
