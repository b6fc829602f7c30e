// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package controllers

import (
	"context"
	"errors"
	"fmt"
	"runtime/pprof"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr/funcr"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	utilerrors "k8s.io/apimachinery/pkg/util/errors"
	"k8s.io/client-go/tools/cache"
	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/testutil"
	"k8s.io/klog/v2"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/internal/lifetime"
	"github.com/quartermaster-dev/quartermaster/internal/loopmetrics"
	"github.com/quartermaster-dev/quartermaster/internal/panics"
	"github.com/quartermaster-dev/quartermaster/internal/subtest"
)

// refusal is an error like the fence's.
type refusal struct{}

func (refusal) Error() string    { return "not leading" }
func (refusal) NotLeading() bool { return true }

func TestLoopRequeuesAsAReconcileAsks(t *testing.T) {
	tooMany := apierrors.NewTooManyRequests("slow down", 30)
	conflict := apierrors.NewConflict(schema.GroupResource{Resource: "configmaps"}, "a", errors.New("it has changed"))
	managed := apierrors.NewApplyConflict([]metav1.StatusCause{{Type: metav1.CauseTypeFieldManagerConflict}}, "taken")
	type outcome struct {
		after time.Duration
		err   error
	}
	bad := errors.New("bad")
	for name, tc := range map[string]struct {
		maxBackoff time.Duration
		outcomes   []outcome // of the successive calls; success afterwards
		want       []float64 // seconds after which it is called
		result     string
	}{
		"a duration calls again after it":                        {0, []outcome{{after: time.Minute}, {after: time.Hour}}, []float64{0, 60, 3660}, loopmetrics.Requeue},
		"success, such as no terminal error, waits for an event": {0, []outcome{{err: TerminalError(nil)}}, []float64{0}, loopmetrics.Success},
		"a success resets the back-off":                          {0, []outcome{{err: bad}, {err: bad}, {after: time.Second}, {err: bad}}, []float64{0, 1, 3, 4, 5}, loopmetrics.Error},
		"an error with a duration is tried again no later than after it": {0, []outcome{{err: bad}, {err: bad}, {after: 3 * time.Second, err: bad}, {after: time.Minute, err: bad}},
			[]float64{0, 1, 3, 6, 14}, loopmetrics.Error},
		"Retry-After, even wrapped, beats such a duration":       {0, []outcome{{after: time.Second, err: fmt.Errorf("patch: %w", tooMany)}}, []float64{0, 30}, loopmetrics.Error},
		"the longest Retry-After of joined errors counts":        {0, []outcome{{err: fmt.Errorf("all: %w", utilerrors.NewAggregate([]error{apierrors.NewTooManyRequests("busy", 2), tooMany}))}}, []float64{0, 30}, loopmetrics.Error},
		"a webhook cannot put a key off for a month":             {0, []outcome{{err: apierrors.NewTooManyRequests("go away", 30*24*3600)}}, []float64{0, 300}, loopmetrics.Error},
		"a conflict is no error":                                 {0, []outcome{{err: fmt.Errorf("update: %w", conflict)}}, []float64{0, 0.1}, loopmetrics.Conflict},
		"the fourth conflict in a row is one":                    {0, slices.Repeat([]outcome{{err: conflict}}, 4), []float64{0, 0.1, 0.3, 0.7, 1.7}, loopmetrics.Error},
		"a field that somebody else manages is an error at once": {0, []outcome{{err: managed}}, []float64{0, 1}, loopmetrics.Error},
		"the back-off grows to five minutes":                     {0, slices.Repeat([]outcome{{err: bad}}, 11), []float64{0, 1, 3, 7, 15, 31, 63, 127, 255, 511, 811, 1111}, loopmetrics.Error},
		"a back-off of the loop's own":                           {5 * time.Second, slices.Repeat([]outcome{{err: bad}}, 5), []float64{0, 1, 3, 7, 12, 17}, loopmetrics.Error},
		"a terminal error is called again only after a duration": {0, []outcome{{after: 9 * time.Second, err: TerminalError(bad)}, {err: fmt.Errorf("read: %w", TerminalError(bad))}}, []float64{0, 9}, loopmetrics.Terminal},
		"a terminal error beside another is tried again":         {0, []outcome{{err: fmt.Errorf("read: %w", errors.Join(TerminalError(bad), bad))}}, []float64{0, 1}, loopmetrics.Error},
		"a refusal by --dry-run is no failure":                   {0, []outcome{{err: &DryRunError{}}}, []float64{0}, loopmetrics.Terminal},
		"several terminal errors are not":                        {0, []outcome{{err: errors.Join(TerminalError(bad), &DryRunError{})}}, []float64{0}, loopmetrics.Terminal},
		"a conflict beside another error is an error":            {0, []outcome{{err: errors.Join(conflict, bad)}}, []float64{0, 1}, loopmetrics.Error},
		"several conflicts are none":                             {0, []outcome{{err: fmt.Errorf("apply: %w", errors.Join(conflict, conflict))}}, []float64{0, 0.1}, loopmetrics.Conflict},
		"a refusal of the fence is a result of its own":          {0, []outcome{{err: fmt.Errorf("patch: %w", refusal{})}}, []float64{0, 1}, loopmetrics.NotLeading},
		"a refusal hides no other error":                         {0, []outcome{{err: errors.Join(refusal{}, bad)}}, []float64{0, 1}, loopmetrics.Error},
	} {
		subtest.InBubble(t, name, func(t *testing.T) {
			f := newFixture(t, "a")
			f.opts.MaxBackoff = tc.maxBackoff
			var got []float64
			f.reconcile = func(context.Context, cache.ObjectName) (time.Duration, error) {
				got = append(got, time.Since(f.begun).Round(time.Millisecond).Seconds())
				if len(got) > len(tc.outcomes) {
					return 0, nil
				}
				o := tc.outcomes[len(got)-1]
				return o.after, o.err
			}
			f.run()
			pass(24 * time.Hour)
			synctest.Wait()
			assert.Equal(t, "calls", tc.want, got)
			if counters(t, f.registry, "test")[tc.result] == 0 {
				t.Errorf("no reconcile was counted as %s", tc.result)
			}
			if n := f.loop.Status().Errors; tc.result == loopmetrics.Conflict && n != 0 {
				t.Errorf("the status shows %d errors", n)
			}
			failing := tc.result == loopmetrics.Terminal && !strings.Contains(name, "dry-run")
			assert.Equal(t, "whether the key is shown as failing in the end", failing, f.loop.Status().Failing > 0)
		})
	}
}

func TestReconcileEndsInTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, "a")
		f.opts.Timeout, f.opts.MinBackoff = 5*time.Second, 10*time.Second
		f.reconcile = func(ctx context.Context, _ cache.ObjectName) (time.Duration, error) {
			f.say("after %s", time.Since(f.begun))
			<-ctx.Done()
			return 0, ctx.Err()
		}
		f.run()
		pass(time.Minute)
		f.expect("after 0s", "after 15s", "after 40s")
		if got := f.loop.Status().LastError; got == nil || got.Text != "the reconcile took longer than LoopOptions.Timeout, 5s: context deadline exceeded" {
			t.Errorf("the last error is %+v", got)
		}
		failing := f.loop.Status().FailingKeys
		f.end()
		assert.Equal(t, "keys that fail, and after Run", [][]string{{"shop/a"}, nil}, [][]string{failing, f.loop.Status().FailingKeys})
	})
}

// TestReconcileIsLoggedAndProfiledAsItself has a loop that another reconcile runs.
func TestReconcileIsLoggedAndProfiledAsItself(t *testing.T) {
	for loop, logged := range map[string]string{"": `"controller"="test"`, "main": `"controller"="test" "loop"="main"`} {
		subtest.InBubble(t, "loop "+loop, func(t *testing.T) {
			f := newFixture(t, "a")
			f.opts.Loop = loop
			f.logger = funcr.New(func(_, line string) { f.say("%s", line) }, funcr.Options{})
			f.reconcile = func(ctx context.Context, _ cache.ObjectName) (time.Duration, error) {
				<-time.After(time.Second) // until the loop has logged its start
				klog.FromContext(ctx).Info("hello")
				controllerLabel, _ := pprof.Label(ctx, "controller")
				loopLabel, _ := pprof.Label(ctx, "loop")
				f.say("%s %s", controllerLabel, loopLabel)
				return 0, nil
			}
			f.run()
			pass(2 * time.Second)
			f.expect(`"level"=0 "msg"="Loop started" `+logged+` "workers"=1`, `"level"=0 "msg"="hello" `+logged+` "key"="shop/a"`, "test "+loop)
		})
	}
}

// problem is an error whose methods panic on a nil pointer.
type problem struct{ text string }

func (p *problem) Error() string    { return p.text }
func (p *problem) NotLeading() bool { return p.text == "" }

