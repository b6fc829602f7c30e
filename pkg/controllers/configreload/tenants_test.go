// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package configreload

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/configreload/policy"
)

// 300 workloads of one namespace are due, and each patch takes 100 ms.
func TestFairnessOfNamespaces(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var objects []runtime.Object
		noisy := cm1()
		noisy.Namespace = "noisy"
		for i := range 300 {
			d := deploy(pod(reads("app-config")), kAuto, "true")
			d.Namespace, d.Name = "noisy", fmt.Sprintf("web-%03d", i)
			objects = append(objects, d)
		}
		w := newFixture(t, nil, append(objects, noisy, cm1(), deploy(pod(reads("app-config")), kAuto, "true"))...)
		w.pass(time.Minute)
		w.resign()
		var mu sync.Mutex
		rolled := map[string]time.Time{}
		k := w.c.kinds["Deployment"]
		patch := k.patch
		k.patch = func(ctx context.Context, name cache.ObjectName, as types.PatchType, data []byte) (string, error) {
			<-time.After(100 * time.Millisecond)
			mu.Lock()
			rolled[name.Namespace] = time.Now()
			mu.Unlock()
			return patch(ctx, name, as, data)
		}
		w.lead()
		w.pass(time.Minute)
		changed := noisy.DeepCopy()
		changed.Data["color"] = "red"
		w.put(changed)
		w.pass(100 * time.Millisecond)
		begun := time.Now()
		changeCM(w)
		w.pass(time.Minute)
		if took, most := rolled["shop"].Sub(begun), w.cfg.QuietPeriod+time.Second; took > most {
			t.Errorf("the other namespace's workload was rolled after %v, want %v at most", took, most)
		}
		if took := rolled["noisy"].Sub(begun); took < 7*time.Second {
			t.Errorf("all was done after %v, so nothing waited", took)
		}
	})
}

// Each list fills what a list may take, and there are many sources with long names.
func TestPatternsTooSlowAreRefused(t *testing.T) {
	for name, tc := range map[string]struct {
		key, value string
		refused    bool
	}{
		"expressions that fill a list":      {kCM, strings.Repeat(".*a,", 80), true},
		"native wildcards that fill a list": {nativeReload, strings.Repeat("configmap/"+strings.Repeat("*a", 120)+",", 40), true},
		"a few plain names":                 {kCM, "a,b,c", false},
		"one native pattern":                {nativeReload, "configmap/app-*", false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				objects := []runtime.Object{deploy(pod(), tc.key, tc.value)}
				for i := range 500 {
					objects = append(objects, cm(strings.Repeat("a", 240)+fmt.Sprintf("-b%03d", i)))
				}
				w := newFixture(t, nil, objects...)
				d, err := policy.NewWorkload(&policy.Kind{Name: "Deployment"}, objects[0], Name)
				if err != nil {
					t.Fatal(err)
				}
				r := w.c.keys.Rules(d)
				if len(r.Problems) > 0 {
					t.Fatal(r.Problems)
				}
				found, _, problem := w.c.lookUp(d, r, nil)
				if (problem != nil) != tc.refused || problem != nil && (found != nil || !strings.HasPrefix(problem.String(), tc.key+": ")) {
					t.Errorf("%d found, problem %v", len(found), problem)
				}
			})
		})
	}
}

// What is pending of a source, or was handed to a workload, is one change, from the first old data to the
// last new ones.
func TestSourceChangesAreMerged(t *testing.T) {
	c := newChanges()
	source := policy.SourceKey{Type: policy.ConfigMap, Name: "app-config"}
	key := sourceKey("shop", source)
	web := policy.Key{Kind: "Deployment", ObjectName: cache.NewObjectName("shop", "web")}
	a, b, d := policy.Source{Hash: h1}, policy.Source{Hash: h2}, policy.Source{Hash: p1}
	at := func(s int) time.Time { return unixStart.Add(time.Duration(s) * time.Second) }
	c.add(key, change{a, b, at(1), at(1)})
	c.add(key, change{b, d, at(2), at(2)})
	if got, want := c.pending[key], (change{a, d, at(1), at(2)}); got != want {
		t.Errorf("pending %+v, want %+v", got, want)
	}
	if !c.hand(key, source, []policy.Key{web}) || c.hand(key, source, []policy.Key{web}) {
		t.Error("a change is not handed on exactly once")
	}
	c.add(key, change{d, a, at(3), at(3)})
	if got, want := c.take(web, map[policy.SourceKey]bool{source: true})[source], (change{a, a, at(1), at(3)}); got != want {
		t.Errorf("taken %+v, want %+v", got, want)
	}
	if c.hand(key, source, nil); len(c.pending)+len(c.handed) > 0 {
		t.Errorf("left: %v, %v", c.pending, c.handed)
	}
}

