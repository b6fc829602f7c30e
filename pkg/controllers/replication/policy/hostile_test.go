// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"fmt"
	"maps"
	"math/rand"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/internal/patternlock"
)

// TestTenantHarmsNoOther has attacks by a writer of objects in namespace c, the youngest.
func TestTenantHarmsNoOther(t *testing.T) {
	pushToB := annotated("Q:push-to=b")
	runCases(t, map[string]row{
		"an invalid claim does not keep the copy of a source that is gone": {nil, func(f *fixture) {
			f.put(secret("a/s", "k=v", pushToB), secret("c/s", "k=attack", annotated("Q:push-to=!b"))).expectSettled("create b/s", "InvalidAnnotation c/s")
			f.remove("a/s").expectSettled("delete b/s")
		}},
		"an invalid claim keeps the copy of its own source, as long as nobody with an older namespace asks": {nil, func(f *fixture) {
			f.put(secret("c/s", "k=v", pushToB)).settle()
			f.edit("c/s", annotated("Q:push-to=!b"), holding("k=w")).expectSettled("create b/s")
			f.put(secret("a/s", "k=v", pushToB)).expectSettled("create b/s, delete b/s")
		}},
		"a source that may push no more loses its copies, once the flag says so": {nil, func(f *fixture) {
			f.put(secret("c/s", "k=v", pushToB)).settle()
			f.evaluator.PushNamespaces = "a"
			f.expectSettled("create b/s, delete b/s", "PushForbidden c/s")
		}},
		"the replicator's copy of public data is not adopted by who has the same": {nil, func(f *fixture) {
			f.put(secret("b/s", "ca.crt=public", replicatorMade("77", "ca.crt")), secret("c/s", "ca.crt=public", annotated("M:replicate-to=b"))).settle()
			f.edit("c/s", holding("ca.crt=attack")).expectSettled("", "TargetExists c/s")
			f.expectContent("b/s", "ca.crt=public")
		}},
		"a copy that nobody has forbidden makes way for a source that may push": {nil, func(f *fixture) {
			f.put(secret("c/s", "k=attack", pushToB)).settle()
			f.evaluator.PushNamespaces = ""
			f.put(secret("a/s", "k=v", annotated("M:replicate-to=b"))).expectSettled("create b/s, create b/s, delete b/s")
			f.expectContent("b/s", "k=v")
		}},
		"a copy with keys of its own does not go with its source": {nil, func(f *fixture) {
			f.put(secret("c/s", "k=attack", annotated("M:replicate-to=b"))).settle()
			f.edit("b/s", holding("k=attack own=1"))
			f.put(secret("a/s", "k=v", annotated("M:replicate-to=b"))).expectSettled("create b/s, strip b/s", "TargetExists a/s")
			f.expectContent("b/s", "own=1")
		}},
		"by default only the annotations of the originals push, as there": {func(o *Options) { o.PushNamespaces = "" }, func(f *fixture) {
			f.put(secret("c/s", "k=attack", pushToB), secret("a/s", "k=v", annotated("M:replicate-to=b")), secret("a/t", "k=v", autoPush("b")))
			f.expectSettled("create b/s, create b/t", "PushForbidden c/s")
		}},
		"no label is copied by which another controller trusts an object": {nil, func(f *fixture) {
			f.put(secret("c/s", "k=attack", annotated("M:replicate-to=b"), labelled(
				"sealedsecrets.bitnami.com/sealed-secrets-key=active", "argocd.argoproj.io/secret-type=cluster",
				"kustomize.toolkit.fluxcd.io/name=x", "app.kubernetes.io/managed-by=Helm", "owner=helm", "team=c")))
			f.expectSettled("create b/s")
			f.expectLabels("b/s", "team:c")
		}},
		"a source that asks for too much has nothing written": {func(o *Options) { o.MaxSpread = 64 << 10 }, func(f *fixture) {
			for i := range 70 {
				f.addNamespaces(fmt.Sprintf("n-%d", i))
			}
			f.put(configMap("c/s", "", annotated("Q:push-to=n-*"), func(b *Body) { b.Content[inData+"k"] = make([]byte, 1<<10) }))
			f.put(configMap("c/small", "k=v", annotated("Q:push-to=n-1"))).expectSettled("create n-1/small", "SpreadExceeded c/s")
			f.evaluator.MaxSpread = 0
			f.step()
			if len(f.writes) != 70 {
				f.t.Errorf("%d writes without a limit, want 70", len(f.writes))
			}
		}},
		"an object with thousands of keys is not copied, and one that gets them is left alone": {nil, func(f *fixture) {
			many := func(b *Body) {
				for i := range maxKeys + 1 {
					b.Content[Slot(fmt.Sprintf("%s%d", inData, i))] = []byte("x")
				}
			}
			f.put(configMap("c/s", "", pushToB, many), configMap("a/t", "k=v", annotated("M:replicate-to=b"))).expectSettled("create b/t", "TooManyKeys c/s")
			f.edit("b/t", many).remove("a/t").expectSettled("")
		}},
		"a value that is too long is held, in each grammar": {nil, func(f *fixture) {
			long := strings.Repeat("*", 256<<10)
			for i, key := range []string{"Q:push-to", "M:replicate-to", "M:replicate-to-matching", "R:reflection-auto-namespaces", "R:reflection-auto-namespaces-selector"} {
				name := fmt.Sprintf("c/s%d", i)
				f.put(secret(name, "k=v", annotated(key+"="+long)))
				if strings.HasPrefix(key, "R:") {
					f.edit(name, autoPush(), annotated(key+"="+long))
				}
				o := f.Get(Key{Secret, parseName(name)})
				if size := len(f.digester.Digest(asObject(f.get(name)))); size > 1000 {
					f.t.Errorf("%s: the cache keeps %d bytes", key, size)
				}
				if problems := f.survey(o, f.now).Problems; len(problems) != 1 || !strings.Contains(problems[0].Text, fullKey(key)) {
					f.t.Errorf("%s: problems %v", key, problems)
				}
			}
		}},
		"no annotations of an object are read that are too long together": {nil, func(f *fixture) {
			b := secret("c/s", "k=v")
			for _, key := range annotations {
				b.Annotations[key] = strings.Repeat("x", maxPatternLength)
			}
			b.Annotations[Marker] = strings.Repeat("x", 200<<10)
			if size := len(f.digester.Digest(asObject(b))); size > 2*maxAnnotations {
				f.t.Errorf("the cache keeps %d bytes", size)
			}
		}},
		"a pattern is not longer than what it matches": {nil, func(f *fixture) {
			f.put(secret("c/s", "k=v", annotated("Q:push-to="+strings.Repeat("*", 64)))).expectSettled("", "InvalidAnnotation c/s")
		}},
		"ConfigMaps may be pulled as with the replicator, without opening Secrets": {func(o *Options) { o.AllowConfigMaps = true }, func(f *fixture) {
			f.put(configMap("a/s", "k=v"), secret("a/s", "k=v"), configMap("b/t", "", annotated("M:replicate-from=a/s")))
			f.put(secret("b/u", "", annotated("M:replicate-from=a/s"))).expectSettled("update b/t", "PermissionDenied b/u")
		}},
	})
}

