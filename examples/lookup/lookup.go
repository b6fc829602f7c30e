// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package lookup is an example of a controller that serves on every replica, and writes nothing:
// GET /controllers/lookup/10.0.0.7 says which Pods have that address.
package lookup

import (
	"context"
	"fmt"
	"net/http"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/informers"
)

const name = "lookup"

// Entry describes the controller to the host.
func Entry() controllers.Entry {
	pods := corev1.SchemeGroupVersion.WithResource("pods")
	return controllers.Entry{
		Name: name, Summary: "says which Pods have an address", EveryReplica: true,
		Needs: func(controllers.Settings) ([]informers.Need, error) {
			return []informers.Need{{Resource: pods, Digest: informers.DigestOf(func(pod *corev1.Pod) []byte { return []byte(pod.Status.PodIP) })}}, nil
		},
		New: func(h controllers.Host) (controllers.Controller, error) {
			c := &controller{informers.For[*informers.Object](h, pods)}
			c.AddIndex("address", func(pod *informers.Object) []string { return strings.Fields(string(pod.Digest(name))) })
			h.Handle(c)
			return c, nil
		},
	}
}

type controller struct {
	*informers.Informer[*informers.Object]
}

// ServeHTTP answers callers to whom RBAC allows the path. /readyz fails until the cache is filled.
func (c *controller) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	pods := c.ByIndex("address", strings.TrimPrefix(r.URL.Path, "/"))
	if len(pods) == 0 {
		http.NotFound(w, r)
	}
	for _, pod := range pods {
		fmt.Fprintln(w, cache.MetaObjectToName(pod))
	}
}

func (c *controller) Run(ctx context.Context) error { <-ctx.Done(); return nil }
func (c *controller) Status() controllers.Status    { return controllers.Status{} }
