// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package controllers

import (
	"context"
	"errors"
	"fmt"
	"runtime/pprof"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/quartermaster-dev/quartermaster/internal/lifetime"
	"github.com/quartermaster-dev/quartermaster/internal/panics"
)

// conflictsBeforeError is how often in a row a key may have failed before a conflict is an error.
const conflictsBeforeError = 3

// Loop takes keys from a queue and reconciles them. Build it with [NewLoop].
type Loop[K comparable] struct {
	opts      LoopOptions
	reconcile func(context.Context, K) (time.Duration, error)
	queue     *queue[K] // open while the loop runs
	mappers   []*mapper[K]
	awaited   []Awaited    // the caches for which Run waits
	toReplay  atomic.Int64 // number of objects that listCached has returned and replay has not mapped

	mu         sync.Mutex
	phase      Phase
	phaseSince time.Time
	inFlight   map[K]InFlight
	failing    map[K]string // the text of each key whose last reconcile has failed
	blocked    map[K]string // that of each key that waits for a cache, or for this replica to lead
	counts     struct{ reconciles, errors, panics uint64 }
	lastErr    *LastError
	added      []*mapper[K]     // the mappers of watches that Watch added
	admit      func(*mapper[K]) // maps what is in the cache of an added watch; nil unless workers run
	closed     bool
}

// NewLoop registers the watches and returns a loop that drops their events until Run. Their informers need
// not have started. NewLoop returns an error if opts or a watch is wrong.
//
// reconcile brings the object of one key to its desired state. It is called for the key at each event, and in
// addition:
//
//   - after the duration that it returns, if that is > 0;
//   - after an error: when the back-off has passed, which grows with each error, or the duration if that is
//     shorter, but not earlier than the API server asked for, up to 5 min. A conflict alone is no failure
//     unless it comes again and again;
//   - after a [TerminalError]: as if there had been no error;
//   - after a refusal by the fence, on a replica that does not lead yet: when the replica begins to lead, or
//     after the duration.
//
// If a key is due at several times, the earliest counts: a later result does not postpone it, except to the
// time for which the API server asks.
//
// A key is blocked, and looked at again every 10 s, while a cache for which Run has waited lacks its
// namespace, or the cache of a [WatchSelf] leaves out its object, which does not fit its Go type.
func NewLoop[K comparable](
	opts LoopOptions, reconcile func(ctx context.Context, key K) (after time.Duration, err error), watches ...Watch[K],
) (*Loop[K], error) {
	opts, err := opts.withDefaults()
	if err != nil {
		return nil, err
	}
	if reconcile == nil {
		return nil, fmt.Errorf("loop %s: reconcile is nil", opts)
	}
	l := &Loop[K]{opts: opts, reconcile: reconcile, phase: PhaseStopped, inFlight: map[K]InFlight{},
		failing: map[K]string{}, blocked: map[K]string{}}
	l.queue = newQueue[K]()
	l.awaited = slices.Clone(opts.WaitFor)
	for _, w := range watches {
		if w.mistake != nil {
			return nil, fmt.Errorf("loop %s: watch: %w", opts, w.mistake)
		}
		l.awaited = append(l.awaited, w.cache)
	}
	if !opts.Metrics.AddLoop(opts.labels(), l.now) {
		return nil, fmt.Errorf("loop %s: there is a loop of this name; "+
			"each has a LoopOptions.Loop of its own, and one that has ended must be closed", opts)
	}
	l.queue.metrics = opts.Metrics.Queue(opts.labels()) // since AddLoop, no other loop can remove these series
	if opts.Cluster != "" {
		l.queue.open() // such a loop never stands by, so what Enqueue adds before Run is wanted
	}
	for _, w := range watches {
		l.mappers = append(l.mappers, newMapper(l, w)) // without mu: an index function that hangs must not hang the status
	}
	return l, nil
}

// Watch adds a watch to a loop that exists already, for instance of a resource that was found at run time.
// The loop does not wait for its informer. Once that has synced, the loop maps the objects in the cache, and
// then each change. remove ends the watch, and does not wait: a mapping that has begun goes on. What Run of a
// controller has added it must remove before it returns, since the host stops the informer then.
// Watch returns an error for a watch that NewLoop would refuse, and after Close.
func (l *Loop[K]) Watch(watch Watch[K]) (remove func(), err error) {
	if watch.mistake != nil {
		return nil, fmt.Errorf("loop %s: watch: %w", l.opts, watch.mistake)
	}
	m := newMapper(l, watch)
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		m.remove()
		return nil, fmt.Errorf("loop %s is closed", l.opts)
	}
	l.added = append(l.added, m)
	if l.admit != nil {
		l.admit(m)
	}
	return func() {
		m.remove()
		go func() {
			m.close() // until then Run waits for the mapping
			l.mu.Lock()
			defer l.mu.Unlock()
			l.added = slices.DeleteFunc(l.added, func(other *mapper[K]) bool { return other == m })
		}()
	}, nil
}

