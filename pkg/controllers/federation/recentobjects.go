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

// recentObjectLife is how long one read of a federated object serves the loops of all clusters.
const recentObjectLife = 5 * time.Second

// recentObjects are federated objects as they were read a moment ago. The loops of clusters that need the
// same one at the same time share a request.
type recentObjects struct {
	entries sync.Map // of *recentObject, by key
}

type recentObject struct {
	mu     sync.Mutex // held while it is read
	object *unstructured.Unstructured
	at     time.Time // the zero time if it was not read
}

// get returns a federated object, at least as new as the version, which the cache has, or nil if the
// object does not exist.
func (r *recentObjects) get(ctx context.Context, k key, version string, client dynamic.NamespaceableResourceInterface) (*unstructured.Unstructured, error) {
	entry := r.entry(k)
	entry.mu.Lock()
	defer entry.mu.Unlock()
	if !entry.at.IsZero() && time.Since(entry.at) < recentObjectLife && notOlder(entry.object, version) {
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

// put stores the object that a write has returned.
func (r *recentObjects) put(k key, object *unstructured.Unstructured) {
	entry := r.entry(k)
	entry.mu.Lock()
	defer entry.mu.Unlock()
	entry.object, entry.at = object, time.Now()
}

func (r *recentObjects) entry(k key) *recentObject {
	entry, _ := r.entries.LoadOrStore(k, &recentObject{})
	return entry.(*recentObject)
}

// removeExpired drops the objects that were read too long ago.
func (r *recentObjects) removeExpired() {
	for k, value := range r.entries.Range {
		if entry := value.(*recentObject); entry.mu.TryLock() {
			if time.Since(entry.at) >= recentObjectLife {
				r.entries.Delete(k)
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
	cached, cachedErr := strconv.ParseUint(version, 10, 64)
	return err == nil && cachedErr == nil && have >= cached
}
