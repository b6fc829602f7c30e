// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"errors"
	"fmt"
	"regexp/syntax"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/internal/glob"
)

// Match is how a workload selects a source.
type Match int

// The ways to select a source.
const (
	No    Match = iota
	Auto        // needs a reference
	Named       // needs no reference
)

// Selection has the parsed annotations of a workload: which sources it selects.
type Selection struct {
	isOutline bool // see [AnnotationKeys.Outline]
	native    bool // the workload has the native annotation, so it is marked by annotation under the native key
	types     [NumTypes]typeSelection
	// Delay replaces the quiet period; 0 keeps it.
	Delay time.Duration
	// pause is how long a reload pauses a Deployment; 0 means not at all.
	pause time.Duration
	// Problems are the annotations that could not be parsed. BadPause is the problem of a pause that the
	// next reload leaves out, or nil.
	Problems []Problem
	BadPause *Problem
}

type typeSelection struct {
	auto     bool
	search   bool
	named    names
	excluded names
	// rejectsAll is set if the list of exclusions is too long. Then no source matches: it is better not to roll
	// at all than to roll for an excluded source.
	rejectsAll bool
}

// Empty reports whether the workload asks for nothing.
func (s *Selection) Empty() bool {
	return !slices.ContainsFunc(s.types[:], func(t typeSelection) bool { return t.auto || t.search || !t.named.isEmpty() })
}

// MatchName returns how the lists of names select a source: No if it is excluded, Named if an item names
// it, else Auto. It takes about as many steps as Steps says.
func (s *Selection) MatchName(key SourceKey) Match {
	t := &s.types[key.Type]
	switch {
	case t.rejectsAll || t.excluded.match(key.Name):
		return No
	case t.named.match(key.Name):
		return Named
	}
	return Auto
}

// ScanProblem says that the patterns for a type of sources take too long.
func (k *AnnotationKeys) ScanProblem(s *Selection, typ SourceType) *Problem {
	key := k.reload[typ]
	if s.native {
		key = nativeReload
	}
	return &Problem{key, "its patterns take too long to match against all names in the namespace, so nothing rolls the workload"}
}

// Steps returns about how many steps MatchName takes.
func (s *Selection) Steps(key SourceKey) int {
	t := &s.types[key.Type]
	return (1 + t.named.steps + t.excluded.steps) * (1 + len(key.Name))
}

// match decides as the original does: an exclusion beats a name, a name beats everything else, and
// nothing but an exclusion vetoes a name.
func (s *Selection) match(key SourceKey, source Source) Match {
	t, nameMatch := &s.types[key.Type], s.MatchName(key)
	switch {
	case source.Ignored, nameMatch == No:
		return No
	case nameMatch == Named:
		return Named
	case t.search && source.Matched, t.auto:
		return Auto
	}
	return No
}

// namesExactly reports whether an item is exactly the source's name, so that the source's absence is
// recorded.
func (s *Selection) namesExactly(key SourceKey) bool {
	return s.types[key.Type].named.hasExact(key.Name)
}

// Names yields the sources that are named exactly.
func (s *Selection) Names(yield func(SourceKey) bool) {
	for _, typ := range SourceTypes {
		for name := range s.types[typ].named.exact {
			if !yield(SourceKey{typ, name}) {
				return
			}
		}
	}
}

// NamesByPattern reports whether a source may be named by anything but its exact name.
func (s *Selection) NamesByPattern(typ SourceType) bool { return s.types[typ].named.hasPatterns() }

// TakesReferenced reports whether references to sources of this type count, for some sources at
// least.
func (s *Selection) TakesReferenced(typ SourceType) bool {
	return s.types[typ].auto || s.types[typ].search
}

// markKey returns the template's annotation under the annotations strategy.
func (s *Selection) markKey() string {
	if s.native {
		return nativeMark
	}
	return compatMark
}

// Problem describes an annotation that could not be parsed.
type Problem struct{ key, text string }

