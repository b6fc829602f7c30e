// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"cmp"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/quartermaster-dev/quartermaster/hack/cluster/controlplane"
	"github.com/quartermaster-dev/quartermaster/hack/cluster/sandbox"
)

// startTimeout limits the start on a busy machine. On two idle cores it takes about 6 s.
const startTimeout = 3 * time.Minute

//go:embed audit-policy.yaml
var auditPolicy string

// Options configures Start. The zero value is a complete cluster in a temporary directory.
type Options struct {
	// Dir is created for the cluster and removed with it; empty means a new one below os.TempDir.
	Dir string
	// Hold are files that stay open until the clean-up is done, see sandbox.New.
	Hold []*os.File
	// APIServerArgs are appended to kube-apiserver's arguments. The last one of two equal flags counts.
	APIServerArgs []string
	// FeatureGates of kube-apiserver and kube-controller-manager, such as "A=true,B=false".
	FeatureGates string
	// AuditPolicy of kube-apiserver, as YAML or JSON; empty means the policy that AuditEvents
	// describes.
	AuditPolicy string
	// WithoutControllerManager leaves out kube-controller-manager. Then nothing creates the default
	// ServiceAccounts, so Pods need their own.
	WithoutControllerManager bool
	// Nodes is how many simulated nodes there are, with kube-scheduler. They need
	// kube-controller-manager.
	Nodes int
	// SecondAPIServer, if set, adds a second kube-apiserver, see SecondConfig. It is called with the
	// unix sockets that this API server connects to and that etcd listens on, and returns what passes
	// on the requests, which Stop closes. This process must be in a network namespace of its own, see
	// test/internal/netns, and so on Linux.
	SecondAPIServer func(socket, etcd string) (io.Closer, error)
	// Progress gets lines about the build of the control plane and the start; nil means none.
	Progress io.Writer
}

// Cluster is a running control plane. Its methods, except for Install, may be called from several
// goroutines.
type Cluster struct {
	// Admin is a client of a member of system:masters, without a rate limit.
	Admin *kubernetes.Clientset

	opts   Options
	binDir string
	box    *sandbox.Sandbox
	pki    *pki

	schedulerBin, kubeletsBin string // empty without nodes

	apiServerPort int

	etcd                *sandbox.Process
	controllerManager   *sandbox.Process // nil if left out
	scheduler, kubelets *sandbox.Process // nil without nodes

	apiServerMu sync.Mutex // held while it is started or stopped
	apiServer   *sandbox.Process

	second *secondAPIServer // nil without Options.SecondAPIServer

	published net.Listener    // nil without an address that an EndpointSlice may name
	installed *corev1.PodSpec // of the Deployment that Install left out

	auditMu     sync.Mutex // guards what follows
	auditTails  []*AuditTail
	auditEvents [][]auditv1.Event // that each of them has read

	mu      sync.Mutex
	ports   portSet
	unwatch func() bool // undoes the AfterFunc on the context of Start

	stopping sync.Once
	stopErr  error
}

