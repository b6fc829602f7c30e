// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package controlplane builds etcd, kube-apiserver, kube-controller-manager, kubectl and, for those who
// want nodes, kube-scheduler from the modules that hack/controlplane/go.mod pins. It keeps them below
// the user's cache folder, so that a second checkout builds nothing.
package controlplane

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"syscall"
	"time"

	"github.com/quartermaster-dev/quartermaster/hack/cluster/sandbox"
)

// progressInterval is how long a person waits for a sign of life, on a terminal or not.
const progressInterval = 5 * time.Second

// retention is how long a build is kept after its last use.
const retention = 30 * 24 * time.Hour

// binary is one of the programs. The packages of the first four are also the tools of
// hack/controlplane/go.mod. The package of kube-scheduler imports only what those four import too.
type binary struct{ name, pkg string }

func binaries() []binary {
	return []binary{
		{"etcd", "go.etcd.io/etcd/server/v3"},
		{"kubectl", "k8s.io/kubernetes/cmd/kubectl"},
		{"kube-apiserver", "k8s.io/kubernetes/cmd/kube-apiserver"},
		{"kube-controller-manager", "k8s.io/kubernetes/cmd/kube-controller-manager"},
	}
}

// Ensure returns the folder with the four programs. If they are missing, it builds them, which
// takes minutes, and reports the progress to w, a line every 5 s. If several processes build at
// once, all but the first wait for the first one's result. A build that fails or is cancelled
// leaves nothing behind.
func Ensure(ctx context.Context, w io.Writer) (dir string, err error) {
	return ensure(ctx, w, "controlplane", "the control plane", binaries())
}

// EnsureScheduler is like Ensure for a folder with kube-scheduler. Right after a build of the control
// plane it takes seconds, since the two share most packages.
func EnsureScheduler(ctx context.Context, w io.Writer) (dir string, err error) {
	return ensure(ctx, w, "scheduler", "kube-scheduler", []binary{{"kube-scheduler", "k8s.io/kubernetes/cmd/kube-scheduler"}})
}

func ensure(ctx context.Context, w io.Writer, cache, product string, bins []binary) (dir string, err error) {
	root, err := Root()
	if err != nil {
		return "", err
	}
	userCache, err := os.UserCacheDir()
	if err != nil {
		return "", err
	}
	b := builder{
		module:  filepath.Join(root, "hack", "controlplane"),
		cache:   filepath.Join(userCache, "quartermaster", cache),
		product: product,
		bins:    bins,
		out:     w,
	}
	if dir, err = b.ensure(ctx); err != nil {
		return "", fmt.Errorf("build %s: %w", product, err)
	}
	return dir, nil
}

// Root finds the root of the checkout, upwards from the working directory or else from where this
// file was compiled.
func Root() (string, error) {
	wd, err := os.Getwd()
	if err != nil {
		return "", err
	}
	_, file, _, _ := runtime.Caller(0)
	for _, dir := range []string{wd, filepath.Dir(file)} {
		for ; ; dir = filepath.Dir(dir) {
			mod, err := os.ReadFile(filepath.Join(dir, "go.mod"))
			if err == nil && moduleLine.Match(mod) {
				return dir, nil
			}
			if dir == filepath.Dir(dir) {
				break
			}
		}
	}
	return "", fmt.Errorf("%s is not inside a checkout of Quartermaster", wd)
}

var (
	moduleLine  = regexp.MustCompile(`(?m)^module github\.com/quartermaster-dev/quartermaster$`)
	versionLine = regexp.MustCompile(`(?m)^\s*k8s\.io/kubernetes (v(\d+)\.(\d+)\S*)`)
)

type builder struct {
	module  string // folder of the nested module
	cache   string // holds the lock and a folder for each key
	product string // is built, in messages
	bins    []binary
	out     io.Writer

	version string // of Kubernetes
	ldflags string
	key     string // of everything that affects the result
}

