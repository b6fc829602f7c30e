// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/validation"
)

const (
	// defaultTTL is the TTL of records that name none, in seconds.
	defaultTTL = 180
	// maxHosts is how many hosts an IngressDNSRecord may name. maxAddresses and maxZones are how many addresses
	// of a load balancer and how many zones of a cluster count, so that a DNSEndpoint is never too large to be
	// stored.
	maxHosts, maxAddresses, maxZones = 64, 16, 16
)

// DNSRecord is a ServiceDNSRecord or an IngressDNSRecord: it asks for DNS names of the Services or Ingresses
// of its own name and namespace in all clusters.
type DNSRecord struct {
	Namespace, Name string
	// IsIngress is set if it is an IngressDNSRecord, which has Hosts. All others are a ServiceDNSRecord's.
	IsIngress bool
	Spec      struct {
		Hosts        []string `json:"hosts"`
		RecordTTL    int64    `json:"recordTTL"`
		DomainRef    string   `json:"domainRef"`
		DNSPrefix    string   `json:"dnsPrefix"`
		ExternalName string   `json:"externalName"`
		// AllowEmpty lets load balancers count even if nothing is behind them.
		AllowEmpty bool `json:"allowServiceWithoutEndpoints"`
	}
	// Domain is the domain of a ServiceDNSRecord: the one that its Domain object has now.
	Domain string
	Status DNSStatus
	// LastByCluster is what the status says of each cluster.
	LastByCluster map[string]ClusterDNS
}

// DNSStatus is the status of a DNSRecord.
type DNSStatus struct {
	Domain string       `json:"domain,omitempty"`
	DNS    []ClusterDNS `json:"dns"`
}

// ClusterDNS is what is known of a cluster.
type ClusterDNS struct {
	Cluster      string `json:"cluster"`
	LoadBalancer struct {
		Ingress []LoadBalancerIngress `json:"ingress,omitempty"`
	} `json:"loadBalancer"`
	Topology
}

// LoadBalancerIngress is one of the addresses of a load balancer.
type LoadBalancerIngress struct {
	IP       string `json:"ip,omitempty"`
	Hostname string `json:"hostname,omitempty"`
}

// Topology is where the Nodes of a cluster are. Each name is a DNS label.
type Topology struct {
	Zones  []string `json:"zones,omitempty"`
	Region string   `json:"region,omitempty"`
}

// ReadDNSRecord reads a ServiceDNSRecord or an IngressDNSRecord, and finds its domain among the Domains. The
// problem is why nothing may be written for the record. A status that cannot be read counts as none.
func ReadDNSRecord(u *unstructured.Unstructured, domains []*unstructured.Unstructured) (*DNSRecord, Problem) {
	r := &DNSRecord{Namespace: u.GetNamespace(), Name: u.GetName(), IsIngress: u.GetKind() == "IngressDNSRecord", Status: statusOf[DNSStatus](u), LastByCluster: map[string]ClusterDNS{}}
	for _, c := range r.Status.DNS {
		r.LastByCluster[c.Cluster] = c
	}
	if err := decode(u.Object["spec"], &r.Spec); err != nil {
		return r, Problem{InvalidDNSRecord, "spec: " + truncate(err.Error(), maxError)}
	}
	for _, domain := range domains {
		if domain.GetName() == r.Spec.DomainRef {
			r.Domain, _, _ = unstructured.NestedString(domain.Object, "domain")
		}
	}
	return r, r.validate()
}

// validate returns what is wrong with a record.
func (r *DNSRecord) validate() Problem {
	switch {
	case !r.IsIngress && r.Domain == "":
		return Problem{DomainMissing, fmt.Sprintf("domainRef: the federation namespace has no Domain %.64q with a domain", r.Spec.DomainRef)}
	case r.Spec.RecordTTL < 0, r.Spec.RecordTTL > math.MaxInt32, len(r.Spec.Hosts) > maxHosts:
		return Problem{InvalidDNSRecord, fmt.Sprintf("recordTTL must be 0 to %d, and hosts at most %d", math.MaxInt32, maxHosts)}
	case slices.Contains(strings.Split(r.Spec.DNSPrefix, "."), "svc"):
		return Problem{InvalidDNSRecord, "dnsPrefix: must not have the label svc, which is for the names of Services"}
	}
	for _, name := range slices.Sorted(maps.Keys(r.names(Topology{}))) {
		if !r.validName(name) {
			return Problem{InvalidDNSRecord, fmt.Sprintf("the name %.64q: must be a DNS name in lower case, with at most 63 characters a label and 253 in all", name)}
		}
	}
	return Problem{}
}

