// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package judge

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"
	"k8s.io/utils/ptr"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
)

// parseHistory builds the history of a test from a list of steps; each is one revision of etcd, from 1
// on. The processes are a, b and c, their identities a_1, b_1, c_1; hand is somebody else.
//
//	"a acquires"  "a renews"  "a releases"  "a creates"  "a writes"  "a claims an hour"
//	"hand takes"  "hand clears"  "hand edits"  "hand deletes"
//
// A step with the prefix "unlogged:" is not in the log; a watch has shown it. A step with the
// prefix "cancelled:" is in the log without success, but a watch has shown that it was executed.
func parseHistory(t *testing.T, steps []string) *History {
	t.Helper()
	h := New(types.NamespacedName{Namespace: "ns", Name: "lease"}, "state", func(p string) bool { return p == "a" || p == "b" || p == "c" })
	lease := &coordinationv1.Lease{}
	lease.Name, lease.Namespace, lease.UID = "lease", "ns", "uid"
	for i, step := range steps {
		step, unlogged := strings.CutPrefix(step, "unlogged: ")
		step, cancelled := strings.CutPrefix(step, "cancelled: ")
		writer, action, _ := strings.Cut(step, " ")
		if action == "writes" {
			object := metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Name: "web", ResourceVersion: fmt.Sprint(i + 1)}}
			object.Annotations = map[string]string{"state": fmt.Sprint(i + 1)}
			if cancelled {
				e := newEvent(writer, "patch", "deployments", object)
				e.RequestObject, e.ResponseObject, e.ResponseStatus.Code = e.ResponseObject, nil, 504
				assert.NoError(t, h.AddEvent(e))
			}
			addStep(t, unlogged || cancelled, func() error { return h.AddObject("deployments", &object) }, h, newEvent(writer, "patch", "deployments", object))
			continue
		}
		lease = lease.DeepCopy()
		lease.ResourceVersion = fmt.Sprint(i + 1)
		switch action {
		case "acquires":
			lease.Spec.HolderIdentity, lease.Spec.LeaseTransitions = ptr.To(writer+"_1"), ptr.To(ptr.Deref(lease.Spec.LeaseTransitions, 0)+1)
		case "claims an hour":
			lease.Spec.LeaseDurationSeconds = ptr.To[int32](3600)
		case "takes":
			lease.Spec.HolderIdentity = ptr.To(writer + "_1")
		case "releases", "clears":
			lease.Spec.HolderIdentity = ptr.To("")
		case "creates":
			lease.UID += "x"
			lease.Spec.HolderIdentity, lease.Spec.LeaseTransitions = ptr.To(writer+"_1"), ptr.To[int32](0)
		case "renews", "edits", "deletes":
		default:
			t.Fatalf("step %q", step)
		}
		lease.ManagedFields = []metav1.ManagedFieldsEntry{{Manager: writer, FieldsV1: metav1.NewFieldsV1(`{"f:spec":{"f:renewTime":{}}}`)}}
		addStep(t, unlogged || action == "deletes", func() error { return h.AddLease(lease, action == "deletes") }, h, newEvent(writer, "update", "leases", lease))
	}
	return h
}

func addStep(t *testing.T, unlogged bool, watched func() error, h *History, logged auditv1.Event) {
	t.Helper()
	err := watched() // a watch shows everything
	if err == nil && !unlogged {
		err = h.AddEvent(logged)
	}
	assert.NoError(t, err)
}

func newEvent(writer, verb, resource string, object any) auditv1.Event {
	raw, _ := json.Marshal(object) // API types always marshal
	e := auditv1.Event{Stage: auditv1.StageResponseComplete, Verb: verb, UserAgent: writer + "/v1 (linux)/x",
		ResponseStatus: &metav1.Status{Code: 200}, ResponseObject: &runtime.Unknown{Raw: raw},
		ObjectRef: &auditv1.ObjectReference{Resource: resource, Namespace: "ns", Name: "web"}}
	if resource == "leases" {
		e.ObjectRef.Name = "lease"
	}
	return e
}

