// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package federation

import (
	"cmp"
	"context"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/federation/policy"
)

// typeLoop decides which types are propagated, and writes the status of FederatedTypeConfigs.
type typeLoop struct {
	*controllers.Loop[cache.ObjectName]
	controller *controller
	states     sync.Map // the last typeState of each type, by name
}

// typeState is what was last decided on a FederatedTypeConfig.
type typeState struct {
	policy.TypeConfig
	runs    bool
	warning policy.Problem
}

// newTypeLoop returns the loop of the FederatedTypeConfigs of the federation namespace.
func newTypeLoop(c *controller, loop controllers.LoopOptions) (*typeLoop, error) {
	l := &typeLoop{controller: c}
	var err error
	l.Loop, err = controllers.NewLoop(loop, l.reconcile,
		// One FederatedTypeConfig may depend on another, or have the same federated type, so each change concerns
		// all.
		controllers.WatchMapped(c.informers.types, func(e controllers.Event[*unstructured.Unstructured]) []cache.ObjectName {
			return append(l.names(), cache.MetaObjectToName(cmp.Or(e.New, e.Old)))
		}, controllers.GenerationChanged),
		controllers.WatchChanges(c.informers.configs, func(controllers.Event[*unstructured.Unstructured]) []cache.ObjectName {
			return l.names()
		}, controllers.GenerationChanged),
		controllers.WatchChanges(c.informers.definitions, func(e controllers.Event[metav1.Object]) []cache.ObjectName {
			if e.Old != nil && e.New != nil {
				return nil // only its existence matters
			}
			return l.names()
		}))
	return l, err
}

// names returns the names of all FederatedTypeConfigs.
func (l *typeLoop) names() []cache.ObjectName {
	return objectNames(l.controller.informers.types, l.controller.cfg.Namespace)
}

// runningTypes returns the types that run.
func (l *typeLoop) runningTypes() (types []policy.TypeConfig) {
	for _, state := range l.states.Range {
		if t := state.(typeState); t.runs {
			types = append(types, t.TypeConfig)
		}
	}
	return types
}

// isDefined reports whether there is a CustomResourceDefinition.
func (l *typeLoop) isDefined(r schema.GroupResource) bool {
	_, exists := l.controller.informers.definitions.Get(cache.ObjectName{Name: r.String()})
	return exists
}

// typeConfigs returns all FederatedTypeConfigs.
func (l *typeLoop) typeConfigs() (configs []policy.TypeConfig) {
	for _, object := range l.controller.informers.types.List(l.controller.cfg.Namespace, nil) {
		configs = append(configs, policy.ReadTypeConfig(object))
	}
	return configs
}

func (l *typeLoop) reconcile(ctx context.Context, key cache.ObjectName) (time.Duration, error) {
	object, exists := l.controller.informers.types.Get(key)
	if !exists {
		l.states.Delete(key.Name)
		return 0, nil
	}
	t, client := policy.ReadTypeConfig(object), l.controller.federationClient(federatedTypeConfigs)
	if t.Deleting {
		l.setState(typeState{TypeConfig: t})
	}
	if _, err := setFinalizer(ctx, client, object, policy.TypeFinalizer, !t.Deleting); err != nil || t.Deleting {
		return 0, err
	}
	config := l.controller.settings(ctx)
	runs, warning := t.Runs(l.typeConfigs(), config, l.isDefined)
	if l.setState(typeState{t, runs, warning}) {
		l.controller.host.Events.Event(object, corev1.EventTypeWarning, warning.Reason, warning.Text)
	}
	status, changed := t.NextStatus(runs, config)
	if !changed {
		return 0, nil
	}
	_, err := patch(ctx, client, t.Name, map[string]any{"status": status}, "status")
	return 0, err
}

// setState notes what was decided on a type. It reports whether its warning is a new one.
func (l *typeLoop) setState(t typeState) (isNew bool) {
	state, _ := l.states.Swap(t.Name, t)
	before, _ := state.(typeState)
	return t.warning.Reason != "" && t.warning != before.warning
}

// settings returns the settings of the federation. An invalid field has its default.
func (c *controller) settings(ctx context.Context) policy.Config {
	object, exists := c.informers.configs.Get(cache.ObjectName{Namespace: c.cfg.Namespace, Name: policy.ConfigName})
	if !exists {
		return policy.DefaultConfig()
	}
	config, err := policy.ReadConfig(object.Object)
	if version := object.GetResourceVersion(); err != nil && c.invalidConfig.Swap(version) != version {
		klog.FromContext(ctx).V(2).Info("KubeFedConfig is invalid; using defaults for its invalid fields", "err", err)
	}
	return config
}
