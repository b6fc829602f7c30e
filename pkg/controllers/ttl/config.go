// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package ttl

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/pflag"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/ttl/policy"
)

// Config configures the controller. The zero value is not valid; use [NewConfig].
type Config struct {
	policy.Options

	// Annotations are the families that count; empty means native, and what Compat names.
	Annotations []string
	// The host sets these three, and OwnNamespaces of the Options.
	Compat []policy.Family  // the families of the operators that this installation replaces
	Scope  []string         // the only namespaces that may be read and written; empty means all
	Pod    cache.ObjectName // the manager's Pod, if it is known
	// RulesFile has rules for objects without annotations, see package rules; empty means none.
	RulesFile string
	// DryRun deletes nothing.
	DryRun bool

	// Grace is how long an object that is due when it is first seen is left alone; 0 means not at all.
	Grace time.Duration
	// MaxDeletionsPerMinute is the limit per namespace; all together may be policy.TotalLimitFactor times as
	// many.
	MaxDeletionsPerMinute int
	BreakerCooldown       time.Duration
	// MaxClockSkew is how far the clock may be from the API server's; 0 switches the check off.
	MaxClockSkew time.Duration
}

// NewConfig returns the defaults of the flags.
func NewConfig() Config {
	return Config{
		Options: policy.Options{
			Include: []string{"*"}, Exclude: []string{"events", "controllerrevisions", "leases", "endpoints", "endpointslices"}, ClusterScoped: true,
		},
		Grace: time.Minute, MaxDeletionsPerMinute: 60, BreakerCooldown: 5 * time.Minute, MaxClockSkew: time.Minute,
	}
}

const flagPrefix = "ttl-"

// AddFlags binds the --ttl-* flags. The current values of c are their defaults.
func (c *Config) AddFlags(fs *pflag.FlagSet) {
	fs.StringSliceVar(&c.Annotations, flagPrefix+"annotations", c.Annotations,
		"The annotations that count: native, ttl-controller (k8s-ttl-controller's), janitor (kube-janitor's). Default: native and what --compat names.")
	fs.StringSliceVar(&c.Include, flagPrefix+"include-resources", c.Include, "The types whose objects may be deleted: plural, plural.group, plural. of the core group, *.group, *.")
	fs.StringSliceVar(&c.Exclude, flagPrefix+"exclude-resources", c.Exclude, "The types whose objects are never deleted, such as pods or *.example.com. Wins over --ttl-include-resources.")
	fs.StringSliceVar(&c.IncludeNamespaces, flagPrefix+"include-namespaces", c.IncludeNamespaces,
		"Names or globs of the namespaces that may be deleted, and whose objects may be deleted. Default: all.")
	fs.StringSliceVar(&c.ExcludeNamespaces, flagPrefix+"exclude-namespaces", c.ExcludeNamespaces,
		"Names or globs of the namespaces that are never deleted, nor are their objects. Wins over --ttl-include-namespaces.")
	fs.BoolVar(&c.ClusterScoped, flagPrefix+"cluster-scoped", c.ClusterScoped, "Objects without a namespace may be deleted, Namespaces among them.")
	fs.BoolVar(&c.JanitorClusterScoped, flagPrefix+"janitor-cluster-scoped", c.JanitorClusterScoped,
		"kube-janitor's annotations count on objects without a namespace. On Namespaces they always do.")
	fs.StringSliceVar(&c.AllowProtected, flagPrefix+"allow-protected", c.AllowProtected, ""+
		"What may be deleted although it is protected: nodes, persistentvolumes, customresourcedefinitions, "+
		"in:NAMESPACE for the objects in kube-system or the like, namespace:NAME for such a namespace itself.")
	fs.StringVar(&c.RulesFile, flagPrefix+"rules", c.RulesFile,
		"A file of rules that say which objects without annotations expire, and when. It is read at the start; ttl test shows what it would delete.")
	fs.DurationVar(&c.Grace, flagPrefix+"grace-period", c.Grace, ""+
		"How long to leave an object alone, after an Event on it, that is already due when it is first seen: restored from a backup, "+
		"applied with a past time, or overdue when this process begins to lead; 0 deletes it at once.")
	fs.IntVar(&c.MaxDeletionsPerMinute, flagPrefix+"max-deletions-per-minute", c.MaxDeletionsPerMinute, fmt.Sprintf(""+
		"When this many objects of a namespace were deleted within a minute and one more is due, nothing in the namespace is deleted for a while; "+
		"nothing at all if %d times as many were deleted in all namespaces; 0 means no limit. Annotations and rules each have this limit.", policy.TotalLimitFactor))
	fs.DurationVar(&c.BreakerCooldown, flagPrefix+"breaker-cooldown", c.BreakerCooldown, "How long deletions stop after --ttl-max-deletions-per-minute was reached; at least 1s.")
	fs.DurationVar(&c.MaxClockSkew, flagPrefix+"max-clock-skew", c.MaxClockSkew,
		"Nothing of a type is deleted while the clocks of the manager and of the type's API server are further apart: at least 2s, or 0, which switches the check off.")
	fs.BoolVar(&c.DryRun, flagPrefix+"dry-run", c.DryRun, "Delete nothing. Log what would be deleted, with an Event on it.")
}

// Validate returns all problems, joined; each names its flag.
func (c *Config) Validate(controllers.Settings) error {
	var errs []error
	bad := func(flag, format string, args ...any) {
		errs = append(errs, fmt.Errorf("--"+flagPrefix+flag+": "+format, args...))
	}
	options := c.Policy()
	options.Validate(bad)
	if c.Grace < 0 {
		bad("grace-period", "must not be negative, got %v", c.Grace)
	}
	if c.MaxDeletionsPerMinute < 0 {
		bad("max-deletions-per-minute", "must not be negative, got %d", c.MaxDeletionsPerMinute)
	}
	if c.MaxClockSkew != 0 && c.MaxClockSkew < 2*time.Second {
		bad("max-clock-skew", "must be 0 or at least 2s, because the API server's clock is known in whole seconds only, got %v", c.MaxClockSkew)
	}
	if c.BreakerCooldown < time.Second {
		bad("breaker-cooldown", "must be at least 1s, got %v", c.BreakerCooldown)
	}
	return errors.Join(errs...)
}

// Policy returns the options with the families that count.
func (c *Config) Policy() policy.Options {
	o := c.Options
	o.Families = append([]policy.Family{policy.Native}, c.Compat...)
	if len(c.Annotations) > 0 {
		o.Families = nil
		for _, family := range c.Annotations {
			o.Families = append(o.Families, policy.Family(family))
		}
	}
	return o
}

// permissions returns exactly what the controller needs under c.
func (c *Config) permissions() (rules []rbacv1.PolicyRule) {
	addRule := func(group, resource string, verbs ...string) {
		rules = append(rules, rbacv1.PolicyRule{APIGroups: []string{group}, Resources: []string{resource}, Verbs: verbs})
	}
	for _, item := range c.Include {
		plural, group, qualified := strings.Cut(item, ".")
		if !qualified {
			group = "*"
		}
		addRule(group, plural, "get", "list", "watch", "delete")
	}
	if len(c.Scope) == 0 {
		for _, r := range definitionResources {
			addRule(r.Group, r.Resource, "list", "watch")
		}
	}
	if len(c.Compat) > 0 {
		addRule("apps", "deployments", "list")
	}
	return rules
}
