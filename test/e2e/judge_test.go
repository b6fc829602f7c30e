// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"strings"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

var start = time.Date(2026, 11, 24, 12, 0, 0, 0, time.UTC)

// atSecond returns the time some seconds after start.
func atSecond(seconds float64) time.Time {
	return start.Add(time.Duration(seconds * float64(time.Second)))
}

func leaseHeldBy(seconds float64, holder string) version[*coordinationv1.Lease] {
	lease := &coordinationv1.Lease{}
	if holder != "" {
		lease.Spec.HolderIdentity = ptr.To(holder + "_0b7d8d5c")
	}
	return version[*coordinationv1.Lease]{at: atSecond(seconds), object: lease}
}

func TestFirstHandoverIsFound(t *testing.T) {
	deleted, gone := leaseHeldBy(12, "a"), leaseHeldBy(5, "z")
	deleted.deleted, gone.deleted = true, true
	for name, tc := range map[string]struct {
		leases []version[*coordinationv1.Lease]
		want   handover
		err    string
	}{
		"after a release the time counts from the release": {
			[]version[*coordinationv1.Lease]{leaseHeldBy(1, "a"), leaseHeldBy(11, "a"), leaseHeldBy(13, ""), leaseHeldBy(13.5, "b"), leaseHeldBy(20, "c")},
			handover{from: "a", to: "b", released: true, at: atSecond(13.5), took: 500 * time.Millisecond}, ""},
		"without a release the time counts from the question": {
			[]version[*coordinationv1.Lease]{leaseHeldBy(1, "a"), leaseHeldBy(14, "b")}, handover{from: "a", to: "b", at: atSecond(14), took: 4 * time.Second}, ""},
		"a deletion ends the holder's term too": {
			[]version[*coordinationv1.Lease]{leaseHeldBy(1, "a"), deleted, leaseHeldBy(12.5, ""), leaseHeldBy(14, "b")},
			handover{from: "a", to: "b", released: true, at: atSecond(14), took: 2 * time.Second}, ""},
		"the same Pod may follow itself after a release": {
			[]version[*coordinationv1.Lease]{leaseHeldBy(1, "a"), leaseHeldBy(11, ""), leaseHeldBy(12, "a")},
			handover{from: "a", to: "a", released: true, at: atSecond(12), took: time.Second}, ""},
		"what was before does not count": {
			[]version[*coordinationv1.Lease]{leaseHeldBy(1, "a"), leaseHeldBy(2, "b"), leaseHeldBy(12, "b")}, handover{from: "b"}, `nobody has followed "b"`},
		"the first leader follows nobody": {
			[]version[*coordinationv1.Lease]{leaseHeldBy(11, ""), leaseHeldBy(12, "a")}, handover{to: "a", at: atSecond(12), took: 2 * time.Second}, ""},
		"a deletion before does not count": {
			[]version[*coordinationv1.Lease]{leaseHeldBy(1, "z"), gone, leaseHeldBy(12, "a")}, handover{to: "a", at: atSecond(12), took: 2 * time.Second}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := firstHandover(tc.leases, atSecond(10))
			if tc.err != "" && (err == nil || err.Error() != tc.err) || tc.err == "" && err != nil {
				t.Errorf("error %v, not %q", err, tc.err)
			}
			if err == nil && got != tc.want {
				t.Errorf("%+v, not %+v", got, tc.want)
			}
		})
	}
}

// newPod returns a Pod of a ReplicaSet.
func newPod(name, node string, change ...func(*corev1.Pod)) corev1.Pod {
	pod := corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"pod-template-hash": "1"},
			OwnerReferences: []metav1.OwnerReference{{Kind: "ReplicaSet", Name: "rs", Controller: ptr.To(true)}}},
		Spec: corev1.PodSpec{NodeName: node},
	}
	for _, c := range change {
		c(&pod)
	}
	return pod
}

func markDeleted(pod *corev1.Pod) { pod.DeletionTimestamp = &metav1.Time{Time: start} }

