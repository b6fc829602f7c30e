// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
)

func TestVersionsHashTemplateAndOverrides(t *testing.T) {
	const fooBar, empty, noOverrides = "4682012eb72f035cfe2b227efe7ca8c8", "8a80554c91d9fca8acb82f023de02f11", "2979b7538b527abe06492021841caf47"
	tests := map[string]struct {
		spec string
		want Versions
	}{
		"a vector":                {"{template: {data: {foo: bar}}}", Versions{fooBar, noOverrides}},
		"an empty template":       {"{template: {}}", Versions{empty, noOverrides}},
		"no template":             {"{placement: {}}", Versions{"", noOverrides}},
		"an empty spec":           {"{}", Versions{"", noOverrides}},
		"no spec":                 {"null", Versions{}},
		"overrides of null":       {"{overrides: null}", Versions{"", noOverrides}},
		"overrides that are text": {"{overrides: text}", Versions{}},
		"keys in another order":   {"{template: {b: 1, a: '<'}}", Versions{sumOf(`{"a":"\u003c","b":1}`), noOverrides}},
		"an empty list":           {"{overrides: []}", Versions{"", sumOf(`{"overrides":[]}`)}},
		"no list for a cluster":   {"{overrides: [{clusterName: c}, {clusterName: d, clusterOverrides: []}]}", Versions{"", sumOf(`{"overrides":[{"clusterName":"c"},{"clusterName":"d"}]}`)}},
		"fields in their order": {"{overrides: [{clusterOverrides: [{value: {b: 1, a: 2}, path: /x, op: add}], clusterName: c}]}",
			Versions{"", sumOf(`{"overrides":[{"clusterName":"c","clusterOverrides":[{"op":"add","path":"/x","value":{"a":2,"b":1}}]}]}`)}},
		"no op and no value": {"{overrides: [{clusterName: c, clusterOverrides: [{path: /x, op: ''}, {path: /y, value: null}, {path: /z, value: ''}]}]}",
			Versions{"", sumOf(`{"overrides":[{"clusterName":"c","clusterOverrides":[{"path":"/x"},{"path":"/y"},{"path":"/z","value":""}]}]}`)}},
		"numbers as float64": {"{overrides: [{clusterName: c, clusterOverrides: [{path: /x, value: 9007199254740993}, {path: /y, value: 1000000000000000000000}]}]}",
			Versions{"", sumOf(`{"overrides":[{"clusterName":"c","clusterOverrides":[{"path":"/x","value":9007199254740992},{"path":"/y","value":1e+21}]}]}`)}},
		"a fraction and a whole number of a template": {"{template: {a: 1.5, b: 9007199254740993}}", Versions{sumOf(`{"a":1.5,"b":9007199254740993}`), noOverrides}},
		"fields that the versions do not have":        {"{overrides: [{clusterName: c, note: x}]}", Versions{"", sumOf(`{"overrides":[{"clusterName":"c"}]}`)}},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			assert.Equal(t, "versions", tc.want, ReadFederated(object(t, "spec: "+tc.spec)).Versions())
		})
	}
}

// sumOf is the version of JSON text, which md5OfJSON writes as it is.
func sumOf(text string) string { return md5OfJSON(rawJSON(text)) }

type rawJSON string

func (r rawJSON) MarshalJSON() ([]byte, error) { return []byte(r), nil }

func TestPropagatedNameIsValidAndUnique(t *testing.T) {
	names := map[string]bool{}
	for name, fits := range map[string]bool{"f": true, strings.Repeat("f", 243): true, strings.Repeat("f", 244): false, strings.Repeat("f", 243) + "g": false,
		strings.Repeat("f", 209) + "." + strings.Repeat("f", 40): false} {
		got := PropagatedName(typeOf("ConfigMap"), name)
		if problems := validation.IsDNS1123Subdomain(got); len(problems) > 0 || names[got] || (got == "configmap-"+name) != fits {
			t.Errorf("%s has the PropagatedVersion %s, %q", name, got, problems)
		}
		names[got] = true
	}
}