func TestUnusedSourceWakesNoWorker(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		was, is := cm1(), cm2()
		was.Name, is.Name = "unused", "unused"
		w := newFixture(t, quietPeriod(0), cm1(), was, deploy(pod(reads("app-config")), kAuto, "true"))
		reconciles := func(change runtime.Object) uint64 {
			w.pass(time.Minute)
			before := w.c.Status().Reconciles
			w.put(change)
			w.pass(time.Minute)
			return w.c.Status().Reconciles - before
		}
		if n := reconciles(is); n != 0 {
			t.Errorf("%d reconciles for a ConfigMap that nobody uses", n)
		}
		if n := reconciles(cm2()); n == 0 {
			t.Error("no reconcile for the ConfigMap of the Deployment")
		}
	})
}

// A workload that is reconciled before it was told of a change comes to the same result.
func TestPendingChangeIsConsidered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFixture(t, quietPeriod(0), cm1(), deploy(pod(reads("app-config")), kSearch, "true"))
		w.resign()
		w.put(annotated(cm2(), kMatch, "true"))
		synctest.Wait()
		key := policy.Key{Kind: "ConfigMap", ObjectName: cache.NewObjectName("shop", "app-config")}
		now := time.Now()
		w.c.changes.add(key, change{policy.Source{Hash: h2}, policy.Source{Hash: h2, Matched: true}, now, now}) // it changed earlier
		w.lead()
		w.pass(time.Minute)
		if got := w.writes(); len(got) != 1 || got[0] != stateOnly(stateOf(cmKey, h2)) {
			t.Errorf("writes %v, want the state alone", got)
		}
	})
}

func TestPauseLastsItsPeriodAtMost(t *testing.T) {
	for name, since := range map[string]time.Time{
		"a pause that begins in a year":    unixStart.AddDate(1, 0, 0),
		"a pause that begins in a century": unixStart.AddDate(100, 0, 0),
		"a pause that begins in a minute":  unixStart.Add(time.Minute),
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d := deploy(pod(), kPause, "5m", kPausedAt, since.UTC().Format(time.RFC3339))
				d.Spec.Paused = true
				w := newFixture(t, nil, d)
				for i := range 4 { // it is looked at again and again
					w.pass(time.Minute)
					w.put(annotated(w.deployment("web"), "example.org/touched", fmt.Sprint(i)))
				}
				w.pass(50 * time.Second)
				if !w.deployment("web").Spec.Paused {
					t.Error("resumed too early")
				}
				w.pass(11 * time.Second)
				if w.deployment("web").Spec.Paused {
					t.Error("still paused after its period")
				}
			})
		})
	}
}

// huge are annotations as large as the API server takes.
var huge = map[string][2]string{
	"a list of 256 KiB":       {kCM, strings.Repeat("app-.*,", 256<<10/7)},
	"10,000 tiny items":       {kCM, strings.Repeat("a,", 10_000)},
	"one item of 64 KiB":      {kCM, strings.Repeat("(a*)", 16<<10)},
	"a native list":           {nativeReload, strings.Repeat("configmap/a*b,", 256<<10/14)},
	"one native item":         {nativeReload, "configmap/" + strings.Repeat("*a", 32<<10)},
	"a delay that is no such": {nativeDelay, strings.Repeat("1", 256<<10)},
}

func TestHugeAnnotationIsRefusedAndNotKept(t *testing.T) {
	cfg := NewConfig()
	cfg.Compat = true
	keys := cfg.keys()
	for name, annotation := range huge {
		t.Run(name, func(t *testing.T) {
			d := deploy(pod(onTemplate(annotation[0], annotation[1])), annotation[0], annotation[1])
			if kept := len(keys.DigestWorkload(d)); kept > 16<<10 {
				t.Errorf("the cache keeps %d bytes of the template", kept)
			}
			w, err := policy.NewWorkload(&policy.Kind{Name: "Deployment"}, d, Name)
			if err != nil {
				t.Fatal(err)
			}
			r := keys.Rules(w)
			if len(r.Problems) != 1 || !strings.HasPrefix(r.Problems[0].String(), annotation[0]+": ") || len(r.Problems[0].String()) > 600 {
				t.Errorf("problems %v, want one that names the annotation", r.Problems)
			}
			if steps := r.Steps(policy.SourceKey{Name: strings.Repeat("a", 253)}); steps > 1000 {
				t.Errorf("a name takes %d steps", steps)
			}
		})
	}
}

// BenchmarkHugeAnnotation measures one event of a workload with such an annotation, in the cache and its
// indexes.
func BenchmarkHugeAnnotation(b *testing.B) {
	cfg := NewConfig()
	cfg.Compat = true
	for name, annotation := range huge {
		b.Run(name, func(b *testing.B) {
			d := deploy(pod(onTemplate(annotation[0], annotation[1])), annotation[0], annotation[1])
			keys := cfg.keys()
			reduce := reduceAs(Name, keys.OfWorkloads(), keys.DigestWorkload, "")
			c := &Controller{cfg: cfg, keys: keys}
			for b.Loop() {
				obj, err := reduce(d)
				if err != nil {
					b.Fatal(err)
				}
				c.indexBySource(&kind{kindInfo: &kindInfos[0]}, obj.(metav1.Object))
			}
		})
	}
}
