// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/pflag"
)

const configHeader = "apiVersion: quartermaster.dev/v1alpha1\nkind: ManagerConfiguration\n"

// writeConfig writes a configuration file with the given lines after apiVersion and kind: they begin at line 3.
func writeConfig(t *testing.T, lines ...string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "config.yaml")
	rewriteConfig(t, path, lines...)
	return path
}

func rewriteConfig(t *testing.T, path string, lines ...string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(configHeader+strings.Join(lines, "\n")+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestConfigFileIsDecodedStrictly(t *testing.T) {
	for name, tc := range map[string]struct {
		text string
		want []string // FILE stands for the path
	}{
		"a field that does not exist": {
			configHeader + "generic:\n  noSuchField: 1\n", []string{"FILE:4: generic.noSuchField: is not known"}},
		"a field in the wrong group, with the right one": {
			configHeader + "generic:\n  leaderElect: false\n", []string{"FILE:4: generic.leaderElect: is not known; did you mean leaderElection.leaderElect?"}},
		"a field under the flag's name, with the right one": {
			configHeader + "generic:\n  dry-run: true\n", []string{"FILE:4: generic.dry-run: is not known; did you mean generic.dryRun?"}},
		"a group that does not exist, with those that do": {
			configHeader + "genric:\n  dryRun: true\n", []string{"FILE:3: genric: is not known", "generic", "leaderElection", "configReloadController"}},
		"the flags about the command line are no settings": {
			configHeader + "configuration:\n  config: other.yaml\n", []string{"FILE:3: configuration: is not known"}},
		"a field that is there twice": {
			configHeader + "generic:\n  dryRun: true\n  dryRun: false\n", []string{"FILE:5: generic.dryRun: is there twice, first at line 4"}},
		"a group that is there twice": {
			configHeader + "generic: {}\nlogs: {}\ngeneric: {}\n", []string{"FILE:5: generic: is there twice, first at line 3"}},
		"a key of a map that is there twice": {
			configHeader + "featureGates:\n  featureGates:\n    AllBeta: true\n    AllBeta: false\n", []string{"FILE:6: featureGates.featureGates: key \"AllBeta\" is there twice"}},
		"a string where a bool is due": {
			configHeader + "generic:\n  dryRun: \"yes\"\n", []string{`FILE:4: generic.dryRun: must be true or false, got the string "yes"`}},
		"a word that only older YAML takes for a bool": {
			configHeader + "generic:\n  dryRun: yes\n", []string{`FILE:4: generic.dryRun: must be true or false, got the string "yes"`}},
		"a string where a number is due": {
			configHeader + "secureServing:\n  securePort: \"10357\"\n", []string{`FILE:4: secureServing.securePort: must be a whole number, got the string "10357"`}},
		"a fraction where a whole number is due": {
			configHeader + "secureServing:\n  securePort: 1.5\n", []string{"FILE:4: secureServing.securePort: must be a whole number, got 1.5"}},
		"a number where a duration is due": {
			configHeader + "leaderElection:\n  leaderElectLeaseDuration: 15\n", []string{"FILE:4: leaderElection.leaderElectLeaseDuration: must be a string, got 15"}},
		"a string where a list is due": {
			configHeader + "generic:\n  controllers: config-reload\n", []string{"FILE:4: generic.controllers: must be a list, each item a string"}},
		"an item of a list that is none": {
			configHeader + "generic:\n  controllers:\n  - \"*\"\n  - 1\n", []string{"FILE:6: generic.controllers: must be a list, each item a string, got 1"}},
		"a list where a map is due": {
			configHeader + "featureGates:\n  featureGates: [AllBeta]\n", []string{"FILE:4: featureGates.featureGates: must be a map, each value a true or false, got a list"}},
		"a group that is no map": {
			configHeader + "generic: 1\n", []string{"FILE:3: generic: must be a map, got 1"}},
		"nothing where a value is due": {
			configHeader + "generic:\n  dryRun:\n", []string{"FILE:4: generic.dryRun: must be true or false, got nothing"}},
		"a string that is no duration": {
			configHeader + "generic:\n  shutdownTimeout: soon\n", []string{"FILE:4: generic.shutdownTimeout: ", `"soon"`}},
		"a value that the flag does not take": {
			configHeader + "featureGates:\n  featureGates: {NoSuchGate: true}\n", []string{"FILE:4: featureGates.featureGates: ", "NoSuchGate"}},
		"a value that is out of bounds, with the flag": {
			configHeader + "logs:\n  v: 2\ngeneric:\n  shutdownTimeout: 0s\n", []string{"FILE:6: generic.shutdownTimeout: --shutdown-timeout: 0s must be greater than 0"}},
		"all problems at once": {
			configHeader + "generic:\n  dryRun: 1\nlogs:\n  v: high\n", []string{"FILE:4: generic.dryRun", "FILE:6: logs.v: must be a whole number"}},
		"another version": {
			"apiVersion: quartermaster.dev/v1\nkind: ManagerConfiguration\n", []string{"FILE:1: apiVersion: must be quartermaster.dev/v1alpha1"}},
		"another kind": {
			"apiVersion: quartermaster.dev/v1alpha1\nkind: ConfigMap\n", []string{"FILE:2: kind: must be ManagerConfiguration"}},
		"no version and no kind": {
			"generic: {}\n", []string{"FILE:1: apiVersion: is missing", "FILE:1: kind: is missing"}},
		"nothing at all": {
			"# only this\n", []string{"FILE: is empty"}},
		"something else than a map": {
			"- a\n- b\n", []string{"FILE:1: must be a map"}},
		"two documents": {
			configHeader + "---\n" + configHeader, []string{"FILE:3: must be a single document"}},
		"no YAML": {
			configHeader + "generic:\n\tdryRun: true\n", []string{"FILE:4: is not YAML: "}},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "config.yaml")
			if err := os.WriteFile(path, []byte(tc.text), 0o600); err != nil {
				t.Fatal(err)
			}
			_, err := execute(t, "--config", path, "--print-effective-config")
			if err == nil {
				t.Fatal("accepted")
			}
			for _, want := range tc.want {
				if !strings.Contains(err.Error(), strings.ReplaceAll(want, "FILE", path)) {
					t.Errorf("error lacks %q:\n%v", want, err)
				}
			}
		})
	}
	t.Run("a file that does not exist", func(t *testing.T) {
		if _, err := execute(t, "--config=/nonexistent/config.yaml"); err == nil || !strings.Contains(err.Error(), "--config: open /nonexistent/config.yaml") {
			t.Errorf("error %v", err)
		}
	})
}

