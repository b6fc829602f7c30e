// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"cmp"
	"encoding/json"
	"errors"
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

// The reasons of Warnings on ServiceDNSRecords and IngressDNSRecords.
const (
	InvalidDNSRecord = "InvalidDNSRecord"
	DomainMissing    = "DomainMissing"
)

// DNSRecord is a ServiceDNSRecord or an IngressDNSRecord: it asks for DNS names of the Services or Ingresses
// of its own name and namespace in all clusters.
type DNSRecord struct {
	Namespace, Name string
	// Ingress is set if it is an IngressDNSRecord, which has Hosts. All others are a ServiceDNSRecord's.
	Ingress bool
	Spec    struct {
		Hosts        []string `json:"hosts"`
		RecordTTL    int64    `json:"recordTTL"`
		DomainRef    string   `json:"domainRef"`
		DNSPrefix    string   `json:"dnsPrefix"`
		ExternalName string   `json:"externalName"`
		// AllowEmpty lets load balancers count even if nothing is behind them.
		AllowEmpty bool `json:"allowServiceWithoutEndpoints"`
	}
	Status DNSStatus
}

// DNSStatus is the status of a DNSRecord.
type DNSStatus struct {
	Domain string       `json:"domain,omitempty"`
	DNS    []ClusterDNS `json:"dns,omitempty"`
}

// ClusterDNS is what is known of a cluster.
type ClusterDNS struct {
	Cluster      string       `json:"cluster"`
	LoadBalancer LoadBalancer `json:"loadBalancer"`
	Topology
}

