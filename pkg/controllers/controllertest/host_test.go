// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package controllertest_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	goruntime "runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	corev1ac "k8s.io/client-go/applyconfigurations/core/v1"
	rbacv1ac "k8s.io/client-go/applyconfigurations/rbac/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"

	"github.com/quartermaster-dev/quartermaster/examples/greeter"
	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/internal/panics"
	"github.com/quartermaster-dev/quartermaster/internal/subtest"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/configreload"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/controllertest"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/replication"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/ttl"
	"github.com/quartermaster-dev/quartermaster/pkg/informers"
)

// asking returns a ConfigMap that asks the greeter for a greeting.
func asking(name string) *corev1.ConfigMap {
	return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{
		Namespace: "shop", Name: name, Annotations: map[string]string{greeter.Annotation: "world", "other": "x"}}}
}

// doing returns an entry whose reconcile of the ConfigMap shop/a does something, with these permissions.
func doing(name string, do func(context.Context, controllers.Host) error, rules ...rbacv1.PolicyRule) controllers.Entry {
	e := greeter.Entry()
	e.Name = name
	e.Permissions = func(controllers.Settings) []rbacv1.PolicyRule {
		return append(rules, rbacv1.PolicyRule{APIGroups: []string{""}, Resources: []string{"configmaps"}, Verbs: []string{"get", "create", "patch"}})
	}
	e.New = func(h controllers.Host) (controllers.Controller, error) {
		return controllers.NewLoop(h.LoopOptions, func(ctx context.Context, key cache.ObjectName) (time.Duration, error) {
			if key.Name != "a" {
				return 0, nil
			}
			return 0, do(ctx, h)
		}, controllers.WatchSelf(informers.For[metav1.Object](h, informers.ConfigMaps)))
	}
	return e
}

func TestHostRunsAnEntryAsInProduction(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := controllertest.NewHost(t, greeter.Entry(), asking("a"))
		assert.Equal(t, "writes", []string{"patch configmaps shop/a"}, h.Writes())
		h.Restart()
		h.Sleep(24 * time.Hour)
		assert.Equal(t, "writes after a day", nil, h.Writes())

		h.Latency(time.Minute)
		h.Put(asking("c"))
		<-time.After(30 * time.Second)
		assert.Equal(t, "a write before its response", []string{"patch configmaps shop/c"}, h.Writes())
		assert.Equal(t, "Events before the response", 1, len(h.Events()))
		h.Sleep(time.Minute)

		h.Latency(0)
		h.OnWrite(func(controllertest.Request) error { return fmt.Errorf("no luck") })
		h.Put(asking("b"))
		h.Settle()
		h.OnWrite(nil)
		h.Sleep(2 * time.Second)
		assert.Equal(t, "writes with back-off", []string{"patch configmaps shop/b: no luck", "patch configmaps shop/b"}, h.Writes())
	})
}

func TestPatchFinalizersRefusesAnOldVersion(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var read metav1.Object
		h := controllertest.NewHost(t, doing("keeper", func(ctx context.Context, h controllers.Host) error {
			if reduced, _ := informers.For[metav1.Object](h, informers.ConfigMaps).Get(cache.NewObjectName("shop", "a")); read == nil {
				if h.PatchFinalizers(ctx, informers.ConfigMaps, reduced, nil) == nil {
					t.Error("an object without its finalizers was accepted")
				}
				read, _ = h.Client.CoreV1().ConfigMaps("shop").Get(ctx, "a", metav1.GetOptions{})
			}
			return controllers.TerminalError(h.PatchFinalizers(ctx, informers.ConfigMaps, read, []string{"example.com/keep"}))
		}), asking("a"))
		assert.Equal(t, "writes", []string{"patch configmaps shop/a", "patch configmaps shop/a: Conflict"}, h.Writes())
		if a := controllertest.Get[corev1.ConfigMap](h, "shop", "a"); !slices.Equal(a.Finalizers, []string{"example.com/keep"}) {
			t.Errorf("finalizers %q", a.Finalizers)
		}
	})
}