func TestAmbiguousReflectorSelectorIsRefused(t *testing.T) {
	for _, selector := range []string{"a>1", "a<1", "a in (,x)", "a=1,a=2", "a=b=c", "("} {
		f := newFixture(t, nil)
		f.put(secret("a/s", "k=v", autoPush(), annotated("R:reflection-auto-namespaces-selector="+selector))).expectSettled("", "InvalidAnnotation a/s")
	}
}

func TestPatternsEndAtTheFirstThatIsSlow(t *testing.T) {
	f := newFixture(t, nil)
	long := strings.Repeat("x", 60)
	f.addNamespaces(long)
	f.put(secret("a/s", "k=v", autoPush("(x+x+)+y", "x+", "b", "[c].*")))
	expect := func(namespace, want string) {
		t.Helper()
		got := f.evaluator.pushClaim(f.Get(NewKey(Secret, "a", "s")), f.ns["a"], f.ns[namespace], f.now)
		text := "yes"
		if got.Answer != Yes {
			text = got.Reason + " " + got.Text
		}
		if text != want {
			t.Errorf("%s: %q, want %q", namespace, text, want)
		}
	}
	const tooLong = `PatternTimeout reflector.v1.k8s.emberstack.com/reflection-auto-namespaces: pattern "(x+x+)+y" takes too long to match`
	const paused = "PatternTimeout reflector.v1.k8s.emberstack.com/reflection-auto-namespaces: a pattern in this namespace took too long to match a while ago"
	expect("c", "yes")
	expect(long, tooLong) // and not "yes", although the next pattern matches
	expect("c", paused)
	expect("b", "yes")
	f.now = f.now.Add(timeoutPause - time.Second)
	expect(long, paused)
	f.now = f.now.Add(time.Second)
	expect("c", "yes")
	expect(long, tooLong)
	if survey := f.survey(f.Get(NewKey(Secret, "a", "s")), f.now); survey.RequeueAfter != timeoutPause {
		t.Errorf("the source is looked at again after %v", survey.RequeueAfter)
	}
}

