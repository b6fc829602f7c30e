// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package configreload

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/configreload/policy"
)

// TestFlagsFillTheConfig has flags of which many have a mistake, and the flags that the error names.
func TestFlagsFillTheConfig(t *testing.T) {
	cfg := NewConfig()
	fs := pflag.NewFlagSet("test", pflag.ContinueOnError)
	cfg.AddFlags(fs)
	fs.VisitAll(func(f *pflag.Flag) {
		if !strings.HasPrefix(f.Name, "config-reload-") {
			t.Errorf("flag --%s lacks the prefix", f.Name)
		}
	})
	err := fs.Parse(strings.Fields(`--config-reload-strategy=env --config-reload-auto-all --config-reload-on-create
		--config-reload-on-delete --config-reload-include-namespaces=shop,Shop --config-reload-exclude-namespaces=a.b
		--config-reload-namespace-selector=(( --config-reload-source-selector=== --config-reload-exclude-sources=configMaps,Secrets,pods
		--config-reload-exclude-kinds=jobs,pods --config-reload-argo-rollouts --config-reload-annotation-key=nothing=no=key
		--config-reload-annotation-key=ignore=example.org/ignore --config-reload-quiet-period=-1ns --config-reload-max-delay=-2ns
		--config-reload-dry-run --config-reload-csi`))
	assert.NoError(t, err)
	want := Config{
		Options: policy.Options{
			Strategy: "env", AutoAll: true, OnCreate: true, OnDelete: true,
			AnnotationKeys: map[string]string{"nothing": "no=key", "ignore": "example.org/ignore"}, QuietPeriod: -1, MaxDelay: -2,
		},
		IncludeNamespaces: []string{"shop", "Shop"}, ExcludeNamespaces: []string{"a.b"}, NamespaceSelector: []string{"(("},
		SourceSelector: []string{"=="}, ExcludeSources: []string{"configMaps", "Secrets", "pods"}, ExcludeKinds: []string{"jobs", "pods"},
		ArgoRollouts: true, CSI: true, DryRun: true,
	}
	assert.Equal(t, "configuration", want, cfg)
	if err = cfg.Validate(controllers.Settings{}); err == nil {
		t.Fatal("no error")
	}
	var flags []string
	for line := range strings.SplitSeq(err.Error(), "\n") {
		name, _, _ := strings.Cut(line, ":")
		flags = append(flags, strings.TrimPrefix(name, "--config-reload-"))
	}
	wantFlags := strings.Fields(`strategy quiet-period max-delay namespace-selector source-selector
		include-namespaces exclude-namespaces exclude-sources exclude-sources exclude-kinds annotation-key annotation-key`)
	if diff := cmp.Diff(wantFlags, flags); diff != "" {
		t.Errorf("flags named differ (-want +got):\n%s\n%v", diff, err)
	}
}

func TestSelectorFlagTakesColonsAndStars(t *testing.T) {
	for name, tc := range map[string]struct {
		items         []string
		wants, leaves labels.Set
	}{
		"nothing selects everything":    {nil, labels.Set{"a": "b"}, nil},
		"the colon of old":              {[]string{"a:b"}, labels.Set{"a": "b"}, labels.Set{"a": "c"}},
		"a colon and a star":            {[]string{"a:*"}, labels.Set{"a": "x"}, labels.Set{"b": "x"}},
		"items must all hold":           {[]string{"a=b", "c"}, labels.Set{"a": "b", "c": ""}, labels.Set{"a": "b"}},
		"a set that the flag has split": {[]string{"a in (b", "c)"}, labels.Set{"a": "c"}, labels.Set{"a": "d"}},
	} {
		t.Run(name, func(t *testing.T) {
			s, err := parseSelector(tc.items)
			assert.NoError(t, err)
			if !s.Matches(tc.wants) || tc.leaves != nil && s.Matches(tc.leaves) {
				t.Errorf("%v does not select %v, or selects %v", s, tc.wants, tc.leaves)
			}
		})
	}
}

func TestPermissionsAreOnlyThoseUsed(t *testing.T) {
	for name, tc := range map[string]struct {
		configure func(*Config)
		want      []string // group, resources, verbs
	}{
		"without Jobs and CronJobs, also with compatibility": {func(c *Config) { c.Compat, c.ExcludeKinds = true, []string{"jobs", "cronjobs"} }, []string{
			"[apps] [deployments statefulsets daemonsets] [get patch]", "[apps] [deployments] [list]"}},
		"CronJobs alone create Jobs": {func(c *Config) {
			c.ExcludeKinds, c.ExcludeSources = []string{"jobs", "deployments", "statefulsets", "daemonsets"}, []string{"secrets"}
		}, []string{"[batch] [cronjobs] [get patch]", "[batch] [jobs] [get create]"}},
		"a dry run writes nothing to workloads": {func(c *Config) { c.DryRun = true }, []string{
			"[apps] [deployments statefulsets daemonsets] [get]", "[batch] [cronjobs jobs] [get]"}},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := NewConfig()
			tc.configure(&cfg)
			var got []string
			for _, rule := range permissions(cfg) {
				got = append(got, fmt.Sprint(rule.APIGroups, rule.Resources, rule.Verbs))
			}
			assert.Equal(t, "rules", tc.want, got)
		})
	}
}

