// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package configreload

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/cache"
	fcache "k8s.io/client-go/tools/cache/testing"
	"k8s.io/client-go/tools/record"
	"k8s.io/component-base/metrics"
	"k8s.io/utils/clock"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	clientgo "github.com/quartermaster-dev/quartermaster/pkg/controllers/internal/fixture"
)

// BenchmarkTakeOver measures a replica with warm caches that begins to lead: from the call of Run to
// the first write, and until each Deployment that asks for reloads has been written to.
func BenchmarkTakeOver(b *testing.B) {
	const deployments = 500
	for _, secrets := range []int{0, 50_000, 200_000} {
		b.Run(fmt.Sprintf("%d Secrets and %d Deployments", secrets, deployments), func(b *testing.B) {
			var written atomic.Int32
			first, all := make(chan struct{}, 1), make(chan struct{}, 1)
			client := fake.NewClientset()
			client.PrependReactor("patch", "deployments", func(clienttesting.Action) (bool, runtime.Object, error) {
				switch written.Add(1) {
				case 1:
					first <- struct{}{}
				case deployments:
					all <- struct{}{}
				}
				return true, &appsv1.Deployment{}, nil
			})
			c := newCached(b, client, secrets, deployments)
			var toFirst, toAll time.Duration
			for b.Loop() {
				written.Store(0)
				ctx, stop := context.WithCancel(b.Context())
				stopped := make(chan error)
				begin := time.Now()
				go func() { stopped <- c.Run(ctx) }()
				<-first
				toFirst += time.Since(begin)
				<-all
				toAll += time.Since(begin)
				b.StopTimer()
				stop()
				if err := <-stopped; err != nil {
					b.Fatal(err)
				}
				client.ClearActions()
				b.StartTimer()
			}
			b.ReportMetric(float64(toFirst.Microseconds())/float64(b.N)/1000, "ms/first")
			b.ReportMetric(float64(toAll.Microseconds())/float64(b.N)/1000, "ms/all")
		})
	}
}

// newCached returns a controller whose caches are synced. Nothing is recorded on the Deployments.
func newCached(b *testing.B, client *fake.Clientset, secrets, deployments int) *Controller {
	b.Helper()
	cfg := NewConfig()
	digest, err := SourceDigest(cfg)
	if err != nil {
		b.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	var all []cache.SharedIndexInformer
	informer := func(transform cache.TransformFunc, objects ...runtime.Object) cache.SharedIndexInformer {
		source := fcache.NewFakeControllerSource()
		for _, obj := range objects {
			source.Add(obj)
		}
		i := cache.NewSharedIndexInformer(source, nil, 0, cache.Indexers{})
		if err := i.SetTransform(transform); err != nil {
			b.Fatal(err)
		}
		b.Cleanup(source.Shutdown)
		all = append(all, i)
		return i
	}
	asSource := reduceAs(Name, SourceAnnotations(cfg), digest, "")
	asWorkload := reduceAs(Name, WorkloadAnnotations(cfg), WorkloadDigest(cfg), "")
	var secretList, deploymentList []runtime.Object
	for i := range secrets {
		s := &corev1.Secret{Data: map[string][]byte{"key": fmt.Append(nil, i)}}
		s.Namespace, s.Name, s.UID = "shop", fmt.Sprintf("secret-%d", i), types.UID(fmt.Sprintf("s-%d", i))
		secretList = append(secretList, s)
	}
	for i := range deployments {
		d := deploy(pod(reads("app-config"), readsSecret(fmt.Sprintf("secret-%d", i))), nativeReload, "auto")
		d.Name, d.UID = fmt.Sprintf("web-%d", i), types.UID(fmt.Sprintf("d-%d", i))
		deploymentList = append(deploymentList, d)
	}
	config := cm1()
	config.UID = "c"
	in := Informers{
		ConfigMaps:  clientgo.Informer[Source](informer(asSource, config)),
		Secrets:     clientgo.Informer[Source](informer(asSource, secretList...)),
		Deployments: clientgo.Informer[metav1.Object](informer(asWorkload, deploymentList...)),
	}
	reg := metrics.NewKubeRegistry()
	loop := controllers.Options{Name: Name, Metrics: controllers.NewMetrics(reg), Clock: clock.RealClock{}}
	c, err := New(cfg, in, client, nil, record.NewFakeRecorder(0), loop, reg)
	if err != nil {
		b.Fatal(err)
	}
	for _, i := range all {
		go i.RunWithContext(ctx)
	}
	for _, i := range all {
		if !cache.WaitFor(ctx, "", i.HasSyncedChecker()) {
			b.Fatal("not synced")
		}
	}
	b.Cleanup(stop)
	return c
}
