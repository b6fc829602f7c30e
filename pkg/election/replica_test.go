// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package election

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"
	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/component-base/metrics"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/pkg/election/display"
	"github.com/quartermaster-dev/quartermaster/pkg/election/protocol"
)

// bubbleClock is the clock of the synctest bubble in which it was made.
type bubbleClock struct{ origin time.Time }

func newBubbleClock() bubbleClock { return bubbleClock{time.Now()} }

func (c bubbleClock) Now() time.Duration { return time.Since(c.origin) }

// storeClient is a client of a simStore. It fails only as a test asks. A request
// takes a millisecond.
type storeClient struct {
	store *simStore
	who   string
	link  *simLink

	mu       sync.Mutex
	requests map[string]int
	fail     map[string]error // by verb
	hang     map[string]bool  // by verb: no response, though it is executed
}

func newStoreClient(store *simStore, who string) *storeClient {
	return &storeClient{store: store, who: who, link: newSimLink(),
		requests: map[string]int{}, fail: map[string]error{}, hang: map[string]bool{}}
}

func (c *storeClient) set(change func(*storeClient)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	change(c)
}

func (c *storeClient) count(verb string) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.requests[verb]
}

func (c *storeClient) do(ctx context.Context, verb string, op func() error) error {
	c.mu.Lock()
	c.requests[verb]++
	err, hang := c.fail[verb], c.hang[verb]
	c.mu.Unlock()
	if err == nil && pauseFor(ctx, 500*time.Microsecond) {
		err = op()
	}
	if hang {
		<-ctx.Done()
	}
	if pauseFor(ctx, 500*time.Microsecond) {
		return err
	}
	return ctx.Err()
}

func (c *storeClient) lease(ctx context.Context, verb string, op func() (*coordinationv1.Lease, error)) (lease *coordinationv1.Lease, err error) {
	err = c.do(ctx, verb, func() (err error) {
		lease, err = op()
		return err
	})
	if err != nil {
		return nil, err
	}
	return lease, nil
}

func (c *storeClient) Get(ctx context.Context, _ string, _ metav1.GetOptions) (*coordinationv1.Lease, error) {
	return c.lease(ctx, "get", c.store.get)
}

func (c *storeClient) Create(ctx context.Context, lease *coordinationv1.Lease, _ metav1.CreateOptions) (*coordinationv1.Lease, error) {
	return c.lease(ctx, "create", func() (*coordinationv1.Lease, error) { return c.store.create(c.who, lease) })
}

func (c *storeClient) Update(ctx context.Context, lease *coordinationv1.Lease, _ metav1.UpdateOptions) (*coordinationv1.Lease, error) {
	return c.lease(ctx, "update", func() (*coordinationv1.Lease, error) { return c.store.update(c.who, lease) })
}

func (c *storeClient) Watch(ctx context.Context, opts metav1.ListOptions) (watch.Interface, error) {
	var w *simWatch
	err := c.do(ctx, "watch", func() error {
		w = c.store.watch(ctx, c.link, protocol.NewJitter(c.who), opts.ResourceVersion, time.Duration(*opts.TimeoutSeconds)*time.Second)
		return nil
	})
	if err != nil {
		return nil, err
	}
	return w, nil
}

// testReplica is a running replica.
type testReplica struct {
	t      *testing.T
	lock   *Lock
	client *storeClient
	stop   context.CancelCauseFunc
	led    chan context.Context // receives the context of lead when it starts
	leave  chan error           // what lead returns once it is sent
	done   chan error           // receives what Run has returned
	events *testEvents
}

// end stops a replica and expects it to release the Lease.
func (r *testReplica) end() {
	r.t.Helper()
	r.stop(nil)
	if err := <-r.done; err != nil {
		r.t.Error(err)
	}
}

type testEvents struct {
	mu   sync.Mutex
	seen []string
}

func (e *testEvents) Eventf(_ runtime.Object, eventType, reason, format string, _ ...any) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.seen = append(e.seen, eventType+" "+reason+" "+format)
}

var testMetrics = sync.OnceValue(func() *display.Metrics {
	m, err := display.NewMetrics(metrics.NewKubeRegistry())
	if err != nil {
		panic(err)
	}
	return m
})

// startReplica runs a replica. Its lead returns when its context has ended, or returns what is sent
// to leave.
func startReplica(t *testing.T, store *simStore, name string, cfg Config) *testReplica {
	t.Helper()
	return startReplicaWith(t, store, name, cfg, nil)
}

func startReplicaWith(t *testing.T, store *simStore, name string, cfg Config,
	lead func(ctx context.Context) error) *testReplica {
	t.Helper()
	r := &testReplica{t: t, client: newStoreClient(store, name), led: make(chan context.Context, 1),
		leave: make(chan error), done: make(chan error, 1), events: &testEvents{}}
	lock, err := NewLock(cfg, Candidate{Identity: name, Client: r.client, Events: r.events,
		Clock: newBubbleClock(), Metrics: testMetrics()})
	assert.NoError(t, err)
	r.lock = lock
	if lead == nil {
		lead = func(ctx context.Context) error {
			select {
			case <-ctx.Done():
				return nil
			case err := <-r.leave:
				return err
			}
		}
	}
	ctx, stop := context.WithCancelCause(klog.NewContext(t.Context(), logr.Discard()))
	r.stop = stop
	go func() {
		r.done <- lock.Run(ctx, func(ctx context.Context) error {
			r.led <- ctx
			return lead(ctx)
		})
		stop(nil)
	}()
	return r
}

// freeStore returns a store with a Lease that nobody holds.
func freeStore() *simStore {
	store := newSimStore()
	_, _ = store.create("installer", &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "lease"}})
	return store
}

// shown returns what /debug/leader shows of a lock.
func shown(l *Lock) display.Status { return l.display.Status(l.candidate.Clock.Now()) }

var leaseName = types.NamespacedName{Namespace: "ns", Name: "lease"}

func testConfig() Config { return NewConfig(leaseName) }

func shortConfig() Config {
	cfg := testConfig()
	cfg.LeaseDuration.Duration, cfg.RenewDeadline.Duration, cfg.RetryPeriod.Duration = 3*time.Second, 2*time.Second, 500*time.Millisecond
	cfg.DrainTimeout = 5 * time.Second
	return cfg
}

func transitionsOf(lease *coordinationv1.Lease) int32 {
	return ptr.Deref(lease.Spec.LeaseTransitions, 0)
}