func TestPanicOfAKeyStopsNoOtherKey(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, "bad", "good")
		calls := map[string]int{}
		f.reconcile = func(_ context.Context, k cache.ObjectName) (time.Duration, error) {
			calls[k.Name]++
			switch {
			case k.Name == "bad" && calls["bad"] == 1:
				panic("poison")
			case k.Name == "bad" && calls["bad"] == 2:
				return 0, (*problem)(nil)
			case k.Name == "bad" && calls["bad"] == 3:
				return 0, TerminalError(struct{ error }{}) // its Error panics
			}
			return 0, nil
		}
		f.run()
		pass(time.Minute)
		status := f.loop.Status()
		assert.Equal(t, "calls", map[string]int{"bad": 4, "good": 1}, calls)
		assert.Equal(t, "panics, errors and reconciles", []uint64{3, 0, 5}, []uint64{status.Panics, status.Errors, status.Reconciles})
		if status.LastError == nil || status.LastError.Key != "shop/bad" || !strings.Contains(status.LastError.Text, "nil pointer") {
			t.Errorf("last error = %+v, want the panic of shop/bad", status.LastError)
		}
		assert.Equal(t, "panics counted", 3, counters(t, f.registry, "test")[loopmetrics.Panic])
	})
}

func TestLoopWaitsForAllInformers(t *testing.T) {
	for name, syncs := range map[string]bool{"until it is to end": false, "until they have synced, and then maps each object once": true} {
		subtest.InBubble(t, name, func(t *testing.T) {
			f, watched, read := newFixture(t, "a"), newMemory("1", "b"), newMemory("1")
			late := map[bool]*memory{true: watched, false: read}[syncs]
			late.synced = make(chan struct{})
			f.opts.WaitFor = []Awaited{read}
			f.build(f.configMaps.self(), watched.self())
			f.run()
			pass(time.Hour)
			assert.Equal(t, "phase", PhaseSyncing, f.loop.Status().Phase)
			f.expect()
			if syncs {
				close(late.synced)
				synctest.Wait()
				f.expect("a", "b")
				return
			}
			f.loop.Enqueue(cache.ObjectName{Name: "x"})
			f.end()
			assert.Equal(t, "keys left in the queue", 0, f.loop.Status().QueueDepth)
		})
	}
}

func TestKeyWaitsWhileACacheLacksIt(t *testing.T) {
	for name, tc := range map[string]struct {
		use     string // of the cache, by the loop
		lacks   string
		blocked []string
	}{
		"a namespace, and the loop waits for the cache":     {"wait", "team", []string{"team/b"}},
		"a namespace, in the cache of an added watch":       {"add", "team", []string{"team/b"}},
		"an object that does not fit its Go type":           {"watch", "team/b", []string{"team/b"}},
		"an object that does not fit, of an added watch":    {"add", "team/b", []string{"team/b"}},
		"another object of the name, in WaitFor":            {"wait", "team/b", nil},
		"another object of the name, which is mapped to it": {"map", "team/b", nil},
	} {
		subtest.InBubble(t, name, func(t *testing.T) {
			f, other, later := newFixture(t, "a", "team/b"), newMemory("1"), newMemory("1")
			other.unlisted = func(namespace string) bool { return namespace == tc.lacks && time.Since(f.begun) < time.Hour }
			later.unlisted, later.synced = func(string) bool { return true }, make(chan struct{}) // nobody waits for it
			watches, added := []Watch[cache.ObjectName]{f.configMaps.self()}, []*memory{later}
			switch tc.use {
			case "wait":
				f.opts.WaitFor = []Awaited{other}
			case "watch":
				watches = append(watches, other.self())
			case "map":
				watches = append(watches, other.mapped(ownName[*corev1.ConfigMap]))
			case "add":
				added = append(added, other)
			}
			f.build(watches...)
			for _, m := range added {
				_, err := f.loop.Watch(m.self())
				assert.NoError(t, err)
			}
			f.run()
			pass(time.Hour - time.Second)
			assert.Equal(t, "keys that are blocked", tc.blocked, f.loop.Status().BlockedKeys)
			assert.Equal(t, "gauges of blocked and failing keys", []int{len(tc.blocked), 0}, []int{gauge(f.registry, "blocked_keys"), gauge(f.registry, "failing_keys")})
			pass(lackingRetry)
			assert.Equal(t, "last of the keys that were reconciled", map[bool]string{true: "b", false: "a"}[tc.blocked != nil], f.said()[1])
			assert.Equal(t, "number of keys that are blocked", 0, f.loop.Status().Blocked)
		})
	}
}

