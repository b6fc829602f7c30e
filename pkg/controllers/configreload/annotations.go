// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package configreload

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// Native annotations.
const (
	nativeReload = "quartermaster.dev/reload"
	nativeDelay  = "quartermaster.dev/reload-delay"
	nativeState  = "quartermaster.dev/reload-state"
	nativeMark   = "quartermaster.dev/reloaded-from"

	reloadOff  = "off"
	reloadAuto = "auto"
)

// Annotations of stakater/Reloader (the original) whose keys cannot be replaced.
const (
	compatMark     = "reloader.stakater.com/last-reloaded-from"
	compatStrategy = "reloader.stakater.com/rollout-strategy"
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

func logicalNames() []string { return slices.Sorted(maps.Keys(defaultKeys)) }

// keys are the annotation keys that count.
type keys struct {
	compat, autoAll                             bool
	ignoredTypes                                [2]bool // by sourceType
	auto, search, match, ignore, pause, pauseAt string
	typedAuto, reload, exclude                  [2]string // by sourceType
}

func newKeys(cfg *Config) *keys {
	of := func(logical string) string {
		if key, ok := cfg.AnnotationKeys[logical]; ok {
			return key
		}
		return defaultKeys[logical]
	}
	return &keys{
		compat: cfg.Compat, autoAll: cfg.AutoAll,
		auto: of("auto"), search: of("auto-search"), match: of("search-match"), ignore: of("ignore"),
		pause: of("pause-deployment"), pauseAt: of("pause-deployment-time"),
		typedAuto: [2]string{of("configmap-auto"), of("secret-auto")},
		reload:    [2]string{of("configmap"), of("secret")},
		exclude: [2]string{
			"configmaps.exclude.reloader.stakater.com/reload",
			"secrets.exclude.reloader.stakater.com/reload",
		},
	}
}

// SourceAnnotations returns the keys that the cache must keep of sources.
func SourceAnnotations(cfg Config) []string {
	list := []string{nativeReload}
	if k := newKeys(&cfg); cfg.Compat {
		list = append(list, k.ignore, k.match)
	}
	return list
}

// WorkloadAnnotations returns the keys that the cache must keep of workloads and, through
// WorkloadDigest, of their pod templates.
func WorkloadAnnotations(cfg Config) []string {
	// A workload may carry the mark under either strategy's key, also without compat.
	list := []string{nativeReload, nativeDelay, nativeState, nativeMark, compatMark}
	if k := newKeys(&cfg); cfg.Compat {
		list = append(list, compatStrategy, k.auto, k.search, k.pause, k.pauseAt)
		for _, t := range sourceTypes {
			list = append(list, k.typedAuto[t], k.reload[t], k.exclude[t])
		}
		list = append(list, csiKeys...)
	}
	return list
}

// csiKeys are the original's keys for secrets that a CSI driver mounts. They are not supported.
var csiKeys = []string{
	"secretproviderclass.reloader.stakater.com/auto", "secretproviderclass.reloader.stakater.com/reload",
	"secretproviderclasses.exclude.reloader.stakater.com/reload",
}

func asksForCSI(w *workload) bool {
	return slices.ContainsFunc(csiKeys, func(key string) bool { _, ok := fallback(w.meta, w.Template, key); return ok })
}

// match is how a workload selects a source.
type match int

const (
	no    match = iota
	auto        // needs a reference
	named       // needs no reference
)

// rules are the parsed annotations of a workload.
type rules struct {
	native bool // it has the native annotation, so it is marked by annotation under the native key
	types  [2]typeRules
}

type typeRules struct {
	auto     bool
	search   bool
	named    []pattern
	excluded []pattern
	// never is set if the list of exclusions is too large to compile. Then nothing matches: it is
	// better not to roll at all than to roll for something excluded.
	never bool
}

// match decides as the original does: an exclusion beats a name, a name beats everything else, and
// nothing but an exclusion vetoes a name.
func (r *rules) match(key sourceKey, s source) match {
	t := &r.types[key.typ]
	switch {
	case s.ignored, t.never, matchesAny(t.excluded, key.name):
		return no
	case matchesAny(t.named, key.name):
		return named
	case t.search && s.matched, t.auto:
		return auto
	}
	return no
}

// waitsFor reports whether an item is exactly the source's name, so that the source's absence is
// recorded.
func (r *rules) waitsFor(key sourceKey) bool {
	return slices.ContainsFunc(r.types[key.typ].named, func(p pattern) bool { return p.literal && p.text == key.name })
}

// problem describes an annotation that could not be parsed.
type problem struct{ key, text string }

func (p problem) String() string { return p.key + ": " + cut(p.text) }

// cut shortens a text so that it fits into an Event, which holds 1 KiB in all.
func cut(text string) string {
	const most = 500
	if len(text) <= most {
		return text
	}
	return strings.ToValidUTF8(text[:most], "") + "..."
}

// stateTooLarge reports a state that is too large for an annotation. The annotation's value is not
// at fault.
var stateTooLarge = problem{nativeState, fmt.Sprintf("the workload watches so many sources that their state takes more than %d KiB, "+
	"so it is kept in memory and a change while no manager runs is not noticed; name fewer sources", maxStateBytes>>10)}

// rules returns the rules of a workload. They are empty for a workload that is rolled through
// another object: a Job through its CronJob, a Rollout through the workload that it refers to.
func (k *keys) rules(w *workload) (rules, []problem) {
	if w.Elsewhere || w.kind == "Job" && w.OwnedBy == "CronJob" {
		return rules{}, nil
	}
	return k.parse(w.meta, w.Template)
}

// parse reads the annotations of a workload (meta) and of its template.
func (k *keys) parse(meta, template map[string]string) (rules, []problem) {
	r, problems := k.parseAll(meta, template)
	for t, ignored := range k.ignoredTypes {
		if ignored {
			r.types[t] = typeRules{}
		}
	}
	return r, problems
}

func (k *keys) parseAll(meta, template map[string]string) (rules, []problem) {
	if value, ok := fallback(meta, template, nativeReload); ok {
		return k.parseNative(value)
	}
	var r rules
	var problems []problem
	for _, t := range sourceTypes {
		if k.compat {
			problems = append(problems, k.parseCompat(t, &r.types[t], meta, template)...)
		} else {
			r.types[t].auto = k.autoAll
		}
	}
	return r, problems
}

func fallback(meta, template map[string]string, key string) (string, bool) {
	if value, ok := meta[key]; ok {
		return value, true
	}
	value, ok := template[key]
	return value, ok
}

func (k *keys) parseCompat(t sourceType, r *typeRules, meta, template map[string]string) []problem {
	// The template's annotations count only if the workload has none of these keys.
	from := meta
	if !slices.ContainsFunc([]string{k.reload[t], k.auto, k.typedAuto[t], k.search},
		func(key string) bool { _, ok := meta[key]; return ok }) {
		from = template
	}
	isTrue := func(key string) bool { b, err := strconv.ParseBool(from[key]); return err == nil && b }
	r.search = from[k.search] == "true"
	r.auto = isTrue(k.auto) || isTrue(k.typedAuto[t]) ||
		k.autoAll && from[k.auto] == "" && from[k.typedAuto[t]] == ""

	for item := range items(meta[k.exclude[t]]) {
		r.excluded = append(r.excluded, pattern{text: item})
	}
	var bad badItems
	b := newBudget()
	for item := range items(from[k.reload[t]]) {
		p := pattern{text: item, literal: isName(item)}
		if p.literal {
			p.dots = strings.Contains(item, ".")
		} else {
			var err error
			if p.re, err = b.compile(item); err != nil {
				bad.add("item %q: %v", item, err)
				continue
			}
		}
		r.name(p, &bad)
	}
	return bad.of(k.reload[t])
}

// name adds p to the names, up to maxNames.
func (r *typeRules) name(p pattern, bad *badItems) {
	if len(r.named) == maxNames {
		bad.add("only the first %d names count", maxNames)
		return
	}
	r.named = append(r.named, p)
}

// badItems describes the invalid items of an annotation. It keeps only the first ones, since nobody
// reads more.
type badItems []string

func (b *badItems) add(format string, args ...any) {
	if len(*b) < 10 {
		*b = append(*b, fmt.Sprintf(format, args...))
	}
}

// of returns one problem for all of them.
func (b badItems) of(key string) []problem {
	if len(b) == 0 {
		return nil
	}
	return []problem{{key, strings.Join(b, "; ")}}
}

// items yields the trimmed, non-empty items of a comma-separated list.
func items(list string) func(yield func(string) bool) {
	return func(yield func(string) bool) {
		for item := range strings.SplitSeq(list, ",") {
			if item = strings.TrimSpace(item); item != "" && !yield(item) {
				return
			}
		}
	}
}

func (k *keys) parseNative(value string) (rules, []problem) {
	r := rules{native: true}
	r.types[configMap].auto, r.types[secret].auto = k.autoAll, k.autoAll
	var bad badItems
	names, exclusions := newBudget(), newBudget()
	for item := range items(value) {
		switch item {
		case reloadOff:
			return rules{native: true}, nil
		case reloadAuto:
			r.types[configMap].auto, r.types[secret].auto = true, true
			continue
		}
		rest, never := strings.CutPrefix(item, "!")
		key, ok := parseSourceKey(rest)
		if !ok || !isName(strings.ReplaceAll(key.name, "*", "x")) {
			bad.add("item %q is none of off, auto, configmap/NAME, secret/NAME, !configmap/NAME, !secret/NAME", item)
			continue
		}
		t := &r.types[key.typ]
		if never {
			p, err := exclusions.glob(key.name)
			if err != nil {
				bad.add("item %q: %v; until it is fixed, no %s rolls the workload", item, err, key.typ.kind())
				t.never = true
				continue
			}
			t.excluded = append(t.excluded, p)
			continue
		}
		p, err := names.glob(key.name)
		if err != nil {
			bad.add("item %q: %v", item, err)
			continue
		}
		t.name(p, &bad)
	}
	return r, bad.of(nativeReload)
}
