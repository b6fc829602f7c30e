// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package election

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
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

// Lock is one replica's part in one election: the Lease that it competes for, its identity, and its
// state. It is built before the clients that it fences and serves one call of Run.
type Lock struct {
	name     types.NamespacedName
	identity string
	client   LeaseClient
	events   EventRecorder
	clock    Clock
	metrics  *lockMetrics
	fence    *fence
	used     atomic.Bool // by Run

	mu     sync.Mutex
	status status
}

// NewIdentity returns an identity for a replica: the name of its Pod and a UUID, separated by an
// underscore, which cannot occur in a Pod's name. By the Pod's name the API server's fence
// distinguishes replicas; the UUID distinguishes one run of the process from the next.
func NewIdentity(pod string) string {
	return pod + "_" + string(uuid.NewUUID())
}

// NewLock returns a lock on the named Lease for the replica called identity. No two processes may
// share an identity; see NewIdentity. The client is for the Lease's namespace and used by the
// elector alone; see ClientConfig.
func NewLock(lease types.NamespacedName, identity string, client LeaseClient, events EventRecorder,
	clock Clock, all *Metrics) (*Lock, error) {
	if identity == "" {
		return nil, errors.New("the identity of a replica must not be empty")
	}
	m := all.of(lease.Name)
	return &Lock{
		name:     lease,
		identity: identity,
		client:   client,
		events:   events,
		clock:    clock,
		metrics:  m,
		fence:    newFence(clock, m),
		status:   status{Lease: lease.String(), Identity: identity, Phase: phaseNotStarted, ServerFence: ServerFenceUnknown},
	}, nil
}

// Identity returns the identity of the replica.
func (l *Lock) Identity() string {
	return l.identity
}

// Fence puts the write fence in front of a transport. A request other than GET, HEAD and OPTIONS is
// refused with ErrNotLeading unless the term of this replica is valid at that instant, and is
// cancelled when the term ends. Every client of every controller must have the fence. The clients
// that a standby writes with must not: those of Leases, Events and reviews.
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
	now := l.clock.Now()
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.status.holding() && !l.status.lost {
		return nil
	}
	if late := now - l.status.expires; late > tolerance {
		return fmt.Errorf("this process led through lease %s, which expired %s ago, and has not exited",
			l.name, late.Truncate(time.Second))
	}
	return nil
}

// record records a transition of this replica as an Event on the Lease, with the wording of
// client-go's elector.
func (l *Lock) record(lease *coordinationv1.Lease, what string) {
	ref := &corev1.ObjectReference{
		APIVersion: coordinationv1.SchemeGroupVersion.String(), Kind: "Lease",
		Namespace: l.name.Namespace, Name: l.name.Name, UID: lease.UID, ResourceVersion: lease.ResourceVersion,
	}
	l.events.Eventf(ref, corev1.EventTypeNormal, "LeaderElection", "%s %s", l.identity, what)
}
