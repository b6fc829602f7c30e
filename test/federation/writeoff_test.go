// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package federation

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/federation/policy"
	"github.com/quartermaster-dev/quartermaster/test/internal/faultproxy"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// newMembersWithOutages is a federation with a member that can be away, and a short grace.
func newMembersWithOutages(t *testing.T, patience time.Duration) *members {
	t.Helper()
	m := newMembers(t, patience, cluster.Options{WithoutControllerManager: true})
	m.useProxy()
	m.configure(`{"controllerDuration":{"availableDelay":"1s"},"clusterHealthCheck":{"period":"1s","timeout":"1s","failureThreshold":2}}`)
	m.shop = shared.NewNamespace(m.ctx, t, nil)
	m.federateNamespace(m.shop)
	return m
}

// shortGraceArgs are the flags of a manager that writes off early.
var shortGraceArgs = []string{"--controllers=federation", "--federation-unsafe-endpoints", "--federation-unreachable-grace-period=4s"}

// patientArgs are timings with which a busy machine ends no term.
var patientArgs = []string{"--leader-elect-lease-duration=2m", "--leader-elect-renew-deadline=90s", "--leader-elect-retry-period=2s"}

// createMany creates federated ConfigMaps from a name on.
func (m *members) createMany(begin, end int, content string) (objects []*unstructured.Unstructured) {
	m.Helper()
	for i := begin; i < end; i++ {
		objects = append(objects, m.create(fmt.Sprintf("kind: FederatedConfigMap, metadata: {name: f-%d}, spec: {template: {data: {a: '%s'}}, %s}", i, content, bothMembers)))
	}
	return objects
}

// deleteAll deletes federated objects.
func (m *members) deleteAll(objects []*unstructured.Unstructured) {
	m.Helper()
	for _, u := range objects {
		assert.NoError(m, client(u).Delete(m.ctx, u.GetName(), metav1.DeleteOptions{}))
	}
}

// waitUntilGone waits until federated objects are gone.
func (m *members) waitUntilGone(objects []*unstructured.Unstructured) {
	m.Helper()
	fleet.Eventually(fleet.Within(m.ctx, m.T, 2*fleet.Patience), m.T, func() error {
		for _, u := range objects {
			current, err := client(u).Get(m.ctx, u.GetName(), metav1.GetOptions{})
			if err == nil {
				err = fmt.Errorf("%s is there, %v", u.GetName(), current.Object["status"])
			}
			if !apierrors.IsNotFound(err) {
				return err
			}
		}
		return nil
	})
}

// pendingRemovals returns the names of the test's federated objects whose removal is recorded.
func (m *members) pendingRemovals() (names []string, err error) {
	list, err := shared.Admin.CoreV1().ConfigMaps(namespace).List(m.ctx, metav1.ListOptions{LabelSelector: policy.WriteOffLabel})
	if err != nil {
		return nil, err
	}
	for _, cm := range list.Items {
		record, err := policy.ReadWriteOff(cm.Name, cm.Data)
		if err != nil {
			return nil, err
		}
		if record.Namespace == m.shop { // others are what an earlier test left
			names = append(names, record.Name)
		}
	}
	return names, nil
}

// waitForRemovals waits until no removal is recorded any more, and returns the ConfigMaps in c2.
func (m *members) waitForRemovals() map[string]corev1.ConfigMap {
	m.Helper()
	fleet.Eventually(fleet.Within(m.ctx, m.T, 2*fleet.Patience), m.T, func() error {
		names, err := m.pendingRemovals()
		if err == nil && len(names) > 0 {
			err = fmt.Errorf("%d removals are recorded, such as that of %s", len(names), names[0])
		}
		return err
	})
	list, err := m.admin2.CoreV1().ConfigMaps(m.shop).List(m.ctx, metav1.ListOptions{})
	assert.NoError(m, err)
	remaining := map[string]corev1.ConfigMap{}
	for _, cm := range list.Items {
		remaining[cm.Name] = cm
	}
	return remaining
}

