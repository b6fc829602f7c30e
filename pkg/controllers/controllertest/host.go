// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package controllertest

import (
	"maps"
	"net/http/httptest"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"
	"k8s.io/utils/ptr"

	"github.com/quartermaster-dev/quartermaster/pkg/app"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/controllertest/internal/apiserver"
)

// Setup says what the manager of a test runs.
type Setup struct {
	// Entries are the controllers. All of them run, even if off by default.
	Entries []controllers.Entry
	// Flags are flags of the manager and of the entries, such as --namespaces=shop.
	Flags []string
	// Standby adds a second replica, which does not lead before [Host.Restart].
	Standby bool
	// Prepare, if set, is called before the manager starts, for instance to set a hook or a lag.
	Prepare func(*Host)
}

// Host is a manager and an API server of its own.
type Host struct {
	t        testing.TB
	setup    Setup
	settings controllers.Settings
	scheme   *runtime.Scheme
	server   *apiserver.Server
	network  *network
	logger   klog.Logger
	leader   *replica
	standby  *replica // nil if there is none
	lags     map[string]time.Duration
	latency  time.Duration
	clusters []*Cluster

	mu      sync.Mutex
	writes  []written
	missing map[string]bool // permissions that were reported
	onRead  func(Request) error
	onWrite func(Request) error
	clock   func(resource string) time.Time
	inHook  chan struct{} // has an item while a hook is called

	forbidden []string // resources, see Forbid
}

// NewHost starts a manager that runs the entry: see [Setup.NewHost].
func NewHost(t testing.TB, entry controllers.Entry, objects ...runtime.Object) *Host {
	t.Helper()
	return Setup{Entries: []controllers.Entry{entry}}.NewHost(t, objects...)
}

// NewHost starts a manager, as the leader, against an API server with the given objects, and returns
// when its controllers have nothing left to do. It must be called in a [synctest.Test], whose end stops
// the manager.
//
// Objects may be of the types that the entries' AddToScheme add, of built-in types and unstructured.
// They are stored as they are, with their status. A CustomResourceDefinition, see [ReadYAML], makes
// the server serve its resource, and should come first. Without one, the server guesses the plural
// of a type, and a type with a field Status has the status as a subresource.
//
// The test fails if the manager does not start, or if a controller does what its Permissions do not allow,
// declares a resource that has no namespaces without ClusterScoped, panics, or has not ended within the
// shutdown timeout. With KUBE_CACHE_MUTATION_DETECTOR=true in the environment, client-go's detector also
// ends the process after a second if a controller has changed an object in the cache.
func (s Setup) NewHost(t testing.TB, objects ...runtime.Object) *Host {
	t.Helper()
	requireBubble(t)
	h := s.newHost(t)
	var err error
	if h.scheme, err = app.NewScheme(s.Entries); err != nil {
		t.Fatal(err)
	}
	h.server = apiserver.New(h.scheme, apiserver.Hooks{
		Admit: h.admit, Wrote: h.recordWrite, Unsupported: h.unsupported, Holds: h.holds, Clock: h.now})
	h.Lag(0)
	h.Put(objects...)
	server := httptest.NewUnstartedServer(h.server)
	server.Listener.Close()
	server.Listener = h.network
	server.Start()
	h.logger = ktesting.NewLogger(t, ktesting.NewConfig(ktesting.Verbosity(2)))
	t.Cleanup(func() {
		h.standby.stop()
		h.leader.stop()
		server.CloseClientConnections()
		server.Close()
		<-time.After(time.Minute) // client-go's queues look every few seconds whether they have ended
	})
	if s.Standby {
		// If there were no Lease, the first leader would wait: it might just have been deleted.
		h.Put(&coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceSystem, Name: leaseName}})
	}
	if s.Prepare != nil {
		s.Prepare(h)
	}
	h.leader = h.start()
	h.waitForLeader()
	if s.Standby {
		h.standby = h.start()
	}
	return h
}

