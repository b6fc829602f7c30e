// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"slices"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
)

var now = time.Date(2026, 11, 24, 12, 0, 0, 0, time.UTC)

// object reads YAML as a client reads JSON. What has no kind, name or namespace gets one.
func object(t *testing.T, text string) *unstructured.Unstructured {
	t.Helper()
	data, err := yaml.YAMLToJSON([]byte("{kind: Thing, " + text + "}"))
	if err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	u := &unstructured.Unstructured{}
	if err := u.UnmarshalJSON(data); err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	if u.GetName() == "" {
		u.SetName("f")
		u.SetNamespace("ns")
	}
	return u
}

// federated is a federated object with this spec.
func federated(t *testing.T, spec string) *Federated {
	t.Helper()
	return ReadFederated(object(t, "spec: {"+spec+"}"))
}

// typeOf is the FederatedTypeConfig of one of the ten types, or of a Widget.
func typeOf(kind string) *TypeConfig {
	target := Resource{Version: "v1", Kind: kind, PluralName: defaultPlural(kind), Scope: "Namespaced"}
	switch kind {
	case "Deployment", "ReplicaSet":
		target.Group = "apps"
	case "Job":
		target.Group = "batch"
	case "Ingress":
		target.Group = "networking.k8s.io"
	case "Widget":
		target.Group = "example.com"
	case "Namespace", "ClusterRole":
		target.Scope = "Cluster"
	}
	if kind == "ClusterRole" {
		target.Group = "rbac.authorization.k8s.io"
	}
	federatedType := Resource{Group: "types.kubefed.io", Version: "v1beta1", Kind: "Federated" + kind, PluralName: defaultPlural("Federated" + kind), Scope: target.Scope}
	if kind == "Namespace" {
		federatedType.Scope = "Namespaced"
	}
	return &TypeConfig{Name: target.GroupResource().String(), TypeSpec: TypeSpec{Target: target, Federated: federatedType, Propagation: enabled}}
}

func TestInvalidConfigFieldsGetDefaults(t *testing.T) {
	change := func(change func(*Config)) Config {
		c := DefaultConfig()
		change(&c)
		return c
	}
	tests := map[string]struct {
		spec   string
		want   Config
		errors bool
	}{
		"only the scope, so that all else is the default": {spec: "scope: Cluster", want: DefaultConfig()},
		"the scope Namespaced":                            {spec: "scope: Namespaced", want: change(func(c *Config) { c.Namespaced = true })},
		"an unknown scope":                                {spec: "scope: Galaxy", want: DefaultConfig(), errors: true},
		"delays": {spec: "scope: Cluster, controllerDuration: {availableDelay: 5s, unavailableDelay: 2m}",
			want: change(func(c *Config) { c.AvailableDelay, c.UnavailableDelay = 5*time.Second, 2*time.Minute })},
		"probes": {spec: "scope: Cluster, clusterHealthCheck: {period: 1s, timeout: 2s, failureThreshold: 4, successThreshold: 5}",
			want: change(func(c *Config) {
				c.ProbePeriod, c.ProbeTimeout, c.FailureThreshold, c.SuccessThreshold = time.Second, 2*time.Second, 4, 5
			})},
		"gates, of which an unknown one is ignored": {spec: "scope: Cluster, featureGates: [{name: PushReconciler, configuration: Disabled}, {name: SchedulerPreferences, configuration: Disabled}, " +
			"{name: RawResourceStatusCollection, configuration: Enabled}, {name: Other, configuration: Perhaps}]",
			want: change(func(c *Config) { c.PushReconciler, c.SchedulerPreferences, c.RawStatusCollection = false, false, true })},
		"no adoption":                         {spec: "scope: Cluster, syncController: {adoptResources: Disabled}", want: change(func(c *Config) { c.AdoptResources = false })},
		"fields that are not used":            {spec: "scope: Cluster, leaderElect: {resourceLock: configmaps}, statusController: {}", want: DefaultConfig()},
		"a period of nothing":                 {spec: "scope: Cluster, clusterHealthCheck: {period: 0s}", want: DefaultConfig(), errors: true},
		"a threshold of nothing":              {spec: "scope: Cluster, clusterHealthCheck: {failureThreshold: 0}", want: DefaultConfig(), errors: true},
		"a gate that is neither on nor off":   {spec: "scope: Cluster, featureGates: [{name: PushReconciler, configuration: Perhaps}]", want: DefaultConfig(), errors: true},
		"adoption that is neither on nor off": {spec: "scope: Cluster, syncController: {adoptResources: Perhaps}", want: DefaultConfig(), errors: true},
		"a number where a duration belongs":   {spec: "scope: Cluster, clusterHealthCheck: {period: 7}", want: DefaultConfig(), errors: true},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			got, err := ReadConfig(object(t, "spec: {"+tc.spec+"}").Object)
			if (err != nil) != tc.errors {
				t.Error(err)
			}
			assert.Equal(t, "configuration", tc.want, got)
		})
	}
}

