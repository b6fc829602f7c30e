// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"

	"k8s.io/client-go/util/cert"
	"k8s.io/client-go/util/keyutil"
)

// pki is the directory with the certificates of one cluster. There is one CA each for servers, for
// clients, and for the front proxy, which may act for other users.
type pki struct {
	dir                           string
	servingCA, clientCA, frontCA  *authority
	adminCert, adminKey           []byte
	controllerCert, controllerKey []byte
}

type authority struct {
	cert *x509.Certificate
	key  crypto.Signer
}

// newPKI writes everything that kube-apiserver and kube-controller-manager read into dir.
func newPKI(dir string) (*pki, error) {
	if err := os.Mkdir(dir, 0o700); err != nil {
		return nil, err
	}
	p := &pki{dir: dir}
	for _, ca := range []struct {
		name   string
		target **authority
	}{{"serving-ca", &p.servingCA}, {"client-ca", &p.clientCA}, {"front-proxy-ca", &p.frontCA}} {
		var err error
		if *ca.target, err = newAuthority(ca.name); err != nil {
			return nil, err
		}
		if err := p.write(ca.name+".crt", certPEM((*ca.target).cert)); err != nil {
			return nil, err
		}
	}
	servingKey, err := keyutil.MarshalPrivateKeyToPEM(p.servingCA.key)
	if err != nil {
		return nil, err
	}
	if err := p.write("serving-ca.key", servingKey); err != nil {
		return nil, err
	}
	if _, _, err := p.issue(p.servingCA, "apiserver", "kube-apiserver", "", x509.ExtKeyUsageServerAuth); err != nil {
		return nil, err
	}
	if _, _, err := p.issue(p.frontCA, "front-proxy", frontProxyUser, "", x509.ExtKeyUsageClientAuth); err != nil {
		return nil, err
	}
	p.adminCert, p.adminKey, err = p.issue(p.clientCA, "admin", "admin", "system:masters", x509.ExtKeyUsageClientAuth)
	if err != nil {
		return nil, err
	}
	p.controllerCert, p.controllerKey, err = p.issue(p.clientCA, "controller-manager", "system:kube-controller-manager", "", x509.ExtKeyUsageClientAuth)
	if err != nil {
		return nil, err
	}
	return p, p.writeServiceAccountKey()
}

func newAuthority(name string) (*authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	crt, err := cert.NewSelfSignedCACert(cert.Config{CommonName: name}, key)
	if err != nil {
		return nil, fmt.Errorf("make the certificate authority %s: %w", name, err)
	}
	return &authority{cert: crt, key: key}, nil
}

// issue creates a key and a certificate for a user (common name) in a group (organization) and
// writes NAME.crt and NAME.key.
func (p *pki) issue(ca *authority, name, user, group string, usage x509.ExtKeyUsage) (crt, key []byte, err error) {
	signer, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, err
	}
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil {
		return nil, nil, err
	}
	template := &x509.Certificate{
		SerialNumber: serial,
		Subject:      pkix.Name{CommonName: user},
		NotBefore:    ca.cert.NotBefore,
		NotAfter:     time.Now().AddDate(1, 0, 0),
		KeyUsage:     x509.KeyUsageDigitalSignature,
		ExtKeyUsage:  []x509.ExtKeyUsage{usage},
	}
	if group != "" {
		template.Subject.Organization = []string{group}
	}
	if usage == x509.ExtKeyUsageServerAuth {
		template.DNSNames = []string{"localhost", "kubernetes.default.svc"}
		template.IPAddresses = []net.IP{net.ParseIP(loopback), net.ParseIP(firstAddress), net.ParseIP(secondAddress)}
	}
	der, err := x509.CreateCertificate(rand.Reader, template, ca.cert, signer.Public(), ca.key)
	if err != nil {
		return nil, nil, fmt.Errorf("make the certificate of %s: %w", name, err)
	}
	parsed, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, nil, err
	}
	if key, err = keyutil.MarshalPrivateKeyToPEM(signer); err != nil {
		return nil, nil, err
	}
	crt = certPEM(parsed)
	if err := p.write(name+".crt", crt); err != nil {
		return nil, nil, err
	}
	return crt, key, p.write(name+".key", key)
}

// writeServiceAccountKey writes the key that signs the tokens of ServiceAccounts.
func (p *pki) writeServiceAccountKey() error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	pem, err := keyutil.MarshalPrivateKeyToPEM(key)
	if err != nil {
		return err
	}
	return p.write("service-account.key", pem)
}

func (p *pki) write(name string, pem []byte) error {
	return os.WriteFile(p.path(name), pem, 0o600)
}

func (p *pki) path(name string) string { return filepath.Join(p.dir, name) }

func certPEM(crt *x509.Certificate) []byte {
	pem, _ := cert.EncodeCertificates(crt) // encoding into memory cannot fail
	return pem
}
