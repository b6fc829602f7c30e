// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package e2e tests deploy/ and the chart on any cluster with nodes: `make test-e2e`. It installs
// them as a user does, and judges from outside by the Pods, Events and Leases that the API server
// shows. judge.go has the judgements, which are pure; the tests of these run without a cluster.
package e2e

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

// version is one version of an object, and when a watch showed it.
type version[T any] struct {
	at      time.Time
	deleted bool
	object  T
}

// handover is a change of the Lease's holder.
type handover struct {
	from, to string // Pods; from is empty if nobody led
	released bool   // by from
	at       time.Time
	took     time.Duration // from the release, or else from the time that is asked for
}

// firstHandover returns the first time after since that another Pod than before became the holder.
func firstHandover(leases []version[*coordinationv1.Lease], since time.Time) (handover, error) {
	h := handover{}
	begin := since
	for _, v := range leases {
		holder := holderPod(v.object)
		if v.deleted {
			holder = ""
		}
		switch {
		case !v.at.After(since):
			h.from = holder
		case holder == "" && h.from != "" && !h.released:
			h.released, begin = true, v.at
		case holder != "" && (holder != h.from || h.released):
			h.to, h.at, h.took = holder, v.at, v.at.Sub(begin)
			return h, nil
		}
	}
	return h, fmt.Errorf("nobody has followed %q", h.from)
}

// holderPod returns the Pod that holds the Lease, whose holder is PODNAME_UUID.
func holderPod(lease *coordinationv1.Lease) string {
	pod, _, _ := strings.Cut(ptr.Deref(lease.Spec.HolderIdentity, ""), "_")
	return pod
}

// isLive reports whether a Pod is a replica that is not being deleted. Pods without a controller are
// the tests' own.
func isLive(pod *corev1.Pod) bool {
	return pod.DeletionTimestamp == nil && metav1.GetControllerOf(pod) != nil &&
		pod.Status.Phase != corev1.PodFailed && pod.Status.Phase != corev1.PodSucceeded
}

// checkSpread returns an error if a node has more of the live Pods than it need have.
func checkSpread(pods []corev1.Pod, nodes int) error {
	count, live := map[string]int{}, 0
	for i := range pods {
		if isLive(&pods[i]) {
			count[pods[i].Spec.NodeName]++
			live++
		}
	}
	for _, node := range slices.Sorted(maps.Keys(count)) {
		if most := (live + nodes - 1) / nodes; count[node] > most {
			return fmt.Errorf("%s runs %d of %d replicas, %d nodes would do", node, count[node], live, nodes)
		}
	}
	return nil
}

// failedExits returns the ends of containers since a time with another code than 0. A Pod that the
// kubelet has no chance to report on, because it was deleted by force, is not among them.
func failedExits(pods []version[*corev1.Pod], since time.Time) []string {
	bad := map[string]bool{}
	for _, v := range pods {
		for _, status := range v.object.Status.ContainerStatuses {
			for _, end := range []*corev1.ContainerStateTerminated{status.State.Terminated, status.LastTerminationState.Terminated} {
				if end != nil && end.ExitCode != 0 && !end.FinishedAt.Time.Before(since.Truncate(time.Second)) {
					bad[fmt.Sprintf("%s ended with code %d (%s)", v.object.Name, end.ExitCode, end.Reason)] = true
				}
			}
		}
	}
	return slices.Sorted(maps.Keys(bad))
}

// judgeReload returns an error unless a reload has ended as it should: every live Pod is of one
// template and its container has printed the new data at its start. printed has that by Pod.
func judgeReload(pods []corev1.Pod, printed map[string]string, want string) error {
	var errs []error
	templates := map[string]bool{}
	for i := range pods {
		pod := &pods[i]
		if !isLive(pod) {
			continue
		}
		templates[pod.Labels["pod-template-hash"]] = true
		if got := strings.TrimSpace(printed[pod.Name]); got != want {
			errs = append(errs, fmt.Errorf("%s has started with %q, not with %q", pod.Name, got, want))
		}
	}
	if len(templates) != 1 {
		errs = append(errs, fmt.Errorf("the Pods are of %d templates", len(templates)))
	}
	return errors.Join(errs...)
}

// countEvents returns how often the Events say that something happened to an object.
func countEvents(events []corev1.Event, reason, name string) (n int) {
	for _, e := range events {
		if e.Reason == reason && e.InvolvedObject.Name == name {
			n += max(1, int(e.Count))
		}
	}
	return n
}