// TestHealthChangesAfterItsThresholds follows the states through probes: w is well, u another answer, n no
// answer, m no client.
func TestHealthChangesAfterItsThresholds(t *testing.T) {
	results := map[rune]ProbeResult{'w': Healthy, 'u': Unhealthy, 'n': NoAnswer, 'm': NoClient}
	tests := map[string]struct {
		status         string
		success        int64
		probes, states string
	}{
		"one bad probe after ten good ones changes nothing":                       {probes: "wwwwwwwwwwn", states: "wwwwwwwwwww"},
		"three bad probes in a row end readiness, and one good probe restores it": {probes: "wnnnw", states: "wwwnw"},
		"a good probe in between starts the count again":                          {probes: "wnnwn", states: "wwwww"},
		"a new leader starts from the status":                                     {status: "conditions: [{type: Ready, status: 'True'}]", probes: "nnn", states: "wwn"},
		"no status, so that the first result counts":                              {probes: "n", states: "n"},
		"KubeFed's Offline alone is no Ready":                                     {status: "conditions: [{type: Offline, status: 'True'}]", success: 2, probes: "w", states: "w"},
		"not ready in the status":                                                 {status: "conditions: [{type: Ready, status: 'False'}]", success: 2, probes: "ww", states: "uw"},
		"offline in the status":                                                   {status: "conditions: [{type: Offline, status: 'True'}, {type: Ready, status: 'False'}]", success: 2, probes: "w", states: "n"},
		"malformed in the status":                                                 {status: "conditions: [{type: ConfigMalformed, status: 'True'}, {type: Ready, status: 'False'}]", success: 2, probes: "w", states: "m"},
		"no client counts at once":                                                {probes: "wm", states: "wm"},
		"a bad result of another kind shows at once":                              {probes: "nu", states: "nu"},
		"different bad results count together":                                    {probes: "wnun", states: "wwwn"},
		"two good probes are needed":                                              {success: 2, probes: "nwnww", states: "nnnnw"},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			config := DefaultConfig()
			config.SuccessThreshold = max(tc.success, 1)
			h := StartHealth(ReadCluster(object(t, "status: {"+tc.status+"}")).Status)
			for i, probe := range tc.probes {
				if h = h.Next(results[probe], "", config); h.State != results[rune(tc.states[i])] {
					t.Fatalf("probe %d: state %v, want %c", i, h.State, tc.states[i])
				}
				if h.Ready() != (tc.states[i] == 'w') {
					t.Errorf("probe %d: ready: %t", i, h.Ready())
				}
			}
		})
	}
	if ReadHealthz(200, "OK") != Healthy || ReadHealthz(200, "okay") != Unhealthy || ReadHealthz(200, "ok\n") != Unhealthy || ReadHealthz(500, "ok") != Unhealthy || ReadHealthz(302, "ok") != Unhealthy {
		t.Error("what an answer means")
	}
}

func TestConditionsTellTheResultOfTheProbe(t *testing.T) {
	const no, yes = "False", "True"
	tests := map[string]struct {
		result ProbeResult
		want   [][4]string
	}{
		"200 and ok":     {result: Healthy, want: [][4]string{{"Ready", yes, "ClusterReady", "/healthz responded with ok"}}},
		"another answer": {result: Unhealthy, want: [][4]string{{"Ready", no, "ClusterNotReady", "/healthz responded without ok"}, {"Offline", no, "ClusterReachable", "cluster is reachable"}}},
		"no answer": {result: NoAnswer, want: [][4]string{{"Offline", yes, "ClusterNotReachable", "cluster is not reachable: refused"},
			{"Ready", no, "ClusterNotReachable", "cluster is not reachable: refused"}}},
		"no client": {result: NoClient, want: [][4]string{{"ConfigMalformed", yes, "ClusterConfigMalformed", "cluster's configuration may be malformed"},
			{"Ready", no, "ClusterConfigMalformed", "cluster's configuration may be malformed"}}},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			h := Health{}.Next(tc.result, "refused", DefaultConfig())
			status, write := ClusterStatus{}.Next(h, "", now)
			if !write {
				t.Error("a new status is not written")
			}
			var got [][4]string
			for _, c := range status.Conditions {
				got = append(got, [4]string{c.Type, c.Status, c.Reason, c.Message})
			}
			assert.Equal(t, "conditions", tc.want, got)
		})
	}
}

