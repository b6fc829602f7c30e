// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	batchv1 "k8s.io/api/batch/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/pkg/election/apifence"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

func newClient(t testing.TB, config *rest.Config) *kubernetes.Clientset {
	t.Helper()
	config = rest.CopyConfig(config)
	config.QPS = -1
	client, err := kubernetes.NewForConfig(config)
	assert.NoError(t, err)
	return client
}

// tokenClient returns a client of the managers' ServiceAccount whose token is bound to no Pod.
func tokenClient(ctx context.Context, t testing.TB) *kubernetes.Clientset {
	t.Helper()
	token, err := shared.TokenOf(ctx, metav1.NamespaceSystem, "quartermaster")
	assert.NoError(t, err)
	config := rest.AnonymousClientConfig(shared.AdminConfig())
	config.BearerToken = token
	return newClient(t, config)
}

// impersonatedConfig returns a configuration that impersonates the manager's ServiceAccount. Like a token
// from a Secret, it lacks any information about a Pod.
func impersonatedConfig() *rest.Config {
	config := shared.AdminConfig()
	config.Impersonate.UserName = "system:serviceaccount:kube-system:quartermaster"
	return config
}

// leaderNamespace is the Namespace whose annotation names the leader.
var leaderNamespace = apifence.NamespaceFor(types.NamespacedName{Namespace: metav1.NamespaceSystem, Name: fleet.LeaseName})

// What the fence says to a probe.
const (
	noFence     = ""
	admits      = "admits"
	refuses     = "refuses"
	cannotJudge = "cannot judge"
)

var (
	refusalPattern = regexp.MustCompile(`quartermaster-fence: written by Pod (\S+), the leader is '([^']*)'`)
	podlessRefusal = "quartermaster-fence: written by a token without a Pod, the leader is "
)

// probeFence probes for the fence as a manager does.
func probeFence(ctx context.Context, client kubernetes.Interface) (string, error) {
	_, err := client.CoreV1().Namespaces().Patch(ctx, leaderNamespace, types.MergePatchType, []byte("{}"),
		metav1.PatchOptions{DryRun: []string{metav1.DryRunAll}})
	if err == nil || apierrors.IsNotFound(err) {
		return noFence, nil
	}
	match := refusalPattern.FindStringSubmatch(err.Error())
	switch {
	case strings.Contains(err.Error(), podlessRefusal):
		return cannotJudge, nil
	case match == nil:
		return noFence, err
	case strings.HasPrefix(match[2], match[1]+"_"):
		return admits, nil
	}
	return refuses, nil
}

// waitForVerdict waits until the fence's verdict on the client is want.
func waitForVerdict(ctx context.Context, t testing.TB, client kubernetes.Interface, want string) {
	t.Helper()
	fleet.Eventually(ctx, t, func() error {
		got, err := probeFence(ctx, client)
		if err == nil && got != want {
			err = fmt.Errorf("the fence's verdict is %q, want %q", got, want)
		}
		return err
	})
}

// nameLeader sets the annotation that names the leader.
func nameLeader(ctx context.Context, t testing.TB, identity string) *corev1.Namespace {
	t.Helper()
	patch := fmt.Appendf(nil, `{"metadata":{"annotations":{%q:%q}}}`, apifence.LeaderAnnotation, identity)
	named, err := shared.Admin.CoreV1().Namespaces().Patch(ctx, leaderNamespace, types.MergePatchType, patch, metav1.PatchOptions{})
	assert.NoError(t, err)
	return named
}

// waitForFence waits until the fence in the API server is in force, which takes a while after its
// installation.
func waitForFence(ctx context.Context, t testing.TB) {
	t.Helper()
	waitForVerdict(ctx, t, tokenClient(ctx, t), cannotJudge)
}

// disableFence switches off the fence in the API server until the end of the test.
func disableFence(t testing.TB) {
	t.Helper()
	ctx := fleet.Context(t)
	anybody := tokenClient(ctx, t)
	setFenceAction(ctx, t, admissionregistrationv1.Audit)
	waitForVerdict(ctx, t, anybody, noFence)
	t.Cleanup(func() {
		ctx := fleet.Within(context.Background(), t, fleet.Patience)
		setFenceAction(ctx, t, admissionregistrationv1.Deny)
		waitForVerdict(ctx, t, anybody, cannotJudge)
	})
}

