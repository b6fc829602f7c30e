// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package federation

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"

	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/dynamic"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/federation/policy"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// endpoint is a server in front of one control plane after another.
type endpoint struct {
	*httptest.Server
	controlPlane atomic.Pointer[httputil.ReverseProxy] // nil while there is none
}

func newEndpoint(t *testing.T) *endpoint {
	t.Helper()
	e := &endpoint{}
	e.Server = httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if controlPlane := e.controlPlane.Load(); controlPlane != nil {
			controlPlane.ServeHTTP(w, r)
			return
		}
		http.Error(w, "there is no control plane", http.StatusBadGateway)
	}))
	e.EnableHTTP2 = true
	e.StartTLS()
	t.Cleanup(e.Close)
	t.Cleanup(e.CloseClientConnections)
	return e
}

// leadTo leads to a control plane, or to none.
func (e *endpoint) leadTo(t *testing.T, c *cluster.Cluster) {
	t.Helper()
	var controlPlane *httputil.ReverseProxy
	if c != nil {
		target, err := url.Parse(c.URL())
		assert.NoError(t, err)
		roots := x509.NewCertPool()
		roots.AppendCertsFromPEM(c.AdminConfig().CAData)
		controlPlane = &httputil.ReverseProxy{Rewrite: func(r *httputil.ProxyRequest) { r.SetURL(target) }, ErrorLog: log.New(io.Discard, "", 0),
			Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12}, ForceAttemptHTTP2: true, DisableCompression: true}}
	}
	e.controlPlane.Store(controlPlane)
	e.CloseClientConnections()
}

// TestReplacedMemberGetsItsObjectsAgain rebuilds c2 from nothing behind the same endpoint and token, and then
// joins it twice.
func TestReplacedMemberGetsItsObjectsAgain(t *testing.T) {
	tokens := filepath.Join(t.TempDir(), "tokens")
	assert.NoError(t, os.WriteFile(tokens, []byte("older-token,older,1\nyounger-token,younger,2\n"), 0o600))
	options := cluster.Options{WithoutControllerManager: true, APIServerArgs: []string{"--token-auth-file=" + tokens}}
	m := newPlanes(t, 6*fleet.Patience, options)
	options.AuditPolicy = auditPolicy
	third, err := cluster.Start(m.ctx, options)
	assert.NoError(t, err)
	t.Cleanup(func() { _ = third.Stop() })
	for _, c := range []*cluster.Cluster{m.second, third} {
		binding := &rbacv1.ClusterRoleBinding{ObjectMeta: metav1.ObjectMeta{Name: "members"}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "cluster-admin"},
			Subjects: []rbacv1.Subject{{Kind: rbacv1.UserKind, APIGroup: rbacv1.GroupName, Name: "older"}, {Kind: rbacv1.UserKind, APIGroup: rbacv1.GroupName, Name: "younger"}}}
		if _, err := c.Admin.RbacV1().ClusterRoleBindings().Create(m.ctx, binding, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	m.configure(`{"controllerDuration":{"availableDelay":"1s"},"clusterHealthCheck":{"period":"1s","timeout":"2s","failureThreshold":2}}`)
	token, err := shared.NewAccount(m.ctx, metav1.NamespaceSystem, account, "cluster-admin")
	assert.NoError(t, err)
	m.join("c1", shared.URL(), shared.AdminConfig().CAData, token)
	e := newEndpoint(t)
	e.leadTo(t, m.second)
	m.join("c2", e.URL, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: e.Certificate().Raw}), "older-token")
	shared.RunLeader(m.ctx, t, "--controllers=federation", "--federation-unsafe-endpoints")
	m.shop = shared.NewNamespace(m.ctx, t, nil)
	m.federateNamespace(m.shop)
	objects := m.createMany(0, 20, "b")
	for _, f := range objects {
		m.waitForStatus(f, "c1= c2=")
	}

	e.leadTo(t, nil)
	m.waitForCondition("c2", "Ready=False")
	e.leadTo(t, third)
	rebuilt, err := dynamic.NewForConfig(third.AdminConfig())
	assert.NoError(t, err)
	for _, f := range objects {
		m.waitForObject(rebuilt, configMaps, m.shop, f.GetName(), hasField("b", "data", "a"))
		m.waitForStatus(f, "c1= c2=")
	}
	list, err := shared.Admin.CoreV1().Events(namespace).List(m.ctx, metav1.ListOptions{FieldSelector: "reason=" + policy.ClusterReplaced})
	if err != nil || len(list.Items) == 0 {
		t.Errorf("there is no Event %s: %v", policy.ClusterReplaced, err)
	}
	m.patch(objects[0], `{"spec":{"placement":{"clusters":[{"name":"c1"}]}}}`)
	m.waitForStatus(objects[0], "c1= c2="+policy.RemovalHeld)

	m.join("c3", third.URL(), third.AdminConfig().CAData, "younger-token")
	m.waitForCondition("c3", "ConfigMalformed=True")
	m.patch(objects[1], `{"spec":{"placement":{"clusters":[{"name":"c1"},{"name":"c3"}]}}}`)
	m.waitForObject(m.c1, configMaps, m.shop, "f-1", managed)
	fleet.Wait(m.ctx, quietTime)
	m.waitForObject(rebuilt, configMaps, m.shop, "f-0", managed)
	m.waitForObject(rebuilt, configMaps, m.shop, "f-1", func(u *unstructured.Unstructured) bool { return managed(u) && u.GetDeletionTimestamp() == nil })
	events, err := third.AuditEvents()
	assert.NoError(t, err)
	created := 0
	for _, event := range events {
		write := fmt.Sprintf("%s: %s %s", event.User.Username, event.Verb, event.RequestURI)
		switch {
		case !cluster.AuditWrite(event) || event.User.Username != "older" && event.User.Username != "younger":
		case event.User.Username == "younger", event.Verb != "create":
			t.Error(write)
		default:
			created++
		}
	}
	if created < len(objects)+1 {
		t.Errorf("%d objects were created, want %d and their Namespace", created, len(objects))
	}
}
