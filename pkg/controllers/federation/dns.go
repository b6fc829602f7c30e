// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package federation

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/federation/policy"
	"github.com/quartermaster-dev/quartermaster/pkg/informers"
)

var (
	serviceDNSRecords = schema.GroupVersionResource{Group: policy.DNSGroup, Version: "v1alpha1", Resource: "servicednsrecords"}
	ingressDNSRecords = schema.GroupVersionResource{Group: policy.DNSGroup, Version: "v1alpha1", Resource: "ingressdnsrecords"}
	domains           = schema.GroupVersionResource{Group: policy.DNSGroup, Version: "v1alpha1", Resource: "domains"}
	// dnsRecords are the records of the objects that have load balancers, by the name of the
	// FederatedTypeConfig.
	dnsRecords = map[string]schema.GroupVersionResource{"services": serviceDNSRecords, "ingresses.networking.k8s.io": ingressDNSRecords}
)

const (
	// dnsWorkers is how many records are reconciled at once.
	dnsWorkers = 5
	// topologyInterval is how often the Nodes of a cluster are read, nodePageSize the length of a page of them.
	topologyInterval = 10 * time.Minute
	nodePageSize     = 100
	// dnsRecheckInterval is how often a record is looked at, and its host names are resolved, without an event.
	dnsRecheckInterval = time.Minute
	// serviceIndex is an index of EndpointSlices.
	serviceIndex = "service"
)

// lookupNetIP resolves the host names of load balancers.
var lookupNetIP = net.DefaultResolver.LookupNetIP

// dnsLoop writes the DNSEndpoints of ServiceDNSRecords and IngressDNSRecords. The kind of a key is that of
// the objects that have the load balancers: the name of their FederatedTypeConfig.
type dnsLoop struct {
	keyLoop
	controller         *controller
	records            map[string]*informers.Informer[*unstructured.Unstructured]
	domains, endpoints *informers.Informer[*unstructured.Unstructured]
	// outcomes are, by key, the policy.Problem for which nothing was last written, or the last answers.
	outcomes sync.Map
}

func newDNSLoop(c *controller, options controllers.LoopOptions) (*dnsLoop, error) {
	type event = controllers.Event[*unstructured.Unstructured]
	l := &dnsLoop{controller: c, records: map[string]*informers.Informer[*unstructured.Unstructured]{},
		domains: informers.For[*unstructured.Unstructured](c.host, domains), endpoints: informers.For[*unstructured.Unstructured](c.host, c.cfg.dnsEndpoints())}
	everyRecord := func(event) (keys []queuedKey) {
		for kind, records := range l.records {
			for _, name := range objectNames(records, metav1.NamespaceAll) {
				keys = append(keys, newQueuedKey(key{kind, name}))
			}
		}
		return keys
	}
	watches := []controllers.Watch[queuedKey]{controllers.WatchChanges(l.domains, everyRecord), controllers.WatchChanges(c.informers.clusters, everyRecord,
		clusterChanges(func(c policy.Cluster) any { return c.Status.Topology }))}
	for kind, resource := range dnsRecords {
		l.records[kind] = informers.For[*unstructured.Unstructured](c.host, resource)
		watches = append(watches, controllers.WatchMapped(l.records[kind], func(e event) []queuedKey {
			return []queuedKey{newQueuedKey(key{kind, cache.MetaObjectToName(cmp.Or(e.New, e.Old))})}
		}), controllers.WatchChanges(l.endpoints, func(e event) []queuedKey {
			name := cache.MetaObjectToName(cmp.Or(e.New, e.Old))
			_, name.Name, _ = strings.Cut(name.Name, "-")
			return []queuedKey{newQueuedKey(key{kind, name})}
		}))
	}
	options.Workers = dnsWorkers
	var err error
	l.keyLoop, err = newKeyLoop(options, l.reconcile, watches...)
	return l, err
}

// enqueueRecord enqueues the record of an object in a cluster.
func (l *dnsLoop) enqueueRecord(k key) {
	if l != nil && l.records[k.typeName] != nil {
		l.Enqueue(k)
	}
}

