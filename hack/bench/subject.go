// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"crypto/tls"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"
	"k8s.io/client-go/rest"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/hack/cluster/sandbox"
)

const releaseGate = "ControllerManagerReleaseLeaderElectionLockOnExit"

// Names of the subjects in the table.
const (
	quartermaster = "quartermaster"
	kcm           = "kube-controller-manager"
	kcmGate       = "kube-controller-manager, release gate"
	peer          = "controller-runtime"
	peerWarm      = "controller-runtime, EnableWarmup"
	apiserver     = "kube-apiserver"
)

// subject is a program that elects a leader by a Lease in kube-system. Its processes run in slots.
// Each slot has its own identity in the API server, which a process that is started again keeps.
type subject struct {
	name  string
	lease string
	args  []string
	// binary is the program of controller-runtime that runs in place of the default.
	binary string
	start  func(b *bench, ctx context.Context, s subject, slot string, args []string) (*process, error)
	// timings renders the flags of leader election.
	timings func(timing) []string
}

// timing is the timing of leader election. The zero value stands for the defaults, which are 15 s, 10 s
// and 2 s for all subjects.
type timing struct{ lease, deadline, retry time.Duration }

// process is a running subject.
type process struct {
	*sandbox.Process
	slot        string
	started     time.Time
	readyURL    string
	metricsURL  string                     // empty if there are none
	manager     *cluster.Manager           // of ours
	madeRequest func(e auditv1.Event) bool // reports whether a request is by this process
}

func managerSubject(b *bench, binary string, args ...string) subject {
	return subject{name: quartermaster, lease: "quartermaster", args: args, timings: kubeTimings,
		start: func(_ *bench, ctx context.Context, s subject, slot string, args []string) (*process, error) {
			return b.startManager(ctx, binary, slot, append(slices.Clone(s.args), args...))
		}}
}

func kcmSubject(name string, args ...string) subject {
	return subject{name: name, lease: "kube-controller-manager", args: args, timings: kubeTimings, start: (*bench).startKCM}
}

func peerSubject(name string, args ...string) subject {
	return subject{name: name, lease: "bench-peer", args: args, start: (*bench).startPeer, timings: func(t timing) []string {
		return []string{"-lease-duration=" + t.lease.String(), "-renew-deadline=" + t.deadline.String(), "-retry-period=" + t.retry.String()}
	}}
}

func kubeTimings(t timing) []string {
	return []string{"--leader-elect-lease-duration=" + t.lease.String(), "--leader-elect-renew-deadline=" + t.deadline.String(),
		"--leader-elect-retry-period=" + t.retry.String()}
}

// withTiming returns the subject with another timing.
func (s subject) withTiming(t timing) subject {
	if t != (timing{}) {
		s.args = append(slices.Clone(s.args), s.timings(t)...)
	}
	return s
}

// run starts a process of the subject in a slot.
func (b *bench) run(ctx context.Context, s subject, slot string, args ...string) (*process, error) {
	p, err := s.start(b, ctx, s, slot, args)
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", s.name, err)
	}
	p.slot = slot
	return p, nil
}

// replica returns the Pod of a slot.
func (b *bench) replica(ctx context.Context, slot string) (r *cluster.Replica, err error) {
	if r = b.replicas[slot]; r != nil {
		return r, nil
	}
	r, err = b.cluster.NewReplica(ctx, "bench-"+slot)
	if err == nil {
		b.replicas[slot] = r
	}
	return r, err
}

func (b *bench) startManager(ctx context.Context, binary, slot string, args []string) (*process, error) {
	r, err := b.replica(ctx, slot)
	if err != nil {
		return nil, err
	}
	started := time.Now()
	m, err := b.cluster.StartManager(r, cluster.ManagerOptions{Binary: binary, Args: args})
	if err != nil {
		return nil, err
	}
	return &process{
		Process: m.Process, started: started, readyURL: m.InsecureURL + "/readyz", metricsURL: m.SecureURL + "/metrics", manager: m,
		madeRequest: func(e auditv1.Event) bool { return cluster.AuditPod(e) == r.Pod },
	}, nil
}

