// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster_test

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

func clientFor(t *testing.T, config *rest.Config) *kubernetes.Clientset {
	t.Helper()
	httpClient, err := rest.HTTPClientFor(config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(httpClient.CloseIdleConnections)
	client, err := kubernetes.NewForConfigAndClient(config, httpClient)
	if err != nil {
		t.Fatal(err)
	}
	return client
}

// namespace creates a namespace for the test and deletes it afterwards.
func namespace(t *testing.T, admin kubernetes.Interface) string {
	t.Helper()
	ns, err := admin.CoreV1().Namespaces().Create(t.Context(),
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "test-"}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return ns.Name
}

func TestReplicaIsItsPodAndNoMore(t *testing.T) {
	replica, err := shared.NewReplica(t.Context(), "identity")
	if err != nil {
		t.Fatal(err)
	}
	for _, pattern := range []string{replica.Kubeconfig, filepath.Join(shared.Dir(), "*.token")} {
		files, err := filepath.Glob(pattern)
		if err != nil || len(files) == 0 {
			t.Errorf("%s: none found, %v", pattern, err)
		}
		for _, file := range files {
			if info, err := os.Stat(file); err != nil || info.Mode().Perm() != 0o600 {
				t.Errorf("%s: mode %v, %v", file, info.Mode(), err)
			}
		}
	}
	config, err := clientcmd.BuildConfigFromFlags("", replica.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	client := clientFor(t, config)
	cm, err := client.CoreV1().ConfigMaps("default").Create(t.Context(),
		&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{GenerateName: "by-replica-"}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	event := waitForAudit(t, func(e auditv1.Event) bool {
		return cluster.AuditWrite(e) && e.ObjectRef != nil && e.ObjectRef.Resource == "configmaps" && cluster.AuditPod(e) == replica.Pod
	})
	if want := "system:serviceaccount:kube-system:quartermaster"; event.User.Username != want {
		t.Errorf("user %q, want %q", event.User.Username, want)
	}
	if err := client.CoreV1().ConfigMaps("default").Delete(t.Context(), cm.Name, metav1.DeleteOptions{}); !apierrors.IsForbidden(err) {
		t.Errorf("a verb that its role does not have: %v, want Forbidden", err)
	}

	admin := clientFor(t, shared.AdminConfig())
	if err := admin.CoreV1().Pods("kube-system").Delete(t.Context(), replica.Pod, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	fleet.Eventually(fleet.Context(t), t, func() error {
		if _, err := client.CoreV1().ConfigMaps("default").List(t.Context(), metav1.ListOptions{}); !apierrors.IsUnauthorized(err) {
			return fmt.Errorf("the token has not ended with the Pod (%w)", err)
		}
		return nil
	})
}

func TestAnAnsweredRequestIsInTheAuditLog(t *testing.T) {
	admin := clientFor(t, shared.AdminConfig())
	ns := namespace(t, admin)
	for i := range 100 {
		name := fmt.Sprintf("answered-%d", i)
		_, err := admin.CoreV1().Secrets(ns).Create(t.Context(), &corev1.Secret{
			ObjectMeta: metav1.ObjectMeta{Name: name}, StringData: map[string]string{"key": "a value to be kept secret"},
		}, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		events, err := shared.AuditEvents()
		if err != nil {
			t.Fatal(err)
		}
		last := events[max(0, len(events)-50):]
		found := false
		for _, e := range last {
			found = found || e.Verb == "create" && e.RequestURI == "/api/v1/namespaces/"+ns+"/secrets" &&
				e.ResponseStatus.Code == 201 && (e.ObjectRef.Name == name || e.ObjectRef.Name == "")
		}
		if !found {
			t.Fatalf("request %d is not among the last %d events", i, len(last))
		}
	}
	// A patch of any other resource is logged with its body.
	patch := []byte(`{"stringData":{"key":"a value to be kept secret"}}`)
	if _, err := admin.CoreV1().Secrets(ns).Patch(t.Context(), "answered-0", types.MergePatchType, patch, metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	log, err := os.ReadFile(shared.AuditLog())
	if err != nil {
		t.Fatal(err)
	}
	// The value in base64, as a body would contain it.
	if bytes.Contains(log, []byte("YSB2YWx1ZSB0byBiZSBrZXB0IHNlY3JldA")) || bytes.Contains(log, []byte("kept secret")) {
		t.Error("the audit log has the value of a Secret")
	}
}

func TestAFailedStartLeavesNothingAndSaysWhy(t *testing.T) {
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	for name, test := range map[string]struct {
		ctx  context.Context
		args []string
		want string
	}{
		"a flag that kube-apiserver does not know": {t.Context(), []string{"--no-such-flag"}, "unknown flag: --no-such-flag"},
		"a cancelled context":                      {cancelled, nil, context.Canceled.Error()},
	} {
		t.Run(name, func(t *testing.T) {
			parent := t.TempDir()
			_, err := cluster.Start(test.ctx, cluster.Options{Dir: filepath.Join(parent, "run"), APIServerArgs: test.args})
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("error %v, want one with %q", err, test.want)
			}
			if left, _ := os.ReadDir(parent); len(left) > 0 {
				t.Errorf("left: %v", left)
			}
			if out, err := exec.Command("ps", "-eo", "args").Output(); err != nil || strings.Contains(string(out), parent) {
				t.Errorf("a process is left (%v):\n%s", err, out)
			}
		})
	}
}
