// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package configreload

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/configreload/policy"
)

// Config configures the controller. The zero value is not valid; use [NewConfig].
type Config struct {
	policy.Options

	// Scope lists the only namespaces that may be read; empty means all. The host sets Scope, and Compat of the
	// Options.
	Scope []string
	// IncludeNamespaces lists the namespaces to work in; empty means all, and NamespaceSelector counts only
	// then. ExcludeNamespaces are left alone.
	IncludeNamespaces []string
	ExcludeNamespaces []string
	// NamespaceSelector and SourceSelector are label selectors; an item holds one or more
	// requirements. k:v means k=v; k:* and k=* mean that the label exists.
	NamespaceSelector []string
	SourceSelector    []string
	ExcludeSources    []string
	ExcludeKinds      []string
	ArgoRollouts      bool
	// CSI counts the secrets that the Secrets Store CSI driver mounts.
	CSI bool
	// DryRun reports what would be rolled and writes nothing to workloads.
	DryRun bool
}

// NewConfig returns the defaults of the flags.
func NewConfig() Config {
	return Config{
		Options: policy.Options{
			Strategy:    policy.StrategyEnvVars,
			QuietPeriod: time.Second,
			MaxDelay:    30 * time.Second,
		},
	}
}

const flagPrefix = "config-reload-"

// AddFlags binds the --config-reload-* flags. The current values of c are their defaults.
func (c *Config) AddFlags(fs *pflag.FlagSet) {
	fs.StringVar(&c.Strategy, flagPrefix+"strategy", c.Strategy,
		"How a reload marks the pod template: env-vars or annotations.")
	fs.BoolVar(&c.AutoAll, flagPrefix+"auto-all", c.AutoAll,
		"Roll every workload when a ConfigMap or Secret that it references changes, unless it opts out.")
	fs.BoolVar(&c.OnCreate, flagPrefix+"on-create", c.OnCreate, "A ConfigMap or Secret that appears counts as changed.")
	fs.BoolVar(&c.OnDelete, flagPrefix+"on-delete", c.OnDelete, "A ConfigMap or Secret that disappears counts as changed.")
	fs.StringSliceVar(&c.IncludeNamespaces, flagPrefix+"include-namespaces", c.IncludeNamespaces,
		"Namespaces to work in; all if empty. If it is set, --"+flagPrefix+"namespace-selector has no effect.")
	fs.StringSliceVar(&c.ExcludeNamespaces, flagPrefix+"exclude-namespaces", c.ExcludeNamespaces, "Namespaces to leave alone. Wins over --"+flagPrefix+"include-namespaces.")
	fs.StringSliceVar(&c.NamespaceSelector, flagPrefix+"namespace-selector", c.NamespaceSelector,
		"Label selector of the namespaces to work in.")
	fs.StringSliceVar(&c.SourceSelector, flagPrefix+"source-selector", c.SourceSelector,
		"Label selector of the ConfigMaps and Secrets that count. A source that loses its label counts as deleted.")
	fs.StringSliceVar(&c.ExcludeSources, flagPrefix+"exclude-sources", c.ExcludeSources,
		"Types of sources that never roll anything: configmaps or secrets, not both.")
	fs.StringSliceVar(&c.ExcludeKinds, flagPrefix+"exclude-kinds", c.ExcludeKinds,
		"Kinds that are never rolled: "+strings.Join(pluralNames(), ", ")+".")
	fs.BoolVar(&c.ArgoRollouts, flagPrefix+"argo-rollouts", c.ArgoRollouts, "Roll Argo Rollouts too.")
	fs.BoolVar(&c.CSI, flagPrefix+"csi", c.CSI,
		"Count secrets that the Secrets Store CSI driver mounts, by the status that it writes of each pod.")
	fs.StringToStringVar(&c.AnnotationKeys, flagPrefix+"annotation-key", c.AnnotationKeys,
		"LOGICAL=KEY: use another key for a compatible annotation. LOGICAL is one of "+strings.Join(policy.LogicalNames(), ", ")+".")
	fs.DurationVar(&c.QuietPeriod, flagPrefix+"quiet-period", c.QuietPeriod,
		"Roll a workload when no further change came for this long; 0 acts on each change at once.")
	fs.DurationVar(&c.MaxDelay, flagPrefix+"max-delay", c.MaxDelay,
		"Roll a workload at the latest this long after the first change.")
	fs.BoolVar(&c.DryRun, flagPrefix+"dry-run", c.DryRun, "Report what would be rolled and write nothing to workloads.")
}

