// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package scaleschedule

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/scaleschedule/policy"
)

// Config configures the controller. The zero value is not valid; use [NewConfig]. Compat, OwnNamespaces and
// Scope are set by the host: whether the annotations of the originals count, the manager's namespaces, and
// the only namespaces that may be read and written (empty means all).
type Config struct {
	policy.Options
	Kinds []string
	Scope []string
	// MaxWritesPerSecond limits the writes; 0 means no limit.
	MaxWritesPerSecond int
	// MaxClockSkew is how far the clock may be from the API server's; 0 switches the check off.
	MaxClockSkew time.Duration
	DryRun       bool
}

// NewConfig returns the defaults of the flags.
func NewConfig() Config {
	return Config{
		Options: policy.Options{GracePeriod: 15 * time.Minute, Hold: 15 * time.Minute},
		Kinds:   []string{"deployments", "statefulsets", "cronjobs"}, MaxWritesPerSecond: 20, MaxClockSkew: time.Minute,
	}
}

const flagPrefix = "scale-schedule-"

// AddFlags binds the --scale-schedule-* flags. The current values of c are their defaults.
func (c *Config) AddFlags(fs *pflag.FlagSet) {
	textFlag := func(p *string, name, help string) { fs.StringVar(p, flagPrefix+name, *p, help) }
	listFlag := func(p *[]string, name, help string) { fs.StringSliceVar(p, flagPrefix+name, *p, help) }
	listFlag(&c.Kinds, "kinds", "What is scaled: "+strings.Join(plurals(), ", ")+".")
	textFlag(&c.DefaultUptime, "default-uptime", "The uptime of workloads without a schedule of their own, such as 'Mon-Fri 07:30-20:30 Europe/Berlin'. Outside it they are down.")
	textFlag(&c.DefaultDowntime, "default-downtime", "The downtime of workloads without a schedule of their own. Outside it they are up.")
	textFlag(&c.UpscalePeriod, "upscale-period", "When to scale workloads up that have no schedule of their own. Outside this time they are left as they are.")
	textFlag(&c.DownscalePeriod, "downscale-period", "When to scale workloads down that have no schedule of their own. Outside this time they are left as they are.")
	textFlag(&c.ForceUptime, "force-uptime", "When workloads are up, whatever the other schedules say. It does not count for a workload that has, or whose Namespace has, force-uptime or force-downtime.")
	textFlag(&c.ForceDowntime, "force-downtime", "When workloads are down, whatever the other schedules say. It does not count for a workload that has, or whose Namespace has, force-uptime or force-downtime.")
	fs.IntVar(&c.DowntimeReplicas, flagPrefix+"downtime-replicas", c.DowntimeReplicas, "The replicas of a workload that is down. A CronJob that is down is always suspended.")
	fs.DurationVar(&c.GracePeriod, flagPrefix+"grace-period", c.GracePeriod, "How long a workload is not scaled down after its creation.")
	textFlag(&c.Timezone, "timezone", "The time zone of schedules that name none, such as Europe/Berlin. Without this flag such schedules are invalid.")
	textFlag(&c.Weekdays, "weekdays", "The days of schedules that name none, such as Mon-Fri. Without this flag such schedules are invalid.")
	fs.BoolVar(&c.Explicit, flagPrefix+"explicit", c.Explicit, "Scale only workloads that have the annotation exclude, such as exclude: \"false\", themselves or on their Namespace.")
	listFlag(&c.IncludeNamespaces, "include-namespaces", "Names or globs of the namespaces whose workloads are scaled. Default: all.")
	listFlag(&c.ExcludeNamespaces, "exclude-namespaces", "Names or globs of the namespaces whose workloads are left alone. Wins over --scale-schedule-include-namespaces.")
	listFlag(&c.ExcludeNames, "exclude-names", "Names or globs of the workloads that are left alone.")
	textFlag(&c.Selector, "selector", "Label selector of the workloads that are scaled. Default: all.")
	textFlag(&c.TimeAnnotation, "time-annotation", "Annotation of workloads with the time, in RFC 3339, from which the grace period counts in place of the creation.")
	listFlag(&c.AllowProtected, "allow-protected", "Protected namespaces whose workloads are scaled nevertheless: in:NAMESPACE. "+
		"Protected are kube-system, kube-public, kube-node-lease and the manager's own.")
	fs.DurationVar(&c.Hold, flagPrefix+"hold", c.Hold, "How long to leave a workload alone after somebody has scaled it up in its downtime.")
	fs.IntVar(&c.MaxWritesPerSecond, flagPrefix+"max-writes-per-second", c.MaxWritesPerSecond, "How many writes are sent per second; further ones wait. 0 means no limit. Pods that all start at once exhaust node autoscalers and image pulls.")
	fs.DurationVar(&c.MaxClockSkew, flagPrefix+"max-clock-skew", c.MaxClockSkew,
		"Nothing is written while the clocks of the manager and of the API server are further apart: at least 2s, or 0, which switches the check off.")
	fs.BoolVar(&c.DryRun, flagPrefix+"dry-run", c.DryRun, "Scale nothing. Log what would be scaled, with an Event on it.")
}

// plurals returns the names of the kinds.
func plurals() (names []string) {
	for _, k := range kinds() {
		names = append(names, k.plural)
	}
	return names
}

// Validate returns all problems, joined; each names its flag.
func (c *Config) Validate(controllers.Settings) error {
	var errs []error
	bad := func(flag, format string, args ...any) {
		errs = append(errs, fmt.Errorf("--"+flagPrefix+flag+": "+format, args...))
	}
	policy.NewEvaluator(c.Options, bad)
	for _, name := range c.Kinds {
		if !slices.Contains(plurals(), name) {
			bad("kinds", "must be one of %s, got %q", strings.Join(plurals(), ", "), name)
		}
	}
	if c.MaxWritesPerSecond < 0 {
		bad("max-writes-per-second", "must not be negative, got %d", c.MaxWritesPerSecond)
	}
	if c.MaxClockSkew != 0 && c.MaxClockSkew < 2*time.Second {
		bad("max-clock-skew", "must be 0 or at least 2s, because the API server's clock is known in whole seconds only, got %v", c.MaxClockSkew)
	}
	return errors.Join(errs...)
}

// evaluator returns the evaluator of a configuration that is valid.
func (c *Config) evaluator() *policy.Evaluator {
	return policy.NewEvaluator(c.Options, func(string, string, ...any) {})
}
