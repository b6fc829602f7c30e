// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package federation

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/quartermaster-dev/quartermaster/hack/cluster/controlplane"
	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/federation/policy"
	"github.com/quartermaster-dev/quartermaster/test/internal/faultproxy"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
	"github.com/quartermaster-dev/quartermaster/test/internal/pages"
)

// operator runs the commands of docs/operate/federation.md.
type operator struct {
	*joinFixture
	dir      string
	blocks   []string
	executed map[int]bool
}

func newOperator(j *joinFixture) *operator {
	j.Helper()
	root, err := controlplane.Root()
	assert.NoError(j, err)
	all, err := pages.ReadAll(root)
	assert.NoError(j, err)
	o := &operator{joinFixture: j, dir: j.TempDir(), executed: map[int]bool{}}
	for _, page := range all {
		if page.Path == "docs/operate/federation.md" {
			for _, b := range page.Blocks {
				o.blocks = append(o.blocks, b.Script)
			}
		}
	}
	for name, target := range map[string]string{"kubectl": shared.Cluster.Binary("kubectl"), "manager": shared.Binary, "deploy": filepath.Join(root, "deploy")} {
		assert.NoError(j, os.Symlink(target, filepath.Join(o.dir, name)))
	}
	return o
}

// runBlock runs the only block of the page with a text, and checks that it succeeds and prints another text.
func (o *operator) runBlock(text, want string) {
	o.Helper()
	if out, err := o.blockOutput(text); err != nil || !strings.Contains(out, want) {
		o.Fatalf("the block with %q: %v, want the output %q:\n%s", text, err, want, out)
	}
}