// Validate returns all problems, joined; each names its flag.
func (c *Config) Validate(s controllers.Settings) error {
	var errs []error
	bad := func(flag, format string, args ...any) {
		errs = append(errs, fmt.Errorf("--"+flagPrefix+flag+": "+format, args...))
	}
	if c.Strategy != policy.StrategyEnvVars && c.Strategy != policy.StrategyAnnotations {
		bad("strategy", "must be one of %s, %s, got %q", policy.StrategyEnvVars, policy.StrategyAnnotations, c.Strategy)
	}
	if c.QuietPeriod < 0 {
		bad("quiet-period", "must not be negative, got %v", c.QuietPeriod)
	}
	if c.MaxDelay < c.QuietPeriod {
		bad("max-delay", "must be at least the quiet period (%v), got %v", c.QuietPeriod, c.MaxDelay)
	}
	c.validateNames(bad)
	if len(s.Namespaces) > 0 {
		if c.needsNamespaces() {
			bad("namespace-selector", "needs the labels of Namespaces, which are not read with --namespaces; list the namespaces there")
		}
		for _, namespace := range c.IncludeNamespaces {
			if !slices.Contains(s.Namespaces, namespace) {
				bad("include-namespaces", "%q is not in --namespaces, so nothing would be read there", namespace)
			}
		}
	}
	return errors.Join(errs...)
}

func (c *Config) validateNames(bad func(flag, format string, args ...any)) {
	if _, err := parseSelector(c.NamespaceSelector); err != nil {
		bad("namespace-selector", "%w", err)
	}
	if _, err := parseSelector(c.SourceSelector); err != nil {
		bad("source-selector", "%w", err)
	}
	checkNamespaces := func(flag string, list []string) {
		for _, namespace := range list {
			if problems := validation.IsDNS1123Label(namespace); len(problems) > 0 {
				bad(flag, "%q: %s", namespace, strings.Join(problems, "; "))
			}
		}
	}
	checkNamespaces("include-namespaces", c.IncludeNamespaces)
	checkNamespaces("exclude-namespaces", c.ExcludeNamespaces)
	excluded := map[policy.SourceType]bool{}
	for _, item := range c.ExcludeSources {
		switch strings.ToLower(item) {
		case "configmaps":
			excluded[policy.ConfigMap] = true
		case "secrets":
			excluded[policy.Secret] = true
		default:
			bad("exclude-sources", "must be configmaps or secrets, got %q", item)
		}
	}
	if len(excluded) == 2 {
		bad("exclude-sources", "must leave one of configmaps and secrets")
	}
	for _, item := range c.ExcludeKinds {
		if names := pluralNames(); !slices.Contains(names, strings.ToLower(item)) {
			bad("exclude-kinds", "must be one of %s, got %q", strings.Join(names, ", "), item)
		}
	}
	for _, logical := range slices.Sorted(maps.Keys(c.AnnotationKeys)) {
		key := c.AnnotationKeys[logical]
		if !slices.Contains(policy.LogicalNames(), logical) {
			bad("annotation-key", "unknown name %q, known are %s", logical, strings.Join(policy.LogicalNames(), ", "))
		}
		if problems := validation.IsQualifiedName(key); len(problems) > 0 {
			bad("annotation-key", "%s: %q is not an annotation key: %s", logical, key, strings.Join(problems, "; "))
		}
		if err := c.CheckKey(logical); err != nil {
			bad("annotation-key", "%w", err)
		}
	}
}

// parseSelector parses the value of a selector flag. Items are joined by commas; k:v means k=v; k:*
// and k=* require only that the label exists. Without items the selector selects everything.
func parseSelector(items []string) (labels.Selector, error) {
	var parts []string
	for item := range strings.SplitSeq(strings.Join(items, ","), ",") {
		item = strings.TrimSpace(item)
		if key, value, ok := strings.Cut(item, ":"); ok && !strings.Contains(item, "=") {
			item = key + "=" + value
		}
		if key, ok := strings.CutSuffix(item, "=*"); ok {
			item = strings.TrimSuffix(key, "=")
		}
		if item != "" {
			parts = append(parts, item)
		}
	}
	selector, err := labels.Parse(strings.Join(parts, ","))
	if err != nil {
		return nil, fmt.Errorf("label selector: %w", err)
	}
	return selector, nil
}

// watchesType reports whether sources of a type count.
func (c *Config) watchesType(typ policy.SourceType) bool {
	if typ == policy.SecretProviderClass {
		return c.CSI
	}
	return !slices.ContainsFunc(c.ExcludeSources, func(item string) bool {
		return strings.EqualFold(item, typ.String()+"s")
	})
}

func (c *Config) watchedTypes() []policy.SourceType {
	return slices.DeleteFunc(slices.Clone(policy.SourceTypes), func(typ policy.SourceType) bool { return !c.watchesType(typ) })
}

func (c *Config) annotationKeys() *policy.AnnotationKeys {
	return policy.NewAnnotationKeys(&c.Options, c.watchedTypes())
}

// rollsKind reports whether workloads of a kind are rolled.
func (c *Config) rollsKind(k *kindInfo) bool {
	if k.custom && !c.ArgoRollouts {
		return false
	}
	return !slices.ContainsFunc(c.ExcludeKinds, func(item string) bool { return strings.EqualFold(item, k.resource.Resource) })
}

func (c *Config) needsNamespaces() bool {
	return len(c.IncludeNamespaces) == 0 && len(c.NamespaceSelector) > 0
}
