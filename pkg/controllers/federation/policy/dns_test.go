// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// dnsRecord reads a ServiceDNSRecord web in the namespace shop, or an IngressDNSRecord if the spec has hosts.
func dnsRecord(t *testing.T, spec string) *DNSRecord {
	t.Helper()
	u := &unstructured.Unstructured{}
	kind := "ServiceDNSRecord"
	if strings.Contains(spec, `"hosts"`) {
		kind = "IngressDNSRecord"
	}
	err := u.UnmarshalJSON(fmt.Appendf(nil, `{"apiVersion":"v1","kind":%q,"metadata":{"namespace":"shop","name":"web"},"spec":{%s}}`, kind, spec))
	if err != nil {
		t.Fatal(err)
	}
	r, err := ReadDNSRecord(u)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// clusterDNS reads "NAME REGION ZONE,ZONE ADDRESS,ADDRESS"; - is none.
func clusterDNS(text string) ClusterDNS {
	parts := strings.Fields(text)
	list := func(s string) []string {
		return strings.FieldsFunc(s, func(r rune) bool { return r == ',' || r == '-' && len(s) == 1 })
	}
	c := ClusterDNS{Cluster: parts[0], Topology: Topology{Region: strings.Trim(parts[1], "-"), Zones: list(parts[2])}}
	for _, address := range list(parts[3]) {
		if _, err := netip.ParseAddr(address); err == nil {
			c.LoadBalancer.Ingress = append(c.LoadBalancer.Ingress, LoadBalancerIngress{IP: address})
		} else {
			c.LoadBalancer.Ingress = append(c.LoadBalancer.Ingress, LoadBalancerIngress{Hostname: address})
		}
	}
	return c
}

func TestEndpoints(t *testing.T) {
	const service, short = `"domainRef":"fed"`, "web.shop.fed.svc."
	var many []string
	for i := range 100 {
		many = append(many, fmt.Sprint("10.0.0.", 100+i))
	}
	for name, test := range map[string]struct {
		spec     string
		clusters []string
		want     []string // NAME TTL TYPE TARGETS
	}{
		"zone, region and domain": {service, []string{"c1 eu a 1.1.1.1"},
			[]string{short + "a.eu.ex.org 180 A 1.1.1.1", short + "eu.ex.org 180 A 1.1.1.1", short + "ex.org 180 A 1.1.1.1"}},
		"addresses of several clusters": {service, []string{"c1 eu a 1.1.1.2,1.1.1.1", "c2 eu b 2.2.2.2", "c3 us a 3.3.3.3"}, []string{
			short + "a.eu.ex.org 180 A 1.1.1.1 1.1.1.2", short + "a.us.ex.org 180 A 3.3.3.3", short + "b.eu.ex.org 180 A 2.2.2.2",
			short + "eu.ex.org 180 A 1.1.1.1 1.1.1.2 2.2.2.2", short + "ex.org 180 A 1.1.1.1 1.1.1.2 2.2.2.2 3.3.3.3", short + "us.ex.org 180 A 3.3.3.3"}},
		"each zone of a cluster": {service, []string{"c1 eu a,b 1.1.1.1"}, []string{short + "a.eu.ex.org 180 A 1.1.1.1", short + "b.eu.ex.org 180 A 1.1.1.1",
			short + "eu.ex.org 180 A 1.1.1.1", short + "ex.org 180 A 1.1.1.1"}},
		"a zone without addresses leads to its region": {service, []string{"c1 eu a -", "c2 eu b 2.2.2.2"}, []string{
			short + "a.eu.ex.org 180 CNAME " + short + "eu.ex.org", short + "b.eu.ex.org 180 A 2.2.2.2", short + "eu.ex.org 180 A 2.2.2.2", short + "ex.org 180 A 2.2.2.2"}},
		"a region without addresses leads to the domain": {service, []string{"c1 eu a -", "c2 us b 2.2.2.2"}, []string{
			short + "a.eu.ex.org 180 CNAME " + short + "eu.ex.org", short + "b.us.ex.org 180 A 2.2.2.2",
			short + "eu.ex.org 180 CNAME " + short + "ex.org", short + "ex.org 180 A 2.2.2.2", short + "us.ex.org 180 A 2.2.2.2"}},
		"no addresses at all": {service, []string{"c1 eu a -"}, []string{
			short + "a.eu.ex.org 180 CNAME " + short + "eu.ex.org", short + "eu.ex.org 180 CNAME " + short + "ex.org"}},
		"a cluster without region has the domain only":   {service, []string{"c1 - a 1.1.1.1"}, []string{short + "ex.org 180 A 1.1.1.1"}},
		"a cluster with a region and no zone":            {service, []string{"c1 eu - 1.1.1.1"}, []string{short + "eu.ex.org 180 A 1.1.1.1", short + "ex.org 180 A 1.1.1.1"}},
		"one name twice: A beats CNAME, targets unite":   {service, []string{"c1 eu a -", "c2 eu a 2.2.2.2,1.1.1.1", "c3 eu a 1.1.1.1"}, []string{short + "a.eu.ex.org 180 A 1.1.1.1 2.2.2.2", short + "eu.ex.org 180 A 1.1.1.1 2.2.2.2", short + "ex.org 180 A 1.1.1.1 2.2.2.2"}},
		"host names are resolved":                        {service, []string{"c1 - - lb.example.com,1.1.1.1"}, []string{short + "ex.org 180 A 1.1.1.1 9.9.9.1 9.9.9.2"}},
		"host names that lead nowhere":                   {service, []string{"c1 eu - gone.example.com"}, []string{short + "eu.ex.org 180 CNAME " + short + "ex.org"}},
		"what is no address":                             {service, []string{"c1 - - 1.1.1.1.1,1.1.1.1"}, []string{short + "ex.org 180 A 1.1.1.1"}},
		"more addresses than may be used":                {service, []string{"c1 - - " + strings.Join(many[:100], ",")}, []string{short + "ex.org 180 A " + strings.Join(many[:maxAddresses], " ")}},
		"A records have no IPv6 addresses":               {service, []string{"c1 - - fd00::1,1.1.1.1"}, []string{short + "ex.org 180 A 1.1.1.1"}},
		"a TTL":                                          {service + `,"recordTTL":300`, []string{"c1 - - 1.1.1.1"}, []string{short + "ex.org 300 A 1.1.1.1"}},
		"externalName in place of the name, and a label": {service + `,"externalName":"www"`, []string{"c1 - - 1.1.1.1"}, []string{"www.shop.fed.svc.ex.org 180 A 1.1.1.1 serviceName=web"}},
		"a prefix":                     {service + `,"dnsPrefix":"www"`, []string{"c1 - - 1.1.1.1"}, []string{short + "ex.org 180 A 1.1.1.1", "www.ex.org 180 CNAME " + short + "ex.org"}},
		"a prefix has no label":        {service + `,"dnsPrefix":"p","externalName":"www"`, nil, []string{"p.ex.org 180 CNAME www.shop.fed.svc.ex.org"}},
		"no clusters":                  {service, nil, nil},
		"hosts of an Ingress":          {`"hosts":["b.org","*.a.org","b.org"],"recordTTL":7`, []string{"c1 eu a 1.1.1.1", "c2 us b 2.2.2.2"}, []string{"*.a.org 7 A 1.1.1.1 2.2.2.2", "b.org 7 A 1.1.1.1 2.2.2.2"}},
		"an Ingress without addresses": {`"hosts":["b.org"]`, []string{"c1 eu a -"}, nil},
		"a name that its zone makes too long": {service + `,"externalName":"` + strings.Repeat("abcdefg.", 24) + `a"`, []string{"c1 eu " + strings.Repeat("z", 60) + " 1.1.1.1"}, []string{
			strings.Repeat("abcdefg.", 24) + "a.shop.fed.svc.eu.ex.org 180 A 1.1.1.1 serviceName=web", strings.Repeat("abcdefg.", 24) + "a.shop.fed.svc.ex.org 180 A 1.1.1.1 serviceName=web"}},
	} {
		t.Run(name, func(t *testing.T) {
			status := DNSStatus{Domain: "ex.org"}
			for _, text := range test.clusters {
				status.DNS = append(status.DNS, clusterDNS(text))
			}
			r := dnsRecord(t, test.spec)
			if err := r.Check(status.Domain); err != nil {
				t.Fatal(err)
			}
			answers := map[string][]netip.Addr{}
			for _, address := range []string{"9.9.9.2", "::ffff:9.9.9.1", "fd00::9"} {
				answers["lb.example.com"] = append(answers["lb.example.com"], netip.MustParseAddr(address))
			}
			var got []string
			for _, e := range r.Endpoints(status, answers) {
				text := fmt.Sprint(e.DNSName, " ", e.RecordTTL, " ", e.RecordType, " ", strings.Join(e.Targets, " "))
				for key, value := range e.Labels {
					text += " " + key + "=" + value
				}
				got = append(got, text)
			}
			if !slices.Equal(got, test.want) {
				t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(test.want, "\n"))
			}
		})
	}
}