// TestHookMeetsWritesOneByOne has applies, which create the objects at first. The hook changes another object
// before each.
func TestHookMeetsWritesOneByOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := controllertest.NewHost(t, doing("applies", func(ctx context.Context, h controllers.Host) error {
			return h.Apply(ctx, corev1ac.ConfigMap("z", "shop"), corev1ac.ConfigMap("y", "shop"))
		}))
		inside, most := 0, 0
		var seen []string
		h.OnWrite(func(w controllertest.Request) error {
			seen = append(seen, w.String())
			inside++
			most = max(most, inside)
			h.Put(asking("other"))
			<-time.After(time.Second)
			inside--
			return nil
		})
		for range 2 {
			h.Put(asking("a"))
			h.Sleep(5 * time.Second)
			slices.Sort(seen)
			assert.Equal(t, "writes that the hook saw", []string{"apply configmaps shop/y", "apply configmaps shop/z"}, seen)
			seen = nil
		}
		if most != 1 {
			t.Errorf("%d hooks at once", most)
		}
	})
}

func TestEventsNameTheirController(t *testing.T) {
	tells := func(_ context.Context, h controllers.Host) error {
		h.Events.Event(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "a"}}, corev1.EventTypeNormal, "Seen", "by "+h.LoopOptions.Name)
		return nil
	}
	synctest.Test(t, func(t *testing.T) {
		h := controllertest.Setup{Entries: []controllers.Entry{doing("copy", tells), doing("re-copy", tells)}}.NewHost(t, asking("a"))
		got := h.Events()
		slices.Sort(got)
		assert.Equal(t, "Events", []string{"copy: Normal Seen shop/a: by copy", "re-copy: Normal Seen shop/a: by re-copy"}, got)
	})
}

// TestStandbyWritesOnlyWhenItLeads has a controller of every replica, whose writes only the leader may do.
func TestStandbyWritesOnlyWhenItLeads(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var refused atomic.Int32
		e := doing("keeper", func(ctx context.Context, h controllers.Host) error {
			err := h.Apply(ctx, corev1ac.ConfigMap("made", "shop"))
			if controllers.IsNotLeading(err) {
				refused.Add(1)
			}
			return err
		})
		e.EveryReplica = true
		h := controllertest.Setup{Entries: []controllers.Entry{e}, Standby: true}.NewHost(t, asking("a"))
		h.Sleep(10 * time.Second)
		assert.Equal(t, "writes", []string{"apply configmaps shop/made"}, h.Writes())
		h.Sleep(time.Hour)
		assert.Equal(t, "refused writes, one of each replica before it led", 2, int(refused.Load()))
		assert.Equal(t, "writes while the standby stands by", nil, h.Writes())
		h.Restart()
		assert.Equal(t, "writes of the second leader", []string{"apply configmaps shop/made (unchanged)"}, h.Writes())
	})
}

// TestTermEndsInTheMiddleOfAWrite has a leader that loses the Lease in its first write, and tries another.
func TestTermEndsInTheMiddleOfAWrite(t *testing.T) {
	for name, tc := range map[string]struct {
		answer error // of the hook, to the first write
		want   []string
	}{
		"the API server carries it out": {nil, []string{"apply configmaps shop/made", "apply configmaps shop/made (unchanged)", "apply configmaps shop/more"}},
		"the API server refuses it":     {errors.New("no luck"), []string{"apply configmaps shop/made: no luck", "apply configmaps shop/made", "apply configmaps shop/more"}},
	} {
		subtest.InBubble(t, name, func(t *testing.T) {
			var made, more error // of the former leader
			h := controllertest.Setup{Standby: true, Entries: []controllers.Entry{doing("keeper", func(ctx context.Context, h controllers.Host) error {
				first, second := h.Apply(ctx, corev1ac.ConfigMap("made", "shop")), h.Apply(ctx, corev1ac.ConfigMap("more", "shop"))
				if made == nil {
					made, more = first, second
				}
				return errors.Join(first, second)
			})}}.NewHost(t)
			h.OnWrite(func(controllertest.Request) error { h.OnWrite(nil); h.Depose(); return tc.answer })
			h.Put(asking("a"))
			h.Sleep(time.Minute)
			assert.Equal(t, "writes", tc.want, h.Writes())
			if !controllers.IsOutcomeUnknown(errors.Join(more, made)) || !controllers.IsNotLeading(more) || controllers.IsOutcomeUnknown(more) {
				t.Errorf("the writes of the former leader failed with %v, and with %v", made, more)
			}
			h.Restart()
			h.Depose()
			h.Sleep(time.Minute)
			assert.Equal(t, "writes of new replicas", slices.Repeat([]string{"apply configmaps shop/made (unchanged)", "apply configmaps shop/more (unchanged)"}, 2), h.Writes())
		})
	}
}

