// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package nodes tests managers on a control plane with simulated nodes, where rollouts end.
package nodes

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

const replicas = 3 // more than a Deployment replaces at once

// sample is a namespace with a Secret db.
type sample struct {
	fleet.Sample
	*fleet.Fleet
}

// TestLongRolloutsEnd needs two programs more than the other tests, which cluster.Start builds.
func TestLongRolloutsEnd(t *testing.T) {
	fleet.Require(t)
	f, err := fleet.Start(context.Background(), fleet.Options{Cluster: cluster.Options{Nodes: 2}, Components: []string{"compat-reloader"}})
	assert.NoError(t, err)
	t.Cleanup(func() {
		if err := f.Stop(); err != nil {
			t.Error(err)
		}
	})
	f.RunLeader(fleet.Context(t), t)
	for name, do := range map[string]func(context.Context, *testing.T, sample){
		"a Deployment rolls when its Secret changes":        rollsOnASecret,
		"a Deployment that is paused rolls after the pause": rollsAfterAPause,
		"a CronJob's Job completes":                         runsACronJob,
		"the nodes stay ready":                              renewsLeases,
		"replicas of the manager that share a node spread":  spreadsTheManager,
	} {
		t.Run(name, func(t *testing.T) {
			ctx := fleet.Context(t)
			do(ctx, t, sample{f.NewSample(ctx, t), f})
		})
	}
	expectNoRefusals(t, f)
}

func rollsOnASecret(ctx context.Context, t *testing.T, s sample) {
	t.Helper()
	s.deploy(ctx, t, map[string]string{fleet.ReloadAnnotation: "auto"})
	s.SetSecret(ctx, t, "second")
	s.expectRollout(ctx, t)
}

func rollsAfterAPause(ctx context.Context, t *testing.T, s sample) {
	t.Helper()
	s.deploy(ctx, t, map[string]string{"reloader.stakater.com/auto": "true", "deployment.reloader.stakater.com/pause-period": "2s"})
	s.SetSecret(ctx, t, "second")
	fleet.Eventually(ctx, t, func() error {
		d, err := s.Admin.AppsV1().Deployments(s.Namespace).Get(ctx, "api", metav1.GetOptions{})
		if err == nil && !d.Spec.Paused {
			err = errors.New("not paused")
		}
		return err
	})
	s.expectRollout(ctx, t)
}

// deploy creates Deployment api, which uses the Secret, and waits until it is available and
// config-reload knows it.
func (s sample) deploy(ctx context.Context, t *testing.T, annotations map[string]string) {
	t.Helper()
	s.Deploy(ctx, t, "api", annotations)
	s.kubectl(ctx, t, "scale", "deployment/api", fmt.Sprint("--replicas=", replicas))
	s.kubectl(ctx, t, "rollout", "status", "deployment/api")
	s.WaitUntilKnown(ctx, t, "api")
}

// expectRollout waits for the end of the first rollout. Then the Pods have the last template, and run on
// nodes.
func (s sample) expectRollout(ctx context.Context, t *testing.T) {
	t.Helper()
	s.WaitForReplicaSets(ctx, t, "api", 2)
	s.kubectl(ctx, t, "rollout", "status", "deployment/api")
	pods, err := s.Admin.CoreV1().Pods(s.Namespace).List(ctx, metav1.ListOptions{LabelSelector: "app=api"})
	assert.NoError(t, err)
	running, templates := 0, map[string]bool{}
	for _, pod := range pods.Items {
		if pod.DeletionTimestamp != nil {
			continue // of the old template; the rollout does not wait for its end
		}
		running++
		templates[pod.Labels["pod-template-hash"]] = true
		if pod.Status.Phase != corev1.PodRunning || !strings.HasPrefix(pod.Spec.NodeName, "node-") {
			t.Errorf("Pod %s is %s on node %q", pod.Name, pod.Status.Phase, pod.Spec.NodeName)
		}
	}
	if running != replicas || len(templates) != 1 {
		t.Errorf("%d Pods of %d templates", running, len(templates))
	}
}