func TestReplicatorPatternsAreBounded(t *testing.T) {
	for name, tc := range map[string]struct{ list, want string }{
		"a repeat":                             {"b|b[a-z0-9-]{62}", ""},
		"many that are plain":                  {strings.Repeat("team-.*-"+strings.Repeat("x", 200)+",", 60) + "b", ""},
		"an alternative for each of 80 names":  {"(" + strings.Repeat("team-of-a1|", 80) + "b)", ""},
		"more than one expression may hold":    {"(" + strings.Repeat("a|", 512) + "b)", InvalidPattern},
		"nested repeats within Go's limit":     {"((a{30}){30}b?){6}|b", InvalidPattern},
		"many repeats":                         {strings.Repeat("a{999}", 10) + "|b", InvalidPattern},
		"repeats in many patterns":             {strings.Repeat("a{999},", 10) + "[b]", InvalidPattern},
		"classes of thousands of ranges":       {strings.Repeat(`\pL`, 500) + "|b", InvalidPattern},
		"a parenthesis that would end ours":    {"b)|(?:a{1000}", InvalidPattern},
		"a quotation that would hide our end":  {`\Qb`, InvalidPattern},
		"more than the value of an annotation": {strings.Repeat("b", maxPatternLength) + "|b", InvalidPattern},
	} {
		t.Run(name, func(t *testing.T) {
			got := goRegexList(tc.list)(&Namespace{Name: "b"}, dotNetForbidden)
			if got.Reason != tc.want || (got.Answer == Yes) != (tc.want == "") {
				t.Errorf("%+v, want reason %q", got, tc.want)
			}
		})
	}
}

// TestPatternsTooSlowCountForAllNamespaces is about a list that takes milliseconds for each name,
// and seconds for all of them.
func TestPatternsTooSlowCountForAllNamespaces(t *testing.T) {
	f := newFixture(t, nil)
	for i := range 2000 {
		f.addNamespaces(fmt.Sprintf("%s-%d", strings.Repeat("x", 55), i))
	}
	f.put(secret("c/s", "k=v", autoPush(strings.Repeat("(x+)_,", 60)+"b")))
	survey := f.survey(f.Get(NewKey(Secret, "c", "s")), f.now)
	if survey.Spread != len(f.ns) || survey.RequeueAfter != timeoutPause || len(survey.Problems) != 1 || survey.Problems[0].Reason != PatternTimeout {
		t.Errorf("counts for %d namespaces, problems %v, again after %v", survey.Spread, survey.Problems, survey.RequeueAfter)
	}
}

func TestPatternsEndInTime(t *testing.T) {
	match := listParser(dotNetRegex)(".+x,a.+,[ab].*")
	ns := &Namespace{Name: "a-b"}
	if v := match(ns, time.Now().Add(time.Hour)); v.Answer != Yes {
		t.Errorf("%+v", v)
	}
	if v := match(ns, time.Now().Add(-time.Second)); v.Reason != PatternTimeout {
		t.Errorf("after its time: %+v", v)
	}
}

// TestPatternTimeLimitDoesNotCountWaiting has another evaluation run for longer than a source may take. It is
// in real time, since what is limited is.
func TestPatternTimeLimitDoesNotCountWaiting(t *testing.T) {
	f := newFixture(t, nil)
	f.put(secret("c/s", "k=v", autoPush("[a-z]+")))
	begun := make(chan bool)
	go patternlock.Do(func() bool {
		close(begun)
		<-time.After(listTimeout + 100*time.Millisecond)
		return true
	})
	<-begun
	if survey := f.survey(f.Get(NewKey(Secret, "c", "s")), f.now); len(survey.Namespaces) == 0 || survey.RequeueAfter != 0 {
		t.Errorf("%+v", survey)
	}
}

