// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"cmp"
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/utils/ptr"
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

// newObject returns an object that was created two hours ago: by default, the Pod shop/p.
func newObject(kind, namespace, name string, annotations map[string]string, change func(*metav1.PartialObjectMetadata)) (Type, *metav1.PartialObjectMetadata) {
	typ := typeOf(cmp.Or(kind, "Pod"))
	obj := &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{
		Namespace: cmp.Or(namespace, "shop"), Name: cmp.Or(name, "p"), CreationTimestamp: metav1.Time{Time: created}, Annotations: annotations}}
	if !typ.Namespaced {
		obj.Namespace = ""
	}
	if change != nil {
		change(obj)
	}
	return typ, obj
}

// TestDecideFollowsTheAnnotations has the rules of docs/controllers/ttl.md about one object.
func TestDecideFollowsTheAnnotations(t *testing.T) {
	const prefix = "k8s-ttl-controller.twin.sh/"
	tests := map[string]struct {
		kind, namespace, name string // Pod shop/p
		annotations           map[string]string
		change                func(*metav1.PartialObjectMetadata)
		options               func(*Options)
		wait                  time.Duration // 0 is due, never is not at all
		warnings              string        // reasons, by blanks
	}{
		"due in days":                                            {annotations: map[string]string{prefix + "ttl": "3d"}, wait: 70 * time.Hour},
		"due at the deadline itself":                             {annotations: map[string]string{prefix + "ttl": "2h"}},
		"refreshed, with an offset":                              {annotations: map[string]string{prefix + "ttl": "1h", prefix + "refreshed-at": "2030-01-10T13:30:00+02:00"}, wait: 30 * time.Minute},
		"refreshed in the future":                                {annotations: map[string]string{prefix + "ttl": "1h", prefix + "refreshed-at": "2030-01-10T13:00:00.5Z"}, wait: 2*time.Hour + time.Second/2},
		"refreshed at no time":                                   {annotations: map[string]string{prefix + "ttl": "1h", prefix + "refreshed-at": "yesterday"}, wait: never, warnings: InvalidTTL},
		"refreshed, but without a TTL":                           {annotations: map[string]string{prefix + "refreshed-at": "2020-01-01T00:00:00Z"}, wait: never},
		"invalid: -5m":                                           {annotations: map[string]string{prefix + "ttl": "-5m"}, wait: never, warnings: InvalidTTL},
		"invalid: forever is not k8s-ttl-controller's":           {annotations: map[string]string{prefix + "ttl": "forever"}, wait: never, warnings: InvalidTTL},
		"the janitor's TTL of 7d":                                {annotations: map[string]string{"janitor/ttl": "7d"}, wait: 166 * time.Hour},
		"the janitor's TTL of 1h30m":                             {annotations: map[string]string{"janitor/ttl": "1h30m"}, wait: never, warnings: InvalidTTL},
		"the janitor's TTL of forever":                           {annotations: map[string]string{"janitor/ttl": "forever"}, wait: never},
		"an offset in the native":                                {annotations: map[string]string{"quartermaster.dev/expires": " 2030-01-10T13:00:00+02:00 "}},
		"two annotations, of which the later deadline counts":    {annotations: map[string]string{prefix + "ttl": "1h", "janitor/expires": "2030-02-01"}, wait: 21*24*time.Hour + 12*time.Hour, warnings: ConflictingTTL},
		"forever is the latest":                                  {annotations: map[string]string{"janitor/ttl": "forever", "janitor/expires": "2030-01-01"}, wait: never, warnings: ConflictingTTL},
		"two annotations with one deadline":                      {annotations: map[string]string{"quartermaster.dev/ttl": "1h", prefix + "ttl": "60m"}},
		"an invalid annotation beside a valid one":               {annotations: map[string]string{"janitor/ttl": "1x", "janitor/expires": "2030-01-01"}, wait: never, warnings: InvalidTTL},
		"a family that is off":                                   {annotations: map[string]string{prefix + "ttl": "1h"}, options: func(o *Options) { o.Families = []Family{Native} }, wait: never},
		"an object that is being deleted":                        {annotations: map[string]string{prefix + "ttl": "1h"}, change: func(o *metav1.PartialObjectMetadata) { o.DeletionTimestamp = &metav1.Time{Time: now} }, wait: never},
		"in kube-system":                                         {namespace: "kube-system", annotations: map[string]string{prefix + "ttl": "1h"}, wait: never, warnings: TTLProtected},
		"in kube-system, not due yet":                            {namespace: "kube-system", annotations: map[string]string{prefix + "ttl": "3h"}, wait: time.Hour},
		"in kube-system, allowed":                                {namespace: "kube-system", annotations: map[string]string{prefix + "ttl": "1h"}, options: func(o *Options) { o.AllowProtected = []string{"in:kube-system"} }},
		"in the manager's own namespace":                         {namespace: "manager", annotations: map[string]string{prefix + "ttl": "1h"}, wait: never, warnings: TTLProtected},
		"allowing a namespace itself does not allow its objects": {namespace: "kube-public", annotations: map[string]string{prefix + "ttl": "1h"}, options: func(o *Options) { o.AllowProtected = []string{"namespace:kube-public"} }, wait: never, warnings: TTLProtected},
		"a Namespace":                                            {kind: "Namespace", name: "pr-123", annotations: map[string]string{"janitor/ttl": "1h"}},
		"a Namespace kube-*":                                     {kind: "Namespace", name: "kube-foo", annotations: map[string]string{"janitor/ttl": "1h"}, wait: never, warnings: TTLProtected},
		"the Namespace default":                                  {kind: "Namespace", name: "default", annotations: map[string]string{"janitor/ttl": "1h"}, wait: never, warnings: TTLProtected},
		"the manager's own Namespace":                            {kind: "Namespace", name: "manager", annotations: map[string]string{"janitor/ttl": "1h"}, wait: never, warnings: TTLProtected},
		"the Namespace default, allowed":                         {kind: "Namespace", name: "default", annotations: map[string]string{"janitor/ttl": "1h"}, options: func(o *Options) { o.AllowProtected = []string{"namespace:default"} }},
		"a ClusterRole, by the janitor":                          {kind: "ClusterRole", annotations: map[string]string{"janitor/ttl": "1h"}, wait: never},
		"a ClusterRole, by the janitor, allowed":                 {kind: "ClusterRole", annotations: map[string]string{"janitor/ttl": "1h"}, options: func(o *Options) { o.JanitorClusterScoped = true }},
		"a ClusterRole, by k8s-ttl-controller":                   {kind: "ClusterRole", annotations: map[string]string{prefix + "ttl": "1h"}},
		"a ReplicaSet with the annotations of its Deployment":    {kind: "ReplicaSet", annotations: map[string]string{prefix + "ttl": "1h"}, change: controlledBy("Deployment"), wait: never},
		"a ReplicaSet of nobody":                                 {kind: "ReplicaSet", annotations: map[string]string{prefix + "ttl": "1h"}},
		"a mirror Pod":                                           {annotations: map[string]string{prefix + "ttl": "1h"}, change: func(o *metav1.PartialObjectMetadata) { o.Annotations[corev1.MirrorPodAnnotationKey] = "x" }, wait: never},
		"a Pod of a ReplicaSet":                                  {annotations: map[string]string{prefix + "ttl": "1h"}, change: controlledBy("ReplicaSet")},
		"a namespace that is excluded":                           {annotations: map[string]string{prefix + "ttl": "1h"}, options: func(o *Options) { o.ExcludeNamespaces = []string{"sh*"} }, wait: never, warnings: TTLProtected},
		"a namespace that is not included":                       {annotations: map[string]string{prefix + "ttl": "1h"}, options: func(o *Options) { o.IncludeNamespaces = []string{"pr-*"} }, wait: never, warnings: TTLProtected},
		"a Namespace that is not included":                       {kind: "Namespace", name: "x", annotations: map[string]string{prefix + "ttl": "1h"}, options: func(o *Options) { o.IncludeNamespaces = []string{"pr-*"} }, wait: never, warnings: TTLProtected},
		"a ClusterRole is in no namespace":                       {kind: "ClusterRole", annotations: map[string]string{prefix + "ttl": "1h"}, options: func(o *Options) { o.IncludeNamespaces = []string{"pr-*"} }},
		"a protected namespace is not allowed by being included": {namespace: "kube-system", annotations: map[string]string{prefix + "ttl": "1h"}, options: func(o *Options) { o.IncludeNamespaces = []string{"*"} }, wait: never, warnings: TTLProtected},
		"an object without a creationTimestamp":                  {annotations: map[string]string{prefix + "ttl": "1h"}, change: func(o *metav1.PartialObjectMetadata) { o.CreationTimestamp = metav1.Time{} }, wait: never, warnings: InvalidTTL},
		"blanks around a native TTL":                             {annotations: map[string]string{"quartermaster.dev/ttl": " 1h\n"}},
		"native forever":                                         {annotations: map[string]string{"quartermaster.dev/ttl": "forever"}, wait: never},
		"two that are invalid":                                   {annotations: map[string]string{"quartermaster.dev/ttl": "x", prefix + "ttl": "y"}, wait: never, warnings: InvalidTTL + " " + InvalidTTL},
		"a year that no object reaches":                          {annotations: map[string]string{"quartermaster.dev/expires": "9999-12-31"}, wait: time.Duration(1<<63 - 1)},
		"the first instant of time":                              {annotations: map[string]string{"quartermaster.dev/expires": "0001-01-01T00:00:00Z"}},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			typ, obj := newObject(tc.kind, tc.namespace, tc.name, tc.annotations, tc.change)
			o := defaults()
			if tc.options != nil {
				tc.options(&o)
			}
			d := o.Decide(typ, obj, now)
			got := never
			if d.Due(now) {
				got = 0
			} else if d.Deadline != Never {
				got = d.Deadline.Sub(now)
			}
			var reasons []string
			for _, w := range d.Problems {
				reasons = append(reasons, w.Reason)
			}
			if got != tc.wait || strings.Join(reasons, " ") != tc.warnings {
				t.Errorf("wait %v, warnings %v; want %v, %q", got, d.Problems, tc.wait, tc.warnings)
			}
		})
	}
}

