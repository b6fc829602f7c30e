// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package controllers

import (
	"context"
	"fmt"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/quartermaster-dev/quartermaster/internal/errtree"
	"github.com/quartermaster-dev/quartermaster/internal/lifetime"
	"github.com/quartermaster-dev/quartermaster/internal/loopmetrics"
	"github.com/quartermaster-dev/quartermaster/internal/panics"
)

// reconcileNext takes one key and reconciles it, unless ctx has ended. It returns false when no more keys
// are to be taken.
func (l *Loop[K]) reconcileNext(ctx, work context.Context) bool {
	item := l.queue.take()
	// A loop of another cluster outlasts the end of Run, but takes no more keys from then on.
	if item == nil || ctx.Err() != nil || lifetime.FromContext(ctx).Run.Err() != nil {
		return false
	}
	name := l.begin(item.key)
	if l.isLacking(item) {
		l.end(item.key, name, item.failures > 0, true)
		l.queue.putBack(item, lackingRetry)
		return true
	}
	o := l.reconcileOnce(reconciling{Draining(work), item.lane}.addTo(work), item.key, name, item.failures)
	parked := o.result == loopmetrics.NotLeading && l.queue.park(item, lifetime.FromContext(work).Leading)
	if parked {
		o.retry = false // it comes back when this replica leads
	}
	l.end(item.key, name, o.failed, parked)
	if !o.retry {
		l.queue.done(item, o.after, 0, 0)
		return true
	}
	delay := l.opts.backoff(item.failures)
	switch {
	case o.result == loopmetrics.Conflict:
		delay = min(delay, conflictRetry<<item.failures)
	case o.conflict:
		delay = l.opts.backoff(item.failures - conflictsBeforeError)
	}
	if o.after > 0 {
		delay = min(delay, o.after)
	}
	l.queue.done(item, delay, o.notBefore, item.failures+1)
	return true
}

// begin shows a key as in flight, and returns its text. K needs no String method: only people read the text.
func (l *Loop[K]) begin(key K) (name string) {
	started := time.Now()
	l.setInFlight(key, InFlight{"a key whose String has not returned", started})
	name = fmt.Sprint(key)
	l.setInFlight(key, InFlight{name, started})
	return name
}

func (l *Loop[K]) setInFlight(key K, reconcile InFlight) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.inFlight[key] = reconcile
}

// end records for the status that a key is no longer in flight, and why it comes back.
func (l *Loop[K]) end(key K, name string, failing, blocked bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.inFlight, key)
	delete(l.failing, key)
	delete(l.blocked, key)
	if failing {
		l.failing[key] = name
	}
	if blocked {
		l.blocked[key] = name
	}
}

// reconciling is what the context of a reconcile says of it.
type reconciling struct {
	draining <-chan struct{} // what Draining returns
	lane     lane            // in which the key was due
}

type reconcilingKey struct{}

func (r reconciling) addTo(ctx context.Context) context.Context {
	return context.WithValue(ctx, reconcilingKey{}, r)
}

// reconcilingFrom returns what ctx says of the reconcile whose context it is, and nothing for any other ctx.
func reconcilingFrom(ctx context.Context) reconciling {
	r, _ := ctx.Value(reconcilingKey{}).(reconciling)
	return r
}

const (
	// lackingRetry is the delay before a key is taken again of which a cache lacks what the API server has.
	lackingRetry = 10 * time.Second
	// conflictRetry is the delay after a first conflict, which mostly means that the cache was some milliseconds
	// behind. It doubles each time.
	conflictRetry = 100 * time.Millisecond
)

