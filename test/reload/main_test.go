// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package reload tests the controller config-reload in managers as processes on a real control
// plane. The audit log shows for the whole cluster what is rolled, and what is not; watches
// complete what the log does not have.
package reload

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	toolswatch "k8s.io/client-go/tools/watch"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/configreload"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
	"github.com/quartermaster-dev/quartermaster/test/internal/judge"
)

// All tests of the package share a control plane, and the versions of all workloads in it.
var (
	shared   *fleet.Fleet
	rollouts = judge.NewRollouts()
)

func TestMain(m *testing.M) {
	os.Exit(fleet.Main(m, &shared, fleet.Options{Components: []string{"compat-reloader"}}, prepareCluster))
}

// prepareCluster defines the resource of Argo Rollouts and begins to watch.
func prepareCluster(ctx context.Context) error {
	if err := shared.InstallResource(ctx, configreload.RolloutsResource, "Rollout"); err != nil {
		return err
	}
	for _, resource := range rolledResources {
		client := shared.Objects.Resource(resource)
		existing, err := client.List(ctx, metav1.ListOptions{Limit: 1})
		if err != nil {
			return err
		}
		// The API server ends the watch of a client that is too slow, as on a busy machine.
		versions, err := toolswatch.NewRetryWatcherWithContext(ctx, existing.GetResourceVersion(), &cache.ListWatch{
			WatchFuncWithContext: client.Watch,
		})
		if err != nil {
			return err
		}
		go followVersions(ctx, resource, versions)
	}
	return nil
}

// rolledResources are the resources with a pod template that a reload changes.
var rolledResources = []schema.GroupVersionResource{
	resourceOf("deployments"), resourceOf("statefulsets"), resourceOf("daemonsets"), resourceOf("rollouts"),
}

// resourceOf returns the resource of a name such as deployments.
func resourceOf(name string) schema.GroupVersionResource {
	switch name {
	case "deployments", "statefulsets", "daemonsets", "replicasets":
		return schema.GroupVersionResource{Group: "apps", Version: "v1", Resource: name}
	case "jobs", "cronjobs":
		return schema.GroupVersionResource{Group: "batch", Version: "v1", Resource: name}
	case "rollouts":
		return configreload.RolloutsResource
	case configreload.PodStatusesResource.Resource:
		return configreload.PodStatusesResource
	}
	return schema.GroupVersionResource{Version: "v1", Resource: name}
}

// followVersions adds every version to rollouts. testNamespace.rollouts fails for a version that it missed,
// because the watch broke and could not go on from where it was.
func followVersions(ctx context.Context, resource schema.GroupVersionResource, versions watch.Interface) {
	defer versions.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case e, ok := <-versions.ResultChan():
			if !ok {
				return
			}
			if o, ok := e.Object.(*unstructured.Unstructured); ok && e.Type != watch.Bookmark && e.Type != watch.Deleted {
				if err := rollouts.AddObject(objectName(resource.Resource, o.GetNamespace(), o.GetName()), o); err != nil {
					fmt.Fprintln(os.Stderr, err)
				}
			}
		}
	}
}

func objectName(resource, namespace, name string) string {
	return strings.Join([]string{resource, namespace, name}, "/")
}

// readAuditLog adds the audit log's patches since begin.
func readAuditLog(t testing.TB, begin time.Time) {
	t.Helper()
	events, err := shared.AuditEvents()
	assert.NoError(t, err)
	for _, e := range events {
		if e.RequestReceivedTimestamp.After(begin) {
			assert.NoError(t, rollouts.AddEvent(e))
		}
	}
}

// immediateArgs returns the flags of managers that act on each change at once. The installation sets
// --compat=reloader.
func immediateArgs(more ...string) []string {
	return append([]string{"--controllers=config-reload", "--config-reload-quiet-period=0s"}, more...)
}

// admin is the name of the program in the tests' own writes.
const admin = "quartermaster-test-admin"