// followEndpointSlices follows the EndpointSlices of managed Services, whose labels they have.
func (l *dnsLoop) followEndpointSlices(r *readyCluster) (*informers.Following[*informers.Object], error) {
	following, err := informers.Follow[*informers.Object](r.client.cluster, informers.Need{
		Resource: discoveryv1.SchemeGroupVersion.WithResource("endpointslices"), LabelSelector: policy.ManagedLabel + "=true",
		Optional: true, Digest: informers.DigestOf(policy.SummarizeEndpointSlice)})
	if err != nil {
		return nil, err
	}
	service := func(o *informers.Object) (k key) {
		if o != nil {
			k = key{"services", cache.NewObjectName(o.GetNamespace(), string(o.Digest(Name)))}
		}
		return k
	}
	following.AddIndex(serviceIndex, func(o *informers.Object) []string { return []string{service(o).ObjectName.String()} })
	following.AddHandler(func(old, object *informers.Object, _ bool) {
		if before, after := service(old), service(object); before != after {
			l.enqueueRecord(before)
			l.enqueueRecord(after)
		}
	})
	return following, nil
}

func (l *dnsLoop) reconcile(ctx context.Context, k key) (time.Duration, error) {
	object, exists := l.records[k.typeName].Get(k.ObjectName)
	if !exists || object.GetDeletionTimestamp() != nil {
		l.outcomes.Delete(k)
		return 0, nil // the garbage collector deletes the DNSEndpoint
	}
	record, problem := policy.ReadDNSRecord(object, l.domains.List(l.controller.cfg.Namespace, nil))
	if problem.Reason != "" {
		if last, _ := l.outcomes.Swap(k, problem); last != any(problem) {
			l.controller.host.Events.Event(object, corev1.EventTypeWarning, problem.Reason, problem.Text)
		}
		return 0, nil
	}
	clusters := l.clusterDNS(k, record)
	if status := (policy.DNSStatus{Domain: record.Domain, DNS: clusters}); !reflect.DeepEqual(status, record.Status) {
		client := l.controller.host.Dynamic.Resource(dnsRecords[k.typeName]).Namespace(k.Namespace)
		if _, err := patch(ctx, client, k.Name, map[string]any{"status": status}, "status"); err != nil {
			return 0, fmt.Errorf("status of %s %s: %w", object.GetKind(), k.ObjectName, err)
		}
	}
	outcome, _ := l.outcomes.Load(k)
	last, _ := outcome.(map[string][]netip.Addr)
	answers, complete := resolveHosts(ctx, clusters, last)
	l.outcomes.Store(k, answers)
	return dnsRecheckInterval, l.write(ctx, object, record.Endpoints(clusters, answers), complete)
}

// clusterDNS returns what is known of the clusters. A cluster of which nothing is known keeps what the status
// says.
func (l *dnsLoop) clusterDNS(k key, record *policy.DNSRecord) (clusters []policy.ClusterDNS) {
	for _, cluster := range l.controller.joinedClusters() {
		current, known := policy.ClusterDNS{Cluster: cluster.Name}, false
		if !record.IsIngress {
			current.Topology = cluster.Status.Topology
		}
		if r := l.controller.readyCluster(cluster.Name); r != nil {
			current.LoadBalancer.Ingress, known = r.loadBalancer(k, record)
		}
		if !known {
			current, known = record.LastByCluster[cluster.Name]
		}
		if known {
			clusters = append(clusters, current)
		}
	}
	return clusters
}

// loadBalancer returns the load balancer of an object of the cluster, and whether it is known. A Service that
// has no ready endpoints counts as one without a load balancer.
func (r *readyCluster) loadBalancer(k key, record *policy.DNSRecord) (ingress []policy.LoadBalancerIngress, known bool) {
	availability := r.availability(k.typeName)
	object, exists := r.cachedObject(k)
	if availability != policy.Synced || !exists {
		return ingress, availability == policy.Synced || availability == policy.Absent
	}
	r.controller.mu.Lock()
	endpoints := r.endpoints // EndpointSlices are followed before any type is
	r.controller.mu.Unlock()
	if !record.IsIngress && !record.Spec.AllowEmpty && len(endpoints.ByIndex(serviceIndex, k.ObjectName.String())) == 0 {
		return ingress, availabilityOf(endpoints.Status()) == policy.Synced
	}
	return policy.ReadLoadBalancer(policy.ReadRemoteStatus(object.Digest(Name))), true
}

