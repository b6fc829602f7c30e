// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"encoding/json"
	"fmt"
	"io"
	"mime"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	jsonpatch "gopkg.in/evanphx/json-patch.v4"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	utiljson "k8s.io/apimachinery/pkg/util/json"
	"k8s.io/apimachinery/pkg/util/strategicpatch"
	"k8s.io/apimachinery/pkg/util/validation/field"
	clientscheme "k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/yaml"
)

// read reads the verb, the options and the body.
func (c *call) read(req *http.Request) (err error) {
	if err := metav1.Convert_url_Values_To_v1_ListOptions((*url.Values)(&c.query), &c.options, nil); err != nil {
		return apierrors.NewBadRequest(err.Error())
	}
	if c.selector, err = newSelector(c.Resource, c.options); err != nil {
		return err
	}
	c.selector.namespace = c.Namespace
	c.DryRun = slices.Contains(c.query["dryRun"], metav1.DryRunAll)
	c.force = c.param("force") == "true"
	if c.manager = c.param("fieldManager"); c.manager == "" {
		c.manager, _, _ = strings.Cut(c.UserAgent, "/")
	}
	accept := req.Header.Get("Accept")
	c.metadata = strings.Contains(accept, "as=PartialObjectMetadata")
	switch req.Method {
	case http.MethodGet:
		switch {
		case c.options.Watch:
			c.Verb = "watch"
		case c.Name == "":
			c.Verb = "list"
		default:
			c.Verb = "get"
		}
	case http.MethodPost:
		c.Verb = "create"
	case http.MethodPut:
		c.Verb = "update"
	case http.MethodPatch:
		c.Verb = "patch"
	case http.MethodDelete:
		if c.Verb = "delete"; c.Name == "" {
			c.Verb = "deletecollection"
		}
	}
	if name, ok := c.selector.fields.RequiresExactMatch("metadata.name"); ok && c.Name == "" && req.Method == http.MethodGet {
		c.Name = name // RBAC judges by this name
	}
	if strings.Contains(accept, "as=Table") {
		return unsupported("tables")
	}
	if c.Body, err = io.ReadAll(req.Body); err != nil {
		return apierrors.NewBadRequest(err.Error())
	}
	if len(c.Body) == 0 {
		return nil
	}
	if strings.HasPrefix(c.Verb, "delete") {
		var opts metav1.DeleteOptions
		err = c.deleteOptions(&opts)
		c.DryRun = len(opts.DryRun) > 0
	}
	if err != nil {
		return err
	}
	media, _, err := mime.ParseMediaType(req.Header.Get("Content-Type"))
	if c.Verb == "patch" {
		c.Patch = types.PatchType(media)
		return err
	}
	if err != nil || media != runtime.ContentTypeJSON {
		return unsupported("the content type %q", media)
	}
	return nil
}

// serve handles everything but watches.
func (s *Server) serve(w http.ResponseWriter, c call) error {
	s.mu.Lock()
	code, value, unchanged, err := 0, any(nil), false, s.escalates(c)
	if err == nil {
		code, value, unchanged, err = s.execute(c)
	}
	latency := s.timing.Latency
	s.mu.Unlock()
	if c.Verb != "get" && c.Verb != "list" {
		s.wrote(c.Request, Result{Err: err, Unchanged: unchanged})
		<-time.After(latency)
	}
	if err == nil {
		respond(w, code, value)
	}
	return err
}

// execute returns the response. The caller holds mu.
func (s *Server) execute(c call) (code int, value any, unchanged bool, err error) {
	var obj *object
	changed := true
	code = http.StatusOK
	switch c.Verb {
	case "list":
		return code, s.listOf(c), false, nil
	case "get":
		obj, err = s.get(c.resource, c.Namespace, c.Name)
		if own := s.apiService(c.resource, c.Name); err != nil && own != nil {
			obj, err = own, nil
		}
	case "create":
		code = http.StatusCreated
		if obj, err = c.decode(); err == nil {
			obj, err = s.create(c.resource, c.Namespace, obj, c.manager, c.DryRun)
		}
	case "update":
		obj, changed, err = s.update(c)
	case "patch":
		obj, changed, code, err = s.patch(c)
	case "delete":
		var opts metav1.DeleteOptions
		if err = c.deleteOptions(&opts); err == nil {
			obj, err = s.delete(c.resource, c.Namespace, c.Name, &opts)
		}
	case "deletecollection":
		value, err = s.deleteCollection(c)
		return code, value, false, err
	default:
		err = unsupported("the verb %s", c.Verb)
	}
	if err != nil {
		return 0, nil, false, err
	}
	return code, c.shown(obj).Object, !changed, nil
}