func TestPropagatedIsTheSameInAnyOrder(t *testing.T) {
	propagatedTo := func(clusters map[string]string) Propagated {
		return Propagated{Versions: Versions{"t", "o"}, Clusters: clusters}
	}
	propagated := propagatedTo(map[string]string{"b": "rv:2", "a": "gen:1"})
	assert.Equal[any](t, "versions of clusters", []clusterVersion{{"a", "gen:1"}, {"b", "rv:2"}}, propagated.Status()["clusterVersions"])
	reordered := ReadPropagated(object(t, "status: {templateVersion: t, overridesVersion: o, clusterVersions: [{clusterName: b, version: 'rv:2'}, {clusterName: a, version: 'gen:1'}]}"))
	if !reordered.Equal(propagated) {
		t.Errorf("another order is another PropagatedVersion: %v", reordered)
	}
	for title, other := range map[string]Propagated{"version": propagatedTo(map[string]string{"b": "rv:3", "a": "gen:1"}), "cluster": propagatedTo(map[string]string{"a": "gen:1"}),
		"template": {Versions: Versions{"u", "o"}, Clusters: propagated.Clusters}} {
		if propagated.Equal(other) {
			t.Errorf("another %s is the same", title)
		}
	}
	for _, text := range []string{"{templateVersion: t, overridesVersion: o, clusterVersions: [{clusterName: b, version: 'rv:2'}, {clusterName: a, version: 'gen:1'}]}", "{overridesVersion: o}", "{}"} {
		u := object(t, "metadata: {ownerReferences: [{uid: '7'}]}, status: "+text)
		assert.Equal(t, "what a summary tells", ReadPropagated(u), ReadPropagatedSummary(SummarizePropagated(u)))
	}
	assert.Equal(t, "what no summary tells", Propagated{}, ReadPropagatedSummary(nil))
	assert.Equal(t, "what malformed versions tell", Propagated{}, ReadPropagated(object(t, "status: {clusterVersions: 7}")))
	if none := ReadPropagated(object(t, "spec: {}")); !none.Equal(Propagated{}) {
		t.Error(none)
	}
}

// TestPropagatedVersionsHoldUntilTheSpecChanges has versions of c1 and c2.
func TestPropagatedVersionsHoldUntilTheSpecChanges(t *testing.T) {
	const template = "template: {data: {a: b}}"
	override := func(cluster, value string) string {
		return ", overrides: [{clusterName: c3}, {clusterName: " + cluster + ", clusterOverrides: [{path: /data/a, value: " + value + "}]}]"
	}
	tests := map[string]struct {
		written, before, after string // specs; before is "" after a restart
		want                   string
	}{
		"all versions hold after a restart if the template is the same": {written: template, after: template, want: "c1 c2"},
		"F is as it was":       {written: template, before: template, after: template, want: "c1 c2"},
		"the template changed": {written: template, before: template, after: "template: {}"},
		"the version of c1 is void when its override changes":          {written: template + override("c1", "x"), before: template + override("c1", "x"), after: template + override("c1", "z"), want: "c2"},
		"all versions are void after a restart if an override changed": {written: template + override("c1", "x"), after: template + override("c1", "z")},
		"c1 is no longer overridden":                                   {written: template + override("c1", "x"), before: template + override("c1", "x"), after: template, want: "c2"},
		"an override of a cluster that holds nothing":                  {written: template, before: template, after: template + override("c4", "x"), want: "c1 c2"},
		"F had changed when it was written":                            {written: template, before: template + override("c1", "x"), after: template + override("c1", "z")},
		"the overrides of another cluster cannot be read":              {written: template, before: template, after: template + ", overrides: text"},
		"c1 is named twice":                                            {written: template + override("c1", "x"), before: template + override("c1", "x"), after: template + strings.Replace(override("c1", "x"), "c3", "c1", 1), want: "c2"},
		"c1 is named once more": {written: template + override("c1", "x"), before: template + override("c1", "x"), want: "c2",
			after: template + override("c1", "x")[:len(override("c1", "x"))-1] + ", {clusterName: c1}]"},
		"nothing but the placement changed":                   {written: template, before: template, after: template + ", placement: {clusters: []}", want: "c1 c2"},
		"the overrides could not be read when it was written": {written: template + ", overrides: text", after: template + ", overrides: text"},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			p := Propagated{Versions: federated(t, tc.written).Versions(), Clusters: map[string]string{"c1": "gen:1", "c2": "rv:2"}}
			var before *Digest
			if tc.before != "" {
				d := federated(t, tc.before).Digest()
				before = &d
			}
			got := p.ValidVersions(before, federated(t, tc.after).Digest())
			if names := slices.Sorted(maps.Keys(got)); strings.Join(names, " ") != tc.want {
				t.Errorf("%v, want %s", got, tc.want)
			}
		})
	}
}

