// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package csrapprover

import (
	"bytes"
	"encoding/binary"
	"hash/crc32"
	"slices"
	"strings"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/cache"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/csrapprover/policy"
	"github.com/quartermaster-dev/quartermaster/pkg/informers"
)

// Resources that the controller reads.
var (
	Requests = certificatesv1.SchemeGroupVersion.WithResource("certificatesigningrequests")
	Nodes    = corev1.SchemeGroupVersion.WithResource("nodes")
)

// needs are digests: of a request its state and its node, of a Node its names and addresses.
func needs() []informers.Need {
	return []informers.Need{
		{Resource: Requests, ClusterScoped: true, FieldSelector: "spec.signerName=" + certificatesv1.KubeletServingSignerName, Digest: digestRequest},
		{Resource: Nodes, ClusterScoped: true, Digest: digestNode},
	}
}

// state is the state of a cached request.
type state byte

const (
	pending  state = 'p'
	approved state = 'a'
	denied   state = 'd' // or failed, or signed without an approval
)

// digestRequest returns the state, when the request was approved in seconds, and its node.
func digestRequest(obj runtime.Object) []byte {
	csr := obj.(*certificatesv1.CertificateSigningRequest)
	d := []byte{byte(pending), 0, 0, 0, 0}
	if policy.Decided(csr) {
		d[0] = byte(denied)
	}
	for _, c := range csr.Status.Conditions {
		if c.Type == certificatesv1.CertificateApproved {
			d[0] = byte(approved)
			binary.BigEndian.PutUint32(d[1:], uint32(max(c.LastUpdateTime.Unix(), 0)))
		}
	}
	return append(d, policy.NodeOf(csr)...)
}

// request is what the cache has of a request. node is empty if its sender is no kubelet.
type request struct {
	state    state
	approved time.Time // zero if that is unknown
	node     string
}

func requestOf(o *informers.Object) request {
	d := o.Digest(Name)
	if len(d) < 5 {
		return request{} // its digest has panicked
	}
	r := request{state: state(d[0]), node: string(d[5:])}
	if seconds := binary.BigEndian.Uint32(d[1:]); seconds > 0 {
		r.approved = time.Unix(int64(seconds), 0)
	}
	return r
}

// digestNode returns whether the Node is one of the control plane, and its names and addresses.
func digestNode(obj runtime.Object) []byte {
	node := obj.(*corev1.Node)
	label := "-"
	if policy.IsControlPlane(node) {
		label = "+"
	}
	return []byte(label + strings.Join(policy.NamesOf(node), " "))
}

// namesOf returns the names and addresses of a Node; nil if there is none.
func namesOf(o *informers.Object) []string {
	if o == nil {
		return nil
	}
	d := o.Digest(Name)
	return append(strings.Fields(string(d[min(len(d), 1):])), o.GetName())
}

// The indexes. Their values are hashes of one byte: the store has a set for each value, which would take more
// memory than a Node does.
const (
	byName = "name" // Nodes
	byNode = "node" // requests
)

func hashOf(s state, name string) string {
	return string([]byte{byte(s), byte(crc32.ChecksumIEEE([]byte(name)))})
}

func (c *Controller) addIndexes() {
	c.requests.AddIndex(byNode, func(o *informers.Object) []string {
		r := requestOf(o)
		return []string{hashOf(r.state, r.node)}
	})
	c.nodes.AddIndex(byName, func(o *informers.Object) (hashes []string) {
		for _, name := range namesOf(o) {
			hashes = append(hashes, hashOf(0, name))
		}
		return hashes
	})
}

// nodesWith returns the names of the Nodes that have a name or an address.
func (c *Controller) nodesWith(name string) (nodes []string) {
	for _, o := range c.nodes.ByIndex(byName, hashOf(0, name)) {
		if slices.Contains(namesOf(o), name) {
			nodes = append(nodes, o.GetName())
		}
	}
	return nodes
}

// requestsOf calls do for the requests of a node's kubelet in a state.
func (c *Controller) requestsOf(node string, s state, do func(name string, r request)) {
	for _, o := range c.requests.ByIndex(byNode, hashOf(s, node)) {
		if r := requestOf(o); r.state == s && r.node == node {
			do(o.GetName(), r)
		}
	}
}

// key names a request, in the turn of its node.
type key struct{ node, name string }

// Tenant returns the node, in whose turn the queue takes the key.
func (k key) Tenant() string { return k.node }

// String returns the name of the request.
func (k key) String() string { return k.name }

func (k key) object() cache.ObjectName { return cache.NewObjectName("", k.name) }

func same(e controllers.Event[*informers.Object]) bool {
	return e.Old != nil && e.New != nil && e.Old.GetUID() == e.New.GetUID() && bytes.Equal(e.Old.Digest(Name), e.New.Digest(Name))
}

// ofRequest maps a change of a request to its key.
func (c *Controller) ofRequest(e controllers.Event[*informers.Object]) []key {
	o := e.New
	if o == nil {
		o = e.Old
	}
	r := requestOf(o)
	if same(e) || e.Old == nil && r.state != pending {
		return nil
	}
	return []key{{r.node, o.GetName()}}
}

// ofNode maps a change of a Node to the requests that wait, of itself and of the Nodes that share a name or
// an address with it.
func (c *Controller) ofNode(e controllers.Event[*informers.Object]) (keys []key) {
	if same(e) {
		return nil
	}
	var concerned []string
	for _, name := range append(namesOf(e.Old), namesOf(e.New)...) {
		concerned = append(concerned, c.nodesWith(name)...)
	}
	if e.New == nil {
		concerned = append(concerned, e.Old.GetName())
	}
	slices.Sort(concerned)
	for _, node := range slices.Compact(concerned) {
		c.requestsOf(node, pending, func(name string, _ request) { keys = append(keys, key{node, name}) })
	}
	return keys
}
