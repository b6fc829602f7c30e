// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package widget

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/pkg/election/apifence"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

const account = "system:serviceaccount:kube-system:widget"

// TestKustomizationIsComplete applies it as it is, and the fence and the alerts as
// docs/extend/fence-and-alerts.md has them. A manager with a token of one of the Deployment's Pods
// reconciles a Widget, and the other Pod cannot write.
func TestKustomizationIsComplete(t *testing.T) {
	ctx := fleet.Within(t.Context(), t, 2*fleet.Patience)
	begin := time.Now()
	t.Cleanup(func() {
		ctx := context.Background()
		_, err := shared.Kubectl(ctx, "-n", "kube-system", "delete", "deployment/widget", "serviceaccount/widget", "service/widget",
			"poddisruptionbudget/widget", "networkpolicy/widget", "flowschema/widget-leader-election",
			"validatingadmissionpolicybinding/"+ownFence, "validatingadmissionpolicy/"+ownFence)
		if err := errors.Join(err, install(ctx)); err != nil { // the roles for the fleet's ServiceAccount again
			t.Error(err)
		}
	})
	assert.NoError(t, shared.ApplyDir(ctx, "../../examples/widget/config"))
	runCommandsOfTheDocs(ctx, t)

	pods := awaitPods(ctx, t)
	leader, err := shared.ReplicaOf(ctx, &pods[0])
	assert.NoError(t, err)
	o, err := cluster.DeployedOptions(pods[0].Spec, leader, cluster.ManagerOptions{Binary: shared.Binary})
	assert.NoError(t, err)
	m, err := shared.StartBare(leader, o)
	assert.NoError(t, err)
	fleet.StopAtEnd(t, m)
	if _, err := m.WaitForLine(ctx, "The API server refuses writes of replicas that do not lead"); err != nil {
		t.Fatal(err)
	}

	token, err := shared.AdminToken(ctx)
	assert.NoError(t, err)
	if _, metrics, err := fleet.Get(m.SecureURL+"/metrics", token); err != nil || !strings.Contains(metrics, "\nquartermaster_leader_election_is_leader{") {
		t.Errorf("the build lacks the metrics of the alerts: %v", err)
	}

	namespace := shared.NewNamespace(ctx, t, nil)
	widget := &unstructured.Unstructured{Object: map[string]any{"apiVersion": "example.com/v1", "kind": "Widget",
		"metadata": map[string]any{"name": "a"}, "spec": map[string]any{"image": "nginx", "message": "hello"}}}
	if _, err := shared.Objects.Resource(widgets).Namespace(namespace).Create(ctx, widget, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	fleet.Eventually(ctx, t, func() error {
		if count(ctx, t, widgets, namespace, hasReason("Progressing")) != 1 {
			return errors.New("the Widget has no condition")
		}
		events, err := shared.Admin.CoreV1().Events(namespace).List(ctx, metav1.ListOptions{FieldSelector: "involvedObject.kind=Widget"})
		if err == nil && len(events.Items) == 0 {
			err = errors.New("the Widget has no Event")
		}
		return err
	})
	if count(ctx, t, deployments, namespace, isOwned) != 1 || count(ctx, t, configMaps, namespace, isOwned) != 1 {
		t.Error("the Widget has not its objects")
	}

	other, err := shared.ReplicaOf(ctx, &pods[1])
	assert.NoError(t, err)
	client, err := kubernetes.NewForConfig(other.Config())
	assert.NoError(t, err)
	_, err = client.AppsV1().Deployments(namespace).Patch(ctx, "a", types.MergePatchType, []byte(`{"spec":{"paused":true}}`), metav1.PatchOptions{})
	if !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), apifence.PolicyName+": written by Pod "+pods[1].Name) {
		t.Errorf("a write of a Pod that does not lead: %v", err)
	}
	if _, err := client.DiscoveryV1().EndpointSlices(metav1.NamespaceDefault).Get(ctx, "kubernetes", metav1.GetOptions{}); err != nil {
		t.Errorf("a successor that asks every API server for the fence: %v", err)
	}

	// The Widget goes, so that its finalizer does not keep the namespace.
	assert.NoError(t, shared.Objects.Resource(widgets).Namespace(namespace).Delete(ctx, "a", metav1.DeleteOptions{}))
	fleet.Eventually(ctx, t, func() error {
		if n := count(ctx, t, widgets, namespace, func(*unstructured.Unstructured) bool { return true }); n > 0 {
			return errors.New("the Widget is still there")
		}
		return nil
	})
	for _, e := range shared.AuditSince(t, begin, func(e auditv1.Event) bool { return e.User.Username == account && !fleet.Allowed(e) }) {
		t.Errorf("the roles do not allow %s %s", e.Verb, e.RequestURI)
	}
}

// awaitPods returns the two Pods of the Deployment.
func awaitPods(ctx context.Context, t *testing.T) (pods []corev1.Pod) {
	t.Helper()
	fleet.Eventually(ctx, t, func() error {
		list, err := shared.Admin.CoreV1().Pods(metav1.NamespaceSystem).List(ctx, metav1.ListOptions{LabelSelector: "app.kubernetes.io/name=widget"})
		if err != nil {
			return err
		}
		if pods = list.Items; len(pods) != 2 {
			return fmt.Errorf("the Deployment has %d Pods", len(pods))
		}
		return nil
	})
	return pods
}

// ownFence is the name that the commands in the documentation give the policy.
const ownFence = apifence.PolicyName + "-widget"

// checkCopies fails if a copy of an object or the dashboard is not the build's.
const checkCopies = `
test "$(kubectl -n kube-system get services,servicemonitors,prometheusrules -l app.kubernetes.io/name=widget -o name | wc -l)" = 4
if kubectl -n kube-system get prometheusrules widget widget-more -o yaml | cat - widget.json | grep -o '\(job\|deployment\|pod\)=~*[\]*"quartermaster'; then exit 1; fi`

// runCommandsOfTheDocs runs the commands of docs/extend/fence-and-alerts.md.
func runCommandsOfTheDocs(ctx context.Context, t *testing.T) {
	t.Helper()
	const crds = "testdata/monitoring.yaml"
	dir, page := t.TempDir(), []byte(nil)
	deploy, err := filepath.Abs("../../deploy")
	if err == nil {
		page, err = os.ReadFile("../../docs/extend/fence-and-alerts.md")
	}
	assert.NoError(t, errors.Join(err, os.Symlink(deploy, filepath.Join(dir, "deploy")), shared.ApplyDir(ctx, crds), shared.WaitForCRDs(ctx, crds)))
	commands := regexp.MustCompile("```sh\n([^`]*)```").FindAllSubmatch(page, -1)
	if len(commands) != 4 {
		t.Fatalf("docs/extend/fence-and-alerts.md has %d blocks of commands", len(commands))
	}
	sh := exec.CommandContext(ctx, "sh", "-ec", string(slices.Concat(commands[0][1], commands[1][1], commands[2][1], commands[3][1]))+checkCopies)
	sh.Dir = dir
	sh.Env = append(os.Environ(), "KUBECONFIG="+shared.Kubeconfig(), "HOME="+shared.Dir(),
		"PATH="+filepath.Dir(shared.Cluster.Binary("kubectl"))+":"+os.Getenv("PATH"))
	if out, err := sh.CombinedOutput(); err != nil {
		t.Fatalf("%v:\n%s", err, out)
	}
}
