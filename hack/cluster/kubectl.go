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

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
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
	return awaitReady(ctx, c.apiServer, func(ctx context.Context) error {
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
	all, err := c.render(ctx, path)
	if err != nil {
		return err
	}
	return c.apply(ctx, slices.DeleteFunc(all, func(m manifest) bool { return slices.Contains(skip, m.kind) }))
}

// manifest is a document of a YAML stream.
type manifest struct {
	kind string
	text []byte
}

func (c *Cluster) apply(ctx context.Context, manifests []manifest) error {
	var texts [][]byte
	for _, m := range manifests {
		texts = append(texts, m.text)
	}
	_, err := c.kubectl(ctx, bytes.NewReader(bytes.Join(texts, []byte("\n---\n"))), "apply", "-f", "-")
	return err
}

func (c *Cluster) render(ctx context.Context, path string) (all []manifest, err error) {
	files := []string{path}
	if info, err := os.Stat(path); err != nil {
		return nil, err
	} else if info.IsDir() {
		if _, err := os.Stat(filepath.Join(path, "kustomization.yaml")); err == nil {
			text, err := c.Kubectl(ctx, "kustomize", path)
			if err != nil {
				return nil, err
			}
			return splitManifests([]byte(text))
		}
		if files, err = filepath.Glob(filepath.Join(path, "*.yaml")); err != nil {
			return nil, err
		}
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		manifests, err := splitManifests(text)
		if err != nil {
			return nil, fmt.Errorf("read %s: %w", file, err)
		}
		all = append(all, manifests...)
	}
	return all, nil
}

func splitManifests(stream []byte) (all []manifest, err error) {
	reader := utilyaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(stream)))
	for {
		text, err := reader.Read()
		if errors.Is(err, io.EOF) {
			return all, nil
		}
		if err != nil {
			return nil, err
		}
		var meta metav1.TypeMeta
		if err := yaml.Unmarshal(text, &meta); err != nil {
			return nil, err
		}
		all = append(all, manifest{meta.Kind, text})
	}
}

// isDryRun reports whether a request's URI asks for a dry run.
func isDryRun(uri string) bool {
	u, err := url.Parse(uri)
	return err == nil && u.Query().Get("dryRun") == "All"
}
