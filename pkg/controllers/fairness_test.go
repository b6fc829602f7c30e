// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package controllers

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"
	fcache "k8s.io/client-go/tools/cache/testing"
	"k8s.io/component-base/metrics"
)

// paced is a loop with one worker, each of whose reconciles takes 100 ms.
type paced struct {
	loop   *Loop[cache.ObjectName]
	source *fcache.FakeControllerSource // of its ConfigMaps
	// reconcile is called at the end of each reconcile; may be nil.
	reconcile func(ctx context.Context, key cache.ObjectName) (time.Duration, error)

	mu   sync.Mutex
	done []cache.ObjectName
}

// ended returns the keys whose reconciles have ended.
func (p *paced) ended() []cache.ObjectName {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.done)
}

const pace = 100 * time.Millisecond

// newPaced returns a loop that watches ConfigMaps with these names. Its informer runs already.
func newPaced(t *testing.T, names ...cache.ObjectName) *paced {
	t.Helper()
	p := &paced{source: fcache.NewFakeControllerSource()}
	for _, name := range names {
		p.source.Add(object(name, "1"))
	}
	informer := cache.NewSharedIndexInformer(p.source, &corev1.ConfigMap{}, 0, cache.Indexers{})
	var err error
	p.loop, err = NewLoop(LoopOptions{Name: "test", Metrics: NewMetrics(metrics.NewKubeRegistry())},
		func(ctx context.Context, key cache.ObjectName) (time.Duration, error) {
			pass(pace)
			p.mu.Lock()
			p.done = append(p.done, key)
			p.mu.Unlock()
			if p.reconcile == nil {
				return 0, nil
			}
			return p.reconcile(ctx, key)
		}, WatchSelf(asInformer[*corev1.ConfigMap](informer)))
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	stopped := make(chan struct{})
	go func() { informer.RunWithContext(ctx); close(stopped) }()
	t.Cleanup(func() { stop(); <-stopped; p.source.Shutdown() })
	synctest.Wait()
	return p
}

// lead runs the loop until the test ends.
func (p *paced) lead(t *testing.T) {
	t.Helper()
	ctx, stop := context.WithCancel(context.Background())
	stopped := make(chan error, 1)
	go func() { stopped <- p.loop.Run(ctx) }()
	t.Cleanup(func() {
		stop()
		if err := <-stopped; err != nil {
			t.Error(err)
		}
	})
	synctest.Wait()
}

// expectNext fails if key is not among the next n reconciles to end.
func (p *paced) expectNext(t *testing.T, n int, key cache.ObjectName) {
	t.Helper()
	before := len(p.ended())
	pass(time.Duration(n)*pace + pace/2) // the one under way may have begun any time ago
	synctest.Wait()
	if got := p.ended()[before:]; !slices.Contains(got, key) {
		t.Errorf("reconciled %v, without %v; %d keys are queued", got, key, p.loop.Status().QueueDepth)
	}
}

func object(name cache.ObjectName, version string) *corev1.ConfigMap {
	return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: name.Namespace, Name: name.Name},
		Data: map[string]string{"version": version}}
}

// objects returns n names in a namespace.
func objects(namespace string, n int) (names []cache.ObjectName) {
	for i := range n {
		names = append(names, cache.NewObjectName(namespace, fmt.Sprint(i)))
	}
	return names
}

func TestFairnessOfChangesAgainstDueKeys(t *testing.T) {
	source, mine := cache.NewObjectName("busy", "source"), cache.NewObjectName("mine", "a")
	for name, begin := range map[string]func(p *paced){
		"300 keys at once":         func(p *paced) { p.loop.Enqueue(objects("busy", 300)...) },
		"300 changes":              func(p *paced) { p.change(objects("busy", 300)...) },
		"300 targets of a source":  func(p *paced) { p.reconcile = wide(p, source, 300); p.loop.Enqueue(source) },
		"300 keys that come again": func(p *paced) { p.reconcile = again(time.Second, nil); p.loop.Enqueue(objects("busy", 300)...) },
		"300 keys that fail": func(p *paced) {
			p.reconcile = again(0, errors.New("always"))
			p.loop.Enqueue(objects("busy", 300)...)
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := newPaced(t)
				p.lead(t)
				begin(p)
				for range 5 {
					pass(pace)
					p.change(mine)
					p.expectNext(t, 3, mine) // after the one under way and one of the other tenant
				}
			})
		})
	}
}

