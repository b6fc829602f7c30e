// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/quartermaster-dev/quartermaster/hack/cluster/sandbox"
)

const (
	loopback       = "127.0.0.1"
	frontProxyUser = "front-proxy-client"
	pollInterval   = 50 * time.Millisecond

	// etcd listens on unix sockets: they need no port, and only this user can open them. The names
	// are relative, because the path of a socket must not be longer than about 100 bytes, and look
	// like host:port, as etcd requires.
	etcdName       = "localhost:1"
	etcdSocket     = "unix://" + etcdName
	etcdPeerSocket = "unix://localhost:2"

	// apiServerGrace is how long kube-apiserver may take to finish its requests.
	apiServerGrace = 15 * time.Second
)

func (c *Cluster) startEtcd() (err error) {
	c.etcd, err = c.start("etcd",
		"--data-dir=etcd",
		"--listen-client-urls="+etcdSocket,
		"--advertise-client-urls="+etcdSocket,
		"--listen-peer-urls="+etcdPeerSocket,
		"--initial-advertise-peer-urls="+etcdPeerSocket,
		"--initial-cluster=default="+etcdPeerSocket,
		"--unsafe-no-fsync", // the data need not survive a crash
		"--log-level=warn",
	)
	return err // kube-apiserver waits for it
}

// apiServerArgs returns the flags of a hardened installation, as far as one machine without nodes
// allows.
func (c *Cluster) apiServerArgs(address, etcd, auditLog string) []string {
	args := []string{
		"--bind-address=" + address,
		fmt.Sprintf("--secure-port=%d", c.apiServerPort),
		"--advertise-address=" + address,
		"--etcd-servers=" + etcd,
		"--service-cluster-ip-range=10.0.0.0/24",
		"--tls-cert-file=" + c.pki.path("apiserver.crt"),
		"--tls-private-key-file=" + c.pki.path("apiserver.key"),
		"--client-ca-file=" + c.pki.path("client-ca.crt"),
		"--requestheader-client-ca-file=" + c.pki.path("front-proxy-ca.crt"),
		"--requestheader-allowed-names=" + frontProxyUser,
		"--requestheader-username-headers=X-Remote-User",
		"--requestheader-group-headers=X-Remote-Group",
		"--requestheader-extra-headers-prefix=X-Remote-Extra-",
		"--proxy-client-cert-file=" + c.pki.path("front-proxy.crt"),
		"--proxy-client-key-file=" + c.pki.path("front-proxy.key"),
		"--service-account-issuer=https://kubernetes.default.svc",
		"--service-account-key-file=" + c.pki.path("service-account.key"),
		"--service-account-signing-key-file=" + c.pki.path("service-account.key"),
		"--authorization-mode=RBAC",
		"--anonymous-auth=true", // the default; the managers' tests check what anonymous users may do
		"--profiling=false",
		"--shutdown-watch-termination-grace-period=1s", // else open watches delay the end by a minute
		"--audit-policy-file=" + filepath.Join(c.box.Dir, "audit-policy.yaml"),
		"--audit-log-path=" + auditLog,
		"--audit-log-mode=blocking", // once a request was answered, it is in the log
		"--audit-log-format=json",
		"--audit-log-maxsize=100000", // MiB: never rotated
	}
	if address == loopback {
		args = append(args, "--endpoint-reconciler-type=none") // it is not a valid endpoint
	}
	if c.opts.FeatureGates != "" {
		args = append(args, "--feature-gates="+c.opts.FeatureGates)
	}
	return append(args, c.opts.APIServerArgs...)
}

// StartAPIServer starts kube-apiserver after StopAPIServer, with the same port, certificates and
// data, and waits until it is ready.
func (c *Cluster) StartAPIServer(ctx context.Context) error {
	c.apiServerMu.Lock()
	defer c.apiServerMu.Unlock()
	if c.apiServer != nil && c.apiServer.ExitCode() < 0 {
		return nil
	}
	p, err := c.start("kube-apiserver", c.apiServerArgs(c.address(), etcdSocket, c.AuditLog())...)
	if err != nil {
		return err
	}
	c.apiServer = p
	return waitUntilReady(ctx, p, c.AdminConfig())
}

