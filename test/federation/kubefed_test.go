// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package federation

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/hack/cluster/controlplane"
	"github.com/quartermaster-dev/quartermaster/hack/cluster/sandbox"
	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// specs are the tests of KubeFed v0.10.0, by their whole names, that judge a manager. The other 27 judge
// KubeFed's own packages and programs: its version manager (12), `kubefedctl federate` (4), the defaults of
// its webhook (2), its scheduler, its controller of FederatedTypeConfigs and its leader election (1 each);
// or they run only with scope Namespaced, or in the suite's own process (6).
var specs = []string{
	`Federated "clusterroles.rbac.authorization.k8s.io" should be created, read, updated and deleted successfully`,
	`Federated "configmaps" should be created, read, updated and deleted successfully`,
	`Federated "deployments.apps" should be created, read, updated and deleted successfully`,
	`Federated "ingresses.networking.k8s.io" should be created, read, updated and deleted successfully`,
	`Federated "jobs.batch" should be created, read, updated and deleted successfully`,
	`Federated "namespaces" should be created, read, updated and deleted successfully`,
	`Federated "replicasets.apps" should be created, read, updated and deleted successfully`,
	`Federated "secrets" should be created, read, updated and deleted successfully`,
	`Federated "serviceaccounts" should be created, read, updated and deleted successfully`,
	`Federated "services" should be created, read, updated and deleted successfully`,
	`Federated "configmaps" should report NamespaceNotFederated in propagation status if the containing namespace is not federated`,
	`Federated "configmaps" should have the managed label removed if not managed`,
	`Federated "configmaps" should not be deleted if unlabeled`,
	`Federated "deployments.apps" should be created, read its remote status and deleted successfully`,
	`Federated "jobs.batch" should be created, read its remote status and deleted successfully`,
	`Federated "replicasets.apps" should be created, read its remote status and deleted successfully`,
	`Federated CRD resources with namespaced=true should be created, read, updated and deleted successfully`,
	`Federated CRD resources with namespaced=false should be created, read, updated and deleted successfully`,
	`DeleteOptions Deployment should be created and deleted successfully, but ReplicaSet that created by Deployment won't be deleted`,
	`KubeFedCluster should correctly report the Kubernetes git version of the cluster`,
	`Core API Validation for FederatedTypeConfig should fail when an invalid FederatedTypeConfig is created or updated`,
	`Core API Validation for KubeFedCluster should fail when an invalid KubeFedCluster is created or updated`,
	`Core API Validation for KubeFedConfig should fail when an invalid KubeFedConfig is created or updated`,
	`Scheduling ReplicaSchedulingPreferences scheduling for federated deployments.apps should result in replicas spread equally in clusters with no explicit per cluster preferences`,
	`Scheduling ReplicaSchedulingPreferences scheduling for federated deployments.apps should result in replicas spread in proportion of weights when explicit preferences with weights specified`,
	`Scheduling ReplicaSchedulingPreferences scheduling for federated deployments.apps should result in replicas spread considering min replicas when both minreplica and weights specified`,
	`Scheduling ReplicaSchedulingPreferences scheduling for federated deployments.apps should result in target clusters are the intersection of the RSP clusters and federated resource placement`,
	`Scheduling ReplicaSchedulingPreferences scheduling for federated replicasets.apps should result in replicas spread equally in clusters with no explicit per cluster preferences`,
	`Scheduling ReplicaSchedulingPreferences scheduling for federated replicasets.apps should result in replicas spread in proportion of weights when explicit preferences with weights specified`,
	`Scheduling ReplicaSchedulingPreferences scheduling for federated replicasets.apps should result in replicas spread considering min replicas when both minreplica and weights specified`,
	`Scheduling ReplicaSchedulingPreferences scheduling for federated replicasets.apps should result in target clusters are the intersection of the RSP clusters and federated resource placement`,
}

// kubefed is a federation on which KubeFed's manager can lead too. c2 is as complete as c1.
type kubefed struct {
	*members
	box     *sandbox.Sandbox
	manager string // the program
}

// newKubeFed returns a federation of two members, if the environment asks for the tests with KubeFed's
// programs.
func newKubeFed(t *testing.T) *kubefed {
	t.Helper()
	requireKubeFed(t)
	return withKubeFed(newMembers(t, time.Hour, cluster.Options{}), "Disabled")
}

