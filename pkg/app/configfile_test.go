// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/builtin"
)

const configHeader = "apiVersion: quartermaster.dev/v1alpha1\nkind: ManagerConfiguration\n"

// writeConfig writes a configuration file with the flags, of which the first is in line 4.
func writeConfig(t *testing.T, flags ...string) string {
	t.Helper()
	return writeFile(t, configHeader+"flags:\n  "+strings.Join(flags, "\n  ")+"\n")
}

func writeFile(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "config.yaml")
	assert.NoError(t, os.WriteFile(path, []byte(text), 0o600))
	return path
}

func TestConfigFileIsReadStrictly(t *testing.T) {
	for name, tc := range map[string]struct {
		text string
		want []string // the lines of the error, without the path
	}{
		"a flag that does not exist": {configHeader + "flags:\n  no-such-flag: 1\n", []string{`:4: no-such-flag: not a flag that the file can set`}},
		"flags about the command line": {
			configHeader + "flags: {config: x, print-effective-config: true, help: true, version: true}\n",
			[]string{
				`:3: config: not a flag that the file can set`, `:3: help: not a flag that the file can set`,
				`:3: print-effective-config: not a flag that the file can set`, `:3: version: not a flag that the file can set`,
				"--insecure-port: must be 0 to 65535, got 70000"}},
		"a key beside flags":        {configHeader + "metadata: {}\n", []string{": yaml: unmarshal errors:", "  line 3: field metadata not found in type app.managerConfiguration"}},
		"keys that are there twice": {configHeader + "kind: ManagerConfiguration\nflags:\n  dry-run: true\n  v: 1\n  dry-run: false\n", []string{": yaml: unmarshal errors:", `  line 3: mapping key "kind" already defined at line 2`}},
		"a key of a map that is there twice": {configHeader + "flags:\n  feature-gates:\n    AllBeta: true\n    AllBeta: false\n",
			[]string{":5: feature-gates: yaml: unmarshal errors:", `  line 6: mapping key "AllBeta" already defined at line 5`}},
		"lists and maps for flags that take a single value, and the other way round": {
			configHeader + "flags:\n  dry-run: [true]\n  kubeconfig: {a: b}\n  feature-gates: [AllBeta=true]\n  controllers: {a: b}\n",
			[]string{
				":4: dry-run: yaml: unmarshal errors:", "  line 4: cannot unmarshal !!seq into string",
				":5: kubeconfig: yaml: unmarshal errors:", "  line 5: cannot unmarshal !!map into string",
				":6: feature-gates: yaml: unmarshal errors:", "  line 6: cannot unmarshal !!seq into string",
				":7: controllers: yaml: unmarshal errors:", "  line 7: cannot unmarshal !!map into string"}},
		"nothing where a value is due": {configHeader + "flags:\n  dry-run:\n  kubeconfig: ~\n  controllers:\n", []string{":4: dry-run: has no value", ":5: kubeconfig: has no value", ":6: controllers: has no value"}},
		"a value that its flag does not take, one that is out of bounds, and one of the command line": {
			configHeader + "flags:\n  shutdown-timeout: 15\n  kube-api-qps: 0\n", []string{
				`:4: shutdown-timeout: time: missing unit in duration "15"`,
				":5: --kube-api-qps: must be at least 0.1, or negative for no limit, got 0", "--insecure-port: must be 0 to 65535, got 70000"}},
		"lists and maps in a text of several lines": {
			configHeader + "flags:\n  config-reload-exclude-namespaces: |\n    a\n    b\n  allow-metric-labels: |\n    m,l=a\n    n,l=b\n", []string{
				":4: config-reload-exclude-namespaces: must be a list or a map, or a single line as on the command line",
				":7: allow-metric-labels: must be a list or a map, or a single line as on the command line"}},
		"another version": {"apiVersion: quartermaster.dev/v1\nkind: ManagerConfiguration\n",
			[]string{`: must have apiVersion quartermaster.dev/v1alpha1 and kind ManagerConfiguration, got "quartermaster.dev/v1" and "ManagerConfiguration"`}},
		"another kind":               {"apiVersion: quartermaster.dev/v1alpha1\nkind: ConfigMap\n", []string{`: must have apiVersion quartermaster.dev/v1alpha1 and kind ManagerConfiguration, got "quartermaster.dev/v1alpha1" and "ConfigMap"`}},
		"nothing at all":             {"# only this\n", []string{": the file is empty"}},
		"something else than a map":  {"- a\n", []string{": yaml: unmarshal errors:", "  line 1: cannot unmarshal !!seq into app.managerConfiguration"}},
		"a file that does not exist": {"", []string{"--config: open : no such file or directory"}},
		"two documents":              {configHeader + "---\n" + configHeader, []string{": the file must be a single document"}},
		"no YAML":                    {configHeader + "flags:\n\tv: 1\n", []string{": yaml: line 4: found character that cannot start any token"}},
	} {
		t.Run(name, func(t *testing.T) {
			path := writeFile(t, tc.text)
			if tc.text == "" {
				assert.NoError(t, os.Remove(path))
			}
			args := []string{"--config", path, "--print-effective-config"}
			if strings.Contains(name, "command line") {
				args = append(args, "--insecure-port=70000")
			}
			_, err := execute(t, args...)
			if err == nil {
				t.Fatal("accepted")
			}
			assert.Equal(t, "errors", tc.want, strings.Split(strings.ReplaceAll(err.Error(), path, ""), "\n"))
		})
	}
}