// setFenceAction sets what the API server does with writes that the fence refuses.
func setFenceAction(ctx context.Context, t testing.TB, action admissionregistrationv1.ValidationAction) {
	t.Helper()
	patch := fmt.Appendf(nil, `{"spec":{"validationActions":[%q]}}`, action)
	_, err := shared.Admin.AdmissionregistrationV1().ValidatingAdmissionPolicyBindings().Patch(ctx, apifence.PolicyName,
		types.MergePatchType, patch, metav1.PatchOptions{})
	assert.NoError(t, err)
}

func TestFenceInTheAPIServerJudgesEachWriter(t *testing.T) {
	ctx := fleet.Context(t)
	w := shared.NewWorkloads(ctx, t, 1)
	permitDeletions(ctx, t, w.Namespace)
	a, b := shared.NewReplica(ctx, t), shared.NewReplica(ctx, t)
	clients := map[string]*kubernetes.Clientset{
		"a": newClient(t, a.Config()), "b": newClient(t, b.Config()), "a token without a Pod": tokenClient(ctx, t),
		"a user without extra": newClient(t, impersonatedConfig()), "somebody else": shared.Admin,
	}
	t.Cleanup(func() { nameLeader(context.Background(), t, "") })

	for name, tc := range map[string]struct {
		leader   string
		admitted map[string]bool
	}{
		"the leader's Pod writes":              {a.Pod + "_x", map[string]bool{"a": true}},
		"the next leader's Pod writes":         {b.Pod + "_x", map[string]bool{"b": true}},
		"nobody writes when nobody is named":   {"", nil},
		"a name that goes on is another":       {a.Pod + "0_x", nil},
		"an identity without a UUID is nobody": {a.Pod, nil},
	} {
		t.Run(name, func(t *testing.T) {
			nameLeader(ctx, t, tc.leader)
			for writer, client := range clients {
				switch {
				case tc.admitted[writer]:
					waitForVerdict(ctx, t, client, admits)
				case writer == "a token without a Pod", writer == "a user without extra":
					waitForVerdict(ctx, t, client, cannotJudge) // and therefore refused
				case writer != "somebody else": // to whom the fence does not apply
					waitForVerdict(ctx, t, client, refuses)
				}
			}
			for writer, client := range clients {
				admitted := tc.admitted[writer] || writer == "somebody else"
				writes := tryLeaderWrites(ctx, w, client)
				maps.Copy(writes, tryDeletions(ctx, w.Namespace, client))
				for what, err := range writes {
					switch refused := isFenceRefusal(err); {
					case admitted && err != nil:
						t.Errorf("%s may not %s: %v", writer, what, err)
					case !admitted && !refused:
						t.Errorf("%s may %s: %v", writer, what, err)
					}
				}
				for what, err := range tryStandbyWrites(ctx, client) {
					if err != nil {
						t.Errorf("%s may not %s: %v", writer, what, err)
					}
				}
			}
		})
	}
}

func isFenceRefusal(err error) bool {
	return apierrors.IsForbidden(err) && strings.Contains(err.Error(), apifence.PolicyName+": written by")
}

// tryLeaderWrites does writes that the managers' role permits and only a leader may do, and returns
// their errors.
func tryLeaderWrites(ctx context.Context, w *fleet.Workloads, client kubernetes.Interface) map[string]error {
	patch := fmt.Appendf(nil, `{"metadata":{"annotations":{"content":"%d"}}}`, w.NextContent())
	deployments, jobs := client.AppsV1().Deployments(w.Namespace), client.BatchV1().Jobs(w.Namespace)
	_, patched := deployments.Patch(ctx, fleet.DeploymentName(0), types.MergePatchType, patch, metav1.PatchOptions{})
	_, dry := deployments.Patch(ctx, fleet.DeploymentName(0), types.MergePatchType, patch, metav1.PatchOptions{DryRun: []string{metav1.DryRunAll}})
	job := &batchv1.Job{ObjectMeta: metav1.ObjectMeta{Name: "job"}}
	job.Spec.Template.Spec = corev1.PodSpec{RestartPolicy: corev1.RestartPolicyNever, Containers: []corev1.Container{{Name: "c", Image: "c"}}}
	_, created := jobs.Create(ctx, job, metav1.CreateOptions{})
	if created != nil { // for the deletion
		_, _ = shared.Admin.BatchV1().Jobs(w.Namespace).Create(ctx, job, metav1.CreateOptions{})
	}
	deleted := jobs.Delete(ctx, job.Name, metav1.DeleteOptions{PropagationPolicy: ptr.To(metav1.DeletePropagationBackground)})
	if deleted != nil {
		_ = shared.Admin.BatchV1().Jobs(w.Namespace).Delete(ctx, job.Name, metav1.DeleteOptions{PropagationPolicy: ptr.To(metav1.DeletePropagationBackground)})
	}
	return map[string]error{"patch a Deployment": patched, "try to patch a Deployment": dry, "create a Job": created, "delete a Job": deleted}
}

