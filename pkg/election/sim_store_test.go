// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package election

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/utils/ptr"

	"github.com/quartermaster-dev/quartermaster/pkg/election/protocol"
)

var leaseResource = coordinationv1.Resource("leases")

// simStore is what the API servers keep in etcd: one Lease with the semantics of kube-apiserver
// (resourceVersions, conflicts, UIDs, watches from a version), and the parameter of the fence.
type simStore struct {
	mu       sync.Mutex
	rv       int64
	highest  int64 // the last version that a restored store had given out before
	uids     int
	lease    *coordinationv1.Lease
	naming   *simNaming
	past     []simEvent                                               // every version, oldest first
	watches  []*simWatch                                              // in the order of their start
	onChange func(writer string, before, after *coordinationv1.Lease) // called under mu
	onNaming func(*simNaming)                                         // called under mu
	onPolicy func(gone bool)                                          // called under mu
	trouble  simTrouble
	refused  time.Time // when it last stopped refusing requests

	policyGone bool // the fence's policy is deleted
	webhook    bool // one on Namespaces is away, and fails closed

	background sync.WaitGroup // what the network and the API servers still do
}

// simNaming is one version of the Namespace that is the fence's parameter. Its annotation names the
// replica that may write.
type simNaming struct {
	rv, uid int64
	leader  string
	absent  bool // the Namespace is deleted
	writer  string
	written time.Time
}

// simSnapshot is a snapshot of etcd.
type simSnapshot struct {
	rv     int64
	lease  *coordinationv1.Lease
	naming *simNaming
}

// simTrouble says how the API servers respond instead of doing what was asked.
type simTrouble int

const (
	noTrouble   simTrouble = iota
	internal               // 500, executed or not
	overload               // 429 to every request, with Retry-After
	forbidden              // 403 to every write of the Lease
	noNamespace            // 404: the namespace of the Lease is gone
)

func newSimStore() *simStore {
	return &simStore{rv: 100, naming: &simNaming{rv: 1, written: time.Now()}}
}

// suffer sets the trouble of the API servers.
func (s *simStore) suffer(trouble simTrouble) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.trouble > internal {
		s.refused = time.Now()
	}
	s.trouble = trouble
}

// blindUntil returns until when a replica may not look again because it was refused.
func (s *simStore) blindUntil() time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.refused.IsZero() {
		return s.refused
	}
	return s.refused.Add(80 * time.Second)
}

// refusal returns the error with which the API servers respond to the verb, if any, and whether it
// says that nothing was executed.
func (s *simStore) refusal(verb string) (err error, final bool) {
	s.mu.Lock()
	trouble := s.trouble
	s.mu.Unlock()
	isLeaseRequest := verb == "get" || verb == "create" || verb == "update" || verb == "watch"
	switch {
	case trouble == internal:
		return apierrors.NewInternalError(errors.New("etcd is having a bad day")), false
	case trouble == overload:
		return apierrors.NewTooManyRequests("the API server has too much to do", 1), true
	case trouble == forbidden && (verb == "create" || verb == "update"):
		return apierrors.NewForbidden(leaseResource, "lease", errors.New("a role binding is missing")), true
	case trouble == noNamespace && verb == "create":
		return apierrors.NewNotFound(corev1.Resource("namespaces"), "ns"), true
	case trouble == noNamespace && isLeaseRequest && verb != "watch":
		return apierrors.NewNotFound(leaseResource, "lease"), true
	}
	return nil, false
}

// snapshot returns a snapshot to restore.
func (s *simStore) snapshot() simSnapshot {
	s.mu.Lock()
	defer s.mu.Unlock()
	return simSnapshot{rv: s.rv, lease: s.lease, naming: s.naming}
}

// restore goes back to the snapshot, as an etcd restored from a backup: versions that have been
// given out are given out again. The API servers are restarted, as etcd asks: all watches end, and new ones
// begin with what the snapshot has. A snapshot may be of a time before the last restore.
func (s *simStore) restore(from simSnapshot) {
	s.mu.Lock()
	defer s.mu.Unlock()
	before := s.lease
	s.highest = max(s.highest, s.rv)
	s.rv, s.lease = from.rv, from.lease
	s.past = nil
	if s.lease != nil {
		s.past = []simEvent{{event: watch.Event{Type: watch.Added, Object: s.lease}}} // whatever a server has seen
	}
	for _, w := range s.watches {
		w.Stop()
	}
	if s.onChange != nil {
		s.onChange("backup", before, s.lease)
	}
	if !from.naming.absent {
		naming := *from.naming
		naming.writer = "backup"
		s.setNaming(&naming)
		s.naming.rv = from.naming.rv
	}
}

