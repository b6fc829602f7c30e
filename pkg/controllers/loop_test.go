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
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/tools/cache"
	"k8s.io/component-base/metrics"
	"k8s.io/klog/v2"

	"github.com/quartermaster-dev/quartermaster/pkg/informers"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// reconciling is what a loop is made of, without its watches.
type reconciling struct {
	LoopOptions
	Reconcile func(context.Context, cache.ObjectName) (time.Duration, error)
}

// harness runs one loop over the ConfigMaps of a fake clientset, in a bubble of fake time.
type harness struct {
	client   kubernetes.Interface
	informer informers.Informer[*corev1.ConfigMap]
	runs     cache.SharedIndexInformer // what informer stands for
	reconciling
	loop     *Loop[cache.ObjectName] // by build
	registry metrics.KubeRegistry
	work     context.Context // see WithProcess
	leading  chan struct{}   // closed when the replica leads
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
		runs: cache.NewSharedIndexInformer(
			cache.ToListWatcherWithWatchListSemantics(&cache.ListWatch{
				ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (obj runtime.Object, err error) {
					return client.CoreV1().ConfigMaps("").List(ctx, o)
				},
				WatchFuncWithContext: client.CoreV1().ConfigMaps("").Watch,
			}, client), &corev1.ConfigMap{}, 0, cache.Indexers{}),
		reconciling: opts,
		registry:    registry,
		work:        context.Background(),
		leading:     closed(),
		logger:      klog.Background(),
		stopped:     make(chan error, 1),
		begun:       time.Now(),
	}
	h.informer = asInformer[*corev1.ConfigMap](h.runs)
	return h
}

// closed returns a closed channel.
func closed() chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
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
	wg.Go(func() { h.runs.RunWithContext(informerCtx) })
	go func() { h.stopped <- h.loop.Run(WithProcess(ctx, h.work, h.leading)) }()
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
	if h.loop, err = NewLoop(h.LoopOptions, h.Reconcile, watches...); err != nil {
		t.Fatal(err)
	}
}

// pass waits until d has passed in the bubble.
func pass(d time.Duration) { <-time.After(d) }

// refusal is an error like the fence's.
type refusal struct{}

func (refusal) Error() string    { return "not leading" }
func (refusal) NotLeading() bool { return true }

func TestLoopRequeuesAsAReconcileAsks(t *testing.T) {
	tooMany := apierrors.NewTooManyRequests("slow down", 30)
	conflict := apierrors.NewConflict(schema.GroupResource{Resource: "configmaps"}, "a", errors.New("it has changed"))
	type outcome struct {
		after time.Duration
		err   error
	}
	bad := errors.New("bad")
	cases := map[string]struct {
		opts     LoopOptions
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
		"a webhook cannot put a key off for a month": {
			outcomes: []outcome{{err: apierrors.NewTooManyRequests("go away", 30*24*3600)}},
			want:     []time.Duration{0, 5 * time.Minute},
			result:   resultError,
		},
		"a conflict is no error": {
			outcomes: []outcome{{err: fmt.Errorf("update: %w", conflict)}},
			want:     []time.Duration{0, time.Second},
			result:   resultConflict,
		},
		"the fourth conflict in a row is one": {
			outcomes: []outcome{{err: conflict}, {err: conflict}, {err: conflict}, {err: conflict}},
			want:     []time.Duration{0, 1 * time.Second, 3 * time.Second, 7 * time.Second, 15 * time.Second},
			result:   resultError,
		},
		"a field that somebody else manages is an error at once": {
			outcomes: []outcome{{err: apierrors.NewApplyConflict([]metav1.StatusCause{{Type: metav1.CauseTypeFieldManagerConflict}}, "taken")}},
			want:     []time.Duration{0, time.Second},
			result:   resultError,
		},
		"the back-off grows to five minutes": {
			outcomes: slices.Repeat([]outcome{{err: bad}}, 11),
			want: []time.Duration{0, 1 * time.Second, 3 * time.Second, 7 * time.Second, 15 * time.Second, 31 * time.Second, 63 * time.Second,
				127 * time.Second, 255 * time.Second, 511 * time.Second, 511*time.Second + maxBackoff, 511*time.Second + 2*maxBackoff},
			result: resultError,
		},
		"a back-off of the loop's own": {
			opts:     LoopOptions{MaxBackoff: 5 * time.Second},
			outcomes: slices.Repeat([]outcome{{err: bad}}, 5),
			want:     []time.Duration{0, 1 * time.Second, 3 * time.Second, 7 * time.Second, 12 * time.Second, 17 * time.Second},
			result:   resultError,
		},
		"a terminal error is not tried again": {
			outcomes: []outcome{{err: fmt.Errorf("read: %w", TerminalError(bad))}},
			want:     []time.Duration{0},
			result:   resultTerminal,
		},
		"a terminal error with a duration is called again after it": {
			outcomes: slices.Repeat([]outcome{{after: 9 * time.Second, err: TerminalError(bad)}}, 2),
			want:     []time.Duration{0, 9 * time.Second, 18 * time.Second},
			result:   resultTerminal,
		},
		"a terminal error of nothing is no error": {
			outcomes: []outcome{{err: TerminalError(nil)}},
			want:     []time.Duration{0},
			result:   resultSuccess,
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
					LoopOptions: tc.opts,
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
				if n := h.loop.Status().Errors; tc.result == resultConflict && n != 0 {
					t.Errorf("the status shows %d errors", n)
				}
			})
		})
	}
}

