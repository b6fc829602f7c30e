// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"net/http"
	"time"

	"k8s.io/client-go/rest"
)

// A connection whose peer has vanished is given up after about 45 s, as client-go's transport does by
// pings of HTTP/2.
var keepAlive = net.KeepAliveConfig{Enable: true, Idle: 15 * time.Second, Interval: 5 * time.Second, Count: 6}

const handshakeTimeout = 10 * time.Second

// newWipingTransport returns a transport that keeps nothing of what it has read once the reader waits for
// more. Go's HTTP/2 keeps the last frame for as long as the connection lives, where nobody can reach it.
// HTTP/1.1 and TLS have one buffer each, and hand the whole of it to the connection below when they have
// used it up.
func newWipingTransport(config *rest.Config) (http.RoundTripper, error) {
	tlsConfig, err := rest.TLSConfigFor(config)
	if err != nil {
		return nil, err
	}
	dial := config.Dial
	if dial == nil {
		dial = (&net.Dialer{Timeout: 30 * time.Second, KeepAliveConfig: keepAlive}).DialContext
	}
	dialWiping := func(ctx context.Context, network, address string) (net.Conn, error) {
		conn, err := dial(ctx, network, address)
		if err != nil {
			return nil, err
		}
		return wipingConn{conn}, nil
	}
	transport := &http.Transport{
		Proxy:       http.ProxyFromEnvironment,
		DialContext: dialWiping,
		DialTLSContext: func(ctx context.Context, network, address string) (net.Conn, error) {
			conn, err := dialWiping(ctx, network, address)
			if err != nil {
				return nil, err
			}
			return handshake(ctx, config, conn, address)
		},
		TLSClientConfig:     tlsConfig, // behind a proxy, where DialTLSContext is not used
		TLSHandshakeTimeout: handshakeTimeout,
		TLSNextProto:        map[string]func(string, *tls.Conn) http.RoundTripper{}, // no HTTP/2
		IdleConnTimeout:     90 * time.Second,
		DisableCompression:  true, // a decompressor has buffers of its own
	}
	if config.Proxy != nil {
		transport.Proxy = config.Proxy
	}
	return rest.HTTPWrappersForConfig(config, transport)
}

// handshake puts TLS on conn. It reads the configuration anew, since certificates may have changed on disk.
func handshake(ctx context.Context, config *rest.Config, conn net.Conn, address string) (net.Conn, error) {
	tlsConfig, err := rest.TLSConfigFor(config)
	if err != nil {
		_ = conn.Close()
		return nil, fmt.Errorf("TLS configuration: %w", err)
	}
	if tlsConfig == nil {
		tlsConfig = &tls.Config{MinVersion: tls.VersionTLS12}
	}
	tlsConfig.NextProtos = []string{"http/1.1"}
	if tlsConfig.ServerName == "" {
		if tlsConfig.ServerName, _, err = net.SplitHostPort(address); err != nil {
			_ = conn.Close()
			return nil, err
		}
	}
	ctx, cancel := context.WithTimeout(ctx, handshakeTimeout)
	defer cancel()
	secure := tls.Client(conn, tlsConfig)
	if err := secure.HandshakeContext(ctx); err != nil {
		_ = conn.Close()
		return nil, err
	}
	return wipingConn{secure}, nil
}

// wipingConn overwrites the buffer that it is to read into, before it waits.
type wipingConn struct {
	net.Conn
}

func (c wipingConn) Read(p []byte) (int, error) {
	clear(p)
	return c.Conn.Read(p)
}