func TestFlagsSayWhichTypesAreWatched(t *testing.T) {
	for name, tc := range map[string]struct {
		kind    string
		options func(*Options)
		want    bool
	}{
		"a Pod":                      {kind: "Pod", want: true},
		"a Node":                     {kind: "Node"},
		"a PersistentVolume":         {kind: "PersistentVolume"},
		"a CustomResourceDefinition": {kind: "CustomResourceDefinition"},
		"a Node, allowed":            {kind: "Node", options: func(o *Options) { o.AllowProtected = []string{"nodes"} }, want: true},
		"a PersistentVolume where only Nodes are allowed": {kind: "PersistentVolume", options: func(o *Options) { o.AllowProtected = []string{"nodes"} }},
		"a ConfigMap that is not included":                {kind: "ConfigMap", options: func(o *Options) { o.Include = []string{"pods", "deployments"} }},
		"a Deployment that is included":                   {kind: "Deployment", options: func(o *Options) { o.Include = []string{"pods", "deployments"} }, want: true},
		"included by its group":                           {kind: "Deployment", options: func(o *Options) { o.Include = []string{"*.apps"} }, want: true},
		"included in another group":                       {kind: "Deployment", options: func(o *Options) { o.Include = []string{"deployments.extensions"} }},
		"a ControllerRevision is a copy":                  {kind: "ControllerRevision", options: func(o *Options) { o.Exclude = nil }},
		"a Lease":                                         {kind: "Lease"},
		"without types of the cluster":                    {kind: "Namespace", options: func(o *Options) { o.ClusterScoped = false }},
	} {
		t.Run(name, func(t *testing.T) {
			o := defaults()
			if tc.options != nil {
				tc.options(&o)
			}
			if got := o.Watches(typeOf(tc.kind)); got != tc.want {
				t.Errorf("%t, want %t", got, tc.want)
			}
		})
	}
	o := Options{Include: []string{"pods", "gone", "*.apps", "x.y"}}
	if got := o.Unmatched([]Type{typeOf("Pod"), typeOf("Deployment")}); strings.Join(got, " ") != "gone x.y" {
		t.Errorf("unmatched %v", got)
	}
}