// problem is an error whose methods panic on a nil pointer.
type problem struct{ text string }

func (p *problem) Error() string    { return p.text }
func (p *problem) NotLeading() bool { return p.text == "" }

func TestPanicIsOfOneKey(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		calls := map[string]int{}
		h := newHarness(t, reconciling{
			Reconcile: func(_ context.Context, k cache.ObjectName) (time.Duration, error) {
				calls[k.Name]++
				switch {
				case k.Name == "bad" && calls["bad"] == 1:
					panic("poison")
				case k.Name == "bad" && calls["bad"] == 2:
					var p *problem
					return 0, p
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
		if status.LastError == nil || status.LastError.Key != "shop/bad" || !strings.Contains(status.LastError.Text, "nil pointer") {
			t.Errorf("last error = %+v, want the panic of shop/bad", status.LastError)
		}
		if n := counter(t, h.registry, resultPanic); n != 2 {
			t.Errorf("panics counted = %v, want 2", n)
		}
	})
}

func TestKeyIsNeverWithTwoWorkers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var now, most, calls atomic.Int32
		h := newHarness(t, reconciling{
			LoopOptions: LoopOptions{Workers: 8},
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

func TestLoopWaitsForAllInformers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var calls atomic.Int32
		h := newHarness(t, reconciling{
			Reconcile: func(context.Context, cache.ObjectName) (time.Duration, error) {
				calls.Add(1)
				return 0, nil
			},
		}, "a")
		never := cache.NewSharedIndexInformer(&cache.ListWatch{}, &corev1.Secret{}, 0, cache.Indexers{})
		h.build(t, WatchSelf(h.informer), WatchSelf(asInformer[*corev1.Secret](never)))
		ctx, stop := context.WithCancel(t.Context())
		informerCtx, stopInformer := context.WithCancel(t.Context())
		go h.runs.RunWithContext(informerCtx)
		go func() { h.stopped <- h.loop.Run(ctx) }()
		pass(time.Hour)
		if got := h.loop.Status().Phase; got != PhaseSyncing || calls.Load() != 0 {
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

func TestLoopRunsItsBackground(t *testing.T) {
	for name, test := range map[string]struct {
		background func(ctx context.Context, enqueue func(...string)) error
		keys       string
		err        string // of Run
	}{
		"keys are reconciled until the context ends": {
			background: func(ctx context.Context, enqueue func(...string)) error {
				enqueue("a")
				<-time.After(time.Second)
				enqueue("b")
				<-ctx.Done()
				return nil
			}, keys: "a b",
		},
		"the function may return the error of its context": {
			background: func(ctx context.Context, _ func(...string)) error { <-ctx.Done(); return ctx.Err() },
		},
		"an error of the function ends Run": {
			background: func(context.Context, func(...string)) error { return errors.New("no more") }, err: "no more",
		},
		"Run ends when the function returns": {
			background: func(context.Context, func(...string)) error { return nil }, err: "LoopOptions.Background returned before its context ended",
		},
		"a panic is contained": {
			background: func(context.Context, func(...string)) error { panic("secret") }, err: "panic: a value of type string",
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var keys []string
				var l *Loop[string]
				var err error
				l, err = NewLoop(LoopOptions{
					Name: "x", Metrics: NewMetrics(metrics.NewKubeRegistry()),
					Background: func(ctx context.Context) error { return test.background(ctx, l.Enqueue) },
				}, func(_ context.Context, key string) (time.Duration, error) { keys = append(keys, key); return 0, nil })
				if err != nil {
					t.Fatal(err)
				}
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				err = l.Run(ctx)
				if strings.Join(keys, " ") != test.keys || (err == nil) != (test.err == "") || err != nil && err.Error() != test.err {
					t.Errorf("reconciled %q, error %v; want %q, %q", keys, err, test.keys, test.err)
				}
				if l.Status().Phase != PhaseStopped {
					t.Errorf("phase %s", l.Status().Phase)
				}
			})
		})
	}
}

// TestRunThatIsToldToEndAtOnceEnds has a background function that ends while Run notices that it is to end.
func TestRunThatIsToldToEndAtOnceEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, err := NewLoop(LoopOptions{
			Name: "x", Metrics: NewMetrics(metrics.NewKubeRegistry()), Background: func(context.Context) error { return nil },
		}, func(context.Context, string) (time.Duration, error) { return 0, nil })
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		for range 2000 {
			if err := l.Run(ctx); err != nil {
				t.Fatalf("Run returned %v", err)
			}
		}
	})
}

