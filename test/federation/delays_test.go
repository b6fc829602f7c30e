// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package federation

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"

	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// compareDelays compares how long changes take until they are written in the members that answer, usually and
// while something happens.
func (s *scene) compareDelays(title string, disturb func(change func())) {
	s.Helper()
	var usual, disturbed []time.Duration
	for range 2 {
		s.waitUntilPropagated()
		usual = append(usual, s.delays()...)
		disturb(func() { disturbed = append(disturbed, s.delays()...) })
	}
	slices.Sort(usual)
	slices.Sort(disturbed)
	s.Logf("time until a change is written in a member: p50 %s, p99 %s; while %s: p50 %s, p99 %s",
		quantile(usual, 0.5), quantile(usual, 0.99), title, quantile(disturbed, 0.5), quantile(disturbed, 0.99))
	if quantile(disturbed, 0.5) > 2*quantile(usual, 0.5)+20*time.Millisecond {
		s.Errorf("changes take longer while %s", title)
	}
}

// delays changes objects at a steady rate, and returns how long each change took until it was written in each
// member that answers.
func (s *scene) delays() (delays []time.Duration) {
	s.Helper()
	changeTimes := map[string]time.Time{}
	for i := range min(fleet.Setting(s.T, "CHANGES", 200), s.objects) {
		u := object(s.T, fmt.Sprintf("kind: FederatedConfigMap, metadata: {name: f-%d}", i))
		u.SetNamespace(s.members.shop)
		changeTimes[u.GetName()] = time.Now()
		s.patch(u, fmt.Sprintf(`{"spec":{"template":{"data":{"content":"changed at %d"}}}}`, time.Now().UnixNano()))
		fleet.Wait(s.ctx, 300*time.Millisecond)
	}
	want := s.size * len(changeTimes)
	if s.hangingMember != "" {
		want -= len(changeTimes)
	}
	fleet.Eventually(fleet.Within(s.ctx, s.T, fleet.Patience), s.T, func() error {
		fleet.Wait(s.ctx, time.Second)
		delays = nil
		for path, at := range s.writeTimes() {
			if changeTime, isChanged := changeTimes[path[strings.LastIndex(path, "/")+1:]]; isChanged && at.After(changeTime) {
				delays = append(delays, at.Sub(changeTime))
			}
		}
		if len(delays) < want {
			return fmt.Errorf("%d of %d changes were written", len(delays), want)
		}
		return nil
	})
	return delays
}

// TestLongRemoteStatuses changes the status of 1,000 Deployments every second. It compares how long changes
// of other objects take while these statuses are collected and while they are not, and counts how often the
// status of each federated Deployment is written. The goal is a delay of 1.1 times as long; the bound leaves
// room for a busy machine.
func TestLongRemoteStatuses(t *testing.T) {
	m := &members{T: t, ctx: fleet.Within(t.Context(), t, time.Hour)}
	shared.InstallWith(m.ctx, t, "federation")
	m.configure(`{"featureGates":[{"name":"RawResourceStatusCollection","configuration":"Enabled"}]}`)
	config := object(t, "kind: FederatedTypeConfig, metadata: {name: deployments.apps}")
	setCollection := func(m *members, value string) { m.patch(config, `{"spec":{"statusCollection":"`+value+`"}}`) }
	t.Cleanup(func() { setCollection(&members{T: t, ctx: context.Background()}, "Disabled") })
	m.runReleased()
	s := newScene(m, 2, 200, fleet.Setting(t, "DEPLOYMENTS", 1000))
	s.waitUntilPropagated()
	ctx, stop := context.WithCancel(m.ctx)
	defer stop()
	go func() {
		for ; ctx.Err() == nil; fleet.Wait(ctx, time.Second) {
			s.version.Add(1)
		}
	}()
	s.compareDelays("the statuses of other objects are collected", func(change func()) {
		setCollection(m, "Enabled")
		s.waitForStatuses(s.version.Load())
		begin := time.Now()
		change()
		elapsed := time.Since(begin)
		writes, total, most := map[string]int{}, 0, 0
		for _, e := range shared.AuditSince(t, begin, func(e auditv1.Event) bool {
			return e.Verb == "patch" && e.ObjectRef != nil && e.ObjectRef.Namespace == m.shop && e.ObjectRef.Resource == "federateddeployments" && e.ObjectRef.Subresource == "status"
		}) {
			writes[e.ObjectRef.Name]++
			total, most = total+1, max(most, writes[e.ObjectRef.Name])
		}
		t.Logf("%d statuses changed each second for %s: %d writes, %d at most of one object", s.deployments, elapsed.Round(time.Second), total, most)
		if limit := int((elapsed+time.Second)/(5*time.Second)) + 1; most > limit { // a request may be late
			t.Errorf("want %d writes of one object at most", limit)
		}
		s.waitForStatuses(s.version.Load())
		setCollection(m, "Disabled")
	})
}

// waitForStatuses waits until every federated Deployment has a status from each member that is not older than
// a version.
func (s *scene) waitForStatuses(version int64) {
	s.Helper()
	fleet.Eventually(fleet.Within(s.ctx, s.T, 5*time.Minute), s.T, func() error {
		fleet.Wait(s.ctx, 2*time.Second)
		list, err := s.listObjects(s.ctx, "FederatedDeployment")
		if err != nil {
			return err
		}
		for _, u := range list.Items {
			clusters, _, _ := unstructured.NestedSlice(u.Object, "status", "clusters")
			for _, c := range clusters {
				if ready, _, _ := unstructured.NestedInt64(c.(map[string]any), "remoteStatus", "readyReplicas"); ready < version {
					return fmt.Errorf("the status of %s is %d, want %d", u.GetName(), ready, version)
				}
			}
		}
		return nil
	})
}
