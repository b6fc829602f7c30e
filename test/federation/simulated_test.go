// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package federation

import (
	"encoding/json"
	"encoding/pem"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/federation/policy"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// simulatedMembers are members at /s0, /s1, ... of one server. Each serves the ten types, and has the same
// managed Namespace with managed ConfigMaps and Deployments. Only the status of Deployments changes: an
// update is answered with what is there, as if it were the same, and every other write fails.
type simulatedMembers struct {
	*httptest.Server
	shop        string // the Namespace
	objects     int    // ConfigMaps
	deployments int
	version     atomic.Int64 // of the status of all Deployments
	filler      string       // makes a ConfigMap as large as ConfigMaps are

	mu            sync.Mutex
	requests      map[string]int       // GETs of objects, and writes, by method and path
	puts          map[string]time.Time // when an object was last written, by path
	hangingMember string               // the member that does not answer
}

// targets are the resources of the ten types, with their kinds, by group and version.
var targets = map[string]map[string]string{
	"v1":                           {"namespaces": "Namespace", "configmaps": "ConfigMap", "secrets": "Secret", "services": "Service", "serviceaccounts": "ServiceAccount"},
	"apps/v1":                      {"deployments": "Deployment", "replicasets": "ReplicaSet"},
	"batch/v1":                     {"jobs": "Job"},
	"networking.k8s.io/v1":         {"ingresses": "Ingress"},
	"rbac.authorization.k8s.io/v1": {"clusterroles": "ClusterRole"},
}

func newSimulatedMembers(t *testing.T, shop string, objects, deployments int) *simulatedMembers {
	t.Helper()
	s := &simulatedMembers{shop: shop, objects: objects, deployments: deployments, filler: strings.Repeat("x", 1000), requests: map[string]int{}, puts: map[string]time.Time{}}
	s.Server = httptest.NewUnstartedServer(s)
	s.EnableHTTP2 = true
	s.StartTLS()
	t.Cleanup(func() {
		s.CloseClientConnections()
		s.Close()
	})
	return s
}

// ca is what a KubeFedCluster trusts.
func (s *simulatedMembers) ca() []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw})
}

// takeRequests returns the GETs of objects and the writes since the last call, and how many each was.
func (s *simulatedMembers) takeRequests() map[string]int {
	s.mu.Lock()
	defer s.mu.Unlock()
	requests := s.requests
	s.requests = map[string]int{}
	return requests
}

// writeTimes returns when objects were last written, by path.
func (s *simulatedMembers) writeTimes() map[string]time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	return maps.Clone(s.puts)
}

// setHanging leaves new requests to a member without an answer, and answers all others; "" answers all.
func (s *simulatedMembers) setHanging(member string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.hangingMember = member
}

// ServeHTTP implements http.Handler.
func (s *simulatedMembers) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	parts := strings.Split(strings.Trim(r.URL.Path, "/"), "/")
	if len(parts) == 1 {
		http.NotFound(w, r)
		return
	}
	s.mu.Lock()
	hangs := parts[0] == s.hangingMember
	s.mu.Unlock()
	if hangs {
		<-r.Context().Done()
		return
	}
	parts = parts[1:] // without the member
	if group, isAPI := map[string]int{"api": 2, "apis": 3}[parts[0]]; isAPI && len(parts) > group {
		gv := strings.Join(parts[1:group], "/")
		switch parts = parts[group:]; {
		case len(parts) < 3 && targets[gv][parts[0]] == "", len(parts) == 2 && parts[1] == metav1.NamespaceSystem: // nothing says which cluster it is
			writeFailure(w, http.StatusNotFound, metav1.StatusReasonNotFound)
		case len(parts) > 1 || r.Method != http.MethodGet: // a name, or a namespace
			s.serveObject(w, r, parts)
		case r.URL.Query().Has("watch"):
			s.serveWatch(w, r, parts[0])
		default:
			s.serveList(w, r, gv, parts[0])
		}
		return
	}
	s.serveDiscovery(w, r, strings.Join(parts, "/"))
}

func writeJSON(w http.ResponseWriter, code int, body any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(body)
}

func writeFailure(w http.ResponseWriter, code int, reason metav1.StatusReason) {
	writeJSON(w, code, metav1.Status{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}, Status: "Failure", Code: int32(code), Reason: reason})
}

// serveDiscovery serves health, version and discovery.
func (s *simulatedMembers) serveDiscovery(w http.ResponseWriter, r *http.Request, path string) {
	switch gv, isAPI := strings.CutPrefix(strings.TrimPrefix(path, "apis/"), "api/"); {
	case path == "healthz":
		fmt.Fprint(w, "ok")
	case path == "version":
		writeJSON(w, http.StatusOK, map[string]string{"gitVersion": "v1.36.0", "major": "1", "minor": "36"})
	case path == "api":
		writeJSON(w, http.StatusOK, metav1.APIVersions{TypeMeta: metav1.TypeMeta{Kind: "APIVersions"}, Versions: []string{"v1"}})
	case path == "apis":
		groups := metav1.APIGroupList{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "APIGroupList"}}
		for gv := range targets {
			if group, version, ok := strings.Cut(gv, "/"); ok {
				version := metav1.GroupVersionForDiscovery{GroupVersion: gv, Version: version}
				groups.Groups = append(groups.Groups, metav1.APIGroup{Name: group, Versions: []metav1.GroupVersionForDiscovery{version}, PreferredVersion: version})
			}
		}
		writeJSON(w, http.StatusOK, groups)
	case (isAPI || strings.HasPrefix(path, "apis/")) && targets[gv] != nil:
		list := metav1.APIResourceList{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "APIResourceList"}, GroupVersion: gv}
		for resource, kind := range targets[gv] {
			list.APIResources = append(list.APIResources, metav1.APIResource{Name: resource, Kind: kind, Verbs: metav1.Verbs{"get", "list", "watch", "create", "update", "delete"},
				Namespaced: !slices.Contains([]string{"Namespace", "ClusterRole"}, kind)})
		}
		writeJSON(w, http.StatusOK, list)
	default:
		http.NotFound(w, r)
	}
}