func TestAnnotationKeysAreDistinct(t *testing.T) {
	for name, tc := range map[string]struct {
		keys map[string]string
		want string // in the error; empty: none
	}{
		"keys of one's own":            {map[string]string{"auto": "example.org/auto", "ignore": "example.org/ignore"}, ""},
		"two that change places":       {map[string]string{"auto": "reloader.stakater.com/ignore", "ignore": "reloader.stakater.com/auto"}, ""},
		"the key that it has":          {map[string]string{"auto": "reloader.stakater.com/auto"}, ""},
		"a native key":                 {map[string]string{"auto": "quartermaster.dev/reload"}, "quartermaster.dev/reload"},
		"the state":                    {map[string]string{"ignore": policy.StateKey}, policy.StateKey},
		"the mark of the original":     {map[string]string{"search-match": "reloader.stakater.com/last-reloaded-from"}, "reloader.stakater.com/last-reloaded-from"},
		"an exclusion of the original": {map[string]string{"configmap": "configmaps.exclude.reloader.stakater.com/reload"}, "configmaps.exclude"},
		"a key of CSI secrets":         {map[string]string{"auto": "secretproviderclass.reloader.stakater.com/auto"}, "secretproviderclass"},
		"one key for two names":        {map[string]string{"auto": "example.org/a", "ignore": "example.org/a"}, "key of ignore"},
		"the key of another name":      {map[string]string{"auto": "reloader.stakater.com/ignore"}, "key of ignore"},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := NewConfig()
			cfg.AnnotationKeys = tc.keys
			err := cfg.Validate(controllers.Settings{})
			if tc.want == "" && err != nil || tc.want != "" && (err == nil ||
				!strings.HasPrefix(err.Error(), "--config-reload-annotation-key: ") || !strings.Contains(err.Error(), tc.want)) {
				t.Errorf("error %v, want one with %q", err, tc.want)
			}
		})
	}
}

var webKey = policy.QueueKey{Kind: "Deployment", ObjectName: cache.NewObjectName("shop", "web")}

func TestMemoryForgetsAReplacedObject(t *testing.T) {
	cached, now := types.UID("old"), time.Unix(1, 0)
	m := newMemory(func(policy.QueueKey) types.UID { return cached })
	write := func(uid types.UID, version string) {
		m.update(webKey, uid, now, func(e *entry) { e.writtenVersion = version })
	}
	expect := func(name string, uid types.UID, last, written string) {
		t.Helper()
		if e := m.get(webKey, uid); e.lastState != last || e.writtenVersion != written {
			t.Errorf("%s: %+v", name, e)
		}
	}
	m.update(webKey, "old", now, func(e *entry) { e.lastState = "x" })
	expect("the new object of that name inherits", "new", "", "")
	write("new", "4")
	expect("an update of another object than the cache has", "old", "x", "")
	cached = "new"
	write("new", "5")
	expect("the new object", "new", "", "5")
	write("old", "")
	expect("the new object after a late update of the old one", "new", "", "5")
	waiting := &replacement{}
	m.update(webKey, "new", now, func(e *entry) { e.replacement = waiting })
	cached = "newer"
	write("newer", "6")
	if r, _ := m.replacement(webKey); r != waiting {
		t.Error("a Job that waits to be created again is forgotten for another one")
	}
	m.update(webKey, "new", now, func(e *entry) { e.writtenVersion, e.replacement = "", nil })
	if len(m.entries) != 0 {
		t.Errorf("%d entries are left with nothing to remember", len(m.entries))
	}
}

// What is pending of a source, or was handed to a workload, is one change, from the first old data to the
// last new ones.
func TestSourceChangesAreMerged(t *testing.T) {
	c := newChanges()
	source := policy.SourceKey{Type: policy.ConfigMap, Name: "app-config"}
	key := sourceKey("shop", source)
	a, b, d := policy.Source{Hash: "a"}, policy.Source{Hash: "b"}, policy.Source{Hash: "d"}
	at := func(s int64) time.Time { return time.Unix(s, 0) }
	c.add(key, change{a, b, at(1), at(1)})
	c.add(key, change{b, d, at(2), at(2)})
	if got, want := c.pending[key], (change{a, d, at(1), at(2)}); got != want {
		t.Errorf("pending %+v, want %+v", got, want)
	}
	if !c.distribute(key, source, []policy.QueueKey{webKey}) || c.distribute(key, source, []policy.QueueKey{webKey}) {
		t.Error("a change is not handed on exactly once")
	}
	c.add(key, change{d, a, at(3), at(3)})
	if got, want := c.take(webKey, map[policy.SourceKey]bool{source: true})[source], (change{a, a, at(1), at(3)}); got != want {
		t.Errorf("taken %+v, want %+v", got, want)
	}
	if c.distribute(key, source, nil); len(c.pending)+len(c.distributed) > 0 {
		t.Errorf("left: %v, %v", c.pending, c.distributed)
	}
}

func TestLongNamesLeaveRoomForASuffix(t *testing.T) {
	for name, want := range map[string]string{
		strings.Repeat("a", 63):               strings.Repeat("a", 52),
		strings.Repeat("a", 50) + "-.nightly": strings.Repeat("a", 50), // a dot before a hyphen is no name
	} {
		assert.Equal(t, name+" is cut to", want, cutName(name))
	}
}
