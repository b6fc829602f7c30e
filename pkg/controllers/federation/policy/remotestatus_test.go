// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

func TestSummaryKeepsTheStatusOfAnObject(t *testing.T) {
	custom := func(status any) *unstructured.Unstructured {
		return &unstructured.Unstructured{Object: map[string]any{"metadata": map[string]any{"generation": int64(300)}, "status": status}}
	}
	for name, tc := range map[string]struct {
		object metav1.Object
		want   string
	}{
		"a Go type":                {&appsv1.Deployment{Status: appsv1.DeploymentStatus{ReadyReplicas: 3}}, `{"readyReplicas":3}`},
		"a Go type without status": {&corev1.ConfigMap{}, ""},
		"a custom resource":        {custom(map[string]any{"a": "b"}), `{"a":"b"}`},
		"no status yet":            {custom(nil), ""},
		"no object":                {custom("true"), ""},
		"a list":                   {custom([]any{"a"}), ""},
		"too large":                {custom(map[string]any{"a": strings.Repeat("x", maxRemoteStatus)}), "true"},
	} {
		t.Run(name, func(t *testing.T) {
			summary := SummarizeWithStatus(tc.object)
			if got := string(ReadRemoteStatus(summary)); got != tc.want {
				t.Errorf("the status is %q, want %q", got, tc.want)
			}
			live := ReadLiveObject(tc.object, summary)
			if want := ReadLiveObject(tc.object, SummarizeLiveObject(tc.object)); live != want {
				t.Errorf("the rest is %v, want %v", live, want)
			}
		})
	}
}

func TestTooLargeRemoteStatusesAreLeftOut(t *testing.T) {
	statuses, results := map[string]RemoteStatus{"gone": RemoteStatus(`{}`)}, []ClusterResult{}
	for i := range 20 { // 19 of them are more than there is room for
		name := fmt.Sprintf("c%02d", 19-i)
		results = append(results, ClusterResult{Name: name})
		statuses[name] = fmt.Appendf(nil, `{"a":%q}`, strings.Repeat("x", maxRemoteStatus-10))
	}
	statuses["c03"], statuses["c19"] = RemoteStatus("true"), RemoteStatus(`{"b":1}`)
	if got, want := SetRemoteStatuses(results, statuses), []string{"c03", "c17", "c18"}; !slices.Equal(got, want) {
		t.Errorf("left out are %q, want %q", got, want)
	}
	for _, r := range results {
		if leftOut := slices.Contains([]string{"c03", "c17", "c18"}, r.Name); leftOut != (r.RemoteStatus == nil) {
			t.Errorf("%s has the status %.20v", r.Name, r.RemoteStatus)
		}
	}
}
