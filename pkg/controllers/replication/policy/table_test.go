// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"maps"
	"reflect"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// TestDecide has the rules of docs/controllers/replication.md, each with an example. The tests of the
// controller have what is about requests (conflicts, quota, hand-over).
func TestDecide(t *testing.T) {
	type test struct {
		configure func(*Options)
		run       func(w *fixture)
	}
	allowed := with("R:reflection-allowed=true")
	mirror := with("R:reflects=a/s")
	permits := with("M:replication-allowed=true", "M:replication-allowed-namespaces=b")
	pull := with("M:replicate-from=a/s")
	for name, tc := range map[string]test{
		"an automatic source reaches every namespace that is not protected": {nil, func(w *fixture) {
			w.put(secret("a/s", "k=v", auto(), labelled("t=1"), with("kubectl.kubernetes.io/last-applied-configuration={}")))
			w.settled("create b/s, create c/s", "NamespaceProtected a/s")
			w.holds("b/s", "k=v", "R:reflects=a/s", "R:auto-reflects=True", "R:reflected-version=*", "R:reflected-at=*", "Q:source=*",
				"kubectl.kubernetes.io/last-applied-configuration=(none)", "R:reflection-auto-enabled=(none)")
			if b := w.get("b/s"); len(b.Labels) != 0 || b.Type != "Opaque" || len(b.Annotations) != 5 {
				w.t.Errorf("labels %v, type %s, annotations %v", b.Labels, b.Type, b.Annotations)
			}
		}},
		"an empty match is no match": {nil, func(w *fixture) {
			w.put(secret("a/s", "k=v", auto(), with("R:reflection-allowed-namespaces=^(?!kube-system)")))
			w.settled("")
		}},
		"a negative lookahead excludes namespaces": {nil, func(w *fixture) {
			w.put(secret("a/s", "k=v", auto(), with("R:reflection-allowed-namespaces=^(?!kube-system).*")))
			w.settled("create b/s, create c/s")
		}},
		"the first match counts, not the longest": {nil, func(w *fixture) {
			w.namespaces("ab")
			delete(w.ns, "b")
			w.put(secret("a/s", "k=v", auto("a|ab")))
			w.settled("")
		}},
		"a list that does not compile holds what is there": {nil, func(w *fixture) {
			w.put(secret("a/s", "k=v", auto(), with("R:reflection-allowed-namespaces=b")))
			w.settled("create b/s")
			w.edit("a/s", with("R:reflection-allowed-namespaces=*"), data("k=w"))
			w.settled("", "InvalidPattern a/s")
			w.holds("b/s", "k=v")
		}},
		"a pattern that takes too long is held and not run again": {nil, func(w *fixture) {
			w.namespaces("xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx", "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx")
			w.put(secret("a/s", "k=v", auto(), with("R:reflection-allowed-namespaces=b,(x+x+)+y")))
			w.settled("create b/s", "PatternTimeout a/s")
		}},
		"a list and a selector are united": {nil, func(w *fixture) {
			w.label("b", "env", "x")
			w.put(secret("a/s", "k=v", auto("c"), with("R:reflection-auto-namespaces-selector=env=x")))
			w.settled("create b/s, create c/s")
		}},
		"a namespace's labels decide": {nil, func(w *fixture) {
			w.label("b", "env", "x")
			w.put(secret("a/s", "k=v", auto(), with("R:reflection-auto-namespaces-selector=env=x")))
			w.settled("create b/s")
			w.label("b", "env", "")
			w.settled("delete b/s")
			w.label("b", "env", "x")
			w.settled("create b/s")
		}},
		"what the reflector made and is right is not written": {nil, func(w *fixture) {
			w.put(secret("a/s", "k=v", auto("b")), secret("b/s", "k=v", reflectorMade("a/s", "0")))
			w.put(secret("b/m", "k=v", mirror, with("R:auto-reflects=False", "R:reflected-version=0")))
			w.settled("")
		}},
		"what the reflector made and differs is updated in place": {nil, func(w *fixture) {
			w.put(secret("a/s", "k=v", auto("b")), secret("b/s", "k=old", reflectorMade("a/s", "0"), with("x=y")))
			w.settled("update b/s")
			w.holds("b/s", "k=v", "x=y", "Q:source=*", "R:reflected-version=1", "R:auto-reflects=True")
		}},
		"a foreign object is not touched, and makes way": {nil, func(w *fixture) {
			w.put(secret("a/s", "k=v", auto("b")), secret("b/s", "own=1", with("x=y")))
			w.settled("", "TargetExists a/s")
			w.edit("b/s", with("x=z"))
			w.settled("")
			w.remove("b/s")
			w.settled("create b/s")
		}},
		"a mirror that is older than its source is filled": {nil, func(w *fixture) {
			w.put(secret("a/s", "k=v", allowed), secret("b/m", "k=old z=1", mirror, labelled("l=1"), typed("example.com/t")))
			w.settled("update b/m")
			w.holds("b/m", "k=v", "R:auto-reflects=False", "R:reflects=a/s")
			if b := w.get("b/m"); b.Labels["l"] != "1" || b.Type != "example.com/t" {
				w.t.Errorf("labels %v, type %s", b.Labels, b.Type)
			}
		}},
		"a mirror waits for its source": {nil, func(w *fixture) {
			w.put(secret("b/m", "", mirror))
			w.settled("", "PermissionDenied b/m")
			w.put(secret("a/s", "k=v", allowed))
			w.settled("update b/m")
		}},
		"a withdrawn permission deletes copies and freezes mirrors": {nil, func(w *fixture) {
			w.put(secret("a/s", "k=v", auto("b")), secret("b/m", "k=v", mirror))
			w.settled("create b/s")
			w.edit("a/s", with("R:reflection-allowed"))
			w.step()
			w.expect("")
			w.settled("delete b/s", "PermissionDenied b/m")
		}},
		"a source that is no longer automatic loses its copies": {nil, func(w *fixture) {
			w.put(secret("a/s", "k=v", auto("b")))
			w.settled("create b/s")
			w.edit("a/s", with("R:reflection-auto-enabled=false"))
			w.settled("delete b/s")
		}},
		"a deleted source takes its copies along, and nothing else": {nil, func(w *fixture) {
			w.put(secret("a/s", "k=v", auto("b")), secret("c/s", "k=v"), secret("b/m", "k=v", mirror))
			w.settled("create b/s")
			w.remove("a/s")
			w.settled("delete b/s")
		}},
		"a source that is back within the grace loses nothing": {nil, func(w *fixture) {
			w.put(secret("a/s", "k=v", auto("b")))
			w.settled("create b/s")
			w.remove("a/s")
			w.step()
			w.put(secret("a/s", "k=v", auto("b")))
			w.settled("")
		}},
		"copies are repaired": {nil, func(w *fixture) {
			w.put(secret("a/s", "k=v", auto()))
			w.settled("create b/s, create c/s")
			w.remove("b/s")
			w.edit("c/s", data("k=edited more=1"))
			w.step()
			w.expect("create b/s, update c/s")
			w.holds("c/s", "k=v")
		}},
		"a mirror that the reflector took for its copy is not deleted": {nil, func(w *fixture) {
			w.put(secret("a/s", "k=v", auto("b")))
			w.put(secret("b/s", "k=v", reflectorMade("a/s", "1"), with("kubectl.kubernetes.io/last-applied-configuration={}")))
			w.settled("")
			w.edit("a/s", auto("c"))
			w.settled("create c/s")
		}},
		"an orphan of the reflector is deleted": {nil, func(w *fixture) { w.put(secret("b/s", "k=v", reflectorMade("a/s", "1"))); w.settled("delete b/s") }},
		"another type needs another copy": {nil, func(w *fixture) {
			w.put(secret("a/s", "k=v", auto("b")))
			w.settled("create b/s")
			w.remove("a/s")
			w.put(secret("a/s", "tls.crt= tls.key=", auto("b"), typed(corev1.SecretTypeTLS)))
			w.settled("recreate b/s")
			w.holds("b/s", "tls.crt= tls.key=")
			if got := w.get("b/s").Type; got != "kubernetes.io/tls" {
				w.t.Errorf("type %s", got)
			}
		}},
		"a detached mirror stays as it is": {nil, func(w *fixture) {
			w.put(secret("a/s", "k=v", allowed), secret("b/m", "", mirror))
			w.settled("update b/m")
			w.edit("b/m", with("R:reflects"))
			w.edit("a/s", data("k=w"))
			w.settled("")
		}},

		"M1: a push copies data, type and labels": {nil, func(w *fixture) {
			w.namespaces("c-1")
			w.put(secret("a/s", "k=v", labelled("t=1", "argocd.argoproj.io/secret-type=cluster"), with("M:replicate-to=b,c-[0-9]*")))
			w.settled("create b/s, create c-1/s")
			w.holds("b/s", "k=v", "M:replicated-at=*", "M:replicated-from-version=1", "M:replicated-keys=k", "Q:source=*", "M:replicate-to=(none)")
			if b := w.get("b/s"); len(b.Labels) != 1 || b.Labels["t"] != "1" || len(b.Annotations) != 4 {
				w.t.Errorf("labels %v, annotations %v", b.Labels, b.Annotations)
			}
		}},
		"M2: an empty list selects nothing, an empty selector everything": {nil, func(w *fixture) {
			w.put(secret("a/s", "k=v", with("M:replicate-to=")))
			w.settled("")
			w.edit("a/s", with("M:replicate-to", "M:replicate-to-matching="))
			w.settled("create b/s, create c/s")
		}},
		"M3: what only a pattern without a group matches is held": {nil, func(w *fixture) {
			w.namespaces("b-dev", "my-prod")
			w.put(secret("a/s", "k=v", with("M:replicate-to=b|prod")), secret("b-dev/s", "k=v", replicatorMade("1", "k")))
			w.settle()
			w.edit("a/s", data("k=w"))
			w.settled("create b/s, update b/s", "AmbiguousPattern a/s")
			w.holds("b-dev/s", "k=v")
		}},
		"M4: strip-labels is read by its value": {nil, func(w *fixture) {
			w.put(secret("a/s", "k=v", labelled("t=1"), with("M:replicate-to=b", "M:strip-labels=true")))
			w.put(secret("a/t", "k=v", labelled("t=1"), with("M:replicate-to=b", "M:strip-labels=false")))
			w.settled("create b/s, create b/t")
			if s, t := w.get("b/s").Labels, w.get("b/t").Labels; len(s) != 0 || t["t"] != "1" {
				w.t.Errorf("labels %v and %v", s, t)
			}
		}},
		"M5: owners are not copied": {nil, func(w *fixture) {
			w.put(secret("a/s", "k=v", with("M:replicate-to=b", "M:keep-owner-references=true"), func(b *Body) {
				b.OwnerReferences = []metav1.OwnerReference{{APIVersion: "rbac.authorization.k8s.io/v1", Kind: "ClusterRole", Name: "r", UID: "2"}}
			}))
			w.settled("create b/s")
			if owners := w.get("b/s").OwnerReferences; len(owners) != 0 {
				w.t.Errorf("owners %v", owners)
			}
		}},
		"M6: a pull merges by key": {nil, func(w *fixture) {
			w.put(secret("a/s", "k=v", permits), secret("b/t", "own=1", pull))
			w.settled("update b/t")
			w.holds("b/t", "k=v own=1", "M:replicated-keys=k")
		}},
		"M7: a pull needs permission": {nil, func(w *fixture) {
			for i, list := range []string{"M:replication-allowed-namespaces", "M:replication-allowed-namespaces=", "M:replication-allowed-namespaces=a-.*", "M:replication-allowed-namespaces=a|c-", "M:replication-allowed= true"} {
				w.put(secret("a/s", "k=v", permits, with(list)))
				if i == 0 {
					w.put(secret("b/t", "own=1", pull))
				}
				w.settled("", "PermissionDenied b/t")
			}
		}},
		"M8: a ConfigMap needs permission too": {nil, func(w *fixture) {
			w.put(configMap("a/s", "k=v"), configMap("b/t", "", pull))
			w.settled("")
			w.rules.AllowAll = true
			w.digester = NewDigester(w.rules.Options, NewDigesterKey())
			w.settled("update b/t")
		}},
		"M9: a key that leaves the source leaves the target": {nil, func(w *fixture) {
			w.put(secret("a/s", "k=v j=w", permits), secret("b/t", "own=1", pull))
			w.settled("update b/t")
			w.edit("a/s", data("j=w"))
			w.settled("update b/t")
			w.holds("b/t", "j=w own=1", "M:replicated-keys=j")
		}},
		"M10: a key is in one section": {nil, func(w *fixture) {
			w.put(configMap("a/s", "k=v bin=1(binary)", with("M:replicate-to=b")))
			w.settled("create b/s")
			w.edit("a/s", data("k=v"))
			w.settled("update b/s")
			w.holds("b/s", "k=v")
			w.edit("a/s", data("k=v(binary)"))
			w.settled("update b/s")
			w.holds("b/s", "k=v(binary)")
		}},
		"M11: content decides, not the version": {nil, func(w *fixture) {
			w.put(secret("a/s", "k=v", permits), secret("b/t", "", pull))
			w.settled("update b/t")
			w.edit("b/t", data(""))
			w.settled("update b/t")
			w.holds("b/t", "k=v")
		}},
		"M12: a withdrawn push deletes copies and strips those with keys of their own": {nil, func(w *fixture) {
			w.put(secret("a/s", "k=v", labelled("t=1"), with("M:replicate-to=b,c")))
			w.settle()
			w.edit("c/s", data("k=v own=1"))
			w.settled("create b/s, create c/s")
			w.edit("a/s", with("M:replicate-to=nowhere"))
			w.step()
			w.expect("")
			w.settled("delete b/s, strip c/s")
			w.holds("c/s", "own=1", "Q:source=(none)", "M:replicated-at=(none)", "M:replicated-from-version=(none)", "M:replicated-keys=(none)")
			if got := w.get("c/s").Labels; len(got) != 0 {
				w.t.Errorf("labels %v", got)
			}
			w.settled("")
		}},
		"M12: a copy of which no key can be removed stays": {nil, func(w *fixture) {
			w.put(secret("a/s", "tls.crt=1 tls.key=2", with("M:replicate-to=b"), typed(corev1.SecretTypeTLS)), secret("a/t", "k=v", with("M:replicate-to=b")))
			w.settle()
			w.edit("b/s", data("tls.crt=1 tls.key=2 own=1"))
			w.edit("b/t", data("k=v own=1"), immutable)
			w.settled("create b/s, create b/t")
			w.edit("a/s", with("M:replicate-to"))
			w.remove("a/t")
			w.settled("", "SourceDeleted b/s", "SourceDeleted b/t")
		}},
		"M13: only a marked orphan is deleted": {nil, func(w *fixture) {
			w.put(secret("a/s", "k=v", with("M:replicate-to=b")))
			w.settled("create b/s")
			w.remove("a/s")
			w.put(secret("c/s", "k=v", replicatorMade("1", "k")))
			w.settled("delete b/s")
		}},
		"M14: a deleted source empties pull targets unless their type demands the keys": {nil, func(w *fixture) {
			w.put(secret("a/s", "tls.crt=1 tls.key=2", permits), secret("b/t", "own=1", pull))
			w.put(secret("b/u", "tls.crt= tls.key=", pull, typed(corev1.SecretTypeTLS)))
			w.settled("update b/t, update b/u")
			w.remove("a/s")
			w.step()
			w.expect("")
			w.settled("empty b/t", "SourceDeleted b/u")
			w.holds("b/t", "own=1", "M:replicated-keys=")
			w.holds("b/u", "tls.crt=1 tls.key=2")
		}},
		"M15: a pull follows its annotation": {nil, func(w *fixture) {
			w.put(secret("a/s", "k=v", permits), secret("a/t", "j=w", permits), secret("b/t", "", pull))
			w.settled("update b/t")
			w.edit("b/t", with("M:replicate-from=a/t"))
			w.settled("update b/t")
			w.holds("b/t", "j=w")
			w.edit("a/s", data("k=x"))
			w.settled("")
		}},
		"M16: what the replicator made and is right gets a marker and nothing else": {nil, func(w *fixture) {
			w.put(secret("a/s", "k=v", labelled("t=1"), permits, with("M:replicate-to=b")))
			w.put(secret("b/s", "k=v", labelled("t=1", "own=1"), replicatorMade("1", "k")), secret("b/t", "k=v", pull, replicatorMade("0", "k")))
			w.settled("mark b/s")
			w.holds("b/s", "k=v", "Q:source=*", "M:replicated-from-version=1")
			if got := w.get("b/s").Labels; got["own"] != "1" || got["t"] != "1" {
				w.t.Errorf("labels %v", got)
			}
		}},
		"M16: without mark-adopted nothing is written": {func(o *Options) { o.MarkAdopted = false }, func(w *fixture) {
			w.put(secret("a/s", "k=v", with("M:replicate-to=b")), secret("b/s", "k=v", replicatorMade("1", "k")))
			w.settled("")
		}},
		"M17: a source is never written to": {nil, func(w *fixture) {
			w.label("a", "x", "1")
			w.label("b", "x", "1")
			w.put(secret("a/s", "k=v", with("M:replicate-to-matching=x=1"), replicatorMade("1", "k")))
			w.settled("create b/s")
			w.label("a", "y", "1")
			w.settled("")
		}},
		"M18: the source in the older namespace wins, and the other follows once its copy is gone": {nil, func(w *fixture) {
			w.put(secret("a/s", "k=v", with("M:replicate-to=b")), secret("c/s", "j=w", with("M:replicate-to=b")))
			w.settled("create b/s", "TargetClaimed c/s")
			w.holds("b/s", "k=v")
			w.edit("a/s", with("M:replicate-to"))
			w.settled("create b/s, delete b/s")
			w.holds("b/s", "j=w")
		}},
		"M19: the owner of a foreign object opts in by a pull": {nil, func(w *fixture) {
			w.put(secret("a/s", "k=v", permits, with("M:replicate-to=b")), secret("b/s", "own=1"))
			w.settled("", "TargetExists a/s")
			w.edit("b/s", pull)
			w.settled("update b/s")
			w.holds("b/s", "k=v own=1")
		}},
		"M20: a deletion reaches recognised copies only": {nil, func(w *fixture) {
			w.namespaces("app", "my-app")
			w.put(secret("app/s", ""), secret("c/s", "k=v", with("M:replicate-to=my-app")))
			w.settled("create my-app/s")
			w.put(secret("a/s", "k=v", with("M:replicate-to=app")))
			w.settle()
			w.remove("a/s")
			w.settled("")
		}},
		"M21: a source that goes in between leaves only what was made": {nil, func(w *fixture) {
			for i := range 200 {
				w.namespaces("n-" + string(rune('a'+i/26)) + string(rune('a'+i%26)))
			}
			w.put(secret("a/s", "k=v", with("M:replicate-to=n-a.")))
			w.settle()
			w.edit("a/s", with("M:replicate-to=n-.*"))
			w.writes = nil
			w.remove("a/s")
			w.settle()
			if len(w.writes) != 26 {
				w.t.Errorf("%d writes, want 26 deletions: %v", len(w.writes), w.writes)
			}
		}},

		"N1: globs, exclusions and selectors": {nil, func(w *fixture) {
			w.namespaces("team-1", "team-old")
			w.label("team-old", "env", "x")
			w.label("b", "env", "x")
			w.put(secret("a/s", "k=v", with("Q:push-to=team-*,!team-old; labels: env=x")))
			w.settled("create b/s, create team-1/s")
			w.holds("b/s", "k=v")
			if got := w.get("b/s").Annotations; len(got) != 1 {
				w.t.Errorf("annotations %v", got)
			}
		}},
		"N2: nothing but an exclusion is held, no annotation is no claim": {nil, func(w *fixture) {
			w.put(secret("a/s", "k=v", with("Q:push-to=b")))
			w.settled("create b/s")
			w.edit("a/s", with("Q:push-to=!c"))
			w.settled("", "InvalidAnnotation a/s")
			w.edit("a/s", with("Q:push-to"))
			w.settled("delete b/s")
		}},
		"N3: a native pull": {nil, func(w *fixture) {
			w.put(secret("a/s", "k=v", with("Q:allow-pull=b")), secret("b/t", "own=1", with("Q:pull-from=a/s")))
			w.settled("update b/t")
			w.holds("b/t", "k=v")
			w.edit("a/s", with("Q:allow-pull"), data("k=w"))
			w.settled("", "PermissionDenied b/t")
		}},
		"N4: a missing source and a forbidden one look alike": {nil, func(w *fixture) {
			w.put(secret("a/s", "k=v"), secret("b/t", "", with("Q:pull-from=a/none")), secret("b/u", "", with("Q:pull-from=a/s")))
			w.settled("", "PermissionDenied b/t", "PermissionDenied b/u")
			missing := w.rules.Decide(w, Key{Secret, named("b/t")}, w.now).Problems[0].Text
			forbidden := w.rules.Decide(w, Key{Secret, named("b/u")}, w.now).Problems[0].Text
			if missing != "source a/none does not exist or does not allow namespace b" || forbidden != "source a/s does not exist or does not allow namespace b" {
				w.t.Errorf("%q, %q", missing, forbidden)
			}
		}},
		"N4: also to who says that a target has had data": {nil, func(w *fixture) {
			w.put(secret("a/s", "k=v"))
			for _, source := range []string{"a/s", "a/none"} {
				w.put(secret("b/"+named(source).Name, "k=v", with("M:replicate-from="+source), replicatorMade("1", "k")))
				w.put(secret("b/tls-"+named(source).Name, "tls.crt= tls.key=", typed(corev1.SecretTypeTLS),
					with("M:replicate-from="+source), replicatorMade("1", "tls.crt,tls.key")))
			}
			w.settle()
			for _, prefix := range []string{"b/", "b/tls-"} {
				missing := w.rules.Decide(w, Key{Secret, named(prefix + "none")}, w.now)
				forbidden := w.rules.Decide(w, Key{Secret, named(prefix + "s")}, w.now)
				for _, p := range []*Plan{&missing, &forbidden} {
					for i := range p.Problems {
						p.Problems[i].About = Key{}
						p.Problems[i].Text = strings.NewReplacer("a/none", "SOURCE", "a/s", "SOURCE").Replace(p.Problems[i].Text)
					}
					p.Source = Key{}
				}
				if !reflect.DeepEqual(missing, forbidden) {
					w.t.Errorf("%s: missing %+v, forbidden %+v", prefix, missing, forbidden)
				}
			}
			w.expect("", "PermissionDenied b/s", "PermissionDenied b/none", "PermissionDenied b/tls-s", "PermissionDenied b/tls-none")
		}},
		"N5: pulls follow one another": {nil, func(w *fixture) {
			w.put(secret("a/s", "k=v", with("Q:allow-pull=b")), secret("b/t", "", with("Q:pull-from=a/s", "Q:allow-pull=c")))
			w.put(secret("c/u", "", with("Q:pull-from=b/t")))
			w.settle()
			w.writes = nil
			w.edit("a/s", data("k=w"))
			w.settled("update b/t, update c/u")
			w.holds("c/u", "k=w")
		}},
		"N6: nothing is written in a cycle": {nil, func(w *fixture) {
			w.put(secret("a/x", "k=v", with("Q:pull-from=b/y", "Q:allow-pull=b")), secret("b/y", "k=w", with("Q:pull-from=a/x", "Q:allow-pull=a")))
			w.settled("", "ReplicationCycle a/x", "ReplicationCycle b/y")
		}},
		"N7: a copy does not push": {nil, func(w *fixture) {
			w.put(secret("a/s", "k=v", with("Q:push-to=b")))
			w.settled("create b/s")
			w.edit("b/s", with("Q:push-to=c"))
			w.settled("")
		}},
		"N8: an immutable copy is replaced, an immutable pull target is not": {nil, func(w *fixture) {
			w.put(secret("a/s", "k=v", with("Q:push-to=b", "Q:allow-pull=b")), secret("b/t", "", with("Q:pull-from=a/s")))
			w.settled("create b/s, update b/t")
			w.edit("b/s", immutable)
			w.edit("b/t", immutable)
			w.edit("a/s", data("k=w"))
			w.settled("recreate b/s", "TargetImmutable b/t")
		}},
		"N10: a namespace that is terminating gets nothing": {nil, func(w *fixture) {
			w.ns["b"].Terminating = true
			w.put(secret("a/s", "k=v", with("Q:push-to=b,c")))
			w.settled("create c/s")
		}},
		"N12: a label of the namespace holds everything": {nil, func(w *fixture) {
			w.put(secret("a/s", "k=v", with("Q:push-to=b")))
			w.settled("create b/s")
			w.label("b", NamespaceLabel, "disabled")
			w.settle()
			w.edit("a/s", data("k=w"))
			w.settled("")
			w.label("b", NamespaceLabel, "")
			w.settled("update b/s")
		}},
		"N12: pull-only holds pushes alone": {nil, func(w *fixture) {
			w.put(secret("a/s", "k=v", with("Q:push-to=b", "Q:allow-pull=b")), secret("b/t", "", with("Q:pull-from=a/s")))
			w.label("b", NamespaceLabel, "pull-only")
			w.settled("update b/t")
		}},
		"N12: a disabled namespace of a source holds its copies": {nil, func(w *fixture) {
			w.put(secret("a/s", "k=v", with("Q:push-to=b")))
			w.settle()
			w.label("a", NamespaceLabel, "disabled")
			w.edit("a/s", with("Q:push-to=c"), data("k=w"))
			w.settled("create b/s")
			w.remove("a/s")
			w.settled("")
			w.label("a", NamespaceLabel, "")
			w.settled("delete b/s")
		}},
		"N12: a takeover waits while the owner's namespace is disabled": {nil, func(w *fixture) {
			w.put(secret("a/s", "k=v", with("Q:push-to=b")), secret("c/s", "k=w", with("Q:push-to=b")))
			w.settle()
			w.label("a", NamespaceLabel, "disabled")
			w.edit("a/s", with("Q:push-to"))
			w.settled("create b/s")
			delete(w.ns, "a")
			w.remove("a/s")
			w.settled("")
			w.now = w.now.Add(missingGrace)
			w.step()
			w.expect("create b/s, delete b/s")
		}},
		"N12: a pull target keeps its data while its source's namespace is disabled": {nil, func(w *fixture) {
			w.put(secret("a/s", "k=v", permits), secret("b/t", "own=1", pull))
			w.settle()
			w.label("a", NamespaceLabel, "disabled")
			w.remove("a/s")
			w.settled("update b/t")
			w.label("a", NamespaceLabel, "")
			w.settled("empty b/t")
		}},
		"N13: some types and names are never copied": {nil, func(w *fixture) {
			push := with("Q:push-to=b", "M:replicate-to=b")
			w.put(secret("a/token", "k=v", push, typed(corev1.SecretTypeServiceAccountToken)))
			w.put(secret("a/bootstrap", "k=v", push, typed("bootstrap.kubernetes.io/token")), secret("a/helm", "k=v", push, typed("helm.sh/release.v1")))
			w.put(configMap("a/kube-root-ca.crt", "k=v", push))
			w.settled("", "UnsupportedType a/token", "UnsupportedType a/bootstrap", "NamespaceProtected a/kube-root-ca.crt")
		}},
		"N14: only some namespaces may push": {func(o *Options) { o.PushNamespaces = "platform-*" }, func(w *fixture) {
			w.put(secret("a/s", "k=v", with("Q:push-to=b")))
			w.settled("", "PushForbidden a/s")
		}},
		"N16: a marker counts only where it was written": {nil, func(w *fixture) {
			w.put(secret("a/s", "k=v", with("Q:push-to=b")))
			w.settle()
			pasted := secret("c/s", "k=v")
			pasted.Annotations = w.get("b/s").Annotations
			w.put(pasted)
			w.writes = nil
			w.remove("a/s")
			w.settled("delete b/s")
		}},
		"N17: a pull that is withdrawn detaches the target": {nil, func(w *fixture) {
			w.put(secret("a/s", "k=v", with("Q:allow-pull=b")), secret("b/t", "", with("Q:pull-from=a/s")))
			w.settle()
			w.edit("b/t", with("Q:pull-from"))
			w.edit("a/s", data("k=w"))
			w.settled("update b/t")
		}},
		"N17: nobody's push takes a detached target with the replicator's keys for its copy": {nil, func(w *fixture) {
			w.put(secret("a/s", "k=v", permits), secret("b/s", "", with("M:replicate-from=a/s")))
			w.settle()
			w.edit("b/s", with("M:replicate-from"))
			w.put(secret("c/s", "k=other", with("M:replicate-to=b")))
			w.settled("update b/s")
		}},
		"N19: what is in sync is not written": {nil, func(w *fixture) {
			w.put(secret("a/s", "k=v", labelled("t=1"), with("M:replicate-to=b", "Q:push-to=c"), permits), secret("b/t", "", pull))
			w.settle()
			w.writes = nil
			w.digester = NewDigester(w.rules.Options, NewDigesterKey()) // a new process
			w.edit("a/s", with("x=y"))
			w.settled("")
		}},
		"N22: what a dialect that is off has made is held": {nil, func(w *fixture) {
			w.put(secret("a/s", "k=v", auto("b"), with("M:replicate-to=c")), secret("b/t", "", pull))
			w.settled("create b/s, create c/s")
			w.rules.Reflector, w.rules.Replicator = false, false
			w.edit("a/s", data("k=w"), auto("none"), with("M:replicate-to"))
			w.settle()
			w.remove("a/s")
			w.settled("")
		}},
		"a source that is being deleted withdraws nothing": {nil, func(w *fixture) {
			w.put(secret("a/s", "k=v", with("Q:push-to=b")))
			w.settle()
			w.edit("a/s", with("Q:push-to"), func(b *Body) { now := b.CreationTimestamp; b.DeletionTimestamp = &now })
			w.settled("create b/s")
		}},
		"a copy follows its source to another dialect": {nil, func(w *fixture) {
			w.put(secret("a/s", "k=v", auto("b")))
			w.settle()
			w.edit("a/s", with("R:reflection-allowed", "R:reflection-auto-enabled", "Q:push-to=b"), data("k=w"))
			w.settled("create b/s, update b/s")
			w.holds("b/s", "k=w", "R:reflects=(none)", "R:auto-reflects=(none)", "Q:source=*")
		}},
		"a copy loses the keys of an earlier source": {nil, func(w *fixture) {
			w.put(secret("a/s", "k=v", with("Q:push-to=b")), secret("c/s", "j=w", with("M:replicate-to=b")))
			w.settle()
			w.edit("a/s", with("Q:push-to"))
			w.settled("create b/s, create b/s, delete b/s")
			w.holds("b/s", "j=w")
		}},
		"pull keys of two dialects": {nil, func(w *fixture) {
			w.put(secret("a/s", "k=v", with("Q:allow-pull=b")), secret("b/t", "own=1", with("M:replicate-from=a/s", "R:reflects=a/s", "Q:pull-from=a/s")))
			w.put(secret("b/u", "own=1", with("M:replicate-from=a/s", "Q:pull-from=a/t")), secret("b/v", "own=1", with("R:reflects=s")))
			w.settled("update b/t", "ConflictingAnnotations b/u", "InvalidAnnotation b/v")
			w.holds("b/t", "k=v", "M:replicated-keys=(none)")
		}},
		"a copy of the replicator follows labels": {nil, func(w *fixture) {
			w.put(secret("a/s", "k=v", labelled("t=1", "u=1"), with("M:replicate-to=b")))
			w.settle()
			w.edit("b/s", labelled("t=1", "u=1", "own=1"))
			w.edit("a/s", labelled("t=2"))
			w.settled("create b/s, update b/s")
			if got := w.get("b/s").Labels; !maps.Equal(got, map[string]string{"t": "2", "own": "1"}) {
				w.t.Errorf("labels %v", got)
			}
		}},
		"a copy of the replicator that is immutable stays": {nil, func(w *fixture) {
			w.put(secret("a/s", "k=v", with("M:replicate-to=b")))
			w.settle()
			w.edit("b/s", data("k=v own=1"), immutable)
			w.edit("a/s", data("k=w"))
			w.settled("create b/s", "TypeConflict a/s")
		}},
		"a selector without Namespaces is held": {func(o *Options) { o.NoNamespaces = true }, func(w *fixture) {
			w.put(secret("a/s", "k=v", with("Q:push-to=b;labels:env=x")), secret("a/t", "k=v", with("M:replicate-to-matching=")))
			w.settled("create b/s, create b/t, create c/t", "InvalidAnnotation a/s")
		}},
		"a copy of the replicator is adopted, whatever else its source says": {nil, func(w *fixture) {
			w.put(secret("a/s", "k=v", with("M:replicate-to=b", "Q:push-to=b")), secret("b/s", "k=v", replicatorMade("1", "k")))
			w.settle()
			w.edit("a/s", data("k=w"))
			w.settled("mark b/s, update b/s")
			w.holds("b/s", "k=w", "M:replicated-keys=(none)", "Q:source=*")
		}},
		"a copy of the replicator follows before its marker": {func(o *Options) { o.MarkAdopted = false }, func(w *fixture) {
			w.put(secret("a/s", "k=v", with("M:replicate-to=b")), secret("b/s", "k=v", replicatorMade("1", "k")))
			w.settle()
			w.edit("a/s", data("k=w"))
			w.settled("update b/s")
			w.holds("b/s", "k=w")
		}},
		"a copy of the replicator from a younger namespace gives way": {nil, func(w *fixture) {
			w.put(secret("a/s", "k=v", with("M:replicate-to=b")), secret("c/s", "k=w", with("M:replicate-to=b")), secret("b/s", "k=w", replicatorMade("2", "k")))
			w.settled("create b/s, delete b/s", "TargetClaimed c/s")
			w.holds("b/s", "k=v")
			if got := w.get("b/s").Annotations[Marker]; !strings.Contains(got, `"source":"a/s"`) {
				w.t.Errorf("marker %s", got)
			}
		}},
	} {
		t.Run(name, func(t *testing.T) {
			w := newFixture(t, tc.configure)
			w.t = t
			tc.run(w)
		})
	}
}
