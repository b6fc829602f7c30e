// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// installer is one of the ways in which users install.
type installer interface {
	install(context.Context) error
	upgrade(context.Context) error // gives the manager the flag upgraded
	rollBack(context.Context) error
	uninstall(context.Context) error // also of what is not installed
}

const upgradeFlag = "--v=1"

// run runs a program in a folder of this repository, for the cluster, and returns what it prints.
func (c *cluster) run(ctx context.Context, dir, program string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, program, args...)
	var out, problems bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &problems
	cmd.Dir, cmd.Env = filepath.Join(c.root, dir), append(os.Environ(), "KUBECONFIG="+c.kubeconfig)
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("%s: %w: %s", strings.Join(cmd.Args, " "), err, strings.TrimSpace(problems.String()))
	}
	return out.String(), nil
}

func (c *cluster) kubectl(ctx context.Context, args ...string) error {
	_, err := c.run(ctx, "", "kubectl", args...)
	return err
}

// splitImage splits an image into its name, and its tag or digest.
func splitImage(image string) (name, tag, digest string) {
	name, digest, _ = strings.Cut(image, "@")
	if i := strings.LastIndex(name, ":"); i > strings.LastIndex(name, "/") {
		name, tag = name[:i], name[i+1:]
	}
	return name, tag, digest
}

// kustomize installs an overlay of deploy/.
type kustomize struct {
	*cluster

	dir string
}

// apply writes the overlay and applies it.
func (k *kustomize) apply(ctx context.Context, patches string) error {
	deploy, err := filepath.Rel(k.dir, filepath.Join(k.root, "deploy", "default")) // it accepts no absolute path
	if err != nil {
		return err
	}
	name, tag, digest := splitImage(k.image)
	text := fmt.Sprintf("resources: [%q]\nimages: [{name: quartermaster, newName: %q, newTag: %q, digest: %q}]\n%s", deploy, name, tag, digest, patches)
	if err := os.WriteFile(filepath.Join(k.dir, "kustomization.yaml"), []byte(text), 0o600); err != nil {
		return err
	}
	return k.kubectl(ctx, "apply", "-k", k.dir)
}

func (k *kustomize) install(ctx context.Context) error { return k.apply(ctx, "") }

func (k *kustomize) upgrade(ctx context.Context) error {
	const add = `[{"op": "add", "path": "/spec/template/spec/containers/0/args/-", "value": "` + upgradeFlag + `"}]`
	return k.apply(ctx, "patches: [{target: {kind: Deployment}, patch: '"+add+"'}]\n")
}

func (k *kustomize) rollBack(ctx context.Context) error { return k.apply(ctx, "") }

func (k *kustomize) uninstall(ctx context.Context) error {
	return k.kubectl(ctx, "delete", "--ignore-not-found", "-k", k.dir)
}

// chart installs the Helm chart, with the version of Helm that hack/chart pins.
type chart struct{ *cluster }

func (c *chart) helm(ctx context.Context, args ...string) error {
	_, err := c.run(ctx, "hack/chart", "go", append([]string{"tool", "helm", "--namespace=" + home}, args...)...)
	return err
}

func (c *chart) install(ctx context.Context) error {
	name, tag, digest := splitImage(c.image)
	return c.helm(ctx, "install", "quartermaster", "../../deploy/helm/quartermaster",
		"--set=image.repository="+name, "--set-string=image.tag="+tag, "--set=image.digest="+digest)
}

func (c *chart) upgrade(ctx context.Context) error {
	return c.helm(ctx, "upgrade", "quartermaster", "../../deploy/helm/quartermaster", "--reuse-values", "--set=flags.v=1")
}

func (c *chart) rollBack(ctx context.Context) error {
	return c.helm(ctx, "rollback", "quartermaster")
}

func (c *chart) uninstall(ctx context.Context) error {
	return c.helm(ctx, "uninstall", "quartermaster", "--ignore-not-found", "--wait")
}