func withBackground(t *testing.T, reconcile func(context.Context, string) (time.Duration, error), background func(context.Context, *Loop[string]) error) *Loop[string] {
	t.Helper()
	var l *Loop[string]
	l, err := NewLoop(LoopOptions{Name: "x", Metrics: loopmetrics.New(metrics.NewKubeRegistry()),
		Background: func(ctx context.Context) error { return background(ctx, l) }}, reconcile)
	assert.NoError(t, err)
	return l
}

func TestLoopRunsItsBackground(t *testing.T) {
	for name, tc := range map[string]struct {
		background func(context.Context, *Loop[string]) error
		takes      time.Duration // a reconcile
		ctx        time.Duration // until Run's context ends
		keys, err  string        // what is reconciled, and what Run returns
		ends       time.Duration // until Run returns
	}{
		"keys are reconciled until the context ends, which is of a reconcile": {func(ctx context.Context, l *Loop[string]) error {
			if Draining(ctx) == nil {
				l.Enqueue("a")
			}
			<-time.After(time.Second)
			l.Enqueue("b")
			<-ctx.Done()
			return nil
		}, 0, time.Minute, "a b", "", time.Minute},
		"the function may return the error of its context": {func(ctx context.Context, _ *Loop[string]) error { <-ctx.Done(); return ctx.Err() }, 0, time.Minute, "", "", time.Minute},
		"an error of the function ends Run, without the rest of the queue": {func(_ context.Context, l *Loop[string]) error {
			l.Enqueue("a", "b", "c", "d")
			<-time.After(90 * time.Second)
			return errors.New("no more")
		}, time.Minute, time.Hour, "a b", "no more", 2 * time.Minute},
		"an error of the function counts no more if the context ends before the last reconcile": {noMore, 2 * time.Minute, 90 * time.Second, "a", "", 2 * time.Minute},
		"an error of the function counts no more if the context ends at the same time":          {noMore, 2 * time.Minute, time.Minute, "a", "", 2 * time.Minute},
		"Run ends when the function returns":                                                    {func(context.Context, *Loop[string]) error { return nil }, 0, time.Minute, "", "LoopOptions.Background returned before its context ended", 0},
		"a panic is contained":                                                                  {func(context.Context, *Loop[string]) error { panic("secret") }, 0, time.Minute, "", "panic: a value of type string", 0},
	} {
		subtest.InBubble(t, name, func(t *testing.T) {
			var keys []string
			l := withBackground(t, func(_ context.Context, key string) (time.Duration, error) {
				keys = append(keys, key)
				pass(tc.takes)
				return 0, nil
			}, tc.background)
			ctx, cancel := context.WithTimeout(reconciling{draining: closed()}.addTo(t.Context()), tc.ctx)
			defer cancel()
			begun := time.Now()
			err := l.Run(ctx)
			if got := strings.Join(keys, " "); got != tc.keys || (err == nil) != (tc.err == "") || err != nil && err.Error() != tc.err {
				t.Errorf("reconciled %q, error %v; want %q, %q", got, err, tc.keys, tc.err)
			}
			assert.Equal(t, "when Run returned, and the phase", []any{tc.ends, PhaseStopped}, []any{time.Since(begun), l.Status().Phase})
		})
	}
}

// noMore is a background function that fails after a minute.
func noMore(_ context.Context, l *Loop[string]) error {
	l.Enqueue("a")
	<-time.After(time.Minute)
	return errors.New("no more")
}

// TestRunThatIsToldToEndAtOnceEnds has a background function that ends while Run notices that it is to end.
func TestRunThatIsToldToEndAtOnceEnds(t *testing.T) {
	l := withBackground(t, func(context.Context, string) (time.Duration, error) { return 0, nil }, func(context.Context, *Loop[string]) error { return nil })
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for range 2000 {
		if err := l.Run(ctx); err != nil {
			t.Fatalf("Run returned %v", err)
		}
	}
}

func TestRefusedKeyIsTriedWhenLeading(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, "a")
		f.leading = make(chan struct{})
		f.reconcile = func(_ context.Context, key cache.ObjectName) (time.Duration, error) {
			f.say("%s after %s", key.Name, time.Since(f.begun))
			select {
			case <-f.leading:
				return 0, nil
			default:
				return map[string]time.Duration{"b": 40 * time.Minute}[key.Name], fmt.Errorf("patch: %w", refusal{})
			}
		}
		f.run()
		pass(time.Hour)
		f.put("1", "b")
		pass(time.Hour)
		if s := f.loop.Status(); s.Errors != 0 || s.LastError != nil {
			t.Errorf("%d errors, the last one %+v: a refusal is none", s.Errors, s.LastError)
		}
		f.expect("a after 0s", "b after 1h0m0s", "b after 1h40m0s")
		close(f.leading)
		pass(time.Hour)
		synctest.Wait()
		slices.Sort(f.log)
		f.expect("a after 2h0m0s", "b after 2h0m0s", "b after 2h20m0s")
	})
}

