// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/configreload/policy"
)

// Workloads is the managers' work: Deployments app-0, app-1, ..., each of which is rolled when its
// ConfigMap, cfg-0, cfg-1, ..., changes. Only the managers change the Deployments.
type Workloads struct {
	Namespace string
	Size      int

	fleet   *Fleet
	content atomic.Int64 // the last one: each is used once
}

// NewWorkloads creates that many, whose Deployments are deleted at the end of the test.
func (f *Fleet) NewWorkloads(ctx context.Context, t testing.TB, size int) *Workloads {
	t.Helper()
	w := &Workloads{Namespace: f.NewNamespace(ctx, t, nil), Size: size, fleet: f}
	for i := range size {
		_, err := f.Admin.CoreV1().ConfigMaps(w.Namespace).Create(ctx, &corev1.ConfigMap{
			ObjectMeta: metav1.ObjectMeta{Name: configMap(i)}, Data: map[string]string{"content": "0"}}, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		_, err = f.Admin.AppsV1().Deployments(w.Namespace).Create(ctx,
			cluster.NewDeployment(DeploymentName(i), configMap(i), map[string]string{ReloadAnnotation: "auto"}), metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
	}
	// Otherwise the next test's managers would also work on them. Without kube-controller-manager
	// the namespace stays.
	t.Cleanup(func() {
		err := f.Admin.AppsV1().Deployments(w.Namespace).DeleteCollection(context.Background(), metav1.DeleteOptions{}, metav1.ListOptions{})
		if err != nil {
			t.Error(err)
		}
	})
	return w
}

func configMap(i int) string { return fmt.Sprintf("cfg-%d", i) }

// DeploymentName returns the name of Deployment i of Workloads.
func DeploymentName(i int) string { return fmt.Sprintf("app-%d", i) }

// NextContent returns a content that no ConfigMap ever had.
func (w *Workloads) NextContent() int64 { return w.content.Add(1) }

// Change gives a ConfigMap a content that it never had before.
func (w *Workloads) Change(ctx context.Context, i int) error {
	patch := fmt.Appendf(nil, `{"data":{"content":"%d"}}`, w.NextContent())
	_, err := w.fleet.Admin.CoreV1().ConfigMaps(w.Namespace).Patch(ctx, configMap(i), types.MergePatchType, patch, metav1.PatchOptions{})
	return err
}

// Stream changes one of the ConfigMaps every period until the returned function is called. It
// ignores errors, since the API server may be down.
func (w *Workloads) Stream(ctx context.Context, period time.Duration) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	wg.Go(func() {
		tick := time.NewTicker(period)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			attempt, cancel := context.WithTimeout(ctx, time.Second)
			_ = w.Change(attempt, rand.IntN(w.Size))
			cancel()
		}
	})
	return func() {
		cancel()
		wg.Wait()
	}
}

// Settled returns nil once the given Deployments, or all, have recorded exactly the content of
// their ConfigMaps.
func (w *Workloads) Settled(ctx context.Context, indexes ...int) error {
	configMaps, err := w.fleet.Admin.CoreV1().ConfigMaps(w.Namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	deployments, err := w.fleet.Admin.AppsV1().Deployments(w.Namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	recorded := map[string]map[string]string{}
	for _, d := range deployments.Items {
		recorded[d.Name] = ParseState(d.Annotations[StateAnnotation])
	}
	var errs []error
	for i := range w.Size {
		for _, cm := range configMaps.Items {
			if cm.Name != configMap(i) || len(indexes) > 0 && !slices.Contains(indexes, i) {
				continue
			}
			digest := hex.EncodeToString(policy.DigestConfigMap(&cm))[:16]
			want := map[string]string{"configmap/" + cm.Name: digest, "workload": "Deployment/" + w.Namespace + "/" + DeploymentName(i)}
			if got := recorded[DeploymentName(i)]; !maps.Equal(got, want) {
				errs = append(errs, fmt.Errorf("%s has recorded %v, want %v (content %s)", DeploymentName(i), got, want, cm.Data["content"]))
			}
		}
	}
	return errors.Join(errs...)
}
