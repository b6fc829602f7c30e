// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/runtime/schema"
)

const never = time.Duration(-1)

var (
	now     = time.Date(2030, 1, 10, 12, 0, 0, 0, time.UTC)
	created = now.Add(-2 * time.Hour)
)

func typeOf(kind string) Type {
	group := map[string]string{"ReplicaSet": "apps", "Deployment": "apps", "ControllerRevision": "apps",
		"ClusterRole": "rbac.authorization.k8s.io", "CustomResourceDefinition": "apiextensions.k8s.io"}[kind]
	clusterScoped := map[string]bool{"Namespace": true, "Node": true, "PersistentVolume": true, "ClusterRole": true, "CustomResourceDefinition": true}
	return Type{schema.GroupVersionResource{Group: group, Version: "v1", Resource: strings.ToLower(kind) + "s"}, kind, !clusterScoped[kind]}
}

func defaults() Options {
	return Options{
		Families: Families, Include: []string{"*"}, Exclude: []string{"events", "controllerrevisions", "leases", "endpoints", "endpointslices"},
		ClusterScoped: true, OwnNamespaces: []string{"manager", "manager-leader"},
	}
}

// TestDecide has the rows of the specification, with their numbers, that one object decides.
func TestDecide(t *testing.T) {
	const T = "k8s-ttl-controller.twin.sh/"
	tests := map[string]struct {
		kind, namespace, name string // Pod shop/p
		annotations           map[string]string
		change                func(*Object)
		options               func(*Options)
		wait                  time.Duration // 0 is due, never is not at all
		warnings              string        // reasons, by blanks
		untracked             bool
	}{
		"1: due":                                 {annotations: map[string]string{T + "ttl": "1h"}},
		"2: due in days":                         {annotations: map[string]string{T + "ttl": "3d"}, wait: 70 * time.Hour},
		"3: due at the deadline itself":          {annotations: map[string]string{T + "ttl": "2h"}},
		"4: refreshed":                           {annotations: map[string]string{T + "ttl": "1h", T + "refreshed-at": "2030-01-10T11:30:00Z"}, wait: 30 * time.Minute},
		"4: refreshed, with an offset":           {annotations: map[string]string{T + "ttl": "1h", T + "refreshed-at": "2030-01-10T13:30:00+02:00"}, wait: 30 * time.Minute},
		"4: refreshed in the future":             {annotations: map[string]string{T + "ttl": "1h", T + "refreshed-at": "2030-01-10T13:00:00.5Z"}, wait: 2*time.Hour + time.Second/2},
		"5: refreshed at no time":                {annotations: map[string]string{T + "ttl": "1h", T + "refreshed-at": "yesterday"}, wait: never, warnings: InvalidTTL},
		"6: refreshed, but without a TTL":        {annotations: map[string]string{T + "refreshed-at": "2020-01-01T00:00:00Z"}, wait: never, untracked: true},
		"7: 1h30m":                               {annotations: map[string]string{T + "ttl": "1h30m"}},
		"7: 1.5h":                                {annotations: map[string]string{T + "ttl": "1.5h"}},
		"7: 0":                                   {annotations: map[string]string{T + "ttl": "0"}},
		"7: 1w2d":                                {annotations: map[string]string{T + "ttl": "1w2d"}, wait: 9*24*time.Hour - 2*time.Hour},
		"8: -5m":                                 {annotations: map[string]string{T + "ttl": "-5m"}, wait: never, warnings: InvalidTTL},
		"8: 5":                                   {annotations: map[string]string{T + "ttl": "5"}, wait: never, warnings: InvalidTTL},
		"8: 1H":                                  {annotations: map[string]string{T + "ttl": "1H"}, wait: never, warnings: InvalidTTL},
		"8: 1 h":                                 {annotations: map[string]string{T + "ttl": "1 h"}, wait: never, warnings: InvalidTTL},
		"8: empty":                               {annotations: map[string]string{T + "ttl": ""}, wait: never, warnings: InvalidTTL},
		"8: forever is not k8s-ttl-controller's": {annotations: map[string]string{T + "ttl": "forever"}, wait: never, warnings: InvalidTTL},
		"9: 90m":                                 {annotations: map[string]string{"janitor/ttl": "90m"}},
		"9: 7d":                                  {annotations: map[string]string{"janitor/ttl": "7d"}, wait: 166 * time.Hour},
		"9: 1h30m":                               {annotations: map[string]string{"janitor/ttl": "1h30m"}, wait: never, warnings: InvalidTTL},
		"9: forever":                             {annotations: map[string]string{"janitor/ttl": "forever"}, wait: never},
		"10: a day":                              {annotations: map[string]string{"janitor/expires": "2030-01-10"}},
		"10: a minute":                           {annotations: map[string]string{"janitor/expires": "2030-01-10T11:59"}},
		"10: a second":                           {annotations: map[string]string{"janitor/expires": "2030-01-10T12:00:00Z"}},
		"10: tomorrow":                           {annotations: map[string]string{"janitor/expires": "2030-01-11"}, wait: 12 * time.Hour},
		"11: an offset in the janitor's":         {annotations: map[string]string{"janitor/expires": "2030-01-10T13:00:00+02:00"}, wait: never, warnings: InvalidTTL},
		"11: an offset in the native":            {annotations: map[string]string{"quartermaster.dev/expires": " 2030-01-10T13:00:00+02:00 "}},
		"12: the later of two":                   {annotations: map[string]string{T + "ttl": "1h", "janitor/expires": "2030-02-01"}, wait: 21*24*time.Hour + 12*time.Hour, warnings: ConflictingTTL},
		"13: forever is the latest":              {annotations: map[string]string{"janitor/ttl": "forever", "janitor/expires": "2030-01-01"}, wait: never, warnings: ConflictingTTL},
		"14: two that agree":                     {annotations: map[string]string{"quartermaster.dev/ttl": "1h", T + "ttl": "60m"}},
		"15: one of two is invalid":              {annotations: map[string]string{"janitor/ttl": "1x", "janitor/expires": "2030-01-01"}, wait: never, warnings: InvalidTTL},
		"16: a family that is off":               {annotations: map[string]string{T + "ttl": "1h"}, options: func(o *Options) { o.Families = []Family{Native} }, wait: never, untracked: true},
		"21: it is being deleted":                {annotations: map[string]string{T + "ttl": "1h"}, change: func(o *Object) { o.Terminating = true }, wait: never, untracked: true},
		"22: in kube-system":                     {namespace: "kube-system", annotations: map[string]string{T + "ttl": "1h"}, wait: never, warnings: TTLProtected},
		"22: in kube-system, not due yet":        {namespace: "kube-system", annotations: map[string]string{T + "ttl": "3h"}, wait: time.Hour},
		"22: in kube-system, allowed":            {namespace: "kube-system", annotations: map[string]string{T + "ttl": "1h"}, options: func(o *Options) { o.AllowProtected = []string{"in:kube-system"} }},
		"22: in the manager's own namespace":     {namespace: "manager", annotations: map[string]string{T + "ttl": "1h"}, wait: never, warnings: TTLProtected},
		"22: the namespace itself does not count":                {namespace: "kube-public", annotations: map[string]string{T + "ttl": "1h"}, options: func(o *Options) { o.AllowProtected = []string{"namespace:kube-public"} }, wait: never, warnings: TTLProtected},
		"23: a Namespace":                                        {kind: "Namespace", name: "pr-123", annotations: map[string]string{"janitor/ttl": "1h"}},
		"23: a Namespace kube-*":                                 {kind: "Namespace", name: "kube-foo", annotations: map[string]string{"janitor/ttl": "1h"}, wait: never, warnings: TTLProtected},
		"23: the Namespace default":                              {kind: "Namespace", name: "default", annotations: map[string]string{"janitor/ttl": "1h"}, wait: never, warnings: TTLProtected},
		"23: the manager's own Namespace":                        {kind: "Namespace", name: "manager", annotations: map[string]string{"janitor/ttl": "1h"}, wait: never, warnings: TTLProtected},
		"23: a Namespace that the manager needs":                 {kind: "Namespace", name: "manager-leader", annotations: map[string]string{"janitor/ttl": "1h"}, wait: never, warnings: TTLProtected},
		"23: the Namespace default, allowed":                     {kind: "Namespace", name: "default", annotations: map[string]string{"janitor/ttl": "1h"}, options: func(o *Options) { o.AllowProtected = []string{"namespace:default"} }},
		"25: a ClusterRole, by the janitor":                      {kind: "ClusterRole", annotations: map[string]string{"janitor/ttl": "1h"}, wait: never, untracked: true},
		"25: the same, allowed":                                  {kind: "ClusterRole", annotations: map[string]string{"janitor/ttl": "1h"}, options: func(o *Options) { o.JanitorClusterScoped = true }},
		"25: a ClusterRole, by k8s-ttl-controller":               {kind: "ClusterRole", annotations: map[string]string{T + "ttl": "1h"}},
		"26: a Deployment":                                       {kind: "Deployment", annotations: map[string]string{T + "ttl": "1h"}},
		"26: its ReplicaSet, with the copy":                      {kind: "ReplicaSet", annotations: map[string]string{T + "ttl": "1h"}, change: func(o *Object) { o.ControllerKind = "Deployment" }, wait: never, untracked: true},
		"26: a ReplicaSet of nobody":                             {kind: "ReplicaSet", annotations: map[string]string{T + "ttl": "1h"}},
		"38: a mirror Pod":                                       {annotations: map[string]string{T + "ttl": "1h"}, change: func(o *Object) { o.Mirror = true }, wait: never, untracked: true},
		"38: a Pod of a ReplicaSet":                              {annotations: map[string]string{T + "ttl": "1h"}, change: func(o *Object) { o.ControllerKind = "ReplicaSet" }},
		"a namespace that is excluded":                           {annotations: map[string]string{T + "ttl": "1h"}, options: func(o *Options) { o.ExcludeNamespaces = []string{"sh*"} }, wait: never, warnings: TTLProtected},
		"a namespace that is not included":                       {annotations: map[string]string{T + "ttl": "1h"}, options: func(o *Options) { o.IncludeNamespaces = []string{"pr-*"} }, wait: never, warnings: TTLProtected},
		"a Namespace that is not included":                       {kind: "Namespace", name: "x", annotations: map[string]string{T + "ttl": "1h"}, options: func(o *Options) { o.IncludeNamespaces = []string{"pr-*"} }, wait: never, warnings: TTLProtected},
		"a ClusterRole is in no namespace":                       {kind: "ClusterRole", annotations: map[string]string{T + "ttl": "1h"}, options: func(o *Options) { o.IncludeNamespaces = []string{"pr-*"} }},
		"a protected namespace is not allowed by being included": {namespace: "kube-system", annotations: map[string]string{T + "ttl": "1h"}, options: func(o *Options) { o.IncludeNamespaces = []string{"*"} }, wait: never, warnings: TTLProtected},
		"an object without a creationTimestamp":                  {annotations: map[string]string{T + "ttl": "1h"}, change: func(o *Object) { o.Created = time.Time{} }, wait: never, warnings: InvalidTTL},
		"blanks around a native TTL":                             {annotations: map[string]string{"quartermaster.dev/ttl": " 1h\n"}},
		"native forever":                                         {annotations: map[string]string{"quartermaster.dev/ttl": "forever"}, wait: never},
		"two that are invalid":                                   {annotations: map[string]string{"quartermaster.dev/ttl": "x", T + "ttl": "y"}, wait: never, warnings: InvalidTTL + " " + InvalidTTL},
		"a year that no object reaches":                          {annotations: map[string]string{"quartermaster.dev/expires": "9999-12-31"}, wait: time.Duration(1<<63 - 1)},
		"the first instant of time":                              {annotations: map[string]string{"quartermaster.dev/expires": "0001-01-01T00:00:00Z"}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			obj := &Object{Type: typeOf("Pod"), Namespace: "shop", Name: "p", Created: created, Annotations: test.annotations}
			if test.kind != "" {
				obj.Type = typeOf(test.kind)
			}
			if !obj.Type.Namespaced {
				obj.Namespace = ""
			}
			if test.namespace != "" {
				obj.Namespace = test.namespace
			}
			if test.name != "" {
				obj.Name = test.name
			}
			if test.change != nil {
				test.change(obj)
			}
			o := defaults()
			if test.options != nil {
				test.options(&o)
			}
			d := o.Decide(obj, now)
			got := never
			if d.Due(now) {
				got = 0
			} else if !d.Deadline.IsZero() {
				got = d.Deadline.Sub(now)
			}
			var reasons []string
			for _, w := range d.Warnings {
				reasons = append(reasons, w.Reason)
			}
			if got != test.wait || strings.Join(reasons, " ") != test.warnings || d.Tracked == test.untracked {
				t.Errorf("wait %v, warnings %v, tracked %t; want %v, %q, %t", got, d.Warnings, d.Tracked, test.wait, test.warnings, !test.untracked)
			}
		})
	}
}

