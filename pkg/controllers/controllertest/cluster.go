// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package controllertest

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"encoding/pem"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync/atomic"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
	certutil "k8s.io/client-go/util/cert"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/controllertest/internal/apiserver"
)

// Cluster is the API server of another cluster, for controllers that call Host.Cluster. No manager belongs to
// it: [Host.Settle] and [Host.Sleep] wait for the controllers' work there too.
type Cluster struct {
	*APIServer
	// Address is what a controller passes to Host.Cluster as the Host of the configuration, from wherever it
	// has its clusters. A Transport of the configuration gets the network of the test by its method
	// SetDial(func(context.Context, string, string) (net.Conn, error)).
	Address string
	// CA is the authority of the certificate, in PEM, of a cluster that AddTLSCluster has added.
	CA []byte

	server *httptest.Server
	token  atomic.Pointer[string] // each request must have it; nil: none
	cut    atomic.Bool
	hangs  atomic.Pointer[chan struct{}] // closed by Restore; nil: the server does not hang
}

// AddCluster adds an API server at http://NAME.test with the given objects. It allows every request, whatever
// Permissions say, without credentials, unless SetToken or Forbid say otherwise.
func (h *Host) AddCluster(name string, objects ...runtime.Object) *Cluster {
	h.t.Helper()
	c := &Cluster{Address: "http://" + name + ".test"}
	h.startCluster(c, nil, objects)
	return c
}

// AddTLSCluster is AddCluster for an API server at https://NAME.test, whose certificate is one by Cluster.CA.
func (h *Host) AddTLSCluster(name string, objects ...runtime.Object) *Cluster {
	h.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		h.t.Fatal(err)
	}
	certificate, err := certutil.NewSelfSignedCACert(certutil.Config{CommonName: name + ".test"}, key)
	if err != nil {
		h.t.Fatal(err)
	}
	c := &Cluster{
		Address: "https://" + name + ".test",
		CA:      pem.EncodeToMemory(&pem.Block{Type: certutil.CertificateBlockType, Bytes: certificate.Raw}),
	}
	h.startCluster(c, &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{certificate.Raw}, PrivateKey: key}}}, objects)
	return c
}

// startCluster starts the API server of a cluster, without TLS if config is nil.
func (h *Host) startCluster(c *Cluster, config *tls.Config, objects []runtime.Object) {
	h.t.Helper()
	c.APIServer = newAPIServer(h.t, h.entries, h.scheme, func(r apiserver.Request) error { return c.admitAny(r) }, nil)
	c.Put(objects...)
	c.server = c.network.server(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if hangs := c.hangs.Load(); hangs != nil {
			select {
			case <-*hangs:
			case <-r.Context().Done():
			}
			panic(http.ErrAbortHandler)
		}
		if token := c.token.Load(); token != nil && r.Header.Get("Authorization") != "Bearer "+*token {
			http.Error(w, "Unauthorized", http.StatusUnauthorized)
			return
		}
		c.APIServer.server.ServeHTTP(w, r)
	}))
	if c.server.TLS = config; config != nil {
		c.server.StartTLS()
	} else {
		c.server.Start()
	}
	h.clusters = append(h.clusters, c)
	h.t.Cleanup(func() {
		c.Restore()
		c.server.CloseClientConnections()
		c.server.Close()
	})
}

// RESTConfig returns the configuration for a client of the test's own, which may do everything.
func (c *Cluster) RESTConfig() *rest.Config {
	config := c.APIServer.RESTConfig()
	config.Host, config.CAData = c.Address, c.CA
	if token := c.token.Load(); token != nil {
		config.BearerToken = *token
	}
	return config
}

// SetToken makes the API server answer 401 Unauthorized, from now on, to each request without this bearer
// token. Watches that have begun go on.
func (c *Cluster) SetToken(token string) { c.token.Store(&token) }

// openCluster is Host.Cluster for the clusters of the test. Another address, which may be one of the real
// network, fails the test. open is the manager's Host.Cluster.
func (h *Host) openCluster(
	open func(string, *rest.Config) (*controllers.Cluster, error), name string, config *rest.Config,
) (*controllers.Cluster, error) {
	if config == nil || config.Host == "" {
		return open(name, config) // open refuses the configuration
	}
	at := slices.IndexFunc(h.clusters, func(c *Cluster) bool { return c.Address == config.Host })
	if at < 0 && config.Transport != nil {
		return open(name, config) // a transport of the controller's own may know the way
	}
	if at < 0 {
		err := fmt.Errorf("the cluster %q is at %s, where AddCluster has added none", name, config.Host)
		h.t.Errorf("Host.Cluster: %v", err)
		return nil, err
	}
	config = rest.CopyConfig(config)
	if transport, ok := config.Transport.(interface {
		SetDial(func(ctx context.Context, network, address string) (net.Conn, error))
	}); ok {
		transport.SetDial(h.clusters[at].dial)
	} else {
		config.Dial = h.clusters[at].dial
	}
	return open(name, config)
}

func (c *Cluster) dial(ctx context.Context, network, address string) (net.Conn, error) {
	if c.cut.Load() {
		return nil, &net.OpError{Op: "dial", Net: network, Err: errors.New("the network is cut")}
	}
	return c.network.dial(ctx, network, address)
}

// Cut breaks all connections to the API server, and allows no new ones.
func (c *Cluster) Cut() {
	c.cut.Store(true)
	c.server.CloseClientConnections()
}

// Hang lets each request that begins from now on wait for ever. Watches that have begun go on.
func (c *Cluster) Hang() {
	hangs := make(chan struct{})
	c.hangs.CompareAndSwap(nil, &hangs)
}

// Restore ends Cut and Hang. Requests that hung get no answer.
func (c *Cluster) Restore() {
	c.cut.Store(false)
	if hangs := c.hangs.Swap(nil); hangs != nil {
		close(*hangs)
	}
}