// Close removes the metrics and the watches of the loop. Call it after Run has returned, for a loop that ends
// before the process. It does not stop what informers.Follow follows. A second call does nothing.
func (l *Loop[K]) Close() {
	l.mu.Lock()
	closed := l.closed
	l.closed = true
	l.mu.Unlock()
	if closed { // the next loop of the name has metrics of the same labels
		return
	}
	l.queue.close()
	l.opts.Metrics.RemoveLoop(l.opts.labels())
	for _, m := range slices.Concat(l.mappers, l.addedWatches()) {
		m.remove()
	}
}

// Enqueue adds keys to the first lane of the queue. It is for triggers without an informer, such as a timer,
// and for the handlers of informers that are followed after NewLoop. While the loop is not running, Enqueue
// drops the keys, as the loop drops events, except before the first Run of a loop for another cluster. What
// must not be missed is enqueued again when Run begins, by a watch or by the caller. Enqueue may be called at
// any time and does not block.
func (l *Loop[K]) Enqueue(keys ...K) { l.enqueue(laneChanges, keys) }

func (l *Loop[K]) enqueue(ln lane, keys []K) {
	for _, key := range keys {
		tenant := l.tenantOf(key)
		if ln == laneReplay {
			l.queue.addReplayed(key, tenant)
		} else {
			l.queue.add(key, tenant, ln, tenant)
		}
	}
}

// EnqueueFor adds keys from within a reconcile, on behalf of a tenant: the namespace whose object made
// them due, in whose turn they are taken, also when they come back after an error or a duration. ctx is the
// context of the reconcile: if the key of the reconcile was in the queue only because an object was shown
// again, the new keys wait behind changes too.
func (l *Loop[K]) EnqueueFor(ctx context.Context, tenant string, keys ...K) {
	for _, key := range keys {
		l.queue.add(key, l.tenantOf(key), reconcilingFrom(ctx).lane, tenant)
	}
}

// tenantOf returns whose key it is. The tenant of a key whose Tenant panics has no name: the panic would end
// the process, and each new leader has the key again.
func (l *Loop[K]) tenantOf(key K) (tenant string) {
	switch k := any(key).(type) {
	case interface{ Tenant() string }:
		if stack, err := panics.Recover(func() error { tenant = k.Tenant(); return nil }); stack != nil {
			l.opts.Metrics.Panicked(l.opts.Name)
			klog.Background().Error(err, "Tenant of a key panicked", "loop", l.opts, "stack", string(stack))
		}
	case objectKey:
		tenant = k.AsNamespacedName().Namespace
	}
	return tenant
}

// objectKey is a key that is a cache.ObjectName, or embeds one.
type objectKey interface{ AsNamespacedName() types.NamespacedName }

// Run waits until the informers of the watches and those of LoopOptions.WaitFor have synced. Then it
// reconciles until ctx ends: the keys of events, and the keys of the objects in the informers, see
// [WatchMapped], beginning with the objects that changed last. The package comment says which keys come
// first.
//
// After that it takes no more keys and lets the reconciles in flight finish. Their context does not
// end with ctx, only when the term of this replica has ended or after LoopOptions.DrainTimeout. Run returns
// when all workers and mappings have returned, however long that takes: the host, which holds the Lease,
// decides how long to wait. It returns an error if the loop is already running.
func (l *Loop[K]) Run(ctx context.Context) (err error) {
	var labels []string
	var values []any
	for _, label := range [][2]string{{"controller", l.opts.Name}, {"loop", l.opts.Loop}, {"cluster", l.opts.Cluster}} {
		if label[1] != "" {
			labels, values = append(labels, label[:]...), append(values, label[0], label[1])
		}
	}
	// ctx may be that of another loop's reconcile, whose key, lane and end are not this loop's.
	term := lifetime.FromContext(ctx)
	ctx = reconciling{}.addTo(term.AddTo(ctx))
	logger := klog.FromContext(term.Work).WithValues(values...)
	// The goroutines of the workers inherit the labels.
	pprof.Do(klog.NewContext(ctx, logger), pprof.Labels(labels...), func(ctx context.Context) {
		err = l.run(ctx)
	})
	return err
}

