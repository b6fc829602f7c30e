// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package election

import (
	"context"
	"errors"
	"net/http"
	"sync/atomic"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/apimachinery/pkg/watch"
)

// LeaseClient is the part of the API that the elector needs, and the permissions to grant by RBAC:
// get, update and watch of the one Lease, and create unless the Lease is installed along with the
// process. Without watch it polls. A client of coordination/v1 Leases in one namespace implements
// it.
type LeaseClient interface {
	Get(ctx context.Context, name string, opts metav1.GetOptions) (*coordinationv1.Lease, error)
	Create(ctx context.Context, lease *coordinationv1.Lease, opts metav1.CreateOptions) (*coordinationv1.Lease, error)
	Update(ctx context.Context, lease *coordinationv1.Lease, opts metav1.UpdateOptions) (*coordinationv1.Lease, error)
	Watch(ctx context.Context, opts metav1.ListOptions) (watch.Interface, error)
}

// EventRecorder is the part of a record.EventRecorder that the elector needs.
type EventRecorder interface {
	Eventf(object runtime.Object, eventType, reason, messageFmt string, args ...any)
}

// Candidate is a replica that competes for a Lease.
type Candidate struct {
	// Identity is written into the Lease. No two processes may share one; see NewIdentity.
	Identity string
	// Client is for the Lease's namespace and used by the elector alone; see ClientConfig.
	Client LeaseClient
	// Clock defaults to NewBootClock.
	Clock Clock
	// Events receives the transitions of this replica. It may be nil.
	Events EventRecorder
	// Metrics may be nil.
	Metrics *Metrics
	// Process says how standbys reach this process.
	Process Process
	// Witness looks at the leader's process. Without one, which is nil, this replica does not take the
	// Lease before it has expired or was released.
	Witness Witness
}

// Lock is one replica's part in one election: a candidate, the fence that judges its writes, and
// what shows them. It is built before the clients that it fences and serves one call of Run.
type Lock struct {
	cfg   Config
	lease types.NamespacedName
	who   Candidate
	fence *fence
	shown *display
	used  atomic.Bool // by Run

	restored func()                // may be nil
	prepare  func(context.Context) // called right before the first attempt to take the Lease; may be nil

	fenceChanged chan struct{} // receives when the state of the fence in the API server has changed
	early        takeover      // how the term of this replica has begun, set before lead starts
}

// OnRestored makes Run call f when the Lease turns out to be at an earlier version than before: etcd was
// restored from a snapshot, and whatever watches from a later version sees nothing. f must return at
// once. It must be set before Run.
func (l *Lock) OnRestored(f func()) {
	l.restored = f
}

// NewIdentity returns an identity for a replica: the name of its Pod and a UUID, separated by an
// underscore, which cannot occur in a Pod's name. By the Pod's name the API server's fence
// distinguishes replicas; the UUID distinguishes one run of the process from the next.
func NewIdentity(pod string) string {
	return pod + "_" + string(uuid.NewUUID())
}

// NewLock returns a lock on the Lease that the configuration names.
func NewLock(cfg Config, who Candidate) (*Lock, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if who.Identity == "" {
		return nil, errors.New("the identity of a replica must not be empty")
	}
	if who.Clock == nil {
		who.Clock = NewBootClock()
	}
	shown := newDisplay(cfg.Lease(), who)
	return &Lock{cfg: cfg, lease: cfg.Lease(), who: who, fence: newFence(who.Clock, shown.metrics), shown: shown,
		fenceChanged: make(chan struct{}, 1)}, nil
}

// Identity returns the identity of the replica.
func (l *Lock) Identity() string {
	return l.who.Identity
}

// Fence puts the write fence in front of a transport. A request other than GET, HEAD and OPTIONS,
// and one that connects to a Pod, is refused with ErrNotLeading unless the term of this replica is
// valid at that instant, and is cancelled when the term ends. Every client of every controller must
// have the fence. The clients that a standby writes with must not: those of Leases, Events and
// reviews.
func (l *Lock) Fence(next http.RoundTripper) http.RoundTripper {
	return &fencedTransport{fence: l.fence, next: next}
}

// IsLeading reports whether a write would pass the fence at this instant.
func (l *Lock) IsLeading() bool {
	return l.fence.admits()
}

// Healthy returns an error if this process led, did not renew its Lease for the lease duration plus
// tolerance, and has neither released it nor exited. Such a process is stuck and should be
// restarted. A standby is healthy.
func (l *Lock) Healthy(tolerance time.Duration) error {
	return l.shown.healthy(tolerance)
}

// Problem returns what keeps this replica from competing for the Lease and will last until somebody
// repairs it, or nil: a permission that is missing, or the namespace.
func (l *Lock) Problem() error {
	return l.shown.problem()
}

// ServeHTTP implements http.Handler for /debug/leader. It writes JSON if the request accepts it or
// has ?format=json, else text.
func (l *Lock) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	l.shown.serveHTTP(w, req)
}

// quietAt returns when no write of lead can be executed any more (rule 8). With the fence in the API
// server that is now: it refuses what comes late.
func (l *Lock) quietAt() time.Duration {
	if l.shown.serverFence() == ServerFenceEnforced {
		return l.who.Clock.Now()
	}
	return l.fence.quietAt()
}
