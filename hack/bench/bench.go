// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/hack/cluster/sandbox"
)

// namespace holds the objects of the benchmarks, except for data sets.
const namespace = "bench"

// waitTimeout limits every wait for something that takes seconds.
const waitTimeout = 2 * time.Minute

// bench is one run on one control plane.
type bench struct {
	opts  options
	root  string
	begin time.Time
	env   environment
	rows  []row

	cluster  *cluster.Cluster
	admin    *kubernetes.Clientset
	box      *sandbox.Sandbox // of the peers
	binaries binaries

	baseline map[string]float64          // memory on the empty cluster, in MiB by subject
	replicas map[string]*cluster.Replica // of the managers, by slot
	leases   map[string]*history
	stopping atomic.Bool
}

// auditPolicy logs every request except for health checks, none with its body. With bodies, as the
// tests need them, kube-apiserver would encode each response once more within the measured times.
const auditPolicy = `{
  "apiVersion": "audit.k8s.io/v1", "kind": "Policy",
  "omitStages": ["RequestReceived"],
  "rules": [{"level": "None", "nonResourceURLs": ["/healthz*", "/livez*", "/readyz*"]}, {"level": "Metadata"}]
}`

// binaries are built as for a release.
type binaries struct {
	manager string // cmd/manager
	peer    string // of controller-runtime

	widget     string // examples/widget
	widgetPeer string // the same controller on controller-runtime
}

func newBench(ctx context.Context, root string, opts options) (_ *bench, err error) {
	load := loadAverage() // before the programs are built
	b := &bench{
		opts: opts, root: root, begin: time.Now(),
		baseline: map[string]float64{}, replicas: map[string]*cluster.Replica{}, leases: map[string]*history{},
	}
	if err := b.build(ctx); err != nil {
		return nil, err
	}
	// kube-controller-manager is one of the subjects. Another one would work on the same objects.
	b.cluster, err = cluster.Start(ctx, cluster.Options{WithoutControllerManager: true, AuditPolicy: auditPolicy, Progress: os.Stderr})
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, b.stop())
		}
	}()
	if b.box, err = sandbox.New(ctx, ""); err != nil {
		return nil, err
	}
	b.admin = b.cluster.Admin
	if err := b.cluster.InstallComponents(ctx); err != nil {
		return nil, err
	}
	b.env = b.readEnvironment(ctx, load)
	return b, b.createNamespace(ctx, namespace)
}

func (b *bench) stop() error {
	b.stopping.Store(true)
	var errs []error
	if b.box != nil {
		errs = append(errs, b.box.Close())
	}
	return errors.Join(append(errs, b.cluster.Stop())...)
}

// createNamespace does nothing if the namespace exists.
func (b *bench) createNamespace(ctx context.Context, name string) error {
	_, err := b.admin.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
	return ignoreExists(err)
}

func ignoreExists(err error) error {
	if apierrors.IsAlreadyExists(err) {
		return nil
	}
	return err
}

// logProgress prints a line about the progress.
func (b *bench) logProgress(format string, args ...any) {
	fmt.Fprintf(os.Stderr, "%s %s\n", time.Since(b.begin).Round(time.Second), fmt.Sprintf(format, args...))
}

// addRow summarises values as a row and returns it. Without values, nothing was measured.
func (b *bench) addRow(name, subject, unit string, values ...float64) row {
	if len(values) == 0 {
		b.logProgress("%s, %s: no value", name, subject)
		return row{}
	}
	r := newRow(name, subject, unit, b.begin.UTC().Format(time.DateOnly), values)
	r.Machine, r.Commit = b.env.Machine, b.env.Commit
	b.rows = append(b.rows, r)
	b.logProgress("%s, %s: n %d, min %s, median %s, p99 %s, max %s %s",
		name, subject, r.N, formatNumber(r.Min), formatNumber(r.Median), formatNumber(r.P99), formatNumber(r.Max), r.Unit)
	return r
}

// writeResults merges the rows so far into latest.json, and writes bench.md and rows.md from all of them.
func (b *bench) writeResults() error {
	old, err := readRows(b.opts.outDir)
	if err != nil {
		return err
	}
	bars, err := readBars(filepath.Join(b.root, "docs", "bench"))
	if err != nil {
		return err
	}
	merged := mergeRows(old, b.rows)
	if err := os.MkdirAll(b.opts.outDir, 0o755); err != nil {
		return err
	}
	b.env.LoadAfter = loadAverage()
	return errors.Join(writeRows(b.opts.outDir, merged),
		os.WriteFile(filepath.Join(b.opts.outDir, "rows.md"), []byte(rowsMarkdown(merged)), 0o644),
		os.WriteFile(filepath.Join(b.opts.outDir, "bench.md"), []byte(markdown(merged, bars, b.env)), 0o644))
}

// build builds the measured programs with the flags of a release build.
func (b *bench) build(ctx context.Context) error {
	for _, p := range []struct {
		path           *string
		name           string
		dir, pkg, tags string // as in the Makefile, and for the peer as in its scaffold
	}{
		{&b.binaries.manager, "bench-manager", b.root, "./cmd/manager", "grpcnotrace"},
		{&b.binaries.peer, "bench-peer", filepath.Join(b.root, "hack", "bench", "peer"), ".", ""},
		{&b.binaries.widget, "bench-widget", filepath.Join(b.root, "examples", "widget"), ".", "grpcnotrace"},
		{&b.binaries.widgetPeer, "bench-peer-widget", filepath.Join(b.root, "hack", "bench", "peer"), "./widget", ""},
	} {
		*p.path = filepath.Join(b.root, ".cache", "bin", p.name)
		b.logProgress("Building %s", p.name)
		cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-tags", p.tags, "-ldflags", "-s -w", "-o", *p.path, p.pkg)
		cmd.Dir = p.dir
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOWORK=off")
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("build %s: %w\n%s", p.name, err, strings.TrimSpace(string(out)))
		}
	}
	return nil
}

// mebibytes returns the size of a file, 0 if it cannot be read.
func mebibytes(path string) float64 {
	info, err := os.Stat(path)
	if err != nil {
		return 0
	}
	return float64(info.Size()) / (1 << 20)
}

// eventually polls until check returns nil, at most for waitTimeout.
func eventually(ctx context.Context, interval time.Duration, what string, check func(context.Context) error) error {
	ctx, cancel := context.WithTimeoutCause(ctx, waitTimeout, fmt.Errorf("it took longer than %s", waitTimeout))
	defer cancel()
	if err := cluster.Poll(ctx, interval, check); err != nil {
		return fmt.Errorf("wait for %s: %w", what, err)
	}
	return nil
}