// deleteCollection deletes what the selector selects, and returns it.
func (s *Server) deleteCollection(c call) (any, error) {
	var opts metav1.DeleteOptions
	if err := c.deleteOptions(&opts); err != nil {
		return nil, err
	}
	list := s.listOf(c)
	for _, obj := range s.matching(c.resource, c.selector) {
		if _, err := s.delete(c.resource, obj.GetNamespace(), obj.GetName(), &opts); err != nil {
			return nil, err
		}
	}
	return list, nil
}

func (c *call) deleteOptions(opts *metav1.DeleteOptions) error {
	if len(c.Body) > 0 {
		if err := json.Unmarshal(c.Body, opts); err != nil {
			return apierrors.NewBadRequest(err.Error())
		}
	}
	if p := metav1.DeletionPropagation(c.param("propagationPolicy")); p != "" {
		opts.PropagationPolicy = &p
	}
	if c.DryRun {
		opts.DryRun = []string{metav1.DryRunAll}
	}
	return nil
}

// decode returns the object in the body.
func (c *call) decode() (*object, error) {
	obj := &object{}
	if err := utiljson.Unmarshal(c.Body, &obj.Object); err != nil || obj.Object == nil {
		return nil, apierrors.NewBadRequest(fmt.Sprintf("the body is not an object: %v", err))
	}
	if kind := obj.GroupVersionKind(); kind.Kind == "" {
		obj.SetGroupVersionKind(c.resource.gvk()) // typed clients leave it out
	} else if kind != c.resource.gvk() {
		return nil, apierrors.NewBadRequest(fmt.Sprintf("the object is a %s, but the request is for a %s", kind, c.resource.gvk()))
	}
	dropNulls(obj.Object)
	return obj, nil
}

func (s *Server) update(c call) (*object, bool, error) {
	obj, err := c.decode()
	if err != nil {
		return nil, false, err
	}
	current, err := s.get(c.resource, c.Namespace, c.Name)
	if err != nil {
		return nil, false, err
	}
	// The real API server would store the update, and the user's next `kubectl apply` would then remove no
	// field. From an update of a custom resource's status it takes only the status.
	if _, had := current.GetAnnotations()[corev1.LastAppliedConfigAnnotation]; had && (!c.resource.custom || c.Subresource != "status") {
		if _, has := obj.GetAnnotations()[corev1.LastAppliedConfigAnnotation]; !has {
			return nil, false, apierrors.NewBadRequest("the update removes " + corev1.LastAppliedConfigAnnotation +
				", which objects of the cache lack: patch the object, or read it live before you update it")
		}
	}
	if c.resource.custom && obj.GetResourceVersion() == "" {
		missing := field.Invalid(field.NewPath("metadata", "resourceVersion"), "", "must be specified for an update")
		return nil, false, apierrors.NewInvalid(c.resource.gvk().GroupKind(), c.Name, field.ErrorList{missing})
	}
	return s.replace(c.resource, c.Subresource, current, obj, c.manager, c.DryRun)
}

func (s *Server) patch(c call) (obj *object, changed bool, code int, err error) {
	if c.Patch == types.ApplyPatchType {
		return s.apply(c)
	}
	current, err := s.get(c.resource, c.Namespace, c.Name)
	if err != nil {
		return nil, false, 0, err
	}
	before, err := json.Marshal(current.Object)
	if err != nil {
		return nil, false, 0, err
	}
	after, err := c.patched(before)
	if err != nil {
		return nil, false, 0, err
	}
	obj = &object{}
	if err := utiljson.Unmarshal(after, &obj.Object); err != nil {
		return nil, false, 0, apierrors.NewBadRequest(err.Error())
	}
	dropNulls(obj.Object)
	obj, changed, err = s.replace(c.resource, c.Subresource, current, obj, c.manager, c.DryRun)
	return obj, changed, http.StatusOK, err
}

// patched returns the object after the patch.
func (c *call) patched(before []byte) (after []byte, err error) {
	switch c.Patch {
	case types.MergePatchType:
		after, err = jsonpatch.MergePatch(before, c.Body)
	case types.JSONPatchType:
		var patch jsonpatch.Patch
		if patch, err = jsonpatch.DecodePatch(c.Body); err == nil {
			after, err = patch.Apply(before)
		}
		if err != nil {
			return nil, apierrors.NewGenericServerResponse(http.StatusUnprocessableEntity, "patch", c.Resource, c.Name, err.Error(), 0, false)
		}
	case types.StrategicMergePatchType:
		var example runtime.Object
		if example, err = clientscheme.Scheme.New(c.resource.gvk()); err != nil {
			return nil, apierrors.NewGenericServerResponse(http.StatusUnsupportedMediaType, "patch", c.Resource, c.Name,
				"custom resources have no strategic merge patch", 0, false)
		}
		after, err = strategicpatch.StrategicMergePatch(before, c.Body, example)
	default:
		return nil, unsupported("patches of the type %q", c.Patch)
	}
	if err != nil {
		return nil, apierrors.NewBadRequest(err.Error())
	}
	return after, nil
}

