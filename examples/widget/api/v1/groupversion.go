// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package v1 holds the API of Widgets.
//
// +kubebuilder:object:generate=true
// +groupName=example.com
package v1

//go:generate go run sigs.k8s.io/controller-tools/cmd/controller-gen@v0.23.0 object crd paths=. output:crd:dir=../../config/crd
//go:generate sh -c "cd ../.. && go run . rbac > config/rbac.yaml"

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// GroupVersion, Kind and Widgets are the group and version, the kind and the resource of Widgets.
var (
	GroupVersion = schema.GroupVersion{Group: "example.com", Version: "v1"}
	Kind         = schema.GroupKind{Group: GroupVersion.Group, Kind: "Widget"}
	Widgets      = GroupVersion.WithResource("widgets")
)

// AddToScheme adds the types to a scheme.
func AddToScheme(s *runtime.Scheme) error {
	s.AddKnownTypes(GroupVersion, &Widget{}, &WidgetList{})
	metav1.AddToGroupVersion(s, GroupVersion)
	return nil
}
