// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package replication

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// The key and the value are in nothing that the manager says.
const hidden = "donottell"

// TestReplicationHoldsOnTheAPIServer has what depends on the API server, in one leader.
func TestReplicationHoldsOnTheAPIServer(t *testing.T) {
	ctx := fleet.Within(t.Context(), t, 15*time.Minute)
	m := shared.RunLeader(ctx, t, args("--v=4", "--insecure-metrics")...)
	rows := map[string]func(f *fixture){
		"the reflector's source reaches the namespaces of its selector": func(f *fixture) {
			f.secret("a/s", "k=v", f.annotated("R:reflection-allowed=true", "R:reflection-auto-enabled=true", "R:reflection-auto-namespaces-selector=group={id}"))
			f.waitForContent("b/s: k=v", "c/s: k=v")
			f.edit("a/s", holding("k=w"))
			f.waitForContent("b/s: k=w", "c/s: k=w")
			f.expectWrites("create b/s", "create c/s", "update b/s", "update c/s")
			s := f.get("b/s")
			if len(s.Annotations) != 5 || s.Annotations[f.expand("R:reflects")] != f.expand("{a}/s") || s.Annotations[f.expand("R:auto-reflects")] != "True" {
				f.Errorf("annotations %v", s.Annotations)
			}
			if len(s.ManagedFields) != 1 || s.ManagedFields[0].Manager != "quartermaster-replication" {
				f.Errorf("managed fields %v", s.ManagedFields)
			}
		},
		"the labels of a namespace decide": func(f *fixture) {
			f.secret("a/s", "k=v", f.annotated("Q:push-to=labels: group={id},env=x"))
			f.settle()
			f.label("b", "env", "x")
			f.waitForContent("b/s: k=v")
			f.label("b", "env", "")
			f.waitForContent("b/s: none")
		},
		"a deleted source takes its copies along": func(f *fixture) {
			f.secret("a/s", "k=v", f.annotated("Q:push-to={b},{c}"))
			f.waitForContent("b/s: k=v", "c/s: k=v")
			f.remove("a/s")
			f.waitForContent("b/s: none", "c/s: none")
		},
		"a source that is replaced loses nothing": func(f *fixture) {
			f.secret("a/s", "k=v", f.annotated("Q:push-to={b}"))
			f.waitForContent("b/s: k=v")
			f.remove("a/s")
			f.secret("a/s", "k=v", f.annotated("Q:push-to={b}"))
			f.settle()
			f.settle()
			f.expectWrites("create b/s")
		},
		"copies are repaired": func(f *fixture) {
			f.secret("a/s", "k=v", f.annotated("Q:push-to={b},{c}"))
			f.waitForContent("b/s: k=v", "c/s: k=v")
			f.remove("b/s")
			f.edit("c/s", holding("k=edited"))
			f.waitForContent("b/s: k=v", "c/s: k=v")
			f.waitForEvent("a/s", "DriftRepaired")
		},
		"a type cannot be changed, so the copy is replaced": func(f *fixture) {
			f.secret("a/s", "k=v", f.annotated("Q:push-to={b}"))
			f.waitForContent("b/s: k=v")
			f.remove("a/s")
			f.secret("a/s", "tls.crt=1 tls.key=2", f.annotated("Q:push-to={b}"), typed(corev1.SecretTypeTLS))
			f.waitForContent("b/s: tls.crt=1 tls.key=2")
			if got := f.get("b/s").Type; got != corev1.SecretTypeTLS {
				f.Errorf("type %s", got)
			}
		},
		"the replicator's push, and what is left when it is withdrawn": func(f *fixture) {
			f.secret("a/s", "k=v", f.annotated("M:replicate-to-matching=group={id}"), func(s *corev1.Secret) { s.Labels = map[string]string{"team": "x"} })
			f.waitForContent("b/s: k=v", "c/s: k=v")
			if s := f.get("b/s"); s.Labels["team"] != "x" || s.Annotations[f.expand("M:replicated-keys")] != "k" {
				f.Errorf("%v", s.ObjectMeta)
			}
			f.edit("c/s", holding("k=v own=1"))
			f.settle()
			f.edit("a/s", f.annotated("M:replicate-to-matching"))
			f.waitForContent("b/s: none", "c/s: own=1")
			if s := f.get("c/s"); len(s.Annotations) != 0 || len(s.Labels) != 0 {
				f.Errorf("%v", s.ObjectMeta)
			}
		},
		"owners are not copied, and a copy goes with the owner of its source": func(f *fixture) {
			roles := shared.Admin.RbacV1().ClusterRoles()
			role, err := roles.Create(f.ctx, &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: f.id}}, metav1.CreateOptions{})
			assert.NoError(f, err)
			f.secret("a/s", "k=v", f.annotated("M:replicate-to={b}", "M:keep-owner-references=true"), func(s *corev1.Secret) {
				s.OwnerReferences = []metav1.OwnerReference{{APIVersion: "rbac.authorization.k8s.io/v1", Kind: "ClusterRole", Name: role.Name, UID: role.UID}}
			})
			f.waitForContent("b/s: k=v")
			if owners := f.get("b/s").OwnerReferences; len(owners) != 0 {
				f.Errorf("owners %v", owners)
			}
			assert.NoError(f, roles.Delete(f.ctx, role.Name, metav1.DeleteOptions{}))
			f.waitForContent("a/s: none", "b/s: none") // the garbage collector deletes the source
			f.expectWrites("create b/s", "delete b/s")
		},
		"a pull merges by key": func(f *fixture) {
			f.secret("b/t", "own=1", f.annotated("M:replicate-from={a}/s"))
			f.secret("a/s", "k=v j=w", f.annotated("M:replication-allowed=true", "M:replication-allowed-namespaces={b}"))
			f.waitForContent("b/t: j=w k=v own=1")
			f.edit("a/s", holding("j=w"))
			f.waitForContent("b/t: j=w own=1")
			f.remove("a/s")
			f.waitForContent("b/t: own=1")
		},
		"a key of a ConfigMap moves between its sections": func(f *fixture) {
			a, b := f.namespaces["a"], f.namespaces["b"]
			cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "cm", Annotations: map[string]string{f.expand("M:replicate-to"): b}},
				Data: map[string]string{"k": "text", "j": "v"}}
			cm, err := shared.Admin.CoreV1().ConfigMaps(a).Create(f.ctx, cm, metav1.CreateOptions{})
			assert.NoError(f, err)
			holds := func(want string) {
				fleet.Eventually(f.ctx, f, func() error {
					got, err := shared.Admin.CoreV1().ConfigMaps(b).Get(f.ctx, "cm", metav1.GetOptions{})
					if err == nil {
						text, _ := json.Marshal([]any{got.Data, got.BinaryData})
						if string(text) != want {
							err = fmt.Errorf("holds %s, want %s", text, want)
						}
					}
					return err
				})
			}
			holds(`[{"j":"v","k":"text"},null]`)
			cm.Data, cm.BinaryData = map[string]string{"j": "v"}, map[string][]byte{"k": {255}}
			if _, err := shared.Admin.CoreV1().ConfigMaps(a).Update(f.ctx, cm, metav1.UpdateOptions{}); err != nil {
				f.Fatal(err)
			}
			holds(`[{"j":"v"},{"k":"/w=="}]`)
		},
		"a typed pull target keeps the keys that its type demands": func(f *fixture) {
			f.secret("a/s", "tls.crt=1 tls.key=2", f.annotated("M:replication-allowed=true", "M:replication-allowed-namespaces={b}"), typed(corev1.SecretTypeTLS))
			f.secret("b/u", "tls.crt= tls.key=", f.annotated("M:replicate-from={a}/s"), typed(corev1.SecretTypeTLS))
			f.waitForContent("b/u: tls.crt=1 tls.key=2")
			f.remove("a/s")
			f.waitForEvent("b/u", "SourceDeleted")
			f.settle()
			f.waitForContent("b/u: tls.crt=1 tls.key=2")
		},
		"an immutable copy is replaced, an immutable pull target stays": func(f *fixture) {
			f.secret("a/s", "k=v", f.annotated("Q:push-to={b}", "Q:allow-pull={b}"))
			f.secret("b/t", "", f.annotated("Q:pull-from={a}/s"))
			f.waitForContent("b/s: k=v", "b/t: k=v")
			yes := true
			immutable := func(s *corev1.Secret) { s.Immutable = &yes }
			f.edit("b/s", immutable)
			f.edit("b/t", immutable)
			f.edit("a/s", holding("k=w"))
			f.waitForContent("b/s: k=w")
			f.waitForEvent("b/t", "TargetImmutable")
			f.waitForContent("b/t: k=v")
		},
		"a quota refuses, and is asked again": func(f *fixture) {
			b := f.namespaces["b"]
			quota := &corev1.ResourceQuota{ObjectMeta: metav1.ObjectMeta{Name: "q"}, Spec: corev1.ResourceQuotaSpec{Hard: corev1.ResourceList{"count/secrets": resource.MustParse("0")}}}
			if _, err := shared.Admin.CoreV1().ResourceQuotas(b).Create(f.ctx, quota, metav1.CreateOptions{}); err != nil {
				f.Fatal(err)
			}
			fleet.Eventually(f.ctx, f, func() error {
				q, err := shared.Admin.CoreV1().ResourceQuotas(b).Get(f.ctx, "q", metav1.GetOptions{})
				if err == nil && len(q.Status.Hard) == 0 {
					err = fmt.Errorf("the quota has no status")
				}
				return err
			})
			f.secret("a/s", "k=v", f.annotated("Q:push-to={b},{c}"))
			f.waitForContent("c/s: k=v")
			f.waitForEvent("a/s", "WriteRejected")
			if events := f.kubectl("get", "events", "-n", f.namespaces["a"], "-o", "yaml"); strings.Contains(events, "limited") {
				f.Errorf("an Event shows the quota of another namespace:\n%s", events)
			}
			assert.NoError(f, shared.Admin.CoreV1().ResourceQuotas(b).Delete(f.ctx, "q", metav1.DeleteOptions{}))
			f.waitForContent("b/s: k=v")
		},
		"a namespace that terminates is left alone, and comes back": func(f *fixture) {
			b := f.namespaces["b"]
			blocker := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "blocker", Finalizers: []string{"example.com/wait"}}}
			if _, err := shared.Admin.CoreV1().ConfigMaps(b).Create(f.ctx, blocker, metav1.CreateOptions{}); err != nil {
				f.Fatal(err)
			}
			f.secret("a/s", "k=v", f.annotated("Q:push-to={b},{c}"))
			f.waitForContent("b/s: k=v", "c/s: k=v")
			assert.NoError(f, shared.Admin.CoreV1().Namespaces().Delete(f.ctx, b, metav1.DeleteOptions{}))
			f.waitForContent("b/s: none") // by the namespace controller
			f.edit("a/s", holding("k=w"))
			f.waitForContent("c/s: k=w")
			refused := f.requests(func(e auditv1.Event) bool {
				return e.ResponseStatus != nil && e.ResponseStatus.Code == http.StatusForbidden
			})
			if len(refused) > 2 {
				f.Errorf("refused: %q", refused)
			}
			f.kubectl("patch", "configmap", "blocker", "-n", b, "--type=merge", "-p", `{"metadata":{"finalizers":null}}`)
			fleet.Eventually(f.ctx, f, func() error {
				ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: b, Labels: map[string]string{"group": f.id}}}
				_, err := shared.Admin.CoreV1().Namespaces().Create(f.ctx, ns, metav1.CreateOptions{})
				return err
			})
			f.waitForContent("b/s: k=w")
		},
		"tokens are not copied": func(f *fixture) {
			a := f.namespaces["a"]
			if _, err := shared.Admin.CoreV1().ServiceAccounts(a).Create(f.ctx, &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "sa"}}, metav1.CreateOptions{}); err != nil {
				f.Fatal(err)
			}
			push := f.annotated("Q:push-to={b}", "M:replicate-to={b}", "Q:allow-pull={b}")
			f.secret("a/token", "", push, typed(corev1.SecretTypeServiceAccountToken), f.annotated("kubernetes.io/service-account.name=sa"))
			f.secret("b/t", "", f.annotated("Q:pull-from={a}/token"))
			f.secret("a/bootstrap", "k=v", push, typed("bootstrap.kubernetes.io/token"))
			f.secret("a/helm", "k=v", push, typed("helm.sh/release.v1"))
			f.waitForEvent("a/token", "UnsupportedType")
			f.waitForEvent("b/t", "UnsupportedType")
			f.waitForEvent("a/bootstrap", "UnsupportedType")
			f.settle()
			f.expectWrites()
		},
		"a source that is being deleted keeps its copies until it is gone": func(f *fixture) {
			f.secret("a/s", "k=v", f.annotated("Q:push-to={b}"), func(s *corev1.Secret) { s.Finalizers = []string{"example.com/wait"} })
			f.waitForContent("b/s: k=v")
			f.remove("a/s")
			f.settle()
			f.settle()
			f.waitForContent("b/s: k=v")
			f.edit("a/s", func(s *corev1.Secret) { s.Finalizers = nil })
			f.waitForContent("b/s: none")
		},
		"an admission policy refuses a copy, and its message is not repeated": func(f *fixture) {
			f.kubectl("create", "-f", policyFile(f))
			fleet.Eventually(f.ctx, f, func() error {
				probe := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "canary-probe"}}
				_, err := shared.Admin.CoreV1().Secrets(f.namespaces["b"]).Create(f.ctx, probe, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
				if err == nil {
					return fmt.Errorf("the policy has no effect")
				}
				return nil
			})
			f.secret("a/s", "k=v", f.annotated("Q:push-to={b},{c}"))
			f.waitForContent("c/s: k=v")
			f.waitForEvent("a/s", "WriteRejected")
			f.kubectl("delete", "validatingadmissionpolicybinding,validatingadmissionpolicy", f.id)
			f.waitForContent("b/s: k=v")
		},
		"what is copied is told to nobody": func(f *fixture) {
			f.secret("a/s", hidden+"=v"+hidden, f.annotated("Q:push-to={b}", "M:replication-allowed=true", "M:replication-allowed-namespaces={b}"))
			f.secret("b/t", "own=1", f.annotated("M:replicate-from={a}/s"))
			f.waitForContent("b/s: "+hidden+"=v"+hidden, "b/t: "+hidden+"=v"+hidden+" own=1")
		},
	}
	t.Run("rows", func(t *testing.T) {
		for name, run := range rows {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				run(newFixture(t, "a", "b", "c"))
			})
		}
	})
	expectNothingTold(t, m.Log, m.InsecureURL)
}