func TestWatches(t *testing.T) {
	for name, test := range map[string]struct {
		kind    string
		options func(*Options)
		want    bool
	}{
		"a Pod":                          {kind: "Pod", want: true},
		"24: a Node":                     {kind: "Node"},
		"24: a PersistentVolume":         {kind: "PersistentVolume"},
		"24: a CustomResourceDefinition": {kind: "CustomResourceDefinition"},
		"24: a Node, allowed":            {kind: "Node", options: func(o *Options) { o.AllowProtected = []string{"nodes"} }, want: true},
		"24: a PersistentVolume where only Nodes are allowed": {kind: "PersistentVolume", options: func(o *Options) { o.AllowProtected = []string{"nodes"} }},
		"36: a ConfigMap that is not included":                {kind: "ConfigMap", options: func(o *Options) { o.Include = []string{"pods", "deployments"} }},
		"36: a Deployment that is included":                   {kind: "Deployment", options: func(o *Options) { o.Include = []string{"pods", "deployments"} }, want: true},
		"included by its group":                               {kind: "Deployment", options: func(o *Options) { o.Include = []string{"*.apps"} }, want: true},
		"included in another group":                           {kind: "Deployment", options: func(o *Options) { o.Include = []string{"deployments.extensions"} }},
		"excluding wins":                                      {kind: "Pod", options: func(o *Options) { o.Include, o.Exclude = []string{"pods"}, []string{"pods"} }},
		"a ControllerRevision is a copy":                      {kind: "ControllerRevision", options: func(o *Options) { o.Exclude = nil }},
		"a Lease":                                             {kind: "Lease"},
		"without types of the cluster":                        {kind: "Namespace", options: func(o *Options) { o.ClusterScoped = false }},
	} {
		t.Run(name, func(t *testing.T) {
			o := defaults()
			if test.options != nil {
				test.options(&o)
			}
			if got := o.Watches(typeOf(test.kind)); got != test.want {
				t.Errorf("%t, want %t", got, test.want)
			}
		})
	}
	o := Options{Include: []string{"pods", "gone", "*.apps", "x.y"}}
	if got := o.Unmatched([]schema.GroupResource{{Resource: "pods"}, {Group: "apps", Resource: "deployments"}}); strings.Join(got, " ") != "gone x.y" {
		t.Errorf("unmatched %v", got)
	}
}

