// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
)

func TestInvalidReplicaPreferenceIsRefused(t *testing.T) {
	tests := map[string]struct{ spec, want string }{
		"all fields":                        {spec: "targetKind: FederatedReplicaSet, totalReplicas: 5, rebalance: true, intersectWithClusterSelector: true, clusters: {a: {minReplicas: 1, maxReplicas: 0, weight: 2}}"},
		"the largest numbers":               {spec: "targetKind: FederatedDeployment, totalReplicas: 2147483647, clusters: {a: {weight: 2147483647}}"},
		"no clusters":                       {spec: "targetKind: FederatedDeployment, totalReplicas: 0"},
		"no total":                          {spec: "targetKind: FederatedDeployment", want: "totalReplicas: must be set"},
		"no kind":                           {spec: "totalReplicas: 1", want: "targetKind"},
		"a kind without replicas":           {spec: "targetKind: FederatedConfigMap, totalReplicas: 1", want: "targetKind"},
		"a negative total":                  {spec: "targetKind: FederatedDeployment, totalReplicas: -1", want: "totalReplicas: must be 0 to"},
		"a total that is too large":         {spec: "targetKind: FederatedDeployment, totalReplicas: 2147483648", want: "totalReplicas: must be 0 to"},
		"a negative weight":                 {spec: "targetKind: FederatedDeployment, totalReplicas: 1, clusters: {a: {weight: -1}}", want: `clusters["a"]`},
		"a negative minimum":                {spec: "targetKind: FederatedDeployment, totalReplicas: 1, clusters: {a: {minReplicas: -1}}", want: `clusters["a"]`},
		"a negative maximum":                {spec: "targetKind: FederatedDeployment, totalReplicas: 1, clusters: {a: {maxReplicas: -1}}", want: `clusters["a"]`},
		"a weight that would overflow":      {spec: "targetKind: FederatedDeployment, totalReplicas: 1, clusters: {a: {weight: 9223372036854775807}}", want: `clusters["a"]`},
		"a number with a fraction":          {spec: "targetKind: FederatedDeployment, totalReplicas: 1.5", want: "spec"},
		"clusters that are a list":          {spec: "targetKind: FederatedDeployment, totalReplicas: 1, clusters: [a]", want: "spec"},
		"a preference of a cluster as text": {spec: "targetKind: FederatedDeployment, totalReplicas: 1, clusters: {a: all}", want: "spec"},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			_, err := ReadReplicaPreference(object(t, "spec: {"+tc.spec+"}"))
			if (err == nil) != (tc.want == "") || err != nil && !strings.Contains(err.Error(), tc.want) {
				t.Errorf("%v, want %q", err, tc.want)
			}
		})
	}
}

