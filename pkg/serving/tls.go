// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package serving

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
	"slices"
	"strings"

	"github.com/spf13/pflag"
	"k8s.io/apiserver/pkg/server/dynamiccertificates"
	certutil "k8s.io/client-go/util/cert"
	"k8s.io/client-go/util/keyutil"
	cliflag "k8s.io/component-base/cli/flag"
)

// SecureConfig configures the HTTPS server, with the flags of the Kubernetes components.
type SecureConfig struct {
	BindAddress  net.IP
	BindPort     int
	CertFile     string
	KeyFile      string
	MinVersion   string
	CipherSuites []string
}

// AddFlags adds the flags to fs.
func (c *SecureConfig) AddFlags(fs *pflag.FlagSet) {
	fs.IPVar(&c.BindAddress, "bind-address", c.BindAddress,
		"The address of the HTTPS server; 0.0.0.0 and :: are all interfaces and both IP families.")
	fs.IntVar(&c.BindPort, "secure-port", c.BindPort,
		"The port of the HTTPS server, which authenticates and authorizes all requests but those for health; 0 switches it off.")
	fs.StringVar(&c.CertFile, "tls-cert-file", c.CertFile, ""+
		"The serving certificate, followed by the certificates of its CAs if any. The file is read again when it changes. "+
		"Default: a self-signed certificate on the curve P-256, made in memory at each start.")
	fs.StringVar(&c.KeyFile, "tls-private-key-file", c.KeyFile, "The key of --tls-cert-file.")
	fs.StringVar(&c.MinVersion, "tls-min-version", c.MinVersion, ""+
		"The lowest TLS version: "+strings.Join(cliflag.TLSPossibleVersions(), ", ")+". Default: VersionTLS12.")
	fs.StringSliceVar(&c.CipherSuites, "tls-cipher-suites", c.CipherSuites, ""+
		"The cipher suites of TLS 1.2 and lower. Default: Go's. A certificate made at the start needs an ECDSA suite. "+
		"Secure: "+strings.Join(cliflag.PreferredTLSCipherNames(), ", ")+". "+
		"Insecure: "+strings.Join(cliflag.InsecureTLSCipherNames(), ", ")+".")
}

// Validate returns all problems, joined; each names its flag. It reads no files.
func (c *SecureConfig) Validate() error {
	var errs []error
	if c.BindPort < 0 || c.BindPort > 65535 {
		errs = append(errs, fmt.Errorf("--secure-port: must be 0 to 65535, got %d", c.BindPort))
	}
	if (c.CertFile == "") != (c.KeyFile == "") {
		errs = append(errs, errors.New("--tls-cert-file: goes with --tls-private-key-file; only one of them is set"))
	}
	_, err := c.tls()
	return errors.Join(append(errs, err)...)
}

// tls returns the part of the configuration that is the same for every connection.
func (c *SecureConfig) tls() (*tls.Config, error) {
	var version, suites error
	config := &tls.Config{NextProtos: []string{"h2", "http/1.1"}}
	if config.MinVersion, version = cliflag.TLSVersion(c.MinVersion); version != nil {
		version = fmt.Errorf("--tls-min-version: %w", version)
	}
	if len(c.CipherSuites) > 0 {
		if config.CipherSuites, suites = cliflag.TLSCipherSuites(c.CipherSuites); suites != nil {
			suites = fmt.Errorf("--tls-cipher-suites: %w", suites)
		}
	}
	return config, errors.Join(version, suites)
}

// contentSource is what the library's providers of certificates and CAs have in common.
type contentSource interface {
	AddListener(dynamiccertificates.Listener)
}

// serve returns the configuration of a TLS server. Its certificates, and the CAs that it names to
// clients, follow their sources until ctx ends. clientCA may be nil. It is an error if a
// certificate cannot be read.
func (c *SecureConfig) serve(ctx context.Context, clientCA dynamiccertificates.CAContentProvider) (*tls.Config, error) {
	config, err := c.tls()
	if err != nil {
		return nil, err
	}
	cert, err := c.certificate()
	if err != nil {
		return nil, err
	}
	sources := []contentSource{cert}
	if clientCA != nil {
		// The authenticator judges the certificate. If TLS refused it, a valid token in the same
		// request would be refused too.
		config.ClientAuth = tls.RequestClientCert
		sources = append(sources, clientCA)
	}
	serving := dynamiccertificates.NewDynamicServingCertificateController(config, clientCA, cert, nil, nil)
	for _, source := range sources {
		source.AddListener(serving)
		if runner, ok := source.(dynamiccertificates.ControllerRunner); ok {
			go runner.Run(ctx, 1)
		}
	}
	if err := serving.RunOnce(); err != nil {
		return nil, fmt.Errorf("--tls-cert-file: %w", err)
	}
	go serving.Run(1, ctx.Done())
	// The HTTP server changes its configuration while the provider of certificates reads config, so the two must
	// be different.
	return &tls.Config{NextProtos: slices.Clone(config.NextProtos), GetConfigForClient: serving.GetConfigForClient}, nil
}

func (c *SecureConfig) certificate() (dynamiccertificates.CertKeyContentProvider, error) {
	if c.CertFile != "" {
		cert, err := dynamiccertificates.NewDynamicServingContentFromFiles("serving-cert", c.CertFile, c.KeyFile)
		if err != nil {
			return nil, fmt.Errorf("--tls-cert-file, --tls-private-key-file: %w", err)
		}
		return cert, nil
	}
	cert, key, err := selfSigned()
	if err != nil {
		return nil, fmt.Errorf("self-signed certificate: %w", err)
	}
	return dynamiccertificates.NewStaticCertKeyContent("self-signed", cert, key)
}

// selfSigned returns a certificate and its key, as PEM, on P-256: an RSA key would take a tenth of a
// second of each start. Nobody can verify such a certificate, so its names do not matter.
func selfSigned() (certPEM, keyPEM []byte, err error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, err
	}
	cert, err := certutil.NewSelfSignedCACert(certutil.Config{CommonName: "localhost"}, key)
	if err != nil {
		return nil, nil, err
	}
	keyPEM, err = keyutil.MarshalPrivateKeyToPEM(key)
	return pem.EncodeToMemory(&pem.Block{Type: certutil.CertificateBlockType, Bytes: cert.Raw}), keyPEM, err
}
