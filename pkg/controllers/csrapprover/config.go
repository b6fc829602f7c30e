// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package csrapprover

import (
	"errors"
	"fmt"

	"github.com/spf13/pflag"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/csrapprover/policy"
)

// Config configures the controller. The zero value is not valid; use [NewConfig].
type Config struct {
	policy.Options

	// MaxApprovalsPerNodePerHour is how many requests of a node are approved within an hour; 0 means no limit.
	MaxApprovalsPerNodePerHour int
	// DenyFinal denies requests that can never be approved.
	DenyFinal bool
	// DryRun approves and denies nothing.
	DryRun bool
	// Pod is the manager's Pod, if it is known. The host sets it.
	Pod cache.ObjectName
}

// NewConfig returns the defaults of the flags.
func NewConfig() Config {
	return Config{Options: policy.Options{DNSRegex: "{node}", MaxDuration: policy.LongestDuration}, MaxApprovalsPerNodePerHour: 20}
}

const flagPrefix = Name + "-"

// AddFlags binds the --csr-approver-* flags. The current values of c are their defaults.
func (c *Config) AddFlags(fs *pflag.FlagSet) {
	fs.StringSliceVar(&c.IPRanges, flagPrefix+"ip-ranges", c.IPRanges,
		"CIDRs of the addresses that nodes have; required. 0.0.0.0/0,::/0 permits every address.")
	fs.StringVar(&c.DNSRegex, flagPrefix+"dns-regex", c.DNSRegex,
		"The regular expression that each DNS name must match as a whole, in lower case; {node} in it is the name of the Node.")
	fs.DurationVar(&c.MaxDuration, flagPrefix+"max-duration", c.MaxDuration, "The longest time that a certificate may be asked for, 8808h at most.")
	fs.IntVar(&c.MaxApprovalsPerNodePerHour, flagPrefix+"max-approvals-per-node-per-hour", c.MaxApprovalsPerNodePerHour, "How many requests of one node are approved within an hour; further ones wait. 0 means no limit.")
	fs.BoolVar(&c.DenyFinal, flagPrefix+"deny-final", c.DenyFinal,
		"Deny requests that can never be approved. By default they stay, so that somebody can approve them by hand.")
	fs.BoolVar(&c.DryRun, flagPrefix+"dry-run", c.DryRun, "Approve and deny nothing. Log what would be approved.")
}

// Validate returns all problems, joined; each names its flag. The host also validates controllers that are
// not enabled, so New, not Validate, requires the flags that have no default.
func (c *Config) Validate(controllers.Settings) error {
	var errs []error
	bad := func(flag, format string, args ...any) {
		errs = append(errs, fmt.Errorf("--"+flagPrefix+flag+": "+format, args...))
	}
	c.Options.Validate(bad)
	if c.MaxApprovalsPerNodePerHour < 0 {
		bad("max-approvals-per-node-per-hour", "must not be negative, got %d", c.MaxApprovalsPerNodePerHour)
	}
	return errors.Join(errs...)
}

func rule(group, resource string, verbs ...string) rbacv1.PolicyRule {
	return rbacv1.PolicyRule{APIGroups: []string{group}, Resources: []string{resource}, Verbs: verbs}
}

func permissions() []rbacv1.PolicyRule {
	approve := rule(certificatesv1.GroupName, "signers", "approve")
	approve.ResourceNames = []string{certificatesv1.KubeletServingSignerName}
	return []rbacv1.PolicyRule{
		rule(certificatesv1.GroupName, requestResource.Resource, "get"),
		rule(certificatesv1.GroupName, requestResource.Resource+"/approval", "update"),
		approve,
		rule(corev1.GroupName, nodeResource.Resource, "get"),
	}
}

// namespacePermissions hold in the namespace default, where the Service of the API server is.
func namespacePermissions() []rbacv1.PolicyRule {
	service := rule(corev1.GroupName, "services", "get")
	service.ResourceNames = []string{"kubernetes"}
	return []rbacv1.PolicyRule{service, rule(discoveryv1.GroupName, "endpointslices", "list")}
}