func TestReplicasShareNoNode(t *testing.T) {
	for name, tc := range map[string]struct {
		pods  []corev1.Pod
		nodes int
		bad   bool
	}{
		"two replicas on two nodes":                   {[]corev1.Pod{newPod("a", "1"), newPod("b", "2")}, 2, false},
		"two replicas on one of two nodes":            {[]corev1.Pod{newPod("a", "1"), newPod("b", "1")}, 2, true},
		"two replicas on the only node":               {[]corev1.Pod{newPod("a", "1"), newPod("b", "1")}, 1, false},
		"one of the two on a node is being deleted":   {[]corev1.Pod{newPod("a", "1", markDeleted), newPod("b", "1"), newPod("c", "2")}, 2, false},
		"three replicas on two nodes":                 {[]corev1.Pod{newPod("a", "1"), newPod("b", "1"), newPod("c", "2")}, 2, false},
		"a Pod without a controller is no replica":    {[]corev1.Pod{newPod("a", "1"), newPod("b", "1", func(p *corev1.Pod) { p.OwnerReferences = nil })}, 2, false},
		"three replicas on one of at least two nodes": {[]corev1.Pod{newPod("a", "1"), newPod("b", "1"), newPod("c", "1")}, 2, true},
	} {
		t.Run(name, func(t *testing.T) {
			if err := checkSpread(tc.pods, tc.nodes); (err != nil) != tc.bad {
				t.Error(err)
			}
		})
	}
}

func podVersion(seconds float64, pod corev1.Pod) version[*corev1.Pod] {
	return version[*corev1.Pod]{at: atSecond(seconds), object: &pod}
}

func TestBadContainerExitsCountOnce(t *testing.T) {
	exited := func(code int32, seconds float64) func(*corev1.Pod) {
		return func(pod *corev1.Pod) {
			pod.Status.ContainerStatuses = []corev1.ContainerStatus{{LastTerminationState: corev1.ContainerState{
				Terminated: &corev1.ContainerStateTerminated{ExitCode: code, Reason: "Error", FinishedAt: metav1.Time{Time: atSecond(seconds)}}}}}
		}
	}
	for name, tc := range map[string]struct {
		pods []version[*corev1.Pod]
		want string
	}{
		"an end with code 0 is a good one": {[]version[*corev1.Pod]{podVersion(12, newPod("a", "1", exited(0, 12)))}, ""},
		"each bad end counts once": {[]version[*corev1.Pod]{podVersion(12, newPod("a", "1", exited(1, 12))), podVersion(13, newPod("a", "1", exited(1, 12)))},
			"a ended with code 1 (Error)"},
		"an end before that time does not count": {[]version[*corev1.Pod]{podVersion(12, newPod("a", "1", exited(1, 2)))}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			if got := strings.Join(failedExits(tc.pods, atSecond(10)), "; "); got != tc.want {
				t.Errorf("%q, not %q", got, tc.want)
			}
		})
	}
}

func TestJudgeReloadFindsPodsWithOldData(t *testing.T) {
	setOtherTemplate := func(pod *corev1.Pod) { pod.Labels = map[string]string{"pod-template-hash": "2"} }
	for name, tc := range map[string]struct {
		pods    []corev1.Pod
		printed map[string]string
		bad     string
	}{
		"all have the new data":            {[]corev1.Pod{newPod("a", "1"), newPod("b", "2")}, map[string]string{"a": "5\n", "b": "5\n"}, ""},
		"one has started with old data":    {[]corev1.Pod{newPod("a", "1"), newPod("b", "2")}, map[string]string{"a": "5", "b": "4"}, `b has started with "4", not with "5"`},
		"one has printed nothing":          {[]corev1.Pod{newPod("a", "1")}, nil, `a has started with "", not with "5"`},
		"one of the old template is left":  {[]corev1.Pod{newPod("a", "1"), newPod("b", "2", setOtherTemplate)}, map[string]string{"a": "5", "b": "5"}, "the Pods are of 2 templates"},
		"one of the old template is ended": {[]corev1.Pod{newPod("a", "1"), newPod("b", "2", setOtherTemplate, markDeleted)}, map[string]string{"a": "5"}, ""},
		"there are none":                   {nil, nil, "the Pods are of 0 templates"},
	} {
		t.Run(name, func(t *testing.T) {
			err := judgeReload(tc.pods, tc.printed, "5")
			if tc.bad == "" && err != nil || tc.bad != "" && (err == nil || err.Error() != tc.bad) {
				t.Errorf("%v, not %q", err, tc.bad)
			}
		})
	}
}

func TestCountEventsCountsRepeats(t *testing.T) {
	event := func(reason, name string, count int32) corev1.Event {
		return corev1.Event{Reason: reason, InvolvedObject: corev1.ObjectReference{Name: name}, Count: count}
	}
	got := countEvents([]corev1.Event{event("Reload", "shop", 0), event("Reload", "shop", 3), event("Reload", "bar", 1), event("Scaled", "shop", 1)}, "Reload", "shop")
	if got != 4 {
		t.Errorf("%d, not 4", got)
	}
}
