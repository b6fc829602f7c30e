// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package policy decides what the controller scale-schedule does. It is pure: it has no clock and sends no
// requests.
//
//	spans.go, zones.go  the grammar of spans, and what the clock on the wall shows
//	policy.go           what the flags say
//	object.go           what the cache keeps of an object
//	digest.go           how the cache reduces an object
//	decide.go           whether a workload is to be up or down
//	plan.go             what is to be written
package policy

import (
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/internal/glob"
)

// Options are the rules that flags set.
type Options struct {
	DefaultUptime, DefaultDowntime, UpscalePeriod, DownscalePeriod, ForceUptime, ForceDowntime string
	// Timezone and Weekdays are for spans that name none; empty if every span must name its own.
	Timezone, Weekdays string
	DowntimeReplicas   int
	GracePeriod        time.Duration
	// Explicit leaves a workload alone if neither the workload nor its Namespace has the key exclude.
	Explicit bool
	// IncludeNamespaces, ExcludeNamespaces and ExcludeNames are globs. No IncludeNamespaces means all;
	// exclusion wins.
	IncludeNamespaces, ExcludeNamespaces, ExcludeNames []string
	// Selector chooses workloads by their labels.
	Selector string
	// TimeAnnotation has the time that counts for the grace period in place of the creation.
	TimeAnnotation string
	// AllowProtected lifts the protection of namespaces: in:NAMESPACE.
	AllowProtected []string
	// Hold is how long somebody who has raised a workload is left alone.
	Hold time.Duration
	// OwnNamespaces are the namespaces of the manager. Compat says that the keys downscaler/ count.
	OwnNamespaces []string
	Compat        bool
}

var protectedNamespaces = []string{metav1.NamespaceSystem, metav1.NamespacePublic, "kube-node-lease"}

const allowInside = "in:"

// Evaluator has the options, parsed. Build it with [NewEvaluator].
type Evaluator struct {
	Options
	flags    Values
	defaults Defaults
	selector labels.Selector
}

// NewEvaluator returns the evaluator. It calls bad with every mistake and the name of its flag without the
// prefix.
func NewEvaluator(options Options, bad func(flag, format string, args ...any)) *Evaluator {
	evaluator := &Evaluator{Options: options, selector: labels.Everything()}
	if options.Timezone != "" {
		zone, err := ParseZone(options.Timezone)
		if err != nil {
			bad("timezone", "%q %w", options.Timezone, err)
		}
		evaluator.defaults.Zone = zone
	}
	if options.Weekdays != "" {
		days, err := ParseDays(options.Weekdays)
		if err != nil {
			bad("weekdays", "%q %w", options.Weekdays, err)
		}
		evaluator.defaults.Days = &days
	}
	for _, f := range []struct {
		flag, value string
		key         Key
	}{
		{"default-uptime", options.DefaultUptime, Uptime}, {"default-downtime", options.DefaultDowntime, Downtime},
		{"upscale-period", options.UpscalePeriod, UpscalePeriod}, {"downscale-period", options.DownscalePeriod, DownscalePeriod},
		{"force-uptime", options.ForceUptime, ForceUptime}, {"force-downtime", options.ForceDowntime, ForceDowntime},
	} {
		if f.value == "" {
			continue
		}
		if _, err := ParseSpans(f.value, evaluator.defaults); err != nil {
			bad(f.flag, "%w", err)
		}
		evaluator.flags.put(f.key, f.value)
	}
	if options.Explicit {
		evaluator.flags.put(Exclude, "true")
	}
	if options.DowntimeReplicas < 0 || options.DowntimeReplicas > math.MaxInt32 {
		bad("downtime-replicas", "must be 0 to %d, got %d", math.MaxInt32, options.DowntimeReplicas)
	}
	evaluator.flags.put(DowntimeReplicas, strconv.Itoa(options.DowntimeReplicas))
	if options.GracePeriod < 0 {
		bad("grace-period", "must not be negative, got %v", options.GracePeriod)
	}
	evaluator.flags.put(GracePeriod, options.GracePeriod.String())
	if options.Hold < 0 {
		bad("hold", "must not be negative, got %v", options.Hold)
	}
	if options.Selector != "" {
		selector, err := labels.Parse(options.Selector)
		if err != nil {
			bad("selector", "%w", err)
		} else {
			evaluator.selector = selector
		}
	}
	options.validateNames(bad)
	return evaluator
}

func (o *Options) validateNames(bad func(flag, format string, args ...any)) {
	for _, list := range []struct {
		flag  string
		items []string
		limit int
	}{
		{"include-namespaces", o.IncludeNamespaces, glob.MaxNamespace}, {"exclude-namespaces", o.ExcludeNamespaces, glob.MaxNamespace},
		{"exclude-names", o.ExcludeNames, glob.MaxName},
	} {
		for _, item := range list.items {
			if why := glob.Check(item, list.limit); why != "" {
				bad(list.flag, "%q %s", item, why)
			} else if strings.Trim(item, "abcdefghijklmnopqrstuvwxyz0123456789-.*?") != "" || strings.Contains(item, ".*") {
				// As a glob, the originals' kube-.* would match no namespace at all, and leave none alone.
				bad(list.flag, "%q is not a name in which * and ? stand for anything; regular expressions are not understood", item)
			}
		}
	}
	for _, item := range o.AllowProtected {
		if name, ok := strings.CutPrefix(item, allowInside); !ok || name == "" {
			bad("allow-protected", "%q is not in:NAMESPACE", item)
		}
	}
}

// Covers reports whether the flags leave a workload to the controller.
func (o *Options) Covers(namespace, name string) bool {
	protected := slices.Contains(protectedNamespaces, namespace) || slices.Contains(o.OwnNamespaces, namespace)
	return (!protected || slices.Contains(o.AllowProtected, allowInside+namespace)) &&
		(len(o.IncludeNamespaces) == 0 || glob.MatchAny(o.IncludeNamespaces, namespace)) &&
		!glob.MatchAny(o.ExcludeNamespaces, namespace) && !glob.MatchAny(o.ExcludeNames, name)
}