// LoadBalancer is the load balancer of a Service or an Ingress.
type LoadBalancer struct {
	Ingress []LoadBalancerIngress `json:"ingress,omitempty"`
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

// Endpoint is a record of a DNSEndpoint. Its fields are in the order of their JSON names.
type Endpoint struct {
	DNSName    string            `json:"dnsName"`
	Labels     map[string]string `json:"labels,omitempty"`
	RecordTTL  int64             `json:"recordTTL"`
	RecordType string            `json:"recordType"`
	Targets    []string          `json:"targets"`
}

// ReadDNSRecord reads a ServiceDNSRecord or an IngressDNSRecord. A status that cannot be read counts as none.
func ReadDNSRecord(u *unstructured.Unstructured) (*DNSRecord, error) {
	r := &DNSRecord{Namespace: u.GetNamespace(), Name: u.GetName(), Ingress: u.GetKind() == "IngressDNSRecord"}
	if decode(u.Object["status"], &r.Status) != nil {
		r.Status = DNSStatus{}
	}
	if err := decode(u.Object["spec"], &r.Spec); err != nil {
		return r, fmt.Errorf("spec: %s", cut(err.Error(), maxError))
	}
	return r, nil
}

// EndpointName returns the name of the DNSEndpoint.
func (r *DNSRecord) EndpointName() string {
	if r.Ingress {
		return "ingress-" + r.Name
	}
	return "service-" + r.Name
}

// global returns the name that all clusters share, without the domain.
func (r *DNSRecord) global() string {
	return strings.Join([]string{cmp.Or(r.Spec.ExternalName, r.Name), r.Namespace, r.Spec.DomainRef, "svc"}, ".")
}

// validName reports whether a text is a DNS name.
func validName(name string) bool {
	long := slices.ContainsFunc(strings.Split(name, "."), func(label string) bool { return len(label) > validation.DNS1123LabelMaxLength })
	return !long && len(validation.IsDNS1123Subdomain(name)) == 0
}

// Check returns why nothing may be written for a record. domain is the domain of a ServiceDNSRecord.
func (r *DNSRecord) Check(domain string) error {
	field, names := "hosts", slices.Clone(r.Spec.Hosts)
	if !r.Ingress {
		field, names = "the name that the record and its domain make", []string{r.global() + "." + domain}
		if r.Spec.DNSPrefix != "" {
			names = append(names, r.Spec.DNSPrefix+"."+domain)
		}
	}
	switch {
	case len(r.EndpointName()) > validation.DNS1123SubdomainMaxLength:
		return errors.New("metadata.name: would be too long as the name of a DNSEndpoint")
	case r.Spec.RecordTTL < 0 || r.Spec.RecordTTL > math.MaxInt32:
		return fmt.Errorf("recordTTL: must be 0 to %d", math.MaxInt32)
	case len(r.Spec.Hosts) > maxHosts:
		return fmt.Errorf("hosts: must be at most %d", maxHosts)
	case slices.Contains(strings.Split(r.Spec.DNSPrefix, "."), "svc"):
		return errors.New("dnsPrefix: must not have the label svc, which is for the names of Services")
	}
	for _, name := range names {
		if r.Ingress {
			name = strings.TrimPrefix(name, "*.")
		}
		if !validName(name) {
			return fmt.Errorf("%s: must be a DNS name in lower case, with at most 63 characters a label and 253 in all, got %.64q", field, name)
		}
	}
	return nil
}

// Last returns what the status says of a cluster.
func (r *DNSRecord) Last(cluster string) (last ClusterDNS, known bool) {
	at := slices.IndexFunc(r.Status.DNS, func(c ClusterDNS) bool { return c.Cluster == cluster })
	if at < 0 {
		return last, false
	}
	return r.Status.DNS[at], true
}

// Endpoints returns the records, sorted by name. answers has the addresses of host names. Names that the zone
// or the region of a cluster makes too long are left out.
func (r *DNSRecord) Endpoints(status DNSStatus, answers map[string][]netip.Addr) []Endpoint {
	records, labels := map[string]Endpoint{}, map[string]string(nil)
	if r.Spec.ExternalName != "" {
		labels = map[string]string{"serviceName": r.Name}
	}
	// add adds a name that has addresses, or else leads to the next name. One name added twice is one record.
	add := func(name string, addresses []string, next string) {
		e, exists := records[name]
		if !exists {
			e = Endpoint{name, labels, cmp.Or(r.Spec.RecordTTL, defaultTTL), "CNAME", []string{next}}
		}
		if len(addresses) > 0 && e.RecordType == "CNAME" {
			e.RecordType, e.Targets = "A", nil
		}
		e.Targets = append(e.Targets, addresses...)
		records[name] = e
	}
	service := r.global()
	global := service + "." + status.Domain
	for _, c := range status.DNS {
		addresses, region := c.LoadBalancer.addresses(answers), c.Region+"."+status.Domain
		if r.Ingress {
			for _, host := range r.Spec.Hosts {
				add(host, addresses, "")
			}
			continue
		}
		add(global, addresses, "")
		if c.Region == "" {
			continue
		}
		add(service+"."+region, addresses, global)
		for _, zone := range c.Zones {
			add(service+"."+zone+"."+region, addresses, service+"."+region)
		}
	}
	if labels = nil; !r.Ingress && r.Spec.DNSPrefix != "" {
		add(r.Spec.DNSPrefix+"."+status.Domain, nil, global)
	}
	all := []Endpoint{}
	for _, name := range slices.Sorted(maps.Keys(records)) {
		e := records[name]
		slices.Sort(e.Targets)
		if e.Targets = slices.Compact(e.Targets); e.Targets[0] != "" && validName(strings.TrimPrefix(name, "*.")) {
			all = append(all, e)
		}
	}
	return all
}

// Hosts returns the host names of load balancers.
func (s DNSStatus) Hosts() (hosts []string) {
	for _, c := range s.DNS {
		for _, i := range c.LoadBalancer.counted() {
			if i.Hostname != "" {
				hosts = append(hosts, i.Hostname)
			}
		}
	}
	return hosts
}

// ReadLoadBalancer reads the load balancer in the status of a Service or an Ingress.
func ReadLoadBalancer(status RemoteStatus) LoadBalancer {
	var s struct{ LoadBalancer LoadBalancer }
	if json.Unmarshal(status, &s) != nil {
		return LoadBalancer{}
	}
	slices.SortFunc(s.LoadBalancer.Ingress, func(a, b LoadBalancerIngress) int {
		return cmp.Or(cmp.Compare(a.IP, b.IP), cmp.Compare(a.Hostname, b.Hostname))
	})
	return LoadBalancer{slices.Compact(s.LoadBalancer.counted())}
}

func (l LoadBalancer) counted() []LoadBalancerIngress {
	return l.Ingress[:min(len(l.Ingress), maxAddresses)]
}

// addresses returns the IPv4 addresses, since A records have no others.
func (l LoadBalancer) addresses(answers map[string][]netip.Addr) (all []string) {
	for _, i := range l.counted() {
		found := answers[i.Hostname]
		if ip, err := netip.ParseAddr(i.IP); err == nil {
			found = append(slices.Clone(found), ip)
		}
		for _, ip := range found {
			if ip = ip.Unmap(); ip.Is4() {
				all = append(all, ip.String())
			}
		}
	}
	slices.Sort(all)
	return all[:min(len(all), maxAddresses)]
}

// AddNodes adds the labels of Nodes that can be in a DNS name. Of several regions, the first by name counts.
func (t *Topology) AddNodes(nodes []metav1.PartialObjectMetadata) {
	for i := range nodes {
		zone, region := nodes[i].Labels[corev1.LabelTopologyZone], nodes[i].Labels[corev1.LabelTopologyRegion]
		if at, exists := slices.BinarySearch(t.Zones, zone); !exists && len(validation.IsDNS1123Label(zone)) == 0 {
			t.Zones = slices.Insert(t.Zones, at, zone)
			t.Zones = t.Zones[:min(len(t.Zones), maxZones)]
		}
		if len(validation.IsDNS1123Label(region)) == 0 && (t.Region == "" || region < t.Region) {
			t.Region = region
		}
	}
}

// SummarizeEndpointSlice returns the name of the Service if there is a ready endpoint.
func SummarizeEndpointSlice(s *discoveryv1.EndpointSlice) []byte {
	ready := slices.ContainsFunc(s.Endpoints, func(e discoveryv1.Endpoint) bool { return e.Conditions.Ready == nil || *e.Conditions.Ready })
	if name := s.Labels[discoveryv1.LabelServiceName]; ready && len(name) <= validation.DNS1123LabelMaxLength {
		return []byte(name)
	}
	return nil
}