func TestMappingThatPanicsIsContainedByTheInformer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, "bad", "good")
		f.put("of another Go type", "other")
		f.build(f.configMaps.mapped(func(e Event[*corev1.ConfigMap]) []cache.ObjectName {
			if e.New.Name == "bad" && textOf(e.New) != "mended" {
				panic("cannot map this")
			}
			return ownName(e)
		}, func(e Event[*corev1.ConfigMap]) bool { return textOf(e.New) != "left out" }))
		f.run()
		assert.Equal(t, "panics of a new leader", []string{"other", "bad"}, f.configMaps.panicked)
		f.put("2", "bad")
		assert.Equal(t, "panics after an event", []string{"other", "bad", "bad"}, f.configMaps.panicked)
		f.put("left out", "bad")
		assert.Equal(t, "problems after an event that is left out", true, slices.Contains(f.configMaps.problems, "bad"))
		f.put("2", "good")
		pass(time.Hour)
		f.expect("good", "good")
		f.put("mended", "bad")
		f.expect("bad")
	})
}

func TestRunWaitsForMappings(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, mapping := newFixture(t), make(chan struct{})
		f.build(f.configMaps.mapped(func(Event[*corev1.ConfigMap]) []cache.ObjectName {
			close(mapping)
			letOthersRun() // such as Run, which would return if it did not wait
			f.say("mapped")
			return nil
		}))
		f.run()
		f.configMaps.put("1", "late")
		<-mapping
		f.end()
		f.expect("mapped")
	})
}

func TestStatusShowsTheLongestRunningReconcile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, "slow")
		f.opts.Workers = 2
		f.reconcile = func(context.Context, cache.ObjectName) (time.Duration, error) { pass(time.Hour); return 0, nil }
		f.build(f.configMaps.self())
		assert.Equal(t, "status before Run", Status{Name: "test", Phase: PhaseStopped, Workers: 2, InFlight: []InFlight{}}, f.loop.Status())
		f.run()
		pass(time.Minute)
		assert.Equal(t, "in flight", []InFlight{{Key: "shop/slow", Since: f.begun}}, f.loop.Status().InFlight)
		key, running := Status{InFlight: []InFlight{{Key: "", Since: f.begun}, {Key: "a", Since: time.Now()}}}.LongestRunning(time.Now())
		assert.Equal(t, "longest running", []any{"", time.Minute}, []any{key, running})
		const longest = "quartermaster_controller_longest_running_reconcile_seconds"
		want := "# HELP " + longest + " [ALPHA] Age of the oldest reconcile in flight, by controller and loop; 0 if none is.\n# TYPE " + longest + " gauge\n" + longest + `{cluster="",controller="test",loop=""} 60` + "\n"
		assert.NoError(t, testutil.GatherAndCompare(f.registry, strings.NewReader(want), longest))
	})
}

// mute is a key whose String hangs until the channel is closed.
type mute struct {
	speaks chan struct{}
	tenant func() string
}

func (m *mute) String() string { <-m.speaks; return "mute" }
func (m *mute) Tenant() string { return m.tenant() }

func TestStatusShowsAKeyWhoseStringHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		configMaps, contained := newMemory("1", "a"), false
		key := &mute{make(chan struct{}), func() string { contained = configMaps.calls.Load() > 0; return "" }}
		l, err := NewLoop(LoopOptions{Name: "x"}, func(context.Context, *mute) (time.Duration, error) { return 0, nil },
			newWatch(configMaps, true, func(Event[*corev1.ConfigMap]) []*mute { return []*mute{key} }, nil))
		assert.NoError(t, err)
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- l.Run(ctx) }()
		pass(time.Minute)
		text, running := l.Status().LongestRunning(time.Now())
		assert.Equal(t, "Tenant is called as part of the mapping", true, contained)
		assert.Equal(t, "longest running", []any{"a key whose String has not returned", time.Minute}, []any{text, running})
		close(key.speaks)
		cancel()
		assert.NoError(t, <-ended)
	})
}