// effective is what --print-effective-config prints, by GROUP.FIELD.
func effective(t *testing.T, args ...string) map[string]any {
	t.Helper()
	out, err := execute(t, append(args, "--print-effective-config")...)
	if err != nil {
		t.Fatal(err)
	}
	o, err := NewOptions()
	if err != nil {
		t.Fatal(err)
	}
	settings, err := decodeConfigFile("printed", []byte(out), o.flags)
	if err != nil {
		t.Fatalf("what was printed is not accepted: %v", err)
	}
	values := map[string]any{}
	for _, s := range settings {
		values[s.field] = s.value
	}
	return values
}

func TestFlagsWinOverTheFileAndTheFileOverDefaults(t *testing.T) {
	path := writeConfig(t,
		"generic:",
		"  shutdownTimeout: 30s",
		"  controllers: [config-reload]",
		"logs: {v: 4}",
		"configReloadController:",
		"  configReloadIgnoredNamespaces: [a, b]",
		"secureServing:", // all of its lines are comments
		"  # securePort: 1",
	)
	got := effective(t, "--config="+path, "--shutdown-timeout=25s", "--config-reload-ignored-namespaces=c", "-v=6")
	for field, want := range map[string]any{
		"generic.shutdownTimeout": "25s",
		"generic.controllers":     []any{"config-reload"},
		"logs.v":                  int64(6),
		"configReloadController.configReloadIgnoredNamespaces": []any{"c"},
		"secureServing.securePort":                             int64(10357),
		"leaderElection.leaderElectLeaseDuration":              "15s",
	} {
		if diff := cmp.Diff(want, got[field]); diff != "" {
			t.Errorf("%s:\n%s", field, diff)
		}
	}
	t.Run("a flag that is given with its default wins too", func(t *testing.T) {
		if got := effective(t, "--config="+path, "--shutdown-timeout=20s")["generic.shutdownTimeout"]; got != "20s" {
			t.Errorf("shutdownTimeout %v", got)
		}
	})
}

