// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package election

import (
	"context"
	"hash/fnv"
	"math/rand/v2"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/klog/v2"
)

const (
	// A watch is restarted after a random time from this to twice this, so that a dead connection
	// is not taken for a quiet one forever.
	watchLifetime = 5 * time.Minute

	// A standby with a watch still reads the Lease every 70 to 80 s. That is less than once a
	// minute, and often enough that the connection on which it will take the Lease is not closed as
	// idle, which client and API server do after 90 s.
	rereadPeriod = 70 * time.Second
	rereadJitter = 10 * time.Second

	// watchGrace is how long the elector waits for the watch after a conflict.
	watchGrace = 100 * time.Millisecond

	// maxBackoff limits the time between attempts at a watch that fails, for example because the
	// permission is missing.
	maxBackoff = time.Minute
)

// newJitter returns the source of an elector's random delays. It depends on the identity, so
// replicas have different ones.
func newJitter(identity string) *rand.Rand {
	hash := fnv.New64a()
	_, _ = hash.Write([]byte(identity)) // never fails
	return rand.New(rand.NewPCG(hash.Sum64(), 0))
}

// around returns a random duration between half of d and one and a half d.
func (e *elector) around(d time.Duration) time.Duration {
	return d/2 + time.Duration(e.jitter.Int64N(int64(d)))
}

// start starts an action that is a request.
func (e *elector) start(ctx context.Context, kind actionKind) {
	now := time.Now().Truncate(time.Microsecond) // the precision of the Lease
	switch kind {
	case actRead:
		e.reading = true
		e.read(ctx)
	case actWatch:
		e.watched = true
		e.watchesAnew = e.watchFrom == ""
		e.watch(ctx, watchLifetime+time.Duration(e.jitter.Int64N(int64(watchLifetime))))
	case actCreate:
		e.startWrite(ctx, kind, nil, newLease(e.name, e.identity, e.lease, now))
	case actAcquire:
		e.startWrite(ctx, kind, e.view.lease, acquiredLease(e.view.lease, e.identity, e.lease, now))
	case actResume:
		e.startWrite(ctx, kind, e.view.lease, renewedLease(e.view.lease, e.lease, now))
	case actRenew:
		e.startWrite(ctx, kind, e.tenure.lease, renewedLease(e.tenure.lease, e.lease, now))
	case actRelease:
		e.startWrite(ctx, kind, e.tenure.lease, releasedLease(e.tenure.lease, now))
	}
}

func (e *elector) startWrite(ctx context.Context, kind actionKind, base, lease *coordinationv1.Lease) {
	e.writing = true
	timeout := e.timeout
	if e.tenure != nil { // a response after the deadline is useless
		timeout = min(timeout, e.tenure.sent+e.deadline-e.clock.Now())
	}
	e.write(ctx, kind, base, lease, timeout)
}

// handle processes the outcome of a request and reports whether a term has begun.
func (e *elector) handle(logger klog.Logger, msg message) bool {
	switch msg := msg.(type) {
	case readDone:
		if msg.id == e.readID {
			e.handleRead(logger, msg)
		}
	case writeDone:
		return e.handleWrite(logger, msg)
	case watchStarted:
		if msg.id == e.watchID {
			e.watchUp = true
			e.watchUpAt = e.clock.Now()
			// From now on the watch shows all changes. But a watch that begins with the present
			// does not show that the Lease is gone, nor does it explain a conflict.
			if !e.watchesAnew && !e.doubtful {
				e.readAt = max(e.readAt, e.nextRead())
			}
		}
	case watchEvent:
		if msg.id == e.watchID {
			e.handleEvent(msg.event)
		}
	case watchEnded:
		if msg.id == e.watchID {
			e.handleWatchEnd(logger, msg.err)
		}
	}
	return false
}

// nextRead returns when a standby reads the Lease next, if nothing happens before.
func (e *elector) nextRead() time.Duration {
	if e.watchUp {
		return e.clock.Now() + rereadPeriod + time.Duration(e.jitter.Int64N(int64(rereadJitter)))
	}
	return e.clock.Now() + e.around(e.retry)
}