func TestApplyRefusesEscalation(t *testing.T) {
	may := func(verbs, resources string, names ...string) []rbacv1.PolicyRule {
		return []rbacv1.PolicyRule{{APIGroups: []string{"rbac.authorization.k8s.io"}, Verbs: strings.Fields(verbs), Resources: []string{resources}, ResourceNames: names}}
	}
	const roleMade, bindingMade = "create roles.rbac.authorization.k8s.io shop/made", "apply rolebindings.rbac.authorization.k8s.io shop/made"
	mayApply := may("create patch", "rolebindings")
	reads := []rbacv1.PolicyRule{{APIGroups: []string{""}, Resources: []string{"configmaps"}, Verbs: []string{"get", "list"}}}
	deletes := []rbacv1.PolicyRule{{APIGroups: []string{""}, Resources: []string{"configmaps", "secrets"}, Verbs: []string{"delete"}}}
	role := func(rules []rbacv1.PolicyRule) func(context.Context, controllers.Host) error {
		return func(ctx context.Context, h controllers.Host) error {
			_, err := h.Client.RbacV1().Roles("shop").Create(ctx, &rbacv1.Role{ObjectMeta: metav1.ObjectMeta{Name: "made"}, Rules: rules}, metav1.CreateOptions{})
			return err
		}
	}
	binding := func(kind, name string) func(context.Context, controllers.Host) error {
		return func(ctx context.Context, h controllers.Host) error {
			return h.Apply(ctx, rbacv1ac.RoleBinding("made", "shop").WithRoleRef(
				rbacv1ac.RoleRef().WithAPIGroup("rbac.authorization.k8s.io").WithKind(kind).WithName(name)))
		}
	}
	for name, tc := range map[string]struct {
		do   func(context.Context, controllers.Host) error
		may  []rbacv1.PolicyRule
		want string
	}{
		"a role with what the controller may do itself": {role(reads), may("create", "roles"), roleMade},
		"a role with more": {role(deletes), may("create", "roles"), roleMade + ": Forbidden"},
		"a role with more, by a controller that may escalate": {role(deletes), may("create escalate", "roles"), roleMade},
		"a binding to a role with what the controller may do": {binding("Role", "reads"), mayApply, bindingMade},
		"a binding to a role with more":                       {binding("ClusterRole", "deletes"), mayApply, bindingMade + ": Forbidden"},
		"a binding to a role that the controller may bind":    {binding("ClusterRole", "deletes"), append(may("bind", "clusterroles", "deletes"), mayApply...), bindingMade},
		"a binding to a role that does not exist":             {binding("Role", "none"), mayApply, bindingMade + ": NotFound"},
	} {
		subtest.InBubble(t, name, func(t *testing.T) {
			h := controllertest.NewHost(t, doing("grants", func(ctx context.Context, h controllers.Host) error {
				return controllers.TerminalError(tc.do(ctx, h))
			}, tc.may...),
				&rbacv1.Role{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "reads"}, Rules: reads},
				&rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: "deletes"}, Rules: deletes}, asking("a"))
			assert.Equal(t, "writes", []string{tc.want}, h.Writes())
		})
	}
}

