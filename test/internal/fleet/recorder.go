// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/pkg/election/apifence"
	"github.com/quartermaster-dev/quartermaster/test/internal/judge"
)

// Recorder collects the history of one test from the audit logs, and from watches what the log does
// not have.
type Recorder struct {
	*judge.History
	workloads *Workloads

	mu       sync.Mutex // guards what follows
	logs     []*cluster.AuditTail
	failures []error
	refused  int
}

// NewRecorder begins to watch before the test's replicas exist.
func (f *Fleet) NewRecorder(ctx context.Context, t testing.TB, w *Workloads) *Recorder {
	t.Helper()
	r := &Recorder{
		History:   judge.New(types.NamespacedName{Namespace: metav1.NamespaceSystem, Name: LeaseName}, StateAnnotation, IsReplica),
		workloads: w,
	}
	var err error
	if r.logs, err = f.TailAudit(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(ctx)
	var watches sync.WaitGroup
	leases, deployments := f.Admin.CoordinationV1().Leases(metav1.NamespaceSystem), f.Admin.AppsV1().Deployments(w.Namespace)
	watches.Go(func() {
		r.followVersions(ctx, func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) { return leases.List(ctx, o) }, leases.Watch)
	})
	watches.Go(func() {
		r.followVersions(ctx, func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			return deployments.List(ctx, o)
		}, deployments.Watch)
	})
	t.Cleanup(func() {
		cancel()
		watches.Wait()
	})
	return r
}

// followVersions sees every version of a resource's objects, except for those that come and go while the
// API server is down.
func (r *Recorder) followVersions(ctx context.Context, list func(context.Context, metav1.ListOptions) (runtime.Object, error),
	open func(context.Context, metav1.ListOptions) (watch.Interface, error)) {
	version := ""
	for ctx.Err() == nil {
		if version == "" {
			all, err := list(ctx, metav1.ListOptions{})
			if err == nil {
				err = meta.EachListItem(all, func(o runtime.Object) error { return r.addVersion(o, false) })
				version = all.(metav1.ListInterface).GetResourceVersion()
			}
			if err != nil {
				Wait(ctx, 50*time.Millisecond)
				continue
			}
		}
		w, err := open(ctx, metav1.ListOptions{ResourceVersion: version})
		if err != nil {
			version = "" // the version may be too old
			Wait(ctx, 50*time.Millisecond)
			continue
		}
		for e := range w.ResultChan() {
			if e.Type == watch.Error {
				version = ""
				break
			}
			if err := r.addVersion(e.Object, e.Type == watch.Deleted); err != nil {
				r.addFailure(err)
			}
			version = e.Object.(metav1.Object).GetResourceVersion()
		}
		w.Stop()
	}
}

func (r *Recorder) addVersion(o runtime.Object, deleted bool) error {
	switch o := o.(type) {
	case *coordinationv1.Lease:
		return r.AddLease(o, deleted)
	case *appsv1.Deployment:
		if deleted {
			return nil
		}
		return r.AddObject("deployments", o)
	}
	return fmt.Errorf("a watch has shown a %T", o)
}

func (r *Recorder) addFailure(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.failures = append(r.failures, err)
}

// Refused returns how many writes the fence in the API server has refused, as of the last Judge.
func (r *Recorder) Refused() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.refused
}

// Judge reads what is new in the audit logs and judges everything.
func (r *Recorder) Judge() (*judge.Judgement, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, log := range r.logs {
		if err := r.readLog(log); err != nil {
			return nil, err
		}
	}
	return r.History.Judge(), errors.Join(r.failures...)
}

func (r *Recorder) readLog(log *cluster.AuditTail) error {
	events, err := log.Read()
	if err != nil {
		return err
	}
	for _, e := range events {
		isWorkload := e.ObjectRef != nil && e.ObjectRef.Resource == "deployments" && e.ObjectRef.Namespace == r.workloads.Namespace
		isLease := e.ObjectRef != nil && e.ObjectRef.Resource == "leases"
		if !isWorkload && !isLease || e.Verb == "get" || e.Verb == "watch" {
			continue
		}
		if isRefusal(e) {
			r.refused++
		}
		if err := r.AddEvent(e); err != nil {
			return err
		}
	}
	return nil
}

// isRefusal reports whether the fence in the API server has refused a request.
func isRefusal(e auditv1.Event) bool {
	return e.ResponseStatus != nil && e.ResponseStatus.Code == http.StatusForbidden && strings.Contains(e.ResponseStatus.Message, apifence.PolicyName)
}
