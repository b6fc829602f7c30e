// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package csrapprover

import (
	"bytes"
	"encoding/binary"
	"hash/maphash"
	"slices"
	"strconv"
	"strings"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/csrapprover/policy"
	"github.com/quartermaster-dev/quartermaster/pkg/informers"
)

// Resources that the controller reads.
var (
	requestResource = certificatesv1.SchemeGroupVersion.WithResource("certificatesigningrequests")
	nodeResource    = corev1.SchemeGroupVersion.WithResource("nodes")
)

// needs returns what the cache keeps: of a request its state, its node's hash and the time of its approval,
// of a Node its role, names and addresses.
func needs(seed maphash.Seed) []informers.Need {
	digestRequest := func(csr *certificatesv1.CertificateSigningRequest) []byte { return digestRequest(seed, csr) }
	return []informers.Need{
		{Resource: requestResource, ClusterScoped: true, FieldSelector: "spec.signerName=" + certificatesv1.KubeletServingSignerName, Digest: informers.DigestOf(digestRequest)},
		{Resource: nodeResource, ClusterScoped: true, Digest: informers.DigestOf(digestNode)},
	}
}

// state is the state of a cached request.
type state byte

const (
	pending  state = 'p'
	approved state = 'a'
	denied   state = 'd' // or failed, or signed without an approval
)

// hash stands for the name of a node, or for a name or an address of a Node. The seed is secret, so nobody
// can have two names with one hash.
type hash uint64

// bucket is the hash's value in an index, one of 160: with three names and addresses for each of 5,000 Nodes,
// a value has about 100 Nodes. The store keeps a set for each value, and a set for each name would take more
// memory than a Node does.
func (h hash) bucket() string { return string([]byte{byte(h % 160)}) }

// digestRequest returns the state, the hash of the node (0 if the sender is no kubelet) and the time of the
// approval, in seconds since 1970.
func digestRequest(seed maphash.Seed, csr *certificatesv1.CertificateSigningRequest) []byte {
	s, approvedAt, node := pending, int64(0), uint64(0)
	if policy.Decided(csr) {
		s = denied
	}
	for _, c := range csr.Status.Conditions {
		if c.Type == certificatesv1.CertificateApproved {
			s, approvedAt = approved, max(c.LastUpdateTime.Unix(), 0)
		}
	}
	if name := policy.NodeName(csr); name != "" {
		node = maphash.String(seed, name)
	}
	return binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint64([]byte{byte(s)}, node), uint32(approvedAt))
}

// request is what the cache has of a request.
type request struct {
	state      state
	node       hash      // 0 if its sender is no kubelet
	approvedAt time.Time // zero if that is unknown
}

func requestOf(obj *informers.Object) request {
	digest := obj.Digest(Name)
	if len(digest) < 13 {
		return request{} // digestRequest has panicked
	}
	r := request{state: state(digest[0]), node: hash(binary.BigEndian.Uint64(digest[1:]))}
	if seconds := binary.BigEndian.Uint32(digest[9:]); seconds > 0 {
		r.approvedAt = time.Unix(int64(seconds), 0)
	}
	return r
}

// digestNode returns whether the Node is one of the control plane, and its names and addresses.
func digestNode(node *corev1.Node) []byte {
	label := "-"
	if policy.IsControlPlane(node) {
		label = "+"
	}
	return []byte(label + strings.Join(policy.NodeNames(node), " "))
}

// namesOf returns the names and addresses of a Node; nil if there is none.
func namesOf(obj *informers.Object) []string {
	if obj == nil {
		return nil
	}
	digest := obj.Digest(Name)
	return append(strings.Fields(string(digest[min(len(digest), 1):])), obj.GetName())
}

// The indexes.
const (
	nameIndex = "name" // Nodes
	nodeIndex = "node" // approved requests
)

func (c *controller) hash(name string) hash { return hash(maphash.String(c.seed, name)) }

func (c *controller) addIndexes() {
	// Waiting requests are not indexed: they are looked up by node only when a Node changes, which is seldom.
	c.requests.AddIndex(nodeIndex, func(obj *informers.Object) []string {
		if r := requestOf(obj); r.state == approved {
			return []string{r.node.bucket()}
		}
		return nil
	})
	c.nodes.AddIndex(nameIndex, func(obj *informers.Object) (buckets []string) {
		for _, name := range namesOf(obj) {
			buckets = append(buckets, c.hash(name).bucket())
		}
		return buckets
	})
}

// node returns the Node whose name has a hash; nil if there is none.
func (c *controller) node(h hash) *informers.Object {
	for _, obj := range c.nodes.ByIndex(nameIndex, h.bucket()) {
		if c.hash(obj.GetName()) == h {
			return obj
		}
	}
	return nil
}

// nodesNamed returns the names of the Nodes that have a name or an address.
func (c *controller) nodesNamed(name string) (nodes []string) {
	for _, obj := range c.nodes.ByIndex(nameIndex, c.hash(name).bucket()) {
		if slices.Contains(namesOf(obj), name) {
			nodes = append(nodes, obj.GetName())
		}
	}
	return nodes
}

// requestKey names a request, in the turn of its node.
type requestKey struct {
	node hash
	name string
}

// Tenant returns the node, in whose turn the queue takes the key.
func (k requestKey) Tenant() string { return strconv.FormatUint(uint64(k.node), 36) }

// String returns the name of the request.
func (k requestKey) String() string { return k.name }

// isUnchanged reports whether an update left the digest of an object as it was.
func isUnchanged(event controllers.Event[*informers.Object]) bool {
	return event.Old != nil && event.New != nil && bytes.Equal(event.Old.Digest(Name), event.New.Digest(Name))
}

// keysForRequest maps a change of a request to its key.
func (c *controller) keysForRequest(event controllers.Event[*informers.Object]) []requestKey {
	obj := event.New
	if obj == nil {
		obj = event.Old
	}
	r := requestOf(obj)
	if isUnchanged(event) || event.Old == nil && r.state != pending {
		return nil
	}
	return []requestKey{{r.node, obj.GetName()}}
}

// keysForNode maps a change of a Node to the requests that wait, of itself and of the Nodes that share a name
// or an address with it. It leaves out requests that have failed a check for good.
func (c *controller) keysForNode(event controllers.Event[*informers.Object]) (keys []requestKey) {
	if isUnchanged(event) {
		return nil
	}
	affectedNodes := map[hash]bool{}
	for _, name := range append(namesOf(event.Old), namesOf(event.New)...) {
		for _, node := range c.nodesNamed(name) {
			affectedNodes[c.hash(node)] = true
		}
	}
	for _, obj := range c.requests.List(metav1.NamespaceAll, nil) {
		if r := requestOf(obj); r.state == pending && affectedNodes[r.node] && !c.memory.isFinal(obj.GetName()) {
			keys = append(keys, requestKey{r.node, obj.GetName()})
		}
	}
	return keys
}
