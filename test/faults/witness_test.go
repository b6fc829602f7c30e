// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
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

	"github.com/quartermaster-dev/quartermaster/pkg/election/apifence"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
	"github.com/quartermaster-dev/quartermaster/test/internal/judge"
)

// witness collects the history of one test from the audit log, and from watches what the log does
// not have.
type witness struct {
	*judge.History
	world *world

	mu       sync.Mutex // guards reading the log
	log      *os.File
	rest     []byte // of an incomplete line
	failures []error
	refused  int // writes that the fence in the API server has refused
}

// newWitness begins to watch before the test's replicas exist.
func newWitness(ctx context.Context, t testing.TB, w *world) *witness {
	t.Helper()
	log, err := os.Open(shared.AuditLog())
	if err != nil {
		t.Fatal(err)
	}
	v := &witness{
		History: judge.New(types.NamespacedName{Namespace: metav1.NamespaceSystem, Name: fleet.LeaseName}, fleet.StateAnnotation, isReplica),
		world:   w, log: log,
	}
	if _, err := log.Seek(0, io.SeekEnd); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(ctx)
	var watches sync.WaitGroup
	leases, deployments := shared.Admin.CoordinationV1().Leases(metav1.NamespaceSystem), shared.Admin.AppsV1().Deployments(w.namespace)
	watches.Go(func() {
		v.follow(ctx, func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) { return leases.List(ctx, o) }, leases.Watch)
	})
	watches.Go(func() {
		v.follow(ctx, func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			return deployments.List(ctx, o)
		}, deployments.Watch)
	})
	t.Cleanup(func() {
		cancel()
		watches.Wait()
		_ = log.Close()
	})
	return v
}

// follow sees every version of a resource's objects, except for those that come and go while the
// API server is down.
func (v *witness) follow(ctx context.Context, list func(context.Context, metav1.ListOptions) (runtime.Object, error),
	open func(context.Context, metav1.ListOptions) (watch.Interface, error)) {
	from := ""
	for ctx.Err() == nil {
		if from == "" {
			all, err := list(ctx, metav1.ListOptions{})
			if err == nil {
				err = meta.EachListItem(all, func(o runtime.Object) error { return v.see(o, false) })
				from = all.(metav1.ListInterface).GetResourceVersion()
			}
			if err != nil {
				wait(ctx, 50*time.Millisecond)
				continue
			}
		}
		w, err := open(ctx, metav1.ListOptions{ResourceVersion: from})
		if err != nil {
			from = "" // the version may be too old
			wait(ctx, 50*time.Millisecond)
			continue
		}
		for e := range w.ResultChan() {
			if e.Type == watch.Error {
				from = ""
				break
			}
			if err := v.see(e.Object, e.Type == watch.Deleted); err != nil {
				v.fail(err)
			}
			from = e.Object.(metav1.Object).GetResourceVersion()
		}
		w.Stop()
	}
}

func (v *witness) see(o runtime.Object, deleted bool) error {
	switch o := o.(type) {
	case *coordinationv1.Lease:
		return v.AddLease(o, deleted)
	case *appsv1.Deployment:
		if deleted {
			return nil
		}
		return v.AddObject("deployments", o)
	}
	return fmt.Errorf("a watch has shown a %T", o)
}

func (v *witness) fail(err error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.failures = append(v.failures, err)
}

// judge reads what is new in the audit log and judges everything.
func (v *witness) judge() (*judge.Judgement, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if err := v.readLog(); err != nil {
		return nil, err
	}
	return v.Judge(), errors.Join(v.failures...)
}

func (v *witness) readLog() error {
	reader := bufio.NewReaderSize(v.log, 1<<20)
	for {
		line, err := reader.ReadBytes('\n')
		line = append(v.rest, line...)
		v.rest = nil
		if errors.Is(err, io.EOF) {
			v.rest = line
			return nil
		}
		if err != nil {
			return err
		}
		// Most lines are irrelevant and need not be parsed.
		if !bytes.Contains(line, []byte(`"resource":"leases"`)) && !bytes.Contains(line, []byte(`"resource":"deployments"`)) ||
			bytes.Contains(line, []byte(`"verb":"get"`)) || bytes.Contains(line, []byte(`"verb":"watch"`)) {
			continue
		}
		var event auditv1.Event
		if err := json.Unmarshal(line, &event); err != nil {
			return fmt.Errorf("read the audit log: %w", err)
		}
		if ref := event.ObjectRef; ref != nil && ref.Resource == "deployments" && ref.Namespace != v.world.namespace {
			continue
		}
		if isRefusal(event) {
			v.refused++
		}
		if err := v.AddEvent(event); err != nil {
			return err
		}
	}
}

// isRefusal reports whether the fence in the API server has refused a request.
func isRefusal(e auditv1.Event) bool {
	return e.ResponseStatus != nil && e.ResponseStatus.Code == http.StatusForbidden && strings.Contains(e.ResponseStatus.Message, apifence.PolicyName)
}

// wait waits for d or until ctx ends.
func wait(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}
