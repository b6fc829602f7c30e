// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
)

const widgets = "targetType: {group: example.com, version: v1, kind: Widget, pluralName: widgets, scope: Namespaced}, " +
	"federatedType: {group: types.kubefed.io, version: v1beta1, kind: FederatedWidget, pluralName: federatedwidgets, scope: Namespaced}"

func TestTypeConfigIsCompletedAndValidated(t *testing.T) {
	const federatedWidget = "federatedType: {group: types.kubefed.io, version: v1beta1, kind: FederatedWidget, scope: Namespaced}, propagation: Enabled"
	const target = "targetType: {version: v1, kind: Widget, scope: Namespaced}"
	tests := map[string]struct {
		name, spec string
		want       [3]string // plural and group of the target, plural of the federated type
		invalid    string
	}{
		"plural and group from the name":              {name: "widgets.example.com", spec: target + ", " + federatedWidget, want: [3]string{"widgets", "example.com", "federatedwidgets"}},
		"a plural from the name, the core group":      {name: "widgets", spec: target + ", " + federatedWidget, want: [3]string{"widgets", "", "federatedwidgets"}},
		"everything said":                             {name: "widgets.example.com", spec: widgets + ", propagation: Disabled, statusCollection: Enabled", want: [3]string{"widgets", "example.com", "federatedwidgets"}},
		"a name that does not fit its target":         {name: "gadgets.example.com", spec: widgets + ", propagation: Enabled", want: [3]string{"widgets", "example.com", "federatedwidgets"}, invalid: "the name of the target"},
		"a federated group without a dot":             {name: "widgets", spec: target + ", " + strings.Replace(federatedWidget, "types.kubefed.io", "types", 1), want: [3]string{"widgets", "", "federatedwidgets"}, invalid: "must have a dot"},
		"a federated type of another scope":           {name: "widgets", spec: target + ", " + strings.Replace(federatedWidget, "Namespaced", "Cluster", 1), want: [3]string{"widgets", "", "federatedwidgets"}, invalid: "scope of its target"},
		"no kind":                                     {name: "widgets", spec: "targetType: {version: v1, scope: Namespaced}, " + federatedWidget, want: [3]string{"widgets", "", "federatedwidgets"}, invalid: "must have a kind"},
		"no version":                                  {name: "widgets", spec: "targetType: {kind: Widget, scope: Namespaced}, " + federatedWidget, want: [3]string{"widgets", "", "federatedwidgets"}, invalid: "must have a kind"},
		"an unknown scope":                            {name: "widgets", spec: "targetType: {version: v1, kind: Widget, scope: Wide}, " + federatedWidget, want: [3]string{"widgets", "", "federatedwidgets"}, invalid: "scope"},
		"a status type without a kind":                {name: "widgets", spec: target + ", " + federatedWidget + ", statusType: {version: v1, scope: Cluster}", want: [3]string{"widgets", "", "federatedwidgets"}, invalid: "must have a kind"},
		"propagation that is neither on nor off":      {name: "widgets.example.com", spec: widgets + ", propagation: Perhaps", want: [3]string{"widgets", "example.com", "federatedwidgets"}, invalid: "propagation"},
		"no propagation":                              {name: "widgets.example.com", spec: widgets, want: [3]string{"widgets", "example.com", "federatedwidgets"}, invalid: "propagation"},
		"status collection neither on nor off":        {name: "widgets.example.com", spec: widgets + ", propagation: Enabled, statusCollection: Perhaps", want: [3]string{"widgets", "example.com", "federatedwidgets"}, invalid: "statusCollection"},
		"a FederatedNamespace that is not in one":     {name: "namespaces", spec: "targetType: {version: v1, kind: Namespace, scope: Cluster}, federatedType: {group: types.kubefed.io, version: v1beta1, kind: FederatedNamespace, scope: Cluster}, propagation: Enabled", want: [3]string{"namespaces", "", "federatednamespaces"}, invalid: "Namespaced for Namespaces"},
		"a FederatedNamespace, which is in one":       {name: "namespaces", spec: "targetType: {version: v1, kind: Namespace, scope: Cluster}, federatedType: {group: types.kubefed.io, version: v1beta1, kind: FederatedNamespace, scope: Namespaced}, propagation: Enabled", want: [3]string{"namespaces", "", "federatednamespaces"}},
		"text where a type belongs, read nonetheless": {name: "widgets", spec: "targetType: widget, propagation: Enabled", want: [3]string{"widgets", "", "s"}, invalid: "cannot unmarshal"},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			got := ReadTypeConfig(object(t, "metadata: {name: "+tc.name+"}, spec: {"+tc.spec+"}"))
			assert.Equal(t, "names", tc.want, [3]string{got.Target.PluralName, got.Target.Group, got.Federated.PluralName})
			if (got.Invalid == nil) != (tc.invalid == "") || got.Invalid != nil && !strings.Contains(got.Invalid.Error(), tc.invalid) {
				t.Errorf("%v, want %q", got.Invalid, tc.invalid)
			}
		})
	}
}

func TestPluralsAreGuessedFromKinds(t *testing.T) {
	for kind, want := range map[string]string{"Ingress": "ingresses", "Box": "boxes", "Church": "churches", "Bush": "bushes", "Fez": "fezes", "Hero": "heroes",
		"Policy": "policies", "FederatedConfigMap": "federatedconfigmaps"} {
		if got := defaultPlural(kind); got != want {
			t.Errorf("%s: %s, want %s", kind, got, want)
		}
	}
}

