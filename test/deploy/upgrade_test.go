// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package deploy

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/configreload/policy"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
	"github.com/quartermaster-dev/quartermaster/test/internal/judge"
)

// TestLongUpgradeLosesAndRepeatsNothing applies deploy/ as a user does. kube-controller-manager creates
// the Pods and replaces them one by one by Pods of the next version, while there is always work.
func TestLongUpgradeLosesAndRepeatsNothing(t *testing.T) {
	ctx := fleet.Within(t.Context(), t, 2*fleet.Patience)
	begin := time.Now()
	stop := startKubelet(ctx, t, map[string]string{
		"quartermaster:v0.9.1": buildVersion(ctx, t, "v0.9.1"),
		"quartermaster:v0.9.2": buildVersion(ctx, t, "v0.9.2"),
	})
	availability := watchAvailability(ctx, t)
	apply(ctx, t, "v0.9.1")
	waitForVersion(ctx, t, "v0.9.1")
	w := newWork(ctx, t)
	w.waitForRound(ctx, 0)

	endWork := w.start(ctx)
	fleet.Eventually(ctx, t, func() error { return w.checkBegun(ctx) })
	apply(ctx, t, "v0.9.2")
	waitForVersion(ctx, t, "v0.9.2")
	rounds := endWork()
	w.waitForRound(ctx, rounds)

	if err := availability(); err != nil {
		t.Error(err)
	}
	removeDeployment(ctx, t)
	pods, err := stop()
	if err != nil {
		t.Error(err)
	}
	if len(pods) != 4 {
		t.Errorf("%d Pods have run, want 2 of each version: %v", len(pods), pods)
	}
	w.judge(begin, rounds, pods)
}

// buildVersion builds a manager that reports this version.
func buildVersion(ctx context.Context, t *testing.T, version string) string {
	t.Helper()
	path := filepath.Join(shared.Dir(), "manager-"+version)
	flags := "-X k8s.io/component-base/version.gitVersion=" + version + " -X k8s.io/client-go/pkg/version.gitVersion=" + version
	cmd := exec.CommandContext(ctx, "go", "build", "-ldflags", flags, "-o", path, "./cmd/manager")
	cmd.Dir = "../.."
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build %s: %v\n%s", version, err, out)
	}
	return path
}

// apply runs `kubectl apply -k` on the default with the image of a version.
func apply(ctx context.Context, t *testing.T, version string) {
	t.Helper()
	dir := overlay(t)
	file, err := os.OpenFile(filepath.Join(dir, "kustomization.yaml"), os.O_APPEND|os.O_WRONLY, 0)
	if err == nil {
		_, err = fmt.Fprintf(file, "images:\n- name: quartermaster\n  newTag: %s\n", version)
		err = errors.Join(err, file.Close())
	}
	if err == nil {
		_, err = shared.Kubectl(ctx, "apply", "-k", dir)
	}
	assert.NoError(t, err)
}

// waitForVersion waits until the rollout is complete: both replicas have the version, the others
// are gone, and one leads.
func waitForVersion(ctx context.Context, t *testing.T, version string) {
	t.Helper()
	fleet.Eventually(ctx, t, func() error {
		d, err := shared.Admin.AppsV1().Deployments(metav1.NamespaceSystem).Get(ctx, "quartermaster", metav1.GetOptions{})
		if err != nil {
			return err
		}
		if s := d.Status; s.ObservedGeneration < d.Generation || s.UpdatedReplicas != 2 || s.Replicas != 2 || s.AvailableReplicas != 2 {
			return fmt.Errorf("the Deployment is not rolled out: %+v", s)
		}
		pods, err := shared.Admin.CoreV1().Pods(metav1.NamespaceSystem).List(ctx, metav1.ListOptions{LabelSelector: "app.kubernetes.io/name=quartermaster"})
		if err != nil {
			return err
		}
		leads := false
		for i := range pods.Items {
			pod := &pods.Items[i]
			if metav1.GetControllerOf(pod) == nil {
				continue
			}
			if image := pod.Spec.Containers[0].Image; image != "quartermaster:"+version {
				return fmt.Errorf("%s of %s is still there", pod.Name, image)
			}
			leads = leads || pod.Name == shared.HolderPod(ctx, t)
		}
		if !leads {
			return fmt.Errorf("no replica of %s leads", version)
		}
		return nil
	})
}

