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

	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// The key and the value are in nothing that the manager says.
const hidden = "donottell"

// TestScenarios has what depends on the API server, in one leader.
func TestScenarios(t *testing.T) {
	ctx := fleet.Within(t.Context(), t, 15*time.Minute)
	m := shared.RunLeader(ctx, t, args("--v=4", "--insecure-metrics")...)
	rows := map[string]func(w *fixture){
		"the reflector's source reaches the namespaces of its selector": func(w *fixture) {
			w.secret("a/s", "k=v", w.with("R:reflection-allowed=true", "R:reflection-auto-enabled=true", "R:reflection-auto-namespaces-selector=group={id}"))
			w.await("b/s: k=v", "c/s: k=v")
			w.edit("a/s", holding("k=w"))
			w.await("b/s: k=w", "c/s: k=w")
			w.wrote("create b/s", "create c/s", "update b/s", "update c/s")
			s := w.get("b/s")
			if len(s.Annotations) != 5 || s.Annotations[w.text("R:reflects")] != w.text("{a}/s") || s.Annotations[w.text("R:auto-reflects")] != "True" {
				w.Errorf("annotations %v", s.Annotations)
			}
			if len(s.ManagedFields) != 1 || s.ManagedFields[0].Manager != "quartermaster-replication" {
				w.Errorf("managed fields %v", s.ManagedFields)
			}
		},
		"the labels of a namespace decide": func(w *fixture) {
			w.secret("a/s", "k=v", w.with("Q:push-to=labels: group={id},env=x"))
			w.settle()
			w.label("b", "env", "x")
			w.await("b/s: k=v")
			w.label("b", "env", "")
			w.await("b/s: none")
		},
		"a deleted source takes its copies along": func(w *fixture) {
			w.secret("a/s", "k=v", w.with("Q:push-to={b},{c}"))
			w.await("b/s: k=v", "c/s: k=v")
			w.remove("a/s")
			w.await("b/s: none", "c/s: none")
		},
		"a source that is replaced loses nothing": func(w *fixture) {
			w.secret("a/s", "k=v", w.with("Q:push-to={b}"))
			w.await("b/s: k=v")
			w.remove("a/s")
			w.secret("a/s", "k=v", w.with("Q:push-to={b}"))
			w.settle()
			w.settle()
			w.wrote("create b/s")
		},
		"copies are repaired": func(w *fixture) {
			w.secret("a/s", "k=v", w.with("Q:push-to={b},{c}"))
			w.await("b/s: k=v", "c/s: k=v")
			w.remove("b/s")
			w.edit("c/s", holding("k=edited"))
			w.await("b/s: k=v", "c/s: k=v")
			w.told("a/s", "DriftRepaired")
		},
		"a type cannot be changed, so the copy is replaced": func(w *fixture) {
			w.secret("a/s", "k=v", w.with("Q:push-to={b}"))
			w.await("b/s: k=v")
			w.remove("a/s")
			w.secret("a/s", "tls.crt=1 tls.key=2", w.with("Q:push-to={b}"), typed(corev1.SecretTypeTLS))
			w.await("b/s: tls.crt=1 tls.key=2")
			if got := w.get("b/s").Type; got != corev1.SecretTypeTLS {
				w.Errorf("type %s", got)
			}
		},
		"M1 and M12: the replicator's push, and what is left when it is withdrawn": func(w *fixture) {
			w.secret("a/s", "k=v", w.with("M:replicate-to-matching=group={id}"), func(s *corev1.Secret) { s.Labels = map[string]string{"team": "x"} })
			w.await("b/s: k=v", "c/s: k=v")
			if s := w.get("b/s"); s.Labels["team"] != "x" || s.Annotations[w.text("M:replicated-keys")] != "k" {
				w.Errorf("%v", s.ObjectMeta)
			}
			w.edit("c/s", holding("k=v own=1"))
			w.settle()
			w.edit("a/s", w.with("M:replicate-to-matching"))
			w.await("b/s: none", "c/s: own=1")
			if s := w.get("c/s"); len(s.Annotations) != 0 || len(s.Labels) != 0 {
				w.Errorf("%v", s.ObjectMeta)
			}
		},
		"M5: owners are not copied, and a copy goes with the owner of its source": func(w *fixture) {
			roles := shared.Admin.RbacV1().ClusterRoles()
			role, err := roles.Create(w.ctx, &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: w.id}}, metav1.CreateOptions{})
			if err != nil {
				w.Fatal(err)
			}
			w.secret("a/s", "k=v", w.with("M:replicate-to={b}", "M:keep-owner-references=true"), func(s *corev1.Secret) {
				s.OwnerReferences = []metav1.OwnerReference{{APIVersion: "rbac.authorization.k8s.io/v1", Kind: "ClusterRole", Name: role.Name, UID: role.UID}}
			})
			w.await("b/s: k=v")
			if owners := w.get("b/s").OwnerReferences; len(owners) != 0 {
				w.Errorf("owners %v", owners)
			}
			if err := roles.Delete(w.ctx, role.Name, metav1.DeleteOptions{}); err != nil {
				w.Fatal(err)
			}
			w.await("a/s: none", "b/s: none") // the garbage collector deletes the source
			w.wrote("create b/s", "delete b/s")
		},
		"M6 and M9: a pull merges by key": func(w *fixture) {
			w.secret("b/t", "own=1", w.with("M:replicate-from={a}/s"))
			w.secret("a/s", "k=v j=w", w.with("M:replication-allowed=true", "M:replication-allowed-namespaces={b}"))
			w.await("b/t: j=w k=v own=1")
			w.edit("a/s", holding("j=w"))
			w.await("b/t: j=w own=1")
			w.remove("a/s")
			w.await("b/t: own=1")
		},
		"M10: a key of a ConfigMap moves between its sections": func(w *fixture) {
			a, b := w.namespaces["a"], w.namespaces["b"]
			cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "cm", Annotations: map[string]string{w.text("M:replicate-to"): b}},
				Data: map[string]string{"k": "text", "j": "v"}}
			cm, err := shared.Admin.CoreV1().ConfigMaps(a).Create(w.ctx, cm, metav1.CreateOptions{})
			if err != nil {
				w.Fatal(err)
			}
			holds := func(want string) {
				fleet.Eventually(w.ctx, w, func() error {
					got, err := shared.Admin.CoreV1().ConfigMaps(b).Get(w.ctx, "cm", metav1.GetOptions{})
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
			if _, err := shared.Admin.CoreV1().ConfigMaps(a).Update(w.ctx, cm, metav1.UpdateOptions{}); err != nil {
				w.Fatal(err)
			}
			holds(`[{"j":"v"},{"k":"/w=="}]`)
		},
		"M14: a typed pull target keeps the keys that its type demands": func(w *fixture) {
			w.secret("a/s", "tls.crt=1 tls.key=2", w.with("M:replication-allowed=true", "M:replication-allowed-namespaces={b}"), typed(corev1.SecretTypeTLS))
			w.secret("b/u", "tls.crt= tls.key=", w.with("M:replicate-from={a}/s"), typed(corev1.SecretTypeTLS))
			w.await("b/u: tls.crt=1 tls.key=2")
			w.remove("a/s")
			w.told("b/u", "SourceDeleted")
			w.settle()
			w.await("b/u: tls.crt=1 tls.key=2")
		},
		"N8: an immutable copy is replaced, an immutable pull target stays": func(w *fixture) {
			w.secret("a/s", "k=v", w.with("Q:push-to={b}", "Q:allow-pull={b}"))
			w.secret("b/t", "", w.with("Q:pull-from={a}/s"))
			w.await("b/s: k=v", "b/t: k=v")
			yes := true
			immutable := func(s *corev1.Secret) { s.Immutable = &yes }
			w.edit("b/s", immutable)
			w.edit("b/t", immutable)
			w.edit("a/s", holding("k=w"))
			w.await("b/s: k=w")
			w.told("b/t", "TargetImmutable")
			w.await("b/t: k=v")
		},
		"N9: a quota refuses, and is asked again": func(w *fixture) {
			b := w.namespaces["b"]
			quota := &corev1.ResourceQuota{ObjectMeta: metav1.ObjectMeta{Name: "q"}, Spec: corev1.ResourceQuotaSpec{Hard: corev1.ResourceList{"count/secrets": resource.MustParse("0")}}}
			if _, err := shared.Admin.CoreV1().ResourceQuotas(b).Create(w.ctx, quota, metav1.CreateOptions{}); err != nil {
				w.Fatal(err)
			}
			fleet.Eventually(w.ctx, w, func() error {
				q, err := shared.Admin.CoreV1().ResourceQuotas(b).Get(w.ctx, "q", metav1.GetOptions{})
				if err == nil && len(q.Status.Hard) == 0 {
					err = fmt.Errorf("the quota has no status")
				}
				return err
			})
			w.secret("a/s", "k=v", w.with("Q:push-to={b},{c}"))
			w.await("c/s: k=v")
			w.told("a/s", "WriteRejected")
			if events := w.kubectl("get", "events", "-n", w.namespaces["a"], "-o", "yaml"); strings.Contains(events, "limited") {
				w.Errorf("an Event shows the quota of another namespace:\n%s", events)
			}
			if err := shared.Admin.CoreV1().ResourceQuotas(b).Delete(w.ctx, "q", metav1.DeleteOptions{}); err != nil {
				w.Fatal(err)
			}
			w.await("b/s: k=v")
		},
		"N10: a namespace that terminates is left alone, and comes back": func(w *fixture) {
			b := w.namespaces["b"]
			blocker := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "blocker", Finalizers: []string{"example.com/wait"}}}
			if _, err := shared.Admin.CoreV1().ConfigMaps(b).Create(w.ctx, blocker, metav1.CreateOptions{}); err != nil {
				w.Fatal(err)
			}
			w.secret("a/s", "k=v", w.with("Q:push-to={b},{c}"))
			w.await("b/s: k=v", "c/s: k=v")
			if err := shared.Admin.CoreV1().Namespaces().Delete(w.ctx, b, metav1.DeleteOptions{}); err != nil {
				w.Fatal(err)
			}
			w.await("b/s: none") // by the namespace controller
			w.edit("a/s", holding("k=w"))
			w.await("c/s: k=w")
			refused := w.requests(func(e auditv1.Event) bool {
				return e.ResponseStatus != nil && e.ResponseStatus.Code == http.StatusForbidden
			})
			if len(refused) > 2 {
				w.Errorf("refused: %q", refused)
			}
			w.kubectl("patch", "configmap", "blocker", "-n", b, "--type=merge", "-p", `{"metadata":{"finalizers":null}}`)
			fleet.Eventually(w.ctx, w, func() error {
				ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: b, Labels: map[string]string{"group": w.id}}}
				_, err := shared.Admin.CoreV1().Namespaces().Create(w.ctx, ns, metav1.CreateOptions{})
				return err
			})
			w.await("b/s: k=w")
		},
		"N13: tokens are not copied": func(w *fixture) {
			a := w.namespaces["a"]
			if _, err := shared.Admin.CoreV1().ServiceAccounts(a).Create(w.ctx, &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "sa"}}, metav1.CreateOptions{}); err != nil {
				w.Fatal(err)
			}
			push := w.with("Q:push-to={b}", "M:replicate-to={b}", "Q:allow-pull={b}")
			w.secret("a/token", "", push, typed(corev1.SecretTypeServiceAccountToken), w.with("kubernetes.io/service-account.name=sa"))
			w.secret("b/t", "", w.with("Q:pull-from={a}/token"))
			w.secret("a/bootstrap", "k=v", push, typed("bootstrap.kubernetes.io/token"))
			w.secret("a/helm", "k=v", push, typed("helm.sh/release.v1"))
			w.told("a/token", "UnsupportedType")
			w.told("b/t", "UnsupportedType")
			w.told("a/bootstrap", "UnsupportedType")
			w.settle()
			w.wrote()
		},
		"a source that is being deleted keeps its copies until it is gone": func(w *fixture) {
			w.secret("a/s", "k=v", w.with("Q:push-to={b}"), func(s *corev1.Secret) { s.Finalizers = []string{"example.com/wait"} })
			w.await("b/s: k=v")
			w.remove("a/s")
			w.settle()
			w.settle()
			w.await("b/s: k=v")
			w.edit("a/s", func(s *corev1.Secret) { s.Finalizers = nil })
			w.await("b/s: none")
		},
		"an admission policy refuses a copy, and its message is not repeated": func(w *fixture) {
			w.kubectl("create", "-f", policyFile(w))
			fleet.Eventually(w.ctx, w, func() error {
				probe := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "canary-probe"}}
				_, err := shared.Admin.CoreV1().Secrets(w.namespaces["b"]).Create(w.ctx, probe, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
				if err == nil {
					return fmt.Errorf("the policy has no effect")
				}
				return nil
			})
			w.secret("a/s", "k=v", w.with("Q:push-to={b},{c}"))
			w.await("c/s: k=v")
			w.told("a/s", "WriteRejected")
			w.kubectl("delete", "validatingadmissionpolicybinding,validatingadmissionpolicy", w.id)
			w.await("b/s: k=v")
		},
		"what is copied is told to nobody": func(w *fixture) {
			w.secret("a/s", hidden+"=v"+hidden, w.with("Q:push-to={b}", "M:replication-allowed=true", "M:replication-allowed-namespaces={b}"))
			w.secret("b/t", "own=1", w.with("M:replicate-from={a}/s"))
			w.await("b/s: "+hidden+"=v"+hidden, "b/t: "+hidden+"=v"+hidden+" own=1")
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
	tellsNothing(t, m.Log, m.InsecureURL)
}

// policyFile writes a policy that refuses Secrets in the namespace b and says so with a text that
// must not be repeated.
func policyFile(w *fixture) string {
	w.Helper()
	text := w.text(`apiVersion: admissionregistration.k8s.io/v1
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
	file := filepath.Join(shared.Dir(), w.id+".yaml")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		w.Fatal(err)
	}
	return file
}

// tellsNothing looks for the hidden text in the log, Events and metrics.
func tellsNothing(t *testing.T, logFile, url string) {
	t.Helper()
	log, err := os.ReadFile(logFile)
	if err != nil {
		t.Fatal(err)
	}
	events, err := shared.Kubectl(t.Context(), "get", "events", "-A", "-o", "yaml")
	if err != nil {
		t.Fatal(err)
	}
	_, metrics, err := fleet.Get(url+"/metrics", "")
	if err != nil || !strings.Contains(metrics, "quartermaster_replication_writes_total") {
		t.Fatalf("no metrics: %v", err)
	}
	for where, text := range map[string]string{"the log": string(log), "an Event": events, "a metric": metrics} {
		for line := range strings.Lines(text) {
			if strings.Contains(line, hidden) {
				t.Errorf("%s tells: %s", where, line)
			}
		}
	}
}