func TestCheckDNSRecord(t *testing.T) {
	hosts := func(n int) string {
		return `"hosts":["` + strings.TrimSuffix(strings.Repeat(`a.org","`, n), `","`) + `"]`
	}
	for name, test := range map[string]struct {
		spec, name, domain string
		want               string // the field that the error names; "" is none
	}{
		"a service":                              {spec: `"domainRef":"fed"`},
		"no domainRef":                           {want: "the name that the record and its domain make"},
		"a domain that is none":                  {spec: `"domainRef":"fed"`, domain: "ex_ample.org", want: "the name that the record and its domain make"},
		"an empty domain":                        {spec: `"domainRef":"fed"`, domain: "-", want: "the name that the record and its domain make"},
		"a label that is too long":               {spec: `"domainRef":"fed"`, name: strings.Repeat("a", 64), want: "the name that the record and its domain make"},
		"a name that is too long":                {spec: `"domainRef":"fed"`, name: strings.Repeat("a.", 120) + "a", want: "the name that the record and its domain make"},
		"a name too long for a DNSEndpoint":      {spec: `"domainRef":"fed"`, name: strings.Repeat("a.", 126) + "a", want: "metadata.name"},
		"an externalName that is none":           {spec: `"domainRef":"fed","externalName":"a b"`, want: "the name that the record and its domain make"},
		"a prefix of several labels":             {spec: `"domainRef":"fed","dnsPrefix":"a.b"`},
		"a prefix that is none":                  {spec: `"domainRef":"fed","dnsPrefix":"A"`, want: "the name that the record and its domain make"},
		"a prefix that names another's Service":  {spec: `"domainRef":"fed","dnsPrefix":"web.bank.fed.svc"`, want: "dnsPrefix"},
		"a negative TTL":                         {spec: `"domainRef":"fed","recordTTL":-1`, want: "recordTTL"},
		"a TTL that is too large":                {spec: `"domainRef":"fed","recordTTL":2147483648`, want: "recordTTL"},
		"an ingress":                             {spec: `"hosts":["a.org","*.a.org"]`},
		"a host that is none":                    {spec: `"hosts":["a.org","..."]`, want: "hosts"},
		"an empty host":                          {spec: `"hosts":[""]`, want: "hosts"},
		"a wildcard inside":                      {spec: `"hosts":["a.*.org"]`, want: "hosts"},
		"as many hosts as may be":                {spec: hosts(64)},
		"too many hosts":                         {spec: hosts(65), want: "hosts"},
		"a long text is cut where it is refused": {spec: `"domainRef":"fed","dnsPrefix":"` + strings.Repeat("A", 5000) + `"`, want: "the name that the record and its domain make"},
	} {
		t.Run(name, func(t *testing.T) {
			r := dnsRecord(t, test.spec)
			if test.name != "" {
				r.Name = test.name
			}
			domain := "ex.org"
			if test.domain != "" {
				domain = strings.Trim(test.domain, "-")
			}
			err := r.Check(domain)
			if got, _, _ := strings.Cut(fmt.Sprint(err), ":"); (err != nil || test.want != "") && got != test.want {
				t.Errorf("%v, want an error of %q", err, test.want)
			}
			if err != nil && len(err.Error()) > 300 {
				t.Errorf("the error is %d bytes long", len(err.Error()))
			}
		})
	}
}

