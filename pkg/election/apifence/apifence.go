// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package apifence knows the fence in the API server: a ValidatingAdmissionPolicy,
// deploy/components/fence. Its parameter is an empty Namespace with an annotation that names the
// one replica that may write. docs/adr/0006-fence-namespace.md has the rules. A replica names itself
// before it leads, and again whenever its name has gone while it leads. After it took the Lease early, it
// proves that every API server refuses its predecessors.
//
// ask.go asks an API server how it judges this replica, name.go names the leader, proof.go asks every API
// server whether it refuses the predecessors, directory.go finds them, and refusal.go handles writes that
// the policy has refused.
package apifence

import (
	"context"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/quartermaster-dev/quartermaster/pkg/election/protocol"
)

const (
	// PolicyName is the name of the policy and of its binding.
	PolicyName = "quartermaster-fence"

	// LeaderAnnotation is the annotation of the Namespace. Its value is the leader's identity, POD_UUID, and
	// the UID of its Pod after a slash where that is known. The policy compares both with the Pod that the
	// caller's token is bound to.
	LeaderAnnotation = "quartermaster.dev/leader-pod"
)

// NamespaceFor returns the name of the Namespace that names the holder of the Lease. The name ends in the
// Lease's namespace, except in the default installation.
func NamespaceFor(lease types.NamespacedName) string {
	name := lease.Name + "-leader"
	if lease.Namespace != metav1.NamespaceSystem {
		name += "-" + lease.Namespace
	}
	return name
}

// State says whether the API server refuses writes of replicas that do not lead.
type State string

// The states of the fence in the API server.
const (
	Unknown       State = "Unknown"       // no response yet, or not asked
	Enforced      State = "Enforced"      // it judges this replica correctly
	Absent        State = "Absent"        // there is none
	Misconfigured State = "Misconfigured" // it refuses the leader, or any replica
)

// States are all the states.
var States = []State{Unknown, Enforced, Absent, Misconfigured}

// NamespaceClient is the part of a client for Namespaces that the fence needs, and the permissions
// to grant by RBAC: get and patch of the one Namespace. It must have the credentials of the
// controllers' clients, which the policy judges, and must not pass the client's fence, since a standby
// asks too.
type NamespaceClient interface {
	Get(ctx context.Context, name string, opts metav1.GetOptions) (*corev1.Namespace, error)
	Patch(ctx context.Context, name string, kind types.PatchType, patch []byte, opts metav1.PatchOptions,
		subresources ...string) (*corev1.Namespace, error)
}

// LeaseGetter reads the Lease.
type LeaseGetter interface {
	Get(ctx context.Context, name string, opts metav1.GetOptions) (*coordinationv1.Lease, error)
}

// Config configures a Fence.
type Config struct {
	Lease    types.NamespacedName
	Identity string
	PodUID   string // may be empty

	Namespaces NamespaceClient
	Leases     LeaseGetter
	Servers    Servers // nil: unknown
	Clock      protocol.Clock

	RequestTimeout   time.Duration
	AdmissionTimeout time.Duration // after which a leader that is not admitted ends its term

	// OnState is called with every state that is found, and OnTrouble with what keeps a holder from being
	// admitted, or with nil.
	OnState   func(context.Context, State)
	OnTrouble func(error)
}

// Fence is the part of one replica in the fence of the API server.
type Fence struct {
	Config
	name  string        // of the Namespace
	value string        // of the annotation when this replica leads
	pod   string        // of this replica
	wake  chan struct{} // wakes KeepNamed

	refusedAt atomic.Int64 // when an API server last refused a write, by Clock; 0: never

	jitterMu sync.Mutex
	jitter   *rand.Rand
}

// New returns the fence for a replica.
func New(cfg Config) *Fence {
	f := &Fence{Config: cfg, name: NamespaceFor(cfg.Lease), value: cfg.Identity, pod: protocol.PodOf(cfg.Identity), wake: make(chan struct{}, 1),
		jitter: protocol.NewJitter(cfg.Identity + "/fence")}
	if cfg.PodUID != "" {
		f.value += "/" + cfg.PodUID
	}
	return f
}

// isRefused reports whether an API server has refused a write within AdmissionTimeout.
func (f *Fence) isRefused() bool {
	at := time.Duration(f.refusedAt.Load())
	return at != 0 && f.Clock.Now()-at < f.AdmissionTimeout
}

// pauseFor waits for a random time between least and most, and reports whether ctx outlasted the wait.
func (f *Fence) pauseFor(ctx context.Context, least, most time.Duration) bool {
	select {
	case <-time.After(f.between(least, most)):
		return true
	case <-ctx.Done():
		return false
	}
}

func (f *Fence) between(least, most time.Duration) time.Duration {
	f.jitterMu.Lock()
	defer f.jitterMu.Unlock()
	return least + time.Duration(f.jitter.Int64N(int64(most-least)))
}
