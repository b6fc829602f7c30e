// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package rules reads the file of rules for objects without annotations, and says which rule decides on an
// object, and since when. The verdict depends on the object alone, so it holds until the object changes.
//
//	file.go      the file, and every mistake in it
//	compile.go   the expressions
//	evaluate.go  what the rules say of an object
package rules

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime/schema"
	clientscheme "k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/yaml"

	"github.com/google/cel-go/cel"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/ttl/policy"
)

// The limits of the file.
const (
	maxFile       = 1 << 20 // bytes
	maxRules      = 100
	maxName       = 63
	maxExpression = 4 << 10 // bytes
)

// Rule is a rule of the file.
type Rule struct {
	Name      string   `json:"name"`
	Resources []string `json:"resources"`
	When      string   `json:"when"`
	Since     string   `json:"since"`
	TTL       string   `json:"ttl"`
	DryRun    bool     `json:"dryRun"`

	resources []schema.GroupVersionResource // what Resources says; * stands for every plural, and every group
	// wildcard is set if a resource is a wildcard: the expressions then read some of the metadata only.
	wildcard    bool
	forever     bool
	ttl         time.Duration
	when, since cel.Program // nil: true, and the creationTimestamp
}

// Set is the rules of a file. The nil Set has no rules.
type Set struct{ rules []Rule }

// Read returns the rules in a file, nil if there are none. The error lists every mistake.
func Read(file string) (*Set, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	set, err := Parse(text)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	return set, nil
}

// secondDocument finds the beginning of a second document, which the parser of YAML would leave out.
var secondDocument = regexp.MustCompile(`(?m)^[^#\s-].*\n(.*\n)*---`)

// Parse returns the rules in the text of a file, nil if there are none. The error lists every mistake.
func Parse(text []byte) (*Set, error) {
	var file struct {
		Rules []json.RawMessage `json:"rules"`
	}
	switch {
	case len(text) > maxFile:
		return nil, errors.New("is larger than 1 MiB")
	case secondDocument.Match(text):
		return nil, errors.New("must be a single document")
	}
	if err := yaml.UnmarshalStrict(text, &file); err != nil {
		return nil, err
	}
	switch n := len(file.Rules); {
	case n > maxRules:
		return nil, fmt.Errorf("has %d rules, more than %d", n, maxRules)
	case n == 0:
		return nil, nil
	}
	compiler, err := newCompiler()
	if err != nil {
		return nil, err
	}
	set := &Set{rules: make([]Rule, len(file.Rules))}
	var errs []error
	usedNames, versions := map[string]bool{}, map[schema.GroupResource]string{}
	for i, text := range file.Rules {
		rule, ruleLabel := &set.rules[i], fmt.Sprintf("rule number %d", i+1)
		bad := func(field, format string, args ...any) {
			errs = append(errs, fmt.Errorf("%s: %s: %s", ruleLabel, field, fmt.Sprintf(format, args...)))
		}
		var header struct{ Name string }
		if _ = json.Unmarshal(text, &header); header.Name != "" {
			ruleLabel = "rule " + header.Name
		}
		decoder := json.NewDecoder(bytes.NewReader(text))
		decoder.DisallowUnknownFields()
		if err := decoder.Decode(rule); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", ruleLabel, err))
			continue
		}
		if usedNames[rule.Name] {
			bad("name", "another rule has it")
		}
		usedNames[rule.Name] = true
		rule.validate(bad)
		rule.compile(compiler, bad)
		for _, item := range rule.resources {
			if version, found := versions[item.GroupResource()]; found && version != item.Version {
				bad("resources", "another rule has %s in another version", item.GroupResource())
			}
			versions[item.GroupResource()] = item.Version
		}
	}
	if len(errs) > 0 {
		return nil, errors.Join(errs...)
	}
	return set, nil
}

var validName = regexp.MustCompile(`^[a-z][a-z0-9-]*$`)

// validate reads everything but the expressions.
func (r *Rule) validate(bad func(field, format string, args ...any)) {
	if !validName.MatchString(r.Name) || len(r.Name) > maxName {
		bad("name", "%q is not a lower-case letter, followed by letters, digits and hyphens, of %d characters at most", r.Name, maxName)
	}
	if len(r.Resources) == 0 {
		bad("resources", "is missing")
	}
	for _, item := range r.Resources {
		parsed, err := parseResource(item)
		if err != nil {
			bad("resources", "%q %v", item, err)
			continue
		}
		r.resources = append(r.resources, parsed)
		r.wildcard = r.wildcard || parsed.Resource == "*"
	}
	switch text := strings.TrimSpace(r.TTL); text {
	case "":
		bad("ttl", "is missing")
	case "forever":
		r.forever = true
	default:
		var err error
		if r.ttl, err = policy.ParseDuration(text); err != nil {
			bad("ttl", "%q %v", r.TTL, err)
		} else if r.ttl < 0 {
			bad("ttl", "%q is negative", r.TTL)
		}
	}
}

var validVersion = regexp.MustCompile(`^v[1-9][0-9]*((alpha|beta)[1-9][0-9]*)?$`)

// parseResource parses plural or plural.group of a built-in type, plural.version.group of any type,
// * or *.group.
func parseResource(item string) (resource schema.GroupVersionResource, err error) {
	plural, rest, qualified := strings.Cut(item, ".")
	resource = schema.GroupVersionResource{Resource: plural, Group: rest}
	if plural == "*" {
		if !qualified {
			resource.Group = "*"
		}
		return resource, nil
	}
	if plural == "" || strings.ContainsAny(item, "*/ ") {
		return resource, errors.New("is none of plural, plural.group, plural.version.group, *.group, *")
	}
	if version, group, _ := strings.Cut(rest, "."); validVersion.MatchString(version) {
		resource.Version, resource.Group = version, group
		return resource, nil
	}
	for _, version := range clientscheme.Scheme.PrioritizedVersionsForGroup(resource.Group) {
		for kind := range clientscheme.Scheme.KnownTypes(version) {
			if known, _ := meta.UnsafeGuessKindToResource(version.WithKind(kind)); known.Resource == plural {
				return resource, nil
			}
		}
	}
	return resource, errors.New("is no built-in type; another type is named with its version, such as widgets.v1.example.com")
}

// itemMatches reports whether an item of a rule names the type.
func itemMatches(item schema.GroupVersionResource, t policy.Type) bool {
	return (item.Resource == "*" || item.Resource == t.Resource) && (item.Group == "*" || item.Group == t.Group)
}

// Rules returns the rules, in the order of the file.
func (s *Set) Rules() []Rule {
	if s == nil {
		return nil
	}
	return s.rules
}

// PinVersion returns the type in the version in which a rule names it, if one does.
func (s *Set) PinVersion(t policy.Type) policy.Type {
	for _, r := range s.Rules() {
		for _, item := range r.resources {
			if item.Version != "" && itemMatches(item, t) {
				t.Version = item.Version
			}
		}
	}
	return t
}

// MissingTypes returns which types are named in rules, but are not among the types, each with its rule.
func (s *Set) MissingTypes(types []policy.Type) (missing []string) {
	for _, r := range s.Rules() {
		for i, item := range r.resources {
			if !slices.ContainsFunc(types, func(t policy.Type) bool { return itemMatches(item, t) }) {
				missing = append(missing, fmt.Sprintf("%s of the rule %s", r.Resources[i], r.Name))
			}
		}
	}
	return missing
}