func TestReadDNSRecordRefusesAnotherType(t *testing.T) {
	u := &unstructured.Unstructured{Object: map[string]any{"spec": map[string]any{"recordTTL": "long"}, "status": map[string]any{"dns": "none"}}}
	if r, err := ReadDNSRecord(u); err == nil || r.Status.DNS != nil {
		t.Errorf("%+v, %v", r, err)
	}
}

func TestLastFindsTheEntryOfACluster(t *testing.T) {
	r := &DNSRecord{Status: DNSStatus{DNS: []ClusterDNS{clusterDNS("c1 eu a 1.1.1.1"), clusterDNS("c2 eu a 2.2.2.2")}}}
	if got, known := r.Last("c2"); !known || !reflect.DeepEqual(got, r.Status.DNS[1]) {
		t.Errorf("%+v", got)
	}
	if _, known := r.Last("c3"); known {
		t.Error("a cluster without an entry is known")
	}
}

func TestReadLoadBalancer(t *testing.T) {
	many := make([]string, 1000)
	for i := range many {
		many[i] = fmt.Sprintf(`{"ip":"10.0.%d.%d"}`, i/256, i%256)
	}
	for name, test := range map[string]struct {
		status string
		want   int
	}{
		"addresses":             {`{"loadBalancer":{"ingress":[{"ip":"1.1.1.1","ports":[]},{"hostname":"a.org"},{"ip":"fd00::1"}]}}`, 3},
		"none":                  {`{"loadBalancer":{}}`, 0},
		"no status":             {"", 0},
		"a status too large":    {"true", 0},
		"another type":          {`{"loadBalancer":{"ingress":"1.1.1.1"}}`, 0},
		"one address twice":     {`{"loadBalancer":{"ingress":[{"ip":"1.1.1.1"},{"ip":"2.2.2.2"},{"ip":"1.1.1.1"}]}}`, 2},
		"more than may be used": {`{"loadBalancer":{"ingress":[` + strings.Join(many, ",") + `]}}`, maxAddresses},
	} {
		t.Run(name, func(t *testing.T) {
			if got := ReadLoadBalancer(RemoteStatus(test.status)); len(got.Ingress) != test.want {
				t.Errorf("%v, want %d", got.Ingress, test.want)
			}
		})
	}
	if hosts := (DNSStatus{DNS: []ClusterDNS{clusterDNS("c1 - - a.org,1.1.1.1"), clusterDNS("c2 - - b.org")}}).Hosts(); !slices.Equal(hosts, []string{"a.org", "b.org"}) {
		t.Errorf("hosts %q", hosts)
	}
}

