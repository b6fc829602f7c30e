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
	dnsWorkers = 5
	// surveyEvery is how often the Nodes of a cluster are read, nodesAtOnce the length of a page of them.
	surveyEvery = 10 * time.Minute
	nodesAtOnce = 100
	// resolveEvery is how often the host names of a record are resolved, resolveTimeout how long that may take.
	resolveEvery, resolveTimeout = time.Minute, 5 * time.Second
	// listedEvery is how often a record looks at a ready cluster that is not listed: no event says when it is.
	listedEvery = 2 * time.Second
	// byService is an index of EndpointSlices.
	byService = "service"
)

// Resolver is a [net.Resolver].
type Resolver interface {
	LookupNetIP(ctx context.Context, network, host string) ([]netip.Addr, error)
}

// resolver resolves the host names of load balancers.
var resolver Resolver = net.DefaultResolver

// dnsLoop writes the DNSEndpoints of ServiceDNSRecords and IngressDNSRecords. The kind of a key is that of
// the objects that have the load balancers: the name of their FederatedTypeConfig.
type dnsLoop struct {
	keyLoop
	c                  *controller
	records            map[string]informers.Informer[*unstructured.Unstructured]
	domains, endpoints informers.Informer[*unstructured.Unstructured]

	mu       sync.Mutex
	outcomes map[key]dnsOutcome
}

// dnsOutcome is why nothing was last written for a record, or the last answers for its host names.
type dnsOutcome struct {
	problem policy.Problem
	answers map[string][]netip.Addr
}

func newDNSLoop(c *controller, options controllers.LoopOptions) (*dnsLoop, error) {
	type event = controllers.Event[*unstructured.Unstructured]
	l := &dnsLoop{c: c, outcomes: map[key]dnsOutcome{}, records: map[string]informers.Informer[*unstructured.Unstructured]{},
		domains: informers.For[*unstructured.Unstructured](c.host, domains), endpoints: informers.For[*unstructured.Unstructured](c.host, c.cfg.dnsEndpoints())}
	watches := []controllers.Watch[queuedKey]{controllers.WatchChanges(c.informers.clusters, l.clusterChanged),
		controllers.WatchChanges(l.domains, func(event) []queuedKey { return l.all() })}
	for kind, resource := range dnsRecords {
		l.records[kind] = informers.For[*unstructured.Unstructured](c.host, resource)
		watches = append(watches, controllers.WatchMapped(l.records[kind], func(e event) []queuedKey {
			return []queuedKey{queuedKeyOf(key{kind, cache.MetaObjectToName(cmp.Or(e.New, e.Old))})}
		}), controllers.WatchChanges(l.endpoints, func(e event) []queuedKey {
			name := cache.MetaObjectToName(cmp.Or(e.New, e.Old))
			_, name.Name, _ = strings.Cut(name.Name, "-")
			return []queuedKey{queuedKeyOf(key{kind, name})}
		}))
	}
	options.Workers = dnsWorkers
	var err error
	l.keyLoop, err = newKeyLoop(options, l.reconcile, watches...)
	return l, err
}

// all returns the keys of all records.
func (l *dnsLoop) all() (keys []queuedKey) {
	for kind, records := range l.records {
		for _, object := range records.List(metav1.NamespaceAll, nil) {
			keys = append(keys, queuedKeyOf(key{kind, cache.MetaObjectToName(object)}))
		}
	}
	return keys
}

// clusterChanged returns all records if a KubeFedCluster comes or goes, becomes ready or not, or if its zones
// or its region change.
func (l *dnsLoop) clusterChanged(e controllers.Event[*unstructured.Unstructured]) []queuedKey {
	if e.Old != nil && e.New != nil {
		before, after := policy.ReadCluster(e.Old).Status, policy.ReadCluster(e.New).Status
		if reflect.DeepEqual(before.Topology(), after.Topology()) && policy.StartHealth(before).Ready() == policy.StartHealth(after).Ready() {
			return nil
		}
	}
	return l.all()
}

// changed enqueues the record of an object in a cluster, if there is one.
func (l *dnsLoop) changed(k key) {
	if l == nil || l.records[k.kind] == nil {
		return
	}
	if _, exists := l.records[k.kind].Get(k.ObjectName); exists {
		l.Enqueue(k)
	}
}

