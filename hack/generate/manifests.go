// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"

	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/quartermaster-dev/quartermaster/pkg/app"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/builtin"
)

const header = "# Written by make generate from what manager rbac prints. Do not edit.\n"

// components maps each component to the flags for which it adds permissions.
var components = map[string][]string{
	"argo-rollouts":         {"--config-reload-argo-rollouts"},
	"csi-secrets":           {"--config-reload-csi"},
	"compat-reloader":       {"--compat=reloader"},
	"csr-approver":          {"--controllers=*,csr-approver"},
	"federation":            {"--controllers=*,federation"},
	"federation-dns":        {"--federation-dns"},
	"replication":           {"--controllers=*,replication"},
	"replication-compat":    {"--compat=reflector,replicator"},
	"scale-schedule":        {"--controllers=*,scale-schedule"},
	"scale-schedule-compat": {"--compat=downscaler"},
	"ttl-chosen-types": {"--controllers=*,ttl", "--ttl-include-resources=namespaces.,configmaps.,persistentvolumeclaims.,pods.,services.," +
		"deployments.apps,statefulsets.apps,jobs.batch,ingresses.networking.k8s.io"},
	"ttl-every-type": {"--ttl-include-resources=*"},
	"ttl-compat":     {"--compat=ttl-controller,janitor"},
}

// requires maps a component to the component without which it makes no sense.
var requires = map[string]string{"federation-dns": "federation", "replication-compat": "replication", "scale-schedule-compat": "scale-schedule", "ttl-every-type": "ttl-chosen-types", "ttl-compat": "ttl-chosen-types"}

// notes say what is not obvious of a component.
var notes = map[string]string{
	"csr-approver": "# The controller csr-approver. The manager does not start without the flag --csr-approver-ip-ranges, which only you\n" +
		"# can give: see deploy/examples/csr-approver.\n",
	"federation": "# The controller federation. Its types come first: see docs/controllers/federation.md. Only in the namespace\n" +
		"# kube-federation-system the manager may read Secrets, those with the tokens of other clusters.\n",
	"federation-dns": "# After federation in the list: DNS records. The type DNSEndpoint of external-dns must be there.\n",
	"ttl-chosen-types": "# The controller ttl, for the types of the flag below and no others. RBAC lets the manager read and delete all objects\n" +
		"# of these types, to which Secrets do not belong. Annotations and flags say which objects it deletes.\n",
	"ttl-every-type": "# After ttl-chosen-types in the list: every type. This grants the manager to get, list, watch and DELETE EVERYTHING in the\n" +
		"# cluster: Secrets, whose content it may read, roles, nodes and the types of any CRD. The controller does not\n" +
		"# delete what is protected, but whoever has the manager's token can.\n",
}

// otherNamespace is the namespace of the example second-installation.
const otherNamespace = "ops"

// otherFence changes the fence into that of an installation in otherNamespace. The messages keep their
// beginning, by which the manager recognises a refusal.
var otherFence = strings.NewReplacer(
	"name: quartermaster-fence\n", "name: quartermaster-fence-"+otherNamespace+"\n",
	"policyName: quartermaster-fence\n", "policyName: quartermaster-fence-"+otherNamespace+"\n",
	"name: quartermaster-leader\n", "name: quartermaster-leader-"+otherNamespace+"\n",
	"'quartermaster-leader'", "'quartermaster-leader-"+otherNamespace+"'",
	"system:serviceaccount:kube-system:quartermaster", "system:serviceaccount:"+otherNamespace+":quartermaster")

// manifestFiles returns the files to write below dir, which is deploy/, by path.
func manifestFiles(dir string) (map[string][]byte, error) {
	defaults, err := rbac()
	if err != nil {
		return nil, err
	}
	files := map[string][]byte{"rbac/roles.yaml": joinObjects(defaults)}
	other, err := rbac("--leader-elect-resource-namespace=" + otherNamespace)
	if err != nil {
		return nil, err
	}
	files["examples/second-installation/roles.yaml"] = joinObjects(other)
	for _, name := range []string{"fence.yaml", "namespace.yaml"} {
		text, err := os.ReadFile(filepath.Join(dir, "components", "fence", name))
		if err != nil {
			return nil, err
		}
		files["examples/second-installation/"+name] = append([]byte("# Written by make generate from components/fence. Do not edit.\n"), withoutComments(otherFence.Replace(string(text)))...)
	}
	for name, ownFlags := range components {
		base, flags := defaults, ownFlags
		if required, ok := requires[name]; ok {
			flags = slices.Concat(components[required], ownFlags)
			if base, err = rbac(components[required]...); err != nil {
				return nil, err
			}
		}
		objects, err := rbac(flags...)
		if err != nil {
			return nil, err
		}
		component, added, err := newComponent(ownFlags, base, objects)
		if err != nil {
			return nil, fmt.Errorf("component %s: %w", name, err)
		}
		if len(added) > 0 {
			component.Resources = []string{"rbac.yaml"}
			files["components/"+name+"/rbac.yaml"] = joinObjects(added)
		}
		text, err := yaml.Marshal(component)
		if err != nil {
			return nil, err
		}
		files["components/"+name+"/kustomization.yaml"] = append([]byte(header+notes[name]), text...)
	}
	return files, nil
}

