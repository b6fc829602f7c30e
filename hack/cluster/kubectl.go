// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/yaml"
)

// Kubectl runs the built kubectl as administrator and returns its stdout. The error contains its
// stderr.
func (c *Cluster) Kubectl(ctx context.Context, args ...string) (string, error) {
	return c.kubectl(ctx, nil, args...)
}

// WaitForCRDs waits until the API server serves the CustomResourceDefinitions in a file that was
// applied. A single `kubectl wait` ends with an error if one of them has no conditions yet.
func (c *Cluster) WaitForCRDs(ctx context.Context, file string) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	return poll(ctx, c.apiServer, func(ctx context.Context) error {
		_, err := c.Kubectl(ctx, "wait", "--for=condition=Established", "--timeout=4s", "-f", file)
		return err
	})
}

func (c *Cluster) kubectl(ctx context.Context, stdin io.Reader, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, c.Binary("kubectl"), args...)
	// With this HOME, its caches are removed with the cluster, and a user's kuberc has no effect.
	cmd.Env = CleanEnv("KUBECONFIG="+c.Kubeconfig(), "HOME="+c.box.Dir)
	cmd.Stdin = stdin
	var out, problems bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &problems
	if err := cmd.Run(); err != nil {
		return out.String(), fmt.Errorf("kubectl %s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(problems.String()))
	}
	return out.String(), nil
}

// ApplyDir applies a kustomization, a folder of manifests or a file, like `kubectl apply`, without
// objects of the kinds in skip.
func (c *Cluster) ApplyDir(ctx context.Context, path string, skip ...string) error {
	manifests, err := c.render(ctx, path)
	if err != nil {
		return err
	}
	if manifests, err = withoutKinds(manifests, skip); err != nil {
		return fmt.Errorf("read %s: %w", path, err)
	}
	_, err = c.kubectl(ctx, bytes.NewReader(manifests), "apply", "-f", "-")
	return err
}

func (c *Cluster) render(ctx context.Context, path string) ([]byte, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if !info.IsDir() {
		return os.ReadFile(path)
	}
	if _, err := os.Stat(filepath.Join(path, "kustomization.yaml")); err == nil {
		out, err := c.Kubectl(ctx, "kustomize", path)
		return []byte(out), err
	}
	files, err := filepath.Glob(filepath.Join(path, "*.yaml"))
	if err != nil {
		return nil, err
	}
	var all [][]byte
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		all = append(all, text)
	}
	return bytes.Join(all, []byte("\n---\n")), nil
}

func withoutKinds(manifests []byte, skip []string) ([]byte, error) {
	if len(skip) == 0 {
		return manifests, nil
	}
	var kept [][]byte
	reader := utilyaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(manifests)))
	for {
		doc, err := reader.Read()
		if errors.Is(err, io.EOF) {
			return bytes.Join(kept, []byte("\n---\n")), nil
		}
		if err != nil {
			return nil, err
		}
		var object struct {
			Kind string `json:"kind"`
		}
		if err := yaml.Unmarshal(doc, &object); err != nil {
			return nil, err
		}
		if !slices.Contains(skip, object.Kind) {
			kept = append(kept, doc)
		}
	}
}

// dryRun reports whether a request's URI asks for a dry run.
func dryRun(uri string) bool {
	u, err := url.Parse(uri)
	return err == nil && u.Query().Get("dryRun") == "All"
}
