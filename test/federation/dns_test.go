// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package federation

import (
	"context"
	"encoding/json"
	"fmt"
	"reflect"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/federation/policy"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

var (
	ingresses      = schema.GroupVersionResource{Group: "networking.k8s.io", Version: "v1", Resource: "ingresses"}
	serviceRecords = schema.GroupVersionResource{Group: policy.DNSGroup, Version: "v1alpha1", Resource: "servicednsrecords"}
	dnsEndpoints   = schema.GroupVersionResource{Group: "externaldns.k8s.io", Version: "v1alpha1", Resource: "dnsendpoints"}
)

// dnsMembers are two members with the Service test-service, as in KubeFed's guide to multi-cluster DNS.
type dnsMembers struct{ *joinFixture }

func (n *dnsMembers) admin(member string) (kubernetes.Interface, dynamic.Interface) {
	if member == "c1" {
		return shared.Admin, n.c1
	}
	return n.admin2, n.c2
}

// setNode says where a member's only Node is, as "ZONE REGION"; "" is nowhere.
func (n *dnsMembers) setNode(member, topology string) {
	n.Helper()
	admin, _ := n.admin(member)
	labels := `{"topology.kubernetes.io/zone":null,"topology.kubernetes.io/region":null}`
	if zone, region, ok := strings.Cut(topology, " "); ok {
		labels = fmt.Sprintf(`{"topology.kubernetes.io/zone":%q,"topology.kubernetes.io/region":%q}`, zone, region)
	}
	_, err := admin.CoreV1().Nodes().Create(n.ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "dns"}}, metav1.CreateOptions{})
	if err == nil {
		n.Cleanup(func() { _ = admin.CoreV1().Nodes().Delete(context.Background(), "dns", metav1.DeleteOptions{}) })
	} else if !apierrors.IsAlreadyExists(err) {
		n.Fatal(err)
	}
	if _, err := admin.CoreV1().Nodes().Patch(n.ctx, "dns", types.MergePatchType, []byte(`{"metadata":{"labels":`+labels+`}}`), metav1.PatchOptions{}); err != nil {
		n.Fatal(err)
	}
}

// setLoadBalancer gives a member's Service and Ingress a load balancer, as a cloud does.
func (n *dnsMembers) setLoadBalancer(member, address string) {
	n.Helper()
	_, cluster := n.admin(member)
	for resource, name := range map[schema.GroupVersionResource]string{services: "test-service", ingresses: "test-ingress"} {
		n.waitForObject(cluster, resource, n.shop, name, managed)
		if _, err := cluster.Resource(resource).Namespace(n.shop).Patch(n.ctx, name, types.MergePatchType, []byte(`{"status":{"loadBalancer":{"ingress":[`+address+`]}}}`), metav1.PatchOptions{}, "status"); err != nil {
			n.Fatal(err)
		}
	}
}

// setPod gives a member's Service a Pod, which is ready or not, as a kubelet does.
func (n *dnsMembers) setPod(member, ready string) {
	n.Helper()
	admin, _ := n.admin(member)
	pods := admin.CoreV1().Pods(n.shop)
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "p", Labels: map[string]string{"app": "d"}}, Spec: corev1.PodSpec{NodeName: "dns", Containers: []corev1.Container{{Name: "c", Image: "i"}}}}
	fleet.Eventually(fleet.Within(n.ctx, n.T, fleet.Patience), n.T, func() error {
		_, err := pods.Create(n.ctx, pod, metav1.CreateOptions{}) // refused until the namespace has its ServiceAccount
		if err != nil && !apierrors.IsAlreadyExists(err) {
			return err
		}
		status := fmt.Sprintf(`{"status":{"phase":"Running","podIP":"10.9.9.9","podIPs":[{"ip":"10.9.9.9"}],"conditions":[{"type":"Ready","status":%q}]}}`, ready)
		_, err = pods.Patch(n.ctx, "p", types.StrategicMergePatchType, []byte(status), metav1.PatchOptions{}, "status")
		return err
	})
}

