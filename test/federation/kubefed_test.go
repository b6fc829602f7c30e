// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package federation

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/hack/cluster/controlplane"
	"github.com/quartermaster-dev/quartermaster/hack/cluster/sandbox"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// specs are the tests of KubeFed v0.10.0, by their whole names, that judge a manager of the present
// edition. Of the other 38, 11 need replicas (8) or remote status (3). The rest judge KubeFed's own
// packages and programs: its version manager (12), `kubefedctl federate` (4), the defaults of its
// webhook (2), its scheduler, its controller of FederatedTypeConfigs and its leader election (1 each);
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
	`Federated CRD resources with namespaced=true should be created, read, updated and deleted successfully`,
	`Federated CRD resources with namespaced=false should be created, read, updated and deleted successfully`,
	`DeleteOptions Deployment should be created and deleted successfully, but ReplicaSet that created by Deployment won't be deleted`,
	`KubeFedCluster should correctly report the Kubernetes git version of the cluster`,
	`Core API Validation for FederatedTypeConfig should fail when an invalid FederatedTypeConfig is created or updated`,
	`Core API Validation for KubeFedCluster should fail when an invalid KubeFedCluster is created or updated`,
	`Core API Validation for KubeFedConfig should fail when an invalid KubeFedConfig is created or updated`,
}

// kubefed is a federation on which KubeFed's manager can lead too. c2 is as complete as c1.
type kubefed struct {
	*members
	box            *sandbox.Sandbox
	suite, manager string // the programs
}

// newKubeFed returns a federation, if the environment asks for the tests with KubeFed's programs.
func newKubeFed(t *testing.T) *kubefed {
	t.Helper()
	if fleet.Setting(t, "KUBEFED", 0) == 0 {
		t.Skip("make kubefed runs it")
	}
	k := &kubefed{members: newMembers(t, time.Hour, cluster.Options{})}
	var err error
	if k.box, err = sandbox.New(k.ctx, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = k.box.Close() })
	k.suite = k.build("suite", "test", "-c", ".")
	k.manager = k.build("kubefed", "build", "sigs.k8s.io/kubefed/cmd/controller-manager")
	// KubeFed's manager needs what its webhook would add.
	k.patch(object(t, "kind: KubeFedConfig, metadata: {name: kubefed}"), `{"spec":{"controllerDuration":{"availableDelay":"20s","unavailableDelay":"60s","cacheSyncTimeout":"5m"},
		"leaderElect":{"leaseDuration":"15s","renewDeadline":"10s","retryPeriod":"5s","resourceLock":"configmaps"},
		"clusterHealthCheck":{"period":"10s","timeout":"3s","failureThreshold":3,"successThreshold":1},
		"syncController":{"maxConcurrentReconciles":1,"adoptResources":"Enabled"},"statusController":{"maxConcurrentReconciles":1},
		"featureGates":[{"name":"PushReconciler","configuration":"Enabled"},{"name":"SchedulerPreferences","configuration":"Enabled"},{"name":"RawResourceStatusCollection","configuration":"Disabled"}]}}`)
	return k
}

// build builds a program of hack/kubefed by a command of go.
func (k *kubefed) build(name, command string, args ...string) string {
	k.Helper()
	root, err := controlplane.Root()
	if err != nil {
		k.Fatal(err)
	}
	path := filepath.Join(k.box.Dir, name)
	build := exec.CommandContext(k.ctx, "go", append([]string{command, "-o", path}, args...)...)
	build.Dir = filepath.Join(root, "hack", "kubefed")
	if out, err := build.CombinedOutput(); err != nil {
		k.Fatalf("%v: %s", err, out)
	}
	return path
}

// in returns the federation for a subtest.
func (k *kubefed) in(t *testing.T) *kubefed {
	t.Helper()
	return &kubefed{k.members.in(t), k.box, k.suite, k.manager}
}

// runOurs starts our manager with the controller alone, and waits until it leads.
func (m *members) runOurs() *cluster.Manager {
	m.Helper()
	return shared.RunLeader(m.ctx, m.T, "--controllers=federation", "--federation-unsafe-endpoints")
}

