// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package replication

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/internal/glob"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/replication/policy"
)

// Config configures the controller. The zero value is not valid; use [NewConfig].
type Config struct {
	policy.Options

	// Scope lists the only namespaces that may be read and written; empty means all. The host sets
	// Scope, and Reflector and Replicator of the Options.
	Scope []string
	// Kinds lists the kinds to copy.
	Kinds []string
	// MaxSpread is Options.MaxSpread as a quantity.
	MaxSpread resource.QuantityValue
	// DryRun sends every write as a dry run.
	DryRun bool
}

// NewConfig returns the defaults of the flags.
func NewConfig() Config {
	return Config{
		Options: policy.Options{
			MarkAdopted: true, DeletionGrace: 5 * time.Second,
			ProtectedNamespaces: []string{"kube-system", "kube-public", "kube-node-lease"},
			ProtectedNames:      []string{"kube-root-ca.crt", "sh.helm.release.*", "bootstrap-token-*"},
			DeniedLabels: []string{
				"app.kubernetes.io/instance", "app.kubernetes.io/managed-by", "argocd.argoproj.io/*", "cluster.x-k8s.io/*",
				"*.toolkit.fluxcd.io/*", "istio/multiCluster", "olm.managed", "reconcile.external-secrets.io/*",
				"sealedsecrets.bitnami.com/*", "velero.io/*",
			},
		},
		Kinds:     []string{string(policy.Secret), string(policy.ConfigMap)},
		MaxSpread: resource.QuantityValue{Quantity: resource.MustParse("64Mi")},
	}
}

const flagPrefix = "replication-"

// AddFlags binds the --replication-* flags. The current values of c are their defaults.
func (c *Config) AddFlags(fs *pflag.FlagSet) {
	fs.StringVar(&c.PushNamespaces, flagPrefix+"push-namespaces", c.PushNamespaces,
		"The namespaces whose objects may push, in the grammar of the annotation push-to; * is all. "+
			"Without this flag, none may push with quartermaster.dev/push-to, and all may with the annotations of --compat.")
	fs.Var(&c.MaxSpread, flagPrefix+"max-spread",
		"The most that one source may ask for: its bytes, 1Ki at least, times the namespaces that it is pushed to; 0 means no limit.")
	fs.StringSliceVar(&c.ProtectedNamespaces, flagPrefix+"protected-namespaces", c.ProtectedNamespaces,
		"Globs of namespaces that nothing is pushed to, besides the manager's own.")
	fs.StringSliceVar(&c.ProtectedNames, flagPrefix+"protected-names", c.ProtectedNames, "Globs of names that nothing is pushed to.")
	fs.StringSliceVar(&c.DeniedLabels, flagPrefix+"denied-labels", c.DeniedLabels,
		"Globs of the keys of labels that are never copied, such as labels by which another controller trusts an object.")
	fs.StringSliceVar(&c.Kinds, flagPrefix+"kinds", c.Kinds, "The kinds to copy: Secret, ConfigMap.")
	fs.DurationVar(&c.DeletionGrace, flagPrefix+"deletion-grace-period", c.DeletionGrace,
		"How long a copy must be unwanted before it is deleted; 10m at least while its source's namespace does not exist.")
	fs.BoolVar(&c.AllowAll, flagPrefix+"replicator-allow-all", c.AllowAll,
		"Permit every pull with replicate-from, of any source: kubernetes-replicator's --allow-all.")
	fs.BoolVar(&c.AllowConfigMaps, flagPrefix+"replicator-allow-configmaps", c.AllowConfigMaps,
		"Permit every pull of a ConfigMap with replicate-from, as kubernetes-replicator does.")
	fs.BoolVar(&c.MarkAdopted, flagPrefix+"mark-adopted", c.MarkAdopted,
		"Note the source on copies that kubernetes-replicator made, 5 per second. Without the note, a copy stays if its source goes first.")
	fs.BoolVar(&c.DryRun, flagPrefix+"dry-run", c.DryRun, "Send every write with dryRun=All and log it.")
}

// Validate returns all problems, joined; each names its flag.
func (c *Config) Validate(controllers.Settings) error {
	var errs []error
	bad := func(flag, format string, args ...any) {
		errs = append(errs, fmt.Errorf("--"+flagPrefix+flag+": "+format, args...))
	}
	if problem := policy.CheckNamespaces(c.PushNamespaces); problem != "" && c.PushNamespaces != "" {
		bad("push-namespaces", "%q %s", c.PushNamespaces, problem)
	}
	for _, list := range []struct {
		flag  string
		globs []string
		limit int
	}{
		{"protected-namespaces", c.ProtectedNamespaces, glob.MaxNamespace},
		{"protected-names", c.ProtectedNames, glob.MaxName},
		{"denied-labels", c.DeniedLabels, glob.MaxName + len("/") + glob.MaxNamespace},
	} {
		for _, item := range list.globs {
			if problem := glob.Check(item, list.limit); problem != "" {
				bad(list.flag, "%.80q %s", item, problem)
			}
		}
	}
	if c.MaxSpread.Sign() < 0 {
		bad("max-spread", "must not be negative, got %s", c.MaxSpread.String())
	}
	if n := len(c.CopiedKinds()); n == 0 || n != len(c.Kinds) {
		bad("kinds", "must be one or both of Secret and ConfigMap, each once, got %q", c.Kinds)
	}
	if c.DeletionGrace < 0 {
		bad("deletion-grace-period", "must not be negative, got %v", c.DeletionGrace)
	}
	return errors.Join(errs...)
}

// resourceOf returns the resource of a kind.
func resourceOf(kind policy.Kind) schema.GroupVersionResource {
	return corev1.SchemeGroupVersion.WithResource(strings.ToLower(string(kind)) + "s")
}

// CopiedKinds returns the kinds to copy.
func (c *Config) CopiedKinds() []policy.Kind {
	return slices.DeleteFunc(slices.Clone(policy.Kinds), func(kind policy.Kind) bool { return !slices.Contains(c.Kinds, string(kind)) })
}

// permissions returns exactly what the controller does itself under c.
func (c *Config) permissions() []rbacv1.PolicyRule {
	objects := rbacv1.PolicyRule{APIGroups: []string{""}, Verbs: []string{"get", "create", "update", "delete"}}
	for _, kind := range c.CopiedKinds() {
		objects.Resources = append(objects.Resources, resourceOf(kind).Resource)
	}
	rules := []rbacv1.PolicyRule{objects}
	if c.Reflector || c.Replicator {
		rules = append(rules, rbacv1.PolicyRule{APIGroups: []string{"apps"}, Resources: []string{"deployments"}, Verbs: []string{"list"}})
	}
	return rules
}
