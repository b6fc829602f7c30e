// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package federation

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
)

const flagPrefix = "federation-"

// Config is what the flags say.
type Config struct {
	// Namespace is the federation namespace.
	Namespace string
	// UnreachableGracePeriod is how long a deleted federated object waits for a cluster that is away; 0 is for
	// ever.
	UnreachableGracePeriod time.Duration
	// RemovalGuard is the percentage of a cluster's managed objects that placement may delete at once.
	RemovalGuard int
	// ClusterQPS limits the requests to each cluster, per second.
	ClusterQPS int
	// UnsafeEndpoints allows http, and addresses that only the manager's Node can reach.
	UnsafeEndpoints bool
	// DNS says whether DNS records are written, as DNSEndpoints of DNSEndpointGroup.
	DNS              bool
	DNSEndpointGroup string
	// ProtectedNamespaces are never propagated: the process's own and the federation namespace.
	ProtectedNamespaces []string
}

// NewConfig returns the defaults.
func NewConfig() Config {
	return Config{Namespace: "kube-federation-system", UnreachableGracePeriod: 5 * time.Minute, RemovalGuard: 50, ClusterQPS: 50, DNSEndpointGroup: "externaldns.k8s.io"}
}

// dnsEndpoints returns the resource of DNSEndpoints.
func (c *Config) dnsEndpoints() schema.GroupVersionResource {
	return schema.GroupVersionResource{Group: c.DNSEndpointGroup, Version: "v1alpha1", Resource: "dnsendpoints"}
}

// AddFlags binds the flags.
func (c *Config) AddFlags(fs *pflag.FlagSet) {
	fs.StringVar(&c.Namespace, flagPrefix+"namespace", c.Namespace, "The namespace of KubeFedClusters, their Secrets, FederatedTypeConfigs and the KubeFedConfig.")
	fs.DurationVar(&c.UnreachableGracePeriod, flagPrefix+"unreachable-grace-period", c.UnreachableGracePeriod, ""+
		"How long a deleted federated object waits for a cluster that is away. Then the removal is recorded, and made when the cluster is back; 0 waits for ever.")
	fs.IntVar(&c.RemovalGuard, flagPrefix+"removal-guard", c.RemovalGuard, ""+
		"If placement would delete more than 10 objects of a cluster within a minute, and more than this percentage of those that it manages there, "+
		"it deletes none until somebody allows it; 0 always asks; 100 never, except in a cluster that was replaced.")
	fs.IntVar(&c.ClusterQPS, flagPrefix+"cluster-qps", c.ClusterQPS, "Requests to a cluster per second; twice as many in a burst.")
	fs.BoolVar(&c.UnsafeEndpoints, flagPrefix+"unsafe-endpoints", c.UnsafeEndpoints,
		"KubeFedClusters may name http, and loopback, link-local and unspecified addresses. For tests.")
	fs.BoolVar(&c.DNS, flagPrefix+"dns", c.DNS, "Write the DNSEndpoints of ServiceDNSRecords and IngressDNSRecords.")
	fs.StringVar(&c.DNSEndpointGroup, flagPrefix+"dns-endpoint-group", c.DNSEndpointGroup, "The API group of DNSEndpoints, of the version v1alpha1.")
}

// Validate returns all problems, joined; each names its flag.
func (c *Config) Validate(s controllers.Settings) error {
	var errs []error
	addError := func(flag, format string, args ...any) {
		errs = append(errs, fmt.Errorf("--"+flagPrefix+flag+": "+format, args...))
	}
	if problems := validation.IsDNS1123Label(c.Namespace); len(problems) > 0 {
		addError("namespace", "must be the name of a namespace, got %q: %s", c.Namespace, problems[0])
	}
	if slices.Contains(s.OwnNamespaces, c.Namespace) {
		addError("namespace", "%s is a namespace of the manager itself: its roles would cover the manager's own objects", c.Namespace)
	}
	if c.UnreachableGracePeriod < 0 {
		addError("unreachable-grace-period", "must not be negative, got %s", c.UnreachableGracePeriod)
	}
	if c.RemovalGuard < 0 || c.RemovalGuard > 100 {
		addError("removal-guard", "must be 0 to 100, got %d", c.RemovalGuard)
	}
	if c.ClusterQPS < 1 {
		addError("cluster-qps", "must be at least 1, got %d", c.ClusterQPS)
	}
	if problems := validation.IsDNS1123Subdomain(c.DNSEndpointGroup); len(problems) > 0 {
		addError("dns-endpoint-group", "must be an API group, got %q: %s", c.DNSEndpointGroup, problems[0])
	}
	return errors.Join(errs...)
}
