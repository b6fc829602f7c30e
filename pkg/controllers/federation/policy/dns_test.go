// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"cmp"
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

	"github.com/quartermaster-dev/quartermaster/internal/assert"
)

// readDNSRecord reads a ServiceDNSRecord of this name in the namespace shop, or an IngressDNSRecord if the
// spec has hosts. The Domain fed is the given one; "" is none.
func readDNSRecord(t *testing.T, name, spec, domain string) (*DNSRecord, Problem) {
	t.Helper()
	u := &unstructured.Unstructured{}
	kind := "ServiceDNSRecord"
	if strings.Contains(spec, `"hosts"`) {
		kind = "IngressDNSRecord"
	}
	err := u.UnmarshalJSON(fmt.Appendf(nil, `{"apiVersion":"v1","kind":%q,"metadata":{"namespace":"shop","name":%q},"spec":{%s}}`, kind, name, spec))
	assert.NoError(t, err)
	fed, other := &unstructured.Unstructured{Object: map[string]any{"domain": domain}}, &unstructured.Unstructured{Object: map[string]any{"domain": "other.org"}}
	fed.SetName("fed")
	other.SetName("other")
	return ReadDNSRecord(u, []*unstructured.Unstructured{fed, other})
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

func TestEndpointsFollowTheTopology(t *testing.T) {
	const service, prefix = `"domainRef":"fed"`, "web.shop.fed.svc."
	var many []string
	for i := range 100 {
		many = append(many, fmt.Sprint("10.0.0.", 100+i))
	}
	for name, tc := range map[string]struct {
		spec     string
		clusters []string
		want     []string // NAME TTL TYPE TARGETS
	}{
		"zone, region and domain": {service, []string{"c1 eu a 1.1.1.1"},
			[]string{prefix + "a.eu.ex.org 180 A 1.1.1.1", prefix + "eu.ex.org 180 A 1.1.1.1", prefix + "ex.org 180 A 1.1.1.1"}},
		"addresses of several clusters": {service, []string{"c1 eu a 1.1.1.2,1.1.1.1", "c2 eu b 2.2.2.2", "c3 us a 3.3.3.3"}, []string{
			prefix + "a.eu.ex.org 180 A 1.1.1.1 1.1.1.2", prefix + "a.us.ex.org 180 A 3.3.3.3", prefix + "b.eu.ex.org 180 A 2.2.2.2",
			prefix + "eu.ex.org 180 A 1.1.1.1 1.1.1.2 2.2.2.2", prefix + "ex.org 180 A 1.1.1.1 1.1.1.2 2.2.2.2 3.3.3.3", prefix + "us.ex.org 180 A 3.3.3.3"}},
		"each zone of a cluster": {service, []string{"c1 eu a,b 1.1.1.1"}, []string{prefix + "a.eu.ex.org 180 A 1.1.1.1", prefix + "b.eu.ex.org 180 A 1.1.1.1",
			prefix + "eu.ex.org 180 A 1.1.1.1", prefix + "ex.org 180 A 1.1.1.1"}},
		"a zone without addresses leads to its region": {service, []string{"c1 eu a -", "c2 eu b 2.2.2.2"}, []string{
			prefix + "a.eu.ex.org 180 CNAME " + prefix + "eu.ex.org", prefix + "b.eu.ex.org 180 A 2.2.2.2", prefix + "eu.ex.org 180 A 2.2.2.2", prefix + "ex.org 180 A 2.2.2.2"}},
		"a region without addresses leads to the domain": {service, []string{"c1 eu a -", "c2 us b 2.2.2.2"}, []string{
			prefix + "a.eu.ex.org 180 CNAME " + prefix + "eu.ex.org", prefix + "b.us.ex.org 180 A 2.2.2.2",
			prefix + "eu.ex.org 180 CNAME " + prefix + "ex.org", prefix + "ex.org 180 A 2.2.2.2", prefix + "us.ex.org 180 A 2.2.2.2"}},
		"no addresses at all": {service, []string{"c1 eu a -"}, []string{
			prefix + "a.eu.ex.org 180 CNAME " + prefix + "eu.ex.org", prefix + "eu.ex.org 180 CNAME " + prefix + "ex.org"}},
		"a cluster without region has the domain only":   {service, []string{"c1 - a 1.1.1.1"}, []string{prefix + "ex.org 180 A 1.1.1.1"}},
		"a cluster with a region and no zone":            {service, []string{"c1 eu - 1.1.1.1"}, []string{prefix + "eu.ex.org 180 A 1.1.1.1", prefix + "ex.org 180 A 1.1.1.1"}},
		"one name twice: A beats CNAME, targets unite":   {service, []string{"c1 eu a -", "c2 eu a 2.2.2.2,1.1.1.1", "c3 eu a 1.1.1.1"}, []string{prefix + "a.eu.ex.org 180 A 1.1.1.1 2.2.2.2", prefix + "eu.ex.org 180 A 1.1.1.1 2.2.2.2", prefix + "ex.org 180 A 1.1.1.1 2.2.2.2"}},
		"host names are resolved":                        {service, []string{"c1 - - lb.example.com,1.1.1.1"}, []string{prefix + "ex.org 180 A 1.1.1.1 9.9.9.1 9.9.9.2"}},
		"host names that lead nowhere":                   {service, []string{"c1 eu - gone.example.com"}, []string{prefix + "eu.ex.org 180 CNAME " + prefix + "ex.org"}},
		"what is no address":                             {service, []string{"c1 - - 1.1.1.1.1,1.1.1.1"}, []string{prefix + "ex.org 180 A 1.1.1.1"}},
		"more addresses than may be used":                {service, []string{"c1 - - " + strings.Join(many[:100], ",")}, []string{prefix + "ex.org 180 A " + strings.Join(many[:maxAddresses], " ")}},
		"A records have no IPv6 addresses":               {service, []string{"c1 - - fd00::1,1.1.1.1"}, []string{prefix + "ex.org 180 A 1.1.1.1"}},
		"a TTL":                                          {service + `,"recordTTL":300`, []string{"c1 - - 1.1.1.1"}, []string{prefix + "ex.org 300 A 1.1.1.1"}},
		"externalName in place of the name, and a label": {service + `,"externalName":"www"`, []string{"c1 - - 1.1.1.1"}, []string{"www.shop.fed.svc.ex.org 180 A 1.1.1.1 serviceName=web"}},
		"a prefix":                     {service + `,"dnsPrefix":"www"`, []string{"c1 - - 1.1.1.1"}, []string{prefix + "ex.org 180 A 1.1.1.1", "www.ex.org 180 CNAME " + prefix + "ex.org"}},
		"a prefix has no label":        {service + `,"dnsPrefix":"p","externalName":"www"`, nil, []string{"p.ex.org 180 CNAME www.shop.fed.svc.ex.org"}},
		"no clusters":                  {service, nil, nil},
		"hosts of an Ingress":          {`"hosts":["b.org","*.a.org","b.org"],"recordTTL":7`, []string{"c1 eu a 1.1.1.1", "c2 us b 2.2.2.2"}, []string{"*.a.org 7 A 1.1.1.1 2.2.2.2", "b.org 7 A 1.1.1.1 2.2.2.2"}},
		"an Ingress without addresses": {`"hosts":["b.org"]`, []string{"c1 eu a -"}, nil},
		"a name that its zone makes too long": {service + `,"externalName":"` + strings.Repeat("abcdefg.", 24) + `a"`, []string{"c1 eu " + strings.Repeat("z", 60) + " 1.1.1.1"}, []string{
			strings.Repeat("abcdefg.", 24) + "a.shop.fed.svc.eu.ex.org 180 A 1.1.1.1 serviceName=web", strings.Repeat("abcdefg.", 24) + "a.shop.fed.svc.ex.org 180 A 1.1.1.1 serviceName=web"}},
	} {
		t.Run(name, func(t *testing.T) {
			var clusters []ClusterDNS
			for _, text := range tc.clusters {
				clusters = append(clusters, clusterDNS(text))
			}
			r, problem := readDNSRecord(t, "web", tc.spec, "ex.org")
			if problem.Reason != "" {
				t.Fatal(problem)
			}
			answers := map[string][]netip.Addr{}
			for _, address := range []string{"9.9.9.2", "::ffff:9.9.9.1", "fd00::9"} {
				answers["lb.example.com"] = append(answers["lb.example.com"], netip.MustParseAddr(address))
			}
			var got []string
			for _, e := range r.Endpoints(clusters, answers) {
				text := fmt.Sprint(e["dnsName"], " ", e["recordTTL"], " ", e["recordType"], " ", strings.Join(e["targets"].([]string), " "))
				if labels, has := e["labels"]; has {
					text += " serviceName=" + labels.(map[string]string)["serviceName"]
				}
				got = append(got, text)
			}
			if !slices.Equal(got, tc.want) {
				t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(tc.want, "\n"))
			}
		})
	}
}