func runsACronJob(ctx context.Context, t *testing.T, s sample) {
	t.Helper()
	pod := cluster.NewDeployment("report", "app-config", nil).Spec.Template
	pod.Spec.RestartPolicy = corev1.RestartPolicyNever
	_, err := s.Admin.BatchV1().CronJobs(s.Namespace).Create(ctx, &batchv1.CronJob{
		ObjectMeta: metav1.ObjectMeta{Name: "report", Annotations: map[string]string{fleet.ReloadAnnotation: "auto"}},
		Spec:       batchv1.CronJobSpec{Schedule: "0 0 29 2 *", JobTemplate: batchv1.JobTemplateSpec{Spec: batchv1.JobSpec{Template: pod}}},
	}, metav1.CreateOptions{})
	assert.NoError(t, err)
	fleet.Eventually(ctx, t, func() error {
		report, err := s.Admin.BatchV1().CronJobs(s.Namespace).Get(ctx, "report", metav1.GetOptions{})
		if err == nil && report.Annotations[fleet.StateAnnotation] == "" {
			err = errors.New("no state on the CronJob")
		}
		return err
	})
	s.Paint(ctx, t, "red")
	fleet.Eventually(ctx, t, func() error {
		jobs, err := s.Admin.BatchV1().Jobs(s.Namespace).List(ctx, metav1.ListOptions{})
		if err == nil && len(jobs.Items) != 1 {
			err = fmt.Errorf("%d Jobs", len(jobs.Items))
		}
		return err
	})
	s.kubectl(ctx, t, "wait", "--for=condition=complete", "--timeout=60s", "jobs", "--all")
}

// renewsLeases waits until each kubelet has renewed its Lease, which it does every 10 s. Without, the
// Nodes would not be ready after 40 s.
func renewsLeases(ctx context.Context, t *testing.T, s sample) {
	t.Helper()
	first := map[types.UID]metav1.MicroTime{}
	fleet.Eventually(ctx, t, func() error {
		leases, err := s.Admin.CoordinationV1().Leases(corev1.NamespaceNodeLease).List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		renewed := 0
		for _, lease := range leases.Items {
			at := *lease.Spec.RenewTime
			if _, seen := first[lease.UID]; !seen {
				first[lease.UID] = at
			}
			if at.After(first[lease.UID].Time) {
				renewed++
			}
		}
		if renewed != 2 {
			return fmt.Errorf("%d of 2 Leases renewed", renewed)
		}
		return nil
	})
}

// spreadsTheManager has both replicas of deploy/ run on one node, as after a drain, and rolls them.
func spreadsTheManager(ctx context.Context, t *testing.T, s sample) {
	t.Helper()
	overlay, err := s.Overlay()
	assert.NoError(t, err)
	s.kubectl(ctx, t, "cordon", "node-2")
	s.kubectl(ctx, t, "apply", "-k", overlay)
	s.kubectl(ctx, t, "-n=kube-system", "rollout", "status", "deployment/quartermaster")
	s.kubectl(ctx, t, "uncordon", "node-2")
	for round := range 3 {
		s.kubectl(ctx, t, "-n=kube-system", "rollout", "restart", "deployment/quartermaster")
		s.kubectl(ctx, t, "-n=kube-system", "rollout", "status", "deployment/quartermaster")
		pods, err := s.Admin.CoreV1().Pods(metav1.NamespaceSystem).List(ctx, metav1.ListOptions{LabelSelector: "app.kubernetes.io/name=quartermaster,pod-template-hash"})
		assert.NoError(t, err)
		nodes := map[string]int{}
		for _, pod := range pods.Items {
			if pod.DeletionTimestamp == nil {
				nodes[pod.Spec.NodeName]++
			}
		}
		if nodes["node-1"] != 1 || nodes["node-2"] != 1 {
			t.Errorf("rollout %d: the nodes have %v replicas", round, nodes)
		}
	}
	s.kubectl(ctx, t, "-n=kube-system", "delete", "deployment/quartermaster")
}

// expectNoRefusals reports what the scheduler, the kubelets and the manager were refused.
func expectNoRefusals(t *testing.T, f *fleet.Fleet) {
	t.Helper()
	if err := f.Refused(fleet.Context(t)); err != nil {
		t.Error(err)
	}
	events, err := f.AuditEvents()
	assert.NoError(t, err)
	seen := map[string]bool{}
	for _, e := range events {
		user := e.User.Username
		if user != "simulated-kubelets" && user != "system:kube-scheduler" {
			continue
		}
		if !fleet.Allowed(e) {
			t.Errorf("%s was refused: %s %s", user, e.Verb, e.RequestURI)
		}
		seen[user] = true
	}
	if len(seen) != 2 {
		t.Errorf("the audit log has only requests of %v", seen)
	}
}

func (s sample) kubectl(ctx context.Context, t *testing.T, args ...string) {
	t.Helper()
	out, err := s.Kubectl(ctx, append([]string{"--namespace=" + s.Namespace}, args...)...)
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}