// effective returns the flags that --print-effective-config prints.
func effective(t *testing.T, args ...string) map[string]any {
	t.Helper()
	out, err := execute(t, append(args, "--print-effective-config")...)
	assert.NoError(t, err)
	var printed struct{ Flags map[string]any }
	assert.NoError(t, yaml.Unmarshal([]byte(out), &printed))
	return printed.Flags
}

func TestConfigFileOrderOfPrecedence(t *testing.T) {
	path := writeConfig(t,
		"shutdown-timeout: 30s",
		"controller-stuck-after: 1m",
		"controllers: config-reload,-foo", // as on the command line
		"compat: []",
		"v: 4",
		"config-reload-exclude-namespaces: [a, b]",
		"config-reload-include-namespaces: [a, b]",
		"feature-gates: {AllBeta: false}",
		"secure-port: none, but the command line has another",
	)
	got := effective(t, "--config="+path, "--shutdown-timeout=20s", "--config-reload-exclude-namespaces=c", "-v=6", "--secure-port=1",
		"--controllers=*", "--feature-gates=ContextualLogging=false")
	for flag, want := range map[string]any{
		"shutdown-timeout":                 "20s", // the default, but given
		"controller-stuck-after":           "1m0s",
		"controllers":                      []any{"*"},
		"compat":                           []any{},
		"v":                                6,
		"config-reload-exclude-namespaces": []any{"c"},
		"config-reload-include-namespaces": []any{"a", "b"},
		"feature-gates":                    map[string]any{"ContextualLogging": false},
		"secure-port":                      1,
		"leader-elect-lease-duration":      "15s",
	} {
		assert.Equal(t, flag, want, got[flag])
	}
	if _, there := got["config"]; there || len(got) < 80 {
		t.Errorf("%d flags are printed, or --config is among them", len(got))
	}
}

