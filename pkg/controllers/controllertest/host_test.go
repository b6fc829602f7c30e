// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package controllertest_test

import (
	"context"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	corev1ac "k8s.io/client-go/applyconfigurations/core/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/quartermaster-dev/quartermaster/examples/greeter"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/controllertest"
	"github.com/quartermaster-dev/quartermaster/pkg/informers"
)

// asking returns a ConfigMap that asks the greeter for a greeting.
func asking(name string) *corev1.ConfigMap {
	return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{
		Namespace: "shop", Name: name, Annotations: map[string]string{greeter.Annotation: "world", "other": "x"}}}
}

func expect(t *testing.T, what string, got, want []string) {
	t.Helper()
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("%s (-want +got):\n%s", what, diff)
	}
}

func TestAnEntryRunsAsInProduction(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := controllertest.NewHost(t, greeter.Entry(), asking("a"))
		expect(t, "writes", h.Writes(), []string{"patch configmaps shop/a"})
		expect(t, "Events", h.Events(), []string{"Normal Greeted shop/a: Hello, world"})
		if diff := cmp.Diff(map[string]string{"other": "x"}, controllertest.Get[corev1.ConfigMap](h, "shop", "a").Annotations); diff != "" {
			t.Errorf("annotations (-want +got):\n%s", diff)
		}

		h.Put(asking("b"))
		h.Settle()
		expect(t, "writes after a new object", h.Writes(), []string{"patch configmaps shop/b"})

		h.Restart()
		h.Sleep(24 * time.Hour)
		expect(t, "writes after a day", h.Writes(), nil)
	})
}

func TestAHookProvokesConflictsAndErrors(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := controllertest.NewHost(t, greeter.Entry())
		raced := false
		h.OnWrite(func(controllertest.Write) error {
			if !raced {
				raced = true
				later := asking("a")
				later.Annotations[greeter.Annotation] = "you"
				h.Put(later)
			}
			return nil
		})
		h.Put(asking("a"))
		h.Settle()
		expect(t, "writes", h.Writes(), []string{"patch configmaps shop/a: Conflict", "patch configmaps shop/a"})
		expect(t, "Events", h.Events(), []string{"Normal Greeted shop/a: Hello, you"})

		h.OnWrite(func(controllertest.Write) error { return fmt.Errorf("no luck") })
		h.Put(asking("b"))
		h.Settle()
		h.OnWrite(nil)
		h.Sleep(2 * time.Second)
		expect(t, "writes with back-off", h.Writes(), []string{"patch configmaps shop/b: no luck", "patch configmaps shop/b"})
	})
}

func TestWritesAtOnceHaveAnOrderAndMeetTheHookOneByOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := greeter.Entry()
		e.Permissions = func(controllers.Settings) []rbacv1.PolicyRule {
			return []rbacv1.PolicyRule{{APIGroups: []string{""}, Resources: []string{"configmaps"}, Verbs: []string{"list", "watch", "create", "patch"}}}
		}
		e.New = func(h controllers.Host) (controllers.Controller, error) {
			return controllers.NewLoop(h.Loop, func(ctx context.Context, key cache.ObjectName) (time.Duration, error) {
				if key.Name != "a" {
					return 0, nil
				}
				return 0, h.Apply(ctx, corev1ac.ConfigMap("z", "shop"), corev1ac.ConfigMap("y", "shop"))
			}, controllers.WatchSelf(h.Informer(informers.ConfigMaps)))
		}
		h := controllertest.NewHost(t, e, asking("a"))
		expect(t, "writes", h.Writes(), []string{"apply configmaps shop/y", "apply configmaps shop/z"})

		inside, most := 0, 0
		h.OnWrite(func(controllertest.Write) error {
			inside++
			most = max(most, inside)
			<-time.After(time.Second)
			inside--
			return nil
		})
		h.Put(asking("a"))
		h.Sleep(5 * time.Second)
		if n := len(h.Writes()); n != 2 || most != 1 {
			t.Errorf("%d writes, with %d hooks at once, want 2 and 1", n, most)
		}
	})
}

// TestTheHookSeesAnApplyOnce changes objects before each apply, of which the first creates the object.
func TestTheHookSeesAnApplyOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := greeter.Entry()
		e.Permissions = func(controllers.Settings) []rbacv1.PolicyRule {
			return []rbacv1.PolicyRule{{APIGroups: []string{""}, Resources: []string{"configmaps"}, Verbs: []string{"list", "watch", "create", "patch"}}}
		}
		e.New = func(h controllers.Host) (controllers.Controller, error) {
			return controllers.NewLoop(h.Loop, func(ctx context.Context, key cache.ObjectName) (time.Duration, error) {
				if key.Name != "a" {
					return 0, nil
				}
				return 0, h.Apply(ctx, corev1ac.ConfigMap("made", "shop"))
			}, controllers.WatchSelf(h.Informer(informers.ConfigMaps)))
		}
		h := controllertest.NewHost(t, e)
		var seen []string
		h.OnWrite(func(w controllertest.Write) error {
			seen = append(seen, w.String())
			h.Put(asking("other"))
			return nil
		})
		h.Put(asking("a"))
		h.Settle()
		h.Put(asking("a"))
		h.Settle()
		expect(t, "writes that the hook saw", seen, []string{"apply configmaps shop/made", "apply configmaps shop/made"})
	})
}

