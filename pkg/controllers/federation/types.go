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

// typeLoop decides which types are propagated, and writes the status of FederatedTypeConfigs.
type typeLoop struct {
	*controllers.Loop[cache.ObjectName]
	namespace   string
	objects     informers.Informer[*unstructured.Unstructured]
	configs     informers.Informer[*unstructured.Unstructured]
	definitions informers.Informer[metav1.Object]
	client      dynamic.ResourceInterface
	events      record.EventRecorder

	mu      sync.Mutex
	running map[string]policy.TypeConfig
	warned  map[string]policy.Problem
}

// newTypeLoop returns the loop of the FederatedTypeConfigs. The informers objects and configs have the
// federation namespace alone, definitions has the metadata of CustomResourceDefinitions.
func newTypeLoop(namespace string, objects, configs informers.Informer[*unstructured.Unstructured], definitions informers.Informer[metav1.Object],
	client dynamic.Interface, events record.EventRecorder, loop controllers.LoopOptions,
) (*typeLoop, error) {
	l := &typeLoop{namespace: namespace, objects: objects, configs: configs, definitions: definitions,
		client: client.Resource(federatedTypeConfigs).Namespace(namespace), events: events,
		running: map[string]policy.TypeConfig{}, warned: map[string]policy.Problem{}}
	var err error
	l.Loop, err = controllers.NewLoop(loop, l.reconcile,
		// One type may need another type, or be the federated type of another, so each change concerns all.
		controllers.WatchMapped(objects, func(e controllers.Event[*unstructured.Unstructured]) []cache.ObjectName {
			if e.New == nil {
				return append(l.all(), cache.MetaObjectToName(e.Old))
			}
			return l.all()
		}, controllers.GenerationChanged),
		controllers.WatchChanges(configs, func(controllers.Event[*unstructured.Unstructured]) []cache.ObjectName {
			return l.all()
		}, controllers.GenerationChanged),
		controllers.WatchChanges(definitions, func(e controllers.Event[metav1.Object]) []cache.ObjectName {
			if e.Old != nil && e.New != nil {
				return nil // only its existence matters
			}
			return l.all()
		}))
	return l, err
}

// all returns the names of all FederatedTypeConfigs.
func (l *typeLoop) all() (keys []cache.ObjectName) {
	for _, object := range l.objects.List(l.namespace, labels.Everything()) {
		keys = append(keys, cache.MetaObjectToName(object))
	}
	return keys
}

// runningTypes returns the types that run, sorted by name. A type whose generation has changed
// is started again.
func (l *typeLoop) runningTypes() (types []policy.TypeConfig) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, t := range l.running {
		types = append(types, t)
	}
	slices.SortFunc(types, func(a, b policy.TypeConfig) int { return strings.Compare(a.Name, b.Name) })
	return types
}

// namespaces returns the FederatedTypeConfig of Namespaces, if FederatedNamespaces can be followed: they
// place others even if Namespaces themselves are not propagated.
func (l *typeLoop) namespaces() (t policy.TypeConfig, exists bool) {
	object, exists := l.objects.Get(cache.ObjectName{Namespace: l.namespace, Name: policy.NamespacesType})
	if !exists {
		return t, false
	}
	t = policy.ReadTypeConfig(object)
	_, defined := l.definitions.Get(cache.ObjectName{Name: t.Federated.GroupResource().String()})
	return t, defined && t.Invalid == nil && !t.Deleting
}

func (l *typeLoop) reconcile(ctx context.Context, key cache.ObjectName) (time.Duration, error) {
	object, exists := l.objects.Get(key)
	if !exists {
		l.set(key.Name, nil)
		l.warn(nil, key.Name, policy.Problem{})
		return 0, nil
	}
	t, finalizers := policy.ReadTypeConfig(object), object.GetFinalizers()
	at := slices.Index(finalizers, policy.TypeFinalizer)
	switch {
	case t.Deleting:
		l.set(key.Name, nil)
		if at < 0 {
			return 0, nil
		}
		return 0, l.finalize(ctx, object, slices.Delete(slices.Clone(finalizers), at, at+1))
	case at < 0:
		if err := l.finalize(ctx, object, append(slices.Clone(finalizers), policy.TypeFinalizer)); err != nil {
			return 0, err
		}
	}
	config, all := settings(ctx, l.configs, l.namespace), []policy.TypeConfig{}
	for _, other := range l.objects.List(l.namespace, labels.Everything()) {
		all = append(all, policy.ReadTypeConfig(other))
	}
	runs, warning := t.Runs(all, config, func(r schema.GroupResource) bool {
		_, exists := l.definitions.Get(cache.ObjectName{Name: r.String()})
		return exists
	})
	if runs {
		l.set(key.Name, &t)
	} else {
		l.set(key.Name, nil)
	}
	l.warn(object, key.Name, warning)
	return 0, l.write(ctx, &t, runs, config)
}

// set says whether a type runs.
func (l *typeLoop) set(name string, t *policy.TypeConfig) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if t != nil {
		l.running[name] = *t
		return
	}
	delete(l.running, name)
}

// warn records an Event if the warning is another than before.
func (l *typeLoop) warn(object *unstructured.Unstructured, name string, warning policy.Problem) {
	l.mu.Lock()
	before := l.warned[name]
	l.warned[name] = warning
	if warning.Reason == "" {
		delete(l.warned, name)
	}
	l.mu.Unlock()
	if warning != before && warning.Reason != "" {
		l.events.Event(object, corev1.EventTypeWarning, warning.Reason, warning.Text)
	}
}

// finalize writes the finalizers, unless somebody else has changed the object.
func (l *typeLoop) finalize(ctx context.Context, object *unstructured.Unstructured, finalizers []string) error {
	return l.patch(ctx, object.GetName(), map[string]any{"metadata": map[string]any{"resourceVersion": object.GetResourceVersion(), "finalizers": finalizers}})
}

// write updates the status if it has changed.
func (l *typeLoop) write(ctx context.Context, t *policy.TypeConfig, runs bool, config policy.Config) error {
	status, changed := t.NextStatus(runs, config)
	if !changed {
		return nil
	}
	return l.patch(ctx, t.Name, map[string]any{"status": status}, "status")
}

func (l *typeLoop) patch(ctx context.Context, name string, change map[string]any, subresources ...string) error {
	patch, err := json.Marshal(change)
	if err != nil {
		return err
	}
	_, err = l.client.Patch(ctx, name, types.MergePatchType, patch, metav1.PatchOptions{}, subresources...)
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
