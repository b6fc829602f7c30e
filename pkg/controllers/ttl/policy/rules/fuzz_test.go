// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package rules

import (
	"encoding/json"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
)

// FuzzParse holds that no file panics, and that every file without an error has rules that can be
// evaluated.
func FuzzParse(f *testing.F) {
	for _, text := range []string{"", "rules: []", "rules:" + r, "rules: [{name: a, resources: ['*'], ttl: forever}]", "rules: [{name: a, resources: [pods], when: object.a.b, since: object.c, ttl: 1h}]",
		"rules: [{name: a, resources: [pods], when: 'object.spec.containers.all(c, c.image.matches(\"^a\"))', ttl: 1w}]", "a: &a [*a]", "rules: [null, {}]"} {
		f.Add(text)
	}
	pod := object(f, pods, benchmarkPod())
	f.Fuzz(func(t *testing.T, text string) {
		set, err := Parse([]byte(text))
		if err != nil {
			if set != nil {
				t.Fatal("rules and an error")
			}
			return
		}
		typed := set.ForType(pods)
		if typed == nil {
			return
		}
		for _, obj := range pod {
			v, err := typed.Evaluate(obj)
			if (v.Problem != 0) != (err != nil) || Decode(v.Encode()) != v {
				t.Fatalf("%+v, %v", v, err)
			}
		}
	})
}

// FuzzEvaluate holds that a Pod has the same verdict as the cache decodes it and as it is read
// live, whatever is in it, and the same one again.
func FuzzEvaluate(f *testing.F) {
	for _, pod := range []string{`{}`, `{"metadata":{"labels":{"a":"b"}}}`, `{"status":{"phase":"Failed","reason":"Evicted","startTime":"2030-01-10T10:00:00Z"}}`,
		`{"metadata":{"creationTimestamp":"2030-01-10T10:00:00Z"},"spec":{"containers":[{"image":"a","ports":[{"containerPort":1}]}]}}`,
		`{"status":{"conditions":[{"type":"Ready","status":"True","lastTransitionTime":null}]}}`} {
		f.Add([]byte(pod))
	}
	set := parse(f, `
- {name: conditions, resources: [pods], ttl: 1h, when: "object.?status.conditions.orValue([]).exists(c, c.type == 'Ready')", since: "timestamp(object.status.conditions[0].lastTransitionTime)"}
- {name: labels, resources: [pods], ttl: 1h, when: "object.metadata.?labels.a.orValue('') != ''"}
- {name: every, resources: ["*"], ttl: 1h, when: "object.metadata.?ownerReferences.orValue([]).exists(o, o.kind == 'A') || has(object.metadata.labels) && size(object.metadata.labels) > 1"}
- {name: images, resources: [pods], ttl: 1h, when: "has(object.spec) && object.spec.?containers.orValue([]).exists(c, c.?image.orValue('').matches('a+') || c.?ports.orValue([]).exists(p, p.containerPort > 1))"}
- {name: started, resources: [pods], ttl: 1h, when: "object.?status.phase.orValue('') == 'Failed'", since: timestamp(object.status.startTime)}`).ForType(pods)
	f.Fuzz(func(t *testing.T, text []byte) {
		pod := &corev1.Pod{}
		if json.Unmarshal(text, pod) != nil {
			return
		}
		content, err := runtime.DefaultUnstructuredConverter.ToUnstructured(pod)
		if err != nil {
			return
		}
		cached, errCached := set.Evaluate(pod)
		live, errLive := set.Evaluate(&unstructured.Unstructured{Object: content})
		again, _ := set.Evaluate(pod)
		if cached != live || cached != again {
			t.Fatalf("%+v, %v in the cache; %+v, %v live; %+v again", cached, errCached, live, errLive, again)
		}
	})
}
