// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package csrapprover

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"slices"
	"sync"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/csrapprover/policy"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/internal/notices"
	"github.com/quartermaster-dev/quartermaster/pkg/informers"
)

// Name is the name of the controller.
const Name = "csr-approver"

const (
	// recheckInterval is how often a request is decided on again that waits for something other than a Node.
	recheckInterval = 5 * time.Minute
	// limitWindow is the time in which MaxApprovalsPerNodePerHour requests may be approved.
	limitWindow = time.Hour
	// apiServerAge is how long the API server's addresses are kept.
	apiServerAge = time.Minute
	// maxBackoff is the longest time between two attempts after an error other than a refusal.
	maxBackoff = time.Minute
)

// controller approves requests.
type controller struct {
	cfg      Config
	requests *informers.Informer[*informers.Object]
	nodes    *informers.Informer[*informers.Object]
	client   kubernetes.Interface
	events   record.EventRecorder
	metrics  *controllerMetrics
	memory   *memory
	notices  *notices.Memory
	seed     maphash.Seed // of the digests of requests
	loop     *controllers.Loop[requestKey]

	mu              sync.Mutex // held while the API server's addresses are read
	apiServerNames  map[string]bool
	apiServerReadAt time.Time
}

var _ controllers.Controller = &controller{}

// newController adds indexes and handlers to the informers, so it must be called before they are started. The
// configuration must have passed Validate. The informers keep what this package's entry declares, and
// digests are made with the seed.
func newController(cfg Config, seed maphash.Seed, requests, nodes *informers.Informer[*informers.Object], client kubernetes.Interface, events record.EventRecorder,
	loop controllers.LoopOptions, reg controllers.MetricsRegistry,
) (_ *controller, err error) {
	if len(cfg.IPRanges) == 0 {
		return nil, errors.New("--" + flagPrefix + "ip-ranges: must be given; 0.0.0.0/0,::/0 permits every address")
	}
	c := &controller{
		cfg: cfg, seed: seed, requests: requests, nodes: nodes, client: client, events: events,
		memory: newMemory(), notices: notices.New(maxRefusalDelay),
	}
	c.metrics = newControllerMetrics(reg, c.memory)
	c.addIndexes()
	loop.MaxBackoff = maxBackoff
	c.loop, err = controllers.NewLoop(loop, c.reconcile, controllers.WatchMapped(requests, c.keysForRequest), controllers.WatchChanges(nodes, c.keysForNode))
	return c, err
}

// Run reconciles until ctx ends and every worker has returned.
func (c *controller) Run(ctx context.Context) error { return c.loop.Run(ctx) }

// Status returns the state of the controller's loop, with a problem while the API server refuses requests.
func (c *controller) Status() controllers.Status {
	s := c.loop.Status()
	if n := c.memory.count(func(w waitState) bool { return w.refusals > 0 }); n > 0 {
		s.Problem = fmt.Sprintf("the API server refuses what %d requests need; see the log", n)
	}
	return s
}

func (c *controller) reconcile(ctx context.Context, key requestKey) (time.Duration, error) {
	obj, exists := c.requests.Get(cache.NewObjectName("", key.name))
	switch {
	case !exists || requestOf(obj).state != pending:
		c.memory.forget(key.name)
		return 0, nil
	case key.node == 0:
		c.metrics.requests.WithLabelValues(resultIgnored).Inc()
		return 0, nil
	}
	after, err := c.decide(ctx, key)
	if apierrors.IsConflict(err) {
		after, err = c.decide(ctx, key)
	}
	if apierrors.IsForbidden(err) && !controllers.IsNotLeading(err) {
		return c.handleRefusal(ctx, key, err), nil
	}
	return after, err
}