// TestRulesDecideWithoutAnAnnotation has objects on which rules may or may not decide.
func TestRulesDecideWithoutAnAnnotation(t *testing.T) {
	for name, tc := range map[string]struct {
		kind, namespace, name string // Pod shop/p
		change                func(*metav1.PartialObjectMetadata)
		want                  bool
	}{
		"an annotation that counts keeps rules away":            {change: func(o *metav1.PartialObjectMetadata) { o.Annotations[NativeTTL] = "1x" }},
		"an annotation that does not count keeps no rule away":  {change: func(o *metav1.PartialObjectMetadata) { o.Annotations[JanitorExpires] = "2099-01-01" }},
		"an object that is being deleted":                       {change: func(o *metav1.PartialObjectMetadata) { o.DeletionTimestamp = &metav1.Time{Time: now} }},
		"rules leave kube-system alone":                         {namespace: "kube-system"},
		"a Namespace":                                           {kind: "Namespace", name: "pr-1", want: true},
		"a ReplicaSet of a Deployment, by a rule that names it": {kind: "ReplicaSet", change: controlledBy("Deployment")},
		"a mirror Pod":                                          {change: func(o *metav1.PartialObjectMetadata) { o.Annotations[corev1.MirrorPodAnnotationKey] = "x" }},
		"rules leave the ConfigMap kube-root-ca.crt alone":      {kind: "ConfigMap", name: "kube-root-ca.crt"},
		"rules leave the ServiceAccount default alone":          {kind: "ServiceAccount", name: "default"},
		"a ServiceAccount":                                      {kind: "ServiceAccount", name: "x", want: true},
		"a ConfigMap that is called as a Namespace":             {kind: "ConfigMap", name: "default", want: true},
	} {
		t.Run(name, func(t *testing.T) {
			typ, obj := newObject(tc.kind, tc.namespace, tc.name, map[string]string{}, tc.change)
			o := defaults()
			if got := o.MayRulesDecide(typ, obj); got != tc.want {
				t.Errorf("%t, want %t", got, tc.want)
			}
		})
	}
}