// permitDeletions lets the managers delete Leases and Events in the namespace, as a controller of somebody
// else's may have to.
func permitDeletions(ctx context.Context, t testing.TB, namespace string) {
	t.Helper()
	role := &rbacv1.Role{ObjectMeta: metav1.ObjectMeta{Name: "deletions"}, Rules: []rbacv1.PolicyRule{
		{APIGroups: []string{"", "coordination.k8s.io"}, Resources: []string{"events", "leases"}, Verbs: []string{"delete"}}}}
	binding := &rbacv1.RoleBinding{ObjectMeta: role.ObjectMeta, RoleRef: rbacv1.RoleRef{Kind: "Role", Name: role.Name},
		Subjects: []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: metav1.NamespaceSystem, Name: "quartermaster"}}}
	_, created := shared.Admin.RbacV1().Roles(namespace).Create(ctx, role, metav1.CreateOptions{})
	_, bound := shared.Admin.RbacV1().RoleBindings(namespace).Create(ctx, binding, metav1.CreateOptions{})
	assert.NoError(t, errors.Join(created, bound))
	fleet.Eventually(ctx, t, func() error {
		review, err := shared.Admin.AuthorizationV1().SubjectAccessReviews().Create(ctx, &authorizationv1.SubjectAccessReview{
			Spec: authorizationv1.SubjectAccessReviewSpec{User: "system:serviceaccount:kube-system:quartermaster",
				ResourceAttributes: &authorizationv1.ResourceAttributes{Namespace: namespace, Verb: "delete", Resource: "events"}},
		}, metav1.CreateOptions{})
		if err == nil && !review.Status.Allowed {
			err = errors.New("the managers may not delete Events yet")
		}
		return err
	})
}

// tryDeletions deletes what every replica may write, and returns the errors.
func tryDeletions(ctx context.Context, namespace string, client kubernetes.Interface) map[string]error {
	name := metav1.ObjectMeta{Name: "deleted", Namespace: namespace}
	_, _ = shared.Admin.CoreV1().Events(namespace).Create(ctx, // it may be there
		&corev1.Event{ObjectMeta: name, InvolvedObject: corev1.ObjectReference{Namespace: namespace}}, metav1.CreateOptions{})
	_, _ = shared.Admin.CoordinationV1().Leases(namespace).Create(ctx, &coordinationv1.Lease{ObjectMeta: name}, metav1.CreateOptions{})
	return map[string]error{
		"delete an Event": client.CoreV1().Events(namespace).Delete(ctx, name.Name, metav1.DeleteOptions{}),
		"delete a Lease":  client.CoordinationV1().Leases(namespace).Delete(ctx, name.Name, metav1.DeleteOptions{}),
	}
}

