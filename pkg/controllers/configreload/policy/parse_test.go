// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"crypto/sha1"
	"encoding/hex"
	"fmt"
	"regexp/syntax"
	goruntime "runtime"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
)

const (
	kCM        = "configmap.reloader.stakater.com/reload"
	kCMExclude = "configmaps.exclude.reloader.stakater.com/reload"
)

func cm(data ...string) *corev1.ConfigMap {
	c := &corev1.ConfigMap{Data: map[string]string{}}
	for i := 0; i < len(data); i += 2 {
		c.Data[data[i]] = data[i+1]
	}
	return c
}

func TestDigestFollowsTheData(t *testing.T) {
	color := func() *corev1.ConfigMap { return cm("color", "blue", "size", "10") }
	withLogo, labelled := color(), color()
	withLogo.BinaryData = map[string][]byte{"logo": {0, 1, 2}}
	labelled.Labels, labelled.Annotations = map[string]string{"a": "b"}, map[string]string{"c": "d"}
	typed := &corev1.Secret{Data: map[string][]byte{"user": []byte("admin"), "password": []byte("s3cr3t")}, Type: corev1.SecretTypeBasicAuth, Immutable: new(bool)}
	podStatus := func(class string, objects ...any) runtime.Object {
		return &unstructured.Unstructured{Object: map[string]any{"status": map[string]any{"secretProviderClassName": class, "objects": objects}}}
	}
	object := func(id, version string) any { return map[string]any{"id": id, "version": version} }
	sum := sha1.Sum([]byte("SecretProviderClassName=vault;secret/a=1;secret/b=2"))
	for name, tc := range map[string]struct {
		obj  runtime.Object
		want string
	}{
		"binary data is base64":                             {withLogo, "4ca47105f0885b645d203c1429e8e67240089548"},
		"entries are sorted as whole strings":               {cm("a", "1", "a-b", "2", "a_b", "3"), "6d9fa262396e8ec8a6a340d703d02f93fef57e6a"},
		"a Secret's bytes are raw":                          {&corev1.Secret{Data: map[string][]byte{"raw": {0xff, 0}}}, "3f545a5f4ba0fe837544ce9e2d258c6131fbfc19"},
		"no data at all":                                    {cm(), "da39a3ee5e6b4b0d3255bfef95601890afd80709"},
		"a ConfigMap's labels and annotations do not count": {labelled, "fc284a838ce31ea4fb2467fe13c7ac02add6ef3c"},
		"a Secret's type and immutable do not":              {typed, "e013dcfd8b3a9e80e812740978788202e1ef1325"},
		"what a pod has mounted of a class":                 {podStatus("vault", object("secret/b", "2"), object("secret/a", "1")), hex.EncodeToString(sum[:]) + "vault"},
		"a pod that has mounted nothing yet":                {podStatus("vault"), ""},
	} {
		t.Run(name, func(t *testing.T) {
			hash, class := ParseDigest(DigestSource(tc.obj, labels.Everything()))
			if got := hash + class; got != tc.want {
				t.Errorf("digest = %s, want %s", got, tc.want)
			}
		})
	}
	if sum := sha1.Sum([]byte("__RELOADER_EMPTY_DELETE_MARKER__")); hex.EncodeToString(sum[:]) != deletedHash {
		t.Errorf("hash of a deletion = %x, want %s", sum, deletedHash)
	}
}

func TestVariableNamesItsSource(t *testing.T) {
	for key, want := range map[SourceKey]string{
		{ConfigMap, "a--b.c"}: "STAKATER_A_B_C_CONFIGMAP",
		{Secret, "1-x"}:       "STAKATER_1_X_SECRET",
		{Secret, ".x"}:        "STAKATER_X_SECRET",
	} {
		if got := variable(key); got != want {
			t.Errorf("variable of %s = %s, want %s", key, got, want)
		}
	}
}

func compatKeys() *AnnotationKeys { return NewAnnotationKeys(&Options{Compat: true}, SourceTypes) }