// Start starts a cluster and waits until it is ready: at most 3 minutes, plus the time to build
// missing programs. The cluster lives until ctx ends or Stop is called. After an error nothing is
// left.
func Start(ctx context.Context, opts Options) (_ *Cluster, err error) {
	if opts.Progress == nil {
		opts.Progress = io.Discard
	}
	binDir, err := controlplane.Ensure(ctx, opts.Progress)
	if err != nil {
		return nil, err
	}
	c := &Cluster{opts: opts, binDir: binDir}
	if opts.Nodes > 0 {
		if c.schedulerBin, c.kubeletsBin, err = BuildNodes(ctx, opts.Progress); err != nil {
			return nil, err
		}
	}
	if c.box, err = sandbox.New(ctx, opts.Dir, opts.Hold...); err != nil {
		return nil, err
	}
	defer func() {
		if p := recover(); p != nil {
			_ = c.Stop() // the panic matters, not this error
			panic(p)
		}
		if err != nil {
			err = errors.Join(err, c.Stop())
		}
	}()
	startCtx, cancel := context.WithTimeoutCause(ctx, startTimeout, fmt.Errorf("it took longer than %v", startTimeout))
	defer cancel()
	if err := c.startAll(startCtx); err != nil {
		return nil, fmt.Errorf("start the control plane: %w", err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	// A caller of Stop gets the same result.
	c.unwatch = context.AfterFunc(ctx, func() { _ = c.Stop() })
	return c, nil
}

func (c *Cluster) startAll(ctx context.Context) error {
	begin := time.Now()
	var err error
	if c.pki, err = newPKI(filepath.Join(c.box.Dir, "pki")); err != nil {
		return err
	}
	policy := cmp.Or(c.opts.AuditPolicy, auditPolicy)
	if err := os.WriteFile(filepath.Join(c.box.Dir, "audit-policy.yaml"), []byte(policy), 0o600); err != nil {
		return err
	}
	if c.apiServerPort, err = c.reservePort(); err != nil {
		return err
	}
	if err := c.WriteKubeconfig(c.Kubeconfig()); err != nil {
		return err
	}
	if c.Admin, err = kubernetes.NewForConfig(c.AdminConfig()); err != nil {
		return err
	}
	if err := c.startEtcd(); err != nil {
		return err
	}
	if err := c.StartAPIServer(ctx); err != nil {
		return err
	}
	if c.opts.SecondAPIServer != nil {
		if err := c.startSecondAPIServer(ctx); err != nil {
			return err
		}
	}
	if !c.opts.WithoutControllerManager {
		if err := c.startControllerManager(ctx); err != nil {
			return err
		}
	}
	if c.opts.Nodes > 0 {
		if err := c.startNodes(ctx, c.opts.Nodes); err != nil {
			return err
		}
	}
	if c.opts.SecondAPIServer == nil {
		if err := c.publishAddress(ctx); err != nil {
			return fmt.Errorf("publish the address of the API server: %w", err)
		}
	}
	fmt.Fprintf(c.opts.Progress, "The control plane is ready after %s\n", time.Since(begin).Round(100*time.Millisecond))
	return nil
}

// Stop kills every process of the cluster, including managers, and removes its directory. If it
// matters how the managers end, stop them first. Further calls return the first one's result.
func (c *Cluster) Stop() error {
	c.stopping.Do(func() {
		c.stopErr = c.box.Close()
		if c.published != nil {
			_ = c.published.Close() // nobody can use it any more
		}
		if c.second != nil {
			c.stopErr = errors.Join(c.stopErr, c.second.etcd.Close())
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.unwatch != nil {
			c.unwatch()
		}
		c.ports.release()
	})
	return c.stopErr
}

// Check returns an error with the last lines of a process of the control plane that has ended, if
// there is one. StopAPIServer and KillAPIServer count too.
func (c *Cluster) Check() error {
	c.apiServerMu.Lock()
	defer c.apiServerMu.Unlock()
	processes := []*sandbox.Process{c.etcd, c.apiServer, c.controllerManager, c.scheduler, c.kubelets}
	if c.second != nil {
		processes = append(processes, c.second.process)
	}
	for _, p := range processes {
		if p != nil && p.ExitCode() >= 0 {
			return fmt.Errorf("%s ended with code %d; its last lines:\n%s", p.Name, p.ExitCode(), p.Tail(15))
		}
	}
	return nil
}

func (c *Cluster) reservePort() (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.ports.reserve()
}

// Dir returns the cluster's directory. Files that are written there are removed with it.
func (c *Cluster) Dir() string { return c.box.Dir }

// Binary returns the path of one of the built programs, such as "kubectl".
func (c *Cluster) Binary(name string) string { return filepath.Join(c.binDir, name) }

// URL returns the URL of the first kube-apiserver.
func (c *Cluster) URL() string { return c.serverURL(c.address()) }

func (c *Cluster) serverURL(address string) string {
	return "https://" + net.JoinHostPort(address, strconv.Itoa(c.apiServerPort))
}

// address returns the address of the first kube-apiserver.
func (c *Cluster) address() string {
	if c.opts.SecondAPIServer != nil {
		return firstAddress
	}
	return loopback
}

// config returns a configuration with the server and its CA, without credentials.
func (c *Cluster) config() *rest.Config {
	return &rest.Config{
		Host:            c.URL(),
		TLSClientConfig: rest.TLSClientConfig{CAData: certPEM(c.pki.servingCA.cert)},
	}
}

// AdminConfig returns the configuration of a member of system:masters, without a rate limit.
func (c *Cluster) AdminConfig() *rest.Config {
	config := c.config()
	config.CertData, config.KeyData = c.pki.adminCert, c.pki.adminKey
	config.QPS = -1
	config.UserAgent = "quartermaster-test-admin"
	return config
}

// Kubeconfig returns the path of the administrator's kubeconfig.
func (c *Cluster) Kubeconfig() string { return filepath.Join(c.box.Dir, "kubeconfig") }

// WriteKubeconfig writes the administrator's kubeconfig to another path, with mode 0600.
func (c *Cluster) WriteKubeconfig(path string) error {
	return WriteKubeconfig(path, c.AdminConfig())
}

// CleanEnv returns this program's environment without variables that would point a child to another
// cluster, and without GOGC, which the Makefile sets for tests.
func CleanEnv(extra ...string) []string {
	env := slices.DeleteFunc(os.Environ(), func(kv string) bool {
		name, _, _ := strings.Cut(kv, "=")
		return name == "KUBECONFIG" || name == "GOGC" || strings.HasPrefix(name, "KUBERNETES_") || strings.HasPrefix(name, "POD_")
	})
	return append(env, extra...)
}
