// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package configreload

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/labels"

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
		--config-reload-dry-run --config-reload-csi --config-reload-concurrent-syncs=0`))
	if err != nil {
		t.Fatal(err)
	}
	want := Config{
		Options: policy.Options{
			Strategy: "env", AutoAll: true, OnCreate: true, OnDelete: true,
			AnnotationKeys: map[string]string{"nothing": "no=key", "ignore": "example.org/ignore"}, QuietPeriod: -1, MaxDelay: -2,
		},
		IncludeNamespaces: []string{"shop", "Shop"}, ExcludeNamespaces: []string{"a.b"}, NamespaceSelector: []string{"(("},
		SourceSelector: []string{"=="}, ExcludeSources: []string{"configMaps", "Secrets", "pods"}, ExcludeKinds: []string{"jobs", "pods"},
		ArgoRollouts: true, CSI: true, DryRun: true,
	}
	if diff := cmp.Diff(want, cfg); diff != "" {
		t.Errorf("configuration differs (-want +got):\n%s", diff)
	}
	if err = cfg.Validate(controllers.Settings{}); err == nil {
		t.Fatal("no error")
	}
	var flags []string
	for line := range strings.SplitSeq(err.Error(), "\n") {
		name, _, _ := strings.Cut(line, ":")
		flags = append(flags, strings.TrimPrefix(name, "--config-reload-"))
	}
	wantFlags := strings.Fields(`strategy quiet-period max-delay concurrent-syncs namespace-selector source-selector
		include-namespaces exclude-namespaces exclude-sources exclude-sources exclude-kinds annotation-key annotation-key`)
	if diff := cmp.Diff(wantFlags, flags); diff != "" {
		t.Errorf("flags named differ (-want +got):\n%s\n%v", diff, err)
	}
}

func TestParseSelector(t *testing.T) {
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
			if err != nil {
				t.Fatal(err)
			}
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
			"[] [configmaps secrets] [list watch]", "[apps] [deployments statefulsets daemonsets] [get list watch patch]", "[apps] [deployments] [list]"}},
		"CronJobs alone create Jobs": {func(c *Config) {
			c.ExcludeKinds, c.ExcludeSources = []string{"jobs", "deployments", "statefulsets", "daemonsets"}, []string{"secrets"}
		}, []string{"[] [configmaps] [list watch]", "[batch] [cronjobs] [get list watch patch]", "[batch] [jobs] [get list watch create]"}},
		"a dry run writes nothing to workloads": {func(c *Config) { c.DryRun = true }, []string{
			"[] [configmaps secrets] [list watch]", "[apps] [deployments statefulsets daemonsets] [get list watch]", "[batch] [cronjobs jobs] [get list watch]"}},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := NewConfig()
			tc.configure(&cfg)
			var got []string
			for _, rule := range permissions(cfg) {
				got = append(got, fmt.Sprint(rule.APIGroups, rule.Resources, rule.Verbs))
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("rules differ (-want +got):\n%s", diff)
			}
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