func (s *simStore) getNaming() *simNaming {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.naming
}

// name writes the leader's name into the fence's parameter, if that has the version rv of uid; 0 is
// any.
func (s *simStore) name(leader string, rv, uid int64) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.naming.absent:
		return apierrors.NewNotFound(corev1.Resource("namespaces"), "leader")
	case rv != 0 && rv != s.naming.rv || uid != 0 && uid != s.naming.uid:
		return apierrors.NewConflict(corev1.Resource("namespaces"), "leader", errors.New("the object has been modified"))
	case leader != s.naming.leader: // a write that changes nothing makes no new version
		s.setNaming(&simNaming{uid: uid, leader: leader, writer: leader})
	}
	return nil
}

// wipeName removes the name, regardless of versions.
func (s *simStore) wipeName(writer string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.naming.absent {
		s.setNaming(&simNaming{uid: s.naming.uid, writer: writer})
	}
}

// deleteNamespace deletes the fence's parameter.
func (s *simStore) deleteNamespace(writer string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.setNaming(&simNaming{absent: true, writer: writer})
}

// createNamespace installs the fence's parameter without a name.
func (s *simStore) createNamespace(writer string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.naming.absent {
		s.setNaming(&simNaming{uid: s.rv, writer: writer})
	}
}

// setPolicyGone deletes the policy of the fence or installs it.
func (s *simStore) setPolicyGone(gone bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.policyGone = gone
	s.onPolicy(gone)
}

// setWebhook takes the webhook on Namespaces away or brings it back.
func (s *simStore) setWebhook(away bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.webhook = away
}

// webhookError is the error of a write of a Namespace, also of a dry run, while the webhook is away.
func (s *simStore) webhookError() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.webhook {
		return apierrors.NewInternalError(errors.New("failed calling webhook"))
	}
	return nil
}

func (s *simStore) isPolicyGone() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.policyGone
}

func (s *simStore) setNaming(n *simNaming) {
	s.rv++
	n.rv, n.written = s.rv, time.Now()
	s.naming = n
	if s.onNaming != nil {
		s.onNaming(n)
	}
}

func (s *simStore) get() (*coordinationv1.Lease, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.lease == nil {
		return nil, apierrors.NewNotFound(leaseResource, "lease")
	}
	return s.lease, nil
}

func (s *simStore) create(writer string, lease *coordinationv1.Lease) (*coordinationv1.Lease, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.lease != nil {
		return nil, apierrors.NewAlreadyExists(leaseResource, lease.Name)
	}
	lease = lease.DeepCopy()
	s.uids++
	lease.UID = types.UID("uid-" + strconv.Itoa(s.uids))
	s.set(writer, watch.Added, lease)
	return lease, nil
}

func (s *simStore) update(writer string, lease *coordinationv1.Lease) (*coordinationv1.Lease, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.lease == nil {
		return nil, apierrors.NewNotFound(leaseResource, lease.Name)
	}
	if lease.ResourceVersion != s.lease.ResourceVersion || lease.UID != s.lease.UID {
		return nil, apierrors.NewConflict(leaseResource, lease.Name, fmt.Errorf("the object has been modified"))
	}
	if ptr.Deref(lease.Spec.LeaseTransitions, 0) < 0 || ptr.Deref(lease.Spec.LeaseDurationSeconds, 1) <= 0 {
		return nil, apierrors.NewInvalid(coordinationv1.SchemeGroupVersion.WithKind("Lease").GroupKind(), lease.Name, nil)
	}
	lease = lease.DeepCopy()
	s.set(writer, watch.Modified, lease)
	return lease, nil
}

// edit changes the Lease as an administrator or another program would, regardless of versions. It
// does nothing if there is no Lease.
func (s *simStore) edit(writer string, change func(*coordinationv1.Lease)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.lease == nil {
		return
	}
	lease := s.lease.DeepCopy()
	change(lease)
	s.set(writer, watch.Modified, lease)
}

func (s *simStore) delete(writer string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.lease != nil {
		s.set(writer, watch.Deleted, s.lease.DeepCopy())
	}
}

// set is called under mu with a Lease that nobody else references.
func (s *simStore) set(writer string, kind watch.EventType, lease *coordinationv1.Lease) {
	s.rv++
	lease.ResourceVersion = strconv.FormatInt(s.rv, 10)
	before := s.lease
	s.lease = lease
	if kind == watch.Deleted {
		s.lease = nil
	}
	if s.onChange != nil {
		s.onChange(writer, before, s.lease)
	}
	event := simEvent{event: watch.Event{Type: kind, Object: lease}, at: time.Now()}
	s.past = append(s.past, event)
	for _, w := range s.watches {
		w.push(event)
	}
}