// unusual gives every flag of the configuration another value than its default.
var unusual = []string{
	"--compat=reloader,janitor", "--controller-start-interval=1s", "--controller-stuck-after=1h", "--controllers=*,-config-reload",
	"--dry-run", "--service-accounts-namespace=other", "--shutdown-timeout=7s", "--use-service-account-credentials",
	"--kube-api-burst=7", "--kube-api-content-type=application/json", "--kube-api-qps=0.7", "--kubeconfig=/k", "--master=https://m",
	"--leader-elect=false", "--leader-elect-lease-duration=60s", "--leader-elect-renew-deadline=20s", "--leader-elect-retry-period=5s",
	"--leader-elect-resource-name=n", "--leader-elect-resource-namespace=ns",
	"--cache-mutation-detection", "--min-resync-period=1h", "--standby=cold",
	"--bind-address=::1", "--disable-http2-serving", "--secure-port=7", "--tls-cert-file=/t", "--tls-cipher-suites=TLS_AES_128_GCM_SHA256,TLS_AES_256_GCM_SHA384",
	"--tls-curve-preferences=23,24", "--tls-min-version=VersionTLS13", "--tls-private-key-file=/p", "--tls-sni-cert-key=/a,/b:x.example.com", "--tls-sni-cert-key=/c,/d",
	"--authentication-kubeconfig=/a", "--authentication-skip-lookup", "--authentication-token-webhook-cache-ttl=7s",
	"--client-ca-file=/ca", "--requestheader-allowed-names=a", "--requestheader-client-ca-file=/r",
	"--requestheader-extra-headers-prefix=x-a-", "--requestheader-group-headers=x-g", "--requestheader-uid-headers=x-i", "--requestheader-username-headers=x-u",
	"--authorization-always-allow-paths=/x", "--authorization-kubeconfig=/z", "--authorization-webhook-cache-authorized-ttl=7s", "--authorization-webhook-cache-unauthorized-ttl=7s",
	"--insecure-bind-address=::1", "--insecure-metrics", "--insecure-port=8", "--contention-profiling", "--profiling=false",
	"--config-reload-absorb-rollouts", "--config-reload-annotation-key=auto=a.example.com/auto,secret=a.example.com/secret", "--config-reload-argo-rollouts", "--config-reload-auto-all",
	"--config-reload-concurrent-syncs=7", "--config-reload-dry-run", "--config-reload-first-sight=compare", "--config-reload-ignored-kinds=jobs",
	"--config-reload-ignored-namespaces=a", "--config-reload-ignored-sources=secrets", "--config-reload-max-delay=7s", "--config-reload-max-rollouts-per-minute=7",
	"--config-reload-namespace-selector=a=b", "--config-reload-namespaces=a,b", "--config-reload-on-create", "--config-reload-on-delete",
	"--config-reload-quiet-period=7s", "--config-reload-source-selector=a,b", "--config-reload-state=off", "--config-reload-strategy=annotations",
	"--allow-metric-labels=m,l='a,b'", "--allow-metric-labels-manifest=/m", "--disabled-metrics=x", "--show-hidden-metrics-for-version=1.36",
	"--log-flush-frequency=7s", "--log-json-info-buffer-size=4Ki", "--log-json-split-stream", "--log-text-info-buffer-size=1M", "--log-text-split-stream",
	"--logging-format=json", "--v=7", "--vmodule=a=1,b=2", "--feature-gates=AllAlpha=true,AllBeta=false",
}

// TestEveryFlagSurvivesTheFile: flags -> configuration -> file -> flags is the identity for every flag there is.
func TestEveryFlagSurvivesTheFile(t *testing.T) {
	parse := func(t *testing.T, args []string) *Options {
		t.Helper()
		o, err := NewOptions()
		if err != nil {
			t.Fatal(err)
		}
		flags := pflag.NewFlagSet("manager", pflag.ContinueOnError)
		for _, fs := range o.flags.FlagSets {
			flags.AddFlagSet(fs)
		}
		if err := flags.Parse(args); err != nil {
			t.Fatal(err)
		}
		return o
	}
	given := parse(t, unusual)
	printed, err := newManagerConfiguration(given.flags).yaml()
	if err != nil {
		t.Fatal(err)
	}
	read := parse(t, nil)
	defaults := newManagerConfiguration(read.flags)
	if err := read.applyConfigFile(printed); err != nil {
		t.Fatalf("%v; the file:\n%s", err, printed)
	}
	for _, group := range configurable(given.flags) {
		given.flags.FlagSets[group].VisitAll(func(f *pflag.Flag) {
			if got := read.flags.FlagSets[group].Lookup(f.Name).Value.String(); got != f.Value.String() {
				t.Errorf("--%s=%s came back as %s", f.Name, f.Value, got)
			}
		})
	}
	changed := map[string]bool{}
	for _, c := range defaults.changes(newManagerConfiguration(read.flags)) {
		changed[c.name] = true
	}
	for _, group := range defaults.Groups {
		for _, s := range group.Settings {
			// The lock type has one value only.
			if name := group.Name + "." + s.Name; !changed[name] && s.Name != "leaderElectResourceLock" {
				t.Errorf("the test gives %s no value of its own; add its flag to unusual", name)
			}
		}
	}
}

func TestTheDocumentedFileIsAccepted(t *testing.T) {
	doc, err := os.ReadFile(filepath.Join("..", "..", "docs", "configuration.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, rest, found := strings.Cut(string(doc), "```yaml\n")
	example, _, closed := strings.Cut(rest, "```\n")
	if !found || !closed {
		t.Fatal("docs/configuration.md has no example")
	}
	path := filepath.Join(t.TempDir(), "config.yaml")
	if err := os.WriteFile(path, []byte(example), 0o600); err != nil {
		t.Fatal(err)
	}
	if got := effective(t, "--config="+path)["generic.compat"]; !cmp.Equal(got, []any{"reloader"}) {
		t.Errorf("compat %v", got)
	}
}