func (e *elector) handleRead(logger klog.Logger, msg readDone) {
	if msg.err != nil {
		logger.Error(msg.err, "Failed to read the lease", "lease", e.name)
		e.readFailed(e.clock.Now() + e.around(e.retry))
		return
	}
	if e.watchUp && e.isNews(msg.lease) {
		e.restartWatch() // it should have shown this: it may be dead
	}
	e.watchFrom = ""
	if msg.lease != nil {
		e.watchFrom = msg.lease.ResourceVersion
	}
	e.hasRead(msg.lease, e.clock.Now(), e.nextRead())
}

// isNews reports whether a read has returned something that was not known.
func (e *elector) isNews(lease *coordinationv1.Lease) bool {
	known := e.newest()
	return known != nil && (lease == nil || isNewer(lease, known))
}

func (e *elector) handleEvent(event watch.Event) {
	lease, isLease := event.Object.(*coordinationv1.Lease)
	if !isLease {
		return
	}
	gapless := !e.watchesAnew
	e.watchFrom, e.watchesAnew = lease.ResourceVersion, false
	switch event.Type {
	case watch.Added, watch.Modified:
		e.observe(lease, e.clock.Now(), gapless)
	case watch.Deleted:
		// A deletion has a version too, and may be a late event.
		if known := e.newest(); known == nil || isNewer(lease, known) {
			e.observe(nil, e.clock.Now(), gapless)
		}
	}
}

// restartWatch ends the watch. The next decision starts another.
func (e *elector) restartWatch() {
	if e.watched {
		e.stopWatch()
		e.watchID++
		e.watched, e.watchUp = false, false
		e.watchAt = e.clock.Now()
	}
}

func (e *elector) handleWatchEnd(logger klog.Logger, err error) {
	now := e.clock.Now()
	if err == nil && e.watchUp && now-e.watchUpAt > e.retry {
		e.watchFailures = 0
		e.watchAt = now
	} else {
		// Start from the present: the watch may have ended because its version is no longer
		// available.
		e.watchFrom = ""
		e.watchFailures++
		e.watchAt = now + min(maxBackoff, e.around(e.retry)<<min(e.watchFailures-1, 10))
		if e.watchFailures == 1 {
			logger.Info("The watch of the lease failed, polling the lease until the watch is back", "lease", e.name, "err", err)
		}
	}
	e.watched, e.watchUp = false, false
	e.readAt = min(e.readAt, now+e.around(e.retry))
}

func (e *elector) handleWrite(logger klog.Logger, msg writeDone) bool {
	now := e.clock.Now()
	conflict := apierrors.IsConflict(msg.err) || apierrors.IsAlreadyExists(msg.err) || apierrors.IsNotFound(msg.err)
	e.lock.metrics.wrote(msg, conflict)
	retry := now + e.around(e.retry/2)
	switch {
	case msg.err == nil:
		e.lock.renewed(msg.took)
	case conflict:
		logger.V(2).Info("The lease has changed", "lease", e.name, "write", msg.kind, "err", msg.err)
		retry = now
		if e.watchUp { // the watch shows every change without a request
			retry += min(watchGrace, e.retry/4)
		}
	default:
		logger.Error(msg.err, "Failed to write the lease", "lease", e.name, "write", msg.kind)
		e.restartWatch() // it may hang as well
	}
	switch msg.kind {
	case actCreate, actAcquire, actResume:
		if msg.err != nil {
			e.acquisitionFailed(msg.base, msg.wrote, conflict, retry)
			return false
		}
		if msg.kind == actCreate {
			logger.Info("Created the lease, waiting for its duration: somebody may lead on one that was deleted",
				"lease", e.name, "duration", e.lease)
			e.hasCreated(msg.lease, now)
			return false
		}
		e.readID++ // a read in flight is from before the create
		return e.hasAcquired(msg.lease, msg.sent, now)
	case actRenew:
		if msg.err != nil {
			e.writeFailed(msg.base, conflict, retry)
			return false
		}
		e.hasRenewed(msg.lease, msg.sent, now)
		if e.tenure.lost == "" && !e.lock.fence.extend(msg.sent+e.deadline) {
			e.tenure.lost = ReasonRenewDeadline // the deadline has passed since now was read
		}
	case actRelease:
		if msg.err != nil {
			e.writeFailed(msg.base, conflict, retry)
			return false
		}
		e.hasReleased()
	}
	return false
}
