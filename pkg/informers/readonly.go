// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
)

// readOnly is the part of metav1.Object that an Entry has only because client-go's informers demand it:
// what an Entry never keeps, and setters.
type readOnly struct{}

var (
	_ metav1.Object  = &Entry{}
	_ runtime.Object = &Entry{}
)

func (readOnly) GetGenerateName() string                       { return "" }
func (readOnly) GetGeneration() int64                          { return 0 }
func (readOnly) GetSelfLink() string                           { return "" }
func (readOnly) GetDeletionGracePeriodSeconds() *int64         { return nil }
func (readOnly) GetFinalizers() []string                       { return nil }
func (readOnly) GetManagedFields() []metav1.ManagedFieldsEntry { return nil }
func (readOnly) SetNamespace(string)                           { immutable() }
func (readOnly) SetName(string)                                { immutable() }
func (readOnly) SetGenerateName(string)                        { immutable() }
func (readOnly) SetUID(types.UID)                              { immutable() }
func (readOnly) SetResourceVersion(string)                     { immutable() }
func (readOnly) SetGeneration(int64)                           { immutable() }
func (readOnly) SetSelfLink(string)                            { immutable() }
func (readOnly) SetCreationTimestamp(metav1.Time)              { immutable() }
func (readOnly) SetDeletionTimestamp(*metav1.Time)             { immutable() }
func (readOnly) SetDeletionGracePeriodSeconds(*int64)          { immutable() }
func (readOnly) SetLabels(map[string]string)                   { immutable() }
func (readOnly) SetAnnotations(map[string]string)              { immutable() }
func (readOnly) SetFinalizers([]string)                        { immutable() }
func (readOnly) SetOwnerReferences([]metav1.OwnerReference)    { immutable() }
func (readOnly) SetManagedFields([]metav1.ManagedFieldsEntry)  { immutable() }

func immutable() { panic("an Entry belongs to the cache and cannot be changed") }
