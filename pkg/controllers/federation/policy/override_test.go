// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"unicode/utf8"

	jsonpatch "gopkg.in/evanphx/json-patch.v4"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
)

// overrideRendering renders a federated object with these overrides of c1.
func overrideRendering(kind, template, operations, live string) rendering {
	return rendering{kind: kind, live: live, spec: "template: {" + template + "}, overrides: [{clusterName: c1, clusterOverrides: [" + operations + "]}]"}
}

func (r rendering) wants(want string) rendering { r.want = want; return r }

// addOperations returns operations that add as many members.
func addOperations(n int) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, "{path: /data/a%d, value: c},", i)
	}
	return b.String()
}

func TestOverridesChangeTheTemplate(t *testing.T) {
	const (
		live = "metadata: {name: f, namespace: ns, uid: u, resourceVersion: '7', annotations: {revision: '1'}, ownerReferences: [{name: o}]}"
		head = "apiVersion: v1, kind: ConfigMap, "
	)
	cm := func(operations string) rendering {
		return overrideRendering("", "data: {a: b}, list: [x, w, z]", operations, "")
	}
	update := func(operations string) rendering { return overrideRendering("", "data: {a: b}", operations, live) }
	data := func(data string) string { return head + managed("") + ", data: {" + data + "}, list: [x, w, z]" }
	list := func(list string) string { return head + managed("") + ", data: {a: b}, list: [" + list + "]" }
	updated := func(annotations string) string {
		return head + managed(", uid: u, resourceVersion: '7', ownerReferences: [{name: o}], annotations: {"+annotations+"}") + ", data: {a: b}"
	}
	refused := func(r rendering) rendering { r.failStatus = ApplyOverridesFailed; return r }
	tests := map[string]rendering{
		"replace is the default":                            cm("{path: /data/a, value: c}").wants(data("a: c")),
		"replace of a missing member sets it":               cm("{op: replace, path: /data/new, value: c}").wants(data("a: b, new: c")),
		"replace below a missing parent is refused":         refused(cm("{path: /x/y, value: c}")),
		"replace of a missing index":                        refused(cm("{path: /list/3, value: c}")),
		"replace of an index":                               cm("{path: /list/0, value: c}").wants(list("c, w, z")),
		"replace of the last":                               cm("{path: /list/-1, value: c}").wants(list("x, w, c")),
		"replace of -4":                                     refused(cm("{path: /list/-4, value: c}")),
		"replace of an index that is text":                  refused(cm("{path: /list/a, value: c}")),
		"replace below a text":                              refused(cm("{path: /data/a/b, value: c}")),
		"add a member":                                      cm("{op: add, path: /data/new, value: c}").wants(data("a: b, new: c")),
		"add in a list":                                     cm("{op: add, path: /list/1, value: c}").wants(list("x, c, w, z")),
		"add at the end":                                    cm("{op: add, path: /list/-, value: c}").wants(list("x, w, z, c")),
		"add as the last":                                   cm("{op: add, path: /list/-1, value: c}").wants(list("x, w, z, c")),
		"add after the end":                                 refused(cm("{op: add, path: /list/4, value: c}")),
		"remove a member":                                   cm("{op: remove, path: /data/a}").wants(data("")),
		"remove a missing member":                           refused(cm("{op: remove, path: /data/new}")),
		"remove from a list":                                cm("{op: remove, path: /list/0}").wants(list("w, z")),
		"remove the last":                                   cm("{op: remove, path: /list/-1}").wants(list("x, w")),
		"remove a missing index":                            refused(cm("{op: remove, path: /list/3}")),
		"a value of null, and none":                         cm("{path: /data/a, value: null}, {path: /data/b}").wants(data("a: null, b: null")),
		"operations in their order":                         cm("{op: remove, path: /list/0}, {path: /list/00, value: c}").wants(list("c, z")),
		"escaped slashes and tildes":                        cm("{path: /data/a~1b~0c, value: d}").wants(data("a: b, a/b~c: d")),
		"a member without a name":                           cm("{path: /data/, value: c}").wants(data("a: b, '': c")),
		"a path twice":                                      refused(cm("{path: /data/a, value: c}, {op: add, path: /data/a, value: c}")),
		"a path twice, once with a text before it":          refused(cm("{path: /data/a, value: c}, {op: add, path: x/data/a, value: c}")),
		"an operation that is none":                         refused(cm("{op: move, from: /data, path: /x}")),
		"a test":                                            refused(cm("{op: test, path: /data/a, value: b}")),
		"a path without a slash":                            refused(cm("{path: data, value: c}")),
		"the cluster twice":                                 {spec: "template: {}, overrides: [{clusterName: c1}, {clusterName: c1}]", failStatus: ApplyOverridesFailed},
		"another cluster twice":                             {spec: "template: {}, overrides: [{clusterName: c2}, {clusterName: c2}]", want: head + managed("")},
		"overrides that are text":                           {spec: "template: {}, overrides: text", failStatus: ApplyOverridesFailed},
		"a path that is a number":                           refused(cm("{path: 1, value: c}")),
		"an override may name another version of the group": overrideRendering("Deployment", "", "{path: /apiVersion, value: apps/v1beta1}", "").wants("apiVersion: apps/v1beta1, kind: Deployment, " + managed("")),
		"an override may not name another group":            refused(overrideRendering("Deployment", "", "{path: /apiVersion, value: example.com/v1}", "")),
		"an override may not give a group to a type of the core group": refused(cm("{path: /apiVersion, value: apps/v1}")),
		"an override without the version":                              refused(cm("{op: remove, path: /apiVersion}")),
		"an override of everything may not change the namespace":       refused(cm(`{path: "", value: {apiVersion: v1, kind: ConfigMap, metadata: {name: f, namespace: other}}}`)),
		"all, as it was":                         cm(`{path: "", value: {apiVersion: v1, kind: ConfigMap, metadata: {name: f, namespace: ns}}}`).wants(head + managed("")),
		"all, without the version that is there": refused(update(`{path: "", value: {apiVersion: v1, kind: ConfigMap, metadata: {name: f, namespace: ns}}}`)),
		"all, by a list":                         refused(cm(`{path: "", value: []}`)),
		"all, by nothing":                        refused(cm(`{path: ""}`)),
		"all, by nothing at all":                 refused(cm(`{op: remove, path: ""}`)),
		"an override of metadata may not change the namespace": refused(cm("{path: /metadata, value: {name: f, namespace: other}}")),
		"metadata as it was":               cm("{path: /metadata, value: {name: f, namespace: ns}}").wants(head + managed("") + ", data: {a: b}, list: [x, w, z]"),
		"an override without the metadata": refused(cm("{op: remove, path: /metadata}")),
		"metadata that is text":            refused(cm("{path: /metadata, value: f}")),
		"an override may not change the kind by a path with a text before it": refused(cm("{path: x/kind, value: Secret}")),
		"an override of the kind":                            refused(cm("{path: /kind, value: Secret}")),
		"an override without the kind":                       refused(cm("{op: remove, path: /kind}")),
		"an override of the name":                            refused(cm("{path: /metadata/name, value: g}")),
		"an override of the namespace":                       refused(cm("{path: x/metadata/namespace, value: other}")),
		"a namespace for a Namespace":                        refused(overrideRendering("Namespace", "", "{path: /metadata/namespace, value: other}", "")),
		"an override may not set the resourceVersion":        refused(cm("{path: /metadata/resourceVersion, value: '1'}")),
		"another version of the object":                      refused(update("{path: /metadata/resourceVersion, value: '1'}")),
		"no version of the object":                           refused(update("{op: remove, path: /metadata/resourceVersion}")),
		"a UID":                                              refused(cm("{path: /metadata/uid, value: u}")),
		"another UID":                                        refused(update("{path: /metadata/uid, value: v}")),
		"no UID":                                             refused(update("{op: remove, path: /metadata/uid}")),
		"a generated name":                                   refused(cm("{path: /metadata/generateName, value: f-}")),
		"an owner":                                           refused(cm("{path: /metadata/ownerReferences, value: [{name: a}]}")),
		"an override with another owner":                     refused(update("{op: add, path: /metadata/ownerReferences/0, value: {name: a}}")),
		"another owner in its place":                         refused(update("{path: /metadata/ownerReferences/0, value: {name: a}}")),
		"another name of an owner":                           refused(update("{path: /metadata/ownerReferences/0/name, value: a}")),
		"finalizers":                                         cm("{path: /metadata/finalizers, value: [a/b]}").wants(head + managed(", finalizers: [a/b]") + ", data: {a: b}, list: [x, w, z]"),
		"an override of all labels keeps the managed label":  cm("{path: /metadata/labels, value: {x: v}}").wants(head + "metadata: {name: f, namespace: ns, labels: {kubefed.io/managed: 'true', x: v}}, data: {a: b}, list: [x, w, z]"),
		"an override cannot set the managed label to false":  cm("{path: /metadata/labels, value: {kubefed.io/managed: 'false'}}").wants(data("a: b")),
		"labels are null":                                    cm("{path: /metadata/labels, value: null}").wants(data("a: b")),
		"labels are numbers":                                 refused(cm("{path: /metadata/labels, value: {a: 1}}")),
		"labels are text":                                    refused(cm("{path: /metadata/labels, value: a}")),
		"annotations of a new object":                        cm("{op: add, path: /metadata/annotations, value: {foo: bar}}").wants(head + managed(", annotations: {foo: bar}") + ", data: {a: b}, list: [x, w, z]"),
		"all annotations, and the cluster's stay":            update("{op: add, path: /metadata/annotations, value: {foo: bar}}").wants(updated("foo: bar, revision: '1'")),
		"replace all annotations, and they stay":             update("{path: /metadata/annotations, value: {foo: bar, revision: '2'}}").wants(updated("foo: bar, revision: '2'")),
		"an override may set all annotations and remove one": update("{op: add, path: /metadata/annotations, value: {foo: bar}}, {op: remove, path: /metadata/annotations/foo}").wants(updated("revision: '1'")),
		"all annotations, and the cluster's is removed":      update("{op: add, path: /metadata/annotations, value: {foo: bar}}, {op: remove, path: /metadata/annotations/revision}").wants(updated("foo: bar")),
		"over 1.5 MiB":                                       refused(cm("{path: /data/a, value: " + strings.Repeat("a", maxObject) + "}")),
		"over 10,000 operations":                             refused(cm(addOperations(maxOperations + 1))),
		"deeper than the object":                             refused(cm("{path: " + strings.Repeat("/a", 100_000) + ", value: c}")),
	}
	for name, tc := range tests {
		t.Run(name, tc.run)
	}
}