// unusual returns values for all flags that are not their defaults: those that say something about how values
// are written, and for the others the first text that the flag takes.
func unusual(t *testing.T, o *Options) []string {
	t.Helper()
	all := []string{
		`--compat=reloader,"a, ""b"": {c}","",true,1.50,null,~,#x, d`, "--kube-api-qps=0.7", "--tls-cipher-suites=TLS_AES_128_GCM_SHA256,TLS_AES_256_GCM_SHA384",
		"--config-reload-annotation-key=auto=a.example.com/auto,secret=a.example.com/secret", "--csr-approver-dns-regex={node}|b",
		"--csr-approver-ip-ranges=10.0.0.0/8,fd00::/8", "--replication-push-namespaces=a-*,!a-b;labels:c=d", "--scale-schedule-force-uptime=Mon-Fri 8-18 UTC, never",
		`--allow-metric-labels=m="a": b,c`, "--vmodule=a=1,b=2", "--feature-gates=AllAlpha=true,AllBeta=false",
		"--extra-limits=a=1", "--extra-texts=a,b", `--extra-texts="c"`, "--extra-times=1s,2m",
	}
	assert.NoError(t, o.Parse(all))
	for name, f := range o.fileFlags() {
		given, texts := f.Changed, []string{"7", "7s", "true", "false", "::1", "a=b"}
		for was := f.Value.String(); !given && len(texts) > 0; texts = texts[1:] {
			if given = f.Value.Set(texts[0]) == nil && f.Value.String() != was; given {
				all = append(all, "--"+name+"="+texts[0])
			}
		}
		if !given && name != "leader-elect-resource-lock" { // it has one value only
			t.Errorf("the test has no value for --%s", name)
		}
	}
	return all
}

// TestConfigFileHasEveryFlag checks that flags keep their values when the output of
// --print-effective-config, or what /configz shows, is read as the file.
func TestConfigFileHasEveryFlag(t *testing.T) {
	extra := &flagsConfig{func(fs *pflag.FlagSet) {
		fs.StringToInt("extra-limits", nil, "")
		fs.StringArray("extra-texts", nil, "")
		fs.DurationSlice("extra-times", nil, "")
	}}
	build := func() *Options {
		return newOptions(t, With(builtin.Entries()...), With(withFunctions(controllers.Entry{Name: "extra", Config: extra})))
	}
	parse := func(t *testing.T, args ...string) *Options {
		t.Helper()
		o := build()
		assert.NoError(t, o.Parse(args))
		assert.NoError(t, o.readConfigFile())
		return o
	}
	texts := func(o *Options) map[string]string {
		all := map[string]string{}
		for name, f := range o.fileFlags() {
			all[name] = f.Value.String()
		}
		return all
	}
	for name, args := range map[string][]string{
		"the defaults":                                  nil,
		"another value for every flag":                  unusual(t, build()),
		"a map whose only value has quotes at its end":  {`--allow-metric-labels=m,l=a"b`, `--config-reload-annotation-key="x=""a""","x=""a"""`},
		"a map of several pairs with commas and quotes": {`--allow-metric-labels="m,l=""a"",b","n,l=c: {d}","o=#"`},
		"a list of one empty string":                    {`--disabled-metrics=""`},
		"a text of several lines":                       {"--config-reload-include-namespaces=\"a\n b\n\",\" c\""},
		"a limit that is large":                         {"--kube-api-qps=16777216", "--kube-api-burst=2147483647"},
	} {
		t.Run(name, func(t *testing.T) {
			given := parse(t, args...)
			var printed strings.Builder
			assert.NoError(t, given.printConfig(&printed))
			shown, err := json.Marshal(given.effectiveConfig()) // as configz does
			assert.NoError(t, err)
			for form, text := range map[string]string{"printed": printed.String(), "shown": string(shown)} {
				read := parse(t, "--config="+writeFile(t, text))
				if diff := cmp.Diff(texts(given), texts(read)); diff != "" {
					t.Errorf("what is %s is read as something else (-given +read):\n%s\nthe file:\n%s", form, diff, text)
				}
			}
		})
	}
}

func TestConfigFileOfTheDocsIsAccepted(t *testing.T) {
	doc, err := os.ReadFile(filepath.Join("..", "..", "docs", "operate", "configuration.md"))
	assert.NoError(t, err)
	_, rest, found := strings.Cut(string(doc), "```yaml\n")
	example, _, closed := strings.Cut(rest, "```\n")
	if !found || !closed {
		t.Fatal("docs/operate/configuration.md has no example")
	}
	assert.Equal[any](t, "compat", []any{"reloader"}, effective(t, "--config="+writeFile(t, example))["compat"])
	overlay := filepath.Join("..", "..", "deploy", "examples", "config-file", "config.yaml")
	assert.Equal(t, "v", 2, effective(t, "--config="+overlay)["v"])
}
