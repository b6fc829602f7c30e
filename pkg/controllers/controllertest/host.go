// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package controllertest

import (
	"maps"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"
	"k8s.io/utils/ptr"

	"github.com/quartermaster-dev/quartermaster/internal/panics"
	"github.com/quartermaster-dev/quartermaster/pkg/app"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
)

// Setup says what the manager of a test runs.
type Setup struct {
	// Entries are the controllers. All of them run, even if off by default.
	Entries []controllers.Entry
	// Flags are flags of the manager and of the entries, such as --namespaces=shop.
	Flags []string
	// Standby adds a second replica, which does not lead before [Host.Restart] or [Host.Depose].
	Standby bool
	// Prepare, if set, is called before the manager starts, for instance to set a hook or a lag.
	Prepare func(*Host)
}

// Host is a manager and an API server of its own, whose methods it has.
type Host struct {
	*APIServer
	setup    Setup
	granted  map[string]app.Grants // by name of the entry
	logger   klog.Logger
	leader   *replica
	standby  *replica // nil if there is none
	deposed  []*replica
	clusters []*Cluster
	missing  map[string]bool // permissions that were reported, under mu
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
	panics.ShowValues.Store(true)
	scheme, err := app.NewScheme(s.Entries)
	if err != nil {
		t.Fatal(err)
	}
	h := &Host{setup: s, granted: map[string]app.Grants{}, missing: map[string]bool{}}
	h.APIServer = newAPIServer(t, s.Entries, scheme, h.admit, h.holds)
	h.Put(objects...)
	server := h.network.server(h.server)
	server.Start()
	h.logger = ktesting.NewLogger(t, ktesting.NewConfig(ktesting.Verbosity(2)))
	t.Cleanup(func() {
		for _, r := range h.deposed {
			r.stop()
		}
		h.standby.stop()
		h.leader.stop()
		server.CloseClientConnections()
		server.Close()
		<-time.After(time.Minute) // client-go's queues check every few seconds whether they have been shut down
	})
	if s.Standby {
		// Without a Lease, the first leader would wait: the Lease might just have been deleted.
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

// requireBubble fails the test outside of a synctest bubble.
func requireBubble(t testing.TB) {
	t.Helper()
	defer func() {
		if recover() != nil {
			t.Fatal("functions of controllertest must be called within synctest.Test, which stops the clocks")
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
		h.standby = h.start()
	}
	h.waitForLeader()
	h.leader, h.standby = h.standby, nil
	if h.setup.Standby {
		h.standby = h.start()
	}
}

// Depose removes the leader from the Lease while its controllers work: the fence cancels their writes in
// flight and refuses all later ones, and the former leader's manager ends with an error. The standby, which
// [Setup.Standby] adds, leads a minute later. There is no new standby before [Host.Restart].
//
// A hook may call Depose. If OnWrite's does, the controller does not learn the outcome of the write: the API
// server carries it out unless the hook returns an error. The leader sees the change of the Lease by a watch,
// which [APIServer.Relist] interrupts for ten seconds.
func (h *Host) Depose() {
	h.t.Helper()
	if h.standby == nil {
		h.t.Fatal("there is no standby for Depose: Setup.Standby adds one when the first replica leads, and Restart another one after a Depose")
	}
	lease := Get[coordinationv1.Lease](h, metav1.NamespaceSystem, leaseName)
	lease.Spec.HolderIdentity = nil
	h.leader.deposed = true
	h.deposed = append(h.deposed, h.leader)
	h.leader, h.standby = h.standby, nil
	h.Put(lease)
	// Depose may be called in a hook, for whose request Settle would wait. The clock goes on when the leader has
	// seen the Lease and closed the fence.
	<-time.After(slices.Max(slices.Collect(maps.Values(h.lags))) + time.Millisecond)
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
	servers := []*APIServer{h.APIServer}
	for _, c := range h.clusters {
		servers = append(servers, c.APIServer)
	}
	requests := func() (n int) {
		for _, s := range servers {
			n += s.server.Requests()
		}
		return n
	}
	for _, s := range servers {
		for _, lag := range s.lags {
			wait = max(wait, s.latency+lag)
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
