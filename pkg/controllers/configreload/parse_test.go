// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package configreload

import (
	"crypto/sha1"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"maps"
	"regexp/syntax"
	goruntime "runtime"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"pgregory.net/rapid"
)

func TestDigest(t *testing.T) {
	withLogo := cm1()
	withLogo.BinaryData = map[string][]byte{"logo": {0, 1, 2}}
	labelled := cm1()
	labelled.Labels, labelled.Annotations = map[string]string{"a": "b"}, map[string]string{"c": "d"}
	typed := db1()
	typed.Type, typed.Immutable = corev1.SecretTypeBasicAuth, new(bool)
	cases := map[string]struct {
		obj  runtime.Object
		want string
	}{
		"a ConfigMap":                          {cm1(), h1},
		"a ConfigMap with another value":       {cm2(), h2},
		"binary data is base64":                {withLogo, "4ca47105f0885b645d203c1429e8e67240089548"},
		"entries are sorted as whole strings":  {cm("x", "a", "1", "a-b", "2", "a_b", "3"), "6d9fa262396e8ec8a6a340d703d02f93fef57e6a"},
		"a Secret":                             {db1(), p1},
		"a Secret with another value":          {db2(), p2},
		"a Secret's bytes are raw":             {&corev1.Secret{Data: map[string][]byte{"raw": {0xff, 0}}}, "3f545a5f4ba0fe837544ce9e2d258c6131fbfc19"},
		"no data at all":                       {cm("x"), "da39a3ee5e6b4b0d3255bfef95601890afd80709"},
		"labels and annotations do not count":  {labelled, h1},
		"a Secret's type and immutable do not": {typed, p1},
		"a separator in a value may collide":   {cm("x", "a", "1;b=2"), hex.EncodeToString(DigestConfigMap(cm("x", "a", "1", "b", "2")))},
	}
	digest, err := SourceDigest(DefaultConfig())
	if err != nil {
		t.Fatal(err)
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			if got := hex.EncodeToString(digest(tc.obj)); got != tc.want {
				t.Errorf("digest = %s, want %s", got, tc.want)
			}
		})
	}
	if sum := sha1.Sum([]byte("__RELOADER_EMPTY_DELETE_MARKER__")); hex.EncodeToString(sum[:]) != deletedHash {
		t.Errorf("hash of a deletion = %x, want %s", sum, deletedHash)
	}
}

// The digest never builds the whole text; this test does.
func TestDigestEqualsThatOfTheWholeText(t *testing.T) {
	key := rapid.StringMatching(`[-._a-c=]{1,4}`).Filter(func(s string) bool { return !strings.Contains(s, "=") })
	rapid.Check(t, func(t *rapid.T) {
		data := rapid.MapOf(key, rapid.StringMatching(`[-;=a-c]{0,3}`)).Draw(t, "data")
		binary := rapid.MapOf(key, rapid.SliceOfN(rapid.Byte(), 0, 5)).Draw(t, "binary")
		maps.DeleteFunc(binary, func(k string, _ []byte) bool { _, both := data[k]; return both })
		var entries, secretEntries []string
		for k, v := range data {
			entries = append(entries, k+"="+v)
		}
		for k, v := range binary {
			entries = append(entries, k+"="+base64.StdEncoding.EncodeToString(v))
			secretEntries = append(secretEntries, k+"="+string(v))
		}
		check := func(got []byte, entries []string) {
			slices.Sort(entries)
			if want := sha1.Sum([]byte(strings.Join(entries, ";"))); !slices.Equal(got, want[:]) {
				t.Errorf("digest of %q = %x, want %x", entries, got, want)
			}
		}
		check(DigestConfigMap(&corev1.ConfigMap{Data: data, BinaryData: binary}), entries)
		check(DigestSecret(&corev1.Secret{Data: binary}), secretEntries)
	})
}

func TestVariable(t *testing.T) {
	cases := map[string]struct {
		key  sourceKey
		want string
	}{
		"a hyphen is an underscore":               {sourceKey{configMap, "app-config"}, "STAKATER_APP_CONFIG_CONFIGMAP"},
		"so is a dot":                             {sourceKey{secret, "db.creds"}, "STAKATER_DB_CREDS_SECRET"},
		"a run of them is one":                    {sourceKey{configMap, "a--b"}, "STAKATER_A_B_CONFIGMAP"},
		"digits stay":                             {sourceKey{secret, "1-x"}, "STAKATER_1_X_SECRET"},
		"there is none at the start":              {sourceKey{secret, ".x"}, "STAKATER_X_SECRET"},
		"two names may come to the same variable": {sourceKey{configMap, "app.config"}, "STAKATER_APP_CONFIG_CONFIGMAP"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			if got := variable(tc.key); got != tc.want {
				t.Errorf("variable of %s = %s, want %s", tc.key, got, tc.want)
			}
		})
	}
}

