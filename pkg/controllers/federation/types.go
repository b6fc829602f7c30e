// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package federation

import (
	"context"
	"encoding/json"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/federation/policy"
	"github.com/quartermaster-dev/quartermaster/pkg/informers"
)

// Types decides which types are propagated, and writes the status of FederatedTypeConfigs.
type Types struct {
	*controllers.Loop[cache.ObjectName]
	namespace   string
	objects     informers.Informer[*unstructured.Unstructured]
	configs     informers.Informer[*unstructured.Unstructured]
	definitions informers.Informer[metav1.Object]
	client      dynamic.ResourceInterface
	events      record.EventRecorder

	mu      sync.Mutex
	running map[string]policy.TypeConfig
	warned  map[string]policy.Warning
}

// NewTypes returns the loop of the FederatedTypeConfigs. The informers objects and configs have the
// federation namespace alone, definitions has the metadata of CustomResourceDefinitions.
func NewTypes(namespace string, objects, configs informers.Informer[*unstructured.Unstructured], definitions informers.Informer[metav1.Object],
	client dynamic.Interface, events record.EventRecorder, loop controllers.Options,
) (*Types, error) {
	t := &Types{namespace: namespace, objects: objects, configs: configs, definitions: definitions,
		client: client.Resource(FederatedTypeConfigs).Namespace(namespace), events: events,
		running: map[string]policy.TypeConfig{}, warned: map[string]policy.Warning{}}
	var err error
	t.Loop, err = controllers.NewLoop(loop, t.reconcile,
		// One type may need another type, or be the federated type of another, so each change concerns all.
		controllers.WatchMapped(objects, func(e controllers.Event[*unstructured.Unstructured]) []cache.ObjectName {
			if e.New == nil {
				return append(t.all(), cache.MetaObjectToName(e.Old))
			}
			return t.all()
		}, controllers.GenerationChanged),
		controllers.WatchChanges(configs, func(controllers.Event[*unstructured.Unstructured]) []cache.ObjectName {
			return t.all()
		}, controllers.GenerationChanged),
		controllers.WatchChanges(definitions, func(e controllers.Event[metav1.Object]) []cache.ObjectName {
			if e.Old != nil && e.New != nil {
				return nil // only its existence matters
			}
			return t.all()
		}))
	return t, err
}

// all returns the names of all FederatedTypeConfigs.
func (t *Types) all() (keys []cache.ObjectName) {
	for _, object := range t.objects.List(t.namespace, labels.Everything()) {
		keys = append(keys, cache.MetaObjectToName(object))
	}
	return keys
}

// Running returns the types that run, sorted by name. One whose generation is another than before was
// changed and begins anew.
func (t *Types) Running() (types []policy.TypeConfig) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, of := range t.running {
		types = append(types, of)
	}
	slices.SortFunc(types, func(a, b policy.TypeConfig) int { return strings.Compare(a.Name, b.Name) })
	return types
}

// namespaces returns the FederatedTypeConfig of Namespaces, if FederatedNamespaces can be followed: they
// place others even if Namespaces themselves are not propagated.
func (t *Types) namespaces() (of policy.TypeConfig, exists bool) {
	object, exists := t.objects.Get(cache.ObjectName{Namespace: t.namespace, Name: policy.NamespacesType})
	if !exists {
		return of, false
	}
	of = policy.ReadTypeConfig(object)
	_, defined := t.definitions.Get(cache.ObjectName{Name: of.Federated.GroupResource().String()})
	return of, defined && of.Invalid == nil && !of.Deleting
}

func (t *Types) reconcile(ctx context.Context, key cache.ObjectName) (time.Duration, error) {
	object, exists := t.objects.Get(key)
	if !exists {
		t.set(key.Name, nil)
		t.warn(nil, key.Name, policy.Warning{})
		return 0, nil
	}
	of, finalizers := policy.ReadTypeConfig(object), object.GetFinalizers()
	at := slices.Index(finalizers, policy.TypeFinalizer)
	switch {
	case of.Deleting:
		t.set(key.Name, nil)
		if at < 0 {
			return 0, nil
		}
		return 0, t.finalize(ctx, object, slices.Delete(slices.Clone(finalizers), at, at+1))
	case at < 0:
		if err := t.finalize(ctx, object, append(slices.Clone(finalizers), policy.TypeFinalizer)); err != nil {
			return 0, err
		}
	}
	config, all := settings(ctx, t.configs, t.namespace), []policy.TypeConfig{}
	for _, other := range t.objects.List(t.namespace, labels.Everything()) {
		all = append(all, policy.ReadTypeConfig(other))
	}
	runs, warning := of.Runs(all, config, func(r schema.GroupResource) bool {
		_, exists := t.definitions.Get(cache.ObjectName{Name: r.String()})
		return exists
	})
	if runs {
		t.set(key.Name, &of)
	} else {
		t.set(key.Name, nil)
	}
	t.warn(object, key.Name, warning)
	return 0, t.write(ctx, &of, runs, config)
}

// set says whether a type runs.
func (t *Types) set(name string, of *policy.TypeConfig) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if of != nil {
		t.running[name] = *of
		return
	}
	delete(t.running, name)
}

// warn records an Event if the warning is another than before.
func (t *Types) warn(object *unstructured.Unstructured, name string, warning policy.Warning) {
	t.mu.Lock()
	before := t.warned[name]
	t.warned[name] = warning
	if warning.Reason == "" {
		delete(t.warned, name)
	}
	t.mu.Unlock()
	if warning != before && warning.Reason != "" {
		t.events.Event(object, corev1.EventTypeWarning, warning.Reason, warning.Text)
	}
}

// finalize writes the finalizers, unless somebody else has changed the object.
func (t *Types) finalize(ctx context.Context, object *unstructured.Unstructured, finalizers []string) error {
	return t.patch(ctx, object.GetName(), map[string]any{"metadata": map[string]any{"resourceVersion": object.GetResourceVersion(), "finalizers": finalizers}})
}

// write updates the status if it has changed.
func (t *Types) write(ctx context.Context, of *policy.TypeConfig, runs bool, config policy.Config) error {
	status, changed := of.NextStatus(runs, config)
	if !changed {
		return nil
	}
	return t.patch(ctx, of.Name, map[string]any{"status": status}, "status")
}

func (t *Types) patch(ctx context.Context, name string, change map[string]any, subresources ...string) error {
	patch, err := json.Marshal(change)
	if err != nil {
		return err
	}
	_, err = t.client.Patch(ctx, name, types.MergePatchType, patch, metav1.PatchOptions{}, subresources...)
	if apierrors.IsNotFound(err) {
		return nil // it is gone
	}
	return err
}

// settings returns the settings of the federation. An invalid field has its default.
func settings(ctx context.Context, configs informers.Informer[*unstructured.Unstructured], namespace string) policy.Config {
	object, exists := configs.Get(cache.ObjectName{Namespace: namespace, Name: policy.ConfigName})
	if !exists {
		return policy.DefaultConfig()
	}
	config, err := policy.ReadConfig(object.Object)
	if err != nil {
		klog.FromContext(ctx).V(2).Info("KubeFedConfig is invalid; using defaults for its invalid fields", "err", err)
	}
	return config
}