// decide reads a request and decides on it. A request that fails a check by the cache alone is not read.
func (c *controller) decide(ctx context.Context, key requestKey) (time.Duration, error) {
	if !c.withinLimit(key, false) {
		return c.reportWait(ctx, key, problemsOf(policy.CheckRate)), nil
	}
	if c.node(key.node) == nil {
		return c.reportWait(ctx, key, problemsOf(policy.CheckNodeExists)), nil
	}
	csr, err := c.client.CertificatesV1().CertificateSigningRequests().Get(ctx, key.name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return 0, nil
	case err != nil:
		return 0, fmt.Errorf("get request %s: %w", key, err)
	case policy.Decided(csr) || c.hash(policy.NodeName(csr)) != key.node:
		return 0, nil // its event is on its way
	}
	requested, problems := c.cfg.ParseRequest(csr)
	if len(problems) > 0 {
		if c.cfg.DenyFinal && !c.cfg.DryRun {
			return 0, c.write(ctx, key, csr, certificatesv1.CertificateDenied, describe(problems))
		}
		return c.reportWait(ctx, key, problems), nil
	}
	if problems, err = c.judgeRequest(ctx, policy.NodeName(csr), &requested); err != nil {
		return 0, err
	}
	if len(problems) > 0 || c.cfg.DryRun {
		return c.reportWait(ctx, key, problems), nil
	}
	if !c.withinLimit(key, true) {
		return c.reportWait(ctx, key, problemsOf(policy.CheckRate)), nil
	}
	return 0, c.write(ctx, key, csr, certificatesv1.CertificateApproved, "every name and address is the Node's")
}

// judgeRequest returns the failed checks of a request that depend on the Nodes and on the API server's
// addresses.
func (c *controller) judgeRequest(ctx context.Context, nodeName string, requested *policy.CertificateNames) ([]policy.Problem, error) {
	node, err := c.client.CoreV1().Nodes().Get(ctx, nodeName, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return problemsOf(policy.CheckNodeExists), nil
	}
	if err != nil {
		return nil, fmt.Errorf("get Node %s: %w", nodeName, err)
	}
	problems := c.cfg.Judge(requested, node, func(name string) bool {
		for _, other := range c.nodesNamed(name) {
			if other != nodeName {
				return true
			}
		}
		return false
	})
	if len(problems) > 0 || policy.IsControlPlane(node) {
		return problems, nil
	}
	apiServer, err := c.readAPIServerNames(ctx)
	return policy.JudgeAPIServer(requested, apiServer), err
}

// withinLimit reports whether one more request of the node may be approved. If reserve is set, the request
// counts as approved from now on.
func (c *controller) withinLimit(key requestKey, reserve bool) bool {
	c.memory.mu.Lock()
	defer c.memory.mu.Unlock()
	within := c.cfg.MaxApprovalsPerNodePerHour == 0 || c.approvals(key) < c.cfg.MaxApprovalsPerNodePerHour
	if within && reserve {
		c.memory.sentApprovals[key.name] = key.node
	}
	return within
}

// approvals returns how many other requests of the node were approved a short while ago. The caller holds
// memory.mu.
func (c *controller) approvals(key requestKey) (n int) {
	for name, node := range c.memory.sentApprovals {
		if node == key.node && name != key.name {
			n++
		}
	}
	now := time.Now()
	for _, obj := range c.requests.ByIndex(nodeIndex, key.node.bucket()) {
		_, counted := c.memory.sentApprovals[obj.GetName()]
		if r := requestOf(obj); !counted && r.node == key.node && (r.approvedAt.IsZero() || now.Sub(r.approvedAt) < limitWindow) {
			n++
		}
	}
	return n
}

// readAPIServerNames returns the cluster IPs of the Service default/kubernetes, and its endpoints.
func (c *controller) readAPIServerNames(ctx context.Context) (map[string]bool, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.apiServerNames != nil && time.Since(c.apiServerReadAt) < apiServerAge {
		return c.apiServerNames, nil
	}
	service, err := c.client.CoreV1().Services(metav1.NamespaceDefault).Get(ctx, "kubernetes", metav1.GetOptions{})
	if err != nil {
		return nil, fmt.Errorf("get the Service of the API server: %w", err)
	}
	endpoints, err := c.client.DiscoveryV1().EndpointSlices(metav1.NamespaceDefault).List(ctx, metav1.ListOptions{
		LabelSelector: discoveryv1.LabelServiceName + "=kubernetes"})
	if err != nil {
		return nil, fmt.Errorf("list the endpoints of the API server: %w", err)
	}
	addresses := slices.Clone(service.Spec.ClusterIPs)
	for i := range endpoints.Items {
		for _, endpoint := range endpoints.Items[i].Endpoints {
			addresses = append(addresses, endpoint.Addresses...)
		}
	}
	c.apiServerNames, c.apiServerReadAt = map[string]bool{}, time.Now()
	for _, address := range addresses {
		name, _ := policy.Canonical(address)
		c.apiServerNames[name] = true
	}
	return c.apiServerNames, nil
}

func problemsOf(check policy.Check) []policy.Problem { return []policy.Problem{{Check: check}} }
