// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package replication

import (
	"fmt"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/test/internal/faultproxy"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// TestCopiesAreRightAfterConcurrentChanges changes sources, namespaces and targets at once, for a while.
// Then the copies are those that the sources ask for, and what others made is as they made it.
func TestCopiesAreRightAfterConcurrentChanges(t *testing.T) {
	const sources, changes = 6, 60
	f := newFixture(t, "a", "b", "c", "d")
	f.ctx = fleet.Within(t.Context(), t, 2*fleet.Patience)
	shared.RunLeader(f.ctx, t, args("--replication-concurrent-syncs=8")...)
	targets := []string{"b", "c", "d"}
	tolerate := func(err error) {
		if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) && !apierrors.IsAlreadyExists(err) {
			t.Error(err)
		}
	}
	var running sync.WaitGroup
	for i := range sources {
		name := fmt.Sprintf("s%d", i)
		rnd := rand.New(rand.NewPCG(1, uint64(i)))
		running.Go(func() { // the owner of the source
			secrets := shared.Admin.CoreV1().Secrets(f.namespaces["a"])
			for n := range changes {
				s := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: name}, Data: dataOf(fmt.Sprintf("k=%d", n))}
				switch rnd.IntN(8) {
				case 0:
				case 1:
					tolerate(secrets.Delete(f.ctx, name, metav1.DeleteOptions{}))
					continue
				case 2, 3:
					f.annotated("Q:push-to=labels: group={id},env=x,name!=a")(s)
				default:
					f.annotated("Q:push-to={" + targets[rnd.IntN(3)] + "}")(s)
				}
				if _, err := secrets.Update(f.ctx, s, metav1.UpdateOptions{}); apierrors.IsNotFound(err) {
					_, err = secrets.Create(f.ctx, s, metav1.CreateOptions{})
					tolerate(err)
				} else {
					tolerate(err)
				}
			}
		})
		running.Go(func() { // somebody in the targets' namespaces
			for range changes {
				secrets := shared.Admin.CoreV1().Secrets(f.namespaces[targets[rnd.IntN(3)]])
				switch rnd.IntN(3) {
				case 0:
					_, err := secrets.Create(f.ctx, &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"foreign": "1"}}, Data: dataOf("own=1")}, metav1.CreateOptions{})
					tolerate(err)
				case 1:
					tolerate(secrets.Delete(f.ctx, name, metav1.DeleteOptions{}))
				default:
					s, err := secrets.Get(f.ctx, name, metav1.GetOptions{})
					tolerate(err)
					if err == nil && s.Labels["foreign"] == "" {
						s.Data = dataOf("k=drift")
						_, err = secrets.Update(f.ctx, s, metav1.UpdateOptions{})
						tolerate(err)
					}
				}
			}
		})
	}
	running.Go(func() { // the owner of the namespaces
		rnd := rand.New(rand.NewPCG(2, 0))
		for range changes / 4 {
			f.label(targets[rnd.IntN(3)], "env", []string{"x", ""}[rnd.IntN(2)])
		}
	})
	running.Wait()

	f.label("b", "env", "x")
	f.label("c", "env", "x")
	f.label("d", "env", "")
	for i := range sources {
		object := fmt.Sprintf("a/s%d", i)
		if f.get(object) == nil {
			f.secret(object, "k=end")
		}
		f.edit(object, holding("k=end"), f.annotated([]string{"Q:push-to=labels: group={id},env=x", "Q:push-to={d}", "Q:push-to"}[i%3]))
	}
	fleet.Eventually(f.ctx, t, func() error {
		for i := range sources {
			for _, ns := range targets {
				object := fmt.Sprintf("%s/s%d", ns, i)
				s := f.get(object)
				want := i%3 == 0 && ns != "d" || i%3 == 1 && ns == "d"
				switch {
				case s != nil && s.Labels["foreign"] != "":
					if string(s.Data["own"]) != "1" || len(s.Data) != 1 || len(s.Annotations) != 0 {
						t.Errorf("%s is foreign and was changed: %v", object, s.Annotations)
					}
				case want != (s != nil):
					return fmt.Errorf("%s: exists %v, want %v", object, s != nil, want)
				case want && string(s.Data["k"]) != "end":
					return fmt.Errorf("%s holds %s", object, s.Data["k"])
				}
			}
		}
		return nil
	})
}

// TestFailuresAreRetriedToTheEnd answers the first requests about a target in other ways.
func TestFailuresAreRetriedToTheEnd(t *testing.T) {
	ctx := fleet.Context(t)
	f := newFixture(t, "a", "b")
	replica, proxy := shared.NewReplicaBehindProxy(ctx, t)
	faults := map[string][]faultproxy.Rule{
		"conflict": {{Times: 2, Status: 409}}, "many-conflicts": {{Times: 6, Status: 409}}, "told-to-wait": {{Times: 2, Status: 429, RetryAfter: time.Second}},
		"internal-error": {{Times: 2, Status: 500}}, "unavailable": {{Times: 2, Status: 503}}, "forbidden": {{Times: 2, Status: 403}},
		"slow": {{Times: 1, Delay: 2 * time.Second}}, "not-answered": {{Times: 1, DropResponse: true}}, "nothing": nil,
	}
	for name, rules := range faults {
		for _, rule := range rules {
			for _, verb := range []string{http.MethodPost, http.MethodPut, http.MethodDelete} {
				rule.Match = func(r *http.Request) bool {
					return r.Method == verb && (strings.HasSuffix(r.URL.Path, "/"+name) || verb == http.MethodPost && strings.HasSuffix(r.URL.Path, f.expand("{b}")+"/secrets"))
				}
				if verb != http.MethodPost || name == "conflict" {
					proxy.Add(rule)
				}
			}
		}
	}
	m := shared.Run(t, replica, cluster.ManagerOptions{Args: args("--replication-concurrent-syncs=16")})
	shared.WaitForLeader(ctx, t, m)
	await := func(content string) {
		t.Helper()
		for name := range faults {
			f.waitForContent("b/" + name + ": " + content)
		}
	}
	for name := range faults {
		f.secret("a/"+name, "k=v", f.annotated("Q:push-to={b}"))
	}
	await("k=v")
	for name := range faults {
		f.edit("a/"+name, holding("k=w"))
	}
	await("k=w")
	for name := range faults {
		f.remove("a/" + name)
	}
	await("none")
	counts := map[string]int{}
	for _, write := range f.writes() {
		counts[write]++
	}
	for write, n := range counts {
		if n != 1 {
			t.Errorf("%s: %d times", write, n)
		}
	}
}
