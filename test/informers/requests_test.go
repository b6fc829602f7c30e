// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp/cmpopts"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/metadata"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/pkg/informers"
	"github.com/quartermaster-dev/quartermaster/test/internal/faultproxy"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// acceptRecorder collects the content types that watches of all namespaces through a proxy accept, by
// resource.
type acceptRecorder struct {
	mu    sync.Mutex
	forms map[string]string
}

func (a *acceptRecorder) record(r *http.Request) bool {
	if r.URL.Query().Get("watch") != "" && !strings.Contains(r.URL.Path, "/namespaces/") {
		a.mu.Lock()
		defer a.mu.Unlock()
		a.forms[r.URL.Path[strings.LastIndex(r.URL.Path, "/")+1:]] = r.Header.Get("Accept")
	}
	return false
}

const (
	wholeObject  = "application/vnd.kubernetes.protobuf,application/json"
	metadataOnly = "application/vnd.kubernetes.protobuf;as=PartialObjectMetadata;g=meta.k8s.io;v=v1,application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1,application/json"
)

func TestRequestsAreOneWatchPerResource(t *testing.T) {
	controllers := []string{"config-reload", "greeter"}
	workloads := []string{"cronjobs", "daemonsets", "deployments", "jobs", "statefulsets"}
	all := map[string]string{"configmaps": wholeObject, "secrets": wholeObject}
	for _, resource := range workloads {
		all[resource] = wholeObject
	}
	for name, tc := range map[string]struct {
		controllers string
		accept      map[string]string // by watched resource
		configMaps  *informers.ResourceStatus
	}{
		"two controllers that need ConfigMaps in different forms": {"*", all,
			&informers.ResourceStatus{For: controllers, Form: "content digest"}},
		"one that needs metadata": {"*,-config-reload", map[string]string{"configmaps": metadataOnly},
			&informers.ResourceStatus{For: []string{"greeter"}, Form: "metadata"}},
		"none": {"-config-reload,-greeter", nil, nil},
	} {
		t.Run(name, func(t *testing.T) {
			ctx := fleet.Context(t)
			s := shared.NewSample(ctx, t)
			s.CreateSecret(ctx, t, "release", "helm.sh/release.v1", "chart")
			replica, proxy := shared.NewReplicaBehindProxy(ctx, t)
			accept := &acceptRecorder{forms: map[string]string{}}
			proxy.Add(faultproxy.Rule{Match: accept.record})
			m := shared.Run(t, replica, cluster.ManagerOptions{Args: []string{"--controllers=" + tc.controllers}})
			if _, err := m.WaitForLine(ctx, "Competing for the Lease"); err != nil {
				t.Fatal(err)
			}
			if tc.configMaps != nil {
				shared.WaitForLeader(ctx, t, m)
				s.Greet(ctx, t, "somebody")
			}
			if _, ok := tc.accept["deployments"]; ok {
				s.WaitUntilKnown(ctx, t, "web")
				s.Paint(ctx, t, "red")
				s.WaitForReplicaSets(ctx, t, "web", 2)
			}

			uris := cacheReads(t, m.Pod)
			assert.Equal(t, "resources that were listed or watched", slices.Sorted(maps.Keys(tc.accept)), slices.Sorted(maps.Keys(uris)))
			for resource, uris := range uris {
				checkStream(t, resource, uris)
			}
			assert.Equal(t, "accepted forms", tc.accept, accept.forms, cmpopts.EquateEmpty())
			if tc.configMaps == nil {
				return // there need not be a manager to ask
			}
			for _, r := range mustStatus(t, m).Resources {
				switch r.Resource {
				case "configmaps":
					got := &informers.ResourceStatus{For: r.For, Form: r.Form}
					assert.Equal(t, "ConfigMaps", tc.configMaps, got)
				case "secrets":
					all, err := shared.Admin.CoreV1().Secrets("").List(ctx, metav1.ListOptions{})
					assert.NoError(t, err)
					want := slices.DeleteFunc(all.Items, func(s corev1.Secret) bool { return s.Type == "helm.sh/release.v1" })
					if r.Objects != len(want) {
						t.Errorf("%d Secrets are cached, want %d", r.Objects, len(want))
					}
				}
			}
		})
	}
}

// checkStream checks that there was one request: a list that is streamed as a watch.
func checkStream(t *testing.T, resource string, uris []string) {
	t.Helper()
	if len(uris) != 1 {
		t.Errorf("%d requests for %s instead of one watch:\n%s", len(uris), resource, strings.Join(uris, "\n"))
	}
	u, err := url.ParseRequestURI(uris[0])
	assert.NoError(t, err)
	selector := ""
	if resource == "secrets" {
		selector = "type!=helm.sh/release.v1"
	}
	want := map[string]string{"watch": "true", "sendInitialEvents": "true", "allowWatchBookmarks": "true", "fieldSelector": selector}
	for key, value := range want {
		if got := u.Query().Get(key); got != value {
			t.Errorf("%s: %s is %q, want %q in %s", resource, key, got, value, fmt.Sprint(u))
		}
	}
}

// TestVersionOfASourceNeedsOnlyAList lists as config-reload does when it suspects that the cache is behind.
func TestVersionOfASourceNeedsOnlyAList(t *testing.T) {
	ctx := fleet.Context(t)
	// The client is the manager's, which may not get Secrets.
	client, err := metadata.NewForConfig(shared.NewReplica(ctx, t).Config())
	assert.NoError(t, err)
	s := shared.NewSample(ctx, t)
	db, err := shared.Admin.CoreV1().Secrets(s.Namespace).Get(ctx, "db", metav1.GetOptions{})
	assert.NoError(t, err)
	s.CreateSecret(ctx, t, "release", "helm.sh/release.v1", "first") // the cache leaves it out
	for name, want := range map[string]string{"db": db.ResourceVersion, "d": "", "release": ""} {
		list, err := client.Resource(informers.Secrets).Namespace(s.Namespace).List(ctx, metav1.ListOptions{FieldSelector: "metadata.name=" + name + "," + informers.NotHelm})
		got := ""
		if err == nil && len(list.Items) > 0 {
			got = list.Items[0].ResourceVersion
		}
		if err != nil || got != want {
			t.Errorf("version %q of %s, error %v, want %q", got, name, err, want)
		}
	}
}
