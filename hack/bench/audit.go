// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"strings"
	"time"

	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
)

// auditTail keeps what is added to the audit log. The timestamps are kube-apiserver's, by the clock
// of this machine.
type auditTail struct {
	log    *cluster.AuditTail
	events []auditv1.Event
}

// tailAudit starts at the current end of the log.
func (b *bench) tailAudit() (*auditTail, error) {
	logs, err := b.cluster.TailAudit()
	if err != nil {
		return nil, err
	}
	return &auditTail{log: logs[0]}, nil
}

// read returns all events since the tail began.
func (t *auditTail) read() ([]auditv1.Event, error) {
	added, err := t.log.Read()
	t.events = append(t.events, added...)
	return t.events, err
}

// count returns how many events match.
func (t *auditTail) count(match func(auditv1.Event) bool) (int, error) {
	events, err := t.read()
	n := 0
	for _, e := range events {
		if match(e) {
			n++
		}
	}
	return n, err
}

// awaitEvent waits for the first event that matches.
func (t *auditTail) awaitEvent(ctx context.Context, what string, match func(auditv1.Event) bool) (event auditv1.Event, err error) {
	err = eventually(ctx, 20*time.Millisecond, what, func(context.Context) error {
		events, err := t.read()
		if err != nil {
			return err
		}
		for _, e := range events {
			if match(e) {
				event = e
				return nil
			}
		}
		return errNotYet
	})
	return event, err
}

type notYetError struct{}

func (notYetError) Error() string { return "not yet" }

var errNotYet = notYetError{}

// isRequest reports whether the event is a request that counts as load: any but a watch, whether or
// not it succeeded.
func isRequest(e auditv1.Event) bool {
	return e.Stage == auditv1.StageResponseComplete && e.Verb != "watch"
}

// hasResource reports whether the event concerns objects of the resource. Some requests concern no
// object.
func hasResource(e auditv1.Event, resource string) bool {
	return e.ObjectRef != nil && e.ObjectRef.Resource == resource
}

func isLeaseRequest(e auditv1.Event) bool { return hasResource(e, "leases") }

// isWriteOf reports whether the event is a write of the named object, or of one whose name begins
// with that name, such as the ReplicaSet of a Deployment. Writing an Event about it does not count.
func isWriteOf(e auditv1.Event, namespace, name string) bool {
	if !cluster.AuditWrite(e) || e.ObjectRef == nil || e.ObjectRef.Resource == "events" || e.ObjectRef.Namespace != namespace {
		return false
	}
	return e.ObjectRef.Name == name || strings.HasPrefix(e.ObjectRef.Name, name+"-")
}