func TestJudgeFindsWritesOfOthers(t *testing.T) {
	for name, tc := range map[string]struct {
		steps        []string
		fenced       bool
		findings     []string // REVISION VERDICT
		acquisitions int
		unlogged     int
		former       int // at least
	}{
		"the holder may write, also between renewals": {
			steps: []string{"a acquires", "a writes", "a renews", "a writes"}, acquisitions: 1},
		"who has never led may not write": {
			steps: []string{"a acquires", "b writes"}, findings: []string{"2 never led"}, acquisitions: 1},
		"nobody may write before the first acquisition": {
			steps: []string{"a writes", "a acquires"}, findings: []string{"1 never led"}, acquisitions: 1},
		"the holder may not write after another has acquired": {
			steps: []string{"a acquires", "b acquires", "a writes", "b writes"}, findings: []string{"3 late, before the successor's first write"}, acquisitions: 2},
		"a write after another's first write is worse": {
			steps: []string{"a acquires", "b acquires", "b writes", "a writes"}, findings: []string{"4 overlaps with the successor's writes"}, acquisitions: 2},
		"the former's last write may come after another has acquired on evidence": {
			steps:    []string{"a acquires", "a claims an hour", "b acquires", "a writes", "b writes"},
			findings: []string{"4 late and in order, before the first write of a successor behind the fence"}, acquisitions: 2},
		"the former's last write may not come after the other has written": {
			steps:    []string{"a acquires", "a claims an hour", "b acquires", "b writes", "a writes"},
			findings: []string{"5 overlaps with the successor's writes"}, acquisitions: 2},
		"the former's last write may come after another has acquired that writes only behind the fence in the API server": {
			steps: []string{"a acquires", "b acquires", "a writes", "b writes"}, fenced: true,
			findings: []string{"3 late and in order, before the first write of a successor behind the fence"}, acquisitions: 2},
		"the fence in the API server does not excuse a write after the other's": {
			steps: []string{"a acquires", "b acquires", "b writes", "a writes"}, fenced: true,
			findings: []string{"4 overlaps with the successor's writes"}, acquisitions: 2},
		"the fence in the API server does not excuse a write after a release": {
			steps: []string{"a acquires", "a releases", "a writes"}, fenced: true,
			findings: []string{"3 after the release"}, acquisitions: 1},
		"evidence does not excuse a write after a third has acquired": {
			steps:    []string{"a acquires", "a claims an hour", "b acquires", "c acquires", "a writes"},
			findings: []string{"5 late, before the successor's first write"}, acquisitions: 3},
		"a write after any successor's first write counts": {
			steps:    []string{"a acquires", "b acquires", "c acquires", "c writes", "a writes"},
			findings: []string{"5 overlaps with the successor's writes"}, former: 1, acquisitions: 3},
		"a write is late although the successor is gone already": {
			steps: []string{"a acquires", "b acquires", "b releases", "a writes"}, findings: []string{"4 late, before the successor's first write"}, acquisitions: 2},
		"who leads again may write again": {
			steps: []string{"a acquires", "b acquires", "b writes", "a acquires", "a writes"}, acquisitions: 3},
		"a release counts at once": {
			steps: []string{"a acquires", "a releases", "a writes"}, findings: []string{"3 after the release"}, acquisitions: 1},
		"an edit by hand is told apart": {
			steps: []string{"a acquires", "hand takes", "a writes"}, findings: []string{"3 after a change by hand"}, acquisitions: 1},
		"a cleared holder is told apart": {
			steps: []string{"a acquires", "hand clears", "a writes"}, findings: []string{"3 after a change by hand"}, acquisitions: 1},
		"a deletion is told apart": {
			steps: []string{"a acquires", "hand deletes", "a writes"}, findings: []string{"3 after a change by hand"}, acquisitions: 1},
		"to create the Lease is a claim": {
			steps:        []string{"a acquires", "hand deletes", "b creates", "a writes", "b writes", "b acquires", "b writes"},
			findings:     []string{"4 after a change by hand", "5 never led"},
			acquisitions: 2},
		"after a claim and an acquisition the former holder is stale": {
			steps: []string{"a acquires", "hand deletes", "b creates", "b acquires", "a writes"}, findings: []string{"5 late, before the successor's first write"}, acquisitions: 2},
		"an edit of something else changes nothing": {
			steps: []string{"a acquires", "hand edits", "a writes"}, acquisitions: 1},
		"a write that was answered to nobody counts": {
			steps: []string{"a acquires", "b acquires", "cancelled: a writes"}, findings: []string{"3 late, before the successor's first write"}, acquisitions: 2, unlogged: 1},
		"a write that was answered to nobody may be well": {
			steps: []string{"a acquires", "cancelled: a writes", "b acquires"}, acquisitions: 2, unlogged: 1},
		"a write of which the log knows nothing is told apart": {
			steps: []string{"a acquires", "unlogged: a writes"}, findings: []string{"2 by an unknown author"}, acquisitions: 1, unlogged: 1},
		"an acquisition that only a watch has shown counts, once its process is known": {
			steps: []string{"a acquires", "unlogged: b acquires", "a writes", "b renews"}, findings: []string{"3 late, before the successor's first write"}, acquisitions: 2},
	} {
		t.Run(name, func(t *testing.T) {
			history := parseHistory(t, tc.steps)
			history.Fenced = tc.fenced
			got := history.Judge()
			var findings []string
			for _, f := range got.Findings {
				findings = append(findings, fmt.Sprintf("%d %s", f.Revision, f.Verdict))
			}
			assert.Equal(t, "findings", tc.findings, findings)
			if len(got.Acquisitions) != tc.acquisitions || got.Unlogged != tc.unlogged {
				t.Errorf("%d acquisitions, %d unlogged, want %d, %d", len(got.Acquisitions), got.Unlogged, tc.acquisitions, tc.unlogged)
			}
			if former := len(got.Former()); former < tc.former {
				t.Errorf("%d writes of former leaders, want %d", former, tc.former)
			}
			for _, f := range got.Stale() {
				if f.Verdict == InOrder || f.Verdict == Revoked || f.Verdict == Unknown {
					t.Errorf("counts as stale: %s", f)
				}
			}
		})
	}
}
