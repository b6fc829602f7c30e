// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/tools/record"
)

// events sends Events through a client of its own: they must wait neither for the fence nor for the controllers'
// rate limit, and are sent with --dry-run too.
type events struct {
	broadcaster record.EventBroadcaster
}

func startEvents(ctx context.Context, c *clients) (*events, error) {
	client, err := kubernetes.NewForConfig(c.named("events"))
	if err != nil {
		return nil, err
	}
	broadcaster := record.NewBroadcaster(record.WithContext(ctx))
	broadcaster.StartStructuredLogging(4)
	broadcaster.StartRecordingToSink(&typedcorev1.EventSinkImpl{Interface: client.CoreV1().Events("")})
	return &events{broadcaster}, nil
}

// recorder records Events in the name of a component.
func (e *events) recorder(component string) record.EventRecorder {
	return e.broadcaster.NewRecorder(scheme.Scheme, corev1.EventSource{Component: component})
}