// failures is a test that records why it failed. Its cleanups run with the real test's.
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
	goruntime.Goexit()
}

func (f *failures) Fatal(args ...any) { f.Fatalf("%s", fmt.Sprint(args...)) }

func (f *failures) Log(...any) {}

// failsWith checks why a test fails, at the latest in its cleanups.
func failsWith(t *testing.T, want string, test func(*failures)) {
	t.Helper()
	f := &failures{TB: t}
	t.Cleanup(func() {
		if got := f.text.String(); !strings.Contains(got, want) {
			t.Errorf("the test failed with %q\nwant %q", got, want)
		}
	})
	done := make(chan struct{})
	go func() { defer close(done); test(f) }()
	<-done
}

func TestHostNamesTheControllerOfAMistake(t *testing.T) {
	type entry = controllers.Entry
	panicking := func(context.Context, controllers.Host) error { panic("no") }
	slow := func(context.Context, controllers.Host) error { <-time.After(6 * time.Minute); return nil }
	for name, tc := range map[string]struct {
		change func(*entry)
		want   string
	}{
		"a verb that Permissions do not allow": {func(e *entry) { e.Permissions = allowing("configmaps") },
			`controller greeter: Permissions do not allow what it does; missing is {APIGroups: []string{""}, Resources: []string{"configmaps"}, Verbs: []string{"patch"}}`},
		"a resource that Permissions do not let it follow": {func(e *entry) { *e, _ = following(informers.Secrets, allowing("configmaps")) },
			`Permissions do not allow what a controller follows; missing is {APIGroups: []string{""}, Resources: []string{"secrets"}, Verbs: []string{"watch"}}`},
		"the name of a client of the manager's own": {func(e *entry) { e.Name = "events" }, "controller events: the name is that of a client of the manager's own"},
		"a panic": {func(e *entry) { *e = doing("greeter", panicking) }, "controller greeter panicked 9 times"},
		"a cluster that the test has not added": {func(e *entry) {
			*e = doing("greeter", func(_ context.Context, h controllers.Host) error {
				_, err := h.Cluster("far", &rest.Config{Host: "https://192.0.2.1"})
				return err
			})
		}, `the cluster "far" is at https://192.0.2.1, where AddCluster has added none`},
		"a resource without namespaces that is declared as if it had some": {func(e *entry) {
			e.Needs = func(controllers.Settings) ([]informers.Need, error) {
				return []informers.Need{{Resource: schema.GroupVersionResource{Version: "v1", Resource: "nodes"}}}, nil
			}
		}, "controller greeter: the objects of nodes have no namespace, so ClusterScoped must be set where it needs them"},
		"a second Depose":                    {func(*entry) {}, "there is no standby for Depose: Setup.Standby adds one"},
		"a reconcile that outlasts its term": {func(e *entry) { *e = doing("greeter", slow) }, "HolderChanged\ncontroller greeter has been reconciling shop/a for"},
	} {
		subtest.InBubble(t, name, func(t *testing.T) {
			failsWith(t, tc.want, func(f *failures) {
				e := greeter.Entry()
				tc.change(&e)
				h := controllertest.Setup{Entries: []entry{e}, Standby: true}.NewHost(f, asking("a"))
				h.Sleep(5 * time.Minute)
				h.Depose()
				h.Depose()
			})
		})
	}
}

// allowing returns the Permissions to read resources of the groups of Pods and of Deployments.
func allowing(resources ...string) func(controllers.Settings) []rbacv1.PolicyRule {
	return func(controllers.Settings) []rbacv1.PolicyRule {
		return []rbacv1.PolicyRule{{APIGroups: []string{"", "apps"}, Resources: resources, Verbs: []string{"get", "list", "watch"}}}
	}
}