func TestTopologyIsThatOfTheNodes(t *testing.T) {
	for name, test := range map[string]struct {
		nodes []string // REGION/ZONE
		want  string
	}{
		"zones are sorted":               {[]string{"eu/b", "eu/a", "eu/b"}, "eu [a b]"},
		"the first region by name":       {[]string{"us/a", "eu/b"}, "eu [a b]"},
		"Nodes without labels":           {[]string{"/", "eu/"}, "eu []"},
		"what cannot be in a DNS name":   {[]string{"e.u/A", "eu_1/a_b", "/a"}, " [a]"},
		"no Nodes":                       {nil, " []"},
		"more zones than may be counted": {strings.Split("eu/"+strings.Join(strings.Split("qponmlkjihgfedcba", ""), " eu/"), " "), "eu [a b c d e f g h i j k l m n o p]"},
	} {
		t.Run(name, func(t *testing.T) {
			var topology Topology
			for _, node := range test.nodes {
				region, zone, _ := strings.Cut(node, "/")
				labels := map[string]string{corev1.LabelTopologyRegion: region, corev1.LabelTopologyZone: zone}
				topology.AddNodes([]metav1.PartialObjectMetadata{{ObjectMeta: metav1.ObjectMeta{Labels: labels}}})
			}
			if got := fmt.Sprint(topology.Region, " ", topology.Zones); got != test.want {
				t.Errorf("%q, want %q", got, test.want)
			}
		})
	}
}

func TestSummarizeEndpointSlice(t *testing.T) {
	yes, no := true, false
	for name, test := range map[string]struct {
		endpoints []discoveryv1.Endpoint
		want      string
	}{
		"a ready endpoint":           {[]discoveryv1.Endpoint{{Conditions: discoveryv1.EndpointConditions{Ready: &no}}, {Conditions: discoveryv1.EndpointConditions{Ready: &yes}}}, "web"},
		"an endpoint that says none": {[]discoveryv1.Endpoint{{}}, "web"},
		"no ready endpoint":          {[]discoveryv1.Endpoint{{Conditions: discoveryv1.EndpointConditions{Ready: &no}}}, ""},
		"no endpoint":                {nil, ""},
	} {
		t.Run(name, func(t *testing.T) {
			slice := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{discoveryv1.LabelServiceName: "web"}}, Endpoints: test.endpoints}
			if got := string(SummarizeEndpointSlice(slice)); got != test.want {
				t.Errorf("%q, want %q", got, test.want)
			}
		})
	}
}
