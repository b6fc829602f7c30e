// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package federation_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/controllertest"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/federation"
)

// resolver is a DNS server whose names are set by tests.
type resolver struct {
	mu    sync.Mutex
	names map[string]any // an address or an error
}

// LookupNetIP is that of [net.Resolver].
func (r *resolver) LookupNetIP(_ context.Context, network, host string) ([]netip.Addr, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch answer := r.names[network+" "+host].(type) {
	case string:
		return []netip.Addr{netip.MustParseAddr(answer)}, nil
	case error:
		return nil, answer
	}
	return nil, &net.DNSError{Err: "no such host", Name: host, IsNotFound: true}
}

func (r *resolver) set(host string, answer any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.names["ip4 "+host+"."] = answer
}

// dnsFed is a fed with DNS.
type dnsFed struct {
	*fed
	names *resolver
}

// newDNSFed returns a fed with the Domain fed, which is ex.org, and the Service and the Ingress web in both
// clusters. The Nodes of c1 are in the region eu and the zone a, those of c2 have no labels.
func newDNSFed(t *testing.T) *dnsFed {
	t.Helper()
	names := &resolver{names: map[string]any{}}
	federation.SetLookup(t, names.LookupNetIP)
	n := &dnsFed{newFedWith(t, []string{"--federation-dns"}), names}
	n.Put(object(t, "{apiVersion: multiclusterdns.kubefed.io/v1alpha1, kind: Domain, metadata: {namespace: "+namespace+", name: fed}, domain: ex.org}"),
		federated(t, "Service", "web", "{template: {spec: {type: LoadBalancer, ports: [{port: 80}]}}, "+bothClusters+"}"),
		federated(t, "Ingress", "web", "{template: {spec: {defaultBackend: {service: {name: web, port: {number: 80}}}}}, "+bothClusters+"}"))
	n.Sleep(10 * time.Second)
	for c, address := range map[*controllertest.Cluster]string{n.c1: "1.1.1.1", n.c2: "2.2.2.2"} {
		n.setLoadBalancer(c, "{ip: "+address+"}")
		n.setEndpoints(c, "[{addresses: [10.0.0.1]}]")
		c.Put(object(t, "{apiVersion: v1, kind: Node, metadata: {name: node}}"))
	}
	n.Sleep(time.Second)
	n.Writes()
	return n
}

// dnsWrites returns the writes of records and DNSEndpoints since the last call.
func (n *dnsFed) dnsWrites() []string {
	return slices.DeleteFunc(n.Writes(), func(w string) bool { return !strings.Contains(w, "dns") })
}

// setLoadBalancer gives the Service and the Ingress a load balancer.
func (n *dnsFed) setLoadBalancer(c *controllertest.Cluster, addresses string) {
	n.t.Helper()
	for _, kind := range []string{"Service", "Ingress"} {
		n.set(c, kind, "shop", "web", "["+addresses+"]", "status", "loadBalancer", "ingress")
	}
}

// setEndpoints gives the Service the EndpointSlice that Kubernetes would make.
func (n *dnsFed) setEndpoints(c *controllertest.Cluster, endpoints string) {
	n.t.Helper()
	c.Put(object(n.t, "{apiVersion: discovery.k8s.io/v1, kind: EndpointSlice, metadata: {namespace: shop, name: web-x, labels: {kubefed.io/managed: 'true', kubernetes.io/service-name: web}}, addressType: IPv4, endpoints: "+endpoints+"}"))
}

// dnsRecord is a ServiceDNSRecord or, if the spec has hosts, an IngressDNSRecord.
func dnsRecord(t *testing.T, spec string) *unstructured.Unstructured {
	t.Helper()
	kind := "ServiceDNSRecord"
	if strings.Contains(spec, "hosts") {
		kind = "IngressDNSRecord"
	}
	return object(t, "{apiVersion: multiclusterdns.kubefed.io/v1alpha1, kind: "+kind+", metadata: {namespace: shop, name: web}, spec: {"+spec+"}}")
}

