// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster_test

import (
	"context"
	"errors"
	"net/http"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/hack/cluster/faultproxy"
)

func TestAReplicaThroughTheProxy(t *testing.T) {
	replica, err := shared.NewReplica(t.Context(), "proxied")
	if err != nil {
		t.Fatal(err)
	}
	proxy, err := faultproxy.Start(shared.AdminConfig())
	if err != nil {
		t.Fatal(err)
	}
	defer proxy.Close()
	if err := replica.Via(proxy.URL(), proxy.CA()); err != nil {
		t.Fatal(err)
	}
	config, err := clientcmd.BuildConfigFromFlags("", replica.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	config.UserAgent = "proxied"
	client := clientFor(t, config)
	admin := clientFor(t, shared.AdminConfig())
	ns := namespace(t, admin)
	create := func(ctx context.Context, name string) error {
		_, err := client.CoreV1().ConfigMaps(ns).Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
		return err
	}

	w, err := client.CoreV1().ConfigMaps(ns).Watch(t.Context(), metav1.ListOptions{FieldSelector: "metadata.name=seen"})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Stop()
	if err := create(t.Context(), "seen"); err != nil {
		t.Fatal(err)
	}
	if event := <-w.ResultChan(); event.Type != watch.Added {
		t.Errorf("watch event %v", event)
	}

	proxy.Add(faultproxy.Rule{Match: faultproxy.Path("POST", "/configmaps"), Status: 500, Times: 1})
	if err := create(t.Context(), "refused"); !apierrors.IsInternalError(err) {
		t.Errorf("response 500: %v", err)
	}
	proxy.Add(faultproxy.Rule{Match: faultproxy.Path("POST", "/configmaps"), DropResponse: true, Times: 1})
	if err := create(t.Context(), "lost"); err == nil {
		t.Error("lost response: no error")
	}
	if _, err := admin.CoreV1().ConfigMaps(ns).Get(t.Context(), "lost", metav1.GetOptions{}); err != nil {
		t.Errorf("the request with the lost response was not executed: %v", err)
	}
	if n := proxy.Count(func(r faultproxy.Request) bool { return r.Method == http.MethodPost && r.UserAgent == "proxied" }); n != 3 {
		t.Errorf("counted %d requests to create, want 3", n)
	}

	proxy.Partition(faultproxy.Hang)
	short, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if err := create(short, "partitioned"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("during the partition: %v", err)
	}
	proxy.Heal()
	if err := create(t.Context(), "after"); err != nil {
		t.Errorf("after the partition: %v", err)
	}

	// The server saw the replica's identity, not the proxy's.
	event := waitForAudit(t, func(e auditv1.Event) bool {
		return e.UserAgent == "proxied" && e.Verb == "create" && cluster.AuditWrite(e)
	})
	if cluster.AuditPod(event) != replica.Pod {
		t.Errorf("the audit log names Pod %q", cluster.AuditPod(event))
	}
}