func (l *Loop[K]) run(parent context.Context) error {
	ctx, stop := context.WithCancel(parent) // ends when no more keys are to be taken
	defer stop()
	logger := klog.FromContext(ctx)
	if err := l.start(); err != nil {
		return err
	}
	defer l.finish()

	for _, c := range l.awaited {
		select {
		case <-c.Synced():
		case <-ctx.Done():
			return nil // no worker was started
		}
	}
	// All gates open before the first reconcile: what changes after that reconcile read it must enqueue
	// the key again.
	for _, m := range l.mappers {
		m.open()
		defer m.close()
	}

	work, cutOff := workContext(ctx)
	defer cutOff(nil)
	var workers sync.WaitGroup
	l.startWorkers(ctx, work, &workers)
	defer l.closeAdded()
	logger.Info("Loop started", "workers", l.opts.Workers)

	background := l.background(ctx)
	var backgroundErr error
	select {
	case <-ctx.Done():
	case backgroundErr = <-background: // never without Background
		background = nil // it has been read
		stop()
	}
	drained := l.drain(ctx, cutOff)
	workers.Wait()
	drained()
	if background != nil {
		backgroundErr = <-background
	}
	if backgroundErr != nil && parent.Err() != nil {
		logger.Error(backgroundErr, "Background function failed while the loop was stopping")
		backgroundErr = nil // none of its work goes on
	}
	logger.Info("Loop stopped")
	return backgroundErr
}

// startWorkers starts the workers and the goroutines that fill the queue, until ctx has ended and
// the queue is closed.
func (l *Loop[K]) startWorkers(ctx, work context.Context, workers *sync.WaitGroup) {
	l.admitAdded(func(m *mapper[K]) {
		m.open() // before the first reconcile, like the mappers of NewLoop
		workers.Go(func() {
			select {
			case <-m.watch.cache.Synced():
				l.replay(ctx, l.listCached(m))
			case <-m.removed:
			case <-ctx.Done():
			}
		})
	})
	for range l.opts.Workers {
		workers.Go(func() {
			for l.reconcileNext(ctx, work) {
			}
		})
	}
	workers.Go(func() {
		select {
		case <-lifetime.FromContext(ctx).Leading:
			l.queue.unpark()
		case <-ctx.Done():
		}
	})
	workers.Go(func() {
		all := l.listCached(slices.DeleteFunc(slices.Clone(l.mappers), func(m *mapper[K]) bool { return !m.watch.primary })...)
		l.setPhase(PhaseRunning) // from here on, the status has all that is to be done
		l.replay(ctx, all)
	})
}

func (l *Loop[K]) addedWatches() []*mapper[K] {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.added)
}

// admitAdded calls admit for each added watch, now and in Watch. With nil, Watch admits no more. admit takes
// the lock of the mapper. No mapping can hang under that lock yet: the gate is closed until admit opens it.
func (l *Loop[K]) admitAdded(admit func(*mapper[K])) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.admit = admit; admit != nil {
		for _, m := range l.added {
			admit(m)
		}
	}
}

func (l *Loop[K]) closeAdded() {
	for _, m := range l.addedWatches() {
		m.close()
	}
}

// background starts LoopOptions.Background and returns the channel of its error; nil without Background.
func (l *Loop[K]) background(ctx context.Context) <-chan error {
	if l.opts.Background == nil {
		return nil
	}
	ended := make(chan error, 1)
	go func() {
		stack, err := panics.Recover(func() error { return l.opts.Background(ctx) })
		if stack != nil {
			l.opts.Metrics.Panicked(l.opts.Name)
			klog.FromContext(ctx).Error(err, "Background function panicked", "stack", string(stack))
		}
		switch {
		case ctx.Err() != nil:
			err = nil // Background ended because it was told to, so its error does not count
		case err == nil:
			err = errors.New("LoopOptions.Background returned before its context ended")
		}
		ended <- err
	}()
	return ended
}

// start begins a run. It returns an error if the loop is already running.
func (l *Loop[K]) start() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.phase != PhaseStopped {
		return fmt.Errorf("loop %s is already running", l.opts)
	}
	if l.closed {
		return fmt.Errorf("loop %s is closed", l.opts)
	}
	l.phase, l.phaseSince = PhaseSyncing, time.Now()
	l.queue.open()
	return nil
}

// finish ends a run, and drops all keys.
func (l *Loop[K]) finish() {
	l.queue.close()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.phase, l.phaseSince = PhaseStopped, time.Now()
	clear(l.failing)
	clear(l.blocked)
}

// openQueue lets Enqueue add keys before Run begins. dropQueue ends that, unless Run has begun.
func (l *Loop[K]) openQueue() { l.queue.open() }

func (l *Loop[K]) dropQueue() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.phase == PhaseStopped {
		l.queue.close()
	}
}

func (l *Loop[K]) setPhase(p Phase) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if p != PhaseRunning || l.phase == PhaseSyncing { // the loop may be draining already
		l.phase, l.phaseSince = p, time.Now()
	}
}