// following returns an entry that follows a resource, and where it stores what it follows.
func following(
	resource schema.GroupVersionResource, permissions func(controllers.Settings) []rbacv1.PolicyRule,
) (controllers.Entry, *atomic.Pointer[informers.Following[metav1.Object]]) {
	followed := &atomic.Pointer[informers.Following[metav1.Object]]{}
	return controllers.Entry{
		Name: "follower", Permissions: permissions,
		New: func(h controllers.Host) (controllers.Controller, error) {
			h.LoopOptions.Background = func(ctx context.Context) error {
				f, err := informers.Follow[metav1.Object](h, informers.Need{Resource: resource})
				if err != nil {
					return err
				}
				defer f.Stop()
				followed.Store(f)
				<-ctx.Done()
				return nil
			}
			return controllers.NewLoop(h.LoopOptions, func(context.Context, string) (time.Duration, error) { return 0, nil })
		},
	}, followed
}

func TestRecoveredPanicSaysWhy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		controllertest.NewHost(t, greeter.Entry())
		_, err := panics.Recover(func() error { panic("an unknown phase") })
		assert.Equal(t, "error", "panic: an unknown phase", fmt.Sprint(err))
	})
}

func TestForbiddenTypeIsFollowedOnceItIsGranted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e, followed := following(informers.Secrets, allowing("secrets"))
		h := controllertest.Setup{Entries: []controllers.Entry{e}, Prepare: func(h *controllertest.Host) { h.Forbid("secrets") }}.NewHost(t)
		h.Sleep(time.Hour)
		if s := followed.Load().Status(); !s.Forbidden || s.Synced {
			t.Errorf("status %+v", s)
		}
		h.Forbid()
		h.Sleep(time.Minute)
		if s := followed.Load().Status(); s.Forbidden || !s.Synced {
			t.Errorf("status %+v a minute later", s)
		}
	})
}

func TestNamespacesDoNotHideObjectsWithoutOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		nodes, read := corev1.SchemeGroupVersion.WithResource("nodes"), 0
		e := doing("counter", func(_ context.Context, h controllers.Host) error {
			read = len(informers.For[metav1.Object](h, nodes).List(metav1.NamespaceAll, nil))
			return nil
		})
		e.Needs = func(controllers.Settings) ([]informers.Need, error) {
			return []informers.Need{{Resource: informers.ConfigMaps}, {Resource: nodes, ClusterScoped: true}}, nil
		}
		e.NamespacePermissions = func(s controllers.Settings) map[string][]rbacv1.PolicyRule {
			return map[string][]rbacv1.PolicyRule{"": allowing("nodes")(s)}
		}
		setup := controllertest.Setup{Entries: []controllers.Entry{e}, Flags: []string{"--namespaces=shop"}}
		h := setup.NewHost(t, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1"}})
		h.Put(asking("a")) // when the Nodes have been read: the loop does not wait for them
		h.Settle()
		if read != 1 {
			t.Errorf("%d Nodes were read", read)
		}
	})
}

// TestRelistReconcilesWhatHasChanged has 2,000 objects of one namespace that a relist shows unchanged, with
// reconciles of 10 ms by one worker: all of them would take 20 s.
func TestRelistReconcilesWhatHasChanged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var objects []runtime.Object
		for i := range 2000 {
			objects = append(objects, asking(fmt.Sprint(i)))
		}
		reconciled := make(chan string, 2*len(objects))
		e := doing("slow", nil)
		e.New = func(h controllers.Host) (controllers.Controller, error) {
			return controllers.NewLoop(h.LoopOptions, func(_ context.Context, key cache.ObjectName) (time.Duration, error) {
				<-time.After(10 * time.Millisecond)
				reconciled <- key.Name
				return 0, nil
			}, controllers.WatchSelf(informers.For[metav1.Object](h, informers.ConfigMaps)))
		}
		h := controllertest.NewHost(t, e, objects...)
		h.Sleep(time.Minute)
		assert.Equal(t, "reconciles at the start", len(objects), len(reconciled))
		h.Relist()
		missed := asking("0")
		missed.Annotations["other"] = "changed"
		h.Put(missed)
		for len(reconciled) == len(objects) {
			<-time.After(time.Millisecond)
		}
		h.Put(asking("new"))
		<-time.After(100 * time.Millisecond)
		for range objects {
			<-reconciled
		}
		assert.Equal(t, "what the relist reconciles, and a change within 100 ms", []string{"0", "new"}, []string{<-reconciled, <-reconciled})
		h.Sleep(time.Minute)
		assert.Equal(t, "reconciles after that", 0, len(reconciled))
	})
}

