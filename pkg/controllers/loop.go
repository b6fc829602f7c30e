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
	// A failing key is tried again after 1 s, 2 s, 4 s and so on up to 5 min, without end: giving
	// up would leave an object wrong until something else changes it.
	minBackoff = time.Second
	maxBackoff = 5 * time.Minute
)

// Options describe a [Loop]. Name, Reconcile and Metrics are required.
type Options[K comparable] struct {
	// Name is the controller's name. It names the queue, the metrics and the pprof label too.
	Name string
	// Workers is the number of keys reconciled at once; default 1. A key is never with two workers
	// at once.
	Workers int
	// Reconcile brings the object of one key to its desired state. If it returns a duration > 0, it
	// is called again after that time, otherwise at the next event. After an error it is called
	// again with exponential back-off: at the latest after the duration if that is > 0, and not
	// before the time that the API server asked for.
	Reconcile func(ctx context.Context, key K) (after time.Duration, err error)
	// Feed, if set, runs beside the workers until ctx ends. It enqueues the keys of objects that no Watch
	// shows. If it returns earlier, Run ends with its error.
	Feed    func(ctx context.Context, enqueue func(K)) error
	Metrics *Metrics
	// Clock drives delays, back-off and the status; default the real clock.
	Clock clock.WithTicker
}

type queue[K comparable] = workqueue.TypedDelayingInterface[K]

// Loop takes keys from a queue and reconciles them. Build it with [NewLoop].
type Loop[K comparable] struct {
	opts    Options[K]
	mappers []*mapper[K]

	mu       sync.Mutex
	phase    Phase
	queue    queue[K]
	inFlight map[K]time.Time
	counts   struct{ reconciles, errors, panics uint64 }
	retries  *mappingRetries[K] // of the latest run
	lastErr  *LastError
}

// NewLoop registers the watches and returns a loop that drops their events until Run. So their
// informers must have been built, and need not have started. NewLoop returns an error if one has
// stopped. It panics without Metrics.
func NewLoop[K comparable](opts Options[K], watches ...Watch[K]) (*Loop[K], error) {
	opts.Workers = max(opts.Workers, 1)
	if opts.Clock == nil {
		opts.Clock = clock.RealClock{}
	}
	l := &Loop[K]{opts: opts, phase: Stopped, inFlight: map[K]time.Time{}}
	opts.Metrics.add(opts.Name, func() time.Duration {
		_, running := l.Status().LongestRunning(opts.Clock.Now())
		return running
	})
	for _, w := range watches {
		m := &mapper[K]{loop: l, watch: w}
		if err := m.register(); err != nil {
			return nil, fmt.Errorf("%s: watch: %w", opts.Name, err)
		}
		l.mappers = append(l.mappers, m)
	}
	return l, nil
}

// Run waits until the informers of the watches have synced. Then it adds the keys of the objects in
// them to the queue, see [WatchMapped], and reconciles until ctx ends, from the first key on.
//
// After that it takes no more keys and lets the reconciles in flight finish. Their context does not
// end with ctx, only with that of [WithWork]. Run returns when all workers and mappings have returned,
// however long that takes: the host, which holds the lease, decides how long to wait. It returns an
// error if the loop is already running.
func (l *Loop[K]) Run(ctx context.Context) (err error) {
	ctx = klog.NewContext(ctx, klog.FromContext(ctx).WithValues("controller", l.opts.Name))
	// All goroutines inherit the label: those of the workers and of the queue.
	pprof.Do(ctx, pprof.Labels("controller", l.opts.Name), func(ctx context.Context) {
		err = l.run(ctx)
	})
	return err
}