// TestSeveralManagersInOneProcess runs them at the same time.
func TestSeveralManagersInOneProcess(t *testing.T) {
	for _, name := range []string{"a", "b", "c"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				h := controllertest.NewHost(t, greeter.Entry(), asking(name))
				h.Sleep(time.Hour)
				expect(t, "writes", h.Writes(), []string{"patch configmaps shop/" + name})
			})
		})
	}
}

// failures is a test that records why it failed. Its cleanups are those of the real one.
type failures struct {
	testing.TB
	mu   sync.Mutex
	text strings.Builder
}

func (f *failures) Errorf(format string, args ...any) {
	f.mu.Lock()
	defer f.mu.Unlock()
	fmt.Fprintf(&f.text, format+"\n", args...)
}

func (f *failures) Fatalf(format string, args ...any) {
	f.Errorf(format, args...)
	runtime.Goexit()
}

func (f *failures) Fatal(args ...any) { f.Fatalf("%s", fmt.Sprint(args...)) }

func (f *failures) Log(...any) {}

func TestMistakesFailTheTestWithTheNameOfTheController(t *testing.T) {
	gadgets := schema.GroupVersionResource{Group: "example.com", Version: "v1", Resource: "gadgets"}
	type entry = controllers.Entry
	for name, test := range map[string]struct {
		change func(*entry)
		want   string
	}{
		"a verb that Permissions do not allow": {
			func(e *entry) {
				e.Permissions = func(controllers.Settings) []rbacv1.PolicyRule {
					return []rbacv1.PolicyRule{{APIGroups: []string{""}, Resources: []string{"configmaps"}, Verbs: []string{"list", "watch"}}}
				}
			},
			`controller greeter: Permissions do not allow what it does; missing is {APIGroups: []string{""}, Resources: []string{"configmaps"}, Verbs: []string{"patch"}}`,
		},
		"a need that Permissions do not allow": {
			func(e *entry) { e.Permissions = func(controllers.Settings) []rbacv1.PolicyRule { return nil } },
			`controller greeter: Permissions do not allow what it declares in Needs; missing is {APIGroups: []string{""}, Resources: []string{"configmaps"}, Verbs: []string{"watch"}}`,
		},
		"an informer that Needs do not declare": {
			func(e *entry) { e.Needs = func(controllers.Settings) ([]informers.Need, error) { return nil, nil } },
			"controller greeter: asks for the informer of configmaps, which its entry does not declare in Needs",
		},
		"a type that is not in the scheme": {
			func(e *entry) {
				e.Needs = func(controllers.Settings) ([]informers.Need, error) {
					return []informers.Need{{Resource: gadgets, Form: informers.Typed}}, nil
				}
			},
			"greeter: the scheme has no types of example.com/v1, so gadgets.example.com cannot be had in typed form",
		},
		"a function that is missing": {
			func(e *entry) { e.New = nil },
			"controller greeter: the function New is missing",
		},
		"a change of an object in the cache": {
			func(e *entry) {
				build := e.New
				e.New = func(h controllers.Host) (controllers.Controller, error) {
					c, err := build(h)
					indexer := h.Informer(informers.ConfigMaps).GetIndexer()
					time.AfterFunc(time.Minute, func() { indexer.List()[0].(metav1.Object).GetAnnotations()["other"] = "changed" })
					return c, err
				}
				e.Needs = func(controllers.Settings) ([]informers.Need, error) {
					return []informers.Need{{Resource: informers.ConfigMaps, Annotations: []string{greeter.Annotation, "other"}}}, nil
				}
			},
			"controller greeter changed an object in the cache",
		},
	} {
		t.Run(name, func(t *testing.T) {
			if raceDetector && strings.HasPrefix(name, "a change of an object") {
				t.Skip("the mistake is a data race")
			}
			synctest.Test(t, func(t *testing.T) {
				f := &failures{TB: t}
				e := greeter.Entry()
				test.change(&e)
				done := make(chan struct{})
				go func() {
					defer close(done)
					controllertest.NewHost(f, e, asking("a")).Sleep(5 * time.Minute)
				}()
				<-done
				f.mu.Lock()
				defer f.mu.Unlock()
				if got := f.text.String(); !strings.Contains(got, test.want) {
					t.Errorf("the test failed with %q\nwant %q", got, test.want)
				}
			})
		})
	}
}

func TestAHostNeedsABubble(t *testing.T) {
	f := &failures{TB: t}
	done := make(chan struct{})
	go func() {
		defer close(done)
		controllertest.NewHost(f, greeter.Entry())
	}()
	<-done
	if !strings.Contains(f.text.String(), "must be called within synctest.Test") {
		t.Error(f.text.String())
	}
}