// Whoever may annotate a workload must not be able to exhaust the manager.
func TestAnAnnotationCostsOnlySoMuch(t *testing.T) {
	const size = 200 << 10
	var optional strings.Builder
	for i := range 490 {
		fmt.Fprintf(&optional, "%c?", '\u4e00'+i)
	}
	cfg := DefaultConfig()
	cfg.Compat = true
	k := newKeys(&cfg)
	for name, tc := range map[string]struct{ key, item string }{
		"repetitions":                      {kCM, "x{1000}"},
		"repetitions of repetitions":       {kCM, "((x*y?){30}){30}"},
		"one long item":                    {kCM, "(" + strings.Repeat("a?", 1500) + "){1000}"},
		"classes":                          {kCM, `\pL\pN\PL[^\pL]`},
		"optional parts":                   {kCM, optional.String()},
		"one long item of classes":         {kCM, strings.Repeat(`\pL`, size/3)},
		"wildcards":                        {kCM, ".*"},
		"what does not compile":            {kCM, "["},
		"what takes long not to compile":   {kCM, strings.Repeat(`\pL`, 300) + "["},
		"names":                            {kCM, "a"},
		"names with a dot":                 {kCM, "app.config"},
		"native wildcards":                 {nativeReload, "configmap/a*b*c"},
		"native wildcards of exclusions":   {nativeReload, "!configmap/a*b*c"},
		"native items that are not native": {nativeReload, "pod/x"},
		"exclusions":                       {kCMExclude, "a"},
	} {
		t.Run(name, func(t *testing.T) {
			value := "app-config," + strings.Repeat(tc.item+",", size/len(tc.item))
			if tc.key == nativeReload {
				value = "configmap/" + value
			}
			var before, after goruntime.MemStats
			goruntime.ReadMemStats(&before)
			r, problems := k.parse(map[string]string{tc.key: value}, nil)
			goruntime.ReadMemStats(&after)
			if got := (after.TotalAlloc - before.TotalAlloc) >> 20; got > 64 {
				t.Errorf("%d MiB allocated", got)
			}
			patterns := slices.Concat(r.types[configMap].named, r.types[configMap].excluded)
			steps := 0
			for _, p := range patterns {
				if p.re == nil {
					continue
				}
				parsed, err := syntax.Parse(p.re.String(), syntax.Perl)
				if err != nil {
					t.Fatal(err)
				}
				program, err := syntax.Compile(parsed.Simplify())
				if err != nil {
					t.Fatal(err)
				}
				steps += len(program.Inst)
			}
			if len(r.types[configMap].named) > maxNames || steps > 2*maxExpressions {
				t.Errorf("%d names, expressions of %d steps", len(r.types[configMap].named), steps)
			}
			for _, p := range problems {
				if len(p.String()) > 600 {
					t.Errorf("problem of %d bytes", len(p.String()))
				}
			}
			if tc.key != kCMExclude && len(problems) != 1 {
				t.Errorf("problems %.1000s", problems)
			}
			if !matchesAny(patterns, "app-config") && !r.types[configMap].never {
				t.Error("what is before it does not count")
			}
		})
	}
}

func TestWhatFitsBesideWhatIsTooLargeCounts(t *testing.T) {
	cfg := DefaultConfig()
	cfg.Compat = true
	k := newKeys(&cfg)
	var dotted, globs strings.Builder
	for i := range maxNames - 1 {
		fmt.Fprintf(&dotted, "payments-service-%03d.production.config,", i)
		fmt.Fprintf(&globs, "!configmap/team-checkout-feature-flags-%03d-*,", i)
	}
	for name, tc := range map[string]struct {
		key, value string
		want       match
		problems   int
	}{
		"names with dots are no expressions":                   {kCM, dotted.String() + "app-config", named, 0},
		"a dot of a name stands for any character":             {kCM, "app.config", named, 0},
		"a dot stands for one character":                       {kCM, "app..config,ap.config", no, 0},
		"an expression that repeats too often":                 {kCM, "(xyxyxyxyxyxy){900},app-.*", named, 1},
		"an expression that is too long":                       {kCM, strings.Repeat("x*", maxExpressions) + ",app-.*", named, 1},
		"exclusions beside many names":                         {nativeReload, "auto," + strings.ReplaceAll(globs.String(), "!", "") + "!configmap/other-*", auto, 1},
		"exclusions that do not fit exclude everything":        {nativeReload, "auto," + globs.String(), no, 1},
		"exclusions that do not fit exclude names as well":     {nativeReload, "configmap/app-config," + globs.String(), no, 1},
		"exclusions that do not fit exclude nothing elsewhere": {nativeReload, "auto," + strings.ReplaceAll(globs.String(), "configmap", "secret"), auto, 1},
	} {
		t.Run(name, func(t *testing.T) {
			r, problems := k.parse(map[string]string{tc.key: tc.value}, nil)
			if got := r.match(sourceKey{configMap, "app-config"}, source{}); got != tc.want {
				t.Errorf("match = %v, want %v", got, tc.want)
			}
			if len(problems) != tc.problems {
				t.Errorf("problems %.500s, want %d", problems, tc.problems)
			}
		})
	}
}