func TestInvalidDNSRecordHasAProblem(t *testing.T) {
	const service, name = `"domainRef":"fed"`, "must be a DNS name"
	hosts := func(n int) string {
		return `"hosts":["` + strings.TrimSuffix(strings.Repeat(`a.org","`, n), `","`) + `"]`
	}
	for title, tc := range map[string]struct {
		spec, name, domain string
		want               string // a part of the problem; "" is none
	}{
		"a service":                              {spec: service},
		"no domainRef":                           {want: "domainRef"},
		"a Domain that does not exist":           {spec: `"domainRef":"none"`, want: "domainRef"},
		"an empty domain":                        {spec: service, domain: "-", want: "domainRef"},
		"a domain that is none":                  {spec: service, domain: "ex_ample.org", want: name},
		"a label that is too long":               {spec: service, name: strings.Repeat("a", 64), want: name},
		"a name that is too long":                {spec: service, name: strings.Repeat("a.", 120) + "a", want: name},
		"an externalName that is none":           {spec: service + `,"externalName":"a b"`, want: name},
		"an externalName that is a wildcard":     {spec: service + `,"externalName":"*.a"`, want: name},
		"a prefix of several labels":             {spec: service + `,"dnsPrefix":"a.b"`},
		"a prefix that is none":                  {spec: service + `,"dnsPrefix":"A"`, want: name},
		"a prefix that is a wildcard":            {spec: service + `,"dnsPrefix":"*"`, want: name},
		"a prefix that names another's Service":  {spec: service + `,"dnsPrefix":"web.bank.fed.svc"`, want: "dnsPrefix"},
		"a negative TTL":                         {spec: service + `,"recordTTL":-1`, want: "recordTTL"},
		"a TTL that is too large":                {spec: service + `,"recordTTL":2147483648`, want: "recordTTL"},
		"a TTL that is no number":                {spec: service + `,"recordTTL":"long"`, want: "spec: "},
		"an ingress":                             {spec: `"hosts":["a.org","*.a.org"]`},
		"a host that is none":                    {spec: `"hosts":["a.org","..."]`, want: name},
		"an empty host":                          {spec: `"hosts":[""]`, want: name},
		"a wildcard inside":                      {spec: `"hosts":["a.*.org"]`, want: name},
		"as many hosts as may be":                {spec: hosts(64)},
		"too many hosts":                         {spec: hosts(65), want: "hosts"},
		"a long text is cut where it is refused": {spec: service + `,"dnsPrefix":"` + strings.Repeat("A", 5000) + `"`, want: name},
	} {
		t.Run(title, func(t *testing.T) {
			_, problem := readDNSRecord(t, cmp.Or(tc.name, "web"), tc.spec, strings.Trim(cmp.Or(tc.domain, "ex.org"), "-"))
			if (problem.Reason != "") != (tc.want != "") || !strings.Contains(problem.Text, tc.want) {
				t.Errorf("%v, want %q", problem, tc.want)
			}
			if len(problem.Text) > 300 {
				t.Errorf("the problem is %d bytes long", len(problem.Text))
			}
		})
	}
}

