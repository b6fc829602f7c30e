// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package controllers

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/tools/cache"
	"k8s.io/component-base/metrics"
	"k8s.io/klog/v2"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// reconciling is what a loop is made of, without its watches.
type reconciling struct {
	Options
	Reconcile func(context.Context, cache.ObjectName) (time.Duration, error)
}

// harness runs one loop over the ConfigMaps of a fake clientset, in a bubble of fake time.
type harness struct {
	client   kubernetes.Interface
	informer cache.SharedIndexInformer
	reconciling
	loop     *Loop[cache.ObjectName] // by build
	registry metrics.KubeRegistry
	work     context.Context // see WithWork
	logger   klog.Logger
	stop     context.CancelFunc
	stopped  chan error
	begun    time.Time
}

func newHarness(t *testing.T, opts reconciling, names ...string) *harness {
	t.Helper()
	client := fake.NewClientset()
	for _, name := range names {
		create(t, client, name)
	}
	registry := metrics.NewKubeRegistry()
	opts.Name = "test"
	opts.Metrics = NewMetrics(registry)
	h := &harness{
		client: client,
		informer: cache.NewSharedIndexInformer(
			cache.ToListWatcherWithWatchListSemantics(&cache.ListWatch{
				ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (obj runtime.Object, err error) {
					return client.CoreV1().ConfigMaps("").List(ctx, o)
				},
				WatchFuncWithContext: client.CoreV1().ConfigMaps("").Watch,
			}, client), &corev1.ConfigMap{}, 0, cache.Indexers{}),
		reconciling: opts,
		registry:    registry,
		work:        context.Background(),
		logger:      klog.Background(),
		stopped:     make(chan error, 1),
		begun:       time.Now(),
	}
	return h
}

func create(t *testing.T, client kubernetes.Interface, name string) {
	t.Helper()
	cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name}}
	if _, err := client.CoreV1().ConfigMaps("shop").Create(t.Context(), cm, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
}

// run starts the informer and the loop, which watches the ConfigMaps themselves; both end with the
// test.
func (h *harness) run(t *testing.T) {
	t.Helper()
	h.runWith(t, WatchSelf(h.informer))
}

func (h *harness) runWith(t *testing.T, watches ...Watch[cache.ObjectName]) {
	t.Helper()
	h.build(t, watches...)
	h.start(t)
}

func (h *harness) start(t *testing.T) {
	t.Helper()
	ctx, stop := context.WithCancel(klog.NewContext(t.Context(), h.logger))
	h.stop = stop
	informerCtx, stopInformer := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { h.informer.RunWithContext(informerCtx) })
	go func() { h.stopped <- h.loop.Run(WithWork(ctx, h.work)) }()
	t.Cleanup(func() {
		stop()
		stopInformer()
		wg.Wait()
	})
	synctest.Wait()
}

// build makes the loop, which registers the watches.
func (h *harness) build(t *testing.T, watches ...Watch[cache.ObjectName]) {
	t.Helper()
	var err error
	if h.loop, err = NewLoop(h.Options, h.Reconcile, watches...); err != nil {
		t.Fatal(err)
	}
}

// pass waits until d has passed in the bubble.
func pass(d time.Duration) { <-time.After(d) }

