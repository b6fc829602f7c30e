// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package fleet is the common part of the tests on a real control plane: one control plane for a
// package's tests, managers on it, the objects that they work on, tokens and proxies, requests to their
// ports, and waits.
package fleet

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"
	"k8s.io/client-go/dynamic"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/test/internal/faultproxy"
)

// ShortTimings are the shortest round timings that are safe, for tests that wait for a Lease to
// expire.
var ShortTimings = []string{"--leader-elect-lease-duration=3s", "--leader-elect-renew-deadline=2s", "--leader-elect-retry-period=500ms"}

// Options configures Start. The zero value is a complete control plane, and managers as they are
// released, or with the race detector if RACE is set in the environment.
type Options struct {
	Cluster cluster.Options
	// Program is the folder of the managers' program; empty means cmd/manager.
	Program string
	// Components are installed from deploy/components in addition to the default.
	Components []string
}

// Fleet is a control plane with everything of deploy/ but the Deployment, and managers on it.
//
// Its managers compete for one Lease, so tests that run managers do not run in parallel.
type Fleet struct {
	*cluster.Cluster

	Objects dynamic.Interface // the administrator's client

	Binary string // the path of the manager's program

	components []string     // see Options
	replicas   atomic.Int32 // so far

	mu       sync.Mutex
	starts   []interval // of the API server
	expected []func(auditv1.Event) bool
}

// Start builds the manager and starts a control plane.
func Start(ctx context.Context, o Options) (_ *Fleet, err error) {
	if o.Cluster.Progress == nil {
		o.Cluster.Progress = os.Stderr
	}
	f := &Fleet{components: o.Components}
	if f.Binary, err = cluster.BuildProgram(ctx, cmp.Or(o.Program, "cmd/manager"), Race()); err != nil {
		return nil, err
	}
	if f.Cluster, err = cluster.Start(ctx, o.Cluster); err != nil {
		return nil, err
	}
	if f.Objects, err = dynamic.NewForConfig(f.AdminConfig()); err == nil {
		err = f.InstallComponents(ctx, f.components...)
	}
	if err != nil {
		return nil, errors.Join(err, f.Stop())
	}
	return f, nil
}

// InstallWith installs further components for the rest of the test.
func (f *Fleet) InstallWith(ctx context.Context, t testing.TB, components ...string) {
	t.Helper()
	t.Cleanup(func() {
		if err := f.InstallComponents(context.Background(), f.components...); err != nil {
			t.Error(err)
		}
	})
	if err := f.InstallComponents(ctx, slices.Concat(f.components, components)...); err != nil {
		t.Fatal(err)
	}
}

// NewReplica creates a Pod and a token bound to it for one manager.
func (f *Fleet) NewReplica(ctx context.Context, t testing.TB) *cluster.Replica {
	t.Helper()
	readInputs()
	r, err := f.Cluster.NewReplica(ctx, fmt.Sprint(f.replicas.Add(1)))
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// NewProxy starts a proxy in front of the API server.
func (f *Fleet) NewProxy(t testing.TB) *faultproxy.Proxy {
	t.Helper()
	proxy, err := faultproxy.Start(f.AdminConfig())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = proxy.Close() })
	return proxy
}

// NewReplicaBehindProxy is like NewReplica for a manager that reaches the API server through its
// own proxy.
func (f *Fleet) NewReplicaBehindProxy(ctx context.Context, t testing.TB) (*cluster.Replica, *faultproxy.Proxy) {
	t.Helper()
	proxy, r := f.NewProxy(t), f.NewReplica(ctx, t)
	if err := r.Via(proxy.URL(), proxy.CA()); err != nil {
		t.Fatal(err)
	}
	return r, proxy
}

// alarms are texts that no manager may write to its log.
var alarms = []string{"WARNING: DATA RACE", "ALTERED!"}

// Run starts a manager with the given options. It is stopped gracefully at the end of the test. The
// next test finds the Lease free in any case.
func (f *Fleet) Run(t testing.TB, r *cluster.Replica, o cluster.ManagerOptions) *cluster.Manager {
	t.Helper()
	if o.Binary == "" {
		o.Binary = f.Binary
	}
	m, err := f.StartManager(r, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.FreeLease(t, m) })
	StopAtEnd(t, m)
	return m
}