// tryStandbyWrites does writes that every replica may do, and returns their errors.
func tryStandbyWrites(ctx context.Context, client kubernetes.Interface) map[string]error {
	event := &corev1.Event{ObjectMeta: metav1.ObjectMeta{GenerateName: "event-"}, InvolvedObject: corev1.ObjectReference{Namespace: "default"}}
	event, recorded := client.CoreV1().Events("default").Create(ctx, event, metav1.CreateOptions{})
	counted := recorded
	if recorded == nil {
		_, counted = client.CoreV1().Events("default").Patch(ctx, event.Name, types.MergePatchType, []byte(`{"count":2}`), metav1.PatchOptions{})
	}
	leases := client.CoordinationV1().Leases(metav1.NamespaceSystem)
	lease, renewed := leases.Get(ctx, fleet.LeaseName, metav1.GetOptions{})
	if renewed == nil {
		lease.Spec.RenewTime = ptr.To(metav1.NowMicro())
		_, renewed = leases.Update(ctx, lease, metav1.UpdateOptions{})
	}
	_, authenticated := client.AuthenticationV1().TokenReviews().Create(ctx,
		&authenticationv1.TokenReview{Spec: authenticationv1.TokenReviewSpec{Token: "x"}}, metav1.CreateOptions{})
	_, authorized := client.AuthorizationV1().SubjectAccessReviews().Create(ctx, &authorizationv1.SubjectAccessReview{
		Spec: authorizationv1.SubjectAccessReviewSpec{User: "x", NonResourceAttributes: &authorizationv1.NonResourceAttributes{Path: "/metrics", Verb: "get"}},
	}, metav1.CreateOptions{})
	ns, named := client.CoreV1().Namespaces().Get(ctx, leaderNamespace, metav1.GetOptions{})
	if named == nil {
		patch := fmt.Appendf(nil, `{"metadata":{"resourceVersion":%q,"annotations":{%q:%q}}}`,
			ns.ResourceVersion, apifence.LeaderAnnotation, ns.Annotations[apifence.LeaderAnnotation])
		_, named = client.CoreV1().Namespaces().Patch(ctx, leaderNamespace, types.MergePatchType, patch, metav1.PatchOptions{})
	}
	return map[string]error{"name the leader": named, "record an Event": recorded, "count it again": counted, "write the Lease": renewed, "review a token": authenticated, "review access": authorized}
}

// TestFenceFollowsTheName measures for how long after a change of the name writes of the
// former leader still pass. It asserts nothing about this time, which the fence in the client
// has to cover.
func TestFenceFollowsTheName(t *testing.T) {
	const rounds, writers = 20, 2
	ctx := fleet.Context(t)
	w := shared.NewWorkloads(ctx, t, writers)
	a, b := shared.NewReplica(ctx, t), shared.NewReplica(ctx, t)
	former, next := newClient(t, a.Config()), newClient(t, b.Config())
	t.Cleanup(func() { nameLeader(context.Background(), t, "") })

	type write struct {
		revision uint64
		done     time.Time
	}
	var lags, admissions []time.Duration
	late := 0
	for range rounds {
		nameLeader(ctx, t, a.Pod+"_x")
		waitForVerdict(ctx, t, former, admits)
		var mu sync.Mutex
		var writes []write
		var running sync.WaitGroup
		for i := range writers {
			running.Go(func() { // until it is refused
				for {
					patch := fmt.Appendf(nil, `{"metadata":{"annotations":{"content":"%d"}}}`, w.NextContent())
					d, err := former.AppsV1().Deployments(w.Namespace).Patch(ctx, fleet.DeploymentName(i), types.MergePatchType, patch, metav1.PatchOptions{})
					if err != nil {
						if !isFenceRefusal(err) {
							t.Error(err)
						}
						return
					}
					revision, err := strconv.ParseUint(d.ResourceVersion, 10, 64)
					if err != nil {
						t.Error(err)
						return
					}
					mu.Lock()
					writes = append(writes, write{revision, time.Now()})
					mu.Unlock()
				}
			})
		}
		fleet.Wait(ctx, 50*time.Millisecond)
		named := nameLeader(ctx, t, b.Pod+"_x")
		changed := time.Now()
		waitForVerdict(ctx, t, next, admits)
		admissions = append(admissions, time.Since(changed))
		running.Wait()
		revision, err := strconv.ParseUint(named.ResourceVersion, 10, 64)
		assert.NoError(t, err)
		lag := time.Duration(0)
		for _, w := range writes {
			if w.revision > revision {
				late++
				lag = max(lag, w.done.Sub(changed))
			}
		}
		lags = append(lags, lag)
		if len(writes) == 0 {
			t.Error(errors.New("the leader has written nothing: this measures nothing"))
		}
	}
	slices.Sort(lags)
	slices.Sort(admissions)
	t.Logf("%d changes of the leader: %d writes of the former passed afterwards, the last one %s (median) and at most %s after the change; the next was admitted after %s (median), at most %s",
		rounds, late, lags[rounds/2], lags[rounds-1], admissions[rounds/2], admissions[rounds-1])
}