func (b *builder) ensure(ctx context.Context) (dir string, err error) {
	if err := b.readPins(ctx); err != nil {
		return "", err
	}
	dir = filepath.Join(b.cache, b.version+"-"+b.key)
	if b.isComplete(dir) {
		now := time.Now()
		return dir, os.Chtimes(dir, now, now) // for prune
	}
	if err := os.MkdirAll(b.cache, 0o755); err != nil {
		return "", err
	}
	lock, err := b.lock(ctx)
	if err != nil {
		return "", fmt.Errorf("wait for the lock: %w", err)
	}
	defer lock.Close()
	if b.isComplete(dir) { // another process built it while this one waited
		return dir, nil
	}
	return dir, b.build(ctx, dir, lock)
}

// isComplete checks the files too: the folder appears at once, but somebody may have deleted files
// from it.
func (b *builder) isComplete(dir string) bool {
	for _, bin := range b.bins {
		if _, err := os.Stat(filepath.Join(dir, bin.name)); err != nil {
			return false
		}
	}
	return true
}

func (b *builder) readPins(ctx context.Context) error {
	mod, err := os.ReadFile(filepath.Join(b.module, "go.mod"))
	if err != nil {
		return err
	}
	sum, err := os.ReadFile(filepath.Join(b.module, "go.sum"))
	if err != nil {
		return err
	}
	match := versionLine.FindSubmatch(mod)
	if match == nil {
		return errors.New("go.mod does not require k8s.io/kubernetes")
	}
	b.version = string(match[1])
	b.ldflags = ldflags(b.version, string(match[2]), string(match[3]))
	cmd := exec.CommandContext(ctx, "go", "env", "GOVERSION")
	cmd.Dir, cmd.Env = b.module, b.env()
	goVersion, err := cmd.Output()
	if err != nil {
		return fmt.Errorf("ask go for its version: %w", err)
	}
	hash := sha256.New()
	for _, part := range [][]byte{mod, sum, goVersion, []byte(runtime.GOOS + "/" + runtime.GOARCH), []byte(b.ldflags)} {
		fmt.Fprintf(hash, "%d\n%s\n", len(part), part)
	}
	b.key = fmt.Sprintf("%x", hash.Sum(nil))[:12]
	return nil
}

// ldflags sets the version as Kubernetes' own build does; a plain `go build` gives v0.0.0-master. A
// module does not know the commit and the date of its tag: the commit stays empty, the date is
// 1970.
func ldflags(version, major, minor string) string {
	flags := []string{"-s", "-w"}
	for _, pkg := range []string{"k8s.io/component-base/version", "k8s.io/client-go/pkg/version"} {
		flags = append(flags,
			"-X", pkg+".gitVersion="+version,
			"-X", pkg+".gitMajor="+major,
			"-X", pkg+".gitMinor="+minor,
			"-X", pkg+".gitTreeState=clean",
			"-X", pkg+".gitCommit=")
	}
	return strings.Join(flags, " ")
}

// env returns an environment that builds for this machine, whatever the user's build settings are.
func (b *builder) env() []string {
	return append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=", "GOWORK=off", "GOOS="+runtime.GOOS, "GOARCH="+runtime.GOARCH)
}

// lock waits until no other build runs. The lock ends with the last process that holds the file, so
// it never has to be cleaned up.
func (b *builder) lock(ctx context.Context) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(b.cache, "lock"), os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, err
	}
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	begin, reported := time.Now(), time.Time{}
	for {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			return f, nil
		}
		if !errors.Is(err, syscall.EWOULDBLOCK) && !errors.Is(err, syscall.EINTR) {
			f.Close()
			return nil, err
		}
		if time.Since(reported) >= progressInterval {
			reported = time.Now()
			fmt.Fprintf(b.out, "Another process builds %s; waiting (%s)\n", b.product, elapsed(begin))
		}
		select {
		case <-ctx.Done():
			f.Close()
			return nil, context.Cause(ctx)
		case <-tick.C:
		}
	}
}