// policyFile writes a policy that refuses Secrets in the namespace b and says so with a text that
// must not be repeated.
func policyFile(f *fixture) string {
	f.Helper()
	text := f.expand(`apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicy
metadata: {name: "{id}"}
spec:
  failurePolicy: Fail
  matchConstraints:
    namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: "{b}"}}
    resourceRules: [{apiGroups: [""], apiVersions: [v1], operations: [CREATE], resources: [secrets]}]
  validations: [{expression: "false", message: ` + hidden + `}]
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata: {name: "{id}"}
spec: {policyName: "{id}", validationActions: [Deny]}
`)
	// The name of a test's own folder has the test's commas, which kubectl takes for a list.
	file := filepath.Join(shared.Dir(), f.id+".yaml")
	assert.NoError(f, os.WriteFile(file, []byte(text), 0o600))
	return file
}

// expectNothingTold looks for the hidden text in the log, Events and metrics.
func expectNothingTold(t *testing.T, logFile, url string) {
	t.Helper()
	log, err := os.ReadFile(logFile)
	assert.NoError(t, err)
	events, err := shared.Kubectl(t.Context(), "get", "events", "-A", "-o", "yaml")
	assert.NoError(t, err)
	_, metrics, err := fleet.Get(url+"/metrics", "")
	if err != nil || !strings.Contains(metrics, "quartermaster_replication_writes_total") {
		t.Fatalf("no metrics: %v", err)
	}
	for place, text := range map[string]string{"the log": string(log), "an Event": events, "a metric": metrics} {
		for line := range strings.Lines(text) {
			if strings.Contains(line, hidden) {
				t.Errorf("%s tells: %s", place, line)
			}
		}
	}
}
