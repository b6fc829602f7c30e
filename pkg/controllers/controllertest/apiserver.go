// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package controllertest

import (
	"maps"
	"sync"
	"testing"
	"time"

	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/controllertest/internal/apiserver"
)

// APIServer is the API server of a [Host] or of a [Cluster].
type APIServer struct {
	t       testing.TB
	entries []controllers.Entry
	scheme  *runtime.Scheme
	server  *apiserver.Server
	network *network
	lags    map[string]time.Duration
	latency time.Duration

	mu      sync.Mutex
	writes  []written
	onRead  func(Request) error
	onWrite func(Request) error
	clock   func(resource string) time.Time
	inHook  chan struct{} // has an item while a hook is called

	forbidden []string // resources, see Forbid
}

// newAPIServer returns an API server without objects. admit may refuse a request; holds reports whether a
// user agent may do all that a rule says; without it, each may do everything.
func newAPIServer(
	t testing.TB, entries []controllers.Entry, scheme *runtime.Scheme,
	admit func(apiserver.Request) error, holds func(agent string, rule rbacv1.PolicyRule) bool,
) *APIServer {
	t.Helper()
	s := &APIServer{t: t, entries: entries, scheme: scheme, network: newNetwork(),
		lags: map[string]time.Duration{}, latency: time.Millisecond, inHook: make(chan struct{}, 1)}
	s.server = apiserver.New(scheme, apiserver.Hooks{
		Admit: admit, Wrote: s.recordWrite, Unsupported: s.unsupported, Holds: holds, Clock: s.now})
	s.Lag(0)
	return s
}

// HasAPIServer is an [*APIServer] or what embeds one: a [*Host] or a [*Cluster].
type HasAPIServer interface{ apiServer() *APIServer }

func (s *APIServer) apiServer() *APIServer { return s }

// Lag delays the events of these resources, such as deployments, to the cache from now on; without resources,
// all events. Without a delay, the cache has each write before the controller has the response; with a delay
// longer than [APIServer.Latency], after it. In production, either happens.
func (s *APIServer) Lag(d time.Duration, resources ...string) {
	if len(resources) == 0 {
		clear(s.lags)
		resources = []string{""}
	}
	for _, resource := range resources {
		s.lags[resource] = d
	}
	s.setTiming()
}

// Latency sets how long the response to a write takes from now on, after the write took effect: a
// millisecond, unless it is set.
func (s *APIServer) Latency(d time.Duration) {
	s.latency = d
	s.setTiming()
}

func (s *APIServer) setTiming() {
	s.server.SetTiming(apiserver.Timing{Latency: s.latency, Lag: maps.Clone(s.lags)})
}

// Relist ends all watches and lets none be resumed, as an API server does after an outage: the cache lists
// everything again within a minute, and shows it to the controllers. Objects that are put meanwhile are only
// in the list, not in events.
func (s *APIServer) Relist() { s.server.Expire() }

// SetClock sets the clock of the API server, which its responses tell. Each resource may have an API server
// with another clock.
func (s *APIServer) SetClock(clock func(resource string) time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.clock = clock
}

func (s *APIServer) now(resource string) time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.clock == nil {
		return time.Now()
	}
	return s.clock(resource)
}