// TestClaimsTakeLittleMemory has many values that are as large as they may be when they are parsed.
func TestClaimsTakeLittleMemory(t *testing.T) {
	m := newMatchers(false)
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	for i := range 2 * maxParsed {
		for _, text := range []string{
			strings.Repeat(strings.Repeat("a", 250)+"?,", 64), strings.Repeat("(.*)(.*)a*b,", 60), strings.Repeat("(.+.+)+_,", 60),
			strings.Repeat(strings.Repeat("(a{9}){9}", 27)+",", 60), strings.Repeat(strings.Repeat("(", 120)+strings.Repeat(")", 120)+",", 60),
			strings.Repeat(strings.Repeat("a", maxExpression-2)+"?,", 15),
		} {
			text = fmt.Sprint(i, ",", text)[:min(len(text), maxPatternLength)]
			m.get("net", text, listParser(dotNetRegex))
			m.get("go", text, goRegexList)
		}
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	if growth := (int64(after.HeapAlloc) - int64(before.HeapAlloc)) >> 20; growth > 24 {
		t.Errorf("parsed values take %d MiB", growth)
	}
	runtime.KeepAlive(m)
}

// FuzzDecideWritesNothingForeign decides on random objects with random annotations. What is written
// must be a copy of a marked or covered kind or a pull target, whatever else there is.
func FuzzDecideWritesNothingForeign(f *testing.F) {
	for seed := range int64(50) {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, seed int64) {
		rnd := rand.New(rand.NewSource(seed))
		pick := func(list ...string) string { return list[rnd.Intn(len(list))] }
		cluster := newFixture(t, nil)
		names := []string{"a/s", "b/s", "c/s", "a/t", "b/t"}
		values := map[string][]string{
			"Q:push-to": {"b", "*", "!b", ""}, "Q:allow-pull": {"b", "*"}, "Q:pull-from": {"a/s", "b/s", "b/t", "x"},
			"R:reflection-allowed": {"true", "false", "1"}, "R:reflection-auto-enabled": {"true", "false"}, "R:reflection-auto-namespaces": {"b", "*", "b|c"},
			"R:reflects": {"a/s", "b/s", "b"}, "R:auto-reflects": {"True", "False"}, "M:replicate-to": {"b", ".*", "["}, "M:replicate-to-matching": {"", "x=y"},
			"M:replication-allowed": {"true", "x"}, "M:replication-allowed-namespaces": {".*", "b"}, "M:replicate-from": {"a/s", "c/s"},
			"M:replicated-from-version": {"1"}, "M:replicated-keys": {"", "k", "k,j"}, "kubectl.kubernetes.io/last-applied-configuration": {"{}"},
		}
		keys := slices.Sorted(maps.Keys(values))
		for range 30 {
			name := names[rnd.Intn(len(names))]
			switch rnd.Intn(6) {
			case 0:
				cluster.remove(name)
			case 1:
				if cluster.get(name) != nil {
					cluster.edit(name, holding(pick("k=1", "k=2 j=1", "own=1")))
				}
			default:
				b := secret(name, pick("k=1", "own=1", ""))
				for _, key := range keys {
					if rnd.Intn(6) == 0 {
						annotated(key + "=" + pick(values[key]...))(b)
					}
				}
				if rnd.Intn(8) == 0 {
					annotated("Q:source={\"copy\":\"" + name + "\",\"dialect\":\"native\",\"mode\":\"push\",\"source\":\"" + pick(names...) + "\",\"uid\":\"\"}")(b)
				}
				cluster.put(b)
			}
			cluster.now = cluster.now.Add(time.Minute)
			for key, before := range cluster.objects {
				p := cluster.evaluator.Decide(cluster, key, cluster.now)
				if p.Action == Nothing {
					continue
				}
				if p.Action == Create {
					t.Fatalf("%s would be created, but exists", key)
				}
				a := before.Annotations
				marked := strings.Contains(a[Marker], `"copy":"`+key.NamespacedName.String()+`"`)
				pulls := a[PullFrom] != "" || a[reflects] != "" || a[replicateFrom] != ""
				_, replicated := a[replicatedKeys]
				if !marked && !pulls && !replicated {
					t.Fatalf("%s of a foreign object %s: %v", p.Action, key, a)
				}
				if (p.Action == Delete || p.Action == Recreate) && (a[PullFrom] != "" || a[replicateFrom] != "") {
					t.Fatalf("%s of a pull target %s: %v", p.Action, key, a)
				}
			}
		}
	})
}