// StopAtEnd stops a manager gracefully at the end of the test and checks its log.
func StopAtEnd(t testing.TB, m *cluster.Manager) {
	t.Helper()
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("log of %s:\n%s", m.Pod, m.Tail(25))
		}
		_ = m.Signal(syscall.SIGCONT)
		// A test that cares about the result has stopped it before.
		_ = m.Stop(context.Background(), grace)
		log, err := os.ReadFile(m.Log)
		if err != nil {
			t.Error(err)
		}
		for _, alarm := range alarms {
			if strings.Contains(string(log), alarm) {
				t.Errorf("%s: %s\n%s", m.Pod, alarm, log)
			}
		}
	})
}

// RunReplica starts a manager as a new replica.
func (f *Fleet) RunReplica(ctx context.Context, t testing.TB, args ...string) *cluster.Manager {
	t.Helper()
	return f.Run(t, f.NewReplica(ctx, t), cluster.ManagerOptions{Args: args})
}

// RunLeader starts a manager and waits until it leads.
func (f *Fleet) RunLeader(ctx context.Context, t testing.TB, args ...string) *cluster.Manager {
	t.Helper()
	m := f.RunReplica(ctx, t, args...)
	f.WaitForLeader(ctx, t, m)
	return m
}

// RunReleased is RunLeader with the manager as it is released, for measurements.
func (f *Fleet) RunReleased(ctx context.Context, t testing.TB, args ...string) *cluster.Manager {
	t.Helper()
	binary, err := cluster.BuildProgram(ctx, "cmd/manager", false)
	if err != nil {
		t.Fatal(err)
	}
	m := f.Run(t, f.NewReplica(ctx, t), cluster.ManagerOptions{Binary: binary, Args: args, Env: []string{"KUBE_CACHE_MUTATION_DETECTOR=false"}})
	f.WaitForLeader(ctx, t, m)
	return m
}

// RunStandby starts a manager beside a leader and waits until it is ready.
func (f *Fleet) RunStandby(ctx context.Context, t testing.TB, args ...string) *cluster.Manager {
	t.Helper()
	m := f.RunReplica(ctx, t, args...)
	Eventually(ctx, t, func() error { return Ready(m) })
	return m
}

const (
	unwanted = "these tests need a control plane: run them with make, or with -run"
	noTests  = "testing: warning: no tests to run\n" // go test then says so beside the package
)

// Wanted reports whether tests on a control plane are asked for: by make, which sets CONTROLPLANE, or by
// name. `go test ./...` would build one first, and then take an hour.
func Wanted() bool {
	flag.Parse()
	return os.Getenv("CONTROLPLANE") != "" || flag.Lookup("test.run").Value.String()+flag.Lookup("test.list").Value.String() != ""
}

// Require skips a test unless it is Wanted, for a package without Main.
func Require(t testing.TB) {
	t.Helper()
	if !Wanted() {
		t.Skip(unwanted)
	}
}

// Main calls the preparations, runs the tests of a package with a fleet in *f, and returns the exit
// code. The code is 1 also if a manager was refused a request that no test expects to be refused.
// The context of the preparations ends after the tests. However the program ends, the fleet ends
// with it. It runs no tests unless they are Wanted.
func Main(m *testing.M, f **Fleet, o Options, prepare ...func(context.Context) error) int {
	if !Wanted() {
		fmt.Println(noTests + unwanted)
		return 0
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	fail := func(err error) int {
		fmt.Fprintln(os.Stderr, "FAIL:", err)
		return 1
	}
	var err error
	if *f, err = Start(ctx, o); err != nil {
		return fail(err)
	}
	defer func() { _ = (*f).Stop() }()
	for _, do := range prepare {
		if err := do(ctx); err != nil {
			return fail(err)
		}
	}
	code := m.Run()
	if err := (*f).Refused(ctx); err != nil {
		return fail(fmt.Errorf("permissions of managers: %w", err))
	}
	return code
}