// Whoever may annotate a workload must not be able to exhaust the manager.
func TestParseCostIsBounded(t *testing.T) {
	k := compatKeys()
	var optional strings.Builder
	for i := range 490 {
		fmt.Fprintf(&optional, "%c?", '\u4e00'+i)
	}
	for name, list := range map[string]struct{ key, item string }{
		"repetitions":                    {kCM, "x{1000}"},
		"repetitions of repetitions":     {kCM, "((x*y?){30}){30}"},
		"one long item":                  {kCM, "(" + strings.Repeat("a?", 1500) + "){1000}"},
		"classes":                        {kCM, `\pL\pN\PL[^\pL]`},
		"optional parts":                 {kCM, optional.String()},
		"one long item of classes":       {kCM, strings.Repeat(`\pL`, 3000)},
		"wildcards":                      {kCM, ".*"},
		"what takes long not to compile": {kCM, strings.Repeat(`\pL`, 300) + "["},
		"native wildcards":               {nativeReload, "configmap/a*b*c"},
		"native wildcards of exclusions": {nativeReload, "!configmap/a*b*c"},
	} {
		t.Run(name, func(t *testing.T) {
			value := strings.Repeat(list.item+",", maxList/(len(list.item)+1))
			var before, after goruntime.MemStats
			goruntime.ReadMemStats(&before)
			r := k.parse(map[string]string{list.key: value}, nil)
			goruntime.ReadMemStats(&after)
			if got := (after.TotalAlloc - before.TotalAlloc) >> 20; got > 64 {
				t.Errorf("%d MiB allocated", got)
			}
			if re := r.types[ConfigMap].named.re; re != nil {
				parsed, _ := syntax.Parse(re.String(), syntax.Perl) // as regexp did
				program, err := syntax.Compile(parsed.Simplify())
				if err != nil || len(program.Inst) > 2*maxSteps+maxList {
					t.Errorf("expressions of %d steps, %v", len(program.Inst), err)
				}
			}
			for _, p := range r.Problems {
				if len(p.String()) > 600 {
					t.Errorf("problem of %d bytes", len(p.String()))
				}
			}
		})
	}
}

func TestParseRefusesWhatDoesNotFit(t *testing.T) {
	k := compatKeys()
	long := func(item string) string { return strings.Repeat(item+",", maxList/len(item)) }
	for name, tc := range map[string]struct {
		meta map[string]string
		want Match
		bad  int
	}{
		"a dot of a name stands for any character":           {map[string]string{kCM: "app.config"}, Named, 0},
		"a dot stands for one character":                     {map[string]string{kCM: "app..config,ap.config"}, No, 0},
		"any text in the middle and at the end":              {map[string]string{kCM: "a.*-co.*"}, Named, 0},
		"any text at the start, and a character":             {map[string]string{kCM: ".*.onfig"}, Named, 0},
		"any text in a part of the name":                     {map[string]string{kCM: "app-.*con,pp-.*,.*-"}, No, 0},
		"what repeats another character than a dot":          {map[string]string{kCM: "app-*,app*config"}, No, 0},
		"an expression that repeats too often, others count": {map[string]string{kCM: "(xyxyxyxyxyxy){900},app-.*"}, Named, 1},
		"two expressions with groups of one name":            {map[string]string{kCM: "(?P<x>db),(?P<x>app)-.*"}, Named, 0},
		"an expression that quotes leaves the next alone":    {map[string]string{kCM: `x\Q,app-.*`}, Named, 0},
		"a list that is too long":                            {map[string]string{kCM: "app-config," + long("x")}, No, 1},
		"exclusions that are too long exclude everything":    {map[string]string{kCM: "app-config", kCMExclude: long("x")}, No, 1},
		"a native list that is too long":                     {map[string]string{nativeReload: "auto," + long("configmap/x")}, No, 1},
		"a native expression is no name, others count":       {map[string]string{nativeReload: "configmap/.*,configmap/app-config"}, Named, 1},
		"off contradicts auto":                               {map[string]string{nativeReload: "off,auto"}, No, 1},
		"auto contradicts off":                               {map[string]string{nativeReload: "configmap/app-*,off"}, No, 1},
		"off alone does not":                                 {map[string]string{nativeReload: "off,"}, No, 0},
	} {
		t.Run(name, func(t *testing.T) {
			r := k.parse(tc.meta, nil)
			if got := r.match(SourceKey{ConfigMap, "app-config"}, Source{}); got != tc.want {
				t.Errorf("match = %v, want %v", got, tc.want)
			}
			if len(r.Problems) != tc.bad {
				t.Errorf("problems %.500s, want %d", r.Problems, tc.bad)
			}
		})
	}
}

// An index is asked where the events of all workloads wait, so no expression is parsed for it.
func TestOutlineHasNoExpressions(t *testing.T) {
	k := compatKeys()
	for name, tc := range map[string]struct {
		list     string
		patterns bool
		names    int
	}{
		"expressions":      {strings.Repeat("(x*y?){30},", 100), true, 0},
		"names":            {"a,b,c", false, 3},
		"some of each":     {"a,b.*", true, 1},
		"a name with dots": {"a.b", true, 1},
	} {
		t.Run(name, func(t *testing.T) {
			r := k.Outline(&Workload{Kind: &Kind{Name: "Deployment"}, Meta: map[string]string{kCM: tc.list}})
			names := 0
			for range r.Names {
				names++
			}
			if r.NamesByPattern(ConfigMap) != tc.patterns || names != tc.names || r.types[ConfigMap].named.re != nil || len(r.Problems) > 0 {
				t.Errorf("%+v", r)
			}
		})
	}
}

func TestStateOfAnotherFormIsRefused(t *testing.T) {
	for _, text := range []string{`[]`, `{"pod/x":""}`, `{"secret/x":"zzzzzzzzzzzzzzzz"}`} {
		if s, err := ParseState(text, QueueKey{}); err == nil {
			t.Errorf("%s is the state %v", text, s)
		}
	}
}