// fixed is a loop that does not change.
type fixed struct {
	status Status
	err    error
}

func (f fixed) Status() Status { return f.status }
func (f fixed) Run(ctx context.Context) error {
	if f.err == nil {
		<-ctx.Done()
	}
	return f.err
}

func TestLoopsHaveOneStatusAndEndTogether(t *testing.T) {
	early, late := &LastError{Key: "a"}, &LastError{Key: "b", Time: time.Unix(1, 0)}
	l := Loops{
		fixed{Status{Phase: PhaseRunning, Workers: 1, QueueDepth: 2, Delayed: 5, InFlight: []InFlight{{Key: "a"}}, Reconciles: 3, LastError: early}, context.Canceled},
		fixed{Status{Name: "c/sync", Phase: PhaseSyncing, Workers: 2, QueueDepth: 3, Delayed: 2, Failing: 1, FailingKeys: []string{"b"}, ToReplay: 4, InFlight: []InFlight{{Key: "b"}}, Reconciles: 4, Errors: 1, Panics: 1, LastError: late}, nil},
		fixed{Status{Phase: PhaseStopped, Panics: 1}, nil},
	}
	want := Status{Phase: PhaseSyncing, Workers: 3, QueueDepth: 5, Delayed: 7, Failing: 1, FailingKeys: []string{"b in loop sync"}, ToReplay: 4, InFlight: []InFlight{{Key: "a"}, {Key: "b in loop sync"}}, Reconciles: 7, Errors: 1, Panics: 2, LastError: &LastError{Key: "b in loop sync", Time: late.Time}}
	assert.Equal(t, "status", want, l.Status())
	if err := l.Run(t.Context()); !errors.Is(err, context.Canceled) {
		t.Errorf("when one loop ends, Run returns %v", err)
	}
	stack, _ := panics.Recover(func() error { return Loops{nil}.Run(t.Context()) })
	assert.Equal(t, "Run panics with a loop and has its stack", true, stack != nil && !strings.Contains(string(stack), "panics.Recover"))
}

func TestLoopsDropNothingAtTheirStart(t *testing.T) {
	for range 20 { // which goroutine is first is chance
		synctest.Test(t, func(t *testing.T) {
			f := newFixture(t)
			f.build()
			if err := (Loops{unable{f.loop}}).Run(t.Context()); err == nil || f.loop.queue.items != nil {
				t.Errorf("Run returned %v and left the queue %v", err, f.loop.queue.items)
			}
			eager := withBackground(t, func(context.Context, string) (time.Duration, error) { return 0, nil }, func(ctx context.Context, _ *Loop[string]) error {
				f.loop.Enqueue(keyOf("a"))
				<-ctx.Done()
				return nil
			})
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			assert.NoError(t, Loops{f.loop, eager}.Run(ctx))
			f.expect("a")
		})
	}
}

// unable embeds a loop that its Run does not reach.
type unable struct{ *Loop[cache.ObjectName] }

func (unable) Run(context.Context) error { return errors.New("cannot connect") }

func TestMetricsOfAClusterEndWithItsLoop(t *testing.T) {
	registry := metrics.NewKubeRegistry()
	m := loopmetrics.New(registry)
	series := func() (names []string) {
		families, err := registry.Gather()
		assert.NoError(t, err)
		for _, family := range families {
			for _, metric := range family.GetMetric() {
				if testutil.LabelsMatch(metric, map[string]string{"cluster": "far"}) || testutil.LabelsMatch(metric, map[string]string{"name": "x/y@far"}) {
					names = append(names, family.GetName())
				}
			}
		}
		return slices.Compact(names)
	}
	l, err := NewLoop(LoopOptions{Name: "x", Loop: "y", Cluster: "far", Metrics: m}, nothing)
	assert.NoError(t, err)
	_, err = NewLoop(LoopOptions{Name: "x", Metrics: m}, nothing)
	assert.NoError(t, err)
	want := []string{"quartermaster_controller_blocked_keys", "quartermaster_controller_failing_keys", "quartermaster_controller_longest_running_reconcile_seconds", "quartermaster_controller_objects_to_replay", "quartermaster_controller_reconcile_duration_seconds", "quartermaster_controller_reconciles_total",
		"workqueue_adds_total", "workqueue_depth", "workqueue_queue_duration_seconds", "workqueue_retries_total"}
	assert.Equal(t, "series", want, series())
	assert.Equal(t, "name", "x/y@far", l.Status().Name)
	l.Close()
	assert.Equal(t, "series that are left", nil, series())
	assert.Equal(t, "results of the loop of our own cluster", len(loopmetrics.Results), len(counters(t, registry, "x")))
}

func TestWatchOfTwoLoopsOutlivesOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, "a")
		w := f.configMaps.self()
		f.opts.Loop = "other"
		f.build(w)
		other := f.loop
		f.opts.Loop = ""
		f.build(w)
		other.Close()
		f.run()
		f.expect("a")
		f.put("2", "a")
		f.expect("a")
	})
}

func TestWatchIsAddedWithoutHoldingUpTheLoop(t *testing.T) {
	for name, before := range map[string]bool{"before the loop runs": true, "while the loop runs": false} {
		subtest.InBubble(t, name, func(t *testing.T) {
			f, other := newFixture(t, "a"), newMemory("1", "b", "c")
			other.synced = make(chan struct{})
			if f.build(f.configMaps.self()); !before {
				f.run()
			}
			mapping := func(e Event[*corev1.ConfigMap]) []cache.ObjectName {
				f.say("maps")
				return ownName(e)
			}
			watch := newWatch(other, false, mapping, nil) // the loop may have reconciled what depends on these objects
			if before {
				watch = other.mapped(mapping)
			}
			remove, err := f.loop.Watch(watch)
			assert.NoError(t, err)
			if before {
				f.run()
			}
			f.expect("a")
			other.set(keyOf("c"), nil)
			synctest.Wait()
			f.expect("maps", "c")
			close(other.synced)
			synctest.Wait()
			f.expect("maps", "b")
			put := func(text string) { other.put(text, "b"); synctest.Wait() }
			put("2")
			f.expect("maps", "b")
			f.end()
			put("3")
			f.run()
			assert.Equal(t, "what the next run does", []string{"a", "b", "maps"}, slices.Sorted(slices.Values(f.said())))
			remove()
			put("4")
			f.end()
			f.run()
			f.expect("a")
			assert.Equal(t, "added watches", 0, len(f.loop.added))
			if _, err = f.loop.Watch(WatchSelf[*corev1.ConfigMap](nil)); err == nil {
				t.Error("a watch of nothing was accepted")
			}
		})
	}
}

func TestClosedLoopHasNoHandler(t *testing.T) {
	f := newFixture(t, "a")
	f.build(f.configMaps.self())
	_, err := f.loop.Watch(f.configMaps.self())
	assert.NoError(t, err)
	closed := f.loop
	closed.Close()
	if _, err = closed.Watch(f.configMaps.self()); err == nil || closed.Run(t.Context()) == nil {
		t.Error("a closed loop took a watch, or ran")
	}
	f.build()
	closed.Close()
	assert.Equal(t, "results of the next loop with metrics", len(loopmetrics.Results), len(counters(t, f.registry, "test")))
	assert.Equal(t, "mappings", 0, len(f.configMaps.mappings))
}

// counters returns the reconciles of one controller by result.
func counters(t *testing.T, gatherer metrics.Gatherer, controller string) map[string]float64 {
	t.Helper()
	values, err := testutil.GetCounterValuesFromGatherer(gatherer, "quartermaster_controller_reconciles_total",
		map[string]string{"controller": controller}, "result")
	assert.NoError(t, err)
	return values
}

// gauge returns the value of a gauge of the only loop; -1 without one.
func gauge(gatherer metrics.Gatherer, name string) int {
	families, _ := gatherer.Gather()
	for _, family := range families {
		if family.GetName() == "quartermaster_controller_"+name {
			return int(family.GetMetric()[0].GetGauge().GetValue())
		}
	}
	return -1
}