// configMap returns the object of a number.
func (s *simulatedMembers) configMap(i int) map[string]any {
	return map[string]any{"apiVersion": "v1", "kind": "ConfigMap", "data": map[string]any{"content": strconv.Itoa(i), "filler": s.filler}, "metadata": metadata(fmt.Sprintf("f-%d", i), s.shop)}
}

// deployment returns the object of a number, with the present status.
func (s *simulatedMembers) deployment(i int) map[string]any {
	version := 1 + s.version.Load()
	meta := metadata(fmt.Sprintf("d-%d", i), s.shop)
	meta["generation"], meta["resourceVersion"] = 1, strconv.FormatInt(version, 10)
	return map[string]any{"apiVersion": "apps/v1", "kind": "Deployment", "metadata": meta, "spec": map[string]any{}, "status": map[string]any{"observedGeneration": 1, "readyReplicas": version}}
}

func metadata(name, namespace string) map[string]any {
	m := map[string]any{"name": name, "uid": uuid.NewSHA1(uuid.Nil, []byte(name)).String(), "resourceVersion": "1", "creationTimestamp": "2026-01-01T00:00:00Z", "labels": map[string]any{policy.ManagedLabel: "true"}}
	if namespace != "" {
		m["namespace"] = namespace
	}
	return m
}

// namespace returns the Namespace of all objects.
func (s *simulatedMembers) namespace() map[string]any {
	return map[string]any{"apiVersion": "v1", "kind": "Namespace", "spec": map[string]any{}, "metadata": metadata(s.shop, "")}
}

// serveList serves a page of a resource, with or without more than the metadata.
func (s *simulatedMembers) serveList(w http.ResponseWriter, r *http.Request, gv, resource string) {
	end := map[string]int{"configmaps": s.objects, "deployments": s.deployments, "namespaces": 1}[resource]
	begin, _ := strconv.Atoi(r.URL.Query().Get("continue"))
	meta := map[string]any{"resourceVersion": "1"}
	if limit, _ := strconv.Atoi(r.URL.Query().Get("limit")); limit > 0 && begin+limit < end {
		end = begin + limit
		meta["continue"] = strconv.Itoa(end)
	}
	list := map[string]any{"apiVersion": gv, "kind": targets[gv][resource] + "List", "metadata": meta}
	metadataOnly := strings.Contains(r.Header.Get("Accept"), "as=PartialObjectMetadataList")
	if metadataOnly {
		list["apiVersion"], list["kind"] = "meta.k8s.io/v1", "PartialObjectMetadataList"
	}
	items := []any{}
	for i := begin; i < end; i++ {
		object := s.namespace()
		switch resource {
		case "configmaps":
			object = s.configMap(i)
		case "deployments":
			object = s.deployment(i)
		}
		if metadataOnly {
			object = map[string]any{"apiVersion": "meta.k8s.io/v1", "kind": "PartialObjectMetadata", "metadata": object["metadata"]}
		}
		items = append(items, object)
	}
	list["items"] = items
	writeJSON(w, http.StatusOK, list)
}

// serveWatch shows how the status of Deployments changes until its client leaves. A list cannot be streamed.
func (s *simulatedMembers) serveWatch(w http.ResponseWriter, r *http.Request, resource string) {
	if r.URL.Query().Has("sendInitialEvents") {
		writeFailure(w, http.StatusUnprocessableEntity, metav1.StatusReasonInvalid)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusOK)
	w.(http.Flusher).Flush()
	for shown := s.version.Load(); resource == "deployments" && s.deployments > 0 && r.Context().Err() == nil; fleet.Wait(r.Context(), 100*time.Millisecond) {
		version := s.version.Load()
		for i := 0; i < s.deployments && version != shown; i++ {
			_ = json.NewEncoder(w).Encode(map[string]any{"type": "MODIFIED", "object": s.deployment(i)})
		}
		w.(http.Flusher).Flush()
		shown = version
	}
	<-r.Context().Done()
}

// serveObject serves and counts a request for an object.
func (s *simulatedMembers) serveObject(w http.ResponseWriter, r *http.Request, parts []string) {
	s.mu.Lock()
	s.requests[r.Method+" "+r.URL.Path]++
	if r.Method == http.MethodPut {
		s.puts[r.URL.Path] = time.Now()
	}
	s.mu.Unlock()
	name := parts[len(parts)-1]
	i, err := strconv.Atoi(strings.TrimLeft(name, "fd-"))
	switch {
	case r.Method != http.MethodGet && r.Method != http.MethodPut:
		writeFailure(w, http.StatusInternalServerError, metav1.StatusReasonInternalError)
	case len(parts) == 2 && parts[1] == s.shop:
		writeJSON(w, http.StatusOK, s.namespace())
	case err == nil && name[0] == 'd' && i < s.deployments:
		writeJSON(w, http.StatusOK, s.deployment(i))
	case err == nil && name[0] == 'f' && i < s.objects:
		writeJSON(w, http.StatusOK, s.configMap(i))
	default:
		writeFailure(w, http.StatusNotFound, metav1.StatusReasonNotFound)
	}
}