// requireKubeFed skips a test with KubeFed's programs unless the environment asks for them.
func requireKubeFed(t *testing.T) {
	t.Helper()
	if fleet.Setting(t, "KUBEFED", 0) == 0 {
		t.Skip("make kubefed runs it")
	}
}

// withKubeFed builds KubeFed's manager. The gate RawResourceStatusCollection is Enabled or Disabled.
func withKubeFed(m *members, collection string) *kubefed {
	m.Helper()
	k := &kubefed{members: m}
	var err error
	if k.box, err = sandbox.New(k.ctx, ""); err != nil {
		k.Fatal(err)
	}
	k.Cleanup(func() { _ = k.box.Close() })
	k.manager = k.buildProgram("kubefed", "build", "sigs.k8s.io/kubefed/cmd/controller-manager")
	// KubeFed's manager needs what its webhook would add.
	k.patch(object(k.T, "kind: KubeFedConfig, metadata: {name: kubefed}"), `{"spec":{"controllerDuration":{"availableDelay":"20s","unavailableDelay":"60s","cacheSyncTimeout":"5m"},
		"leaderElect":{"leaseDuration":"15s","renewDeadline":"10s","retryPeriod":"5s","resourceLock":"configmaps"},
		"clusterHealthCheck":{"period":"10s","timeout":"3s","failureThreshold":3,"successThreshold":1},
		"syncController":{"maxConcurrentReconciles":1,"adoptResources":"Enabled"},"statusController":{"maxConcurrentReconciles":1},
		"featureGates":[{"name":"PushReconciler","configuration":"Enabled"},{"name":"SchedulerPreferences","configuration":"Enabled"},{"name":"RawResourceStatusCollection","configuration":"`+collection+`"}]}}`)
	return k
}

// buildProgram builds a program of hack/kubefed by a command of go.
func (k *kubefed) buildProgram(name, command string, args ...string) string {
	k.Helper()
	path := filepath.Join(k.box.Dir, name)
	k.goCommand(append([]string{command, "-o", path}, args...)...)
	return path
}

// goCommand runs a command of go in hack/kubefed, and returns what it prints.
func (k *kubefed) goCommand(args ...string) string {
	k.Helper()
	root, err := controlplane.Root()
	assert.NoError(k, err)
	run := exec.CommandContext(k.ctx, "go", args...)
	run.Dir = filepath.Join(root, "hack", "kubefed")
	var stderr bytes.Buffer
	run.Stderr = &stderr
	out, err := run.Output()
	if err != nil {
		k.Fatalf("%v: %s", err, stderr.String())
	}
	return strings.TrimSpace(string(out))
}

// buildSuite builds the suite without KubeFed's own scheduler, which it would start for the specs of
// ReplicaSchedulingPreferences.
func (k *kubefed) buildSuite() string {
	k.Helper()
	module := filepath.Join(k.box.Dir, "kubefed-module")
	file := filepath.Join(module, "test", "e2e", "scheduling.go")
	err := os.CopyFS(module, os.DirFS(k.goCommand("list", "-m", "-f", "{{.Dir}}", "sigs.k8s.io/kubefed")))
	text, readErr := os.ReadFile(file)
	mod, modErr := os.ReadFile(k.goCommand("env", "GOMOD"))
	sum, sumErr := os.ReadFile(filepath.Join(filepath.Dir(k.goCommand("env", "GOMOD")), "go.sum"))
	assert.NoError(k, errors.Join(err, readErr, modErr, sumErr))
	for _, line := range []string{"controllerFixture, _ := framework.NewSchedulingManagerFixture(tl, f.ControllerConfig())", "f.RegisterFixture(controllerFixture)"} {
		if !bytes.Contains(text, []byte(line)) {
			k.Fatalf("%s has no line %s", file, line)
		}
		text = bytes.ReplaceAll(text, []byte(line), nil)
	}
	modfile := filepath.Join(k.box.Dir, "go.mod")
	err = errors.Join(os.Chmod(file, 0o600), os.WriteFile(file, text, 0o600), os.WriteFile(filepath.Join(k.box.Dir, "go.sum"), sum, 0o600),
		os.WriteFile(modfile, append(mod, "\nreplace sigs.k8s.io/kubefed => "+module+"\n"...), 0o600))
	assert.NoError(k, err)
	return k.buildProgram("suite", "test", "-modfile="+modfile, "-vet=off", "-c", ".")
}