func TestReadDNSRecordReadsTheStatusOfEachCluster(t *testing.T) {
	status := map[string]any{"domain": "ex.org", "dns": []any{map[string]any{"cluster": "c1"},
		map[string]any{"cluster": "c2", "region": "eu", "zones": []any{"a"}, "loadBalancer": map[string]any{"ingress": []any{map[string]any{"ip": "2.2.2.2"}}}}}}
	r, _ := ReadDNSRecord(&unstructured.Unstructured{Object: map[string]any{"status": status}}, nil)
	if got, want := r.LastByCluster["c2"], clusterDNS("c2 eu a 2.2.2.2"); !reflect.DeepEqual(got, want) || len(r.LastByCluster) != 2 {
		t.Errorf("%+v, want %+v of c2", r.LastByCluster, want)
	}
	r, _ = ReadDNSRecord(&unstructured.Unstructured{Object: map[string]any{"status": map[string]any{"domain": "ex.org", "dns": "none"}}}, nil)
	if !reflect.DeepEqual(r.Status, DNSStatus{}) {
		t.Errorf("a status of another type is %+v", r.Status)
	}
}

func TestLoadBalancerAddressesAreLimited(t *testing.T) {
	many := make([]string, 1000)
	for i := range many {
		many[i] = fmt.Sprintf(`{"ip":"10.0.%d.%d"}`, i/256, i%256)
	}
	for name, tc := range map[string]struct {
		status string
		want   int
	}{
		"addresses":             {`{"loadBalancer":{"ingress":[{"ip":"1.1.1.1","ports":[]},{"hostname":"a.org"},{"ip":"fd00::1"}]}}`, 3},
		"none":                  {`{"loadBalancer":{}}`, 0},
		"no status":             {"", 0},
		"a status too large":    {"true", 0},
		"another type":          {`{"loadBalancer":{"ingress":"1.1.1.1"}}`, 0},
		"one of another type":   {`{"loadBalancer":{"ingress":[{"ip":1},{"ip":"1.1.1.1"}]}}`, 2},
		"more than may be used": {`{"loadBalancer":{"ingress":[` + strings.Join(many, ",") + `]}}`, maxAddresses},
	} {
		t.Run(name, func(t *testing.T) {
			if got := ReadLoadBalancer(RemoteStatus(tc.status)); len(got) != tc.want {
				t.Errorf("%v, want %d", got, tc.want)
			}
		})
	}
}