func TestSpreadWritesPlacementAndReplicas(t *testing.T) {
	const placed = "placement: {clusters: [{name: b}, {name: a}]}, "
	replicas := func(cluster string, n int) string {
		return fmt.Sprintf("{clusterName: %s, clusterOverrides: [{path: /spec/replicas, value: %d}]}", cluster, n)
	}
	plan := map[string]int64{"a": 1, "b": 2}
	tests := map[string]struct {
		spec    string
		plan    map[string]int64
		want    string // "" is no change
		problem string
	}{
		"as planned":                         {spec: placed + "overrides: [" + replicas("b", 2) + ", " + replicas("a", 1) + "]"},
		"as planned, with an operation":      {spec: placed + "overrides: [{clusterName: a, clusterOverrides: [{op: replace, path: /spec/replicas, value: 1}]}, " + replicas("b", 2) + "]"},
		"nothing, and nothing is planned":    {spec: "placement: {clusters: []}", plan: map[string]int64{}},
		"no spec yet but a template":         {spec: "template: {}", want: "template: {}, placement: {clusters: [{name: a}, {name: b}]}, overrides: [" + replicas("a", 1) + ", " + replicas("b", 2) + "]"},
		"a selector stays":                   {spec: "placement: {clusterSelector: {}}", want: "placement: {clusterSelector: {}, clusters: [{name: a}, {name: b}]}, overrides: [" + replicas("a", 1) + ", " + replicas("b", 2) + "]"},
		"another number":                     {spec: placed + "overrides: [" + replicas("a", 1) + ", " + replicas("b", 9) + "]", want: placed + "overrides: [" + replicas("a", 1) + ", " + replicas("b", 2) + "]"},
		"an operation that removes replicas": {spec: placed + "overrides: [{clusterName: a, clusterOverrides: [{op: remove, path: /spec/replicas, value: 1}]}, " + replicas("b", 2) + "]", want: placed + "overrides: [" + replicas("a", 1) + ", " + replicas("b", 2) + "]"},
		"twice in one cluster":               {spec: placed + "overrides: [{clusterName: a, clusterOverrides: [{path: /spec/replicas, value: 1}, {path: /spec/replicas, value: 7}]}, " + replicas("b", 2) + "]", want: placed + "overrides: [" + replicas("a", 1) + ", " + replicas("b", 2) + "]"},
		"a cluster named twice":              {spec: placed + "overrides: [" + replicas("a", 1) + ", " + replicas("a", 7) + ", " + replicas("b", 2) + "]", want: placed + "overrides: [" + replicas("a", 1) + ", " + replicas("b", 2) + "]"},
		"a cluster that is not planned":      {spec: placed + "overrides: [" + replicas("c", 1) + ", " + replicas("a", 1) + ", " + replicas("b", 2) + "]", want: placed + "overrides: [" + replicas("a", 1) + ", " + replicas("b", 2) + "]"},
		"other overrides keep their place, and large numbers": {
			spec: placed + "overrides: [{clusterName: c, clusterOverrides: [{path: /x, value: null}, {path: /spec/replicas, value: 1}]}, {clusterName: a, clusterOverrides: [{path: /spec/replicas, value: 7}, {op: add, path: /y, value: 9007199254740993}]}, {clusterName: d}]",
			want: placed + "overrides: [{clusterName: c, clusterOverrides: [{path: /x, value: null}]}, {clusterName: a, clusterOverrides: [{path: /spec/replicas, value: 1}, {op: add, path: /y, value: 9007199254740993}]}, {clusterName: d}, " + replicas("b", 2) + "]"},
		"a malformed placement":           {spec: "placement: everywhere", want: "placement: {clusters: [{name: a}, {name: b}]}, overrides: [" + replicas("a", 1) + ", " + replicas("b", 2) + "]"},
		"overrides that are text":         {spec: "overrides: all", problem: "overrides: must be a list"},
		"an override that is text":        {spec: "overrides: [all]", problem: "overrides: each"},
		"operations that are text":        {spec: "overrides: [{clusterName: a, clusterOverrides: all}]", problem: "overrides: each"},
		"an operation that is text stays": {spec: placed + "overrides: [{clusterName: a, clusterOverrides: [all]}, " + replicas("b", 2) + "]", want: placed + "overrides: [{clusterName: a, clusterOverrides: [all, {path: /spec/replicas, value: 1}]}, " + replicas("b", 2) + "]"},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			if tc.plan == nil {
				tc.plan = plan
			}
			u := object(t, "spec: {"+tc.spec+"}")
			before := u.DeepCopy()
			spread, changed, err := Spread(u, tc.plan)
			text := func(object any) string {
				data, err := json.Marshal(object)
				assert.NoError(t, err)
				return string(data)
			}
			if text(u) != text(before) {
				t.Error("the object was changed in place")
			}
			if err != nil || tc.problem != "" {
				if err == nil || tc.problem == "" || !strings.Contains(err.Error(), tc.problem) {
					t.Errorf("%v, want %q", err, tc.problem)
				}
				return
			}
			if changed != (tc.want != "") {
				t.Errorf("changed: %v, %s", changed, text(spread))
			}
			if changed {
				if got, want := text(spread), text(object(t, "spec: {"+tc.want+"}")); got != want {
					t.Errorf("%s, want %s", got, want)
				}
				if _, changedAgain, _ := Spread(spread, tc.plan); changedAgain {
					t.Error("changed again")
				}
			}
		})
	}
}