func TestDrainEndsReconcilesInTime(t *testing.T) {
	const hosts, own = "the host's time is up", "the reconcile did not end within the 5s that test%s has to drain"
	inTest, inFar := fmt.Sprintf(own, ""), fmt.Sprintf(own, "@far")
	for name, tc := range map[string]struct {
		deaf     bool // whether the reconcile, which takes an hour, ignores the end of its context
		cluster  string
		own      time.Duration // LoopOptions.DrainTimeout
		running  time.Duration // until Run's context ends
		cutAfter time.Duration // from the end of Run's context until the host cuts it off; 0: never
		ends     time.Duration // from the end of Run's context until Run returns
		cause    string        // of the cut, if there is one
	}{
		"a reconcile is waited for as long as the host does not cut it off": {ends: time.Hour},
		"the host cuts a reconcile off, and says why":                       {cutAfter: 10 * time.Second, ends: 10 * time.Second, cause: hosts},
		"a controller's own time cuts it off as well":                       {own: 5 * time.Second, cutAfter: 10 * time.Second, ends: 5 * time.Second, cause: inTest},
		"the controller's own time does not extend the host's":              {own: time.Minute, cutAfter: 10 * time.Second, ends: 10 * time.Second, cause: hosts},
		"Run does not return before a reconcile that ignores that":          {deaf: true, cutAfter: 10 * time.Second, ends: time.Hour},
		"the rest of its own time is left to a cluster that is slow":        {cluster: "far", own: 5 * time.Second, running: 2 * time.Second, ends: 3 * time.Second, cause: inFar},
		"a cluster that has hung for longer has no time left":               {cluster: "far", own: 5 * time.Second, running: time.Minute, cause: inFar},
		"the cluster of the manager itself has the whole time":              {own: 5 * time.Second, running: time.Minute, ends: 5 * time.Second, cause: inTest},
	} {
		subtest.InBubble(t, name, func(t *testing.T) {
			f := newFixture(t, "a", "b", "c")
			f.opts.Cluster, f.opts.DrainTimeout = tc.cluster, tc.own
			work, cutOff := context.WithCancelCause(t.Context())
			defer cutOff(nil)
			f.work = work
			f.reconcile = func(ctx context.Context, _ cache.ObjectName) (time.Duration, error) {
				f.say("began")
				if tc.deaf {
					ctx = context.WithoutCancel(ctx)
				}
				select {
				case <-time.After(time.Hour):
					return 0, nil
				case <-ctx.Done():
					return 0, context.Cause(ctx)
				}
			}
			f.run()
			pass(tc.running)
			running := f.loop.Status()
			assert.Equal(t, "phase while running, and keys queued", []any{PhaseRunning, 2}, []any{running.Phase, running.QueueDepth})
			f.stop()
			synctest.Wait()
			if tc.ends > 0 {
				assert.Equal(t, "phase after the context ended", PhaseDraining, f.loop.Status().Phase)
			}
			if tc.cutAfter > 0 {
				defer time.AfterFunc(tc.cutAfter, func() { cutOff(errors.New(hosts)) }).Stop()
			}
			f.end()
			assert.Equal(t, "time that Run took to return", tc.ends, time.Since(f.begun)-tc.running)
			f.expect("began") // the queued keys must not be taken while draining
			got := f.loop.Status()
			assert.Equal(t, "phase after Run, keys in flight and errors", []any{PhaseStopped, 0, 0}, []any{got.Phase, len(got.InFlight), int(got.Errors)})
			var want *LastError
			if tc.cause != "" {
				want = &LastError{Key: "shop/c", Text: tc.cause, Time: time.Now()}
			}
			assert.Equal(t, "last error", want, got.LastError)
		})
	}
}

func TestLoopOfAnotherClusterTakesNoMoreKeysWhenRunEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, "a", "b")
		f.reconcile = func(ctx context.Context, _ cache.ObjectName) (time.Duration, error) {
			f.say("began")
			<-Draining(ctx)
			return 0, ctx.Err() // which has not ended
		}
		f.build(f.configMaps.self())
		run, endRun := context.WithCancel(t.Context())
		ctx, closeCluster := context.WithCancel(context.WithoutCancel(lifetime.NewContext(run, t.Context(), closed())))
		ended := make(chan error)
		go func() { ended <- f.loop.Run(ctx) }()
		pass(time.Second)
		endRun()
		f.put("2", "a")
		pass(time.Hour)
		f.expect("began")
		assert.Equal(t, "errors, and keys in flight", []int{0, 0}, []int{int(f.loop.Status().Errors), len(f.loop.Status().InFlight)})
		closeCluster()
		assert.NoError(t, <-ended)
	})
}

func TestReconcileLearnsOfTheDrain(t *testing.T) {
	assert.Equal(t, "drain of a context that is not of a reconcile", nil, Draining(t.Context()))
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, "a")
		f.reconcile = func(ctx context.Context, _ cache.ObjectName) (time.Duration, error) {
			select {
			case <-Draining(ctx):
				return 0, ctx.Err() // which has not ended
			case <-time.After(time.Hour):
				return 0, errors.New("nobody told it")
			}
		}
		f.run()
		pass(time.Minute)
		f.end()
		assert.Equal(t, "when Run returned, and the last error", []any{time.Minute, (*LastError)(nil)}, []any{time.Since(f.begun), f.loop.Status().LastError})
	})
}