func (p Problem) String() string { return p.key + ": " + Truncate(p.text) }

// Truncate shortens a text so that it fits into an Event, which holds 1 KiB in all.
func Truncate(text string) string {
	const maxLength = 500
	if len(text) <= maxLength {
		return text
	}
	return strings.ToValidUTF8(text[:maxLength], "") + "..."
}

// emptySelection is the selection of a workload that is rolled through another object: a Job through its
// CronJob, a Rollout through the workload that it refers to.
var emptySelection = &Selection{}

// Selection returns what a workload selects.
func (k *AnnotationKeys) Selection(workload *Workload) *Selection {
	if workload.RolledElsewhere {
		return emptySelection
	}
	return k.parseSelection(clipAll(workload.Annotations, k.selectionKeys), clipAll(workload.TemplateAnnotations, k.selectionKeys))
}

// clip shortens a value of an annotation: a value of more than maxList bytes is refused, an annotation may
// have 256 KiB, and each event of the workload reads it.
func clip(value string) string { return value[:min(len(value), maxList+1)] }

// clipAll returns the annotations of these keys, with their values shortened.
func clipAll(annotations map[string]string, keys []string) map[string]string {
	clipped := map[string]string{}
	for _, key := range keys {
		if value, ok := annotations[key]; ok {
			clipped[key] = clip(value)
		}
	}
	return clipped
}

// Outline returns the selection of a workload without its expressions; it only says whether it is empty. It
// is for an index, whose function holds up the events of all workloads.
func (k *AnnotationKeys) Outline(workload *Workload) *Selection {
	return k.fillSelection(&Selection{isOutline: true}, clipAll(workload.Annotations, k.selectionKeys), clipAll(workload.TemplateAnnotations, k.selectionKeys))
}

// parseSelection reads the annotations of a workload (meta) and of its template.
func (k *AnnotationKeys) parseSelection(meta, template map[string]string) *Selection {
	return k.fillSelection(&Selection{}, meta, template)
}

func (k *AnnotationKeys) fillSelection(s *Selection, meta, template map[string]string) *Selection {
	if value, ok := annotationOrTemplate(meta, template, nativeReload); ok {
		k.parseNative(s, value)
	} else {
		for _, typ := range SourceTypes {
			k.parseType(s, typ, meta, template)
		}
		k.parsePause(s, meta)
	}
	for t, ignored := range k.ignoredTypes {
		if ignored {
			s.types[t] = typeSelection{}
		}
	}
	if value, ok := meta[nativeDelay]; ok {
		d, err := time.ParseDuration(value)
		if err != nil || d <= 0 {
			s.addProblem(nativeDelay, fmt.Sprintf("%q is not a positive duration", Truncate(value)))
		} else {
			s.Delay = d
		}
	}
	return s
}

// annotationOrTemplate returns a value from the workload, or from the template if the workload does not have
// the key.
func annotationOrTemplate(meta, template map[string]string, key string) (string, bool) {
	if value, ok := meta[key]; ok {
		return value, true
	}
	value, ok := template[key]
	return value, ok
}