func (s Setup) newHost(t testing.TB) *Host {
	t.Helper()
	return &Host{t: t, setup: s, network: newNetwork(), missing: map[string]bool{},
		lags: map[string]time.Duration{}, latency: time.Millisecond, inHook: make(chan struct{}, 1)}
}

// requireBubble fails the test outside of a synctest bubble.
func requireBubble(t testing.TB) {
	t.Helper()
	defer func() {
		if recover() != nil {
			t.Fatal("controllertest.NewHost must be called within synctest.Test, which stops the clocks")
		}
	}()
	synctest.Wait()
}

// Restart hands over, as in a rollout: the controllers finish what they are doing, and the standby
// leads. Without a standby a new replica leads, which knows only what is in the API server. It
// starts after meanwhile, if given, has returned.
func (h *Host) Restart(meanwhile ...func()) {
	h.t.Helper()
	h.leader.stop()
	for _, f := range meanwhile {
		f()
	}
	if h.standby == nil {
		h.leader = h.start()
		return
	}
	h.waitForLeader()
	h.leader, h.standby = h.standby, h.start()
}

// waitForLeader returns when the only replica leads, which takes some seconds after a handover.
func (h *Host) waitForLeader() {
	h.t.Helper()
	leads := func() bool {
		lease := Get[coordinationv1.Lease](h, metav1.NamespaceSystem, leaseName)
		return lease == nil || ptr.Deref(lease.Spec.HolderIdentity, "") != ""
	}
	for range 1000 {
		if leads() {
			h.Settle()
			return
		}
		<-time.After(time.Second)
	}
	h.t.Fatal("the manager does not lead")
}

// Settle returns when the controllers have nothing left to do now. A write takes a millisecond, so
// the clock goes on a little.
func (h *Host) Settle() {
	h.t.Helper()
	wait := time.Duration(0)
	hosts := []*Host{h}
	for _, c := range h.clusters {
		hosts = append(hosts, c.Host)
	}
	requests := func() (n int) {
		for _, host := range hosts {
			n += host.server.Requests()
		}
		return n
	}
	for _, host := range hosts {
		for _, lag := range host.lags {
			wait = max(wait, host.latency+lag)
		}
	}
	for range 10_000 {
		before := requests()
		<-time.After(2 * wait)
		synctest.Wait()
		if requests() == before {
			return
		}
	}
	h.t.Fatalf("the controllers go on and on; the last writes are %q", last(h.Writes(), 10))
}

func last(texts []string, n int) []string { return texts[max(0, len(texts)-n):] }

// Sleep lets time pass, and all that is due meanwhile happen.
func (h *Host) Sleep(d time.Duration) {
	h.t.Helper()
	<-time.After(d)
	h.Settle()
}

// Lag delays the events of these resources, such as deployments, to the cache from now on; without
// resources, all events. Without a delay, the cache has each write before the controller has the response;
// with more than [Host.Latency], later. In production, either happens.
func (h *Host) Lag(d time.Duration, resources ...string) {
	if len(resources) == 0 {
		clear(h.lags)
		resources = []string{""}
	}
	for _, resource := range resources {
		h.lags[resource] = d
	}
	h.setTiming()
}

// Latency sets how long the response to a write takes from now on, after the write took effect: a
// millisecond, unless it is set.
func (h *Host) Latency(d time.Duration) {
	h.latency = d
	h.setTiming()
}

func (h *Host) setTiming() {
	h.server.SetTiming(apiserver.Timing{Latency: h.latency, Lag: maps.Clone(h.lags)})
}

// Relist ends all watches and lets none be resumed, as an API server does after an outage: the cache lists
// everything again within a minute, and shows it to the controllers. What is put meanwhile is only in the
// list.
func (h *Host) Relist() { h.server.Expire() }

// SetClock sets the clock of the API server, which its responses tell. Each resource may have an API server
// with another clock.
func (h *Host) SetClock(clock func(resource string) time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.clock = clock
}

func (h *Host) now(resource string) time.Time {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.clock == nil {
		return time.Now()
	}
	return h.clock(resource)
}