func TestDigestKeepsWhatDecides(t *testing.T) {
	const spec = "template: {metadata: {labels: {a: b}}, data: {a: b}}, placement: {clusters: [{name: c1}]}, overrides: [" +
		"{clusterName: c2, clusterOverrides: [{path: /data/a, value: c}, {op: add, path: /metadata/labels/c, value: d}, {op: remove, path: /data/z}]}, " +
		"{clusterName: c1, clusterOverrides: [{op: add, path: /metadata/annotations, value: {a: b}}]}]"
	f := object(t, "metadata: {name: f, namespace: ns, finalizers: [kubefed.io/sync-controller]}, spec: {"+spec+"}")
	d := ReadDigest(SummarizeFederated(f))
	assert.Equal(t, "digest", ReadFederated(f).Digest(), d)
	if d.Versions.Template == "" || !d.HasFinalizer || !slices.Equal(d.Placement.Clusters, []string{"c1"}) {
		t.Errorf("%+v", d)
	}
	for cluster, want := range map[string]struct {
		labels      map[string]string
		overridden  bool
		annotations bool
	}{
		"c1": {map[string]string{"a": "b"}, true, true},
		"c2": {map[string]string{"a": "b", "c": "d"}, true, false},
		"c3": {map[string]string{"a": "b"}, false, false},
	} {
		want.labels[ManagedLabel] = "true"
		if got := d.ForCluster(cluster); got.Labels != hashStrings(want.labels) || (got.Hash != 0) != want.overridden || got.Annotations != want.annotations {
			t.Errorf("%s: %+v", cluster, got)
		}
	}
	if d.ContentHash("c1") == d.ContentHash("c3") || d.ContentHash("c3") != d.ContentHash("c4") {
		t.Error("the content of clusters")
	}
}

func TestLiveObjectIsReadBackFromItsSummary(t *testing.T) {
	deleted := metav1.NewTime(now)
	tests := map[string]struct {
		object metav1.ObjectMeta
		want   LiveObject
	}{
		"an object with a generation": {metav1.ObjectMeta{UID: "u", ResourceVersion: "7", Generation: 3, Labels: map[string]string{"a": "b"}, Annotations: map[string]string{"c": "d"}},
			LiveObject{"u", "gen:3", false, hashStrings(map[string]string{"a": "b"}), hashStrings(map[string]string{"c": "d"})}},
		"an object without a generation that is being deleted": {metav1.ObjectMeta{UID: "u", ResourceVersion: "7", DeletionTimestamp: &deleted}, LiveObject{"u", "rv:7", true, hashStrings(nil), hashStrings(map[string]string{})}},
		"the largest generation":                               {metav1.ObjectMeta{Generation: math.MaxInt64}, LiveObject{"", fmt.Sprintf("gen:%d", math.MaxInt64), false, hashStrings(nil), hashStrings(nil)}},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			summary := SummarizeLiveObject(&tc.object)
			if len(summary) > 26 {
				t.Errorf("%d bytes", len(summary))
			}
			got := ReadLiveObject(&tc.object, summary)
			assert.Equal(t, "live object", tc.want, got)
			if got.Version != ObjectVersion(&tc.object) {
				t.Errorf("version %s", got.Version)
			}
		})
	}
	if got := ReadLiveObject(&metav1.ObjectMeta{ResourceVersion: "7"}, nil); got.Version != "" {
		t.Errorf("got the version %s without a summary", got.Version)
	}
}

// TestDigestStaysSmall bounds the digest of a federated object. TestLiveObjectIsReadBackFromItsSummary bounds
// the summary of a cluster's object.
func TestDigestStaysSmall(t *testing.T) {
	spec := "template: {data: {a: '" + strings.Repeat("x", 100_000) + "'}}, placement: {clusterSelector: {}}"
	if n := len(SummarizeFederated(object(t, "spec: {"+spec+"}"))); n > 250 {
		t.Errorf("%d bytes of an F without overrides", n)
	}
	spec += ", overrides: ["
	for i := range 20 {
		spec += fmt.Sprintf("{clusterName: c%02d, clusterOverrides: [{path: /data/a, value: '%s'}]}, ", i, strings.Repeat("x", 1000))
	}
	if n := len(SummarizeFederated(object(t, "spec: {"+spec+"]}"))); n > 250+20*70 {
		t.Errorf("%d bytes of an F with 20 overrides", n)
	}
}
