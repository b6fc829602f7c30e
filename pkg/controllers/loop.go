// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package controllers

import (
	"context"
	"errors"
	"fmt"
	"runtime/pprof"
	"sort"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
)

const (
	// A failing key is tried again after 1 s, 2 s, 4 s ... 5 min, without end:
	// giving up would leave an object wrong until something else touches it.
	minBackoff = time.Second
	maxBackoff = 5 * time.Minute
)

// Options describe a [Loop]. Name, Reconcile and Metrics are required.
type Options[K comparable] struct {
	// Name of the controller: of its queue, its metrics and its pprof label.
	Name string
	// Workers is the number of keys reconciled at once; default 1. One key is
	// never with two workers.
	Workers int
	// Reconcile brings the object of one key to its desired state. It is called
	// again after the duration if that is > 0; otherwise at the next event. After
	// an error it is called again with exponential back-off, at the latest after
	// the duration if that is > 0, and not before the time that the API server
	// asked for.
	Reconcile func(ctx context.Context, key K) (after time.Duration, err error)
	Metrics   *Metrics
	// Clock drives delays, back-off and the status; default the real one.
	Clock clock.WithTicker
}

type queue[K comparable] = workqueue.TypedDelayingInterface[K]

// Loop takes keys from a queue and reconciles them. Build it with [NewLoop].
type Loop[K comparable] struct {
	opts Options[K]

	mu       sync.Mutex
	phase    Phase
	queue    queue[K]
	inFlight map[K]time.Time
	counts   struct{ reconciles, errors, panics uint64 }
	unmapped int // objects with events that could not be mapped yet
	lastErr  *LastError
}

// NewLoop returns a loop that does nothing until Run.
func NewLoop[K comparable](opts Options[K]) *Loop[K] {
	opts.Workers = max(opts.Workers, 1)
	if opts.Clock == nil {
		opts.Clock = clock.RealClock{}
	}
	l := &Loop[K]{opts: opts, phase: Stopped, inFlight: map[K]time.Time{}}
	opts.Metrics.add(opts.Name, func() time.Duration {
		_, running := l.Status().LongestRunning(opts.Clock.Now())
		return running
	})
	return l
}

// Run registers the watches, waits until their informers have synced and every
// object in them was mapped to keys, and reconciles until ctx ends.
//
// Then it takes no more keys and lets the reconciles in flight finish. Their
// context does not end with ctx, only with that of [WithWork]. Run returns when
// all workers have returned and the handlers are removed, however long that
// takes: how long to wait is for the host to decide, which holds the lease. The
// error is about a handler that could not be added or removed.
func (l *Loop[K]) Run(ctx context.Context, watches ...Watch[K]) (err error) {
	ctx = klog.NewContext(ctx, klog.FromContext(ctx).WithValues("controller", l.opts.Name))
	// Goroutines inherit the label: workers, handlers and the queue's own.
	pprof.Do(ctx, pprof.Labels("controller", l.opts.Name), func(ctx context.Context) {
		err = l.run(ctx, watches)
	})
	return err
}

func (l *Loop[K]) run(ctx context.Context, watches []Watch[K]) (err error) {
	logger := klog.FromContext(ctx)
	q, err := l.start(&logger)
	if err != nil {
		return err
	}
	defer l.setPhase(Stopped)
	defer q.ShutDown()

	retries := l.newMappingRetries(&logger)
	var mapping sync.WaitGroup
	mapping.Go(retries.run)
	defer mapping.Wait()
	defer retries.ShutDown()

	var synced []cache.DoneChecker
	for _, w := range watches {
		m := &mapper[K]{loop: l, watch: w, queue: q, retries: retries, logger: logger, failed: map[cache.ObjectName]change{}}
		registration, err := m.register()
		if err != nil {
			return fmt.Errorf("%s: watch: %w", l.opts.Name, err)
		}
		defer func() {
			if rmErr := w.informer.RemoveEventHandler(registration); rmErr != nil {
				err = errors.Join(err, fmt.Errorf("%s: remove event handler: %w", l.opts.Name, rmErr))
			}
		}()
		synced = append(synced, w.informer.HasSyncedChecker(), registration.HasSyncedChecker())
	}
	if !cache.WaitFor(klog.NewContext(ctx, logger.V(2)), l.opts.Name, synced...) {
		return nil // ctx ended first, and nothing has been started
	}

	work, cancel := workContext(ctx)
	defer cancel()
	limiter := workqueue.NewTypedItemExponentialFailureRateLimiter[K](minBackoff, maxBackoff)
	var workers sync.WaitGroup
	for range l.opts.Workers {
		workers.Go(func() {
			for l.next(ctx, work, q, limiter) {
			}
		})
	}
	l.setPhase(Running)
	logger.Info("Controller started", "workers", l.opts.Workers)

	<-ctx.Done()
	l.setPhase(Draining)
	logger.Info("Controller is draining", "inFlight", l.Status().InFlight)
	q.ShutDown()
	workers.Wait()
	logger.Info("Controller stopped")
	return nil
}