func (s *simStore) holder() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.lease == nil {
		return ""
	}
	return protocol.HolderOf(s.lease)
}

// watch starts a watch after the version from, or with the present state if from is empty. A watch
// from a version of the future shows nothing before that version, as an API server's.
func (s *simStore) watch(ctx context.Context, link *simLink, rng *rand.Rand, from string, lifetime time.Duration) *simWatch {
	return s.watchVia(ctx, nil, link, rng, from, lifetime)
}

// watchVia starts a watch through an API server.
func (s *simStore) watchVia(ctx context.Context, server *simServer, link *simLink, rng *rand.Rand, from string,
	lifetime time.Duration) *simWatch {
	w := &simWatch{
		store: s, server: server, link: link, rng: rng,
		events: make(chan watch.Event), wake: make(chan struct{}, 1), stop: make(chan struct{}),
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	first := 0
	if from == "" {
		first = s.present(w, server)
	} else {
		w.after, _ = strconv.ParseInt(from, 10, 64)
	}
	for _, event := range s.past[first:] {
		w.push(event)
	}
	s.watches = append(s.watches, w)
	s.background.Go(func() { w.deliver(ctx, lifetime) })
	return w
}

// present pushes the state that the API server knows, which may be old, and returns the index of the
// event that follows.
func (s *simStore) present(w *simWatch, server *simServer) int {
	n := len(s.past)
	if server != nil {
		until := server.seenUntil()
		for n > 0 && s.past[n-1].at.After(until) {
			n--
		}
	}
	if n > 0 && s.past[n-1].event.Type != watch.Deleted {
		w.push(simEvent{event: watch.Event{Type: watch.Added, Object: s.past[n-1].event.Object}, at: time.Now()})
	}
	return n
}

func versionOf(event watch.Event) int64 {
	rv, _ := strconv.ParseInt(event.Object.(*coordinationv1.Lease).ResourceVersion, 10, 64)
	return rv
}

// simWatch delivers the events of one watch in order and late.
type simWatch struct {
	store  *simStore
	server *simServer // nil: without its lag
	link   *simLink
	after  int64 // the version after which it shows events
	rng    *rand.Rand
	events chan watch.Event
	wake   chan struct{}
	once   sync.Once
	stop   chan struct{}

	mu      sync.Mutex
	queue   []simEvent
	stalled bool
}

// simEvent is an event and when it happened.
type simEvent struct {
	event watch.Event
	at    time.Time
}

func (w *simWatch) push(event simEvent) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if versionOf(event.event) <= w.after {
		return
	}
	w.queue = append(w.queue, event)
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

func (w *simWatch) pop() (simEvent, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.queue) == 0 || w.stalled {
		return simEvent{}, false
	}
	event := w.queue[0]
	w.queue = w.queue[1:]
	return event, true
}

// stall leaves the watch open but dead, like a connection whose peer is gone.
func (w *simWatch) stall() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.stalled = true
}

// hasDeadWatch reports whether a watch is open but shows nothing more.
func (s *simStore) hasDeadWatch() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.ContainsFunc(s.watches, func(w *simWatch) bool {
		w.mu.Lock()
		defer w.mu.Unlock()
		return w.stalled || w.after > s.rv
	})
}

// stallWatches ends the watches or, where dead says so, leaves them open but dead.
func (s *simStore) stallWatches(dead func() bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, w := range s.watches {
		if dead() {
			w.stall()
		} else {
			w.Stop()
		}
	}
}

func (w *simWatch) deliver(ctx context.Context, lifetime time.Duration) {
	defer close(w.events)
	defer w.forget()
	end := time.NewTimer(lifetime)
	defer end.Stop()
	for {
		event, ok := w.pop()
		if !ok {
			select {
			case <-w.wake:
				continue
			case <-w.stop:
			case <-ctx.Done():
			case <-end.C:
			}
			return
		}
		delay := w.link.latency(w.rng)
		if w.server != nil {
			delay += w.server.watchDelay(w.rng)
		}
		if !pauseFor(ctx, delay-time.Since(event.at)) || !w.link.awaitUp(ctx) {
			return
		}
		select {
		case w.events <- event.event:
		case <-w.stop:
			return
		case <-ctx.Done():
			return
		}
	}
}

func (w *simWatch) forget() {
	w.store.mu.Lock()
	defer w.store.mu.Unlock()
	w.store.watches = slices.DeleteFunc(w.store.watches, func(other *simWatch) bool { return other == w })
}

func (w *simWatch) Stop() { w.once.Do(func() { close(w.stop) }) }

func (w *simWatch) ResultChan() <-chan watch.Event { return w.events }
