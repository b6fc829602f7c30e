// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package v1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// WidgetSpec says what a Widget is to be.
type WidgetSpec struct {
	// image that the Widget's Pods run.
	// +kubebuilder:validation:MinLength=1
	Image string `json:"image"`

	// replicas is the number of Pods.
	// +kubebuilder:default=1
	// +kubebuilder:validation:Minimum=0
	// +optional
	Replicas int32 `json:"replicas,omitempty"`

	// message is in the Widget's own ConfigMap, and in the environment of its Pods as MESSAGE.
	// +optional
	Message string `json:"message,omitempty"`

	// settings is the name of a ConfigMap that many Widgets may share. All of it is in the
	// environment of the Pods. The Pods are replaced when it changes.
	// +optional
	Settings string `json:"settings,omitempty"`

	// lifetime is how long the Widget has Pods. Without it, it has them for ever.
	// +optional
	Lifetime *metav1.Duration `json:"lifetime,omitempty"`
}

// WidgetStatus says what a Widget is.
type WidgetStatus struct {
	// observedGeneration is the generation that the status is about.
	// +optional
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`

	// readyReplicas is the number of Pods that are ready.
	// +optional
	ReadyReplicas int32 `json:"readyReplicas,omitempty"`

	// conditions of the Widget: Ready.
	// +optional
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// Widget runs an image with a message and with settings that Widgets share.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:printcolumn:name="Ready",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].reason`
// +kubebuilder:printcolumn:name="Pods",type=integer,JSONPath=`.status.readyReplicas`
type Widget struct {
	metav1.TypeMeta `json:",inline"`
	// +optional
	metav1.ObjectMeta `json:"metadata,omitzero"`
	Spec              WidgetSpec `json:"spec"`
	// +optional
	Status WidgetStatus `json:"status,omitzero"`
}

// WidgetList is a list of Widgets.
//
// +kubebuilder:object:root=true
type WidgetList struct {
	metav1.TypeMeta `json:",inline"`
	// +optional
	metav1.ListMeta `json:"metadata,omitzero"`
	Items           []Widget `json:"items"`
}