// blockOutput runs the only block of the page with a text, and returns its output and the error of its exit.
func (o *operator) blockOutput(text string) (string, error) {
	o.Helper()
	hasText := func(script string) bool { return strings.Contains(script, text) }
	i := slices.IndexFunc(o.blocks, hasText)
	if i < 0 || slices.IndexFunc(o.blocks[i+1:], hasText) >= 0 {
		o.Fatalf("not one block of the page has %q", text)
	}
	o.executed[i] = true
	cmd := exec.CommandContext(o.ctx, "bash", "-eo", "pipefail", "-c", o.blocks[i])
	cmd.Dir, cmd.Env = o.dir, append(os.Environ(), "PATH="+o.dir+":"+os.Getenv("PATH"), "KUBECONFIG="+o.kubeconfig)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// TestLongOperatorsCommands brings about what each section of docs/operate/federation.md is for, and runs its
// commands.
func TestLongOperatorsCommands(t *testing.T) {
	o := newOperator(newJoinFixture(t, 6*fleet.Patience))
	const health = `{"controllerDuration":{"availableDelay":"1s"},"clusterHealthCheck":{"period":"1s","timeout":"1s","failureThreshold":2}}`
	o.configure(health)
	join := func() {
		o.run(shared.Binary, "join", "c1")
		o.run(shared.Binary, "join", "c2")
		o.setLabel("region", `"eu"`)
	}
	join()
	o.useProxy()
	shared.RunLeader(o.ctx, t, shortGraceArgs...)
	if _, err := shared.Admin.CoreV1().Namespaces().Create(o.ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: o.shop}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	o.federateNamespace(o.shop)
	var objects []*unstructured.Unstructured
	for i := range 20 {
		objects = append(objects, o.create(fmt.Sprintf("kind: FederatedConfigMap, metadata: {name: f-%d}, spec: {template: {data: {a: b}}, placement: {clusterSelector: {matchLabels: {region: eu}}}}", i)))
	}
	last := objects[len(objects)-1]
	o.waitForStatus(last, "c2=")
	o.runBlock("--user=jane", "yes")
	if out, err := o.blockOutput("can-i update federatednamespaces"); err == nil || !strings.Contains(out, "no") {
		t.Errorf("a tenant may update FederatedNamespaces: %v\n%s", err, out)
	}

	o.setLabel("region", "null")
	o.waitForStatus(last, "c2=RemovalHeld")
	o.runBlock("events", "RemovalsHeld")
	o.runBlock("-l '!kubefed.io/managed'", "c2 RemovalHeld FederatedConfigMap shop/f-19")
	o.runBlock("RemovalHeld not-well | sort", "c2 RemovalHeld FederatedConfigMap shop/f-19")
	o.runBlock("annotate --overwrite", "")
	o.waitForStatus(last, "")
	o.setLabel("region", `"eu"`)
	o.waitForStatus(last, "c2=")

	o.proxy.Partition(faultproxy.Hang)
	o.waitForCondition("c2", "Offline=True")
	o.deleteAll(objects[:1])
	o.waitUntilGone(objects[:1])
	o.runBlock("federation-written-off", "Offline=True")
	o.proxy.Heal()
	o.waitForRemovals()

	byHand := &scenario{members: o.members}
	byHand.patchByHand(o.c2, configMaps, o.shop, "f-1", `{"metadata":{"finalizers":["example.com/mine"]}}`)
	o.deleteAll(objects[1:2])
	o.waitForStatus(objects[1], "c2=WaitingForRemoval")
	o.runBlock("propagationController", "example.com/mine")
	byHand.patchByHand(o.c2, configMaps, o.shop, "f-1", `{"metadata":{"finalizers":null}}`)
	o.waitUntilGone(objects[1:2])

	c2 := object(t, "kind: KubeFedCluster, metadata: {name: c2}")
	kubeFedClusters := schema.GroupVersionResource{Group: policy.CoreGroup, Version: "v1beta1", Resource: "kubefedclusters"}
	identity := func(u *unstructured.Unstructured) string { return u.GetAnnotations()[policy.ClusterUIDAnnotation] }
	before, err := client(c2).Get(o.ctx, "c2", metav1.GetOptions{})
	assert.NoError(t, err)
	o.patch(c2, fmt.Sprintf(`{"metadata":{"annotations":{%q:"another"}}}`, policy.ClusterUIDAnnotation))
	fleet.Eventually(fleet.Within(o.ctx, t, fleet.Patience), t, func() error {
		list, err := shared.Admin.CoreV1().Events(namespace).List(o.ctx, metav1.ListOptions{FieldSelector: "reason=" + policy.ClusterReplaced})
		if err == nil && len(list.Items) == 0 {
			err = errors.New("no Event " + policy.ClusterReplaced)
		}
		return err
	})
	o.runBlock("-o wide", "f-19")
	o.runBlock(policy.ClusterUIDAnnotation+"-", "")
	o.waitForObject(o.c1, kubeFedClusters, namespace, "c2", func(u *unstructured.Unstructured) bool { return identity(u) == identity(before) })

	o.runBlock("federatedtypeconfigs,kubefedconfigs", "")
	begin := time.Now()
	assert.NoError(t, shared.Admin.CoreV1().Namespaces().Delete(o.ctx, namespace, metav1.DeleteOptions{}))
	fleet.Wait(o.ctx, quietTime)
	o.runBlock("kubectl wait --for=delete", "")
	assert.NoError(t, shared.InstallComponents(o.ctx, "federation"))
	expectRefusals(begin)
	o.configure(health)
	o.runBlock("manager federation join c2", "")
	o.waitForStatus(last, "c2=")

	o.runBlock("until ", "")
	o.expectUnjoined(true)
	join()
	o.runBlock("unjoin c2 --force", "")
	o.expectUnjoined(true)
	for i, block := range o.blocks {
		if !o.executed[i] {
			t.Errorf("was not run:\n%s", block)
		}
	}
}

// setLabel gives c2 a label.
func (m *members) setLabel(key, value string) {
	m.Helper()
	m.patch(object(m.T, "kind: KubeFedCluster, metadata: {name: c2}"), fmt.Sprintf(`{"metadata":{"labels":{%q:%s}}}`, key, value))
}