// waitUntilReady waits until the API server of config, which is the process, is ready.
func waitUntilReady(ctx context.Context, p *sandbox.Process, config *rest.Config) error {
	client, err := rest.HTTPClientFor(config)
	if err != nil {
		return err
	}
	defer client.CloseIdleConnections()
	return awaitReady(ctx, p, func(ctx context.Context) error {
		return get(ctx, client, config.Host+"/readyz?verbose")
	})
}

// StopAPIServer ends kube-apiserver by SIGTERM, and by SIGKILL after 15 s. It is no error if it was
// stopped before.
func (c *Cluster) StopAPIServer(ctx context.Context) error {
	c.apiServerMu.Lock()
	defer c.apiServerMu.Unlock()
	return c.apiServer.Stop(ctx, apiServerGrace)
}

// KillAPIServer ends kube-apiserver by SIGKILL: connections end in the middle of a response.
func (c *Cluster) KillAPIServer() {
	c.apiServerMu.Lock()
	defer c.apiServerMu.Unlock()
	c.apiServer.Kill()
}

// RestartAPIServer calls StopAPIServer and StartAPIServer.
func (c *Cluster) RestartAPIServer(ctx context.Context) error {
	if err := c.StopAPIServer(ctx); err != nil {
		return err
	}
	return c.StartAPIServer(ctx)
}

// SignalAPIServer sends a signal such as SIGSTOP or SIGCONT to kube-apiserver.
func (c *Cluster) SignalAPIServer(sig syscall.Signal) error {
	c.apiServerMu.Lock()
	defer c.apiServerMu.Unlock()
	return c.apiServer.Signal(sig)
}

// startControllerManager starts kube-controller-manager and waits until a namespace has what Pods
// need.
func (c *Cluster) startControllerManager(ctx context.Context) error {
	kubeconfig := filepath.Join(c.box.Dir, "controller-manager.kubeconfig")
	config := c.config()
	config.CertData, config.KeyData = c.pki.controllerCert, c.pki.controllerKey
	if err := WriteKubeconfig(kubeconfig, config); err != nil {
		return err
	}
	args := []string{
		"--kubeconfig=" + kubeconfig,
		"--secure-port=0",
		"--leader-elect=false",
		"--use-service-account-credentials", // as in production: each controller is a user of its own
		"--service-account-private-key-file=" + c.pki.path("service-account.key"),
		"--root-ca-file=" + c.pki.path("serving-ca.crt"),
		"--cluster-signing-cert-file=" + c.pki.path("serving-ca.crt"), // of approved CertificateSigningRequests
		"--cluster-signing-key-file=" + c.pki.path("serving-ca.key"),
		"--controller-start-interval=0s",
		"--kube-api-qps=500",
		"--kube-api-burst=1000",
	}
	if c.opts.FeatureGates != "" {
		args = append(args, "--feature-gates="+c.opts.FeatureGates)
	}
	p, err := c.start("kube-controller-manager", args...)
	if err != nil {
		return err
	}
	c.controllerManager = p
	return awaitReady(ctx, p, func(ctx context.Context) error {
		for _, namespace := range []string{metav1.NamespaceDefault, metav1.NamespaceSystem} {
			if _, err := c.Admin.CoreV1().ServiceAccounts(namespace).Get(ctx, "default", metav1.GetOptions{}); err != nil {
				return err
			}
			if _, err := c.Admin.CoreV1().ConfigMaps(namespace).Get(ctx, "kube-root-ca.crt", metav1.GetOptions{}); err != nil {
				return err
			}
		}
		return nil
	})
}

// start starts one of the built programs.
func (c *Cluster) start(name string, args ...string) (*sandbox.Process, error) {
	return c.box.Start(sandbox.Command{Name: name, Path: filepath.Join(c.binDir, name), Args: args, Env: CleanEnv()})
}

func get(ctx context.Context, client *http.Client, url string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode == http.StatusOK {
		return err
	}
	var failed []string
	for line := range strings.Lines(string(body)) {
		if strings.HasPrefix(line, "[-]") { // a check that failed
			failed = append(failed, strings.TrimSpace(line))
		}
	}
	return fmt.Errorf("%s %s", resp.Status, strings.Join(failed, ", "))
}