// watchAvailability watches the Deployment until the returned function is called. After the first
// rollout, both replicas must always be available.
func watchAvailability(ctx context.Context, t *testing.T) (stop func() error) {
	t.Helper()
	versions, err := shared.Admin.AppsV1().Deployments(metav1.NamespaceSystem).Watch(ctx, metav1.ListOptions{FieldSelector: "metadata.name=quartermaster"})
	assert.NoError(t, err)
	var problems []error
	done := make(chan struct{})
	go func() {
		defer close(done)
		complete := false
		for e := range versions.ResultChan() {
			d, ok := e.Object.(*appsv1.Deployment)
			if !ok {
				continue
			}
			complete = complete || d.Status.AvailableReplicas == 2
			if complete && d.Status.AvailableReplicas < 2 {
				problems = append(problems, fmt.Errorf("%d replicas were available at resourceVersion %s", d.Status.AvailableReplicas, d.ResourceVersion))
			}
		}
		if !complete {
			problems = append(problems, errors.New("the Deployment was never seen complete"))
		}
	}()
	return func() error {
		versions.Stop()
		<-done
		return errors.Join(problems...)
	}
}

// removeDeployment ends the managers gracefully.
func removeDeployment(ctx context.Context, t *testing.T) {
	t.Helper()
	foreground := metav1.DeletePropagationForeground
	deployments := shared.Admin.AppsV1().Deployments(metav1.NamespaceSystem)
	assert.NoError(t, deployments.Delete(ctx, "quartermaster", metav1.DeleteOptions{PropagationPolicy: &foreground}))
	fleet.Eventually(ctx, t, func() error {
		if _, err := deployments.Get(ctx, "quartermaster", metav1.GetOptions{}); err == nil {
			return errors.New("the Deployment is still there")
		}
		return nil
	})
}

// workloads is ConfigMaps cfg-0, cfg-1, ..., each of which rolls one of the Deployments app-0, app-1,
// ...
type workloads struct {
	t         *testing.T
	namespace string
}

const (
	workSize    = 20
	roundPeriod = 300 * time.Millisecond
)

func newWork(ctx context.Context, t *testing.T) workloads {
	t.Helper()
	s := newTestNamespace(ctx, t)
	w := workloads{t, s.namespace}
	for i := range workSize {
		cm := w.configMap(i, 0)
		if _, err := shared.Admin.CoreV1().ConfigMaps(w.namespace).Create(ctx, cm, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		// Not the default delay: during continuous changes it would roll only every 30 s.
		d := cluster.NewDeployment(fmt.Sprintf("app-%d", i), cm.Name, map[string]string{fleet.ReloadAnnotation: "auto", "quartermaster.dev/reload-delay": "50ms"})
		if _, err := shared.Admin.AppsV1().Deployments(w.namespace).Create(ctx, d, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	return w
}

func (w workloads) configMap(i, round int) *corev1.ConfigMap {
	return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("cfg-%d", i), Namespace: w.namespace},
		Data: map[string]string{"round": fmt.Sprint(round)}}
}

// start changes all ConfigMaps again and again until the returned function is called, which returns
// how often.
func (w workloads) start(ctx context.Context) (end func() (rounds int)) {
	ctx, cancel := context.WithCancel(ctx)
	rounds := 0
	var running sync.WaitGroup
	running.Go(func() {
		tick := time.NewTicker(roundPeriod)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			rounds++
			for i := range workSize { // a round is always completed
				body := fmt.Appendf(nil, `{"data":{"round":"%d"}}`, rounds)
				_, err := shared.Admin.CoreV1().ConfigMaps(w.namespace).Patch(context.WithoutCancel(ctx), fmt.Sprintf("cfg-%d", i), types.MergePatchType, body, metav1.PatchOptions{})
				if err != nil {
					w.t.Error(err)
				}
			}
		}
	})
	return func() int {
		cancel()
		running.Wait()
		return rounds
	}
}

// Values of recordedRound that are not rounds.
const (
	absent  = -1 // the Deployment was seen before its ConfigMap
	unknown = -2
)

// recordedRound returns the round that a Deployment's state is from.
func (w workloads) recordedRound(i int, annotations map[string]string, rounds int) int {
	var recorded map[string]string
	if err := json.Unmarshal([]byte(annotations[fleet.StateAnnotation]), &recorded); err != nil {
		return unknown
	}
	got, ok := recorded[fmt.Sprintf("configmap/cfg-%d", i)]
	if ok && got == "" {
		return absent
	}
	for round := range rounds + 1 {
		if ok && strings.HasPrefix(hex.EncodeToString(policy.DigestConfigMap(w.configMap(i, round))), got) {
			return round
		}
	}
	return unknown
}

