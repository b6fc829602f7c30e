// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package greeter is an example of a controller. It greets ConfigMaps that ask for it with an
// Event.
package greeter

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/informers"
)

// Name is the name of the controller. Annotation is the key of the annotation with which a
// ConfigMap asks for a greeting; its value says whom to greet.
const (
	Name       = "greeter"
	Annotation = "example.com/greet"
)

// Controller greets ConfigMaps, with the Run and the Status of the shared loop.
type Controller struct {
	*controllers.Loop[cache.ObjectName]
	configMaps *informers.Informer[metav1.Object]
	client     kubernetes.Interface
	events     record.EventRecorder
}

// New returns a controller that does nothing until Run.
func New(
	configMaps *informers.Informer[metav1.Object], client kubernetes.Interface, events record.EventRecorder, loop controllers.LoopOptions,
) (_ *Controller, err error) {
	c := &Controller{configMaps: configMaps, client: client, events: events}
	c.Loop, err = controllers.NewLoop(loop, c.reconcile, controllers.WatchSelf(configMaps))
	return c, err
}

func (c *Controller) reconcile(ctx context.Context, key cache.ObjectName) (time.Duration, error) {
	object, exists := c.configMaps.Get(key) // what the entry declared of it
	if !exists {
		return 0, nil
	}
	whom, asked := object.GetAnnotations()[Annotation]
	if !asked {
		return 0, nil
	}
	if whom == "" {
		// No retry mends what somebody wrote; the event of the next change adds the key again.
		return 0, controllers.TerminalError(fmt.Errorf("the annotation %s names nobody", Annotation))
	}

	// Write once, then record the Event. The resourceVersion makes the write fail if the object has
	// changed.
	patch := fmt.Appendf(nil, `{"metadata":{"resourceVersion":%q,"annotations":{%q:null}}}`, object.GetResourceVersion(), Annotation)
	configMap, err := c.client.CoreV1().ConfigMaps(key.Namespace).Patch(
		ctx, key.Name, "application/merge-patch+json", patch, metav1.PatchOptions{FieldManager: Name})
	switch {
	case apierrors.IsNotFound(err):
		return 0, nil // it is gone
	case err != nil: // a conflict, too: the loop tries the key again after 0.1 s
		return 0, fmt.Errorf("greet %s: %w", key, err)
	}
	c.events.Eventf(configMap, corev1.EventTypeNormal, "Greeted", "Hello, %s", whom)
	return 0, nil
}