// TestWrittenOffRemovalIsMadeLater has a member that is away while objects are deleted, made again, changed,
// and made anew by somebody else in the member.
func TestWrittenOffRemovalIsMadeLater(t *testing.T) {
	m := newMembersWithOutages(t, 6*fleet.Patience)
	shared.RunLeader(m.ctx, t, shortGraceArgs...)
	const deleted, recreated, replaced, total = 30, 10, 5, 60 // f-0 and so on
	objects := m.createMany(0, total, "b")
	for _, u := range objects {
		m.waitForStatus(u, "c1= c2=")
	}
	m.proxy.Partition(faultproxy.Hang)
	m.waitForCondition("c2", "Offline=True")
	tails := m.tailAudits()
	m.deleteAll(objects[:deleted])
	for _, u := range objects[deleted:] {
		m.patch(u, `{"spec":{"template":{"data":{"a":"c"}}}}`)
	}
	m.waitUntilGone(objects[:deleted])
	if names, err := m.pendingRemovals(); err != nil || len(names) != deleted {
		t.Errorf("%d removals are recorded, want %d: %v", len(names), deleted, err)
	}
	m.createMany(0, recreated, "d")
	for i := recreated; i < recreated+replaced; i++ {
		name := fmt.Sprintf("f-%d", i)
		err := m.admin2.CoreV1().ConfigMaps(m.shop).Delete(m.ctx, name, metav1.DeleteOptions{})
		if err == nil {
			m.createStray(name, map[string]string{policy.ManagedLabel: "true"})
		} else {
			t.Error(err)
		}
	}
	m.proxy.Heal()
	remaining := m.waitForRemovals()
	for i := range total {
		name, want := fmt.Sprintf("f-%d", i), "c"
		if i < recreated {
			want = "d"
		}
		if i >= recreated && i < recreated+replaced {
			cm, exists := remaining[name]
			if !exists || cm.Labels[policy.ManagedLabel] != "" {
				t.Errorf("%s, which is newer than its record, is %v", name, cm)
			}
			continue
		}
		if i >= recreated+replaced && i < deleted {
			if cm, exists := remaining[name]; exists {
				t.Errorf("%s is still there: %v", name, cm)
			}
			continue
		}
		m.waitForObject(m.c2, configMaps, m.shop, name, hasField(want, "data", "a"))
	}
	// The namespace of an earlier test may still be going.
	inShop := "c2: delete /api/v1/namespaces/" + m.shop + "/"
	deletions := slices.DeleteFunc(m.memberWrites(tails), func(w string) bool { return !strings.HasPrefix(w, inShop) })
	if len(deletions) != deleted-recreated-replaced {
		t.Errorf("%d deletions in c2, want %d:\n%s", len(deletions), deleted-recreated-replaced, strings.Join(deletions, "\n"))
	}
}