func TestTopologyIsThatOfTheNodes(t *testing.T) {
	for name, tc := range map[string]struct {
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
			for _, node := range tc.nodes {
				region, zone, _ := strings.Cut(node, "/")
				labels := map[string]string{corev1.LabelTopologyRegion: region, corev1.LabelTopologyZone: zone}
				topology.AddNodes([]metav1.PartialObjectMetadata{{ObjectMeta: metav1.ObjectMeta{Labels: labels}}})
			}
			if got := fmt.Sprint(topology.Region, " ", topology.Zones); got != tc.want {
				t.Errorf("%q, want %q", got, tc.want)
			}
		})
	}
}

func TestEndpointSliceSummaryNamesTheReadyService(t *testing.T) {
	yes, no := true, false
	for name, tc := range map[string]struct {
		endpoints []discoveryv1.Endpoint
		want      string
	}{
		"a ready endpoint":           {[]discoveryv1.Endpoint{{Conditions: discoveryv1.EndpointConditions{Ready: &no}}, {Conditions: discoveryv1.EndpointConditions{Ready: &yes}}}, "web"},
		"an endpoint that says none": {[]discoveryv1.Endpoint{{}}, "web"},
		"no ready endpoint":          {[]discoveryv1.Endpoint{{Conditions: discoveryv1.EndpointConditions{Ready: &no}}}, ""},
		"no endpoint":                {nil, ""},
	} {
		t.Run(name, func(t *testing.T) {
			slice := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{discoveryv1.LabelServiceName: "web"}}, Endpoints: tc.endpoints}
			if got := string(SummarizeEndpointSlice(slice)); got != tc.want {
				t.Errorf("%q, want %q", got, tc.want)
			}
		})
	}
}
