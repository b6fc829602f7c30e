// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package controllers

import (
	"fmt"
	"testing"
	"testing/synctest"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/cache"
)

func manyNames(n int) (names []string) {
	for i := range n {
		names = append(names, fmt.Sprint("o", i))
	}
	return names
}

func event(name any) cache.ObjectName { return cache.NewObjectName("event", fmt.Sprint(name)) }

func TestHowManyKeysAnEventWaitsForWhileALeaderBegins(t *testing.T) {
	for name, tc := range map[string]struct {
		objects, keys int // keys of each object
		burst         int // events at the first reconcile
		at            int // the reconcile during which the event comes
		most          int // keys that may be reconciled before that of the event
	}{
		"when there are no others":        {objects: 50, keys: 1, at: 10, most: 1},
		"after many others that are done": {objects: 200, keys: 1, burst: 50, at: 100, most: 1},
		"if each object has many keys":    {objects: 50, keys: 20, at: 60, most: 1},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				g := newGated(t, manyNames(tc.objects)...)
				g.keys = func(obj *corev1.ConfigMap) (keys []cache.ObjectName) {
					for i := range tc.keys {
						keys = append(keys, cache.NewObjectName(obj.Name, fmt.Sprint(i)))
					}
					return keys
				}
				reconciles, came := 0, 0
				g.during = func(key cache.ObjectName) {
					reconciles++
					if reconciles == 1 {
						for i := range tc.burst {
							g.loop.Enqueue(event(i))
						}
					}
					letOthersRun()
					if reconciles == tc.at {
						g.loop.Enqueue(event("late"))
					}
					if key == event("late") {
						came = reconciles
					}
				}
				g.lead(t)
				synctest.Wait()
				if before := came - tc.at - 1; before < 0 || before > tc.most {
					t.Errorf("%d keys were reconciled before the event, want at most %d", before, tc.most)
				}
				if want := tc.objects*tc.keys + tc.burst + 1; reconciles != want {
					t.Errorf("%d reconciles, want %d", reconciles, want)
				}
				g.resign(t)
			})
		})
	}
}

func TestObjectsWithoutKeysDoNotWaitForEvents(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGated(t, manyNames(100)...)
		g.keys = func(obj *corev1.ConfigMap) []cache.ObjectName {
			if obj.Name != "o0" { // the last one that is mapped
				return nil
			}
			return []cache.ObjectName{cache.MetaObjectToName(obj)}
		}
		reconciles, came := 0, 0
		g.during = func(key cache.ObjectName) { // there is always an event
			reconciles++
			g.loop.Enqueue(event(reconciles), event(-reconciles))
			letOthersRun()
			if key.Name == "o0" {
				came = reconciles
			}
			if reconciles == 200 {
				g.stop()
			}
		}
		g.listed = func() { g.loop.Enqueue(event("first"), event("second")) }
		g.lead(t)
		if err := <-g.stopped; err != nil {
			t.Errorf("Run returned %v", err)
		}
		if came == 0 || came > 99 { // more, if each object waited for one event
			t.Errorf("the only object with a key was reconciled as number %d", came)
		}
	})
}

func TestALeaderIsNotShownAsIdleBeforeItKnowsItsObjects(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGated(t, "a", "b", "c")
		var s Status
		g.listed = func() { letOthersRun(); s = g.loop.Status() }
		g.lead(t)
		synctest.Wait()
		if s.Name == "" || s.Phase == Running && s.QueueDepth == 0 {
			t.Errorf("status while the cache is listed: %+v", s)
		}
		g.resign(t)
	})
}

func TestNamespacesTakeTurnsWhileALeaderBegins(t *testing.T) {
	indexer := cache.NewIndexer(cache.MetaNamespaceKeyFunc, cache.Indexers{})
	for i := range 100 {
		obj := &corev1.ConfigMap{}
		obj.Namespace, obj.Name, obj.ResourceVersion = "busy", fmt.Sprint(i), fmt.Sprint(1000+i)
		if err := indexer.Add(obj); err != nil {
			t.Fatal(err)
		}
	}
	quiet := &corev1.ConfigMap{}
	quiet.Namespace, quiet.Name, quiet.ResourceVersion = "quiet", "o", "1"
	if err := indexer.Add(quiet); err != nil {
		t.Fatal(err)
	}
	informer := indexed{indexer: indexer}
	order := cached([]*mapper[cache.ObjectName]{{watch: Watch[cache.ObjectName]{informer: informer, replayed: true}}})
	if order[0].version != 1099 || order[1].obj != any(quiet) {
		t.Errorf("the replay begins with %s and %s", order[0].namespace, order[1].namespace)
	}
}

// indexed is an informer with nothing but a cache.
type indexed struct {
	cache.SharedIndexInformer
	indexer cache.Indexer
}

func (i indexed) GetIndexer() cache.Indexer { return i.indexer }
