// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package federation

import (
	"context"
	"fmt"
	"maps"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/clientcmd/api"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/hack/cluster/sandbox"
	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

var (
	roles    = schema.GroupVersionResource{Group: rbacv1.GroupName, Version: "v1", Resource: "clusterroles"}
	bindings = schema.GroupVersionResource{Group: rbacv1.GroupName, Version: "v1", Resource: "clusterrolebindings"}
	accounts = schema.GroupVersionResource{Version: "v1", Resource: "serviceaccounts"}
)

const (
	// joinedAccount is the ServiceAccount in c2, and its token, when c1 is the host.
	joinedAccount = "c2-c1"
	joinedRole    = "kubefed-controller-manager:" + joinedAccount
)

// joinFixture are two control planes that a person lets join and leave.
type joinFixture struct {
	*members
	kubeconfig string // with the contexts c1, which is the current one, and c2
}

func newJoinFixture(t *testing.T, patience time.Duration) *joinFixture {
	t.Helper()
	// As clusters of before Kubernetes 1.34 do, c2 does not list by a watch.
	j := &joinFixture{members: newPlanes(t, patience, cluster.Options{FeatureGates: "WatchList=false"}), kubeconfig: filepath.Join(t.TempDir(), "kubeconfig")}
	contexts := api.NewConfig()
	for name, c := range map[string]*cluster.Cluster{"c1": shared.Cluster, "c2": j.second} {
		config := c.AdminConfig()
		contexts.Clusters[name] = &api.Cluster{Server: config.Host, CertificateAuthorityData: config.CAData}
		contexts.AuthInfos[name] = &api.AuthInfo{ClientCertificateData: config.CertData, ClientKeyData: config.KeyData}
		contexts.Contexts[name] = &api.Context{Cluster: name, AuthInfo: name}
	}
	contexts.CurrentContext = "c1"
	assert.NoError(t, clientcmd.WriteToFile(*contexts, j.kubeconfig))
	t.Cleanup(func() {
		for _, name := range []string{"c1", "c2"} {
			_ = exec.CommandContext(context.Background(), shared.Binary, "federation", "unjoin", name, "--force", "--kubeconfig="+j.kubeconfig).Run()
		}
	})
	return j
}

// run runs a command, such as join c2, of our program or of kubefedctl.
func (j *joinFixture) run(program string, args ...string) {
	j.Helper()
	if out, err := j.runOutput(program, args...); err != nil {
		j.Fatalf("%s: %v\n%s", args, err, out)
	}
}

// runOutput runs a command that may fail, and returns what it has printed.
func (j *joinFixture) runOutput(program string, args ...string) (string, error) {
	if program == shared.Binary {
		args = append([]string{"federation"}, args...)
	}
	out, err := exec.CommandContext(j.ctx, program, append(args, "--kubeconfig="+j.kubeconfig)...).CombinedOutput()
	return string(out), err
}

// expectUnjoined checks that nothing of a join is left but the namespace, which kubefedctl deletes.
func (j *joinFixture) expectUnjoined(namespaceStays bool) {
	j.Helper()
	j.waitForObject(j.c2, roles, "", joinedRole, nil)
	j.waitForObject(j.c2, bindings, "", joinedRole, nil)
	j.waitForObject(j.c2, accounts, namespace, joinedAccount, nil)
	j.waitForObject(j.c2, secrets, namespace, joinedAccount, nil)
	if namespaceStays {
		j.waitForObject(j.c2, namespaces, "", namespace, func(u *unstructured.Unstructured) bool { return u.GetDeletionTimestamp() == nil })
	} else {
		j.waitForObject(j.c2, namespaces, "", namespace, nil)
	}
	j.waitForObject(j.c1, schema.GroupVersionResource{Group: "core.kubefed.io", Version: "v1beta1", Resource: "kubefedclusters"}, namespace, "c2", nil)
	list, err := shared.Admin.CoreV1().Secrets(namespace).List(j.ctx, metav1.ListOptions{FieldSelector: "type=" + string(corev1.SecretTypeOpaque)})
	assert.NoError(j, err)
	for _, s := range list.Items {
		if strings.HasPrefix(s.Name, "c2") {
			j.Errorf("the Secret %s is left on the host", s.Name)
		}
	}
}

// memberRequests returns the verbs of the manager's requests for resources in c2, and those that c2 refused.
func (j *joinFixture) memberRequests() (verbs []string, refused []string) {
	j.Helper()
	events, err := j.second.AuditEvents()
	assert.NoError(j, err)
	verbSet := map[string]bool{}
	for _, e := range events {
		if e.User.Username != "system:serviceaccount:"+namespace+":"+joinedAccount || e.ObjectRef == nil {
			continue
		}
		verbSet[e.Verb] = true
		if !fleet.Allowed(e) {
			refused = append(refused, e.Verb+" "+e.RequestURI)
		}
	}
	return slices.Sorted(maps.Keys(verbSet)), refused
}

// TestJoinGrantsWhatTheManagerNeeds works with what join grants, and nothing else.
func TestJoinGrantsWhatTheManagerNeeds(t *testing.T) {
	j := newJoinFixture(t, 6*fleet.Patience)
	j.configure(quickConfig)
	j.run(shared.Binary, "join", "c1")
	j.run(shared.Binary, "join", "c2", "--dry-run")
	for _, flag := range []string{"--secret-name=X_Y", "--kubefed-namespace=nope", "--secret-name=c1-token"} { // the host refuses the Secret, or c1 has it
		if out, err := j.runOutput(shared.Binary, "join", "c2", flag); err == nil {
			t.Errorf("%s: no error\n%s", flag, out)
		}
	}
	j.expectUnjoined(false)
	j.waitForObject(j.c2, namespaces, "", "nope", nil)
	j.run(shared.Binary, "join", "c2", "--host-cluster-context=c1", "--cluster-context=c2", "--kubefed-namespace="+namespace)
	shared.RunLeader(j.ctx, t, "--controllers=federation", "--federation-unsafe-endpoints")
	j.shop = shared.NewNamespace(j.ctx, t, nil)
	j.federateNamespace(j.shop)
	f := j.create("kind: FederatedConfigMap, metadata: {name: f}, spec: {template: {data: {a: b}}, " + bothMembers + "}")
	j.waitForStatus(f, "c1= c2=")
	j.patch(f, `{"spec":{"template":{"data":{"a":"c"}}}}`)
	j.waitForObject(j.c2, configMaps, j.shop, "f", hasField("c", "data", "a"))
	j.createStray("stray", map[string]string{"kubefed.io/managed": "true"})
	j.waitForObject(j.c2, configMaps, j.shop, "stray", func(u *unstructured.Unstructured) bool { return !managed(u) })
	j.patch(f, `{"spec":{"placement":{"clusters":[{"name":"c1"}]}}}`)
	j.waitForObject(j.c2, configMaps, j.shop, "f", nil)
	j.patch(f, `{"spec":{"placement":{"clusters":[{"name":"c1"},{"name":"c2"}]}}}`)
	j.waitForStatus(f, "c1= c2=")
	verbs, refused := j.memberRequests()
	if want := []string{"create", "delete", "get", "list", "patch", "update", "watch"}; !slices.Equal(verbs, want) || len(refused) > 0 {
		t.Errorf("used are the verbs %q, want %q; refused were %q", verbs, want, refused)
	}

	// A new type, and a role with more than the manager has, need another join.
	p := &scenario{members: j.members}
	federatedSprocket := p.defineType("Sprocket", "sprockets", schema.GroupVersionResource{Group: "example.com", Version: "v1", Resource: "sprockets"})
	assert.NoError(t, fleet.DefineResource(j.ctx, j.c2, schema.GroupVersionResource{Group: "example.com", Version: "v1", Resource: "sprockets"}, "Sprocket"))
	role := object(t, fmt.Sprintf("kind: FederatedClusterRole, metadata: {name: %s}, spec: {template: {rules: [{apiGroups: ['example.com'], resources: [levers], verbs: [get]}]}, %s}", j.shop, bothMembers))
	if _, err := client(role).Create(j.ctx, role, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	j.waitForStatus(federatedSprocket, "c1=RetrievalFailed c2=RetrievalFailed")
	j.waitForStatus(role, "c1=CreationFailed c2=CreationFailed")
	j.run(shared.Binary, "join", "c1", "--rbac-types")
	j.run(shared.Binary, "join", "c2", "--rbac-types")
	j.waitForStatus(role, "c1= c2=")
	j.waitForStatus(federatedSprocket, "c1= c2=")
	j.deleteAll([]*unstructured.Unstructured{role, federatedSprocket})
	j.waitUntilGone([]*unstructured.Unstructured{role, federatedSprocket})

	// What a failed join or somebody else has left.
	for resource, name := range map[schema.GroupVersionResource]string{roles: joinedRole, bindings: joinedRole, accounts: joinedAccount} {
		client := j.c2.Resource(resource).Namespace("")
		if resource == accounts {
			client = j.c2.Resource(resource).Namespace(namespace)
		}
		assert.NoError(t, client.Delete(j.ctx, name, metav1.DeleteOptions{}))
	}
	j.run(shared.Binary, "join", "c2")
	j.patch(f, `{"spec":{"template":{"data":{"a":"d"}}}}`)
	j.waitForObject(j.c2, configMaps, j.shop, "f", hasField("d", "data", "a"))

	const note = "note: " // of another name of the host
	if out, err := j.runOutput(shared.Binary, "unjoin", "c2", "--host-cluster-name=other", "--dry-run"); err != nil || !strings.Contains(out, note) {
		t.Errorf("%v\n%s", err, out)
	}
	c1 := object(t, "kind: KubeFedCluster, metadata: {name: c1}")
	j.patch(c1, `{"spec":{"secretRef":{"name":"c2-token"}}}`)
	if out, err := j.runOutput(shared.Binary, "unjoin", "c2", "--dry-run"); err != nil || !strings.Contains(out, "secrets/c2-token in the host stays") {
		t.Errorf("%v\n%s", err, out)
	}
	j.patch(c1, `{"spec":{"secretRef":{"name":"c1-token"}}}`)
	if out, err := j.runOutput(shared.Binary, "unjoin", "c2"); err != nil || strings.Contains(out, note) {
		t.Errorf("%v\n%s", err, out)
	}
	j.expectUnjoined(true)
	j.run(shared.Binary, "unjoin", "c2") // there is nothing left to do
	j.waitForObject(j.c2, configMaps, j.shop, "f", managed)
	j.waitForStatus(f, "c1=")
}

// TestLongKubeFedJoin lets kubefedctl undo what join does, and the reverse.
func TestLongKubeFedJoin(t *testing.T) {
	requireKubeFed(t)
	j := newJoinFixture(t, 6*fleet.Patience)
	k := &kubefed{members: j.members}
	var err error
	if k.box, err = sandbox.New(k.ctx, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = k.box.Close() })
	kubefedctl := k.buildProgram("kubefedctl", "build", "sigs.k8s.io/kubefed/cmd/kubefedctl")
	j.run(shared.Binary, "join", "c2")
	j.run(kubefedctl, "unjoin", "c2", "--host-cluster-context=c1")
	j.expectUnjoined(false)
	j.run(kubefedctl, "join", "c2", "--host-cluster-context=c1")
	j.run(shared.Binary, "join", "c2")
	u, err := j.c2.Resource(roles).Get(j.ctx, joinedRole, metav1.GetOptions{})
	if err != nil || strings.Contains(fmt.Sprint(u.Object["rules"]), "[*]") {
		t.Errorf("the role of kubefedctl is %v (%v)", u, err)
	}
	j.run(shared.Binary, "unjoin", "c2")
	j.expectUnjoined(true)
	j.run(kubefedctl, "join", "c2", "--host-cluster-context=c1")
	j.run(shared.Binary, "unjoin", "c2")
	j.expectUnjoined(true)
}