func FuzzParseCompat(f *testing.F) {
	for _, seed := range []string{"app-config", "x, app-.*", "[, a", "a|b", ",,", "(?i)A", "a{1000}", "db.creds"} {
		f.Add(seed, "other, x", "app-config")
	}
	cfg := DefaultConfig()
	cfg.Compat = true
	k := newKeys(&cfg)
	f.Fuzz(func(t *testing.T, list, exclude, name string) {
		r, problems := k.parse(map[string]string{kCM: list, kCMExclude: exclude}, nil)
		items := 0
		for item := range strings.SplitSeq(list, ",") {
			if strings.TrimSpace(item) != "" {
				items++
			}
		}
		if got := len(r.types[configMap].named); got != items && (len(problems) == 0 || got > items) {
			t.Errorf("%d of %d items of %q count, and the problems are %v", got, items, list, problems)
		}
		key := sourceKey{configMap, name}
		m := r.match(key, source{})
		for item := range strings.SplitSeq(exclude, ",") {
			if strings.TrimSpace(item) == name && name != "" && m != no {
				t.Errorf("%q is excluded by %q and matched all the same", name, exclude)
			}
		}
		if isName(name) && r.waitsFor(key) && m == no && !matchesAny(r.types[configMap].excluded, name) {
			t.Errorf("%q is waited for by %q and does not match", name, list)
		}
		if r.types[secret].named != nil || r.native {
			t.Error("a list of ConfigMaps names Secrets")
		}
	})
}

func FuzzParseNative(f *testing.F) {
	for _, seed := range []string{"auto", "off", "auto,!secret/db", "configmap/app-*", "configmap/**", "configmap/.*", "pod/x", "!", "secret/"} {
		f.Add(seed, "app-config")
	}
	cfg := DefaultConfig()
	k := newKeys(&cfg)
	f.Fuzz(func(t *testing.T, value, name string) {
		r, problems := k.parse(map[string]string{nativeReload: value}, nil)
		if !r.native {
			t.Error("not native")
		}
		items := slices.Collect(items(value))
		if slices.Contains(items, "off") {
			if r.types[configMap].auto || r.types[configMap].named != nil || len(problems) > 0 {
				t.Errorf("%q does more than off", value)
			}
			return
		}
		if isName(name) && slices.Contains(items, "configmap/"+name) && !slices.ContainsFunc(items, func(i string) bool { return strings.HasPrefix(i, "!") }) &&
			r.match(sourceKey{configMap, name}, source{}) != named {
			t.Errorf("%q does not name %q", value, name)
		}
	})
}

func FuzzParseState(f *testing.F) {
	for _, seed := range []string{`{}`, `{"configmap/app-config":"021bc5a93e1158e6","secret/db":""}`, `{"pod/x":""}`, `null`, `[]`, `{"secret/x":"zz"}`} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		s, err := parseState(text)
		if err != nil {
			return
		}
		again, err := parseState(s.String())
		if len(s) > 0 && (err != nil || !maps.Equal(s, again)) {
			t.Errorf("state %q becomes %q, error %v", text, s, err)
		}
	})
}

func FuzzVariable(f *testing.F) {
	for _, seed := range []string{"app-config", "db.creds", "a--b", "1-x", "-", "ä"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, name string) {
		got := variable(sourceKey{secret, name})
		core, ok := strings.CutSuffix(strings.TrimPrefix(got, "STAKATER_"), "_SECRET")
		if !ok || strings.Trim(core, "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_") != "" || strings.Contains(core, "__") || strings.HasPrefix(core, "_") {
			t.Errorf("variable of %q = %q", name, got)
		}
	})
}

func FuzzPauseAndDelay(f *testing.F) {
	f.Add("5m", "2000-01-01T00:00:00Z", "1s")
	f.Add("soon", "yesterday", "-1s")
	f.Add("2562047h47m16.854775807s", "9999-12-31T23:59:59Z", "0")
	cfg := DefaultConfig()
	cfg.Compat = true
	k := newKeys(&cfg)
	f.Fuzz(func(t *testing.T, period, since, delay string) {
		d := deploy(pod(), kPause, period, kPausedAt, since, nativeDelay, delay)
		d.Spec.Paused = true
		w, err := newWorkload("Deployment", d)
		if err != nil {
			t.Fatal(err)
		}
		step, left := k.pauseState(w, &rules{}, unixStart)
		if (step == pauseStands) != (left > 0) {
			t.Errorf("step %d with %v left", step, left)
		}
		if d, ok := w.reloadDelay(); ok && d <= 0 {
			t.Errorf("delay %v", d)
		}
	})
}