// resolveHosts resolves the host names of load balancers. A failure keeps the last answer. complete is false
// if a name that has no last answer could not be looked up.
func resolveHosts(ctx context.Context, clusters []policy.ClusterDNS, last map[string][]netip.Addr) (answers map[string][]netip.Addr, complete bool) {
	answers, complete = map[string][]netip.Addr{}, true
	var mu sync.Mutex
	var resolving sync.WaitGroup
	resolveOne := func(host string) {
		addresses, err := lookupNetIP(ctx, "ip4", host+".") // the manager's search domains do not count
		problem, _ := errors.AsType[*net.DNSError](err)
		mu.Lock()
		defer mu.Unlock()
		switch previous, known := last[host]; {
		case err == nil:
			answers[host] = addresses
		case known:
			answers[host] = previous
		case problem == nil || !problem.IsNotFound:
			complete = false
		}
	}
	for _, c := range clusters {
		for _, ingress := range c.LoadBalancer.Ingress {
			if ingress.Hostname != "" {
				resolving.Go(func() { resolveOne(ingress.Hostname) })
			}
		}
	}
	resolving.Wait()
	return answers, complete
}

// write writes the DNSEndpoint of a record. An existing DNSEndpoint has the last answers, and stays until the
// new answers are complete.
func (l *dnsLoop) write(ctx context.Context, record *unstructured.Unstructured, endpoints []map[string]any, complete bool) error {
	resource, name := l.controller.cfg.dnsEndpoints(), strings.TrimSuffix(strings.ToLower(record.GetKind()), "dnsrecord")+"-"+record.GetName()
	existing, exists := l.endpoints.Get(cache.NewObjectName(record.GetNamespace(), name))
	spec := map[string]any{"endpoints": endpoints}
	owned := exists && slices.ContainsFunc(existing.GetOwnerReferences(), func(o metav1.OwnerReference) bool { return o.UID == record.GetUID() })
	if exists && !complete || owned && policy.Fingerprint(existing.Object["spec"]) == policy.Fingerprint(spec) {
		return nil
	}
	desired := &unstructured.Unstructured{Object: map[string]any{"spec": spec}}
	desired.SetGroupVersionKind(resource.GroupVersion().WithKind("DNSEndpoint"))
	desired.SetName(name)
	desired.SetOwnerReferences([]metav1.OwnerReference{{APIVersion: record.GetAPIVersion(), Kind: record.GetKind(), Name: record.GetName(), UID: record.GetUID()}})
	_, err := l.controller.host.Dynamic.Resource(resource).Namespace(record.GetNamespace()).Apply(ctx, name, desired, metav1.ApplyOptions{FieldManager: Name, Force: true})
	if err != nil {
		return fmt.Errorf("DNSEndpoint %s/%s: %w", record.GetNamespace(), name, err)
	}
	klog.FromContext(ctx).V(2).Info("Wrote a DNSEndpoint", "object", klog.KRef(record.GetNamespace(), name))
	return nil
}

// readTopology reads in which zones and region the Nodes of a cluster are, page by page, if that is due.
func (l *clusterLoop) readTopology(ctx context.Context, cluster *probedCluster, timeout time.Duration) {
	if !l.controller.cfg.DNS || time.Since(cluster.topologyReadAt) < topologyInterval {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	client, err := metadata.NewForConfig(cluster.client.cluster.RESTConfig)
	topology, options := policy.Topology{}, metav1.ListOptions{Limit: nodePageSize}
	for more := true; more && err == nil; more = options.Continue != "" {
		var page *metav1.PartialObjectMetadataList
		if page, err = client.Resource(corev1.SchemeGroupVersion.WithResource("nodes")).List(ctx, options); err == nil {
			topology.AddNodes(page.Items)
			options.Continue = page.Continue
		}
	}
	if cluster.topologyReadAt = time.Now(); err != nil {
		klog.FromContext(ctx).V(2).Info("Cannot read the Nodes of a cluster", "err", truncatedError{err})
		return
	}
	cluster.topology = &topology
}
