// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/tools/record"
)

// eventsFlushTimeout bounds how long the end of the process waits for Events that are still to be sent.
// With --shutdown-timeout it has to fit into terminationGracePeriodSeconds.
const eventsFlushTimeout = 3 * time.Second

// events sends Events through a client of its own: they do not wait for the fence, and are sent with
// --dry-run too.
type events struct {
	broadcaster record.EventBroadcaster
	scheme      *runtime.Scheme
	sink        *eventSink
}

func startEvents(ctx context.Context, c connection, scheme *runtime.Scheme) (*events, error) {
	client, err := c.typed(c.named("events"))
	if err != nil {
		return nil, err
	}
	return recordTo(ctx, &typedcorev1.EventSinkImpl{Interface: client.CoreV1().Events("")}, scheme), nil
}

func recordTo(ctx context.Context, sink record.EventSink, scheme *runtime.Scheme) *events {
	e := &events{
		broadcaster: record.NewBroadcaster(record.WithContext(ctx)),
		scheme:      scheme,
		sink:        &eventSink{sink, make(chan struct{})},
	}
	e.broadcaster.StartStructuredLogging(4)
	e.broadcaster.StartRecordingToSink(e.sink)
	return e
}

// recorder records Events in the name of a component.
func (e *events) recorder(component string) record.EventRecorder {
	return e.broadcaster.NewRecorder(e.scheme, corev1.EventSource{Component: component})
}

// stop returns when every Event that was recorded before has been sent, or at the latest after
// eventsFlushTimeout. The broadcaster's Shutdown alone drops what it has not sent yet.
func (e *events) stop() {
	defer e.broadcaster.Shutdown()
	e.recorder("").Event(&corev1.ObjectReference{Name: lastEvent}, corev1.EventTypeNormal, lastEvent, "")
	timeout := time.NewTimer(eventsFlushTimeout)
	defer timeout.Stop()
	select {
	case <-e.sink.flushed:
	case <-timeout.C:
	}
}

// lastEvent is the reason of an Event that is not sent. The broadcaster hands Events to the sink one by
// one, in order: all that were recorded before have been sent when it arrives.
const lastEvent = "quartermaster.dev/last-event"

type eventSink struct {
	record.EventSink
	flushed chan struct{}
}

// Create implements record.EventSink.
func (s *eventSink) Create(event *corev1.Event) (*corev1.Event, error) {
	if event.Reason == lastEvent {
		close(s.flushed)
		return event, nil
	}
	return s.EventSink.Create(event)
}