func TestTypeRunsOnlyIfItsTargetIsSupported(t *testing.T) {
	target := func(group, plural string) func(*TypeConfig) {
		return func(c *TypeConfig) {
			c.Target.Group, c.Target.PluralName = group, plural
			c.Name = c.Target.GroupResource().String()
		}
	}
	tests := map[string]struct {
		change  func(*TypeConfig)
		kind    string // of the type; default: Widget
		missing string // no FederatedTypeConfig or CustomResourceDefinition of this name
		config  Config
		warning string
		stops   bool
	}{
		"a type that is enabled":                                          {},
		"a type whose propagation is disabled stops":                      {change: func(c *TypeConfig) { c.Propagation = disabled }, stops: true},
		"a type that is being deleted stops":                              {change: func(c *TypeConfig) { c.Deleting = true }, stops: true},
		"the gate PushReconciler is off":                                  {config: Config{SchedulerPreferences: true}, stops: true},
		"the federation is restricted to a namespace":                     {config: Config{PushReconciler: true, Namespaced: true}, stops: true},
		"no CustomResourceDefinition":                                     {missing: "federatedwidgets.types.kubefed.io", warning: FederatedTypeMissing},
		"a type with namespaces needs the FederatedTypeConfig namespaces": {missing: "namespaces", warning: NamespaceTypeMissing},
		"no CustomResourceDefinition of FederatedNamespace":               {missing: "federatednamespaces.types.kubefed.io", warning: NamespaceTypeMissing},
		"a type without namespaces needs no namespaces":                   {kind: "ClusterRole", missing: "namespaces"},
		"a target in types.kubefed.io that is not a federated type runs":  {change: target("types.kubefed.io", "widgets")},
		"a federated type cannot be a target":                             {change: target("types.kubefed.io", "federatednamespaces"), warning: UnsupportedType},
		"the target is its own federated type":                            {change: target("types.kubefed.io", "federatedwidgets"), warning: UnsupportedType},
		"another type has the federated type":                             {change: func(c *TypeConfig) { c.Federated = typeOf("Namespace").Federated }, warning: UnsupportedType},
		"the target is a status type":                                     {change: func(c *TypeConfig) { s := c.Target; c.StatusType = &s }, warning: UnsupportedType},
		"the target is a KubeFedCluster":                                  {change: target("core.kubefed.io", "kubefedclusters"), warning: UnsupportedType},
		"the target is a ReplicaSchedulingPreference":                     {change: target("scheduling.kubefed.io", "replicaschedulingpreferences"), warning: UnsupportedType},
		"the target is a Domain":                                          {change: target("multiclusterdns.kubefed.io", "domains"), warning: UnsupportedType},
		"the target is one of ours":                                       {change: target("quartermaster.dev", "things"), warning: UnsupportedType},
		"the target is an Event":                                          {change: target("", "events"), warning: UnsupportedType},
		"the target is an Event of the newer group":                       {change: target("events.k8s.io", "events"), warning: UnsupportedType},
		"the target is a Lease":                                           {change: target("coordination.k8s.io", "leases"), warning: UnsupportedType},
		"the target is a Node":                                            {change: target("", "nodes"), warning: UnsupportedType},
		"the target is a TokenReview":                                     {change: target("authentication.k8s.io", "tokenreviews"), warning: UnsupportedType},
		"the target is a SubjectAccessReview":                             {change: target("authorization.k8s.io", "subjectaccessreviews"), warning: UnsupportedType},
		"a type that is invalid":                                          {change: func(c *TypeConfig) { c.Target.Kind = "" }, warning: UnsupportedType},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			if tc.kind == "" {
				tc.kind = "Widget"
			}
			if tc.config == (Config{}) {
				tc.config = DefaultConfig()
			}
			c := typeOf(tc.kind)
			if tc.change != nil {
				tc.change(c)
			}
			c.Invalid = c.validate()
			configs := slices.DeleteFunc([]TypeConfig{*typeOf("Namespace"), *c}, func(c TypeConfig) bool { return c.Name == tc.missing })
			runs, warning := c.Runs(configs, tc.config, func(gr schema.GroupResource) bool { return gr.String() != tc.missing })
			if warning.Reason != tc.warning || runs != (tc.warning == "" && !tc.stops) {
				t.Errorf("%t %v, want %q", runs, warning, tc.warning)
			}
		})
	}
}

func TestTypeStatusShowsWhatRuns(t *testing.T) {
	c := typeOf("Widget")
	c.Generation, c.StatusCollection = 3, enabled
	collecting := DefaultConfig()
	collecting.RawStatusCollection = true
	tests := map[string]struct {
		runs   bool
		config Config
		want   TypeStatus
	}{
		"a type that runs":                            {true, DefaultConfig(), TypeStatus{3, "Running", "NotRunning"}},
		"a type that runs and collects status":        {true, collecting, TypeStatus{3, "Running", "Running"}},
		"a type that does not run collects no status": {false, collecting, TypeStatus{3, "NotRunning", "NotRunning"}},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			got, write := c.NextStatus(tc.runs, tc.config)
			assert.Equal(t, "status", tc.want, got)
			next := *c
			next.Status = got
			if _, writeAgain := next.NextStatus(tc.runs, tc.config); !write || writeAgain {
				t.Errorf("written: %t, and again: %t", write, writeAgain)
			}
		})
	}
}

func TestStatusOfAClusterThatServesAType(t *testing.T) {
	for availability, want := range map[Availability]string{NotListed: CachedRetrievalFailed, Synced: "", Absent: APINotAvailable, Forbidden: RetrievalFailed} {
		t.Run(string(availability), func(t *testing.T) {
			if got := availability.Status(); got != want {
				t.Errorf("got %q, want %q", got, want)
			}
		})
	}
}