func TestValidateNamesEachFlag(t *testing.T) {
	o := defaults()
	mistakes := map[string]string{}
	bad := func(flag, format string, args ...any) { mistakes[flag] = fmt.Sprintf(format, args...) }
	if o.Validate(bad); len(mistakes) > 0 {
		t.Fatal(mistakes)
	}
	o = Options{Families: []Family{"x"}, Include: []string{""}, Exclude: []string{"po*"}, IncludeNamespaces: []string{"A"},
		ExcludeNamespaces: []string{""}, AllowProtected: []string{"pods", "in:"}}
	o.Validate(bad)
	for _, flag := range []string{"annotations", "include-resources", "exclude-resources", "include-namespaces", "exclude-namespaces", "allow-protected"} {
		if mistakes[flag] == "" {
			t.Errorf("no mistake in %s: %v", flag, mistakes)
		}
	}
}

func controlledBy(kind string) func(*metav1.PartialObjectMetadata) {
	return func(o *metav1.PartialObjectMetadata) {
		o.OwnerReferences = []metav1.OwnerReference{{Kind: "Team"}, {Kind: kind, Controller: ptr.To(true)}}
	}
}

func TestAnnotatedObjectsHaveAnAnnotationThatCounts(t *testing.T) {
	o := defaults()
	o.Families = []Family{TTLController, Janitor}
	for key, want := range map[string]bool{TTLControllerTTL: true, JanitorTTL: true, "a": false, TTLControllerRefreshed: false, NativeTTL: false} {
		if got := o.Annotated(&metav1.ObjectMeta{Annotations: map[string]string{key: ""}}); got != want {
			t.Errorf("%s: %t, want %t", key, got, want)
		}
	}
}

