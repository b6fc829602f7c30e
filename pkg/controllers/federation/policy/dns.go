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

// DNSRecord is a ServiceDNSRecord or an IngressDNSRecord: it asks for DNS names of the Services or Ingresses of
// its own name and namespace in all clusters.
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

// Endpoint is a record of a DNSEndpoint.
type Endpoint struct {
	DNSName    string            `json:"dnsName"`
	RecordTTL  int64             `json:"recordTTL"`
	RecordType string            `json:"recordType"`
	Targets    []string          `json:"targets"`
	Labels     map[string]string `json:"labels,omitempty"`
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

// Check returns why nothing may be written for a record. domain is the domain of a ServiceDNSRecord.
func (r *DNSRecord) Check(domain string) error {
	type named struct{ field, name string }
	var names []named
	for _, host := range r.Spec.Hosts {
		names = append(names, named{"hosts", strings.TrimPrefix(host, "*.")})
	}
	if !r.Ingress {
		names = []named{{"the name made of the record and its domain", r.global() + "." + domain}}
		if prefix := r.Spec.DNSPrefix; prefix != "" {
			names = append(names, named{"dnsPrefix", prefix + "." + domain})
		}
	}
	switch {
	case len(r.EndpointName()) > validation.DNS1123SubdomainMaxLength:
		return fmt.Errorf("metadata.name: %q would be too long as the name of a DNSEndpoint", cut(r.EndpointName(), 64)+"...")
	case r.Spec.RecordTTL < 0 || r.Spec.RecordTTL > math.MaxInt32:
		return fmt.Errorf("recordTTL: must be 0 to %d", math.MaxInt32)
	case r.Ingress && len(r.Spec.Hosts) > maxHosts:
		return fmt.Errorf("hosts: must be at most %d", maxHosts)
	case !r.Ingress && slices.Contains(strings.Split(r.Spec.DNSPrefix, "."), "svc"):
		return fmt.Errorf("dnsPrefix: must not have the label svc, which is for the names of Services")
	}
	for _, n := range names {
		long := slices.ContainsFunc(strings.Split(n.name, "."), func(label string) bool { return len(label) > validation.DNS1123LabelMaxLength })
		if long || len(validation.IsDNS1123Subdomain(n.name)) > 0 {
			return fmt.Errorf("%s: must be a DNS name in lower case, with at most 63 characters a label and 253 in all, got %q", n.field, cut(n.name, 64))
		}
	}
	return nil
}

// Last returns what the status says of a cluster, without what cannot be.
func (r *DNSRecord) Last(cluster string) (last ClusterDNS, known bool) {
	at := slices.IndexFunc(r.Status.DNS, func(c ClusterDNS) bool { return c.Cluster == cluster })
	if at < 0 {
		return last, false
	}
	last = r.Status.DNS[at]
	last.LoadBalancer.tidy()
	last.Topology = last.Valid()
	return last, true
}

// Endpoints returns the records, sorted by name. answers has the addresses of host names. Names that a
// cluster's zones and region make too long are left out.
func (r *DNSRecord) Endpoints(status DNSStatus, answers map[string][]string) (all []Endpoint) {
	records := map[string]*Endpoint{}
	// add adds a name that has addresses, or else leads to the next name. One name added twice is one record.
	add := func(name string, addresses []string, next string) *Endpoint {
		e := records[name]
		if e == nil {
			e = &Endpoint{DNSName: name, RecordTTL: cmp.Or(r.Spec.RecordTTL, defaultTTL), RecordType: "CNAME", Targets: []string{next}}
			records[name] = e
		}
		if len(addresses) > 0 && e.RecordType == "CNAME" {
			e.RecordType, e.Targets = "A", nil
		}
		e.Targets = append(e.Targets, addresses...)
		if r.Spec.ExternalName != "" {
			e.Labels = map[string]string{"serviceName": r.Name}
		}
		return e
	}
	under := func(name string) string { return name + "." + status.Domain }
	for _, c := range status.DNS {
		addresses, region := c.LoadBalancer.addresses(answers), r.global()+"."+c.Region
		if r.Ingress {
			for _, host := range r.Spec.Hosts {
				add(host, addresses, "")
			}
			continue
		}
		add(under(r.global()), addresses, "")
		if c.Region == "" {
			continue
		}
		add(under(region), addresses, under(r.global()))
		for _, zone := range c.Zones {
			add(under(r.global()+"."+zone+"."+c.Region), addresses, under(region))
		}
	}
	if !r.Ingress && r.Spec.DNSPrefix != "" {
		add(under(r.Spec.DNSPrefix), nil, under(r.global())).Labels = nil
	}
	for _, name := range slices.Sorted(maps.Keys(records)) {
		e := records[name]
		slices.Sort(e.Targets)
		if e.Targets = slices.Compact(e.Targets); e.Targets[0] != "" && len(name) <= validation.DNS1123SubdomainMaxLength {
			all = append(all, *e)
		}
	}
	return all
}

// Hosts returns the host names of load balancers.
func (s DNSStatus) Hosts() (hosts []string) {
	for _, c := range s.DNS {
		for _, i := range c.LoadBalancer.Ingress {
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
	s.LoadBalancer.tidy()
	return s.LoadBalancer
}

// tidy sorts the addresses, and drops those that cannot be, and those that are too many.
func (l *LoadBalancer) tidy() {
	l.Ingress = slices.DeleteFunc(slices.Clone(l.Ingress), func(i LoadBalancerIngress) bool {
		_, err := netip.ParseAddr(i.IP)
		return i.IP != "" && err != nil || i.Hostname != "" && len(validation.IsDNS1123Subdomain(i.Hostname)) > 0 || i == LoadBalancerIngress{}
	})
	slices.SortFunc(l.Ingress, func(a, b LoadBalancerIngress) int {
		return cmp.Or(cmp.Compare(a.IP, b.IP), cmp.Compare(a.Hostname, b.Hostname))
	})
	if l.Ingress = slices.Compact(l.Ingress); len(l.Ingress) > maxAddresses {
		l.Ingress = l.Ingress[:maxAddresses]
	}
	if len(l.Ingress) == 0 {
		l.Ingress = nil
	}
}

// addresses returns the IPv4 addresses, since A records have no others.
func (l LoadBalancer) addresses(answers map[string][]string) (all []string) {
	for _, i := range l.Ingress {
		if ip, err := netip.ParseAddr(i.IP); err == nil && ip.Is4() {
			all = append(all, i.IP)
		}
		all = append(all, answers[i.Hostname]...)
	}
	return all[:min(len(all), maxAddresses)]
}

// Valid returns the topology without names that cannot be in a DNS name, and without zones that are too many.
func (t Topology) Valid() (valid Topology) {
	for _, zone := range t.Zones {
		valid.add(zone, t.Region)
	}
	valid.add("", t.Region)
	return valid
}

// AddNode adds the labels of a Node. Of several regions, the first by name counts.
func (t *Topology) AddNode(labels map[string]string) {
	t.add(labels[corev1.LabelTopologyZone], labels[corev1.LabelTopologyRegion])
}

func (t *Topology) add(zone, region string) {
	if at, exists := slices.BinarySearch(t.Zones, zone); !exists && len(validation.IsDNS1123Label(zone)) == 0 {
		t.Zones = slices.Insert(t.Zones, at, zone)
		t.Zones = t.Zones[:min(len(t.Zones), maxZones)]
	}
	if len(validation.IsDNS1123Label(region)) == 0 && (t.Region == "" || region < t.Region) {
		t.Region = region
	}
}

// SummarizeEndpointSlice returns the name of the Service if there is a ready endpoint.
func SummarizeEndpointSlice(s *discoveryv1.EndpointSlice) []byte {
	ready := slices.ContainsFunc(s.Endpoints, func(e discoveryv1.Endpoint) bool { return e.Conditions.Ready == nil || *e.Conditions.Ready })
	if !ready {
		return nil
	}
	return []byte(s.Labels[discoveryv1.LabelServiceName])
}

// Answer returns the addresses of a host name in A records, of those that it was resolved to.
func Answer(resolved []netip.Addr) (addresses []string) {
	for _, ip := range resolved {
		if ip = ip.Unmap(); ip.Is4() {
			addresses = append(addresses, ip.String())
		}
	}
	slices.Sort(addresses)
	return addresses[:min(len(addresses), maxAddresses)]
}