// runKubeFed starts KubeFed's manager, for the rest of the test at most, and waits until it leads.
func (k *kubefed) runKubeFed() *sandbox.Process {
	k.Helper()
	args := []string{"--kubeconfig=" + shared.Kubeconfig(), "--kubefed-namespace=" + namespace}
	for _, flag := range []string{"--healthz-addr", "--metrics-addr"} {
		port, err := cluster.FreePort()
		if err != nil {
			k.Fatal(err)
		}
		args = append(args, fmt.Sprintf("%s=127.0.0.1:%d", flag, port))
	}
	p, err := k.box.Start(sandbox.Command{Name: "kubefed", Path: k.manager, Args: args, Env: cluster.CleanEnv("GODEBUG=gctrace=1")}) // see liveHeap
	if err != nil {
		k.Fatal(err)
	}
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

// kubeconfig returns the path of the administrator's kubeconfig, whose context has the name of the
// host's KubeFedCluster: so the suite knows which cluster the host is.
func (k *kubefed) kubeconfig() string {
	k.Helper()
	path := filepath.Join(k.box.Dir, "kubeconfig")
	config, err := clientcmd.LoadFromFile(shared.Kubeconfig())
	if err == nil {
		config.Contexts["c1"] = config.Contexts[config.CurrentContext]
		config.CurrentContext = "c1"
		err = clientcmd.WriteToFile(*config, path)
	}
	if err != nil {
		k.Fatal(err)
	}
	return path
}

// TestLongKubeFedSuite runs KubeFed's tests several times in a row, with either manager.
func TestLongKubeFedSuite(t *testing.T) {
	k := newKubeFed(t)
	var names []string
	for _, spec := range specs {
		names = append(names, regexp.QuoteMeta(spec))
	}
	suite := sandbox.Command{Name: "suite", Path: k.suite, Env: cluster.CleanEnv(),
		Args: []string{"-kubeconfig=" + k.kubeconfig(), "-ginkgo.noColor", `-ginkgo.focus=\[Top Level\] (` + strings.Join(names, "|") + ")$"}}
	for _, manager := range []struct {
		name string
		run  func(*kubefed)
	}{
		{"federation", func(k *kubefed) { k.runOurs() }},
		{"KubeFed", func(k *kubefed) { k.runKubeFed() }},
	} {
		t.Run(manager.name, func(t *testing.T) {
			k := k.in(t)
			manager.run(k)
			k.ready("c1", "Ready=True")
			k.ready("c2", "Ready=True")
			for i := range fleet.Setting(t, "KUBEFED", 0) {
				begin := time.Now()
				p, err := k.box.Start(suite)
				if err != nil {
					t.Fatal(err)
				}
				err = p.Wait(k.ctx)
				said, readErr := os.ReadFile(p.Log)
				if readErr != nil {
					t.Fatal(readErr)
				}
				last := lastRun(string(said))
				if err != nil || !strings.Contains(last, fmt.Sprintf("%d Passed | 0 Failed", len(specs))) {
					t.Fatalf("run %d: %v\n%s", i+1, err, last)
				}
				t.Logf("run %d: %d of %d in %s", i+1, len(specs), len(specs), time.Since(begin).Round(time.Second))
				k.cleaned()
			}
		})
	}
}

// lastRun returns what the last run of the suite has said.
func lastRun(said string) string {
	return said[max(0, strings.LastIndex(said, "Running Suite:")):]
}

// cleaned waits until no namespace of the suite is left: whoever deletes a namespace waits for its
// federated objects.
func (k *kubefed) cleaned() {
	k.Helper()
	fleet.Eventually(fleet.Within(k.ctx, k.T, fleet.Patience), k.T, func() error {
		var left []string
		for _, c := range []*cluster.Cluster{shared.Cluster, k.second} {
			list, err := c.Admin.CoreV1().Namespaces().List(k.ctx, metav1.ListOptions{})
			if err != nil {
				return err
			}
			for _, ns := range list.Items {
				if strings.HasPrefix(ns.Name, "e2e-tests-") {
					left = append(left, ns.Name)
				}
			}
		}
		if len(left) > 0 {
			return fmt.Errorf("left of the suite: %s", strings.Join(slices.Compact(left), " "))
		}
		return nil
	})
}