// follow follows the EndpointSlices of managed Services, whose labels they have.
func (l *dnsLoop) follow(ctx context.Context, r *readyCluster) (*informers.Following[*informers.Object], error) {
	following, err := informers.Follow[*informers.Object](ctx, r.client.cluster, informers.Need{
		Resource: discoveryv1.SchemeGroupVersion.WithResource("endpointslices"), LabelSelector: policy.ManagedLabel + "=true",
		Optional: true, ListSlots: l.c.lists, Digest: informers.DigestOf(policy.SummarizeEndpointSlice)})
	if err != nil {
		return nil, err
	}
	service := func(o *informers.Object) cache.ObjectName {
		return cache.NewObjectName(o.GetNamespace(), string(o.Digest(Name)))
	}
	following.AddIndex(byService, func(o *informers.Object) []string { return []string{service(o).String()} })
	following.AddHandler(func(old, object *informers.Object, _ bool) {
		for _, o := range []*informers.Object{old, object} {
			if o != nil && (old == nil || object == nil || service(old) != service(object)) {
				l.changed(key{"services", service(o)})
			}
		}
	})
	return following, nil
}

func (l *dnsLoop) reconcile(ctx context.Context, k key) (time.Duration, error) {
	object, exists := l.records[k.kind].Get(k.ObjectName)
	if !exists || object.GetDeletionTimestamp() != nil {
		l.mu.Lock()
		delete(l.outcomes, k)
		l.mu.Unlock()
		return 0, nil // the garbage collector deletes the DNSEndpoint
	}
	record, domain, problem := l.read(object)
	l.mu.Lock()
	last, next := l.outcomes[k], dnsOutcome{problem: problem}
	l.mu.Unlock()
	if problem != last.problem && problem.Reason != "" {
		l.c.host.Events.Event(object, corev1.EventTypeWarning, problem.Reason, problem.Text)
	}
	after, err := time.Duration(0), error(nil)
	if problem.Reason == "" {
		next.answers, after, err = l.write(ctx, k, object, record, domain, last.answers)
	}
	l.mu.Lock()
	l.outcomes[k] = next
	l.mu.Unlock()
	return after, err
}

// read returns a record and its domain, or why nothing is written for it.
func (l *dnsLoop) read(object *unstructured.Unstructured) (record *policy.DNSRecord, domain string, problem policy.Problem) {
	record, err := policy.ReadDNSRecord(object)
	if err == nil && !record.Ingress {
		of, exists := l.domains.Get(cache.NewObjectName(l.c.cfg.Namespace, record.Spec.DomainRef))
		if !exists {
			return record, "", policy.Problem{Reason: policy.DomainMissing, Text: fmt.Sprintf("domainRef: there is no Domain %.64q in the namespace %s", record.Spec.DomainRef, l.c.cfg.Namespace)}
		}
		domain, _, _ = unstructured.NestedString(of.Object, "domain")
	}
	if err == nil {
		err = record.Check(domain)
	}
	if err != nil {
		problem = policy.Problem{Reason: policy.InvalidDNSRecord, Text: err.Error()}
	}
	return record, domain, problem
}

// write writes the status and the DNSEndpoint of a record. It returns the answers for host names, and when to
// look again even without an event.
func (l *dnsLoop) write(ctx context.Context, k key, object *unstructured.Unstructured, record *policy.DNSRecord, domain string, last map[string][]netip.Addr) (answers map[string][]netip.Addr, after time.Duration, err error) {
	status, after := l.observe(k, record, domain)
	if !reflect.DeepEqual(status, record.Status) {
		client := l.c.host.Dynamic.Resource(dnsRecords[k.kind]).Namespace(k.Namespace)
		fields := map[string]any{"dns": status.DNS}
		if !record.Ingress {
			fields["domain"] = domain
		}
		if _, err := patch(ctx, client, k.Name, map[string]any{"status": fields}, "status"); err != nil {
			return last, 0, fmt.Errorf("status of %s %s: %w", object.GetKind(), k.ObjectName, err)
		}
	}
	answers, complete := l.resolve(ctx, status.Hosts(), last)
	if len(status.Hosts()) > 0 && after == 0 {
		after = resolveEvery
	}
	name := record.EndpointName()
	have, exists := l.endpoints.Get(cache.NewObjectName(k.Namespace, name))
	if exists && !complete {
		return answers, after, nil // it has the last answer
	}
	spec := map[string]any{"endpoints": record.Endpoints(status, answers)}
	owned := exists && slices.ContainsFunc(have.GetOwnerReferences(), func(o metav1.OwnerReference) bool { return o.UID == object.GetUID() })
	if owned && policy.Fingerprint(have.Object["spec"]) == policy.Fingerprint(spec) {
		return answers, after, nil
	}
	want := &unstructured.Unstructured{Object: map[string]any{"spec": spec}}
	want.SetGroupVersionKind(l.c.cfg.dnsEndpoints().GroupVersion().WithKind("DNSEndpoint"))
	want.SetName(name)
	want.SetOwnerReferences([]metav1.OwnerReference{{APIVersion: object.GetAPIVersion(), Kind: object.GetKind(), Name: k.Name, UID: object.GetUID()}})
	_, err = l.c.host.Dynamic.Resource(l.c.cfg.dnsEndpoints()).Namespace(k.Namespace).Apply(ctx, name, want, metav1.ApplyOptions{FieldManager: Name, Force: true})
	if err != nil {
		return answers, 0, fmt.Errorf("DNSEndpoint %s/%s: %w", k.Namespace, name, err)
	}
	klog.FromContext(ctx).V(2).Info("Wrote a DNSEndpoint", "object", klog.KRef(k.Namespace, name))
	return answers, after, nil
}