// startKCM starts kube-controller-manager with its defaults. One ServiceAccount does everything, so
// that the audit log distinguishes the replicas.
func (b *bench) startKCM(ctx context.Context, s subject, slot string, args []string) (*process, error) {
	account := "bench-kcm-" + slot
	kubeconfig, err := b.kubeconfig(ctx, account)
	if err != nil {
		return nil, err
	}
	port, err := cluster.FreePort()
	if err != nil {
		return nil, err
	}
	ca := filepath.Join(b.box.Dir, "root-ca.crt")
	if err := os.WriteFile(ca, b.cluster.AdminConfig().CAData, 0o600); err != nil {
		return nil, err
	}
	all := append([]string{
		"--kubeconfig=" + kubeconfig, "--authentication-kubeconfig=" + kubeconfig, "--authorization-kubeconfig=" + kubeconfig,
		"--bind-address=127.0.0.1", fmt.Sprintf("--secure-port=%d", port), "--cert-dir=" + filepath.Join(b.box.Dir, account),
		"--root-ca-file=" + ca,
	}, append(slices.Clone(s.args), args...)...)
	url := fmt.Sprintf("https://127.0.0.1:%d", port)
	return b.startPeerProcess(account, b.cluster.Binary("kube-controller-manager"), all, url+"/healthz", url+"/metrics")
}

// startPeer starts the manager of controller-runtime.
func (b *bench) startPeer(ctx context.Context, s subject, slot string, args []string) (*process, error) {
	account := "bench-peer-" + slot
	kubeconfig, err := b.kubeconfig(ctx, account)
	if err != nil {
		return nil, err
	}
	port, err := cluster.FreePort()
	if err != nil {
		return nil, err
	}
	health := fmt.Sprintf("127.0.0.1:%d", port)
	all := append([]string{"--kubeconfig=" + kubeconfig, "-health=" + health}, append(slices.Clone(s.args), args...)...)
	return b.startPeerProcess(account, cmp.Or(s.binary, b.binaries.peer), all, "http://"+health+"/readyz", "")
}

func (b *bench) startPeerProcess(account, path string, args []string, readyURL, metricsURL string) (*process, error) {
	started := time.Now()
	p, err := b.box.Start(sandbox.Command{Name: account, Path: path, Args: args, Env: cluster.CleanEnv()})
	if err != nil {
		return nil, err
	}
	user := "system:serviceaccount:" + metav1.NamespaceSystem + ":" + account
	return &process{Process: p, started: started, readyURL: readyURL, metricsURL: metricsURL, madeRequest: func(e auditv1.Event) bool { return e.User.Username == user }}, nil
}

// kubeconfig writes the kubeconfig of a ServiceAccount that may do everything.
func (b *bench) kubeconfig(ctx context.Context, account string) (path string, err error) {
	config := rest.AnonymousClientConfig(b.cluster.AdminConfig())
	if config.BearerToken, err = b.cluster.NewAccount(ctx, metav1.NamespaceSystem, account, "cluster-admin"); err != nil {
		return "", err
	}
	path = filepath.Join(b.box.Dir, account+".kubeconfig")
	return path, cluster.WriteKubeconfig(path, config)
}

// probe calls the health path of a process that has a self-signed certificate.
var probe = &http.Client{
	Timeout:   5 * time.Second,
	Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, DisableKeepAlives: true},
}

// waitReady waits until the process reports that it is ready, and returns how long that took from
// its start.
func (p *process) waitReady(ctx context.Context) (time.Duration, error) {
	err := eventually(ctx, 10*time.Millisecond, p.Name+" to be ready", func(ctx context.Context) error {
		if code := p.ExitCode(); code >= 0 {
			return fmt.Errorf("it ended with code %d; its last lines:\n%s", code, p.Tail(15))
		}
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, p.readyURL, nil)
		if err != nil {
			return err
		}
		resp, err := probe.Do(req)
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			return fmt.Errorf("its response is %s", resp.Status)
		}
		return nil
	})
	return time.Since(p.started), err
}