// withoutComments leaves out the lines that are comments.
func withoutComments(text string) (rest string) {
	for line := range strings.Lines(text) {
		if !strings.HasPrefix(strings.TrimSpace(line), "#") {
			rest += line
		}
	}
	return rest
}

// object is an object that manager rbac prints, with the fields of all its kinds.
type object struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata"`
	Rules             []rbacv1.PolicyRule `json:"rules"`

	text []byte
}

// rbac runs manager rbac.
func rbac(flags ...string) (objects []object, err error) {
	var out bytes.Buffer
	cmd := app.NewCommand(app.With(builtin.Entries()...))
	cmd.SetOut(&out)
	cmd.SetArgs(append([]string{"rbac"}, flags...))
	if err := cmd.Execute(); err != nil {
		return nil, fmt.Errorf("manager rbac %q: %w", flags, err)
	}
	for document := range bytes.SplitSeq(out.Bytes(), []byte("---\n")) {
		o := object{text: document}
		if err := yaml.Unmarshal(document, &o); err != nil {
			return nil, err
		}
		objects = append(objects, o)
	}
	return objects, nil
}

func joinObjects(objects []object) []byte {
	var documents [][]byte
	for _, o := range objects {
		documents = append(documents, o.text)
	}
	return append([]byte(header), bytes.Join(documents, []byte("---\n"))...)
}

// newComponent returns the component that sets flags and patches the default roles into those that the
// flags need, and the objects that it adds.
func newComponent(flags []string, defaults, wanted []object) (k kustomization, added []object, err error) {
	k = kustomization{APIVersion: "kustomize.config.k8s.io/v1alpha1", Kind: "Component"}
	for _, flag := range flags {
		k.patch("Deployment", "quartermaster", "add", "/spec/template/spec/containers/0/args/-", flag)
	}
	for _, o := range wanted {
		original := findObject(defaults, o)
		if original == nil {
			added = append(added, o)
			continue
		}
		rules, err := addedRules(original.Rules, o.Rules)
		if err != nil {
			return k, nil, fmt.Errorf("%s %s: %w", o.Kind, o.Name, err)
		}
		for _, rule := range rules {
			k.patch(kindPattern(o.Kind), o.Name, "add", "/rules/-", rule)
		}
	}
	for _, o := range defaults {
		if findObject(wanted, o) == nil {
			k.Patches = append(k.Patches, patch{target{o.Kind, o.Name},
				"$patch: delete\napiVersion: " + o.APIVersion + "\nkind: " + o.Kind + "\nmetadata:\n  name: any\n"})
		}
	}
	return k, added, nil
}

// kindPattern also matches the kind to which the component namespaced changes it, since components
// come in any order.
func kindPattern(kind string) string {
	switch kind {
	case "ClusterRole", "ClusterRoleBinding":
		return kind + "|" + kind[len("Cluster"):]
	}
	return kind
}

func findObject(objects []object, o object) *object {
	i := slices.IndexFunc(objects, func(candidate object) bool {
		return candidate.Kind == o.Kind && candidate.Namespace == o.Namespace && candidate.Name == o.Name
	})
	if i < 0 {
		return nil
	}
	return &objects[i]
}

// addedRules returns the rules of all that are not in defaults.
func addedRules(defaults, all []rbacv1.PolicyRule) ([]rbacv1.PolicyRule, error) {
	contains := func(rules []rbacv1.PolicyRule, rule rbacv1.PolicyRule) bool {
		return slices.ContainsFunc(rules, func(r rbacv1.PolicyRule) bool { return reflect.DeepEqual(r, rule) })
	}
	for _, rule := range defaults {
		if !contains(all, rule) {
			return nil, fmt.Errorf("the flag changes the rule %v instead of adding one", rule)
		}
	}
	return slices.DeleteFunc(slices.Clone(all), func(rule rbacv1.PolicyRule) bool { return contains(defaults, rule) }), nil
}

// kustomization has the fields that are needed here.
type kustomization struct {
	APIVersion string   `json:"apiVersion"`
	Kind       string   `json:"kind"`
	Resources  []string `json:"resources,omitempty"`
	Patches    []patch  `json:"patches,omitempty"`
}

type patch struct {
	Target target `json:"target"`
	Patch  string `json:"patch"`
}

type target struct {
	Kind string `json:"kind"`
	Name string `json:"name"`
}

// patch appends a JSON patch with one operation.
func (k *kustomization) patch(kind, name, op, path string, value any) {
	// Strings and rules always marshal.
	text, _ := json.Marshal([]any{map[string]any{"op": op, "path": path, "value": value}})
	operation, _ := yaml.JSONToYAML(text)
	k.Patches = append(k.Patches, patch{target{kind, name}, string(operation)})
}