func TestValidate(t *testing.T) {
	o := defaults()
	if mistakes := o.Validate(); len(mistakes) > 0 {
		t.Fatal(mistakes)
	}
	o = Options{Families: []Family{"x"}, Include: []string{""}, Exclude: []string{"po*"}, IncludeNamespaces: []string{"A"},
		ExcludeNamespaces: []string{""}, AllowProtected: []string{"pods", "in:"}}
	mistakes := o.Validate()
	for _, flag := range []string{"annotations", "include-resources", "exclude-resources", "include-namespaces", "exclude-namespaces", "allow-protected"} {
		if mistakes[flag] == nil {
			t.Errorf("no mistake in %s: %v", flag, mistakes)
		}
	}
}

// TestBreaker has row 31: 150 objects are due, 60 may be deleted in a minute.
func TestBreaker(t *testing.T) {
	b := Breaker{Limit: 60, Cooldown: 5 * time.Minute}
	at, left, trips := now, 150, 0
	var deleted []int // in each batch
	for left > 0 {
		wait, opened := b.Take(at)
		if opened {
			trips++
		}
		if wait == 0 {
			if len(deleted) == trips {
				deleted = append(deleted, 0)
			}
			deleted[trips]++
			left--
			continue
		}
		if wait != 5*time.Minute || !opened {
			t.Fatalf("wait %v, opened %t", wait, opened)
		}
		if again, opened := b.Take(at.Add(time.Minute)); again != 4*time.Minute || opened {
			t.Fatalf("after a minute: wait %v, opened %t", again, opened)
		}
		at = at.Add(wait)
	}
	if trips != 2 || deleted[0] != 60 || deleted[1] != 60 || deleted[2] != 30 {
		t.Errorf("%d trips, deleted %v", trips, deleted)
	}
}

func TestBreakerCountsAMinute(t *testing.T) {
	b := Breaker{Limit: 2, Cooldown: time.Second}
	take := func(after time.Duration, want bool) {
		t.Helper()
		if wait, _ := b.Take(now.Add(after)); (wait == 0) != want {
			t.Errorf("after %v: wait %v", after, wait)
		}
	}
	take(0, true)
	take(59*time.Second, true)
	b.Return()
	take(59*time.Second, true)
	take(60*time.Second, true) // the first has left the window
	take(61*time.Second, false)
	take(63*time.Second, false) // closed, but the window is still full
	take(119*time.Second, true)
	unlimited := Breaker{Cooldown: time.Minute}
	for range 1000 {
		if wait, _ := unlimited.Take(now); wait != 0 {
			t.Fatal("without a limit it opened")
		}
	}
}