func TestDrain(t *testing.T) {
	cases := map[string]struct {
		takes    time.Duration // how long the reconcile in flight takes
		hears    bool          // whether it ends when its context ends
		cutAfter time.Duration // from the end of Run's context until the host cuts it off; 0: never
		wantEnds time.Duration // from the end of Run's context until Run returns
		wantCut  bool
	}{
		"a reconcile in flight finishes before Run returns": {
			takes: 5 * time.Second, hears: true, wantEnds: 5 * time.Second,
		},
		"a reconcile is waited for as long as the host does not cut it off": {
			takes: time.Hour, hears: true, wantEnds: time.Hour,
		},
		"the host cuts a reconcile off, and says why": {
			takes: time.Hour, hears: true, cutAfter: 10 * time.Second, wantEnds: 10 * time.Second, wantCut: true,
		},
		"Run does not return before a reconcile that ignores that": {
			takes: time.Hour, cutAfter: 10 * time.Second, wantEnds: time.Hour,
		},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var began, finished, cut atomic.Int32
				h := newHarness(t, reconciling{
					Options: Options{Workers: 1},
					Reconcile: func(ctx context.Context, _ cache.ObjectName) (time.Duration, error) {
						began.Add(1)
						done := ctx.Done()
						if !tc.hears {
							done = nil
						}
						select {
						case <-time.After(tc.takes):
							finished.Add(1)
							return 0, nil
						case <-done:
							cut.Add(1)
							return 0, context.Cause(ctx)
						}
					},
				}, "a", "b", "c")
				work, cutOff := context.WithCancelCause(context.Background())
				defer cutOff(nil)
				h.work = work
				h.run(t)
				if got := h.loop.Status(); got.Phase != Running || got.QueueDepth != 2 {
					t.Errorf("status while running = %+v, want Running with 2 keys queued", got)
				}

				ended := time.Now()
				h.stop()
				synctest.Wait()
				if got := h.loop.Status().Phase; got != Draining {
					t.Errorf("phase after the context ended = %s, want %s", got, Draining)
				}
				if tc.cutAfter > 0 {
					pass(tc.cutAfter)
					cutOff(errors.New("the time is up"))
				}
				if err := <-h.stopped; err != nil {
					t.Errorf("Run returned %v", err)
				}
				if took := time.Since(ended); took != tc.wantEnds {
					t.Errorf("Run returned %v after its context ended, want %v", took, tc.wantEnds)
				}
				if began.Load() != 1 {
					t.Errorf("%d reconciles began, want 1: the queued keys must not be taken while draining", began.Load())
				}
				if got := cut.Load() == 1; got != tc.wantCut {
					t.Errorf("reconcile cut off = %v, want %v", got, tc.wantCut)
				}
				if got := h.loop.Status(); got.Phase != Stopped || len(got.InFlight) > 0 {
					t.Errorf("status after Run = %+v, want %s with nothing in flight", got, Stopped)
				}
				if e := h.loop.Status().LastError; tc.wantCut && (e == nil || e.Text != "the time is up") {
					t.Errorf("last error = %+v, want the cause of the cut", e)
				}
			})
		})
	}
}

// refusal is an error like that of the write fence.
type refusal struct{}

func (refusal) Error() string    { return "not leading" }
func (refusal) NotLeading() bool { return true }

func TestRequeue(t *testing.T) {
	tooMany := apierrors.NewTooManyRequests("slow down", 30)
	type outcome struct {
		after time.Duration
		err   error
	}
	cases := map[string]struct {
		outcomes []outcome // of the successive calls; success afterwards
		want     []time.Duration
		result   string
	}{
		"a duration calls again after it": {
			outcomes: []outcome{{after: time.Minute}, {after: time.Hour}},
			want:     []time.Duration{0, time.Minute, time.Minute + time.Hour},
			result:   resultRequeue,
		},
		"success waits for the next event": {
			want: []time.Duration{0}, result: resultSuccess,
		},
		"errors back off exponentially": {
			outcomes: []outcome{{err: errors.New("a")}, {err: errors.New("b")}, {err: errors.New("c")}},
			want:     []time.Duration{0, 1 * time.Second, 3 * time.Second, 7 * time.Second},
			result:   resultError,
		},
		"a success resets the back-off": {
			outcomes: []outcome{{err: errors.New("a")}, {err: errors.New("b")}, {after: time.Second}, {err: errors.New("c")}},
			want:     []time.Duration{0, 1 * time.Second, 3 * time.Second, 4 * time.Second, 5 * time.Second},
			result:   resultError,
		},
		"Retry-After of the API server is honoured through wrapping": {
			outcomes: []outcome{{err: fmt.Errorf("patch: %w", tooMany)}},
			want:     []time.Duration{0, 30 * time.Second},
			result:   resultError,
		},
		"an error with a duration is tried again no later than after it": {
			outcomes: []outcome{{err: errors.New("a")}, {err: errors.New("b")}, {after: 3 * time.Second, err: errors.New("c")}, {after: time.Minute, err: errors.New("d")}},
			want:     []time.Duration{0, 1 * time.Second, 3 * time.Second, 6 * time.Second, 14 * time.Second},
			result:   resultError,
		},
		"Retry-After beats such a duration": {
			outcomes: []outcome{{after: time.Second, err: tooMany}},
			want:     []time.Duration{0, 30 * time.Second},
			result:   resultError,
		},
		"a refusal of the fence is a result of its own": {
			outcomes: []outcome{{err: fmt.Errorf("patch: %w", refusal{})}},
			want:     []time.Duration{0, time.Second},
			result:   resultNotLeading,
		},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var got []time.Duration
				var h *harness
				h = newHarness(t, reconciling{
					Reconcile: func(context.Context, cache.ObjectName) (time.Duration, error) {
						got = append(got, time.Since(h.begun))
						if len(got) > len(tc.outcomes) {
							return 0, nil
						}
						o := tc.outcomes[len(got)-1]
						return o.after, o.err
					},
				}, "a")
				h.run(t)
				pass(24 * time.Hour)
				h.stop()
				if err := <-h.stopped; err != nil {
					t.Errorf("Run: %v", err)
				}
				if diff := cmp.Diff(tc.want, got); diff != "" {
					t.Errorf("calls differ (-want +got):\n%s", diff)
				}
				if n := counter(t, h.registry, tc.result); n == 0 {
					t.Errorf("no reconcile was counted as %s", tc.result)
				}
			})
		})
	}
}

func TestBackoffNeverGivesUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var calls []time.Time
		h := newHarness(t, reconciling{
			Reconcile: func(context.Context, cache.ObjectName) (time.Duration, error) {
				calls = append(calls, time.Now())
				return 0, errors.New("always")
			},
		}, "a")
		h.run(t)
		pass(24 * time.Hour)
		h.stop()
		if err := <-h.stopped; err != nil {
			t.Errorf("Run: %v", err)
		}
		last := calls[len(calls)-1].Sub(calls[len(calls)-2])
		if len(calls) < 200 || last != maxBackoff {
			t.Errorf("%d calls in a day, the last %v apart; want one every %v", len(calls), last, maxBackoff)
		}
	})
}

func TestPanicOfOneKeyLeavesTheOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		calls := map[string]int{}
		h := newHarness(t, reconciling{
			Reconcile: func(_ context.Context, k cache.ObjectName) (time.Duration, error) {
				calls[k.Name]++
				if k.Name == "bad" && calls["bad"] < 3 {
					panic("poison")
				}
				return 0, nil
			},
		}, "bad", "good")
		h.run(t)
		pass(time.Minute)
		want := map[string]int{"bad": 3, "good": 1}
		if diff := cmp.Diff(want, calls); diff != "" {
			t.Errorf("calls differ (-want +got):\n%s", diff)
		}
		status := h.loop.Status()
		if status.Panics != 2 || status.Errors != 0 || status.Reconciles != 4 {
			t.Errorf("status = %+v, want 2 panics, no errors, 4 reconciles", status)
		}
		if status.LastError == nil || status.LastError.Key != "shop/bad" || status.LastError.Text != "panic: a value of type string" {
			t.Errorf("last error = %+v, want the panic of shop/bad", status.LastError)
		}
		if n := counter(t, h.registry, resultPanic); n != 2 {
			t.Errorf("panics counted = %v, want 2", n)
		}
	})
}

func TestOneKeyIsNeverWithTwoWorkers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var now, most, calls atomic.Int32
		h := newHarness(t, reconciling{
			Options: Options{Workers: 8},
			Reconcile: func(context.Context, cache.ObjectName) (time.Duration, error) {
				most.Store(max(most.Load(), now.Add(1)))
				pass(time.Second)
				now.Add(-1)
				calls.Add(1)
				return 0, nil
			},
		}, "a")
		h.run(t)
		for i := range 5 {
			cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "a"}, Data: map[string]string{"i": fmt.Sprint(i)}}
			if _, err := h.client.CoreV1().ConfigMaps("shop").Update(t.Context(), cm, metav1.UpdateOptions{}); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
		}
		pass(time.Minute)
		// Five events while the key was busy make one more reconcile, not five.
		if most.Load() != 1 || calls.Load() != 2 {
			t.Errorf("%d at once in %d calls, want 1 in 2", most.Load(), calls.Load())
		}
	})
}

func TestNothingIsReconciledBeforeEveryInformerHasSynced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var calls atomic.Int32
		h := newHarness(t, reconciling{
			Reconcile: func(context.Context, cache.ObjectName) (time.Duration, error) {
				calls.Add(1)
				return 0, nil
			},
		}, "a")
		never := cache.NewSharedIndexInformer(&cache.ListWatch{}, &corev1.Secret{}, 0, cache.Indexers{})
		h.build(t, WatchSelf(h.informer), WatchSelf(never))
		ctx, stop := context.WithCancel(t.Context())
		informerCtx, stopInformer := context.WithCancel(t.Context())
		go h.informer.RunWithContext(informerCtx)
		go func() { h.stopped <- h.loop.Run(ctx) }()
		pass(time.Hour)
		if got := h.loop.Status().Phase; got != Syncing || calls.Load() != 0 {
			t.Errorf("phase %s after %d reconciles, want Syncing and none", got, calls.Load())
		}
		stop()
		if err := <-h.stopped; err != nil {
			t.Errorf("Run returned %v, want nil", err)
		}
		stopInformer()
		synctest.Wait()
	})
}