// waitForRound waits until all Deployments have been rolled for the round.
func (w workloads) waitForRound(ctx context.Context, round int) {
	w.t.Helper()
	fleet.Eventually(ctx, w.t, func() error {
		list, err := shared.Admin.AppsV1().Deployments(w.namespace).List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		for _, d := range list.Items {
			var i int
			if _, err := fmt.Sscanf(d.Name, "app-%d", &i); err != nil {
				return err
			}
			if got := w.recordedRound(i, d.Annotations, round); got != round {
				return fmt.Errorf("%s is at round %d, not %d", d.Name, got, round)
			}
		}
		return nil
	})
}

// checkBegun returns nil once a Deployment has been rolled.
func (w workloads) checkBegun(ctx context.Context) error {
	d, err := shared.Admin.AppsV1().Deployments(w.namespace).Get(ctx, "app-0", metav1.GetOptions{})
	if err == nil && w.recordedRound(0, d.Annotations, 0) == 0 {
		err = errors.New("nothing is rolled yet")
	}
	return err
}

// judge checks in the audit log that the upgrade lost and repeated nothing.
func (w workloads) judge(begin time.Time, rounds int, pods []string) {
	w.t.Helper()
	rolled := judge.NewRollouts()
	lease := types.NamespacedName{Namespace: metav1.NamespaceSystem, Name: fleet.LeaseName}
	history := judge.New(lease, fleet.StateAnnotation, func(process string) bool { return slices.Contains(pods, process) })
	writes := map[string][]versionedState{}
	for _, e := range shared.AuditSince(w.t, begin, func(auditv1.Event) bool { return true }) {
		assert.NoError(w.t, errors.Join(rolled.AddEvent(e), history.AddEvent(e)))
		for _, pod := range pods {
			if fleet.IsControllerWrite(e, pod) {
				writes[e.ObjectRef.Name] = append(writes[e.ObjectRef.Name], w.writtenState(e))
			}
		}
	}

	total, writesByPod := 0, map[string]int{}
	for i := range workSize {
		name := fmt.Sprintf("app-%d", i)
		list := writes[name]
		slices.SortFunc(list, func(a, b versionedState) int { return int(a.revision) - int(b.revision) })
		last, rollouts := unknown, 0
		for _, v := range list {
			round := w.recordedRound(i, v.annotations, rounds)
			if round <= last {
				w.t.Errorf("%s was written for round %d by %s at revision %d, after round %d", name, round, v.pod, v.revision, last)
			}
			last = round
			if round > 0 {
				rollouts++
			}
			writesByPod[v.pod]++
		}
		if last != rounds {
			w.t.Errorf("the last write of %s was for round %d, not %d: it is lost", name, last, rounds)
		}
		// Recording the first state is no rollout; each further write is one.
		if got := len(rolled.Find("deployments/" + w.namespace + "/" + name)); got != rollouts {
			w.t.Errorf("%s was rolled %d times in %d writes", name, got, rollouts)
		}
		total += len(list)
	}

	verdict := history.Judge()
	for _, f := range verdict.Findings {
		w.t.Error(f)
	}
	if len(verdict.Acquisitions) < 2 {
		w.t.Errorf("%d terms: nothing was handed over", len(verdict.Acquisitions))
	}
	for _, a := range verdict.Acquisitions[1:] {
		w.t.Logf("Handover to %s within %s", a.Process, a.Time.Sub(a.Previous.Time).Round(time.Millisecond))
		if a.Previous.Holder != "" {
			w.t.Errorf("%s took over from %s without a release", a.Process, a.Previous.Holder)
		}
	}
	w.t.Logf("%d rounds, %d writes, by Pod %v", rounds, total, writesByPod)
}

type versionedState struct {
	revision    uint64
	annotations map[string]string
	pod         string
}

func (w workloads) writtenState(e auditv1.Event) versionedState {
	w.t.Helper()
	var o metav1.PartialObjectMetadata
	assert.NoError(w.t, json.Unmarshal(e.ResponseObject.Raw, &o))
	v := versionedState{annotations: o.Annotations, pod: cluster.AuditPod(e)}
	if _, err := fmt.Sscan(o.ResourceVersion, &v.revision); err != nil {
		w.t.Fatal(err)
	}
	return v
}
