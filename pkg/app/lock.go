// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"fmt"
	"net/netip"
	"os"

	"k8s.io/component-base/metrics"

	"github.com/quartermaster-dev/quartermaster/pkg/election"
	"github.com/quartermaster-dev/quartermaster/pkg/election/apifence"
	"github.com/quartermaster-dev/quartermaster/pkg/election/display"
	"github.com/quartermaster-dev/quartermaster/pkg/election/witness"
)

// newIdentity returns the identity of this process in the election. pod is the name of its Pod; empty if that
// is not known.
func newIdentity(pod string) (string, error) {
	if pod == "" { // in a Pod, the host name is the Pod's name, unless hostNetwork or hostname is set
		var err error
		if pod, err = os.Hostname(); err != nil {
			return "", fmt.Errorf("POD_NAME is not set, and the host name is not known: %w", err)
		}
	}
	return election.NewIdentity(pod), nil
}

// newLock returns the lock of this replica on the Lease, with the fence in the API server if this
// installation uses it.
func newLock(
	o *Options, c clientConfigs, e *eventSender, registry metrics.KubeRegistry, identity string, w *witness.Witness,
) (*election.Lock, error) {
	config := election.ClientConfig(c.base)
	client, err := c.typed(config)
	if err != nil {
		return nil, err
	}
	electionMetrics, err := display.NewMetrics(registry)
	if err != nil {
		return nil, err
	}
	candidate := election.Candidate{
		Identity: identity,
		Client:   client.CoordinationV1().Leases(o.Election.ResourceNamespace),
		Events:   e.recorder(o.name),
		Metrics:  electionMetrics,
		PodUID:   os.Getenv("POD_UID"),
		Clock:    o.ElectionClock,
	}
	if w != nil {
		candidate.Address, candidate.Witness = w.Address(), w
	}
	if serverFence(o) == apifence.Unknown {
		candidate.Namespaces, candidate.Servers = client.CoreV1().Namespaces(), apifence.NewDirectory(config, client)
	}
	return election.NewLock(o.election(), candidate)
}

// newWitness returns the witness of this process, as a leader and as a standby. It is nil if standbys
// cannot reach the secure port, or may not take over before the Lease has expired.
func newWitness(o *Options, identity string) *witness.Witness {
	if !o.Election.LeaderElect || o.Secure.BindPort == 0 || serverFence(o) != apifence.Unknown {
		return nil
	}
	address, ok := netip.AddrFromSlice(o.Secure.BindAddress)
	if !ok || address.Unmap().IsUnspecified() {
		var err error
		if address, err = netip.ParseAddr(os.Getenv("POD_IP")); err != nil {
			return nil // it is not known how others reach this process
		}
	}
	return witness.New(netip.AddrPortFrom(address.Unmap(), uint16(o.Secure.BindPort)), identity)
}

// serverFence returns what is known of the fence in the API server without asking.
func serverFence(o *Options) apifence.State {
	if len(o.Informers.Namespaces) > 0 {
		// Such an installation needs no permission outside of namespaces, and a Namespace is outside.
		return apifence.Absent
	}
	return apifence.Unknown
}
