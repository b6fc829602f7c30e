// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package election

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
)

var leaseResource = coordinationv1.Resource("leases")

// simStore is the API server of the simulation: one Lease with the semantics of kube-apiserver
// (resourceVersions, conflicts, UIDs, watches from a version).
type simStore struct {
	mu       sync.Mutex
	rv       int64
	uids     int
	lease    *coordinationv1.Lease
	past     []watch.Event                                            // every version, oldest first
	watches  []*simWatch                                              // in the order of their start
	onChange func(writer string, before, after *coordinationv1.Lease) // called under mu

	background sync.WaitGroup // what the network and the API server still do
}

func newSimStore() *simStore {
	return &simStore{rv: 100}
}

func (s *simStore) get() (*coordinationv1.Lease, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.lease == nil {
		return nil, apierrors.NewNotFound(leaseResource, "lease")
	}
	return s.lease, nil
}

func (s *simStore) create(writer string, lease *coordinationv1.Lease) (*coordinationv1.Lease, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.lease != nil {
		return nil, apierrors.NewAlreadyExists(leaseResource, lease.Name)
	}
	lease = lease.DeepCopy()
	s.uids++
	lease.UID = types.UID("uid-" + strconv.Itoa(s.uids))
	s.set(writer, watch.Added, lease)
	return lease, nil
}

func (s *simStore) update(writer string, lease *coordinationv1.Lease) (*coordinationv1.Lease, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.lease == nil {
		return nil, apierrors.NewNotFound(leaseResource, lease.Name)
	}
	if lease.ResourceVersion != s.lease.ResourceVersion || lease.UID != s.lease.UID {
		return nil, apierrors.NewConflict(leaseResource, lease.Name, fmt.Errorf("the object has been modified"))
	}
	lease = lease.DeepCopy()
	s.set(writer, watch.Modified, lease)
	return lease, nil
}

// edit changes the Lease as an administrator or another program would, regardless of versions. It
// does nothing if there is no Lease.
func (s *simStore) edit(writer string, change func(*coordinationv1.Lease)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.lease == nil {
		return
	}
	lease := s.lease.DeepCopy()
	change(lease)
	s.set(writer, watch.Modified, lease)
}

func (s *simStore) delete(writer string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.lease != nil {
		s.set(writer, watch.Deleted, s.lease.DeepCopy())
	}
}

// set is called under mu with a Lease that nobody else references.
func (s *simStore) set(writer string, kind watch.EventType, lease *coordinationv1.Lease) {
	s.rv++
	lease.ResourceVersion = strconv.FormatInt(s.rv, 10)
	before := s.lease
	s.lease = lease
	if kind == watch.Deleted {
		s.lease = nil
	}
	if s.onChange != nil {
		s.onChange(writer, before, s.lease)
	}
	event := watch.Event{Type: kind, Object: lease}
	s.past = append(s.past, event)
	for _, w := range s.watches {
		w.push(event)
	}
}

func (s *simStore) holder() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.lease == nil {
		return ""
	}
	return holderOf(s.lease)
}

// watch starts a watch after the version from, or with the present state if from is empty.
func (s *simStore) watch(ctx context.Context, link *simLink, rng *rand.Rand, from string, lifetime time.Duration) *simWatch {
	w := &simWatch{
		store: s, link: link, rng: rng,
		events: make(chan watch.Event), wake: make(chan struct{}, 1), stop: make(chan struct{}),
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if from == "" {
		if s.lease != nil {
			w.push(watch.Event{Type: watch.Added, Object: s.lease})
		}
	} else {
		after, _ := strconv.ParseInt(from, 10, 64)
		for _, event := range s.past {
			rv, _ := strconv.ParseInt(event.Object.(*coordinationv1.Lease).ResourceVersion, 10, 64)
			if rv > after {
				w.push(event)
			}
		}
	}
	s.watches = append(s.watches, w)
	s.background.Go(func() { w.deliver(ctx, lifetime) })
	return w
}

// simWatch delivers the events of one watch in order and late.
type simWatch struct {
	store  *simStore
	link   *simLink
	rng    *rand.Rand
	events chan watch.Event
	wake   chan struct{}
	once   sync.Once
	stop   chan struct{}

	mu      sync.Mutex
	queue   []watch.Event
	stalled bool
}

func (w *simWatch) push(event watch.Event) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.queue = append(w.queue, event)
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

func (w *simWatch) pop() (watch.Event, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.queue) == 0 || w.stalled {
		return watch.Event{}, false
	}
	event := w.queue[0]
	w.queue = w.queue[1:]
	return event, true
}

// stall leaves the watch open but dead, like a connection whose peer is gone.
func (w *simWatch) stall() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.stalled = true
}

func (w *simWatch) deliver(ctx context.Context, lifetime time.Duration) {
	defer close(w.events)
	defer w.forget()
	end := time.NewTimer(lifetime)
	defer end.Stop()
	for {
		event, ok := w.pop()
		if !ok {
			select {
			case <-w.wake:
				continue
			case <-w.stop:
			case <-ctx.Done():
			case <-end.C:
			}
			return
		}
		if !sleep(ctx, w.link.latency(w.rng)) || !w.link.awaitUp(ctx) {
			return
		}
		select {
		case w.events <- event:
		case <-w.stop:
			return
		case <-ctx.Done():
			return
		}
	}
}

func (w *simWatch) forget() {
	w.store.mu.Lock()
	defer w.store.mu.Unlock()
	w.store.watches = slices.DeleteFunc(w.store.watches, func(other *simWatch) bool { return other == w })
}

func (w *simWatch) Stop() { w.once.Do(func() { close(w.stop) }) }

func (w *simWatch) ResultChan() <-chan watch.Event { return w.events }

// pass lets virtual time pass, in a bubble.
func pass(d time.Duration) { <-time.After(d) }

// sleep waits for d and reports whether it passed before ctx ended.
func sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}
