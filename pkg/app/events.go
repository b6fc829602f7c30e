// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/tools/record"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
)

// eventsFlushTimeout is how long the process waits at its end for Events that are not sent yet.
// terminationGracePeriodSeconds must be longer than this and --shutdown-timeout together.
const eventsFlushTimeout = 3 * time.Second

// eventTimeout is how long an API server may take for an Event, pauses that it asks for included: client-go's
// recorder waits without limit. It is the default of kube-apiserver's --request-timeout.
const eventTimeout = time.Minute

// eventObjects limits for how many objects and texts the recorder remembers which Events it has sent, in
// order to combine and limit them. client-go's default of 4,096 takes 6.4 MiB of heap once there were Events
// for that many objects, as after a start; 512 take 0.8 MiB. An object with Events that has been forgotten
// begins with a new Event and a new limit.
const eventObjects = 512

// eventSender sends Events. Each source has a queue of its own, so that a controller with many Events does
// not displace those of others. Events of our own cluster go through a client that does not pass the fence,
// and are sent under --dry-run too.
type eventSender struct {
	newBroadcaster func() record.EventBroadcaster
	scheme         *runtime.Scheme
	sink           record.EventSink

	mu      sync.Mutex
	queues  []*eventQueue
	stopped bool
}

// eventQueue has the Events of one source.
type eventQueue struct {
	record.EventSink
	broadcaster record.EventBroadcaster
	recorder    record.EventRecorder
	flushed     chan struct{} // closed by flush
	flush       func()
}

func startEvents(ctx context.Context, c clientConfigs, scheme *runtime.Scheme) (*eventSender, error) {
	config := c.named("events")
	config.Timeout = eventTimeout
	client, err := c.typed(config)
	if err != nil {
		return nil, err
	}
	return newEventSender(ctx, client.CoreV1(), scheme), nil
}

// newEventSender returns a sender that sends through a client until ctx ends.
func newEventSender(ctx context.Context, client typedcorev1.EventsGetter, scheme *runtime.Scheme) *eventSender {
	return newEventSenderFor(ctx, &typedcorev1.EventSinkImpl{Interface: client.Events("")}, scheme)
}

// newEventSenderFor returns a sender that sends to a sink until ctx ends.
func newEventSenderFor(ctx context.Context, sink record.EventSink, scheme *runtime.Scheme) *eventSender {
	return &eventSender{scheme: scheme, sink: sink, newBroadcaster: func() record.EventBroadcaster {
		return record.NewBroadcaster(
			record.WithContext(ctx), record.WithCorrelatorOptions(record.CorrelatorOptions{LRUCacheSize: eventObjects}))
	}}
}

// recorder returns a recorder of Events with the given source component. Its queue is made for the first
// Event, since most clusters get none.
func (e *eventSender) recorder(component string) record.EventRecorder {
	return lazyRecorder(sync.OnceValue(func() record.EventRecorder {
		e.mu.Lock()
		defer e.mu.Unlock()
		if e.stopped {
			return &record.FakeRecorder{} // drops Events
		}
		q := &eventQueue{EventSink: e.sink, broadcaster: e.newBroadcaster(), flushed: make(chan struct{})}
		q.flush = sync.OnceFunc(func() { close(q.flushed) })
		q.recorder = q.broadcaster.NewRecorder(e.scheme, corev1.EventSource{Component: component})
		q.broadcaster.StartStructuredLogging(4)
		q.broadcaster.StartRecordingToSink(q)
		e.queues = append(e.queues, q)
		return q.recorder
	}))
}

// lazyRecorder is a record.EventRecorder that is made for the first Event.
type lazyRecorder func() record.EventRecorder

// Event implements record.EventRecorder, as do the other methods.
func (r lazyRecorder) Event(object runtime.Object, kind, reason, message string) {
	r().Event(object, kind, reason, message)
}

// Eventf records an Event with a formatted message.
func (r lazyRecorder) Eventf(object runtime.Object, kind, reason, format string, args ...any) {
	r().Eventf(object, kind, reason, format, args...)
}

// AnnotatedEventf records an Event with annotations.
func (r lazyRecorder) AnnotatedEventf(
	object runtime.Object, annotations map[string]string, kind, reason, format string, args ...any,
) {
	r().AnnotatedEventf(object, annotations, kind, reason, format, args...)
}

// stop returns when every Event that was recorded before has been sent, but after timeout at the latest. The
// broadcaster's Shutdown alone would drop Events that are not sent yet.
func (e *eventSender) stop(timeout time.Duration) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.stopped = true
	over, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	for _, q := range e.queues {
		if timeout == 0 {
			break // the broadcaster may have been shut down, and would log that as an error
		}
		q.recorder.Event(&corev1.ObjectReference{Name: lastEvent}, corev1.EventTypeNormal, "LastEvent", "")
	}
	for _, q := range e.queues {
		select {
		case <-q.flushed:
		case <-over.Done():
		}
		q.broadcaster.Shutdown()
	}
}

// lastEvent is the object of an Event that is not sent: no object has such a name. The broadcaster hands
// Events to the sink one by one, in order: when lastEvent arrives, all Events that were recorded before have
// been sent.
const lastEvent = "quartermaster.dev/last-event"

// Create implements record.EventSink.
func (q *eventQueue) Create(event *corev1.Event) (*corev1.Event, error) {
	if event.InvolvedObject.Name == lastEvent {
		q.flush()
		return event, nil
	}
	created, err := q.EventSink.Create(event)
	return withoutRefusal(event, created, err)
}

// Patch implements record.EventSink.
func (q *eventQueue) Patch(event *corev1.Event, patch []byte) (*corev1.Event, error) {
	patched, err := q.EventSink.Patch(event, patch)
	return withoutRefusal(event, patched, err)
}

// withoutRefusal drops an Event that the fence has refused. client-go would try again for two minutes, and
// the Events behind it would wait.
func withoutRefusal(event, sent *corev1.Event, err error) (*corev1.Event, error) {
	if controllers.IsNotLeading(err) {
		return event, nil
	}
	return sent, err
}
