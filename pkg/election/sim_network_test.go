// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package election

import (
	"context"
	"math/rand/v2"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/utils/ptr"
)

// simLink is the network between one replica and the API server.
type simLink struct {
	mu          sync.Mutex
	lost        linkLoss
	changed     chan struct{} // closed and replaced when lost changes
	slow        time.Duration // added to the latency
	slowAnswers time.Duration // added to the latency of responses
	dead        bool          // the process is gone: nothing passes any more
}

// linkLoss says what a partition blocks.
type linkLoss int

const (
	loseNothing linkLoss = iota
	loseAll
	loseResponses
)

func newSimLink() *simLink { return &simLink{changed: make(chan struct{})} }

func (l *simLink) set(change func(*simLink)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	change(l)
	close(l.changed)
	l.changed = make(chan struct{})
}

func (l *simLink) state() (linkLoss, bool, <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.lost, l.dead, l.changed
}

// latency returns mostly a few milliseconds and sometimes a few hundred.
func (l *simLink) latency(rng *rand.Rand) time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	d := 200*time.Microsecond + time.Duration(rng.Int64N(int64(4*time.Millisecond)))
	if rng.IntN(50) == 0 {
		d += time.Duration(rng.Int64N(int64(300 * time.Millisecond)))
	}
	if l.slow > 0 {
		d += time.Duration(rng.Int64N(int64(l.slow)))
	}
	return d
}

func (l *simLink) answerLatency(rng *rand.Rand) time.Duration {
	d := l.latency(rng)
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.slowAnswers > 0 {
		d += time.Duration(rng.Int64N(int64(l.slowAnswers)))
	}
	return d
}

// awaitUp waits until responses pass and reports whether they do before ctx ends.
func (l *simLink) awaitUp(ctx context.Context) bool {
	for {
		lost, dead, changed := l.state()
		if dead {
			return false
		}
		if lost == loseNothing {
			return true
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return false
		}
	}
}

// request carries op to the API server and its response back. As on a real network, the end of ctx
// ends the wait, not the request, and a request that a partition delays may be executed after the
// partition.
func request[T any](ctx context.Context, s *simStore, link *simLink, rng *rand.Rand, fail func() error, op func() (T, error)) (T, error) {
	type answer struct {
		value T
		err   error
	}
	out, back := link.latency(rng), link.answerLatency(rng)
	late, failFirst := rng.IntN(3) == 0, rng.IntN(2) == 0
	answered := make(chan answer, 1)
	s.background.Go(func() {
		pass(out)
		lost, dead, _ := link.state()
		if lost == loseAll {
			dead = !late || !link.awaitUp(context.Background())
		}
		if dead {
			return
		}
		var a answer
		// An error of the API server does not show whether the write was executed.
		err := fail()
		if err == nil || !failFirst {
			a.value, a.err = op()
		}
		if err != nil {
			a.err = err
		}
		pass(back)
		if lost, dead, _ := link.state(); dead || lost != loseNothing {
			return
		}
		answered <- a
	})
	select {
	case a := <-answered:
		return a.value, a.err
	case <-ctx.Done():
		var none T
		return none, ctx.Err()
	}
}

// simClient is the client of one process.
type simClient struct {
	store *simStore
	proc  *simProc
}

func (c *simClient) do(ctx context.Context, verb string, op func() (*coordinationv1.Lease, error)) (*coordinationv1.Lease, error) {
	c.proc.gate()
	lease, err := request(ctx, c.store, c.proc.link, c.proc.nextRNG(verb), c.proc.sim.storm, op)
	c.proc.gate()
	if err != nil {
		return nil, err
	}
	return lease, nil
}

func (c *simClient) Get(ctx context.Context, _ string, _ metav1.GetOptions) (*coordinationv1.Lease, error) {
	return c.do(ctx, "get", c.store.get)
}

func (c *simClient) Create(ctx context.Context, lease *coordinationv1.Lease, _ metav1.CreateOptions) (*coordinationv1.Lease, error) {
	return c.do(ctx, "create", func() (*coordinationv1.Lease, error) { return c.store.create(c.proc.identity, lease) })
}

func (c *simClient) Update(ctx context.Context, lease *coordinationv1.Lease, _ metav1.UpdateOptions) (*coordinationv1.Lease, error) {
	return c.do(ctx, "update", func() (*coordinationv1.Lease, error) { return c.store.update(c.proc.identity, lease) })
}

func (c *simClient) Watch(ctx context.Context, opts metav1.ListOptions) (watch.Interface, error) {
	c.proc.gate()
	rng := c.proc.nextRNG("watch")
	lifetime := time.Duration(ptr.Deref(opts.TimeoutSeconds, 300)) * time.Second
	return request(ctx, c.store, c.proc.link, rng, c.proc.sim.storm, func() (watch.Interface, error) {
		if rng.IntN(20) == 0 {
			return nil, apierrors.NewResourceExpired("too old resource version")
		}
		return c.store.watch(ctx, c.proc.link, rng, opts.ResourceVersion, lifetime), nil
	})
}