// TestHugeValuesAreNotRead has values that nobody reads, with 256 KiB each: an annotation that would be valid
// if they were read, and one that takes long to read.
func TestHugeValuesAreNotRead(t *testing.T) {
	const size = 256 << 10
	pad := func(value string) string { return strings.Repeat(" ", size) + value }
	for name, annotations := range map[string]map[string]string{
		NativeTTL:              {NativeTTL: pad("1h")},
		NativeExpires:          {NativeExpires: pad("2030-01-01")},
		TTLControllerTTL:       {TTLControllerTTL: strings.Repeat("1ns", size/3)},
		TTLControllerRefreshed: {TTLControllerTTL: "1h", TTLControllerRefreshed: "2030-01-01T00:00:00." + strings.Repeat("0", size) + "Z"},
		JanitorTTL:             {JanitorTTL: strings.Repeat("0", size) + "1s"},
		JanitorExpires:         {JanitorExpires: strings.Repeat("2030-01-01", size/10)},
		"two":                  {JanitorTTL: strings.Repeat("1", size), NativeTTL: "1h"},
	} {
		t.Run(name, func(t *testing.T) {
			o := defaults()
			d := o.Decide(typeOf("Pod"), &metav1.ObjectMeta{Namespace: "shop", CreationTimestamp: metav1.Time{Time: created}, Annotations: annotations}, now)
			if d.Due(now) || len(d.Problems) != 1 || d.Problems[0].Reason != InvalidTTL {
				t.Fatalf("due %v with %d warnings", d.Deadline, len(d.Problems))
			}
			text := d.Problems[0].Text
			if len(text) > 200 || !strings.Contains(text, "is longer than 100 bytes") || name != "two" && !strings.Contains(text, name) {
				t.Errorf("a text of %d bytes: %.300s", len(text), text)
			}
		})
	}
}

// breakerTest is a breaker from now on.
type breakerTest struct {
	*testing.T
	Breaker
}

func (b *breakerTest) expectTake(namespace string, after time.Duration, want bool, wantStopped Scope) {
	b.Helper()
	if got, stopped := b.Take(namespace, now.Add(after)); got != want || stopped != wantStopped {
		b.Errorf("%s after %v: %t, opens %q", namespace, after, got, stopped)
	}
}

func (b *breakerTest) expectStoppedFor(namespace string, after, want time.Duration) {
	b.Helper()
	if got := b.StoppedFor(namespace, now.Add(after)); got != want {
		b.Errorf("%s after %v: open for %v", namespace, after, got)
	}
}

func (b *breakerTest) expectStopped(after time.Duration, wantNamespaces int, wantAll bool) {
	b.Helper()
	if namespaces, all := b.Stopped(now.Add(after)); namespaces != wantNamespaces || all != wantAll {
		b.Errorf("%d namespaces are stopped, all: %t", namespaces, all)
	}
}

func TestBreakerOpensAtItsLimit(t *testing.T) {
	b := breakerTest{t, Breaker{Limit: 2, Cooldown: 2 * time.Minute}}
	b.expectTake("a", 0, true, "")
	b.expectTake("a", 59*time.Second, true, "")
	b.Return("a")
	b.expectTake("a", 59*time.Second, true, "")
	b.expectTake("a", 60*time.Second, true, "") // the first has left the window
	b.expectStoppedFor("a", 60*time.Second, 0)
	b.expectTake("a", 61*time.Second, false, OneNamespace)
	b.expectTake("a", 62*time.Second, false, "") // it opens once
	b.expectStoppedFor("a", 100*time.Second, 81*time.Second)
	b.expectStoppedFor("b", 100*time.Second, 0)
	b.expectTake("b", 100*time.Second, true, "")
	b.expectTake("", 100*time.Second, true, "") // objects without a namespace have a count of their own
	b.expectStopped(100*time.Second, 1, false)
	b.expectTake("a", 180*time.Second, false, "")
	b.expectTake("a", 181*time.Second, true, "")
	unlimited := breakerTest{T: t}
	for range 1000 {
		unlimited.expectTake("a", 0, true, "")
	}
}

