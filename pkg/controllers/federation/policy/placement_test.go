// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
)

// TestPlaceIntersectsNamespaceAndObject has clusters a, b and c; a and b have the label size: big.
func TestPlaceIntersectsNamespaceAndObject(t *testing.T) {
	clusters := []Cluster{{Name: "c"}, {Name: "a", Labels: map[string]string{"size": "big", "zone": "1"}}, {Name: "b", Labels: map[string]string{"size": "big"}}}
	const everyCluster, absent = "placement: {clusterSelector: {}}", "-"
	tests := map[string]struct {
		kind, spec, namespace string // namespace is the spec of its FederatedNamespace; "" selects everyCluster, absent is no such
		want                  string
		reason                string
	}{
		"a list":                                    {spec: "placement: {clusters: [{name: c}, {name: a}]}", want: "a c"},
		"a list and a selector":                     {spec: "placement: {clusters: [{name: c}], clusterSelector: {matchLabels: {size: big}}}", want: "c"},
		"a list and a malformed selector":           {spec: "placement: {clusters: [{name: c}], clusterSelector: {matchExpressions: [{key: size, operator: Near}]}}", want: "c"},
		"a list with a cluster that is not there":   {spec: "placement: {clusters: [{name: c}, {name: d}]}", want: "c"},
		"a list that names a cluster twice":         {spec: "placement: {clusters: [{name: c}, {name: c}]}", want: "c"},
		"an empty list":                             {spec: "placement: {clusters: []}"},
		"an empty list and a selector":              {spec: "placement: {clusters: [], clusterSelector: {}}"},
		"no list and no selector":                   {spec: "placement: {}"},
		"no placement":                              {spec: "template: {}"},
		"a list that is null":                       {spec: "placement: {clusters: null, clusterSelector: {}}", want: "a b c"},
		"an empty selector":                         {spec: everyCluster, want: "a b c"},
		"labels":                                    {spec: "placement: {clusterSelector: {matchLabels: {size: big}}}", want: "a b"},
		"labels and expressions":                    {spec: "placement: {clusterSelector: {matchLabels: {size: big}, matchExpressions: [{key: zone, operator: DoesNotExist}]}}", want: "b"},
		"labels that no cluster has":                {spec: "placement: {clusterSelector: {matchLabels: {size: small}}}"},
		"a selector with an unknown operator fails": {spec: "placement: {clusterSelector: {matchExpressions: [{key: size, operator: Near}]}}", reason: ComputePlacementFailed},
		"a selector with an invalid label fails":    {spec: "placement: {clusterSelector: {matchLabels: {'a b': big}}}", reason: ComputePlacementFailed},
		"a selector that is text fails":             {spec: "placement: {clusterSelector: all}", reason: ComputePlacementFailed},
		"a list of text":                            {spec: "placement: {clusters: [a]}", reason: ComputePlacementFailed},
		"a cluster without a name":                  {spec: "placement: {clusters: [{}]}", reason: ComputePlacementFailed},
		"a placement that is text":                  {spec: "placement: everywhere", reason: ComputePlacementFailed},
		"an object without its FederatedNamespace is placed nowhere":            {spec: everyCluster, namespace: absent, reason: NamespaceNotFederated},
		"an object is placed where its namespace is placed":                     {spec: everyCluster, namespace: "placement: {clusters: [{name: a}]}", want: "a"},
		"the placements of the object and of its namespace are both restricted": {spec: "placement: {clusters: [{name: a}, {name: c}]}", namespace: "placement: {clusterSelector: {matchLabels: {size: big}}}", want: "a"},
		"the namespace is placed nowhere":                                       {spec: everyCluster, namespace: "template: {}"},
		"the placement of the namespace is malformed":                           {spec: everyCluster, namespace: "placement: {clusterSelector: all}", reason: ComputePlacementFailed},
		"a type without namespaces":                                             {kind: "ClusterRole", spec: everyCluster, namespace: absent, want: "a b c"},
		"a FederatedNamespace asks no other":                                    {kind: "Namespace", spec: everyCluster, namespace: absent, want: "a b c"},
		"a malformed placement without a FederatedNamespace":                    {spec: "placement: everywhere", namespace: absent, reason: ComputePlacementFailed},
		"a spec that is text":                                                   {spec: absent, reason: ComputePlacementFailed},
		"a placement is the same after being cached":                            {spec: "placement: {clusters: []}"},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			if tc.kind == "" {
				tc.kind = "ConfigMap"
			}
			var namespace *Placement
			if tc.namespace == "" {
				tc.namespace = everyCluster
			}
			if tc.namespace != absent {
				namespace = &federated(t, tc.namespace).Placement
			}
			f := federated(t, tc.spec)
			if tc.spec == absent {
				f = ReadFederated(object(t, "spec: text"))
			}
			data, err := json.Marshal(f.Placement)
			assert.NoError(t, err)
			var cached Placement
			assert.NoError(t, json.Unmarshal(data, &cached))
			for _, placement := range []Placement{f.Placement, cached} {
				got, reason, err := Place(typeOf(tc.kind), placement, namespace, clusters)
				if strings.Join(got, " ") != tc.want || reason != tc.reason || (err != nil) != (reason == ComputePlacementFailed) {
					t.Errorf("%v, %q, %v; want %s", got, reason, err, tc.want)
				}
			}
		})
	}
}

func TestNamespacesOfTheSystemAreProtected(t *testing.T) {
	for name, protected := range map[string]bool{"kube-system": true, "kube-public": true, "kube-node-lease": true, "default": true, "kube-federation-system": true, "manager": true, "shop": false} {
		if got := ProtectedNamespace(name, "kube-federation-system", "manager"); got != protected {
			t.Errorf("%s: %t", name, got)
		}
	}
}

func TestTemplateWarnsOfFieldsNotPropagated(t *testing.T) {
	tests := map[string]struct {
		spec string
		want []string
	}{
		"labels alone": {spec: "template: {metadata: {labels: {a: b}}}"},
		"annotations":  {spec: "template: {metadata: {annotations: {a: b}}}", want: []string{AnnotationsNotSupported}},
		"finalizers":   {spec: "template: {metadata: {finalizers: [a/b], annotations: {a: b}}}", want: []string{AnnotationsNotSupported, FinalizersNotSupported}},
		"no template":  {},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			var got []string
			for _, warning := range federated(t, tc.spec).Warnings() {
				got = append(got, warning.Reason)
			}
			if !slices.Equal(got, tc.want) {
				t.Error(got)
			}
		})
	}
}
