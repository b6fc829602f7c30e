// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package federation

import (
	"context"
	"strconv"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/dynamic"
)

// bodyLife is how long a federated object that was read serves all clusters.
const bodyLife = 5 * time.Second

// bodies are federated objects as they were read a moment ago. All clusters that write one at the same
// time share a request.
type bodies struct {
	all sync.Map // of *body, by key
}

type body struct {
	mu     sync.Mutex // held while it is read
	object *unstructured.Unstructured
	at     time.Time // the zero time if it was not read
}

// get returns a federated object, at least as new as the version, which the cache has, or nil if the
// object does not exist.
func (b *bodies) get(ctx context.Context, k key, version string, client dynamic.NamespaceableResourceInterface) (*unstructured.Unstructured, error) {
	entry := b.entry(k)
	entry.mu.Lock()
	defer entry.mu.Unlock()
	if !entry.at.IsZero() && time.Since(entry.at) < bodyLife && notOlder(entry.object, version) {
		return entry.object, nil
	}
	object, err := client.Namespace(k.Namespace).Get(ctx, k.Name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		object, err = nil, nil
	}
	if err != nil {
		return nil, err
	}
	entry.object, entry.at = object, time.Now()
	return object, nil
}

// put takes what a write has returned.
func (b *bodies) put(k key, object *unstructured.Unstructured) {
	entry := b.entry(k)
	entry.mu.Lock()
	defer entry.mu.Unlock()
	entry.object, entry.at = object, time.Now()
}

func (b *bodies) entry(k key) *body {
	entry, _ := b.all.LoadOrStore(k, &body{})
	return entry.(*body)
}

// sweep drops what is too old.
func (b *bodies) sweep() {
	for k, value := range b.all.Range {
		if entry := value.(*body); entry.mu.TryLock() {
			if time.Since(entry.at) >= bodyLife {
				b.all.Delete(k)
			}
			entry.mu.Unlock()
		}
	}
}

// notOlder reports whether an object is what the cache has, or newer. Versions are decimal (KEP-5504).
func notOlder(object *unstructured.Unstructured, version string) bool {
	if object == nil || version == "" {
		return object == nil && version == ""
	}
	have, err := strconv.ParseUint(object.GetResourceVersion(), 10, 64)
	cached, err2 := strconv.ParseUint(version, 10, 64)
	return err == nil && err2 == nil && have >= cached
}