func (k *AnnotationKeys) parseType(s *Selection, typ SourceType, meta, template map[string]string) {
	selection := &s.types[typ]
	if !k.compat {
		selection.auto = k.autoAll
		return
	}
	annotations := meta
	if !slices.ContainsFunc([]string{k.reload[typ], k.auto, k.typedAuto[typ], k.search}, func(key string) bool {
		_, ok := meta[key]
		return ok
	}) {
		annotations = template
	}
	selection.search = annotations[k.search] == "true"
	selection.auto = isTrue(annotations[k.auto]) || isTrue(annotations[k.typedAuto[typ]]) ||
		k.autoAll && annotations[k.auto] == "" && annotations[k.typedAuto[typ]] == ""

	if len(meta[k.exclude[typ]]) > maxList {
		selection.rejectsAll = true
		s.addProblem(k.exclude[typ], fmt.Sprintf("%v, so until it is shorter, no %s rolls the workload", errListTooLong, typ.Kind()))
		return
	}
	for item := range splitItems(meta[k.exclude[typ]]) {
		selection.excluded.add(item)
	}
	if len(annotations[k.reload[typ]]) > maxList {
		s.addProblem(k.reload[typ], errListTooLong.Error())
		return
	}
	var problems []string
	var expressions []*syntax.Regexp
	steps := maxSteps
	for item := range splitItems(annotations[k.reload[typ]]) {
		if isName(item) {
			selection.named.add(item)
		}
		if isName(strings.ReplaceAll(item, ".*", "x")) { // true of most expressions
			if strings.Contains(item, ".") {
				selection.named.addGlob(strings.NewReplacer(".*", "*", ".", "?").Replace(item))
			}
			continue
		}
		if s.isOutline {
			selection.named.hasExpressions = true
			continue
		}
		parsed, err := parseExpression(item, &steps)
		if err != nil {
			problems = append(problems, fmt.Sprintf("item %q: %v", item, err))
			continue
		}
		expressions = append(expressions, parsed)
	}
	if len(expressions) > 0 {
		var err error
		if selection.named.re, err = compileExpressions(expressions); err != nil {
			problems = append(problems, err.Error())
		}
	}
	selection.named.steps += maxSteps - max(steps, 0)
	s.addProblem(k.reload[typ], problems...)
}

func isTrue(text string) bool {
	b, err := strconv.ParseBool(text)
	return err == nil && b
}

// addProblem reports the items of one annotation that do not count. It keeps only as much as an Event shows.
func (s *Selection) addProblem(key string, items ...string) {
	if len(items) > 0 {
		s.Problems = append(s.Problems, Problem{key, Truncate(strings.Join(items, "; "))})
	}
}

// splitItems yields the trimmed, non-empty items of a comma-separated list.
func splitItems(list string) func(yield func(string) bool) {
	return func(yield func(string) bool) {
		for item := range strings.SplitSeq(list, ",") {
			if item = strings.TrimSpace(item); item != "" && !yield(item) {
				return
			}
		}
	}
}

func (k *AnnotationKeys) parseNative(s *Selection, value string) {
	s.native = true
	if len(value) > maxList {
		s.addProblem(nativeReload, fmt.Sprintf("%v, so until it is shorter, nothing rolls the workload", errListTooLong))
		return
	}
	isOff, hasOthers := false, false
	var problems []string
	for t := range s.types {
		s.types[t].auto = k.autoAll
	}
	for item := range splitItems(value) {
		switch item {
		case reloadOff:
			isOff = true
			continue
		case reloadAuto:
			for t := range s.types {
				s.types[t].auto = true
			}
		default:
			if err := s.addNative(item); err != nil {
				problems = append(problems, fmt.Sprintf("item %q: %v", item, err))
			}
		}
		hasOthers = true
	}
	if isOff {
		s.types = [NumTypes]typeSelection{}
		if hasOthers {
			problems = append(problems, "off contradicts the other items; off counts")
		}
	}
	s.addProblem(nativeReload, problems...)
}

// addNative adds an item that names sources.
func (s *Selection) addNative(item string) error {
	rest, isExclusion := strings.CutPrefix(item, "!")
	key, ok := parseSourceKey(rest)
	if !ok {
		return errNative
	}
	if problem := glob.Check(key.Name, glob.MaxName); problem != "" {
		return errors.New(problem)
	}
	if !isName(strings.ReplaceAll(key.Name, "*", "x")) {
		return errNative
	}
	list := &s.types[key.Type].named
	if isExclusion {
		list = &s.types[key.Type].excluded
	}
	if strings.Contains(key.Name, "*") {
		list.addGlob(key.Name)
	} else {
		list.add(key.Name)
	}
	return nil
}

var errNative = fmt.Errorf("is none of off, auto, TYPE/NAME, !TYPE/NAME with TYPE configmap, secret or secretproviderclass")