// forSubtest returns the federation for a subtest.
func (k *kubefed) forSubtest(t *testing.T) *kubefed {
	t.Helper()
	return &kubefed{k.members.forSubtest(t), k.box, k.manager}
}

// runOurs starts our manager with the controller alone, and waits until it leads.
func (m *members) runOurs(more ...string) *cluster.Manager {
	m.Helper()
	return shared.RunLeader(m.ctx, m.T, append([]string{"--controllers=federation", "--federation-unsafe-endpoints"}, more...)...)
}

// runKubeFed starts KubeFed's manager, for the rest of the test at most, and waits until it leads.
func (k *kubefed) runKubeFed() *sandbox.Process {
	k.Helper()
	args := []string{"--kubeconfig=" + shared.Kubeconfig(), "--kubefed-namespace=" + namespace}
	for _, flag := range []string{"--healthz-addr", "--metrics-addr"} {
		port, err := cluster.FreePort()
		assert.NoError(k, err)
		args = append(args, fmt.Sprintf("%s=127.0.0.1:%d", flag, port))
	}
	p, err := k.box.Start(sandbox.Command{Name: "kubefed", Path: k.manager, Args: args, Env: cluster.CleanEnv("GODEBUG=gctrace=1")}) // see liveHeap
	assert.NoError(k, err)
	k.Cleanup(func() {
		p.Kill()
		if k.Failed() {
			k.Logf("log of KubeFed:\n%s", p.Tail(25))
		}
	})
	if _, err := p.WaitForLine(k.ctx, "promoted as leader"); err != nil {
		k.Fatal(err)
	}
	return p
}

// joinAgain lets both clusters join whenever there is another FederatedTypeConfig, until ctx ends.
func (j *joinFixture) joinAgain(ctx context.Context) {
	config, before := object(j.T, "kind: FederatedTypeConfig"), ""
	for fleet.Wait(ctx, 200*time.Millisecond); ctx.Err() == nil; fleet.Wait(ctx, 200*time.Millisecond) {
		list, err := client(config).List(ctx, metav1.ListOptions{})
		if err != nil {
			continue
		}
		after := ""
		for _, u := range list.Items {
			after += u.GetName() + " "
		}
		if after == before {
			continue
		}
		for _, name := range []string{"c1", "c2"} {
			out, err := exec.CommandContext(ctx, shared.Binary, "federation", "join", name, "--rbac-types", "--kubeconfig="+j.kubeconfig).CombinedOutput()
			if err != nil && ctx.Err() == nil {
				j.Errorf("join %s: %v\n%s", name, err, out)
			}
		}
		before = after
	}
}

// permitSuite permits what the suite itself does in members, with the manager's tokens.
func (j *joinFixture) permitSuite() {
	j.Helper()
	for account, admin := range map[string]kubernetes.Interface{"c1-c1": shared.Admin, joinedAccount: j.admin2} {
		meta := metav1.ObjectMeta{Name: "suite"}
		_, err := admin.RbacV1().ClusterRoles().Create(j.ctx, &rbacv1.ClusterRole{ObjectMeta: meta, Rules: []rbacv1.PolicyRule{
			{APIGroups: []string{"apiextensions.k8s.io"}, Resources: []string{"customresourcedefinitions"}, Verbs: []string{"create", "get", "update", "delete"}},
			{APIGroups: []string{"core.kubefed.io"}, Resources: []string{"federatedtypeconfigs"}, Verbs: []string{"create", "get", "list", "patch", "delete"}},
			{APIGroups: []string{"types.kubefed.io"}, Resources: []string{"*"}, Verbs: []string{"get", "list"}}}}, metav1.CreateOptions{})
		if err == nil {
			_, err = admin.RbacV1().ClusterRoleBindings().Create(j.ctx, &rbacv1.ClusterRoleBinding{ObjectMeta: meta,
				RoleRef:  rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "suite"},
				Subjects: []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: namespace, Name: account}}}, metav1.CreateOptions{})
		}
		assert.NoError(j, err)
	}
	j.Cleanup(func() {
		_ = shared.Admin.RbacV1().ClusterRoleBindings().Delete(context.Background(), "suite", metav1.DeleteOptions{})
		_ = shared.Admin.RbacV1().ClusterRoles().Delete(context.Background(), "suite", metav1.DeleteOptions{})
	})
}

