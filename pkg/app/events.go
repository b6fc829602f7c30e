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

// eventsFlushTimeout is how long the process waits at its end for Events that are not sent yet.
// terminationGracePeriodSeconds must be longer than this and --shutdown-timeout together.
const eventsFlushTimeout = 3 * time.Second

// eventObjects limits for how many objects and texts the recorder remembers which Events it has sent, in
// order to combine and limit them. client-go's default of 4,096 takes 6.4 MiB of heap once there were Events
// for that many objects, as after a start; 512 take 0.8 MiB.
const eventObjects = 512

// eventSender sends Events through a client of its own. They do not pass the fence, and are sent under
// --dry-run too.
type eventSender struct {
	broadcaster record.EventBroadcaster
	scheme      *runtime.Scheme
	sink        *eventSink
}

func startEvents(ctx context.Context, c connection, scheme *runtime.Scheme) (*eventSender, error) {
	client, err := c.typed(c.named("events"))
	if err != nil {
		return nil, err
	}
	return recordTo(ctx, &typedcorev1.EventSinkImpl{Interface: client.CoreV1().Events("")}, scheme), nil
}

func recordTo(ctx context.Context, sink record.EventSink, scheme *runtime.Scheme) *eventSender {
	e := &eventSender{
		broadcaster: record.NewBroadcaster(record.WithContext(ctx), record.WithCorrelatorOptions(record.CorrelatorOptions{LRUCacheSize: eventObjects})),
		scheme:      scheme,
		sink:        &eventSink{sink, make(chan struct{})},
	}
	e.broadcaster.StartStructuredLogging(4)
	e.broadcaster.StartRecordingToSink(e.sink)
	return e
}

// recorder returns a recorder of Events with the given source component.
func (e *eventSender) recorder(component string) record.EventRecorder {
	return e.broadcaster.NewRecorder(e.scheme, corev1.EventSource{Component: component})
}

// stop returns when every Event that was recorded before has been sent, but after
// eventsFlushTimeout at the latest. The broadcaster's Shutdown alone would drop Events that are not
// sent yet.
func (e *eventSender) stop() {
	defer e.broadcaster.Shutdown()
	e.recorder("").Event(&corev1.ObjectReference{Name: lastEvent}, corev1.EventTypeNormal, lastEvent, "")
	select {
	case <-e.sink.flushed:
	case <-time.After(eventsFlushTimeout):
	}
}

// lastEvent is the reason of an Event that is not sent. The broadcaster hands Events to the sink
// one by one, in order: when lastEvent arrives, all Events that were recorded before have been sent.
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