// change adds or changes objects.
func (p *paced) change(names ...cache.ObjectName) {
	for _, name := range names {
		p.source.Modify(object(name, time.Now().String()))
	}
	synctest.Wait()
}

// wide enqueues n keys, each in a namespace of its own, on behalf of the tenant of a source.
func wide(p *paced, source cache.ObjectName, n int) func(context.Context, cache.ObjectName) (time.Duration, error) {
	return func(ctx context.Context, key cache.ObjectName) (time.Duration, error) {
		for i := range n {
			if key == source {
				p.loop.EnqueueFor(ctx, source.Namespace, cache.NewObjectName(fmt.Sprint("target-", i), "a"))
			}
		}
		return 0, nil
	}
}

// again returns these for the keys of one tenant.
func again(after time.Duration, err error) func(context.Context, cache.ObjectName) (time.Duration, error) {
	return func(_ context.Context, key cache.ObjectName) (time.Duration, error) {
		if key.Namespace != "busy" {
			return 0, nil
		}
		return after, err
	}
}

func TestFairnessOfRequeuesAgainstTheReplay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPaced(t, objects("shop", 200)...)
		again := cache.NewObjectName("shop", "199") // the one that was written last is the first
		p.reconcile = func(_ context.Context, key cache.ObjectName) (time.Duration, error) {
			if key == again {
				return 5*pace + pace/4, nil
			}
			return 0, nil
		}
		p.lead(t)
		for range 5 {
			p.expectNext(t, 8, again) // one, its delay of 5, and two before it
		}
	})
}

// TestFairnessOfReplayAgainstFanOut has an object of another tenant that makes many keys due while
// a leader begins.
func TestFairnessOfReplayAgainstFanOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		source, mine := cache.NewObjectName("busy", "source"), cache.NewObjectName("mine", "a")
		names := []cache.ObjectName{mine} // which comes last, since it was written first
		for i := range 4 {
			names = append(names, cache.NewObjectName(fmt.Sprint("other-", i), "a"))
		}
		p := newPaced(t, append(names, source)...)
		p.reconcile = wide(p, source, 300)
		p.lead(t)
		p.expectNext(t, 11, mine) // the source, then the five others, each after one target at most
		p.change(cache.NewObjectName("busy", "new"))
		p.expectNext(t, 2, cache.NewObjectName("busy", "new"))
	})
}

// TestReplayWaitsForTheQueue has more objects than the queue takes at once, in two namespaces, and an object
// that changes meanwhile.
func TestReplayWaitsForTheQueue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		mine := cache.NewObjectName("mine", "a")
		const busy = 3 * replayAhead
		p := newPaced(t, append([]cache.ObjectName{mine}, objects("busy", busy)...)...)
		p.lead(t)
		p.expectNext(t, 3, mine)
		if s := p.loop.Status(); s.QueueDepth > replayAhead || s.Phase != PhaseSyncing {
			t.Errorf("%+v", s)
		}
		p.change(mine)
		p.expectNext(t, 3, mine)
		pass((busy + 10) * pace)
		synctest.Wait()
		done := p.ended()
		slices.SortFunc(done, func(a, b cache.ObjectName) int { return strings.Compare(a.String(), b.String()) })
		if s := p.loop.Status(); len(slices.Compact(done)) != busy+1 || s.QueueDepth != 0 || s.Phase != PhaseRunning {
			t.Errorf("%d objects were reconciled: %+v", len(done), s)
		}
	})
}