// build builds into a sandbox beside dir and renames the result, so that dir is complete or absent.
func (b *builder) build(ctx context.Context, dir string, lock *os.File) error {
	temp := filepath.Join(b.cache, "building")
	if err := os.RemoveAll(temp); err != nil { // left over if the machine lost its power
		return err
	}
	box, err := sandbox.New(ctx, temp, lock)
	if err != nil {
		return err
	}
	begin := time.Now()
	fmt.Fprintf(b.out, "Building %s, Kubernetes %s; this can take some minutes, once\n", b.product, b.version)
	built := filepath.Join(box.Dir, "bin")
	for i, bin := range b.bins {
		step := fmt.Sprintf("[%d/%d] %s", i+1, len(b.bins), bin.name)
		if err := b.compile(ctx, box, bin, step, filepath.Join(built, bin.name)); err != nil {
			return errors.Join(fmt.Errorf("%s: %w", bin.name, err), box.Close())
		}
	}
	// What is there is incomplete, see Ensure.
	if err := errors.Join(os.RemoveAll(dir), os.Rename(built, dir), box.Close()); err != nil {
		return err
	}
	fmt.Fprintf(b.out, "Built %s in %s: %s\n", b.product, elapsed(begin), dir)
	return b.prune()
}

// prune removes builds that no checkout has used for a month, some hundred megabytes each. Programs
// that run from there continue: their files exist as long as they are open.
func (b *builder) prune() error {
	entries, err := os.ReadDir(b.cache)
	if err != nil {
		return err
	}
	for _, e := range entries {
		info, err := e.Info()
		if err != nil {
			return err
		}
		if !e.IsDir() || time.Since(info.ModTime()) < retention {
			continue
		}
		if err := os.RemoveAll(filepath.Join(b.cache, e.Name())); err != nil {
			return fmt.Errorf("remove an unused build: %w", err)
		}
		fmt.Fprintf(b.out, "Removed the unused build %s\n", e.Name())
	}
	return nil
}

// compile builds one program and reports the progress.
func (b *builder) compile(ctx context.Context, box *sandbox.Sandbox, bin binary, step, output string) error {
	goTool, err := exec.LookPath("go")
	if err != nil {
		return err
	}
	begin := time.Now()
	p, err := box.Start(sandbox.Command{
		Name: bin.name,
		Path: goTool,
		Args: []string{"build", "-v", "-mod=readonly", "-buildvcs=false", "-trimpath", "-ldflags", b.ldflags, "-o", output, bin.pkg},
		Env:  b.env(),
		Dir:  b.module,
	})
	if err != nil {
		return err
	}
	fmt.Fprintf(b.out, "%s\n", step)
	tick := time.NewTicker(progressInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			p.Kill()
			return context.Cause(ctx)
		case <-tick.C:
			fmt.Fprintf(b.out, "%s: %s, %s\n", step, elapsed(begin), progress(p.Log))
		case <-p.Done():
			if err := p.Wait(ctx); err != nil {
				return fmt.Errorf("%w; go build said:\n%s", err, p.Tail(20))
			}
			fmt.Fprintf(b.out, "%s: built in %s\n", step, elapsed(begin))
			return nil
		}
	}
}

// progress returns the progress according to the output of `go build -v`.
func progress(log string) string {
	text, err := os.ReadFile(log)
	if err != nil {
		return "no log"
	}
	var modules, packages int
	for line := range strings.Lines(string(text)) {
		if strings.HasPrefix(line, "go: downloading ") {
			modules++
		} else {
			packages++
		}
	}
	switch {
	case packages > 0:
		return fmt.Sprintf("compiled %d packages", packages)
	case modules > 0:
		return fmt.Sprintf("downloaded %d modules", modules)
	default: // the packages are in go's build cache
		return "linking"
	}
}

func elapsed(t time.Time) time.Duration { return time.Since(t).Round(time.Second) }
