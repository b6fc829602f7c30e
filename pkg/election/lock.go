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
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/klog/v2"

	"github.com/quartermaster-dev/quartermaster/pkg/election/apifence"
	"github.com/quartermaster-dev/quartermaster/pkg/election/display"
	"github.com/quartermaster-dev/quartermaster/pkg/election/protocol"
	"github.com/quartermaster-dev/quartermaster/pkg/election/writefence"
)

// LeaseClient is the part of the API that the elector needs, and the permissions to grant by RBAC:
// get, update and watch of the one Lease, and create unless the Lease is installed along with the
// process. Without watch the elector polls. A client of coordination/v1 Leases in one namespace implements
// it.
type LeaseClient interface {
	Get(ctx context.Context, name string, opts metav1.GetOptions) (*coordinationv1.Lease, error)
	Create(ctx context.Context, lease *coordinationv1.Lease, opts metav1.CreateOptions) (*coordinationv1.Lease, error)
	Update(ctx context.Context, lease *coordinationv1.Lease, opts metav1.UpdateOptions) (*coordinationv1.Lease, error)
	Watch(ctx context.Context, opts metav1.ListOptions) (watch.Interface, error)
}

// Witness looks at the leader's process.
type Witness interface {
	// Watch calls report with what it sees of the process, whenever that changes, until ctx ends.
	Watch(ctx context.Context, process protocol.LeaderProcess, report func(protocol.LeaderState))
}

// Candidate is a replica that competes for a Lease.
type Candidate struct {
	// Identity is written into the Lease. No two processes may share one; see NewIdentity.
	Identity string
	// Client is for the Lease's namespace and used by the elector alone; see ClientConfig.
	Client LeaseClient
	// Clock defaults to NewBootClock.
	Clock protocol.Clock
	// Events receives the transitions of this replica. It may be nil.
	Events display.EventRecorder
	// Metrics may be nil.
	Metrics *display.Metrics

	// Namespaces is how this replica names itself for the fence in the API server, and asks whether there
	// is one. Nil: it does neither.
	Namespaces apifence.NamespaceClient
	// Servers finds the API servers. If nil, a replica that took the Lease early leads only when the last
	// claim has ended.
	Servers apifence.Servers
	// PodUID is the UID of this replica's Pod. It may be empty.
	PodUID string

	// Address is where standbys reach this process, IP and port. It may be empty.
	Address string
	// Witness looks at the leader's process. If nil, this replica does not take the Lease before it has
	// expired or was released.
	Witness Witness
}

// Lock is one replica's part in one election: a candidate, the fences that judge its writes, and
// what shows them. It is built before the clients that it fences and serves one call of Run.
type Lock struct {
	cfg       Config
	lease     types.NamespacedName
	candidate Candidate
	fence     *writefence.Fence
	apiFence  *apifence.Fence // nil: there is none
	display   *display.Display
	used      atomic.Bool // by Run
}

// NewIdentity returns an identity for a replica: the name of its Pod and a UUID, separated by an
// underscore, which cannot occur in a Pod's name. By the Pod's name the API server's fence
// distinguishes replicas; the UUID distinguishes one run of the process from the next.
func NewIdentity(pod string) string {
	return pod + "_" + string(uuid.NewUUID())
}

// NewLock returns a lock on the Lease that the configuration names.
func NewLock(cfg Config, candidate Candidate) (*Lock, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if candidate.Identity == "" {
		return nil, errors.New("the identity of a replica must not be empty")
	}
	if candidate.Clock == nil {
		candidate.Clock = NewBootClock()
	}
	l := &Lock{cfg: cfg, lease: cfg.Lease(), candidate: candidate}
	l.display = display.New(l.lease, candidate.Identity, cfg.RenewDeadline.Duration, candidate.Clock, candidate.Events, candidate.Metrics)
	l.fence = writefence.New(candidate.Clock, l.display.RefusedWrite)
	if candidate.Namespaces != nil && cfg.LeaderElect {
		t := cfg.timing()
		l.apiFence = apifence.New(apifence.Config{
			Lease: l.lease, Identity: candidate.Identity, PodUID: candidate.PodUID,
			Namespaces: candidate.Namespaces, Leases: candidate.Client, Servers: candidate.Servers, Clock: candidate.Clock,
			RequestTimeout: t.RequestTimeout(), AdmissionTimeout: t.Lease,
			OnState: l.SetServerFence, OnTrouble: l.display.SetTrouble,
		})
	}
	return l, nil
}

// Identity returns the identity of the replica.
func (l *Lock) Identity() string {
	return l.candidate.Identity
}

// Fence puts the fence in front of a transport. A write, see writefence.IsWrite, is refused with
// writefence.ErrNotLeading unless this replica leads at that instant, and is cancelled when its
// term ends. A write that the API server's fence refuses fails with the same error. Every client of
// every controller must have the fence. The clients that a standby writes with, of Leases, Events and
// reviews, must not.
func (l *Lock) Fence(next http.RoundTripper) http.RoundTripper {
	next = l.fence.Transport(next)
	if l.apiFence != nil {
		next = l.apiFence.Transport(next, writefence.ErrNotLeading)
	}
	return next
}

// FenceElsewhere is Fence for the API server of another cluster. No answer of that server can end a term,
// and no write there delays the release of the Lease.
func (l *Lock) FenceElsewhere(next http.RoundTripper) http.RoundTripper {
	return l.fence.TransportElsewhere(next)
}

// IsLeading reports whether a write would pass the fence at this instant.
func (l *Lock) IsLeading() bool {
	return l.fence.Admits(l.candidate.Clock.Now())
}

// Healthy returns an error if this process led, did not renew its Lease for the lease duration plus
// tolerance, and has neither released it nor exited. Such a process is stuck and should be
// restarted. A standby is healthy.
func (l *Lock) Healthy(tolerance time.Duration) error {
	return l.display.Healthy(tolerance)
}

// Problem returns what keeps this replica from competing for the Lease or from leading and will last
// until somebody repairs it, or nil.
func (l *Lock) Problem() error {
	return l.display.Problem()
}

// ServeHTTP implements http.Handler for /debug/leader, in JSON.
func (l *Lock) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	l.display.ServeHTTP(w, req)
}

// SetServerFence sets what is known of the fence in the API server. A lock with a client for Namespaces
// finds that out by itself.
func (l *Lock) SetServerFence(ctx context.Context, found apifence.State) {
	if !l.display.SetServerFence(found) {
		return
	}
	logger := klog.FromContext(ctx).WithValues("lease", l.lease, "serverFence", found)
	if found == apifence.Misconfigured {
		logger.Error(nil, "The fence in the API server refuses the writes of this replica even if it leads",
			"identity", l.candidate.Identity, "namespace", apifence.NamespaceFor(l.lease), "annotation", apifence.LeaderAnnotation)
		return
	}
	if l.apiFence == nil {
		logger.Info("This installation uses no fence in the API server, because it is restricted to namespaces")
		return
	}
	logger.Info(map[apifence.State]string{
		apifence.Enforced: "The API server refuses writes of replicas that do not lead",
		apifence.Absent:   "The API server has no fence, or this replica may not name itself; install deploy/components/fence with its role",
	}[found])
}