// observe returns the status of a record. A cluster of which nothing is known keeps what the status says;
// after is when more may be known without an event.
func (l *dnsLoop) observe(k key, record *policy.DNSRecord, domain string) (status policy.DNSStatus, after time.Duration) {
	status.Domain = domain
	for _, cluster := range l.c.joinedClusters() {
		now, known := policy.ClusterDNS{Cluster: cluster.Name}, false
		if !record.Ingress {
			now.Topology = cluster.Status.Topology()
		}
		if r := l.c.readyCluster(cluster.Name); r != nil {
			now.LoadBalancer, known = r.loadBalancer(k, record)
		}
		if state := l.c.clusters.state(cluster.Name); !known && (state.health.Ready() || !state.probed) {
			// A cluster may refuse for ever to be listed.
			if after = listedEvery; l.c.clock.Since(state.readySince) > resolveEvery {
				after = resolveEvery
			}
		}
		if !known {
			now, known = record.Last(cluster.Name)
		}
		if known {
			status.DNS = append(status.DNS, now)
		}
	}
	return status, after
}

// loadBalancer returns the load balancer of an object of the cluster, and whether it is known. A Service that
// has no ready endpoints has none.
func (r *readyCluster) loadBalancer(k key, record *policy.DNSRecord) (none policy.LoadBalancer, known bool) {
	r.c.mu.Lock()
	endpoints := r.endpoints
	r.c.mu.Unlock()
	if state := r.serving(k.kind); state != policy.Synced || endpoints == nil {
		return none, state == policy.Absent
	}
	object, exists := r.objectOf(k)
	if !exists {
		return none, true
	}
	if !record.Ingress && !record.Spec.AllowEmpty && len(endpoints.ByIndex(byService, k.ObjectName.String())) == 0 {
		return none, servingOf(endpoints.Status()) == policy.Synced
	}
	return policy.ReadLoadBalancer(policy.ReadRemoteStatus(object.Digest(Name))), true
}

// resolve returns the addresses of host names. A failure keeps the last answer. complete is unset if it is
// not known whether a name without a last answer exists.
func (l *dnsLoop) resolve(ctx context.Context, hosts []string, last map[string][]netip.Addr) (answers map[string][]netip.Addr, complete bool) {
	ctx, cancel := context.WithTimeout(ctx, resolveTimeout)
	defer cancel()
	var (
		mu        sync.Mutex
		resolving sync.WaitGroup
	)
	answers, complete = map[string][]netip.Addr{}, true
	slices.Sort(hosts)
	for _, host := range slices.Compact(hosts) {
		resolving.Go(func() {
			resolved, err := resolver.LookupNetIP(ctx, "ip4", host+".") // the manager's search domains do not count
			problem := (*net.DNSError)(nil)
			mu.Lock()
			defer mu.Unlock()
			switch before, known := last[host]; {
			case err == nil:
				answers[host] = resolved
			case known:
				answers[host] = before
			case !errors.As(err, &problem) || !problem.IsNotFound:
				complete = false
			}
		})
	}
	resolving.Wait()
	return answers, complete
}

// survey reads in which zones and region the Nodes of a cluster are, page by page, if that is due.
func (l *clusterLoop) survey(ctx context.Context, p *probedCluster, timeout time.Duration) {
	if !l.c.cfg.DNS || l.c.clock.Since(p.surveyed) < surveyEvery {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	client, err := metadata.NewForConfig(p.client.cluster.RESTConfig)
	found, options := policy.Topology{}, metav1.ListOptions{Limit: nodesAtOnce}
	for more := true; more && err == nil; more = options.Continue != "" {
		var page *metav1.PartialObjectMetadataList
		if page, err = client.Resource(corev1.SchemeGroupVersion.WithResource("nodes")).List(ctx, options); err == nil {
			found.AddNodes(page.Items)
			options.Continue = page.Continue
		}
	}
	if p.surveyed = l.c.clock.Now(); err != nil {
		klog.FromContext(ctx).V(2).Info("Cannot read the Nodes of a cluster", "err", truncatedError{err})
		return
	}
	p.topology = &found
}
