// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/yaml"

	"github.com/quartermaster-dev/quartermaster/pkg/informers"
)

var deployDir = filepath.Join("..", "..", "deploy")

// TestManifestsParse holds the Deployment of deploy/ against the flags that the manager really has.
func TestManifestsParse(t *testing.T) {
	file, err := os.ReadFile(filepath.Join(deployDir, "base", "deployment.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var deployment appsv1.Deployment
	if err := yaml.UnmarshalStrict(file, &deployment); err != nil {
		t.Fatal(err)
	}
	pod := deployment.Spec.Template.Spec
	manager := pod.Containers[0]

	o, err := NewOptions()
	if err != nil {
		t.Fatal(err)
	}
	if err := o.parseArgs(manager.Args); err != nil {
		t.Fatal(err)
	}
	if err := o.Validate(); err != nil {
		t.Error(err)
	}
	if grace := time.Duration(*pod.TerminationGracePeriodSeconds) * time.Second; grace <= o.Generic.ShutdownTimeout {
		t.Errorf("terminationGracePeriodSeconds: %s is not longer than --shutdown-timeout=%s", grace, o.Generic.ShutdownTimeout)
	}
	if port := int32(o.Secure.BindPort); manager.Ports[0].ContainerPort != port {
		t.Errorf("containerPort %d is not --secure-port=%d", manager.Ports[0].ContainerPort, port)
	}
	// A controller's trouble fails /healthz, and neither a restart nor a rollout that waits would mend it.
	for probe, want := range map[*corev1.Probe]string{manager.StartupProbe: "/livez", manager.LivenessProbe: "/livez", manager.ReadinessProbe: "/readyz"} {
		if got := probe.HTTPGet.Path; got != want {
			t.Errorf("a probe asks for %s, want %s", got, want)
		}
	}
	if pod.ServiceAccountName != serviceAccount || deployment.Name != serviceAccount {
		t.Errorf("Deployment %q runs as %q, but the roles are bound to %q", deployment.Name, pod.ServiceAccountName, serviceAccount)
	}
}

// argument is an item of args, or what a JSON patch adds to them.
var argument = regexp.MustCompile(`(?m)^\s*(?:- |value: )['"]?(--[^\s'"]+)['"]?$`)

// TestManifestsUseFlagsThatExist finds flags wherever they stand, also in patches of components and examples.
func TestManifestsUseFlagsThatExist(t *testing.T) {
	found := 0
	err := filepath.WalkDir(deployDir, func(path string, _ fs.DirEntry, err error) error {
		if err != nil || filepath.Ext(path) != ".yaml" {
			return err
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		for _, match := range argument.FindAllStringSubmatch(string(text), -1) {
			found++
			o, err := NewOptions()
			if err != nil {
				return err
			}
			if err := o.parseArgs(match[1:]); err != nil {
				t.Errorf("%s: %v", path, err)
			} else if err := o.Validate(); err != nil {
				t.Errorf("%s: %v", path, err)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if found < 5 {
		t.Errorf("%d flags were found: the test does not see them", found)
	}
}

// TestManifestsAreGenerated holds what make generate writes against the registry, with nothing beside it.
func TestManifestsAreGenerated(t *testing.T) {
	want, err := Manifests()
	if err != nil {
		t.Fatal(err)
	}
	for path, text := range want {
		got, err := os.ReadFile(filepath.Join(deployDir, path))
		if err != nil || string(got) != string(text) {
			t.Errorf("deploy/%s is not what make generate writes (%v)", path, err)
		}
	}
	files, err := filepath.Glob(filepath.Join(deployDir, "rbac", "*"))
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		if want["rbac/"+filepath.Base(file)] == nil {
			t.Errorf("%s is of no controller", file)
		}
	}
}

func TestManifestsGrantNoWildcard(t *testing.T) {
	all, err := rolesWith("--config-reload-argo-rollouts", "--compat=reloader")
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range all {
		for _, rule := range slices.Concat(r.Cache, r.Own) {
			for _, s := range slices.Concat(rule.APIGroups, rule.Resources, rule.Verbs, rule.NonResourceURLs) {
				if strings.Contains(s, "*") {
					t.Errorf("controller %s has a wildcard: %v", r.Controller, rule)
				}
			}
		}
	}
}

func TestRolesTellTheCacheFromTheController(t *testing.T) {
	rule := func(resources, verbs string) rbacv1.PolicyRule {
		return rbacv1.PolicyRule{APIGroups: []string{""}, Resources: strings.Fields(resources), Verbs: strings.Fields(verbs)}
	}
	named := rule("secrets", "get list")
	named.ResourceNames = []string{"mine"}
	for name, tc := range map[string]struct {
		needs  []schema.GroupVersionResource
		rules  []rbacv1.PolicyRule
		cache  []rbacv1.PolicyRule
		own    []rbacv1.PolicyRule
		failed string
	}{
		"to read what it needs is up to the cache": {
			needs: []schema.GroupVersionResource{informers.ConfigMaps},
			rules: []rbacv1.PolicyRule{rule("configmaps", "list watch")},
			cache: []rbacv1.PolicyRule{rule("configmaps", "list watch")},
		},
		"to write is up to the controller, and so is a live read": {
			needs: []schema.GroupVersionResource{informers.ConfigMaps},
			rules: []rbacv1.PolicyRule{rule("configmaps", "get list watch patch")},
			cache: []rbacv1.PolicyRule{rule("configmaps", "list watch")},
			own:   []rbacv1.PolicyRule{rule("configmaps", "get patch")},
		},
		"a rule may be about both": {
			needs: []schema.GroupVersionResource{informers.ConfigMaps},
			rules: []rbacv1.PolicyRule{rule("configmaps pods", "list watch delete")},
			cache: []rbacv1.PolicyRule{rule("configmaps", "list watch")},
			own:   []rbacv1.PolicyRule{rule("configmaps", "delete"), rule("pods", "list watch delete")},
		},
		"objects with names are not in the cache": {
			needs: []schema.GroupVersionResource{informers.ConfigMaps},
			rules: []rbacv1.PolicyRule{rule("configmaps", "list watch"), named},
			cache: []rbacv1.PolicyRule{rule("configmaps", "list watch")},
			own:   []rbacv1.PolicyRule{named},
		},
		"a need without permission is a mistake": {
			needs:  []schema.GroupVersionResource{informers.ConfigMaps},
			rules:  []rbacv1.PolicyRule{rule("configmaps", "list")},
			failed: "needs configmaps in the cache",
		},
	} {
		t.Run(name, func(t *testing.T) {
			e := Entry{
				Name: "test",
				Needs: func() (needs []informers.Need, _ error) {
					for _, r := range tc.needs {
						needs = append(needs, informers.Need{Resource: r})
					}
					return needs, nil
				},
				Rules: func() []rbacv1.PolicyRule { return tc.rules },
			}
			got, err := e.roles()
			if tc.failed != "" {
				if err == nil || !strings.Contains(err.Error(), tc.failed) {
					t.Errorf("error %v, want %q", err, tc.failed)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(Roles{Controller: "test", Cache: tc.cache, Own: tc.own}, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}
