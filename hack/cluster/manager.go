// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/quartermaster-dev/quartermaster/hack/cluster/controlplane"
	"github.com/quartermaster-dev/quartermaster/hack/cluster/sandbox"
)

// ManagerOptions say how to start a manager.
type ManagerOptions struct {
	Binary string   // see BuildManager
	Args   []string // after StartManager's own, so that they take precedence
	Env    []string // in addition to this program's environment
}

// Manager is a process of the manager, with the process's Log, Signal, Wait, Stop, Kill, Lines and
// WaitForLine. The clean-up of its cluster kills it.
type Manager struct {
	*sandbox.Process

	Pod         string
	Kubeconfig  string
	SecureURL   string // https://127.0.0.1:PORT
	InsecureURL string // http://127.0.0.1:PORT
}

// StartManager starts a manager as the replica, with the arguments and the environment of the
// installed Deployment before those in o, and returns at once. Use WaitForLine or /readyz to wait
// for it.
func (c *Cluster) StartManager(r *Replica, o ManagerOptions) (*Manager, error) {
	o, err := DeployedOptions(*c.installed, r, o)
	if err != nil {
		return nil, err
	}
	return c.StartBare(r, o)
}

// StartBare is StartManager without the arguments and the environment of the Deployment.
func (c *Cluster) StartBare(r *Replica, o ManagerOptions) (*Manager, error) {
	securePort, err := c.reservePort()
	if err != nil {
		return nil, err
	}
	insecurePort, err := c.reservePort()
	if err != nil {
		return nil, err
	}
	m := &Manager{
		Pod: r.Pod, Kubeconfig: r.Kubeconfig,
		SecureURL:   "https://" + net.JoinHostPort(loopback, strconv.Itoa(securePort)),
		InsecureURL: "http://" + net.JoinHostPort(loopback, strconv.Itoa(insecurePort)),
	}
	m.Process, err = c.box.Start(sandbox.Command{
		Name: r.Pod,
		Path: o.Binary,
		Args: append([]string{
			"--kubeconfig=" + m.Kubeconfig,
			"--bind-address=" + loopback,
			fmt.Sprintf("--secure-port=%d", securePort),
			fmt.Sprintf("--insecure-port=%d", insecurePort),
		}, o.Args...),
		Env: CleanEnv(append([]string{"POD_NAME=" + r.Pod, "POD_NAMESPACE=" + metav1.NamespaceSystem, "POD_UID=" + string(r.UID)}, o.Env...)...),
	})
	return m, err
}

// BuildManager builds cmd/manager, see BuildProgram.
func BuildManager(ctx context.Context, race bool) (string, error) {
	return BuildProgram(ctx, "cmd/manager", race)
}

// BuildProgram builds a program of the checkout, with the race detector if race is set, and returns
// its path below .cache. If nothing has changed, Go's build cache makes it fast.
func BuildProgram(ctx context.Context, pkg string, race bool) (string, error) {
	root, err := controlplane.Root()
	if err != nil {
		return "", err
	}
	name, args := strings.ReplaceAll(pkg, "/", "-"), []string{"build"}
	if race {
		name, args = name+"-race", append(args, "-race")
	}
	bin := filepath.Join(root, ".cache", "bin")
	if err := os.MkdirAll(bin, 0o755); err != nil {
		return "", err
	}
	// The build runs in a sandbox, so that a killed build leaves nothing behind. The result is then
	// renamed, because another process may be starting the same file.
	box, err := sandbox.New(ctx, filepath.Join(bin, fmt.Sprintf("build-%x", rand.Uint64())))
	if err != nil {
		return "", err
	}
	built, path := filepath.Join(box.Dir, name), filepath.Join(bin, name)
	// go does not link it again if it is up to date.
	previous, err := os.ReadFile(path)
	if err == nil {
		err = os.WriteFile(built, previous, 0o755)
	}
	if err == nil || errors.Is(err, os.ErrNotExist) {
		err = goBuild(ctx, box, filepath.Join(root, pkg), append(args, "-o", built, ".")) // pkg may be in a module of its own
	}
	if err == nil {
		err = replace(path, previous, built)
	}
	if err := errors.Join(err, box.Close()); err != nil {
		return "", fmt.Errorf("build %s: %w", pkg, err)
	}
	return path, nil
}

// replace gives path the content of the file built. It leaves a file with this content alone, whose
// time Go's test cache compares.
func replace(path string, previous []byte, built string) error {
	program, err := os.ReadFile(built)
	if err != nil || bytes.Equal(previous, program) {
		return err
	}
	return os.Rename(built, path)
}

func goBuild(ctx context.Context, box *sandbox.Sandbox, dir string, args []string) error {
	goTool, err := exec.LookPath("go")
	if err != nil {
		return err
	}
	p, err := box.Start(sandbox.Command{Name: "go", Path: goTool, Args: args, Dir: dir})
	if err != nil {
		return err
	}
	if err := p.Wait(ctx); err != nil {
		if ctx.Err() != nil {
			return err
		}
		return fmt.Errorf("%w; go build said:\n%s", err, p.Tail(20))
	}
	return nil
}