// TestLongKubeFedSuite runs KubeFed's tests several times in a row, with either manager. Its members have
// joined by our command.
func TestLongKubeFedSuite(t *testing.T) {
	requireKubeFed(t)
	j := newJoinFixture(t, time.Hour)
	k := withKubeFed(j.members, "Enabled")
	k.patch(object(t, "kind: KubeFedConfig, metadata: {name: kubefed}"), `{"spec":{"leaderElect":{"leaseDuration":"5m","renewDeadline":"4m","retryPeriod":"2s"}}}`)
	for _, name := range []string{"deployments.apps", "jobs.batch", "replicasets.apps"} {
		config := object(t, "kind: FederatedTypeConfig, metadata: {name: "+name+"}")
		k.patch(config, `{"spec":{"statusCollection":"Enabled"}}`)
		t.Cleanup(func() {
			_, _ = client(config).Patch(context.Background(), name, types.MergePatchType, []byte(`{"spec":{"statusCollection":"Disabled"}}`), metav1.PatchOptions{})
		})
	}
	j.permitSuite()
	ctx, stop := context.WithCancel(k.ctx)
	var joining sync.WaitGroup
	joining.Go(func() { j.joinAgain(ctx) })
	defer joining.Wait()
	defer stop()
	var names []string
	for _, spec := range specs {
		names = append(names, regexp.QuoteMeta(spec))
	}
	suite := sandbox.Command{Name: "suite", Path: k.buildSuite(), Env: cluster.CleanEnv(),
		Args: []string{"-kubeconfig=" + j.kubeconfig, "-ginkgo.noColor", `-ginkgo.focus=\[Top Level\] (` + strings.Join(names, "|") + ")$"}}
	for _, manager := range []struct {
		name string
		run  func(*kubefed)
	}{
		{"federation", func(k *kubefed) { k.runOurs(patientArgs...) }},
		{"KubeFed", func(k *kubefed) { k.runKubeFed() }},
	} {
		t.Run(manager.name, func(t *testing.T) {
			k := k.forSubtest(t)
			manager.run(k)
			k.waitForCondition("c1", "Ready=True")
			k.waitForCondition("c2", "Ready=True")
			for i := range fleet.Setting(t, "KUBEFED", 0) {
				begin := time.Now()
				p, err := k.box.Start(suite)
				assert.NoError(t, err)
				err = p.Wait(k.ctx)
				log, readErr := os.ReadFile(p.Log)
				if readErr != nil {
					t.Fatal(readErr)
				}
				last := lastRun(string(log))
				if err != nil || !strings.Contains(last, fmt.Sprintf("%d Passed | 0 Failed", len(specs))) {
					t.Fatalf("run %d: %v\n%s", i+1, err, last)
				}
				t.Logf("run %d: %d of %d in %s", i+1, len(specs), len(specs), time.Since(begin).Round(time.Second))
				k.waitForCleanup()
			}
		})
	}
}

// lastRun returns what the last run of the suite has said.
func lastRun(log string) string {
	return log[max(0, strings.LastIndex(log, "Running Suite:")):]
}

// waitForCleanup waits until no namespace of the suite is left: whoever deletes a namespace waits for its
// federated objects.
func (k *kubefed) waitForCleanup() {
	k.Helper()
	fleet.Eventually(fleet.Within(k.ctx, k.T, fleet.Patience), k.T, func() error {
		var remaining []string
		for _, c := range []*cluster.Cluster{shared.Cluster, k.second} {
			list, err := c.Admin.CoreV1().Namespaces().List(k.ctx, metav1.ListOptions{})
			if err != nil {
				return err
			}
			for _, ns := range list.Items {
				if strings.HasPrefix(ns.Name, "e2e-tests-") {
					remaining = append(remaining, ns.Name)
				}
			}
		}
		if len(remaining) > 0 {
			return fmt.Errorf("left of the suite: %s", strings.Join(slices.Compact(remaining), " "))
		}
		return nil
	})
}