// isLacking reports whether a cache for which Run has waited, or that of an added watch once it has synced,
// lacks the namespace of a key, or whether the cache of a WatchSelf leaves out the object. To a reconcile,
// these would seem to be gone, or the object would have an old state, with which each write meets a conflict.
func (l *Loop[K]) isLacking(item *queueItem[K]) bool {
	leavesOut := func(m *mapper[K]) bool { return m.watch.leftOut != nil && m.watch.leftOut(item.key) }
	unlisted := func(c Awaited) bool { return c.Unlisted(item.tenant) }
	return slices.ContainsFunc(l.awaited, unlisted) || slices.ContainsFunc(l.mappers, leavesOut) ||
		slices.ContainsFunc(l.addedWatches(), func(m *mapper[K]) bool {
			select {
			case <-m.watch.cache.Synced():
				return unlisted(m.watch.cache) || leavesOut(m)
			default:
				return false
			}
		})
}

// outcome is what came of a reconcile.
type outcome struct {
	result string
	// after is what reconcile returned, notBefore how long the API server asked to wait.
	after, notBefore time.Duration
	retry            bool // whether the key is retried, with back-off
	conflict         bool // whether there were nothing but conflicts
	failed           bool // whether somebody should know: not a conflict, a refusal by the fence or by --dry-run
}

// reconcileOnce calls reconcile for key, whose text is name, and records the outcome. failures is how often
// in a row reconcile has failed for key.
func (l *Loop[K]) reconcileOnce(work context.Context, key K, name string, failures int) (o outcome) {
	started := time.Now()
	logger := klog.FromContext(work).WithValues("key", name)
	ctx := klog.NewContext(work, logger)
	if timeout := l.opts.Timeout; timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, timeout,
			fmt.Errorf("the reconcile took longer than LoopOptions.Timeout, %s", timeout))
		defer cancel()
	}
	refused := false // by --dry-run
	stack, err := panics.Recover(func() (err error) {
		o.after, err = l.reconcile(ctx, key)
		o.result, o.conflict, refused = resultOf(o.after, err, failures), errtree.Every(err, isConflict), errtree.Every(err, isDryRun)
		o.notBefore = min(retryAfter(err), maxBackoff)
		return err
	})
	o.retry = err != nil && (stack != nil || o.result != loopmetrics.Terminal)
	if cause := context.Cause(ctx); err != nil && cause != nil && work.Err() == nil {
		err = fmt.Errorf("%w: %w", cause, err) // otherwise it would look like a time-out of a client
	}
	switch {
	case stack != nil:
		o.result = loopmetrics.Panic
		logger.Error(err, "Reconcile panicked", "stack", string(stack))
	case o.result == loopmetrics.NotLeading:
		// The replica that leads, or its successor, does the work. That is not worth a line per key.
		logger.V(2).Info("Reconcile refused, not leading", "err", err)
	case o.result == loopmetrics.Conflict:
		logger.V(2).Info("Reconcile met a conflict, trying again", "err", err)
	case o.result == loopmetrics.Terminal:
		logger.Error(err, "Reconcile failed for good, not retrying before the next event")
	case err != nil && work.Err() != nil:
		o.result = loopmetrics.CutOff
		logger.Info("Reconcile was cut off", "err", err, "cause", context.Cause(work))
	case err != nil:
		logger.Error(err, "Reconcile failed")
	}
	l.opts.Metrics.Observe(l.opts.labels(), o.result, time.Since(started))
	o.failed = err != nil && o.result != loopmetrics.Conflict && o.result != loopmetrics.NotLeading && !refused
	l.record(name, o.result, err)
	return o
}

// resultOf returns the metric's word for what reconcile returned. failures is as in reconcileOnce.
func resultOf(after time.Duration, err error, failures int) string {
	switch {
	case err == nil && after > 0:
		return loopmetrics.Requeue
	case err == nil:
		return loopmetrics.Success
	case errtree.Every(err, refusesWrite):
		return loopmetrics.NotLeading
	case errtree.Every(err, isTerminal):
		return loopmetrics.Terminal
	case errtree.Every(err, isConflict) && failures < conflictsBeforeError:
		return loopmetrics.Conflict
	}
	return loopmetrics.Error
}