// TestFilterLosesNothingByOthersNeeds has one controller that keeps whole Deployments, and
// with them their generation, and one that looks at an annotation.
func TestFilterLosesNothingByOthersNeeds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		seen := ""
		watching := func(name string, need informers.Need) controllers.Entry {
			need.Resource = informers.Deployments
			return controllers.Entry{
				Name: name, Permissions: allowing("deployments"),
				Needs: func(controllers.Settings) ([]informers.Need, error) { return []informers.Need{need}, nil },
				New: func(h controllers.Host) (controllers.Controller, error) {
					deployments := informers.For[metav1.Object](h, informers.Deployments)
					return controllers.NewLoop(h.LoopOptions, func(_ context.Context, key cache.ObjectName) (time.Duration, error) {
						if d, _ := deployments.Get(key); name == "reduced" {
							seen = d.GetAnnotations()["a"]
						}
						return 0, nil
					}, controllers.WatchSelf(deployments, controllers.GenerationChanged))
				},
			}
		}
		web := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web", Annotations: map[string]string{"a": "1"}}}
		h := controllertest.Setup{Entries: []controllers.Entry{
			watching("whole", informers.Need{Form: informers.Typed}), watching("reduced", informers.Need{Annotations: []string{"a"}}),
		}}.NewHost(t, web)
		web.Annotations["a"] = "2"
		h.Put(web)
		h.Settle()
		if seen != "2" {
			t.Errorf("it has seen the annotation %q", seen)
		}
	})
}

func TestNewHostFailsOutsideSynctest(t *testing.T) {
	failsWith(t, "must be called within synctest.Test", func(f *failures) { controllertest.NewHost(f, greeter.Entry()) })
}

// TestBuiltInControllersWorkTogether has a Secret that is copied, a Deployment that reads the copy, and
// a time at which the source expires. The three share one cache, in which each resource is once.
func TestBuiltInControllersWorkTogether(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		source := &corev1.Secret{
			ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: "s", Annotations: map[string]string{
				"quartermaster.dev/push-to": "b", "quartermaster.dev/expires": "2000-01-01T02:00:00Z"}},
			Data: map[string][]byte{"k": []byte("v")},
		}
		web := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: "b", Name: "web", Annotations: map[string]string{"quartermaster.dev/reload": "auto"}}}
		web.Spec.Template.Spec.Containers = []corev1.Container{{Name: "web", EnvFrom: []corev1.EnvFromSource{
			{SecretRef: &corev1.SecretEnvSource{LocalObjectReference: corev1.LocalObjectReference{Name: "s"}}}}}}
		h := controllertest.Setup{
			Entries: []controllers.Entry{configreload.Entry(), replication.Entry(), ttl.Entry()},
			Flags:   []string{"--replication-push-namespaces=*", "--ttl-include-resources=secrets"},
			Standby: true,
		}.NewHost(t, source, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "a"}}, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "b"}})
		assert.Equal(t, "writes", []string{"replication: create secrets b/s"}, h.Writes())
		h.Put(web)
		h.Sleep(time.Minute)
		h.Writes() // config-reload may record what it has seen

		source.Data["k"] = []byte("w")
		h.Put(source)
		h.Sleep(time.Minute)
		assert.Equal(t, "writes after a change", []string{"replication: update secrets b/s", "config-reload: patch deployments.apps b/web"}, h.Writes())

		h.Restart()
		h.Sleep(2 * time.Hour)
		assert.Equal(t, "writes of the standby", []string{"ttl: delete secrets a/s", "replication: delete secrets b/s"}, h.Writes())
	})
}