// TestLongAbsenceOfAMemberIsMadeUpFor has a member that is away for 10 minutes while objects are deleted,
// made again and changed, with the usual settings.
func TestLongAbsenceOfAMemberIsMadeUpFor(t *testing.T) {
	m := newMembers(t, time.Hour, cluster.Options{WithoutControllerManager: true})
	m.useProxy()
	m.shop = shared.NewNamespace(m.ctx, t, nil)
	m.federateNamespace(m.shop)
	minutes := func(name string, otherwise int) time.Duration {
		return time.Duration(fleet.Setting(t, name, otherwise)) * time.Minute
	}
	grace, absence := minutes("GRACE", 5), minutes("ABSENCE", 10)
	shared.RunLeader(m.ctx, t, append(patientArgs, "--controllers=federation", "--federation-unsafe-endpoints", "--federation-unreachable-grace-period="+grace.String())...)
	const deleted, recreated, changed, total = 500, 100, 500, 1050 // f-0 and so on
	objects := m.createMany(0, total, "b")
	for _, u := range objects {
		m.waitForStatus(u, "c1= c2=")
	}
	m.proxy.Partition(faultproxy.Hang)
	outageBegin := time.Now()
	m.waitForCondition("c2", "Offline=True")
	for _, u := range objects[deleted : deleted+changed] {
		m.patch(u, `{"spec":{"template":{"data":{"a":"c"}}}}`)
	}
	m.deleteAll(objects[:deleted])
	m.waitWithin(grace+time.Minute, "the deleted objects are gone", func() error {
		list, err := client(objects[0]).List(m.ctx, metav1.ListOptions{})
		if err == nil && len(list.Items) != total-deleted {
			err = fmt.Errorf("%d objects are there, want %d", len(list.Items), total-deleted)
		}
		return err
	})
	if names, err := m.pendingRemovals(); err != nil || len(names) != deleted {
		t.Errorf("%d removals are recorded, want %d: %v", len(names), deleted, err)
	}
	m.createMany(0, recreated, "d")
	fleet.Wait(m.ctx, time.Until(outageBegin.Add(absence)))

	want, writes := map[string]string{}, []string{}
	for i := range total {
		name, verb := fmt.Sprintf("f-%d", i), "update"
		switch {
		case i < recreated:
			want[name] = "d"
		case i < deleted:
			verb = "delete"
		case i < deleted+changed:
			want[name] = "c"
		default:
			want[name], verb = "b", ""
		}
		if verb != "" {
			writes = append(writes, fmt.Sprintf("c2: %s /api/v1/namespaces/%s/configmaps/%s?timeout=10s", verb, m.shop, name))
		}
	}
	tails := m.tailAudits()
	m.proxy.Heal()
	m.waitForCondition("c2", "Ready=True")
	m.waitWithin(time.Minute, "the member is as it should be", func() error {
		list, err := m.admin2.CoreV1().ConfigMaps(m.shop).List(m.ctx, metav1.ListOptions{LabelSelector: policy.ManagedLabel + "=true"})
		if err != nil {
			return err
		}
		if len(list.Items) != len(want) {
			return fmt.Errorf("the member has %d objects, want %d", len(list.Items), len(want))
		}
		for _, cm := range list.Items {
			if cm.Data["a"] != want[cm.Name] {
				return fmt.Errorf("%s in the member is %v", cm.Name, cm.Data)
			}
		}
		return nil
	})
	m.waitForRemovals()
	slices.Sort(writes)
	got := slices.DeleteFunc(m.memberWrites(tails), func(w string) bool { return strings.HasPrefix(w, "c1") })
	if !slices.Equal(got, writes) {
		t.Errorf("wrote %d times in the member, want %d:\n%s", len(got), len(writes), strings.Join(got, "\n"))
	}
}

// waitWithin waits until something is as it should be, and fails if that takes longer than d.
func (m *members) waitWithin(d time.Duration, title string, check func() error) {
	m.Helper()
	begin := time.Now()
	fleet.Eventually(fleet.Within(m.ctx, m.T, 2*d), m.T, func() error {
		fleet.Wait(m.ctx, 500*time.Millisecond)
		return check()
	})
	elapsed := time.Since(begin)
	m.Logf("%s after %s", title, elapsed.Round(100*time.Millisecond))
	if elapsed > d {
		m.Errorf("that took longer than %s", d)
	}
}

// TestForbiddenTypeIsWrittenOff takes the manager's permission for a type, deletes an object of the type, and
// gives the permission back.
func TestForbiddenTypeIsWrittenOff(t *testing.T) {
	m := newMembers(t, 6*fleet.Patience, cluster.Options{WithoutControllerManager: true}, "namespaces", "configmaps")
	m.configure(`{"controllerDuration":{"availableDelay":"1s"}}`)
	m.shop = shared.NewNamespace(m.ctx, t, nil)
	m.federateNamespace(m.shop)
	manager := shared.RunLeader(m.ctx, t, shortGraceArgs...)
	f := m.createMany(0, 2, "b")
	m.waitForStatus(f[0], "c1= c2=")
	m.waitForStatus(f[1], "c1= c2=")
	m.permitResources("namespaces")
	m.stop(manager.Process) // its watches would go on
	shared.RunLeader(m.ctx, t, shortGraceArgs...)
	m.waitForStatus(f[1], "c1= c2=RetrievalFailed")
	fleet.Eventually(m.ctx, m.T, func() error { // an object that is created in the second of the deletion may be newer
		current, err := m.admin2.CoreV1().ConfigMaps(m.shop).Get(m.ctx, "f-0", metav1.GetOptions{})
		if err == nil && time.Since(current.CreationTimestamp.Time) < time.Second {
			err = errors.New("f-0 has just been created")
		}
		return err
	})
	m.deleteAll(f[:1])
	m.waitUntilGone(f[:1])
	m.waitForObject(m.c2, configMaps, m.shop, "f-0", managed)
	if names, err := m.pendingRemovals(); err != nil || len(names) != 1 {
		t.Errorf("recorded are the removals %q, want that of f-0: %v", names, err)
	}
	m.permitResources("namespaces", "configmaps")
	current := m.waitForRemovals()
	if _, exists := current["f-0"]; exists {
		t.Error("f-0 is still there")
	}
	m.waitForStatus(f[1], "c1= c2=")
}

