// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"
)

// decision is the annotation of the audit log that distinguishes authorization from admission,
// which returns 403 too.
const decision = "authorization.k8s.io/decision"

// interval is a time in which an API server was starting.
type interval struct{ begin, end time.Time }

// Allowed reports whether authorization let the request pass.
func Allowed(e auditv1.Event) bool { return e.Annotations[decision] == "allow" }

// ExpectRefusals excuses refusals that match, because a test provokes them.
func (f *Fleet) ExpectRefusals(match func(auditv1.Event) bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.expected = append(f.expected, match)
}

// StartAPIServer calls cluster.StartAPIServer. Refusals meanwhile do not count.
func (f *Fleet) StartAPIServer(ctx context.Context) error {
	return f.excuseStart(func() error { return f.Cluster.StartAPIServer(ctx) })
}

// Backup calls cluster.Backup, which starts the API server anew. Refusals meanwhile do not count.
func (f *Fleet) Backup(ctx context.Context, name string) error {
	return f.excuseStart(func() error { return f.Cluster.Backup(ctx, name) })
}

// Restore calls cluster.Restore, which starts the API server anew. Refusals meanwhile do not count.
func (f *Fleet) Restore(ctx context.Context, name string) error {
	return f.excuseStart(func() error { return f.Cluster.Restore(ctx, name) })
}

func (f *Fleet) excuseStart(start func() error) error {
	begin := time.Now()
	err := start()
	f.mu.Lock()
	defer f.mu.Unlock()
	f.starts = append(f.starts, interval{begin, time.Now()})
	return err
}

// RestartAPIServer calls cluster.RestartAPIServer. Refusals meanwhile do not count.
func (f *Fleet) RestartAPIServer(ctx context.Context) error {
	if err := f.StopAPIServer(ctx); err != nil {
		return err
	}
	return f.StartAPIServer(ctx)
}

// Refused returns an error with the requests of managers that authorization has refused, for which
// deploy/ grants too little. A starting API server refuses everything until it has read the roles;
// these refusals do not count, nor do expected ones.
func (f *Fleet) Refused(ctx context.Context) error {
	managers, err := f.Accounts(ctx)
	if err != nil {
		return err
	}
	events, err := f.AuditEvents()
	if err != nil {
		return err
	}
	judged := 0
	refused := map[string]int{}
	for _, e := range events {
		if !managers[e.User.Username] {
			continue
		}
		judged++
		if e.Annotations[decision] == "forbid" && !f.isExcused(e) {
			refused[fmt.Sprintf("%s: %s %s (%s)", e.User.Username, e.Verb, requestPath(e), e.UserAgent)]++
		}
	}
	var errs []error
	if judged == 0 && f.replicas.Load() > 0 {
		errs = append(errs, errors.New("the audit log has no request of a manager: nothing is judged"))
	}
	for request, times := range refused {
		errs = append(errs, fmt.Errorf("refused %d times: %s", times, request))
	}
	return errors.Join(errs...)
}

// Accounts returns the user names of the ServiceAccounts of managers and their controllers.
func (f *Fleet) Accounts(ctx context.Context) (map[string]bool, error) {
	list, err := f.Admin.CoreV1().ServiceAccounts(metav1.NamespaceSystem).List(ctx,
		metav1.ListOptions{LabelSelector: "app.kubernetes.io/name=quartermaster"})
	if err != nil {
		return nil, err
	}
	names := map[string]bool{}
	for _, account := range list.Items {
		names["system:serviceaccount:"+account.Namespace+":"+account.Name] = true
	}
	return names, nil
}

// isExcused reports whether deploy/ is not the reason for a refusal.
func (f *Fleet) isExcused(e auditv1.Event) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, start := range f.starts {
		if at := e.RequestReceivedTimestamp.Time; at.After(start.begin) && at.Before(start.end) {
			return true
		}
	}
	for _, match := range f.expected {
		if match(e) {
			return true
		}
	}
	return false
}

// requestPath returns the request's URI without its query, which may differ between requests of the same
// list.
func requestPath(e auditv1.Event) string {
	p, _, _ := strings.Cut(e.RequestURI, "?")
	return p
}