// TestLoopEndsWithBackground checks that the rest of the queue is not reconciled.
func TestLoopEndsWithBackground(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var l *Loop[string]
		var reconciles int
		l, err := NewLoop(LoopOptions{
			Name: "x", Metrics: NewMetrics(metrics.NewKubeRegistry()),
			Background: func(context.Context) error {
				for i := range 100 {
					l.Enqueue(fmt.Sprint(i))
				}
				<-time.After(90 * time.Second)
				return errors.New("no more")
			},
		}, func(context.Context, string) (time.Duration, error) {
			reconciles++
			<-time.After(time.Minute)
			return 0, nil
		})
		if err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		if err := l.Run(t.Context()); err == nil || err.Error() != "no more" {
			t.Errorf("Run returned %v", err)
		}
		if took := time.Since(began); took != 2*time.Minute || reconciles != 2 {
			t.Errorf("Run returned after %v and %d reconciles, want the one in flight to be the last", took, reconciles)
		}
	})
}

func TestBackgroundThatFailsLeavesNothingUnfinished(t *testing.T) {
	for name, ends := range map[string]time.Duration{
		"while it is waited for a reconcile": 90 * time.Second, "at the same time": time.Minute,
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var l *Loop[string]
				l, err := NewLoop(LoopOptions{
					Name: "x", Metrics: NewMetrics(metrics.NewKubeRegistry()),
					Background: func(context.Context) error {
						l.Enqueue("a")
						<-time.After(time.Minute)
						return errors.New("no more")
					},
				}, func(context.Context, string) (time.Duration, error) { <-time.After(2 * time.Minute); return 0, nil })
				if err != nil {
					t.Fatal(err)
				}
				ctx, cancel := context.WithTimeout(t.Context(), ends)
				defer cancel()
				if err := l.Run(ctx); err != nil {
					t.Errorf("Run returned %v", err)
				}
			})
		})
	}
}

func TestRefusedKeyIsTriedWhenLeading(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var calls []string
		var h *harness
		h = newHarness(t, reconciling{Reconcile: func(_ context.Context, key cache.ObjectName) (time.Duration, error) {
			calls = append(calls, fmt.Sprint(key.Name, " after ", time.Since(h.begun)))
			select {
			case <-h.leading:
				return 0, nil
			default:
				return 0, fmt.Errorf("patch: %w", refusal{})
			}
		}}, "a")
		h.leading = make(chan struct{})
		h.run(t)
		pass(time.Hour)
		create(t, h.client, "b")
		pass(time.Hour)
		if s := h.loop.Status(); s.Errors != 0 || s.LastError != nil {
			t.Errorf("%d errors, the last one %+v: a refusal is none", s.Errors, s.LastError)
		}
		close(h.leading)
		pass(time.Hour)
		h.stop()
		if err := <-h.stopped; err != nil {
			t.Errorf("Run: %v", err)
		}
		slices.Sort(calls[2:])
		if diff := cmp.Diff([]string{"a after 0s", "b after 1h0m0s", "a after 2h0m0s", "b after 2h0m0s"}, calls); diff != "" {
			t.Errorf("reconciles (-want +got):\n%s", diff)
		}
	})
}
