// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package faults

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

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/configreload/policy"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// world is the managers' work: Deployments app-0, app-1, ..., each of which is rolled when its
// ConfigMap, cfg-0, cfg-1, ..., changes. Only the managers change the Deployments.
type world struct {
	namespace string
	size      int
	content   atomic.Int64 // the last one: each is used once
}

func newWorld(ctx context.Context, t testing.TB, size int) *world {
	t.Helper()
	w := &world{namespace: shared.NewNamespace(ctx, t, nil), size: size}
	for i := range size {
		_, err := shared.Admin.CoreV1().ConfigMaps(w.namespace).Create(ctx, &corev1.ConfigMap{
			ObjectMeta: metav1.ObjectMeta{Name: configMap(i)}, Data: map[string]string{"content": "0"}}, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		_, err = shared.Admin.AppsV1().Deployments(w.namespace).Create(ctx,
			fleet.NewDeployment(deployment(i), configMap(i), map[string]string{fleet.ReloadAnnotation: "auto"}), metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
	}
	// Otherwise the next test's managers would also work on them. Without kube-controller-manager
	// the namespace stays.
	t.Cleanup(func() {
		err := shared.Admin.AppsV1().Deployments(w.namespace).DeleteCollection(context.Background(), metav1.DeleteOptions{}, metav1.ListOptions{})
		if err != nil {
			t.Error(err)
		}
	})
	return w
}

func configMap(i int) string  { return fmt.Sprintf("cfg-%d", i) }
func deployment(i int) string { return fmt.Sprintf("app-%d", i) }

// change gives a ConfigMap a content that it never had before.
func (w *world) change(ctx context.Context, i int) error {
	patch := fmt.Appendf(nil, `{"data":{"content":"%d"}}`, w.content.Add(1))
	_, err := shared.Admin.CoreV1().ConfigMaps(w.namespace).Patch(ctx, configMap(i), types.MergePatchType, patch, metav1.PatchOptions{})
	return err
}

// stream changes one of the ConfigMaps every period until the returned function is called. It
// ignores errors, since the API server may be down.
func (w *world) stream(ctx context.Context, period time.Duration) (stop func()) {
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
			_ = w.change(attempt, rand.IntN(w.size))
			cancel()
		}
	})
	return func() {
		cancel()
		wg.Wait()
	}
}

// settled returns nil once the given Deployments, or all, have recorded exactly the content of
// their ConfigMaps.
func (w *world) settled(ctx context.Context, which ...int) error {
	configMaps, err := shared.Admin.CoreV1().ConfigMaps(w.namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	deployments, err := shared.Admin.AppsV1().Deployments(w.namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	recorded := map[string]map[string]string{}
	for _, d := range deployments.Items {
		recorded[d.Name] = fleet.Recorded(d.Annotations[fleet.StateAnnotation])
	}
	var errs []error
	for i := range w.size {
		for _, cm := range configMaps.Items {
			if cm.Name != configMap(i) || len(which) > 0 && !slices.Contains(which, i) {
				continue
			}
			digest := hex.EncodeToString(policy.DigestConfigMap(&cm))[:16]
			want := map[string]string{"configmap/" + cm.Name: digest, "workload": "Deployment/" + w.namespace + "/" + deployment(i)}
			if got := recorded[deployment(i)]; !maps.Equal(got, want) {
				errs = append(errs, fmt.Errorf("%s has recorded %v, want %v (content %s)", deployment(i), got, want, cm.Data["content"]))
			}
		}
	}
	return errors.Join(errs...)
}