// expectRecords checks the records of a DNSEndpoint, such as "NAME A 1.1.1.1", without what all names of the
// Service begin with.
func (n *dnsFed) expectRecords(name string, want ...string) {
	n.t.Helper()
	var got []string
	if u := n.get(n.Host, "DNSEndpoint", "shop", name); u == nil {
		got = []string{"gone"}
	} else {
		endpoints, _, _ := unstructured.NestedSlice(u.Object, "spec", "endpoints")
		for _, e := range endpoints {
			text := fmt.Sprint(e.(map[string]any)["dnsName"], " ", e.(map[string]any)["recordType"], " ", e.(map[string]any)["targets"])
			got = append(got, strings.ReplaceAll(text, "web.shop.fed.svc", "P"))
		}
	}
	if !slices.Equal(got, want) {
		n.t.Errorf("records\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

const endpointApply = "apply dnsendpoints.externaldns.k8s.io shop/service-web"

func TestDNSRecordBecomesADNSEndpoint(t *testing.T) {
	const service, name = "domainRef: fed", "service-web"
	cutOff := func(n *dnsFed) {
		n.c1.Cut()
		n.Sleep(time.Minute)
	}
	for name, tc := range map[string]func(n *dnsFed){
		"load balancers of both clusters": func(n *dnsFed) {
			n.Put(dnsRecord(n.t, service))
			n.Sleep(20 * time.Second)
			n.expectRecords(name, "P.ex.org A [1.1.1.1 2.2.2.2]")
			if writes := n.dnsWrites(); !slices.Equal(writes, []string{"patch servicednsrecords.multiclusterdns.kubefed.io/status shop/web", endpointApply}) {
				n.t.Errorf("wrote %q", writes)
			}
			n.Sleep(9 * time.Minute)
			if writes := n.dnsWrites(); len(writes) > 0 {
				n.t.Errorf("wrote %q without a change", writes)
			}
		},
		"a new leader writes nothing": func(n *dnsFed) {
			n.setLoadBalancer(n.c1, "{hostname: lb.example.com}")
			n.names.set("lb.example.com", "9.9.9.9")
			n.Put(dnsRecord(n.t, service))
			n.Sleep(20 * time.Second)
			n.Writes()
			n.names.set("lb.example.com", errors.New("refused"))
			n.Restart()
			n.Sleep(5 * time.Minute)
			n.expectRecords(name, "P.ex.org A [2.2.2.2 9.9.9.9]")
			if writes := n.dnsWrites(); len(writes) > 0 {
				n.t.Errorf("wrote %q", writes)
			}
		},
		"a load balancer that changes": func(n *dnsFed) {
			n.Put(dnsRecord(n.t, service))
			n.Sleep(20 * time.Second)
			n.setLoadBalancer(n.c1, "{ip: 1.1.1.2}")
			n.Sleep(time.Second)
			n.expectRecords(name, "P.ex.org A [1.1.1.2 2.2.2.2]")
		},
		"a Service without ready endpoints": func(n *dnsFed) {
			n.Put(dnsRecord(n.t, service))
			n.Sleep(20 * time.Second)
			n.setEndpoints(n.c1, "[{addresses: [10.0.0.1], conditions: {ready: false}}]")
			n.Sleep(time.Second)
			n.expectRecords(name, "P.ex.org A [2.2.2.2]")
			n.set(n.Host, "ServiceDNSRecord", "shop", "web", "true", "spec", "allowServiceWithoutEndpoints")
			n.Sleep(time.Second)
			n.expectRecords(name, "P.ex.org A [1.1.1.1 2.2.2.2]")
		},
		"a cluster that is away keeps its last": func(n *dnsFed) {
			n.Put(dnsRecord(n.t, service))
			n.Sleep(20 * time.Second)
			cutOff(n)
			n.set(n.Host, "ServiceDNSRecord", "shop", "web", "7", "spec", "recordTTL")
			n.Sleep(20 * time.Second)
			n.expectRecords(name, "P.ex.org A [1.1.1.1 2.2.2.2]")
			n.Delete(n.get(n.Host, "KubeFedCluster", namespace, "c1"))
			n.Sleep(20 * time.Second)
			n.expectRecords(name, "P.ex.org A [2.2.2.2]")
		},
		"host names are resolved every minute, and a failure keeps the last answer": func(n *dnsFed) {
			n.setLoadBalancer(n.c1, "{hostname: lb.example.com}")
			n.names.set("lb.example.com", "9.9.9.9")
			n.Put(dnsRecord(n.t, service))
			n.Sleep(20 * time.Second)
			n.expectRecords(name, "P.ex.org A [2.2.2.2 9.9.9.9]")
			n.names.set("lb.example.com", nil)
			n.Sleep(2 * time.Minute)
			n.setLoadBalancer(n.c2, "{ip: 2.2.2.3}")
			n.Sleep(time.Second)
			n.expectRecords(name, "P.ex.org A [2.2.2.3 9.9.9.9]")
			n.names.set("lb.example.com", "9.9.9.8")
			n.Sleep(2 * time.Minute)
			n.expectRecords(name, "P.ex.org A [2.2.2.3 9.9.9.8]")
		},
		"zones and region of the Nodes": func(n *dnsFed) {
			n.Put(dnsRecord(n.t, service))
			n.c1.Put(object(n.t, "{apiVersion: v1, kind: Node, metadata: {name: node, labels: {topology.kubernetes.io/zone: a, topology.kubernetes.io/region: eu}}}"))
			n.Sleep(11 * time.Minute)
			n.expectRecords(name, "P.a.eu.ex.org A [1.1.1.1]", "P.eu.ex.org A [1.1.1.1]", "P.ex.org A [1.1.1.1 2.2.2.2]")
			n.setEndpoints(n.c1, "[]")
			n.Sleep(time.Second)
			n.expectRecords(name, "P.a.eu.ex.org CNAME [P.eu.ex.org]", "P.eu.ex.org CNAME [P.ex.org]", "P.ex.org A [2.2.2.2]")
			n.c1.Put(object(n.t, "{apiVersion: v1, kind: Node, metadata: {name: node}}"))
			n.Sleep(11 * time.Minute)
			n.expectRecords(name, "P.ex.org A [2.2.2.2]")
		},
		"an Ingress": func(n *dnsFed) {
			n.Put(dnsRecord(n.t, "hosts: [a.org, '*.b.org']"))
			n.Sleep(20 * time.Second)
			n.expectRecords("ingress-web", "*.b.org A [1.1.1.1 2.2.2.2]", "a.org A [1.1.1.1 2.2.2.2]")
		},
		"a DNSEndpoint that somebody changes": func(n *dnsFed) {
			n.Put(dnsRecord(n.t, service))
			n.Sleep(20 * time.Second)
			n.set(n.Host, "DNSEndpoint", "shop", name, "[{dnsName: bank.ex.org, targets: [6.6.6.6]}]", "spec", "endpoints")
			n.Sleep(time.Second)
			n.expectRecords(name, "P.ex.org A [1.1.1.1 2.2.2.2]")
			n.Delete(n.get(n.Host, "DNSEndpoint", "shop", name))
			n.Sleep(time.Second)
			n.expectRecords(name, "P.ex.org A [1.1.1.1 2.2.2.2]")
			owners := n.get(n.Host, "DNSEndpoint", "shop", name).GetOwnerReferences()
			if len(owners) != 1 || owners[0].Kind != "ServiceDNSRecord" || owners[0].UID != n.get(n.Host, "ServiceDNSRecord", "shop", "web").GetUID() {
				n.t.Errorf("owned by %v", owners)
			}
		},
		"no Domain yet": func(n *dnsFed) {
			n.Put(dnsRecord(n.t, "domainRef: other"))
			n.Sleep(20 * time.Second)
			n.expectRecords(name, "gone")
			n.expectWarnings("DomainMissing")
			n.Put(object(n.t, "{apiVersion: multiclusterdns.kubefed.io/v1alpha1, kind: Domain, metadata: {namespace: "+namespace+", name: other}, domain: other.org}"))
			n.Sleep(time.Second)
			n.expectRecords(name, "web.shop.other.svc.other.org A [1.1.1.1 2.2.2.2]")
		},
		"hostile records": func(n *dnsFed) {
			n.Put(dnsRecord(n.t, "hosts: ["+strings.Repeat("a.org, ", 5000)+"a.org]"), dnsRecord(n.t, service+", dnsPrefix: web.bank.fed.svc"))
			n.Sleep(20 * time.Second)
			n.expectRecords(name, "gone")
			n.expectRecords("ingress-web", "gone")
			n.expectWarnings("InvalidDNSRecord")
			for _, spec := range []string{"externalName: 'a b'", "dnsPrefix: " + strings.Repeat("x", 300), "recordTTL: -1", "recordTTL: long", "externalName: " + strings.Repeat("x", 64), "domainRef: " + strings.Repeat("x", 300)} {
				n.Put(dnsRecord(n.t, strings.TrimPrefix(spec, "domainRef: fed, ")+map[bool]string{true: "", false: ", " + service}[strings.HasPrefix(spec, "domainRef")]))
				n.Sleep(5 * time.Second)
				n.expectRecords(name, "gone")
			}
			if events := slices.DeleteFunc(n.Events(), func(e string) bool { return !strings.Contains(e, "InvalidDNSRecord") }); len(events) != 6 {
				n.t.Errorf("%d Events:\n%s", len(events), strings.Join(events, "\n"))
			}
			n.Put(dnsRecord(n.t, service))
			n.Sleep(5 * time.Second)
			n.expectRecords(name, "P.ex.org A [1.1.1.1 2.2.2.2]")
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { tc(newDNSFed(t)) })
		})
	}
}

func init() {
	resources["Service"] = schema.GroupVersionResource{Version: "v1", Resource: "services"}
	resources["Ingress"] = schema.GroupVersionResource{Group: "networking.k8s.io", Version: "v1", Resource: "ingresses"}
	resources["DNSEndpoint"] = schema.GroupVersionResource{Group: "externaldns.k8s.io", Version: "v1alpha1", Resource: "dnsendpoints"}
	resources["ServiceDNSRecord"] = federation.ServiceDNSRecords
}
