// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package judge

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
)

// parseFederation builds the history of a federation from steps, each of which is "SECOND BY WHAT" and a
// revision of all stores. The member is c2, the object f in the namespace ns.
//
//	"1 a leads"  "1 user places c1 c2"  "1 user deletes"  "1 user places-namespace c2"  "1 user changes 7"
//	"2 a creates 7"  "3 a updates 8"  "4 a removes"  "5 a removes-without-answer"
//
// A request takes half a second.
func parseFederation(t *testing.T, steps []string) *Members {
	t.Helper()
	lease := New(types.NamespacedName{Namespace: "ns", Name: "lease"}, "", func(p string) bool { return p == "a" || p == "b" })
	m := NewMembers(lease)
	terms := 0
	for i, step := range append([]string{"0 user places-namespace c1 c2"}, steps...) {
		words := strings.Fields(step)
		var second int
		if _, err := fmt.Sscan(words[0], &second); err != nil {
			t.Fatal(err)
		}
		writer, action, names := words[1], words[2], words[3:]
		object := map[string]any{"metadata": map[string]any{"name": "f", "resourceVersion": fmt.Sprint(i + 1)}}
		e := newEvent(writer, "patch", "federatedconfigmaps", nil)
		e.ObjectRef.Name, e.ObjectRef.APIGroup = "f", "types.kubefed.io"
		at := time.Unix(int64(second), 0)
		e.RequestReceivedTimestamp, e.StageTimestamp = metav1.NewMicroTime(at), metav1.NewMicroTime(at.Add(time.Second/2))
		clusters := []map[string]string{}
		for _, name := range names {
			clusters = append(clusters, map[string]string{"name": name})
		}
		add := m.AddHost
		member := func(verb string) {
			add, e.Verb = func(e auditv1.Event) error { return m.AddMember("c2", e) }, verb
			e.ObjectRef.Resource, e.ObjectRef.APIGroup = "configmaps", ""
		}
		switch action {
		case "leads":
			terms++
			object["metadata"] = map[string]any{"name": "lease", "namespace": "ns", "resourceVersion": fmt.Sprint(i + 1)}
			object["spec"] = map[string]any{"holderIdentity": writer + "_1", "leaseTransitions": terms}
			e.ObjectRef.Resource, e.ObjectRef.Name, e.ObjectRef.APIGroup = "leases", "lease", "coordination.k8s.io"
		case "places", "places-namespace":
			object["spec"] = map[string]any{"placement": map[string]any{"clusters": clusters}}
			if action == "places-namespace" {
				object["metadata"].(map[string]any)["name"] = "ns"
				e.ObjectRef.Resource = "federatednamespaces"
			}
		case "changes": // it is in c2
			object["spec"] = map[string]any{"template": map[string]any{"data": map[string]any{"content": names[0]}},
				"placement": map[string]any{"clusters": []any{map[string]any{"name": "c2"}}}}
		case "deletes":
			e.Verb = "delete"
		case "creates", "updates":
			member(strings.TrimSuffix(action, "s"))
			object["data"] = map[string]any{"content": names[0]}
		case "removes", "removes-without-answer":
			member("delete")
			if action != "removes" {
				e.ResponseStatus.Code = 504
			}
		default:
			t.Fatalf("step %q", step)
		}
		raw, err := json.Marshal(object)
		assert.NoError(t, err)
		e.ResponseObject = &runtime.Unknown{Raw: raw}
		assert.NoError(t, add(e))
	}
	return m
}

func TestJudgeFindsWrongWritesToMembers(t *testing.T) {
	for name, tc := range map[string]struct {
		steps              []string
		wrong, late, older int
	}{
		"what is not wanted may be deleted": {
			steps: []string{"1 a leads", "1 user places c1 c2", "2 a creates 1", "30 user places c1", "31 a removes"}},
		"what is wanted may not": {
			steps: []string{"1 a leads", "1 user places c1 c2", "2 a creates 1", "31 a removes"}, wrong: 1},
		"what another member wants may": {
			steps: []string{"1 a leads", "1 user places c1", "31 a removes"}},
		"a change of what is wanted is no interruption": {
			steps: []string{"1 a leads", "1 user places c2", "29 user places c1 c2", "31 a removes"}, wrong: 1},
		"what is not wanted any more only afterwards may not": {
			steps: []string{"1 a leads", "1 user places c2", "31 a removes", "32 user places c1"}, wrong: 1},
		"what is not wanted any more meanwhile may": {
			steps: []string{"1 a leads", "1 user places c2", "31 user places c1", "31 a removes"}},
		"what has just become wanted may": {
			steps: []string{"1 a leads", "1 user places c1", "25 user places c2", "31 a removes"}},
		"what has become wanted again may not": {
			steps: []string{"1 a leads", "1 user places c2", "5 user places c1", "6 user places c2", "31 a removes"}, wrong: 1},
		"a deleted federated object wants nothing": {
			steps: []string{"1 a leads", "1 user places c2", "30 user deletes", "31 a removes"}},
		"a namespace that is not placed wants nothing": {
			steps: []string{"1 a leads", "1 user places c2", "2 user places-namespace c1", "31 a removes"}},
		"a deletion without an answer counts": {
			steps: []string{"1 a leads", "1 user places c2", "31 a removes-without-answer"}, wrong: 1},
		"a successor's writes are in its term": {
			steps: []string{"1 a leads", "2 a creates 1", "3 b leads", "4 b updates 2"}},
		"a write after the successor has acquired is late": {
			steps: []string{"1 a leads", "2 a creates 1", "3 b leads", "4 a updates 2"}, late: 1},
		"a write that was received before is not": {
			steps: []string{"1 a leads", "3 a updates 2", "3 b leads"}},
		"who never led writes late": {
			steps: []string{"1 a leads", "4 b updates 2"}, late: 1},
		"an older content is found": {
			steps: []string{"1 a leads", "2 a creates 1", "3 a updates 3", "4 a updates 2", "5 a updates 4"}, older: 1},
		"the content is in a new object too": {
			steps: []string{"1 a leads", "2 a creates 3", "3 a removes", "4 a creates 2"}, older: 1},
		"the same content is not older": {
			steps: []string{"1 a leads", "2 a creates 3", "3 a updates 3"}},
	} {
		t.Run(name, func(t *testing.T) {
			m := parseFederation(t, tc.steps)
			slices.Reverse(m.writes) // the order of events does not matter
			got := m.Judge()
			if len(got.Wrong) != tc.wrong || len(got.Late) != tc.late || len(got.Older) != tc.older {
				t.Errorf("%d wrong, %d late, %d older, want %d, %d, %d:\n%s", len(got.Wrong), len(got.Late), len(got.Older),
					tc.wrong, tc.late, tc.older, strings.Join(got.Findings(), "\n"))
			}
		})
	}
}

func TestDelaysUntilAMemberHasTheContent(t *testing.T) {
	m := parseFederation(t, []string{"1 a leads", "1 user changes 1", "2 user changes 2", "4 a updates 2", "4 user changes 3", "5 user changes 4", "9 a updates 4", "10 user changes 5"})
	got, unfinished := m.Delays("c2", 1)
	if want := []time.Duration{2 * time.Second, 4 * time.Second, 5 * time.Second}; !slices.Equal(got, want) || unfinished != 1 {
		t.Errorf("%v, %d unfinished, want %v, 1", got, unfinished, want)
	}
}