// apply is server-side apply. It creates a missing object, if the caller may also create.
func (s *Server) apply(c call) (_ *object, changed bool, code int, err error) {
	patch := &object{}
	if err := yaml.Unmarshal(c.Body, &patch.Object); err != nil {
		return nil, false, 0, apierrors.NewBadRequest(err.Error())
	}
	// YAML has floats where JSON has integers.
	text, err := json.Marshal(patch.Object)
	if err == nil {
		err = utiljson.Unmarshal(text, &patch.Object)
	}
	if err != nil {
		return nil, false, 0, apierrors.NewBadRequest(err.Error())
	}
	dropNulls(patch.Object)
	switch {
	case c.param("fieldManager") == "":
		return nil, false, 0, apierrors.NewBadRequest("fieldManager is required for apply patch")
	case patch.GroupVersionKind() != c.resource.gvk():
		return nil, false, 0, apierrors.NewBadRequest(fmt.Sprintf("the object is a %s, but the request is for a %s", patch.GroupVersionKind(), c.resource.gvk()))
	case patch.GetName() != "" && patch.GetName() != c.Name:
		return nil, false, 0, apierrors.NewBadRequest(fmt.Sprintf("the name of the object (%s) does not match the name on the URL (%s)", patch.GetName(), c.Name))
	}
	patch.SetName(c.Name)
	if err := place(c.resource, c.Namespace, patch); err != nil {
		return nil, false, 0, err
	}
	current, err := s.get(c.resource, c.Namespace, c.Name)
	if apierrors.IsNotFound(err) && c.Subresource == "" {
		return s.applyNew(c, patch)
	} else if err != nil {
		return nil, false, 0, err
	}
	sent := patch.GetResourceVersion()
	obj, err := s.merge(c.resource, c.Subresource, current, patch, c.manager, c.force)
	if err != nil {
		return nil, false, 0, err
	}
	managers := obj.GetManagedFields()
	obj = withoutOtherParts(c.resource, c.Subresource, current, obj)
	obj.SetManagedFields(managers)
	obj.SetResourceVersion(sent)
	obj, changed, err = s.finish(c.resource, current, obj, c.DryRun)
	return obj, changed, http.StatusOK, err
}

func (s *Server) applyNew(c call, patch *object) (_ *object, changed bool, code int, err error) {
	if patch.GetUID() != "" || patch.GetResourceVersion() != "" {
		return nil, false, 0, apierrors.NewConflict(c.Resource, c.Name, fmt.Errorf("uid or resourceVersion is set, and the object does not exist"))
	}
	create := c.Request
	create.Verb = "create"
	if s.hooks.Admit != nil {
		if err := s.hooks.Admit(create); err != nil {
			return nil, false, 0, err
		}
	}
	obj, err := s.merge(c.resource, "", nil, patch, c.manager, c.force)
	if err != nil {
		return nil, false, 0, err
	}
	if c.resource.status {
		delete(obj.Object, "status")
	}
	s.identify(c.resource, obj)
	if !c.DryRun {
		s.commit(keyOf(c.resource, c.Namespace, c.Name), obj)
	}
	return obj, true, http.StatusCreated, nil
}

// listOf returns a list. It has no pages: the API server may always return more than asked for.
func (s *Server) listOf(c call) any {
	items := []any{}
	for _, obj := range s.matching(c.resource, c.selector) {
		items = append(items, c.shown(obj).Object)
	}
	kind, version := c.resource.kind+"List", c.resource.GroupVersion().String()
	if c.metadata {
		kind, version = "PartialObjectMetadataList", "meta.k8s.io/v1"
	}
	return map[string]any{"kind": kind, "apiVersion": version, "items": items,
		"metadata": map[string]any{"resourceVersion": strconv.Itoa(s.version)}}
}

// shown returns obj in the form that the client asked for.
func (c *call) shown(obj *object) *object {
	if !c.metadata {
		return obj
	}
	return &object{Object: map[string]any{"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": obj.Object["metadata"]}}
}
