// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package apifence

import (
	"context"
	"fmt"
	"net"
	"slices"
	"strconv"

	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
)

const (
	// The API servers write their addresses into this EndpointSlice. Other slices of the Service do not
	// count, since a tenant may be able to create one.
	sliceNamespace = metav1.NamespaceDefault
	sliceName      = "kubernetes"
	slicePort      = "https"

	// serverName is in the certificate of every API server.
	serverName = "kubernetes.default.svc"

	// identitySelector selects the Leases in kube-system, one for each API server. Expired Leases count: an
	// API server that stands still does not renew its Lease. An API server that stops in order deletes its Lease
	// (k8s.io/component-helpers/apimachinery/lease). Another API server deletes the Lease of an API server that
	// crashed for good, an hour later.
	identitySelector = "apiserver.kubernetes.io/identity=kube-apiserver"
)

// Directory finds the API servers by the objects that they write. It reads only when it is asked.
type Directory struct {
	config *rest.Config
	client kubernetes.Interface
}

// NewDirectory returns a directory that reads by client, and whose API servers are reached with the
// credentials of config.
func NewDirectory(config *rest.Config, client kubernetes.Interface) *Directory {
	return &Directory{config: config, client: client}
}

// List implements Servers.
func (d *Directory) List(ctx context.Context) ([]Server, int, error) {
	slice, err := d.client.DiscoveryV1().EndpointSlices(sliceNamespace).Get(ctx, sliceName, metav1.GetOptions{})
	if err != nil {
		return nil, 0, fmt.Errorf("read the addresses of the API servers: %w", err)
	}
	leases, err := d.client.CoordinationV1().Leases(metav1.NamespaceSystem).List(ctx, metav1.ListOptions{LabelSelector: identitySelector})
	if err != nil {
		return nil, 0, fmt.Errorf("count the API servers: %w", err)
	}
	var known []Server
	for _, address := range addresses(slice) {
		client, err := d.clientFor(address)
		if err != nil {
			return nil, 0, fmt.Errorf("client for the API server at %s: %w", address, err)
		}
		known = append(known, Server{Address: address, Namespaces: client})
	}
	return known, len(leases.Items), nil
}

// addresses returns the different addresses in the slice.
func addresses(slice *discoveryv1.EndpointSlice) (found []string) {
	for _, port := range slice.Ports {
		if ptr.Deref(port.Name, "") != slicePort || port.Port == nil {
			continue
		}
		for _, endpoint := range slice.Endpoints {
			for _, ip := range endpoint.Addresses {
				address := net.JoinHostPort(ip, strconv.Itoa(int(*port.Port)))
				if !slices.Contains(found, address) {
					found = append(found, address)
				}
			}
		}
	}
	return found
}

// clientFor returns the client for one API server.
func (d *Directory) clientFor(address string) (NamespaceClient, error) {
	config := rest.CopyConfig(d.config)
	config.Host, config.APIPath = "https://"+address, ""
	config.ServerName = serverName
	config.Dial = nil // client-go then has one transport for all, however often Prove asks
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, err
	}
	return client.CoreV1().Namespaces(), nil
}
