// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package controllers

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	applymetav1 "k8s.io/client-go/applyconfigurations/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/ptr"

	"github.com/quartermaster-dev/quartermaster/pkg/informers"
)

// Apply applies objects server-side, with the entry's name as the field manager. It takes over fields that
// somebody else has set. If a configuration is invalid, or two are for one object, Apply sends nothing and
// returns an error. Otherwise it sends all, ten at once, waits for all answers and joins their errors, of
// which apierrors.IsNotFound and the like see only the first. Apply an object that needs another one by a
// later call.
//
// Configurations of built-in types are in k8s.io/client-go/applyconfigurations, and controller-gen makes
// configurations of custom resources; an unstructured object is applied with Dynamic.
func (c Clients) Apply(ctx context.Context, configs ...runtime.ApplyConfiguration) error {
	return c.apply(ctx, configs)
}

// ApplyStatus is Apply of the status of objects. It needs the verb patch of the subresource status.
func (c Clients) ApplyStatus(ctx context.Context, configs ...runtime.ApplyConfiguration) error {
	return c.apply(ctx, configs, "status")
}

func (c Clients) apply(ctx context.Context, configs []runtime.ApplyConfiguration, subresources ...string) error {
	patches, targets := make([]patch, len(configs)), map[target]bool{}
	for i, config := range configs {
		p, err := c.patchOf(ctx, config)
		if err != nil {
			return err
		}
		if targets[p.target] {
			// Each of the two would remove the fields that the other has set, since both have the same field manager.
			return fmt.Errorf("apply %s %s: it is among the objects twice", p.kind, p.object)
		}
		patches[i], targets[p.target] = p, true
	}
	errs := make([]error, len(patches))
	var requests errgroup.Group
	requests.SetLimit(10) // priority and fairness has one queue for all controllers of the process
	for i, p := range patches {
		requests.Go(func() error { errs[i] = c.send(ctx, p, subresources); return nil })
	}
	_ = requests.Wait() // all errors are in errs
	return errors.Join(errs...)
}

// PatchFinalizers sets the finalizers of an object, unless somebody has changed it since obj was read: that
// is a conflict. It needs the verb patch. An *informers.Object is refused: most needs do not keep finalizers,
// so the patch would remove those of others.
func (c Clients) PatchFinalizers(
	ctx context.Context, resource schema.GroupVersionResource, obj metav1.Object, finalizers []string,
) error {
	if _, reduced := obj.(*informers.Object); reduced {
		return fmt.Errorf("the finalizers of %s %s are not cached: "+
			"read it live, or get it by its Go type from a need in the form Typed or Unstructured",
			resource.GroupResource(), cache.MetaObjectToName(obj))
	}
	name := cache.MetaObjectToName(obj)
	if err := checkPath(name); err != nil {
		return fmt.Errorf("patch %s %s: %w", resource.GroupResource(), name, err)
	}
	body, err := json.Marshal(map[string]any{"metadata": map[string]any{
		"uid": obj.GetUID(), "resourceVersion": obj.GetResourceVersion(), "finalizers": finalizers}})
	if err != nil {
		return err
	}
	_, err = c.Metadata.Resource(resource).Namespace(name.Namespace).
		Patch(ctx, name.Name, types.MergePatchType, body, metav1.PatchOptions{FieldManager: c.FieldManager})
	return err
}

// ControllerReference returns the owner reference of an object that owner controls. kind is owner's.
func ControllerReference(owner metav1.Object, kind schema.GroupVersionKind) *applymetav1.OwnerReferenceApplyConfiguration {
	return applymetav1.OwnerReference().WithAPIVersion(kind.GroupVersion().String()).WithKind(kind.Kind).
		WithName(owner.GetName()).WithUID(owner.GetUID()).WithController(true).WithBlockOwnerDeletion(true)
}

// checkPath refuses a name that would lead to another path of the API, since Clients.Metadata puts names into
// paths as they are.
func checkPath(name cache.ObjectName) error {
	for _, part := range []string{name.Namespace, name.Name} {
		if problems := rest.IsValidPathSegmentName(part); len(problems) > 0 {
			return fmt.Errorf("the name %q %s", part, problems[0])
		}
	}
	return nil
}

// patch is what Apply sends of one object.
type patch struct {
	kind string
	target
	body []byte
}

type target struct {
	resource schema.GroupVersionResource
	object   cache.ObjectName
}

// patchOf returns the patch of a configuration, or an error if the configuration does not name its object.
func (c Clients) patchOf(ctx context.Context, config runtime.ApplyConfiguration) (patch, error) {
	body, err := json.Marshal(config)
	if err != nil {
		return patch{}, fmt.Errorf("apply a %T: %w", config, err)
	}
	var object metav1.PartialObjectMetadata
	if err := json.Unmarshal(body, &object); err != nil {
		return patch{}, fmt.Errorf("apply a %T: %w", config, err)
	}
	gvk := object.GroupVersionKind()
	if gvk.Version == "" || gvk.Kind == "" || object.Name == "" {
		return patch{}, fmt.Errorf("apply a %T: its apiVersion, kind or name is missing", config)
	}
	name := cache.MetaObjectToName(&object)
	if err := checkPath(name); err != nil {
		return patch{}, fmt.Errorf("apply %s %s: %w", gvk.Kind, name, err)
	}
	mapping, err := c.Mapping(ctx, gvk)
	if err != nil {
		return patch{}, fmt.Errorf("apply %s %s: %w", gvk.Kind, name, err)
	}
	// For a path of the other scope, the API server's NotFound would seem to be about the object.
	switch namespaced := mapping.Scope.Name() == meta.RESTScopeNameNamespace; {
	case namespaced && name.Namespace == "":
		return patch{}, fmt.Errorf("apply %s %s: its namespace is missing", gvk.Kind, name)
	case !namespaced && name.Namespace != "":
		return patch{}, fmt.Errorf("apply %s %s: objects of this kind have no namespace", gvk.Kind, name)
	}
	return patch{gvk.Kind, target{mapping.Resource, name}, body}, nil
}

func (c Clients) send(ctx context.Context, p patch, subresources []string) error {
	// Field validation would parse the patch again, to find fields that are there twice. Unknown fields are
	// errors in any case.
	opts := metav1.PatchOptions{FieldManager: c.FieldManager, Force: ptr.To(true), FieldValidation: metav1.FieldValidationIgnore}
	// Of the response, only the metadata is asked for.
	_, err := c.Metadata.Resource(p.resource).Namespace(p.object.Namespace).
		Patch(ctx, p.object.Name, types.ApplyPatchType, p.body, opts, subresources...)
	if err != nil {
		return fmt.Errorf("apply %s %s: %w", p.kind, p.object, err)
	}
	return nil
}