// TestOverridesOfALongListStayCheap bounds what a tenant's overrides cost.
func TestOverridesOfALongListStayCheap(t *testing.T) {
	var operations []Operation
	for i := range maxOperations {
		operations = append(operations, Operation{Op: opAdd, Path: fmt.Sprintf("/list/%d", -1-i), Value: true})
	}
	f := &Federated{Name: "f", Namespace: "ns", Template: map[string]any{"list": []any{}}, overrides: []clusterOverrides{{"c1", operations}}}
	got, err := Render(RenderRequest{Type: typeOf("ConfigMap"), Federated: f, Cluster: "c1"})
	assert.NoError(t, err)
	if list := got.Object["list"].([]any); len(list) != maxOperations {
		t.Errorf("%d items", len(list))
	}
}

const fuzzLive = `{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"f","namespace":"ns","resourceVersion":"7","uid":"u",
	"labels":{"a":"b"},"annotations":{"x":"y"},"ownerReferences":[{"name":"o"}]},"data":{"a":"b"}}`

// FuzzOverrides looks for overrides that make another object than the federated object's.
func FuzzOverrides(f *testing.F) {
	f.Add(`{"data":{"a":"b"}}`, `[{"path":"","value":{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"f","namespace":"other"}}}]`, true)
	f.Add(`{"apiVersion":"v1","list":[1,2]}`, `[{"op":"add","path":"/metadata","value":{"name":"g"}},{"op":"remove","path":"x/kind"}]`, false)
	f.Add(`{"metadata":{"labels":{"a":"b"}}}`, `[{"path":"x/metadata/namespace","value":"other"},{"path":"/metadata/annotations","value":{"c":"d"}}]`, true)
	f.Add(`{"kind":"Secret","apiVersion":"apps/v1"}`, `[{"op":"remove","path":"/list/-1"},{"path":"/apiVersion","value":"apps/v1"}]`, false)
	f.Add(`{"metadata":{"name":"g","namespace":"other"}}`, `[{"path":"/metadata/labels/kubefed.io~1managed","value":"false"}]`, true)
	f.Add(`null`, `[{"path":"/metadata/ownerReferences/-","op":"add","value":{"name":"o"}}]`, true)
	f.Add(`null`, `[{"path":"/metadata/ownerReferences/0/name","value":"p"}]`, true)
	f.Fuzz(func(t *testing.T, template, operations string, exists bool) {
		u := &unstructured.Unstructured{Object: map[string]any{"metadata": map[string]any{"name": "f", "namespace": "ns"}}}
		var spec, overrides any
		if json.Unmarshal([]byte(template), &spec) != nil || json.Unmarshal([]byte(operations), &overrides) != nil {
			t.Skip()
		}
		u.Object["spec"] = map[string]any{"template": spec, "overrides": []any{map[string]any{"clusterName": "c1", "clusterOverrides": overrides}}}
		request := RenderRequest{Type: typeOf("ConfigMap"), Federated: ReadFederated(u), Cluster: "c1"}
		if exists {
			request.Live = &unstructured.Unstructured{}
			assert.NoError(t, request.Live.UnmarshalJSON([]byte(fuzzLive)))
		}
		before := u.DeepCopy()
		got, err := Render(request)
		assert.Equal(t, "federated object after Render", before, u)
		digest := ReadDigest(SummarizeFederated(u))
		if err != nil {
			return
		}
		sent, err := got.MarshalJSON()
		assert.NoError(t, err)
		// What the API server reads may differ from what was checked.
		var decoded unstructured.Unstructured
		assert.NoError(t, decoded.UnmarshalJSON(sent))
		version, uid := "", types.UID("")
		if exists {
			version, uid = "7", "u"
		}
		if decoded.GetKind() != "ConfigMap" || decoded.GroupVersionKind().Group != "" || decoded.GetName() != "f" || decoded.GetNamespace() != "ns" ||
			decoded.GetResourceVersion() != version || decoded.GetUID() != uid || exists && fmt.Sprint(decoded.Object["metadata"].(map[string]any)["ownerReferences"]) != "[map[name:o]]" || !exists && decoded.GetOwnerReferences() != nil || decoded.GetLabels()[ManagedLabel] != "true" || len(sent) > maxObject+1 {
			t.Fatalf("%s and %s give %s", template, operations, sent)
		}
		if labels := hashStrings(decoded.GetLabels()); digest.ForCluster("c1").Labels != labels {
			t.Fatalf("%s and %s give other labels than their digest says: %s", template, operations, sent)
		}
	})
}