// TestLongWriteOffsSurviveKills kills the leader while it writes off and while the member makes the removals.
func TestLongWriteOffsSurviveKills(t *testing.T) {
	m := newMembersWithOutages(t, time.Hour)
	c := &campaign{load: &load{members: m}}
	t.Cleanup(func() {
		for _, manager := range c.managers {
			shared.FreeLease(t, manager)
		}
	})
	// A busy machine ends no term of this length, and the other replica notices a kill at once.
	args := []string{"--federation-unreachable-grace-period=4s", "--leader-elect-lease-duration=30s", "--leader-elect-renew-deadline=20s", "--leader-elect-retry-period=2s"}
	for i := range c.replicas {
		c.replicas[i] = shared.NewReplica(m.ctx, t)
		c.startReplica(i, args...)
	}
	killLeader := func() {
		i := c.awaitLeader(-1)
		c.managers[i].Kill()
		for i, manager := range c.managers {
			if manager.ExitCode() >= 0 { // also one whose term a busy machine has ended
				c.startReplica(i, args...)
			}
		}
	}
	size := fleet.Setting(t, "WRITEOFFS", 100)
	for round := range fleet.Setting(t, "ROUNDS", 10) {
		objects := m.createMany(0, size, fmt.Sprint(round))
		for _, u := range objects {
			m.waitForStatus(u, "c1= c2=")
		}
		m.proxy.Partition(faultproxy.Hang)
		m.waitForCondition("c2", "Offline=True")
		m.deleteAll(objects)
		fleet.Eventually(fleet.Within(m.ctx, t, 2*fleet.Patience), t, func() error {
			names, err := m.pendingRemovals()
			if err == nil && len(names) == 0 {
				err = errors.New("nothing is written off yet")
			}
			return err
		})
		fleet.Wait(m.ctx, rand.N(2*time.Second))
		killLeader()
		m.waitUntilGone(objects)
		if names, err := m.pendingRemovals(); err != nil || len(names) != size {
			t.Errorf("round %d: %d removals are recorded, want %d: %v", round, len(names), size, err)
		}
		newer := map[string]bool{}
		for i := range (size + 9) / 10 {
			name := fmt.Sprintf("f-%d", (10*i+round)%size)
			newer[name] = true
			if err := m.admin2.CoreV1().ConfigMaps(m.shop).Delete(m.ctx, name, metav1.DeleteOptions{}); err != nil {
				t.Error(err)
			}
			m.createStray(name, map[string]string{policy.ManagedLabel: "true"})
		}
		m.proxy.Heal()
		fleet.Wait(m.ctx, rand.N(3*time.Second))
		killLeader()
		remaining := m.waitForRemovals()
		for _, u := range objects {
			if _, exists := remaining[u.GetName()]; exists != newer[u.GetName()] {
				t.Errorf("round %d: %s is there: %t, want %t", round, u.GetName(), exists, !exists)
			}
		}
		for name := range newer {
			if err := m.admin2.CoreV1().ConfigMaps(m.shop).Delete(m.ctx, name, metav1.DeleteOptions{}); err != nil {
				t.Error(err)
			}
		}
		t.Logf("round %d: %d removals were made, %d newer objects were kept", round, size-len(newer), len(newer))
	}
}
