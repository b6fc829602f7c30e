// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"io"
	"net"
	"strings"

	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

// publishAddress gives the API server an address in the EndpointSlice default/kubernetes, as API servers
// do that do not listen on the loopback interface only, which no EndpointSlice may name. Without
// such an address a manager that takes the Lease early waits for the end of its predecessor's
// claim.
func (c *Cluster) publishAddress(ctx context.Context) error {
	ip, err := ownAddress()
	if err != nil || ip == nil {
		return err
	}
	if c.published, err = net.Listen("tcp", net.JoinHostPort(ip.String(), "0")); err != nil {
		return err
	}
	go func() {
		for {
			client, err := c.published.Accept() // until Stop
			if err != nil {
				return
			}
			go forward(client, strings.TrimPrefix(c.URL(), "https://"))
		}
	}()
	slice := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: "kubernetes", Labels: map[string]string{discoveryv1.LabelServiceName: "kubernetes"}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: ptr.To("https"), Port: ptr.To(int32(c.published.Addr().(*net.TCPAddr).Port))}},
		Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{ip.String()}}},
	}
	// The API server may still be creating the namespace.
	return awaitReady(ctx, c.apiServer, func(ctx context.Context) error {
		_, err := c.Admin.DiscoveryV1().EndpointSlices(slice.Namespace).Create(ctx, slice, metav1.CreateOptions{})
		return err
	})
}

// ownAddress returns an IPv4 address of this machine that others can reach, nil if there is none.
func ownAddress() (net.IP, error) {
	addresses, err := net.InterfaceAddrs()
	for _, a := range addresses {
		if ip, ok := a.(*net.IPNet); ok && ip.IP.To4() != nil && ip.IP.IsGlobalUnicast() {
			return ip.IP, nil
		}
	}
	return nil, err
}

func forward(client net.Conn, address string) {
	defer func() { _ = client.Close() }() // either end may have closed it
	server, err := net.Dial("tcp", address)
	if err != nil {
		return
	}
	go func() {
		_, _ = io.Copy(server, client) // until either end closes
		_ = server.Close()
	}()
	_, _ = io.Copy(client, server)
}