// waitForEndpoint waits until a DNSEndpoint has these records: "NAME TTL TYPE TARGETS", with P for what the
// names of the Service begin with and D for the domain.
func (n *dnsMembers) waitForEndpoint(name string, want ...string) {
	n.Helper()
	short := strings.NewReplacer("test-service."+n.shop+".test-domain.svc", "P", n.shop, "test-namespace", "your.domain.name", "D")
	n.waitForObject(n.c1, dnsEndpoints, n.shop, name, func(u *unstructured.Unstructured) bool {
		var got []string
		endpoints, _, _ := unstructured.NestedSlice(u.Object, "spec", "endpoints")
		for _, e := range endpoints {
			e := e.(map[string]any)
			got = append(got, short.Replace(fmt.Sprint(e["dnsName"], " ", e["recordTTL"], " ", e["recordType"], " ", e["targets"])))
		}
		return reflect.DeepEqual(got, want)
	})
}

// setEndpoint changes where the host looks for c2.
func (n *dnsMembers) setEndpoint(url, condition string) {
	n.Helper()
	n.patch(object(n.T, "kind: KubeFedCluster, metadata: {name: c2}"), fmt.Sprintf(`{"spec":{"apiEndpoint":%q}}`, url))
	n.waitForCondition("c2", condition)
}

