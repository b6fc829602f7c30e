// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package fleet is what the tests of managers as processes share: one control plane for a package's tests, replicas on
// it, and waiting for what they do.
package fleet

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/hack/cluster/faultproxy"
)

// ShortTimings are the shortest round ones that are safe, for tests that wait for a lease to expire.
var ShortTimings = []string{"--leader-elect-lease-duration=3s", "--leader-elect-renew-deadline=2s", "--leader-elect-retry-period=500ms"}

// Fleet is a control plane with everything of deploy/ but the Deployment, and managers on it.
type Fleet struct {
	*cluster.Cluster
	Admin  *kubernetes.Clientset
	Binary string // of the manager

	replicas   atomic.Int32
	managers   atomic.Int32       // that were started
	deployment *appsv1.Deployment // as installed

	mu       sync.Mutex
	starts   []interval // of the API server
	expected []func(auditv1.Event) bool
}

// Start builds the manager, with the race detector if asked, and starts a control plane.
func Start(ctx context.Context, o cluster.Options, race bool) (_ *Fleet, err error) {
	f := &Fleet{}
	if f.Binary, err = cluster.BuildManager(ctx, race); err != nil {
		return nil, err
	}
	if o.Progress == nil {
		o.Progress = os.Stderr
	}
	if f.Cluster, err = cluster.Start(ctx, o); err != nil {
		return nil, err
	}
	if f.Admin, err = kubernetes.NewForConfig(f.AdminConfig()); err != nil {
		return nil, errors.Join(err, f.Stop())
	}
	overlay, err := f.Overlay()
	if err == nil {
		err = f.Install(ctx, overlay)
	}
	if err != nil {
		return nil, errors.Join(err, f.Stop())
	}
	return f, nil
}

// NewReplica makes a Pod and a token that is bound to it for one manager.
func (f *Fleet) NewReplica(ctx context.Context, t testing.TB) *cluster.Replica {
	t.Helper()
	r, err := f.Cluster.NewReplica(ctx, fmt.Sprint(f.replicas.Add(1)))
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// NewReplicaBehindProxy is NewReplica for one that reaches the API server through a proxy of its own.
func (f *Fleet) NewReplicaBehindProxy(ctx context.Context, t testing.TB) (*cluster.Replica, *faultproxy.Proxy) {
	t.Helper()
	proxy, err := faultproxy.Start(f.AdminConfig())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = proxy.Close() })
	r := f.NewReplica(ctx, t)
	if err := r.Via(proxy.URL(), proxy.CA()); err != nil {
		t.Fatal(err)
	}
	return r, proxy
}

// StartManager is cluster.StartManager with the arguments and the environment of the installed Deployment before those
// that are given.
func (f *Fleet) StartManager(r *cluster.Replica, o cluster.ManagerOptions) (*cluster.Manager, error) {
	o, err := AsDeployed(f.deployment.Spec.Template.Spec, r.Pod, o)
	if err != nil {
		return nil, err
	}
	f.managers.Add(1)
	return f.Cluster.StartManager(r, o)
}

// Run starts a manager with the given options. It is stopped at the end of the test, with grace, so that the next test
// finds the lease released.
func (f *Fleet) Run(t testing.TB, r *cluster.Replica, o cluster.ManagerOptions) *cluster.Manager {
	t.Helper()
	if o.Binary == "" {
		o.Binary = f.Binary
	}
	m, err := f.StartManager(r, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("log of %s:\n%s", m.Pod, m.Tail(60))
		}
		_ = m.Signal(syscall.SIGCONT)
		_ = m.Stop(context.Background(), grace) // a test that cares has stopped it before
		if log, err := os.ReadFile(m.Log); err == nil && strings.Contains(string(log), "WARNING: DATA RACE") {
			t.Errorf("data race in %s:\n%s", m.Pod, log)
		}
	})
	return m
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

// RunStandby starts a manager beside a leader and waits until it is ready.
func (f *Fleet) RunStandby(ctx context.Context, t testing.TB, args ...string) *cluster.Manager {
	t.Helper()
	m := f.RunReplica(ctx, t, args...)
	Eventually(ctx, t, func() error { return Ready(m) })
	return m
}

// Main runs the tests of a package with a fleet in *f and returns the exit code, which is 1 also if a manager was refused
// what no test expects. What is still alive of the fleet when the program ends in another way ends with it.
func Main(m *testing.M, f **Fleet, o cluster.Options, race bool) int {
	var err error
	if *f, err = Start(context.Background(), o, race); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer func() { _ = (*f).Stop() }()
	code := m.Run()
	if err := (*f).Refused(context.Background()); err != nil {
		fmt.Fprintf(os.Stderr, "FAIL: permissions of managers:\n%v\n", err)
		return 1
	}
	return code
}
