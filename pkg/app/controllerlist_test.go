// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"encoding/json"
	"strings"
	"testing"

	rbacv1 "k8s.io/api/rbac/v1"
	"sigs.k8s.io/yaml"

	"github.com/google/go-cmp/cmp"

	"github.com/quartermaster-dev/quartermaster/pkg/informers"
)

func TestControllersAreListedAsTheRegistryHasThem(t *testing.T) {
	extra := withFunctions(Entry{
		Name: "extra", Aliases: []string{"x", "y"}, Summary: "does more", OffByDefault: true,
		Needs: func() ([]informers.Need, error) {
			return []informers.Need{
				{Resource: informers.Deployments, Form: informers.Typed},
				{Resource: informers.ConfigMaps, Annotations: []string{"example.com/a"}, Optional: true},
			}, nil
		},
		Rules: func() []rbacv1.PolicyRule {
			return []rbacv1.PolicyRule{{APIGroups: []string{"apps"}, Resources: []string{"deployments"}, Verbs: []string{"list", "watch"}}}
		},
	})
	want := controllerInfo{
		Name: "extra", Aliases: []string{"x", "y"}, Summary: "does more",
		Needs: []needInfo{
			{Group: "apps", Version: "v1", Resource: "deployments", Form: "typed"},
			{Version: "v1", Resource: "configmaps", Form: "metadata", Annotations: []string{"example.com/a"}, Optional: true},
		},
		Rules: extra.Rules(),
	}
	list := func(t *testing.T, args ...string) string {
		t.Helper()
		var out strings.Builder
		cmd := NewCommand(extra)
		cmd.SetOut(&out)
		cmd.SetArgs(append([]string{"controllers"}, args...))
		if err := cmd.Execute(); err != nil {
			t.Fatal(err)
		}
		return out.String()
	}
	for format, unmarshal := range map[string]func([]byte, any) error{
		"json": json.Unmarshal,
		"yaml": func(text []byte, into any) error { return yaml.Unmarshal(text, into) },
	} {
		t.Run("as "+format, func(t *testing.T) {
			var got []controllerInfo
			if err := unmarshal([]byte(list(t, "-o", format)), &got); err != nil {
				t.Fatal(err)
			}
			if len(got) != 2 || got[0].Name != "config-reload" || !got[0].OnByDefault || !got[0].Enabled || len(got[0].Rules) == 0 {
				t.Fatalf("got %+v", got)
			}
			if diff := cmp.Diff(want, got[1]); diff != "" {
				t.Error(diff)
			}
		})
	}
	t.Run("as a table", func(t *testing.T) {
		lines := map[string]bool{}
		for line := range strings.Lines(list(t)) {
			lines[strings.Join(strings.Fields(line), " ")] = true
		}
		for _, want := range []string{"extra off no x,y does more", "extra deployments.apps typed 0", "extra deployments.apps list,watch"} {
			if !lines[want] {
				t.Errorf("no line %q in %v", want, lines)
			}
		}
	})
	t.Run("flags and the file decide what is enabled", func(t *testing.T) {
		path := writeConfig(t, "controllers: [extra]")
		if out := list(t, "--config="+path); !strings.Contains(out, "off       yes") {
			t.Errorf("extra is not enabled:\n%s", out)
		}
	})
}

func TestCompletionKnowsTheCommands(t *testing.T) {
	out, err := execute(t, "__complete", "st")
	if err != nil || !strings.Contains(out, "status\t") {
		t.Errorf("%v: %s", err, out)
	}
	for _, shell := range []string{"bash", "zsh", "fish", "powershell"} {
		if out, err := execute(t, "completion", shell); err != nil || !strings.Contains(out, "manager") {
			t.Errorf("completion %s: %v: %.100s", shell, err, out)
		}
	}
}