func TestBreakerLimitsAllNamespacesTogether(t *testing.T) {
	b := breakerTest{t, Breaker{Limit: 2, Cooldown: time.Minute}}
	for i := range TotalLimitFactor * b.Limit {
		b.expectTake(fmt.Sprint("n", i), 0, true, "")
	}
	b.Return("n0") // as much as another may take
	b.expectTake("x", 0, true, "")
	b.expectTake("y", 0, false, AllNamespaces)
	b.expectStopped(0, 0, true)
	b.expectStoppedFor("z", 0, time.Minute)
	// A namespace that is full opens its own, however full the total is.
	b = breakerTest{t, Breaker{Limit: 1, Cooldown: time.Hour}}
	for i := range TotalLimitFactor {
		b.expectTake(fmt.Sprint("n", i), 0, true, "")
	}
	b.expectTake("n0", 0, false, OneNamespace)
	// What is idle is forgotten, and what is stopped is not.
	b.expectTake("later", 2*time.Minute, true, "")
	b.expectStoppedFor("n0", 2*time.Minute, time.Hour-2*time.Minute)
	if n := len(b.namespaces); n != 2 {
		t.Errorf("%d namespaces are remembered", n)
	}
}

var durations = map[string]time.Duration{
	"1h30m": 90 * time.Minute, "90m": 90 * time.Minute, "1.5h": 90 * time.Minute, "1w2d3h": (9*24 + 3) * time.Hour,
	"1d1d": 48 * time.Hour, "2d": 48 * time.Hour, ".5d1.5d": 48 * time.Hour, "2.d": 48 * time.Hour, "0": 0, "0s": 0, "+0": 0, "-0": 0, "+5m": 5 * time.Minute, "-5m": -5 * time.Minute,
	"1s20ns": time.Second + 20, "1\u00b5s": time.Microsecond, "1\u03bcs": time.Microsecond, "1us1ms": 1001 * time.Microsecond,
	"15250w": 15250 * 7 * 24 * time.Hour, "9223372036854775807ns": 1<<63 - 1, "0.12500000000000000000000001d": 3 * time.Hour,
}

var invalidDurations = []string{"", "5", "d", "1 h", " 1h", "1h ", "1H", "1D", "1mo", "1y", "15251w", "9223372036854775808ns", "15250w1w", "+", "-", ".", ".h",
	"--1h", "+-1h", "1.2.3h", "1h5", "00", "0.0", "forever", "1e3s", "99999999999999999999h", "\u0661h"}

func TestParseDurationAddsUpItsUnits(t *testing.T) {
	for s, want := range durations {
		if got, err := ParseDuration(s); err != nil || got != want {
			t.Errorf("%q: %v, %v; want %v", s, got, err, want)
		}
	}
	for _, s := range invalidDurations {
		if got, err := ParseDuration(s); err == nil {
			t.Errorf("%q: %v, want an error", s, got)
		}
	}
}

func TestParseExpiresTakesTheFormsOfItsFamily(t *testing.T) {
	for s, janitors := range map[string]bool{
		"2030-01-10": true, "2030-01-10T11:59": true, "2030-01-10T11:59:00Z": true, "2030-02-29": false, "2030-01-10T11:59:00.5Z": false,
		"2030-01-10T1:59": false, "2030-1-10": false, "2030-01-10 11:59": false, "2030-01-10T11:59Z": false, "2030-01-10T11:59:00+00:00": false, "": false, "forever": false,
	} {
		if _, err := ParseJanitorExpires(s); (err == nil) != janitors {
			t.Errorf("%q: %v", s, err)
		}
	}
	for s, valid := range map[string]bool{
		"2030-01-10T11:59:00.5Z": true, "2030-01-10T11:59:00+00:00": true, "2030-01-10": true, "2030-01-10T11:59": true,
		"2030-01-10T11:59:00": false, "tomorrow": false,
	} {
		if _, err := ParseExpires(s); (err == nil) != valid {
			t.Errorf("%q: %v", s, err)
		}
	}
}