func TestBothSelectorsSelectClusters(t *testing.T) {
	clusters := []Cluster{{Name: "c"}, {Name: "a", Labels: map[string]string{"size": "big", "zone": "1"}}, {Name: "b", Labels: map[string]string{"size": "big"}}}
	const everyCluster = "{clusterSelector: {}}"
	tests := map[string]struct{ federated, namespace, want string }{
		"both select all":                {everyCluster, everyCluster, "c a b"},
		"both select some":               {"{clusterSelector: {matchLabels: {size: big}}}", "{clusterSelector: {matchLabels: {zone: '1'}}}", "a"},
		"lists do not count":             {"{clusters: [], clusterSelector: {}}", "{clusters: [{name: b}], clusterSelector: {matchLabels: {size: big}}}", "a b"},
		"no selector of F":               {"{clusters: [{name: a}]}", everyCluster, ""},
		"no selector of its namespace":   {everyCluster, "{clusters: [{name: a}]}", ""},
		"no FederatedNamespace":          {everyCluster, "", ""},
		"a selector of F that is wrong":  {"{clusterSelector: {matchExpressions: [{key: a, operator: Near}]}}", everyCluster, "error"},
		"a selector of its namespace is": {everyCluster, "{clusterSelector: {matchExpressions: [{key: a, operator: Near}]}}", "error"},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			namespace := object(t, "spec: {placement: "+tc.namespace+"}")
			if tc.namespace == "" {
				namespace = nil
			}
			selected, err := SelectClusters(&TypeConfig{TypeSpec: TypeSpec{Target: Resource{Scope: "Namespaced"}}}, object(t, "spec: {placement: "+tc.federated+"}"), namespace, clusters)
			var names []string
			for _, c := range selected {
				names = append(names, c.Name)
			}
			if got := strings.Join(names, " "); err == nil && got != tc.want || err != nil && tc.want != "error" {
				t.Errorf("%s, %v, want %s", got, err, tc.want)
			}
		})
	}
}

func TestWorkloadCountsItsPods(t *testing.T) {
	now := time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)
	const selector = "selector: {matchLabels: {a: b}}"
	tests := map[string]struct {
		object string
		pods   []string // their statuses
		want   string
	}{
		"all are ready":     {object: "spec: {replicas: 3, " + selector + "}, status: {readyReplicas: 3}", want: "3 3 0 a=b"},
		"one by default":    {object: "spec: {" + selector + "}", want: "1 0 0 a=b"},
		"no selector":       {object: "spec: {replicas: 3}", want: "error"},
		"an empty selector": {object: "spec: {replicas: 3, selector: {}}", want: "error"},
		"replicas as text":  {object: "spec: {replicas: many, " + selector + "}", want: "error"},
		"Pods": {object: "spec: {replicas: 9, " + selector + "}", want: "9 1 1 a=b", pods: []string{
			"{phase: Running, conditions: [{type: PodScheduled, status: 'True'}, {type: Ready, status: 'True'}]}",
			"{phase: Running, conditions: [{type: Ready, status: 'False'}]}",
			"{phase: Pending, conditions: [{type: Ready, status: 'True'}]}",
			"{phase: Pending, conditions: [{type: PodScheduled, status: 'False', reason: Unschedulable, lastTransitionTime: '2026-01-01T11:58:59Z'}]}",
			"{phase: Pending, conditions: [{type: PodScheduled, status: 'False', reason: Unschedulable, lastTransitionTime: '2026-01-01T11:59:00Z'}]}",
			"{phase: Pending, conditions: [{type: PodScheduled, status: 'False', reason: SchedulerError, lastTransitionTime: '2026-01-01T11:00:00Z'}]}",
			"{phase: Pending}", "{conditions: all}", "text",
		}},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			w, err := ReadWorkload(object(t, tc.object))
			for _, status := range tc.pods {
				w.CountPod(object(t, "status: "+status), now)
			}
			got := fmt.Sprintf("%d %d %d %s", w.Replicas, w.Ready, w.Unschedulable, w.Selector)
			if err != nil {
				got = "error"
			}
			if got != tc.want {
				t.Errorf("%s, want %s (%v)", got, tc.want, err)
			}
		})
	}
}
