// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Command needs is the manager with one more entry. The entry does nothing, but declares of the
// shared cache what a controller that copies Secrets and ConfigMaps needs. The benchmarks measure
// the cost.
package main

import (
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"hash"
	"maps"
	"os"
	"slices"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/component-base/cli"

	"github.com/quartermaster-dev/quartermaster/pkg/app"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/informers"
)

const name = "replication-needs"

// annotations are keys like those of a copy or its source.
var annotations = []string{
	"quartermaster.dev/push-to", "quartermaster.dev/pull-from", "quartermaster.dev/allow-pull", "quartermaster.dev/source",
}

func main() {
	os.Exit(cli.Run(app.NewCommand(app.Entry{
		Name:    name,
		Summary: "declares the needs of replication and does nothing",
		Needs:   needs,
		Rules:   func() []rbacv1.PolicyRule { return nil },
		New:     func(app.Host) (controllers.Controller, error) { return idle{}, nil },
	})))
}

// needs returns a keyed digest of everything, and metadata of the objects that take part.
func needs() ([]informers.Need, error) {
	key := make([]byte, sha256.Size)
	_, _ = rand.Read(key) // never fails
	takesPart := func(o metav1.Object) bool {
		return slices.ContainsFunc(annotations, func(key string) bool { _, ok := o.GetAnnotations()[key]; return ok })
	}
	need := informers.Need{
		Annotations: annotations, Fields: informers.Labels | informers.OwnerReferences, When: takesPart,
		Digest: func(o runtime.Object) []byte { return digest(key, o) },
	}
	secrets, configMaps := need, need
	secrets.Resource, configMaps.Resource = informers.Secrets, informers.ConfigMaps
	return []informers.Need{secrets, configMaps}, nil
}

// digest returns an HMAC-SHA-256, cut to 16 bytes, over sorted and length-prefixed keys and values.
func digest(key []byte, o runtime.Object) []byte {
	sum := hmac.New(sha256.New, key)
	switch o := o.(type) {
	case *corev1.Secret:
		addAll(sum, o.Data)
	case *corev1.ConfigMap:
		addAll(sum, o.Data)
		addAll(sum, o.BinaryData)
	}
	return sum.Sum(nil)[:16]
}

func addAll[V string | []byte](sum hash.Hash, data map[string]V) {
	add := func(b []byte) {
		_, _ = sum.Write(binary.AppendUvarint(nil, uint64(len(b)))) // a hash never fails
		_, _ = sum.Write(b)
	}
	for _, key := range slices.Sorted(maps.Keys(data)) {
		add([]byte(key))
		add([]byte(data[key]))
	}
}

type idle struct{}

func (idle) Run(ctx context.Context) error { <-ctx.Done(); return nil }

func (idle) Status() controllers.Status { return controllers.Status{} }
