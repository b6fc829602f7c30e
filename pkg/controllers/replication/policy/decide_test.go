// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// TestPlanFollowsTheDocumentedRules has the rules of docs/controllers/replication.md, each with an example.
// The tests of the controller have what is about requests (conflicts, quota, handover).
func TestPlanFollowsTheDocumentedRules(t *testing.T) {
	allowed := annotated("R:reflection-allowed=true")
	mirror := annotated("R:reflects=a/s")
	permits := annotated("M:replication-allowed=true", "M:replication-allowed-namespaces=b")
	pull := annotated("M:replicate-from=a/s")
	runCases(t, map[string]row{
		"an automatic source reaches every namespace that is not protected": {nil, func(f *fixture) {
			f.put(secret("a/s", "k=v", autoPush(), labelled("t=1"), annotated("kubectl.kubernetes.io/last-applied-configuration={}")))
			f.expectSettled("create b/s, create c/s", "NamespaceProtected a/s")
			f.expectContent("b/s", "k=v", "R:reflects=a/s", "R:auto-reflects=True", "R:reflected-version=*", "R:reflected-at=*", "Q:source=*",
				"kubectl.kubernetes.io/last-applied-configuration=(none)", "R:reflection-auto-enabled=(none)")
			if b := f.get("b/s"); len(b.Labels) != 0 || b.Type != "Opaque" || len(b.Annotations) != 5 {
				f.t.Errorf("labels %v, type %s, annotations %v", b.Labels, b.Type, b.Annotations)
			}
		}},
		"a negative lookahead excludes namespaces": {nil, func(f *fixture) {
			f.put(secret("a/s", "k=v", autoPush(), annotated("R:reflection-allowed-namespaces=^(?!kube-system).*"))).expectSettled("create b/s, create c/s")
		}},
		"the first match counts, not the longest": {nil, func(f *fixture) {
			f.addNamespaces("ab")
			delete(f.ns, "b")
			f.put(secret("a/s", "k=v", autoPush("a|ab"))).expectSettled("")
		}},
		"a list that does not compile holds what is there": {nil, func(f *fixture) {
			f.put(secret("a/s", "k=v", autoPush(), annotated("R:reflection-allowed-namespaces=b"))).expectSettled("create b/s")
			f.edit("a/s", annotated("R:reflection-allowed-namespaces=*"), holding("k=w")).expectSettled("", "InvalidPattern a/s")
			f.expectContent("b/s", "k=v")
		}},
		"a list and a selector are united": {nil, func(f *fixture) {
			f.label("b", "env", "x")
			f.put(secret("a/s", "k=v", autoPush("c"), annotated("R:reflection-auto-namespaces-selector=env=x"))).expectSettled("create b/s, create c/s")
		}},
		"a foreign object is not touched, and makes way": {nil, func(f *fixture) {
			f.put(secret("a/s", "k=v", autoPush("b")), secret("b/s", "own=1", annotated("x=y"))).expectSettled("", "TargetExists a/s")
			f.remove("b/s").expectSettled("create b/s")
		}},
		"a mirror that is older than its source is filled": {nil, func(f *fixture) {
			f.put(secret("a/s", "k=v", allowed), secret("b/m", "k=old z=1", mirror, labelled("l=1"), typed("example.com/t"))).expectSettled("update b/m")
			f.expectContent("b/m", "k=v", "R:auto-reflects=False", "R:reflects=a/s")
			if b := f.get("b/m"); b.Labels["l"] != "1" || b.Type != "example.com/t" {
				f.t.Errorf("labels %v, type %s", b.Labels, b.Type)
			}
		}},
		"a withdrawn permission deletes copies and freezes mirrors": {nil, func(f *fixture) {
			f.put(secret("a/s", "k=v", autoPush("b")), secret("b/m", "k=v", mirror)).expectSettled("create b/s")
			f.edit("a/s", annotated("R:reflection-allowed")).step()
			f.expect("")
			f.expectSettled("delete b/s", "PermissionDenied b/m")
		}},
		"a mirror that the reflector took for its copy is not deleted": {nil, func(f *fixture) {
			f.put(secret("a/s", "k=v", autoPush("b")))
			f.put(secret("b/s", "k=v", reflectorMade("a/s", "1"), annotated("kubectl.kubernetes.io/last-applied-configuration={}"))).expectSettled("")
			f.edit("a/s", autoPush("c")).expectSettled("create c/s")
		}},
		"an orphan of the reflector is deleted": {nil, func(f *fixture) { f.put(secret("b/s", "k=v", reflectorMade("a/s", "1"))).expectSettled("delete b/s") }},
		"another type needs another copy": {nil, func(f *fixture) {
			f.put(secret("a/s", "k=v", autoPush("b"))).expectSettled("create b/s")
			f.remove("a/s").put(secret("a/s", "tls.crt= tls.key=", autoPush("b"), typed(corev1.SecretTypeTLS))).expectSettled("recreate b/s")
		}},

		"a push copies data, type and labels": {nil, func(f *fixture) {
			f.addNamespaces("c-1")
			f.put(secret("a/s", "k=v", labelled("t=1", "argocd.argoproj.io/secret-type=cluster"), annotated("M:replicate-to=b,c-[0-9]*")))
			f.expectSettled("create b/s, create c-1/s")
			f.expectContent("b/s", "k=v", "M:replicated-at=*", "M:replicated-from-version=1", "M:replicated-keys=k", "Q:source=*", "M:replicate-to=(none)")
			f.expectLabels("b/s", "t:1")
			if got := f.get("b/s").Annotations; len(got) != 4 {
				f.t.Errorf("annotations %v", got)
			}
		}},
		"what only a pattern without a group matches is held": {nil, func(f *fixture) {
			f.addNamespaces("b-dev", "my-prod")
			f.put(secret("a/s", "k=v", annotated("M:replicate-to=b|prod")), secret("b-dev/s", "k=v", replicatorMade("1", "k"))).settle()
			f.edit("a/s", holding("k=w")).expectSettled("create b/s, update b/s", "AmbiguousPattern a/s")
			f.expectContent("b-dev/s", "k=v")
		}},
		"strip-labels is read by its value": {nil, func(f *fixture) {
			f.put(secret("a/s", "k=v", labelled("t=1"), annotated("M:replicate-to=b", "M:strip-labels=true")))
			f.put(secret("a/t", "k=v", labelled("t=1"), annotated("M:replicate-to=b", "M:strip-labels=false"))).expectSettled("create b/s, create b/t")
			f.expectLabels("b/s", "")
			f.expectLabels("b/t", "t:1")
		}},
		"owners are not copied": {nil, func(f *fixture) {
			f.put(secret("a/s", "k=v", annotated("M:replicate-to=b", "M:keep-owner-references=true"), func(b *Body) {
				b.OwnerReferences = []metav1.OwnerReference{{APIVersion: "rbac.authorization.k8s.io/v1", Kind: "ClusterRole", Name: "r", UID: "2"}}
			}))
			f.expectSettled("create b/s", "OwnerReferenceDropped a/s")
			if owners := f.get("b/s").OwnerReferences; len(owners) != 0 {
				f.t.Errorf("owners %v", owners)
			}
		}},
		"a pull needs permission": {nil, func(f *fixture) {
			for i, list := range []string{"M:replication-allowed-namespaces", "M:replication-allowed-namespaces=", "M:replication-allowed-namespaces=a-.*", "M:replication-allowed-namespaces=a|c-", "M:replication-allowed= true"} {
				f.put(secret("a/s", "k=v", permits, annotated(list)))
				if i == 0 {
					f.put(secret("b/t", "own=1", pull))
				}
				f.expectSettled("", "PermissionDenied b/t")
			}
		}},
		"a ConfigMap needs permission too": {nil, func(f *fixture) {
			f.put(configMap("a/s", "k=v"), configMap("b/t", "", pull)).expectSettled("")
			f.evaluator.AllowAll = true
			f.digester = NewDigester(f.evaluator.Options, NewDigesterKey())
			f.expectSettled("update b/t")
		}},
		"a key is in one section": {nil, func(f *fixture) {
			f.put(configMap("a/s", "k=v bin=1(binary)", annotated("M:replicate-to=b"))).expectSettled("create b/s")
			f.edit("a/s", holding("k=v")).expectSettled("update b/s")
			f.expectContent("b/s", "k=v")
			f.edit("a/s", holding("k=v(binary)")).expectSettled("update b/s")
			f.expectContent("b/s", "k=v(binary)")
		}},
		"a withdrawn push deletes copies and strips those with keys of their own": {nil, func(f *fixture) {
			f.put(secret("a/s", "k=v", labelled("t=1"), annotated("M:replicate-to=b,c"))).settle()
			f.edit("c/s", holding("k=v own=1")).expectSettled("create b/s, create c/s")
			f.edit("a/s", annotated("M:replicate-to=nowhere")).step()
			f.expect("")
			f.expectSettled("delete b/s, strip c/s")
			f.expectContent("c/s", "own=1", "Q:source=(none)", "M:replicated-at=(none)", "M:replicated-from-version=(none)", "M:replicated-keys=(none)")
			f.expectLabels("c/s", "")
			f.expectSettled("")
		}},
		"a copy of which no key can be removed stays": {nil, func(f *fixture) {
			f.put(secret("a/s", "tls.crt=1 tls.key=2", annotated("M:replicate-to=b"), typed(corev1.SecretTypeTLS)), secret("a/t", "k=v", annotated("M:replicate-to=b")))
			f.settle()
			f.edit("b/s", holding("tls.crt=1 tls.key=2 own=1"))
			f.edit("b/t", holding("k=v own=1"), immutable).expectSettled("create b/s, create b/t")
			f.edit("a/s", annotated("M:replicate-to")).remove("a/t").expectSettled("", "SourceDeleted b/s", "SourceDeleted b/t")
		}},
		"a deleted source empties pull targets unless their type demands the keys": {nil, func(f *fixture) {
			f.put(secret("a/s", "tls.crt=1 tls.key=2", permits), secret("b/t", "own=1", pull))
			f.put(secret("b/u", "tls.crt= tls.key=", pull, typed(corev1.SecretTypeTLS))).expectSettled("update b/t, update b/u")
			f.remove("a/s").step()
			f.expect("")
			f.expectSettled("empty b/t", "SourceDeleted b/u")
			f.expectContent("b/t", "own=1", "M:replicated-keys=")
			f.expectContent("b/u", "tls.crt=1 tls.key=2")
		}},
		"what the replicator made and is right gets a marker and nothing else": {nil, func(f *fixture) {
			f.put(secret("a/s", "k=v", labelled("t=1"), permits, annotated("M:replicate-to=b")))
			f.put(secret("b/s", "k=v", labelled("t=1", "own=1"), replicatorMade("1", "k")), secret("b/t", "k=v", pull, replicatorMade("0", "k")))
			f.expectSettled("mark b/s")
			f.expectContent("b/s", "k=v", "Q:source=*", "M:replicated-from-version=1")
			f.expectLabels("b/s", "own:1 t:1")
		}},
		"a source is never written to": {nil, func(f *fixture) {
			f.label("a", "x", "1").label("b", "x", "1")
			f.put(secret("a/s", "k=v", annotated("M:replicate-to-matching=x=1"), replicatorMade("1", "k"))).expectSettled("create b/s")
			f.label("a", "y", "1").expectSettled("")
		}},
		"the source in the older namespace wins, and the other follows once its copy is gone": {nil, func(f *fixture) {
			f.put(secret("a/s", "k=v", annotated("M:replicate-to=b")), secret("c/s", "j=w", annotated("M:replicate-to=b"))).expectSettled("create b/s", "TargetClaimed c/s")
			f.expectContent("b/s", "k=v")
			f.edit("a/s", annotated("M:replicate-to")).expectSettled("create b/s, delete b/s")
			f.expectContent("b/s", "j=w")
		}},

		"globs, exclusions and selectors": {nil, func(f *fixture) {
			f.addNamespaces("team-1", "team-old")
			f.label("team-old", "env", "x").label("b", "env", "x")
			f.put(secret("a/s", "k=v", annotated("Q:push-to=team-*,!team-old; labels: env=x"))).expectSettled("create b/s, create team-1/s")
			f.expectContent("b/s", "k=v")
			if got := f.get("b/s").Annotations; len(got) != 1 {
				f.t.Errorf("annotations %v", got)
			}
		}},
		"nothing but an exclusion is held, no annotation is no claim": {nil, func(f *fixture) {
			f.put(secret("a/s", "k=v", annotated("Q:push-to=b"))).expectSettled("create b/s")
			f.edit("a/s", annotated("Q:push-to=!c")).expectSettled("", "InvalidAnnotation a/s")
			f.edit("a/s", annotated("Q:push-to=labels: ")).expectSettled("", "InvalidAnnotation a/s")
			f.edit("a/s", annotated("Q:push-to")).expectSettled("delete b/s")
		}},
		"a target that claims to have had data does not learn whether its source exists": {nil, func(f *fixture) {
			f.put(secret("a/secret", "k=v"))
			for _, source := range []string{"secret", "none"} {
				f.put(secret("b/"+source, "k=v", annotated("M:replicate-from=a/"+source), replicatorMade("1", "k")))
				f.put(secret("b/tls-"+source, "tls.crt= tls.key=", typed(corev1.SecretTypeTLS), annotated("M:replicate-from=a/"+source), replicatorMade("1", "tls.crt,tls.key")))
			}
			f.expectSettled("", "PermissionDenied b/secret", "PermissionDenied b/none", "PermissionDenied b/tls-secret", "PermissionDenied b/tls-none")
			for _, prefix := range []string{"b/", "b/tls-"} {
				plan := func(source string) string {
					text := fmt.Sprintf("%+v", f.evaluator.Decide(f, Key{Secret, parseName(prefix + source)}, f.now))
					return strings.ReplaceAll(text, source, "SOURCE")
				}
				if missing, forbidden := plan("none"), plan("secret"); missing != forbidden {
					f.t.Errorf("missing %s, forbidden %s", missing, forbidden)
				}
			}
		}},
		"pulls follow one another": {nil, func(f *fixture) {
			f.put(secret("a/s", "k=v", annotated("Q:allow-pull=b")), secret("b/t", "", annotated("Q:pull-from=a/s", "Q:allow-pull=c")))
			f.put(secret("c/u", "", annotated("Q:pull-from=b/t"))).settle()
			f.writes = nil
			f.edit("a/s", holding("k=w")).expectSettled("update b/t, update c/u")
			f.expectContent("c/u", "k=w")
		}},
		"nothing is written in a cycle": {nil, func(f *fixture) {
			f.put(secret("a/x", "k=v", annotated("Q:pull-from=b/y", "Q:allow-pull=b")), secret("b/y", "k=w", annotated("Q:pull-from=a/x", "Q:allow-pull=a")))
			f.expectSettled("", "ReplicationCycle a/x", "ReplicationCycle b/y")
		}},
		"a copy does not push": {nil, func(f *fixture) {
			f.put(secret("a/s", "k=v", annotated("Q:push-to=b"))).expectSettled("create b/s")
			f.edit("b/s", annotated("Q:push-to=c")).expectSettled("")
		}},
		"an immutable copy is replaced, an immutable pull target is not": {nil, func(f *fixture) {
			f.put(secret("a/s", "k=v", annotated("Q:push-to=b", "Q:allow-pull=b")), secret("b/t", "", annotated("Q:pull-from=a/s"))).expectSettled("create b/s, update b/t")
			f.edit("b/s", immutable).edit("b/t", immutable).edit("a/s", holding("k=w")).expectSettled("recreate b/s", "TargetImmutable b/t")
		}},
		"a namespace that is terminating gets nothing": {nil, func(f *fixture) {
			f.ns["b"].Terminating = true
			f.put(secret("a/s", "k=v", annotated("Q:push-to=b,c"))).expectSettled("create c/s")
		}},
		"a label of the namespace holds everything": {nil, func(f *fixture) {
			f.put(secret("a/s", "k=v", annotated("Q:push-to=b"))).expectSettled("create b/s")
			f.label("b", NamespaceLabel, "disabled").settle()
			f.edit("a/s", holding("k=w")).expectSettled("")
			f.label("b", NamespaceLabel, "").expectSettled("update b/s")
		}},
		"pull-only holds pushes alone": {nil, func(f *fixture) {
			f.put(secret("a/s", "k=v", annotated("Q:push-to=b", "Q:allow-pull=b")), secret("b/t", "", annotated("Q:pull-from=a/s")))
			f.label("b", NamespaceLabel, "pull-only").expectSettled("update b/t")
		}},
		"a disabled namespace of a source holds its copies": {nil, func(f *fixture) {
			f.put(secret("a/s", "k=v", annotated("Q:push-to=b"))).settle()
			f.label("a", NamespaceLabel, "disabled").edit("a/s", annotated("Q:push-to=c"), holding("k=w")).expectSettled("create b/s")
			f.remove("a/s").expectSettled("")
			f.label("a", NamespaceLabel, "").expectSettled("delete b/s")
		}},
		"a takeover waits while the owner's namespace is disabled": {nil, func(f *fixture) {
			f.put(secret("a/s", "k=v", annotated("Q:push-to=b")), secret("c/s", "k=w", annotated("Q:push-to=b"))).settle()
			f.label("a", NamespaceLabel, "disabled").edit("a/s", annotated("Q:push-to")).expectSettled("create b/s")
			delete(f.ns, "a")
			f.remove("a/s").expectSettled("")
			f.now = f.now.Add(missingGrace)
			f.step()
			f.expect("create b/s, delete b/s")
		}},
		"some types and names are never copied": {nil, func(f *fixture) {
			push := annotated("Q:push-to=b", "M:replicate-to=b")
			f.put(secret("a/token", "k=v", push, typed(corev1.SecretTypeServiceAccountToken)))
			f.put(secret("a/bootstrap", "k=v", push, typed("bootstrap.kubernetes.io/token")), secret("a/helm", "k=v", push, typed("helm.sh/release.v1")))
			f.put(configMap("a/kube-root-ca.crt", "k=v", push))
			f.expectSettled("", "UnsupportedType a/token", "UnsupportedType a/bootstrap", "NamespaceProtected a/kube-root-ca.crt")
		}},
		"a marker counts only where it was written": {nil, func(f *fixture) {
			f.put(secret("a/s", "k=v", annotated("Q:push-to=b"))).settle()
			pasted := secret("c/s", "k=v")
			pasted.Annotations = f.get("b/s").Annotations
			f.put(pasted)
			f.writes = nil
			f.remove("a/s").expectSettled("delete b/s")
		}},
		"nobody's push takes a detached target with the replicator's keys for its copy": {nil, func(f *fixture) {
			f.put(secret("a/s", "k=v", permits), secret("b/s", "", annotated("M:replicate-from=a/s"))).settle()
			f.edit("b/s", annotated("M:replicate-from")).put(secret("c/s", "k=other", annotated("M:replicate-to=b"))).expectSettled("update b/s")
		}},
		"what a dialect that is off has made is held": {nil, func(f *fixture) {
			f.put(secret("a/s", "k=v", autoPush("b"), annotated("M:replicate-to=c")), secret("b/t", "", pull)).expectSettled("create b/s, create c/s")
			f.evaluator.Reflector, f.evaluator.Replicator = false, false
			f.edit("a/s", holding("k=w"), autoPush("none"), annotated("M:replicate-to")).settle()
			f.remove("a/s").expectSettled("")
		}},
		"a source that is being deleted withdraws nothing": {nil, func(f *fixture) {
			f.put(secret("a/s", "k=v", annotated("Q:push-to=b"))).settle()
			f.edit("a/s", annotated("Q:push-to"), func(b *Body) { now := b.CreationTimestamp; b.DeletionTimestamp = &now }).expectSettled("create b/s")
		}},
		"a copy follows its source to another dialect": {nil, func(f *fixture) {
			f.put(secret("a/s", "k=v", autoPush("b"))).settle()
			f.edit("a/s", annotated("R:reflection-allowed", "R:reflection-auto-enabled", "Q:push-to=b"), holding("k=w")).expectSettled("create b/s, update b/s")
			f.expectContent("b/s", "k=w", "R:reflects=(none)", "R:auto-reflects=(none)", "Q:source=*")
		}},
		"pull keys of two dialects": {nil, func(f *fixture) {
			f.put(secret("a/s", "k=v", annotated("Q:allow-pull=b")), secret("b/t", "own=1", annotated("M:replicate-from=a/s", "R:reflects=a/s", "Q:pull-from=a/s")))
			f.put(secret("b/u", "own=1", annotated("M:replicate-from=a/s", "Q:pull-from=a/t")), secret("b/v", "own=1", annotated("R:reflects=s")))
			f.expectSettled("update b/t", "ConflictingAnnotations b/u", "InvalidAnnotation b/v")
			f.expectContent("b/t", "k=v", "M:replicated-keys=(none)")
		}},
		"a copy of the replicator follows labels": {nil, func(f *fixture) {
			f.put(secret("a/s", "k=v", labelled("t=1", "u=1"), annotated("M:replicate-to=b"))).settle()
			f.edit("b/s", labelled("t=1", "u=1", "own=1")).edit("a/s", labelled("t=2")).expectSettled("create b/s, update b/s")
			f.expectLabels("b/s", "own:1 t:2")
		}},
		"a copy of the replicator that is immutable stays": {nil, func(f *fixture) {
			f.put(secret("a/s", "k=v", annotated("M:replicate-to=b"))).settle()
			f.edit("b/s", holding("k=v own=1"), immutable).edit("a/s", holding("k=w")).expectSettled("create b/s", "TypeConflict a/s")
		}},
		"a selector without Namespaces is held": {func(o *Options) { o.NoNamespaces = true }, func(f *fixture) {
			f.put(secret("a/s", "k=v", annotated("Q:push-to=b;labels:env=x")), secret("a/t", "k=v", annotated("M:replicate-to-matching=")))
			f.expectSettled("create b/s, create b/t, create c/t", "InvalidAnnotation a/s")
		}},
		"a copy of the replicator follows before its marker": {func(o *Options) { o.MarkAdopted = false }, func(f *fixture) {
			f.put(secret("a/s", "k=v", annotated("M:replicate-to=b")), secret("b/s", "k=v", replicatorMade("1", "k"))).settle()
			f.edit("a/s", holding("k=w")).expectSettled("update b/s")
			f.expectContent("b/s", "k=w")
		}},
	})
}
