// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package federation

import (
	"context"
	"time"
	"unique"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/informers"
)

// key is a federated object: the name of its FederatedTypeConfig, and its own.
type key struct {
	typeName string
	cache.ObjectName
}

// String returns TYPE NAMESPACE/NAME, for logs.
func (k key) String() string { return k.typeName + " " + k.ObjectName.String() }

// queuedKey is a key in 8 bytes instead of 48: each cluster has a queue, whose maps never shrink.
type queuedKey struct{ unique.Handle[key] }

// Tenant returns the namespace, in whose turn the queue takes the key.
func (q queuedKey) Tenant() string { return q.Value().Namespace }

// String returns the text of the key.
func (q queuedKey) String() string { return q.Value().String() }

func newQueuedKey(k key) queuedKey { return queuedKey{unique.Make(k)} }

func queuedKeys(keys []key) (queued []queuedKey) {
	for _, k := range keys {
		queued = append(queued, newQueuedKey(k))
	}
	return queued
}

// keyLoop is a loop of keys.
type keyLoop struct{ *controllers.Loop[queuedKey] }

func newKeyLoop(options controllers.LoopOptions, reconcile func(context.Context, key) (time.Duration, error), watches ...controllers.Watch[queuedKey]) (keyLoop, error) {
	loop, err := controllers.NewLoop(options, func(ctx context.Context, q queuedKey) (time.Duration, error) { return reconcile(ctx, q.Value()) }, watches...)
	return keyLoop{loop}, err
}

// Enqueue adds keys to the queue, see [controllers.Loop.Enqueue].
func (l keyLoop) Enqueue(keys ...key) { l.Loop.Enqueue(queuedKeys(keys)...) }

// EnqueueFor adds keys in the turn of a tenant, which is a cluster that has changed or a type: so a federated
// object that somebody changes need not wait for all these keys.
func (l keyLoop) EnqueueFor(tenant string, keys ...key) {
	l.Loop.EnqueueFor(context.Background(), tenant, queuedKeys(keys)...)
}

// objectNames returns the names of all objects of a namespace, or of all namespaces.
func objectNames[T metav1.Object](objects *informers.Informer[T], namespace string) (names []cache.ObjectName) {
	for _, object := range objects.List(namespace, nil) {
		names = append(names, cache.MetaObjectToName(object))
	}
	return names
}