// TestDNSRecordsReachExternalDNS begins with the example of KubeFed's guide to multi-cluster DNS. Names are
// resolved in TestDNSRecordBecomesADNSEndpoint of pkg/controllers/federation, which has a resolver of its
// own.
func TestDNSRecordsReachExternalDNS(t *testing.T) {
	n := &dnsMembers{newJoinFixture(t, 6*fleet.Patience)}
	n.shop = shared.NewNamespace(n.ctx, t, nil) // test-namespace in the example
	shared.InstallWith(n.ctx, t, "federation", "federation-dns")
	n.setNode("c1", "us-west1-b us-west1")
	n.setNode("c2", "us-west1-b us-west1")
	n.run(shared.Binary, "join", "c1", "--dns")
	n.run(shared.Binary, "join", "c2", "--dns")
	n.configure(`{"clusterHealthCheck":{"period":"2s"}}`)
	shared.RunLeader(n.ctx, t, "--controllers=federation", "--federation-unsafe-endpoints", "--federation-dns")
	n.federateNamespace(n.shop)
	n.create("kind: FederatedService, metadata: {name: test-service}, spec: {template: {spec: {type: LoadBalancer, selector: {app: d}, ports: [{port: 80}]}}, " + bothMembers + "}")
	n.create("kind: FederatedIngress, metadata: {name: test-ingress}, spec: {template: {spec: {defaultBackend: {service: {name: test-service, port: {number: 80}}}}}, " + bothMembers + "}")
	n.setLoadBalancer("c1", `{"ip":"192.0.2.1"}`)
	n.setLoadBalancer("c2", `{"ip":"192.0.2.2"}`)
	n.setPod("c1", "True")
	n.setPod("c2", "True")
	domain := object(t, "kind: Domain, metadata: {name: test-domain}, domain: your.domain.name")
	if _, err := client(domain).Create(n.ctx, domain, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = client(domain).Delete(context.Background(), domain.GetName(), metav1.DeleteOptions{}) })
	record := n.create("kind: ServiceDNSRecord, metadata: {name: test-service}, spec: {domainRef: test-domain, recordTTL: 300}")

	// The example, field by field. Its records have another order, which means nothing.
	const cluster = `{"cluster":%q,"loadBalancer":{"ingress":[{"ip":%q}]},"region":"us-west1","zones":["us-west1-b"]}`
	n.waitForObject(n.c1, serviceRecords, n.shop, "test-service", func(u *unstructured.Unstructured) bool {
		got, err := json.Marshal(u.Object["status"])
		return err == nil && string(got) == fmt.Sprintf(`{"dns":[`+cluster+`,`+cluster+`],"domain":"your.domain.name"}`, "c1", "192.0.2.1", "c2", "192.0.2.2")
	})
	const example = `{"dnsName":"test-service.test-namespace.test-domain.svc%s.your.domain.name","recordTTL":300,"recordType":"A","targets":["192.0.2.1","192.0.2.2"]}`
	n.waitForObject(n.c1, dnsEndpoints, n.shop, "service-test-service", func(u *unstructured.Unstructured) bool {
		got, err := json.Marshal(u.Object["spec"])
		return err == nil && strings.ReplaceAll(string(got), n.shop, "test-namespace") == fmt.Sprintf(`{"endpoints":[`+example+`,`+example+`,`+example+`]}`, ".us-west1-b.us-west1", ".us-west1", "") &&
			u.GetKind() == "DNSEndpoint" && len(u.GetLabels()) == 0 && len(u.GetAnnotations()) == 0 && u.Object["status"] == nil
	})
	const zone, region, all = "P.us-west1-b.us-west1.D", "P.us-west1.D", "P.D"

	t.Run("load balancers of clusters whose Service has endpoints", func(t *testing.T) {
		n := n.forDNSSubtest(t)
		n.setPod("c2", "False")
		n.waitForEndpoint("service-test-service", zone+" 300 A [192.0.2.1]", region+" 300 A [192.0.2.1]", all+" 300 A [192.0.2.1]")
		n.patch(record, `{"spec":{"allowServiceWithoutEndpoints":true}}`)
		n.waitForEndpoint("service-test-service", zone+" 300 A [192.0.2.1 192.0.2.2]", region+" 300 A [192.0.2.1 192.0.2.2]", all+" 300 A [192.0.2.1 192.0.2.2]")
		n.patch(record, `{"spec":{"allowServiceWithoutEndpoints":null}}`)
		n.waitForEndpoint("service-test-service", zone+" 300 A [192.0.2.1]", region+" 300 A [192.0.2.1]", all+" 300 A [192.0.2.1]")
		n.setPod("c2", "True")
		n.waitForEndpoint("service-test-service", zone+" 300 A [192.0.2.1 192.0.2.2]", region+" 300 A [192.0.2.1 192.0.2.2]", all+" 300 A [192.0.2.1 192.0.2.2]")
	})
	t.Run("a cluster that is not ready keeps its last", func(t *testing.T) {
		n := n.forDNSSubtest(t)
		n.setEndpoint("https://127.0.0.1:1", "Offline=True")
		n.patch(record, `{"spec":{"recordTTL":null}}`)
		n.waitForEndpoint("service-test-service", zone+" 180 A [192.0.2.1 192.0.2.2]", region+" 180 A [192.0.2.1 192.0.2.2]", all+" 180 A [192.0.2.1 192.0.2.2]")
	})
	t.Run("zones and region are those of the Nodes", func(t *testing.T) {
		n := n.forDNSSubtest(t)
		n.setNode("c2", "a eu") // read when the cluster is back
		n.setEndpoint(n.second.URL(), "Ready=True")
		n.waitForEndpoint("service-test-service", "P.a.eu.D 180 A [192.0.2.2]", "P.eu.D 180 A [192.0.2.2]",
			zone+" 180 A [192.0.2.1]", region+" 180 A [192.0.2.1]", all+" 180 A [192.0.2.1 192.0.2.2]")
	})
	t.Run("without addresses a CNAME to the next, the last omitted", func(t *testing.T) {
		n := n.forDNSSubtest(t)
		n.setPod("c2", "False")
		n.waitForEndpoint("service-test-service", "P.a.eu.D 180 CNAME [P.eu.D]", "P.eu.D 180 CNAME [P.D]",
			zone+" 180 A [192.0.2.1]", region+" 180 A [192.0.2.1]", all+" 180 A [192.0.2.1]")
		n.setPod("c1", "False")
		n.waitForEndpoint("service-test-service", "P.a.eu.D 180 CNAME [P.eu.D]", "P.eu.D 180 CNAME [P.D]", zone+" 180 CNAME ["+region+"]", region+" 180 CNAME [P.D]")
		n.setPod("c1", "True")
		n.setPod("c2", "True")
		n.waitForEndpoint("service-test-service", "P.a.eu.D 180 A [192.0.2.2]", "P.eu.D 180 A [192.0.2.2]",
			zone+" 180 A [192.0.2.1]", region+" 180 A [192.0.2.1]", all+" 180 A [192.0.2.1 192.0.2.2]")
	})
	t.Run("a cluster without region has only the domain", func(t *testing.T) {
		n := n.forDNSSubtest(t)
		n.setEndpoint("https://127.0.0.1:1", "Offline=True")
		n.setNode("c2", "")
		n.setEndpoint(n.second.URL(), "Ready=True")
		n.waitForEndpoint("service-test-service", zone+" 180 A [192.0.2.1]", region+" 180 A [192.0.2.1]", all+" 180 A [192.0.2.1 192.0.2.2]")
	})
	t.Run("externalName in place of the name, with a label, and a prefix", func(t *testing.T) {
		n := n.forDNSSubtest(t)
		n.patch(record, `{"spec":{"externalName":"www","dnsPrefix":"shop"}}`)
		n.waitForEndpoint("service-test-service", "shop.D 180 CNAME [www.test-namespace.test-domain.svc.D]", "www.test-namespace.test-domain.svc.us-west1-b.us-west1.D 180 A [192.0.2.1]",
			"www.test-namespace.test-domain.svc.us-west1.D 180 A [192.0.2.1]", "www.test-namespace.test-domain.svc.D 180 A [192.0.2.1 192.0.2.2]")
		n.waitForObject(n.c1, dnsEndpoints, n.shop, "service-test-service", func(u *unstructured.Unstructured) bool {
			list, _, _ := unstructured.NestedSlice(u.Object, "spec", "endpoints")
			var labels []any
			for _, e := range list {
				labels = append(labels, e.(map[string]any)["labels"])
			}
			return fmt.Sprint(labels) == "[<nil> map[serviceName:test-service] map[serviceName:test-service] map[serviceName:test-service]]"
		})
	})
	t.Run("an IngressDNSRecord has all load balancers", func(t *testing.T) {
		n := n.forDNSSubtest(t)
		n.create("kind: IngressDNSRecord, metadata: {name: test-ingress}, spec: {hosts: [ingress.example.com], recordTTL: 300}")
		n.waitForEndpoint("ingress-test-ingress", "ingress.example.com 300 A [192.0.2.1 192.0.2.2]")
	})
	t.Run("a record that is wrong writes nothing", func(t *testing.T) {
		n := n.forDNSSubtest(t)
		wrong := n.create("kind: ServiceDNSRecord, metadata: {name: wrong}, spec: {domainRef: test-domain, dnsPrefix: test-service." + n.shop + ".test-domain.svc}")
		fleet.Eventually(fleet.Within(n.ctx, t, fleet.Patience), t, func() error {
			list, err := shared.Admin.CoreV1().Events(n.shop).List(n.ctx, metav1.ListOptions{FieldSelector: "reason=InvalidDNSRecord,involvedObject.name=wrong"})
			if err == nil && len(list.Items) == 0 {
				err = fmt.Errorf("no Event on %s", wrong.GetName())
			}
			return err
		})
		n.waitForObject(n.c1, dnsEndpoints, n.shop, "service-wrong", nil)
	})
	t.Run("the DNSEndpoint goes with its record", func(t *testing.T) {
		n := n.forDNSSubtest(t)
		n.deleteAll([]*unstructured.Unstructured{record})
		n.waitForObject(n.c1, dnsEndpoints, n.shop, "service-test-service", nil)
	})
	if _, refused := n.memberRequests(); len(refused) > 0 {
		t.Errorf("refused were %q", refused)
	}
	// The Namespaces end after the Pods, which have no kubelet that would confirm their end.
	for _, admin := range []kubernetes.Interface{shared.Admin, n.admin2} {
		assert.NoError(t, admin.CoreV1().Pods(n.shop).Delete(n.ctx, "p", *metav1.NewDeleteOptions(0)))
	}
}

// forDNSSubtest returns the members for a subtest.
func (n *dnsMembers) forDNSSubtest(t *testing.T) *dnsMembers {
	t.Helper()
	return &dnsMembers{&joinFixture{n.forSubtest(t), n.kubeconfig}}
}
