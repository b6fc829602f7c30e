// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package deploy

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	authorizationv1 "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/test/internal/faultproxy"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// TestForbiddenNamespaceConcernsOnlyItself takes the right to read one of three namespaces from a manager.
// For MINUTES (0: four rounds), with restarts of the manager and connections that end, workloads in the other
// two are rolled; the test logs how fast, beside the same with all three. The third catches up when the right
// is back.
func TestForbiddenNamespaceConcernsOnlyItself(t *testing.T) {
	length := time.Duration(fleet.Setting(t, "MINUTES", 0)) * time.Minute
	ctx := fleet.Within(t.Context(), t, 3*fleet.Patience+length)
	first, second, third := shared.NewSample(ctx, t), shared.NewSample(ctx, t), shared.NewSample(ctx, t)
	component := render(ctx, t, namespacedOverlay(t, first.Namespace, "namespaced"))
	kubectlApply(ctx, t, component)
	kubectlApply(ctx, t, printRBAC(ctx, t, second.Namespace, first.Namespace))
	rights := printRBAC(ctx, t, third.Namespace, first.Namespace)
	kubectlApply(ctx, t, rights)
	shared.ExpectRefusals(func(e auditv1.Event) bool { return e.ObjectRef != nil && e.ObjectRef.Namespace == third.Namespace })

	round := 0
	start := func() (cut, stop func()) {
		round++
		m, proxy := startInNamespace(ctx, t, component, first.Namespace, fmt.Sprint("manager-", round), "--namespaces="+second.Namespace+","+third.Namespace)
		fleet.Eventually(ctx, t, func() error { return fleet.Answers(m.InsecureURL+"/readyz", "", 200) })
		return func() { proxy.Partition(faultproxy.Reset); proxy.Heal() }, func() {
			assert.NoError(t, m.Stop(ctx, 30*time.Second))
		}
	}
	cut, stop := start()
	for _, s := range []fleet.Sample{first, second, third} {
		s.WaitUntilKnown(ctx, t, "web")
	}

	var allAllowed, oneForbidden []time.Duration
	for range 10 {
		allAllowed = append(allAllowed, rollTime(ctx, t, first), rollTime(ctx, t, second))
	}
	forbid(ctx, t, third.Namespace, "system:serviceaccount:"+first.Namespace+":quartermaster")
	cut() // the API server does not end a watch that it has accepted
	before := generation(ctx, t, third)
	third.Paint(ctx, t, "unseen")
	for end, n := time.Now().Add(length), 0; n < 4 || time.Now().Before(end); n++ {
		for range 5 {
			oneForbidden = append(oneForbidden, rollTime(ctx, t, first), rollTime(ctx, t, second))
		}
		if n%2 == 0 {
			cut()
		} else {
			stop()
			cut, stop = start()
		}
		fleet.Wait(ctx, min(length/30, 20*time.Second))
	}
	if got := generation(ctx, t, third); got != before {
		t.Errorf("a workload in the forbidden namespace was rolled %d times", got-before)
	}
	kubectlApply(ctx, t, rights)
	fleet.Eventually(ctx, t, func() error {
		if generation(ctx, t, third) == before {
			return errors.New("the third namespace may be read again, and its workload has not been rolled")
		}
		return nil
	})
	t.Logf("median from a change to the workload's new template: %v with three namespaces, %v while one is forbidden (%d rolls, at most %v, %d managers)",
		median(allAllowed), median(oneForbidden), len(oneForbidden), slices.Max(oneForbidden).Round(time.Millisecond), round)
}

// forbid deletes the RoleBindings in the namespace, and waits until the user may not watch ConfigMaps there.
func forbid(ctx context.Context, t *testing.T, namespace, user string) {
	t.Helper()
	assert.NoError(t, shared.Admin.RbacV1().RoleBindings(namespace).DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{}))
	fleet.Eventually(ctx, t, func() error {
		allowed, err := shared.Allows(ctx, user, authorizationv1.ResourceAttributes{Namespace: namespace, Resource: "configmaps", Verb: "watch"})
		if err == nil && allowed {
			err = errors.New("the deletion does not count yet")
		}
		return err
	})
}

// rollTime changes what Deployment web of the sample uses, and returns how long it takes until the Deployment
// has another template.
func rollTime(ctx context.Context, t *testing.T, s fleet.Sample) time.Duration {
	t.Helper()
	before, begin := generation(ctx, t, s), time.Now()
	s.Paint(ctx, t, fmt.Sprint(begin.UnixNano()))
	for generation(ctx, t, s) == before { // ends with the context
	}
	return time.Since(begin)
}

func generation(ctx context.Context, t *testing.T, s fleet.Sample) int64 {
	t.Helper()
	d, err := shared.Admin.AppsV1().Deployments(s.Namespace).Get(ctx, "web", metav1.GetOptions{})
	assert.NoError(t, err)
	return d.Generation
}

func median(d []time.Duration) time.Duration {
	slices.Sort(d)
	return d[len(d)/2].Round(time.Millisecond)
}
