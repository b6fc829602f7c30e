// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
)

func TestPropagationConditionHasItsReason(t *testing.T) {
	healthy, failed := []ClusterResult{{Name: "c1"}}, []ClusterResult{{Name: "c1", Status: CreationFailed}}
	tests := map[string]struct {
		reason       string
		clusters     []ClusterResult
		status, want string
	}{
		"all is well":                             {clusters: healthy, status: "True"},
		"no cluster at all":                       {status: "True"},
		"a cluster is not well":                   {clusters: failed, status: "False", want: CheckClusters},
		"the object's namespace is not federated": {reason: NamespaceNotFederated, clusters: failed, status: "False", want: NamespaceNotFederated},
		"the placement fails":                     {reason: ComputePlacementFailed, status: "False", want: ComputePlacementFailed},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			got, write := FederatedStatus{}.Next(Conclusion{Generation: 2, Reason: tc.reason, Clusters: tc.clusters}, now)
			if !write || got.ObservedGeneration != 2 {
				t.Errorf("written: %t, %v", write, got)
			}
			const timestamp = "2026-11-24T12:00:00Z"
			assert.Equal(t, "conditions", []FederatedCondition{{"Propagation", tc.status, timestamp, timestamp, tc.want}}, got.Conditions)
		})
	}
}

func TestStatusIsWrittenOnlyWhenNeeded(t *testing.T) {
	const first, later = "2026-11-24T12:00:00Z", "2026-11-24T12:01:00Z"
	before := FederatedStatus{ObservedGeneration: 2, Conditions: []FederatedCondition{{Propagation, "False", first, first, CheckClusters}},
		Clusters: []ClusterResult{{Name: "c2", Status: UpdateFailed}, {Name: "c1", RemoteStatus: map[string]any{"replicas": float64(3)}}}}
	sameConclusion := func() Conclusion {
		return Conclusion{Generation: 2, Clusters: []ClusterResult{{Name: "c1", RemoteStatus: map[string]any{"replicas": int64(3)}}, {Name: "c2", Status: UpdateFailed}}}
	}
	conclusionWith := func(change func(*Conclusion)) Conclusion { c := sameConclusion(); change(&c); return c }
	tests := map[string]struct {
		before                     FederatedStatus
		conclusion                 Conclusion
		write                      bool
		updateTime, transitionTime string
	}{
		"only the order differs":           {before: before, conclusion: sameConclusion(), updateTime: first, transitionTime: first},
		"something was written":            {before: before, conclusion: conclusionWith(func(c *Conclusion) { c.Wrote = true }), write: true, updateTime: later, transitionTime: first},
		"another status of a cluster":      {before: before, conclusion: conclusionWith(func(c *Conclusion) { c.Clusters[1].Status = UpdateFailed + "x" }), write: true, updateTime: later, transitionTime: first},
		"a cluster more":                   {before: before, conclusion: conclusionWith(func(c *Conclusion) { c.Clusters = append(c.Clusters, ClusterResult{Name: "c3"}) }), write: true, updateTime: later, transitionTime: first},
		"another remote status":            {before: before, conclusion: conclusionWith(func(c *Conclusion) { c.Clusters[0].RemoteStatus = nil }), write: true, updateTime: later, transitionTime: first},
		"a cluster has recovered":          {before: before, conclusion: conclusionWith(func(c *Conclusion) { c.Clusters[1].Status = "" }), write: true, updateTime: later, transitionTime: later},
		"another reason":                   {before: before, conclusion: conclusionWith(func(c *Conclusion) { c.Reason = NamespaceNotFederated }), write: true, updateTime: later, transitionTime: first},
		"only the generation":              {before: before, conclusion: conclusionWith(func(c *Conclusion) { c.Generation = 3 }), write: true, updateTime: first, transitionTime: first},
		"no status yet":                    {conclusion: sameConclusion(), write: true, updateTime: later, transitionTime: later},
		"a condition that does not belong": {before: FederatedStatus{2, append([]FederatedCondition{{Type: "Other"}}, before.Conditions...), before.Clusters}, conclusion: sameConclusion(), write: true, updateTime: first, transitionTime: first},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			got, write := tc.before.Next(tc.conclusion, now.Add(time.Minute))
			if write != tc.write {
				t.Errorf("written: %t", write)
			}
			if c := got.Conditions[0]; len(got.Conditions) != 1 || c.LastUpdateTime != tc.updateTime || c.LastTransitionTime != tc.transitionTime {
				t.Errorf("%+v", got.Conditions)
			}
			if got.Clusters[0].Name != "c1" {
				t.Errorf("not sorted: %v", got.Clusters)
			}
			if !tc.conclusion.Wrote && (got.Hash() == tc.before.Hash()) == write {
				t.Errorf("the hash says that it is written: %t", !write)
			}
		})
	}
	// A status that was written and read again is the same.
	written, _ := FederatedStatus{}.Next(sameConclusion(), now)
	data, err := json.Marshal(map[string]any{"status": written})
	assert.NoError(t, err)
	stored := ReadFederated(object(t, string(data[1:len(data)-1]))).Status
	if _, write := stored.Next(sameConclusion(), now.Add(time.Minute)); write || stored.Hash() != written.Hash() {
		t.Errorf("written again: %t", write)
	}
	if got := ReadFederated(object(t, "status: {clusters: 7}")).Status; got.Hash() != (FederatedStatus{}).Hash() {
		t.Errorf("a malformed status: %v", got)
	}
}

func TestTimedOutNamesTheFailedRequest(t *testing.T) {
	for failed, want := range map[string]string{CreationFailed: "CreationTimedOut", UpdateFailed: "UpdateTimedOut", DeletionFailed: "DeletionTimedOut",
		LabelRemovalFailed: "LabelRemovalTimedOut", RetrievalFailed: RetrievalFailed} {
		if got := TimedOutStatus(failed); got != want {
			t.Errorf("%s: %s", failed, got)
		}
	}
}