func TestClusterStatusIsWrittenOnlyWhenNeeded(t *testing.T) {
	ready := Health{State: Healthy}
	before, _ := ClusterStatus{Topology: Topology{Zones: []string{"z"}}}.Next(ready, "v1.36.3", now)
	offline, _ := ClusterStatus{}.Next(Health{State: NoAnswer, Error: "port 1"}, "", now)
	tests := map[string]struct {
		before  ClusterStatus
		health  Health
		version string
		after   time.Duration
		write   bool
		// since is when the first condition's status changed.
		since time.Duration
	}{
		"nothing changed":                       {before: before, health: ready, after: 4 * time.Minute},
		"nothing changed for long":              {before: before, health: ready, after: 5 * time.Minute, write: true},
		"the version changed":                   {before: before, health: ready, version: "v1.37.0", after: time.Second, write: true},
		"the version cannot be read":            {before: before, health: ready, after: time.Second},
		"the cluster is offline":                {before: before, health: Health{State: NoAnswer}, after: time.Second, write: true, since: time.Second},
		"another error, the same state":         {before: offline, health: Health{State: NoAnswer, Error: "port 2"}, after: time.Second},
		"the cluster is ready again":            {before: offline, health: ready, after: time.Second, write: true, since: time.Second},
		"the cluster answers, but is not ready": {before: offline, health: Health{State: Unhealthy}, after: time.Second, write: true},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			got, write := tc.before.Next(tc.health, tc.version, now.Add(tc.after))
			if write != tc.write {
				t.Errorf("written: %t", write)
			}
			if since := got.Conditions[0].LastTransitionTime.Sub(now); since != tc.since {
				t.Errorf("changed after %v, want %v", since, tc.since)
			}
			if probed := got.Conditions[0].LastProbeTime.Sub(now); probed != tc.after {
				t.Errorf("probed after %v", probed)
			}
			if !slices.Equal(got.Zones, tc.before.Zones) {
				t.Error("the zones are lost")
			}
		})
	}
}

func TestProbeErrorIsCutTo256Bytes(t *testing.T) {
	h := Health{}.Next(NoAnswer, string(slices.Repeat([]byte("\u00e9"), 300)), DefaultConfig())
	if len(h.Error) != 256 {
		t.Errorf("%d bytes", len(h.Error))
	}
	if h := (Health{}).Next(NoAnswer, "x"+string(slices.Repeat([]byte("\u00e9"), 300)), DefaultConfig()); len(h.Error) != 255 {
		t.Errorf("%d bytes, which split a character", len(h.Error))
	}
}

func TestMalformedClusterIsReadNevertheless(t *testing.T) {
	c := ReadCluster(object(t, "metadata: {name: c1, labels: {a: b}}, "+
		"spec: {apiEndpoint: 'https://c1', caBundle: Y2E=, secretRef: {name: s}, disabledTLSValidations: ['*'], proxyURL: 'socks5://p:1'}, status: {region: eu, conditions: 7}"))
	want := Cluster{Name: "c1", Labels: map[string]string{"a": "b"},
		Spec: ClusterSpec{APIEndpoint: "https://c1", CABundle: []byte("ca"), DisabledTLSValidations: []string{"*"}, ProxyURL: "socks5://p:1"}}
	want.Spec.SecretRef.Name = "s"
	assert.Equal(t, "cluster", want, c)
	c = ReadCluster(object(t, "metadata: {name: c1, labels: {a: b}}, spec: {caBundle: '!'}"))
	if c.Malformed == nil || c.Labels["a"] != "b" {
		t.Errorf("a cluster with a malformed spec: %v", c)
	}
}

func TestRemovalsAreAllowedUntilATime(t *testing.T) {
	for name, tc := range map[string]struct {
		annotations string
		want        time.Time
	}{
		"a time allows removals until then": {"{quartermaster.dev/allow-removals: '2026-11-24T13:00:00Z'}", now.Add(time.Hour)},
		"a word allows nothing":             {"{quartermaster.dev/allow-removals: 'yes'}", time.Time{}},
		"no annotation allows nothing":      {"{}", time.Time{}},
	} {
		t.Run(name, func(t *testing.T) {
			if got := AllowedUntil(object(t, "metadata: {annotations: "+tc.annotations+"}")); !got.Equal(tc.want) {
				t.Errorf("got %v, want %v", got, tc.want)
			}
		})
	}
}