// names returns the names for the load balancers of a cluster, each with the name to which it leads while it
// has no addresses.
func (r *DNSRecord) names(t Topology) map[string]string {
	names := map[string]string{}
	if r.IsIngress {
		for _, host := range r.Spec.Hosts {
			names[host] = ""
		}
		return names
	}
	service := strings.Join([]string{cmp.Or(r.Spec.ExternalName, r.Name), r.Namespace, r.Spec.DomainRef, "svc"}, ".")
	global, region := service+"."+r.Domain, service+"."+t.Region+"."+r.Domain
	names[global] = ""
	if r.Spec.DNSPrefix != "" {
		names[r.alias()] = global
	}
	if t.Region != "" {
		names[region] = global
		for _, zone := range t.Zones {
			names[service+"."+zone+"."+t.Region+"."+r.Domain] = region
		}
	}
	return names
}

// alias returns the name that has no addresses of its own, if there is a prefix.
func (r *DNSRecord) alias() string { return r.Spec.DNSPrefix + "." + r.Domain }

// validName reports whether a text is a DNS name.
func (r *DNSRecord) validName(name string) bool {
	if r.IsIngress {
		name = strings.TrimPrefix(name, "*.")
	}
	long := slices.ContainsFunc(strings.Split(name, "."), func(label string) bool { return len(label) > validation.DNS1123LabelMaxLength })
	return !long && len(validation.IsDNS1123Subdomain(name)) == 0
}

// Endpoints returns the endpoints of a DNSEndpoint, sorted by name. answers has the addresses of host names.
// Names that the zone or the region of a cluster makes too long are left out.
func (r *DNSRecord) Endpoints(clusters []ClusterDNS, answers map[string][]netip.Addr) []map[string]any {
	names, addresses := r.names(Topology{}), map[string][]string{}
	for _, c := range clusters {
		for name, next := range r.names(c.Topology) {
			names[name], addresses[name] = next, append(addresses[name], c.addresses(answers)...)
		}
	}
	delete(addresses, r.alias())
	endpoints := []map[string]any{}
	for _, name := range slices.Sorted(maps.Keys(names)) {
		kind, targets := "A", slices.Compact(slices.Sorted(slices.Values(addresses[name])))
		if len(targets) == 0 {
			kind, targets = "CNAME", []string{names[name]}
		}
		if targets[0] == "" || !r.validName(name) {
			continue
		}
		endpoint := map[string]any{"dnsName": name, "recordTTL": cmp.Or(r.Spec.RecordTTL, defaultTTL), "recordType": kind, "targets": targets}
		if r.Spec.ExternalName != "" && name != r.alias() {
			endpoint["labels"] = map[string]string{"serviceName": r.Name}
		}
		endpoints = append(endpoints, endpoint)
	}
	return endpoints
}

// ReadLoadBalancer reads the load balancer in the status of a Service or an Ingress. What is malformed there
// counts as absent.
func ReadLoadBalancer(status RemoteStatus) []LoadBalancerIngress {
	var c ClusterDNS // the status of a Service or an Ingress has the field of the same name
	_ = json.Unmarshal(status, &c)
	return c.LoadBalancer.Ingress[:min(len(c.LoadBalancer.Ingress), maxAddresses)]
}

// addresses returns the IPv4 addresses of the load balancer, since A records have no others.
func (c ClusterDNS) addresses(answers map[string][]netip.Addr) (addresses []string) {
	for _, ingress := range c.LoadBalancer.Ingress {
		address, _ := netip.ParseAddr(ingress.IP) // the zero Addr is not IPv4
		for _, ip := range append([]netip.Addr{address}, answers[ingress.Hostname]...) {
			if ip = ip.Unmap(); ip.Is4() {
				addresses = append(addresses, ip.String())
			}
		}
	}
	slices.Sort(addresses)
	return addresses[:min(len(addresses), maxAddresses)]
}

// AddNodes adds the labels of Nodes that can be in a DNS name. Of several regions, the first by name counts.
func (t *Topology) AddNodes(nodes []metav1.PartialObjectMetadata) {
	for i := range nodes {
		zone, region := nodes[i].Labels[corev1.LabelTopologyZone], nodes[i].Labels[corev1.LabelTopologyRegion]
		if len(validation.IsDNS1123Label(zone)) == 0 {
			t.Zones = slices.Compact(slices.Sorted(slices.Values(append(t.Zones, zone))))
			t.Zones = t.Zones[:min(len(t.Zones), maxZones)]
		}
		if len(validation.IsDNS1123Label(region)) == 0 {
			t.Region = min(cmp.Or(t.Region, region), region)
		}
	}
}

// SummarizeEndpointSlice returns the name of the Service if there is a ready endpoint.
func SummarizeEndpointSlice(s *discoveryv1.EndpointSlice) []byte {
	if slices.ContainsFunc(s.Endpoints, func(e discoveryv1.Endpoint) bool { return e.Conditions.Ready == nil || *e.Conditions.Ready }) {
		return []byte(s.Labels[discoveryv1.LabelServiceName])
	}
	return nil
}