func TestControllerWorksInAnotherCluster(t *testing.T) {
	apply := func(ctx context.Context, c *controllers.Cluster) error {
		return c.Apply(ctx, corev1ac.ConfigMap("a", "shop").WithData(map[string]string{"greeting": "hello"}))
	}
	for name, tc := range map[string]struct {
		do             func(context.Context, *controllers.Cluster) error
		hook           func(far kubernetes.Interface) error // is removed when it has been called
		writes, events []string
	}{
		"an apply": {do: apply, writes: []string{"apply configmaps shop/a"}},
		"a write whose hook carries it out and loses the response": {do: apply, hook: func(far kubernetes.Interface) error {
			_, err := far.CoreV1().ConfigMaps("shop").Create(context.Background(), asking("a"), metav1.CreateOptions{})
			return errors.Join(err, errors.New("lost"))
		}, writes: []string{"apply configmaps shop/a: lost", "apply configmaps shop/a"}},
		"a role with more than the controller may do at home": {do: func(ctx context.Context, c *controllers.Cluster) error {
			role := &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: "made"}, Rules: allowing("pods")(controllers.Settings{})}
			_, err := c.Client.RbacV1().ClusterRoles().Create(ctx, role, metav1.CreateOptions{})
			return controllers.TerminalError(err)
		}, writes: []string{"create clusterroles.rbac.authorization.k8s.io made"}},
		"an Event, which is no write and meets no hook": {do: func(_ context.Context, c *controllers.Cluster) error {
			c.Events.Event(asking("a"), corev1.EventTypeNormal, "Seen", "by the test")
			<-time.After(time.Second) // Close drops what is not sent
			return nil
		}, hook: func(kubernetes.Interface) error { return errors.New("met") }, events: []string{"Normal Seen shop/a: by the test"}},
	} {
		subtest.InBubble(t, name, func(t *testing.T) {
			var far *controllertest.Cluster
			h := controllertest.NewHost(t, doing("copier", func(ctx context.Context, h controllers.Host) error {
				c, err := h.Cluster("far", &rest.Config{Host: far.Address, BearerToken: "token", TLSClientConfig: rest.TLSClientConfig{CAData: far.CA}})
				if err != nil {
					return err
				}
				defer c.Close()
				return tc.do(ctx, c)
			}))
			far = h.AddTLSCluster("far")
			far.SetToken("token")
			if tc.hook != nil {
				far.OnWrite(func(controllertest.Request) error {
					defer far.OnWrite(nil)
					return tc.hook(kubernetes.NewForConfigOrDie(far.RESTConfig()))
				})
			}
			h.Put(asking("a"))
			h.Sleep(5 * time.Second)
			assert.Equal(t, "writes in the cluster", tc.writes, far.Writes())
			assert.Equal(t, "Events in the cluster", tc.events, far.Events())
			assert.Equal(t, "writes in our own", nil, h.Writes())
			copied := controllertest.Get[corev1.ConfigMap](far, "shop", "a")
			if name == "an apply" && (copied == nil || copied.Data["greeting"] != "hello" || len(copied.ManagedFields) == 0 || copied.ManagedFields[0].Manager != "copier") {
				t.Errorf("the cluster has %+v", copied)
			}
		})
	}
}

func TestControllerReachesAnotherService(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		service := controllertest.Serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, r.Host) }))
		h := controllertest.NewHost(t, doing("caller", func(ctx context.Context, h controllers.Host) error {
			response, err := service.Get("https://example.com")
			if err != nil {
				return err
			}
			defer response.Body.Close()
			name, _ := io.ReadAll(response.Body)
			return h.Apply(ctx, corev1ac.ConfigMap(string(name), "shop"))
		}), asking("a"))
		h.Sleep(time.Hour) // with an idle connection
		assert.Equal(t, "writes", []string{"apply configmaps shop/example.com"}, h.Writes())
	})
}