func (l *Loop[K]) run(ctx context.Context) error {
	logger := klog.FromContext(ctx)
	q, retries, err := l.start(&logger)
	if err != nil {
		return err
	}
	defer l.setPhase(Stopped)
	defer q.ShutDown()

	var mapping sync.WaitGroup
	mapping.Go(retries.run)
	defer mapping.Wait()
	defer retries.ShutDown()

	var synced []cache.DoneChecker
	for _, m := range l.mappers {
		synced = append(synced, m.watch.informer.HasSyncedChecker())
	}
	if !cache.WaitFor(klog.NewContext(ctx, logger.V(2)), l.opts.Name, synced...) {
		return nil // ctx ended first, and no worker was started
	}
	// All gates open before the first reconcile: what changes after that reconcile read it must enqueue
	// the key again.
	for _, m := range l.mappers {
		m.open(q, retries, logger)
		defer m.close()
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
	for _, m := range l.mappers {
		if m.watch.replayed {
			m.replay(ctx)
		}
	}

	fed := l.feed(ctx, q)
	var failed error
	select {
	case <-ctx.Done():
	case failed = <-fed:
	}
	l.setPhase(Draining)
	logger.Info("Controller is draining", "inFlight", l.Status().InFlight)
	q.ShutDown()
	workers.Wait()
	if fed != nil && failed == nil {
		failed = <-fed
	}
	logger.Info("Controller stopped")
	return failed
}

// feed starts Feed, and returns what its error will come through; nil without one.
func (l *Loop[K]) feed(ctx context.Context, q queue[K]) <-chan error {
	if l.opts.Feed == nil {
		return nil
	}
	fed := make(chan error, 1)
	go func() {
		stack, err := Contain(func() error { return l.opts.Feed(ctx, q.Add) })
		if stack != nil {
			l.opts.Metrics.Panicked(l.opts.Name)
			klog.FromContext(ctx).Error(err, "Feed panicked", "stack", string(stack))
		}
		if err == nil && ctx.Err() == nil {
			err = errors.New("feed returned before its context ended")
		}
		fed <- err
	}()
	return fed
}

// start creates the queues of one run. It returns an error if the loop is already running.
func (l *Loop[K]) start(logger *klog.Logger) (queue[K], *mappingRetries[K], error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.phase != Stopped {
		return nil, nil, fmt.Errorf("%s: is already running", l.opts.Name)
	}
	l.phase = Syncing
	l.queue = workqueue.NewTypedDelayingQueueWithConfig(workqueue.TypedDelayingQueueConfig[K]{
		Logger: logger, Name: l.opts.Name, Clock: l.opts.Clock,
	})
	l.retries = l.newMappingRetries(logger)
	return l.queue, l.retries, nil
}

// next takes one key and reconciles it. It returns false when the queue has shut down.
func (l *Loop[K]) next(ctx, work context.Context, q queue[K], limiter workqueue.TypedRateLimiter[K]) bool {
	key, shutdown := q.Get()
	if shutdown {
		return false
	}
	defer q.Done(key)
	if ctx.Err() != nil {
		return true // a queue that shuts down still hands out what it has
	}

	after, notBefore, err := l.reconcile(work, key)
	switch {
	case err != nil:
		delay := limiter.When(key)
		if after > 0 {
			delay = min(delay, after)
		}
		q.AddAfter(key, max(delay, notBefore))
	case after > 0:
		limiter.Forget(key)
		q.AddAfter(key, after)
	default:
		limiter.Forget(key)
	}
	return true
}

// reconcile calls Reconcile and records its outcome. notBefore is how long the API server asked to
// wait.
func (l *Loop[K]) reconcile(work context.Context, key K) (after, notBefore time.Duration, err error) {
	// Only people read the text of a key, so the loop requires no method for it.
	logger := klog.FromContext(work).WithValues("key", fmt.Sprint(key))
	work = klog.NewContext(work, logger)
	started := l.opts.Clock.Now()
	l.mu.Lock()
	l.inFlight[key] = started
	l.mu.Unlock()

	notLeading := false
	stack, err := Contain(func() (err error) {
		after, err = l.opts.Reconcile(work, key)
		notLeading = IsNotLeading(err)
		if seconds, ok := apierrors.SuggestsClientDelay(err); ok {
			notBefore = time.Duration(seconds) * time.Second
		}
		return err
	})

	result := resultSuccess
	switch {
	case stack != nil:
		result = resultPanic
		logger.Error(err, "Reconcile panicked", "stack", string(stack))
	case notLeading:
		// The fence has closed: this replica is stopping, and its successor does the work. That is
		// not worth a line per key.
		result = resultNotLeading
		logger.V(2).Info("Reconcile refused, no longer leading", "reason", err.Error())
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
	return after, notBefore, err
}

// IsNotLeading reports whether err is the refusal of a write because this replica no longer leads:
// whether an error in err's tree has a method NotLeading() bool that returns true. The loop's
// metric counts it apart from errors, and the log does not show it as one. A controller need not
// report it either.
func IsNotLeading(err error) bool {
	var refused interface{ NotLeading() bool }
	return errors.As(err, &refused) && refused.NotLeading()
}

func (l *Loop[K]) setPhase(p Phase) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.phase = p
}

// Status returns a snapshot, with the keys in flight sorted by name.
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
		LastError:  l.lastErr,
	}
	if l.queue != nil {
		s.QueueDepth = l.queue.Len()
		s.Unmapped = int(l.retries.unmapped.Load())
	}
	for key, since := range l.inFlight {
		s.InFlight = append(s.InFlight, InFlight{Key: fmt.Sprint(key), Since: since})
	}
	sort.Slice(s.InFlight, func(i, j int) bool { return s.InFlight[i].Key < s.InFlight[j].Key })
	return s
}