// FuzzPatch holds apply against json-patch v4.
func FuzzPatch(f *testing.F) {
	document := `{"a":{"b":[1,[2],{"c":null}]},"":"x","d~/":{}}`
	for _, path := range []string{"/a/b/0", "/a/b/-1", "/a/b/-", "/a/b/1/0", "/a/b/2/c", "/", "/d~0~1/e", "x/a", "a", "/a/b/+1", "/a/b/00", "/a/c/d"} {
		for _, op := range []string{opAdd, opRemove, opReplace} {
			f.Add(document, op, path, `{"v":1}`)
		}
	}
	f.Fuzz(func(t *testing.T, document, op, path, value string) {
		var object map[string]any
		var v any
		if json.Unmarshal([]byte(document), &object) != nil || object == nil || json.Unmarshal([]byte(value), &v) != nil || op != opAdd && op != opRemove && op != opReplace || !utf8.ValidString(path) {
			t.Skip()
		}
		o := Operation{Op: op, Path: path, Value: v}
		keys, err := o.pointer()
		if _, isObject := v.(map[string]any); len(keys) == 0 && err == nil && !isObject || overlaps(keys, "metadata", "annotations") {
			t.Skip() // where the two differ on purpose
		}
		plain, _ := json.Marshal(object)
		patch, patchErr := json.Marshal([]Operation{o})
		if patchErr != nil {
			t.Fatal(patchErr)
		}
		decoded, patchErr := jsonpatch.DecodePatch(patch)
		if patchErr != nil {
			t.Fatal(patchErr)
		}
		want, wantErr := decoded.Apply(plain)
		var got any
		if err == nil {
			got, err = o.apply(object, keys)
		}
		if (err == nil) != (wantErr == nil) {
			t.Fatalf("%s %q in %s: %v, want %v", op, path, plain, err, wantErr)
		}
		if err != nil {
			return
		}
		var wanted any
		assert.NoError(t, json.Unmarshal(want, &wanted))
		gotJSON, _ := json.Marshal(got)
		wantJSON, _ := json.Marshal(wanted)
		if !bytes.Equal(gotJSON, wantJSON) {
			t.Fatalf("%s %q in %s: %s, want %s", op, path, plain, gotJSON, wantJSON)
		}
	})
}
