// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/cache"
)

// refusal is a function of a controller that panics on the Secret "bad" until it is mended.
type refusal struct{ mended bool }

func (r *refusal) check(obj any) {
	if m, ok := obj.(metav1.Object); ok && m.GetName() == "bad" && !r.mended {
		panic("a value that nobody may see")
	}
}

func TestAPanicOfAControllersFunctionIsContained(t *testing.T) {
	for name, of := range map[string]func(*testing.T, *refusal) (Need, func(*testing.T, *Factory)){
		"a digest": func(_ *testing.T, r *refusal) (Need, func(*testing.T, *Factory)) {
			return Need{Digest: func(obj runtime.Object) []byte { r.check(obj); return digestSHA1(obj) }}, nil
		},
		"a When": func(_ *testing.T, r *refusal) (Need, func(*testing.T, *Factory)) {
			return Need{Fields: Labels, When: func(obj metav1.Object) bool { r.check(obj); return true }}, nil
		},
		"an index function": func(_ *testing.T, r *refusal) (Need, func(*testing.T, *Factory)) {
			return Need{}, func(t *testing.T, f *Factory) {
				t.Helper()
				informer, _ := f.Informer("bad", Secrets)
				if err := informer.AddIndexers(cache.Indexers{"x": func(obj any) ([]string, error) { r.check(obj); return nil, nil }}); err != nil {
					t.Fatal(err)
				}
			}
		},
		"an event handler": func(_ *testing.T, r *refusal) (Need, func(*testing.T, *Factory)) {
			return Need{}, func(t *testing.T, f *Factory) {
				t.Helper()
				informer, _ := f.Informer("bad", Secrets)
				handler := cache.ResourceEventHandlerFuncs{AddFunc: r.check, UpdateFunc: func(_, obj any) { r.check(obj) }}
				if _, err := informer.AddEventHandler(handler); err != nil {
					t.Fatal(err)
				}
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := &refusal{}
				need, register := of(t, r)
				need.For, need.Resource = "bad", Secrets
				c := newCluster(named("bad", "1"), named("fine", "1"))
				f := newTestFactory(t, c, need, reloadNeed)
				var counted []string
				f.resources[0].panics.count = func(controller string) { counted = append(counted, controller) }
				if register != nil {
					register(t, f)
				}
				startSynced(t, f)
				defer f.Shutdown()
				synctest.Wait()

				wantNames(t, f, "shop/bad", "shop/fine")
				if got := f.Problem("bad"); got == nil || !strings.Contains(got.Error(), "shop/bad") || strings.Contains(got.Error(), "nobody") {
					t.Errorf("problem %v", got)
				}
				if err := f.Problem("reload"); err != nil {
					t.Errorf("another controller's problem: %v", err)
				}
				if !slices.Contains(counted, "bad") || slices.Contains(counted, "reload") {
					t.Errorf("counted %v", counted)
				}

				r.mended = true
				c.bookmark() // as the server does every minute
				pass(relistAfterPanic + 10*time.Second)
				if name == "an event handler" {
					c.put(named("bad", "2"))
					synctest.Wait()
				}
				if err := f.Problem("bad"); err != nil {
					t.Errorf("after the mend: %v", err)
				}
			})
		})
	}
}

func TestADigestThatPanicsStaysWhatItWas(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &refusal{mended: true}
		c := newCluster(named("bad", "1"))
		f := newTestFactory(t, c, Need{For: "bad", Resource: Secrets, Digest: func(obj runtime.Object) []byte { r.check(obj); return digestSHA1(obj) }})
		startSynced(t, f)
		defer f.Shutdown()
		synctest.Wait()
		r.mended = false
		c.put(named("bad", "2"))
		synctest.Wait()
		informer, _ := f.Informer("bad", Secrets)
		obj, _, _ := informer.GetStore().GetByKey("shop/bad")
		if got := obj.(*Object); got.GetResourceVersion() != "102" || !slices.Equal(got.Digest("bad"), digestSHA1(named("bad", "1"))) {
			t.Errorf("version %s, digest %x", got.GetResourceVersion(), got.Digest("bad"))
		}
	})
}

func TestObjectsThatPanicAreForgottenWhenTheyAreGone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(named("bad", "1"))
		f := newTestFactory(t, c, Need{For: "bad", Resource: Secrets, Digest: func(obj runtime.Object) []byte { (&refusal{}).check(obj); return nil }})
		startSynced(t, f)
		defer f.Shutdown()
		c.remove("shop/bad")
		synctest.Wait()
		if err := f.Problem("bad"); err != nil {
			t.Error(err)
		}
	})
}
