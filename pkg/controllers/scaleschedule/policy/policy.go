// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package policy decides what the controller scale-schedule does. It is pure: it has no clock and sends no
// requests.
//
//	spans.go, zones.go  the grammar of spans, and what the clock on the wall shows
//	policy.go           what the flags say
//	object.go           what the cache keeps of an object
//	digest.go           how the cache reduces an object to that
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
	// Timezone and Weekdays are for spans without them; empty if they must have them.
	Timezone, Weekdays string
	DowntimeReplicas   int
	GracePeriod        time.Duration
	// Explicit leaves alone what does not have the key exclude, on the workload or its Namespace.
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
func NewEvaluator(o Options, bad func(flag, format string, args ...any)) *Evaluator {
	r := &Evaluator{Options: o, selector: labels.Everything()}
	if o.Timezone != "" {
		zone, err := ParseZone(o.Timezone)
		if err != nil {
			bad("timezone", "%q %w", o.Timezone, err)
		}
		r.defaults.Zone = zone
	}
	if o.Weekdays != "" {
		days, err := ParseDays(o.Weekdays)
		if err != nil {
			bad("weekdays", "%q %w", o.Weekdays, err)
		}
		r.defaults.Days = &days
	}
	for _, f := range []struct {
		flag, value string
		key         Key
	}{
		{"default-uptime", o.DefaultUptime, Uptime}, {"default-downtime", o.DefaultDowntime, Downtime},
		{"upscale-period", o.UpscalePeriod, UpscalePeriod}, {"downscale-period", o.DownscalePeriod, DownscalePeriod},
		{"force-uptime", o.ForceUptime, ForceUptime}, {"force-downtime", o.ForceDowntime, ForceDowntime},
	} {
		if f.value == "" {
			continue
		}
		if _, err := ParseSpans(f.value, r.defaults); err != nil {
			bad(f.flag, "%w", err)
		}
		r.flags.put(f.key, f.value)
	}
	if o.Explicit {
		r.flags.put(Exclude, "true")
	}
	if o.DowntimeReplicas < 0 || o.DowntimeReplicas > math.MaxInt32 {
		bad("downtime-replicas", "must be 0 to %d, got %d", math.MaxInt32, o.DowntimeReplicas)
	}
	r.flags.put(DowntimeReplicas, strconv.Itoa(o.DowntimeReplicas))
	if o.GracePeriod < 0 {
		bad("grace-period", "must not be negative, got %v", o.GracePeriod)
	}
	r.flags.put(GracePeriod, o.GracePeriod.String())
	if o.Hold < 0 {
		bad("hold", "must not be negative, got %v", o.Hold)
	}
	if o.Selector != "" {
		selector, err := labels.Parse(o.Selector)
		if err != nil {
			bad("selector", "%w", err)
		} else {
			r.selector = selector
		}
	}
	o.validateNames(bad)
	return r
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