// start makes the queue of one run.
func (l *Loop[K]) start(logger *klog.Logger) (queue[K], error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.phase != Stopped {
		return nil, fmt.Errorf("%s: is already running", l.opts.Name)
	}
	l.phase = Syncing
	l.unmapped = 0 // the events of another run, which this one gets again
	l.queue = workqueue.NewTypedDelayingQueueWithConfig(workqueue.TypedDelayingQueueConfig[K]{
		Logger: logger, Name: l.opts.Name, Clock: l.opts.Clock,
	})
	return l.queue, nil
}

// next takes one key and reconciles it; false ends the worker.
func (l *Loop[K]) next(ctx, work context.Context, q queue[K], limiter workqueue.TypedRateLimiter[K]) bool {
	key, shutdown := q.Get()
	if shutdown {
		return false
	}
	defer q.Done(key)
	if ctx.Err() != nil {
		return true // a queue that shuts down still hands out what it has
	}

	after, err := l.reconcile(work, key)
	switch {
	case err != nil:
		delay := limiter.When(key)
		if after > 0 {
			delay = min(delay, after)
		}
		if seconds, ok := apierrors.SuggestsClientDelay(err); ok {
			delay = max(delay, time.Duration(seconds)*time.Second)
		}
		q.AddAfter(key, delay)
	case after > 0:
		limiter.Forget(key)
		q.AddAfter(key, after)
	default:
		limiter.Forget(key)
	}
	return true
}

// reconcile calls Reconcile and accounts for its outcome.
func (l *Loop[K]) reconcile(work context.Context, key K) (time.Duration, error) {
	// The text of a key matters only to people, so the loop asks no more of it.
	logger := klog.FromContext(work).WithValues("key", fmt.Sprint(key))
	work = klog.NewContext(work, logger)
	started := l.opts.Clock.Now()
	l.mu.Lock()
	l.inFlight[key] = started
	l.mu.Unlock()

	var after time.Duration
	stack, err := contain(func() (err error) {
		after, err = l.opts.Reconcile(work, key)
		return err
	})

	result := resultSuccess
	switch {
	case stack != nil:
		result = resultPanic
		logger.Error(err, "Reconcile panicked", "stack", string(stack))
	case IsNotLeading(err):
		// The fence has closed: this replica is on its way out, and its
		// successor does the work. Not worth a line per key.
		result = resultNotLeading
		logger.V(2).Info("Reconcile refused, not leading any more", "reason", err.Error())
	case err != nil:
		result = resultError
		logger.Error(err, "Reconcile failed")
	case after > 0:
		result = resultRequeue
	}

	now := l.opts.Clock.Now()
	l.opts.Metrics.observe(l.opts.Name, result, now.Sub(started))
	if result == resultPanic {
		l.opts.Metrics.Panicked(l.opts.Name)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.inFlight, key)
	l.counts.reconciles++
	if err != nil {
		l.lastErr = &LastError{Key: fmt.Sprint(key), Text: err.Error(), Time: now}
		if result == resultPanic {
			l.counts.panics++
		} else {
			l.counts.errors++
		}
	}
	return after, err
}

// IsNotLeading recognises the refusal of a write because this replica does not
// lead any more: an error in err's tree with a method NotLeading() bool that
// returns true. The loop counts it apart from failures and does not log it as
// one; a controller need not tell of it either.
func IsNotLeading(err error) bool {
	var refused interface{ NotLeading() bool }
	return errors.As(err, &refused) && refused.NotLeading()
}

func (l *Loop[K]) setPhase(p Phase) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.phase = p
}

// Status returns a snapshot, the keys in flight by name.
func (l *Loop[K]) Status() Status {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := Status{
		Name:       l.opts.Name,
		Phase:      l.phase,
		Workers:    l.opts.Workers,
		InFlight:   make([]InFlight, 0, len(l.inFlight)),
		Reconciles: l.counts.reconciles,
		Errors:     l.counts.errors,
		Panics:     l.counts.panics,
		Unmapped:   l.unmapped,
		LastError:  l.lastErr,
	}
	if l.queue != nil {
		s.QueueDepth = l.queue.Len()
	}
	for key, since := range l.inFlight {
		s.InFlight = append(s.InFlight, InFlight{Key: fmt.Sprint(key), Since: since})
	}
	sort.Slice(s.InFlight, func(i, j int) bool { return s.InFlight[i].Key < s.InFlight[j].Key })
	return s
}
