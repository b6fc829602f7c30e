// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster_test

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
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

func deployment() *appsv1.Deployment {
	labels := map[string]string{"app": "web"}
	return &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Name: "web"},
		Spec: appsv1.DeploymentSpec{
			Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: corev1.PodTemplateSpec{
				ObjectMeta: metav1.ObjectMeta{Labels: labels},
				Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "web", Image: "web"}}},
			},
		},
	}
}

func TestControllersRun(t *testing.T) {
	admin := clientFor(t, shared.AdminConfig())
	ns := namespace(t, admin)
	web, err := admin.AppsV1().Deployments(ns).Create(t.Context(), deployment(), metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	ctx := fleet.Context(t)
	fleet.Eventually(ctx, t, func() error {
		sets, err := admin.AppsV1().ReplicaSets(ns).List(t.Context(), metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		pods, err := admin.CoreV1().Pods(ns).List(t.Context(), metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if len(sets.Items) != 1 || !metav1.IsControlledBy(&sets.Items[0], web) || len(pods.Items) != 1 {
			return fmt.Errorf("the Deployment has %d ReplicaSets and %d Pods", len(sets.Items), len(pods.Items))
		}
		return nil
	})
	if err := admin.AppsV1().Deployments(ns).Delete(t.Context(), web.Name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	fleet.Eventually(ctx, t, func() error {
		sets, err := admin.AppsV1().ReplicaSets(ns).List(t.Context(), metav1.ListOptions{})
		if err == nil && len(sets.Items) > 0 {
			err = fmt.Errorf("the ReplicaSet of the deleted Deployment is still there")
		}
		return err
	})
	if err := admin.CoreV1().Namespaces().Delete(t.Context(), ns, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	fleet.Eventually(ctx, t, func() error {
		if _, err := admin.CoreV1().Namespaces().Get(t.Context(), ns, metav1.GetOptions{}); !apierrors.IsNotFound(err) {
			return fmt.Errorf("the deleted namespace is still there (%w)", err)
		}
		return nil
	})
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

func TestAPIServerRestartsWithItsData(t *testing.T) {
	admin := clientFor(t, shared.AdminConfig())
	ns := namespace(t, admin)
	for name, stop := range map[string]func() error{
		"SIGTERM": func() error { return shared.StopAPIServer(fleet.Context(t)) },
		"SIGKILL": func() error { shared.KillAPIServer(); return nil },
	} {
		t.Run(name, func(t *testing.T) {
			if err := stop(); err != nil {
				t.Fatal(err)
			}
			if _, err := admin.CoreV1().Namespaces().Get(t.Context(), ns, metav1.GetOptions{}); err == nil {
				t.Error("it responds although it is stopped")
			}
			if err := shared.Check(); err == nil || !strings.Contains(err.Error(), "kube-apiserver ended with code ") {
				t.Errorf("Check returned %v", err)
			}
			if err := shared.StartAPIServer(fleet.Context(t)); err != nil {
				t.Fatal(err)
			}
			if err := shared.Check(); err != nil {
				t.Error(err)
			}
			if _, err := admin.CoreV1().Namespaces().Get(t.Context(), ns, metav1.GetOptions{}); err != nil {
				t.Errorf("after the start: %v", err)
			}
		})
	}
}

func TestKubectlIsOfTheSameVersion(t *testing.T) {
	out, err := shared.Kubectl(t.Context(), "version")
	if err != nil {
		t.Fatal(err)
	}
	_, dir := filepath.Split(filepath.Dir(shared.Binary("kubectl")))
	version, _, _ := strings.Cut(dir, "-")
	for _, want := range []string{"Client Version: " + version, "Server Version: " + version} {
		if !strings.Contains(out, want+"\n") {
			t.Errorf("no line %q in:\n%s", want, out)
		}
	}
	if _, err := shared.Kubectl(t.Context(), "get", "nonsense"); err == nil || !strings.Contains(err.Error(), "nonsense") {
		t.Errorf("error %v, want what kubectl says about it", err)
	}
}

func TestApplyDirLeavesOutKinds(t *testing.T) {
	admin := clientFor(t, shared.AdminConfig())
	if _, err := admin.CoreV1().ServiceAccounts("kube-system").Get(t.Context(), "quartermaster", metav1.GetOptions{}); err != nil {
		t.Error(err)
	}
	if _, err := admin.AppsV1().Deployments("kube-system").Get(t.Context(), "quartermaster", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("the Deployment: %v, want NotFound", err)
	}
}

// TestManager starts a shell instead of the manager, because only the way it is started matters.
func TestManager(t *testing.T) {
	replica, err := shared.NewReplica(t.Context(), "process")
	if err != nil {
		t.Fatal(err)
	}
	if err := replica.Via("https://127.0.0.1:1", []byte("CA")); err != nil {
		t.Fatal(err)
	}
	script := filepath.Join(t.TempDir(), "manager")
	const text = "#!/bin/sh\ntrap 'echo ended; exit 0' TERM\necho \"$POD_NAMESPACE/$POD_NAME $*\"\nwhile :; do sleep 0.1; done\n"
	if err := os.WriteFile(script, []byte(text), 0o700); err != nil {
		t.Fatal(err)
	}
	m, err := shared.StartManager(replica, cluster.ManagerOptions{Binary: script, Args: []string{"--v=4"}})
	if err != nil {
		t.Fatal(err)
	}
	line, err := m.WaitForLine(fleet.Context(t), "kube-system/")
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"kube-system/" + replica.Pod + " ", "--kubeconfig=" + replica.Kubeconfig, "--bind-address=127.0.0.1", " --v=4",
		"--secure-port=" + strings.TrimPrefix(m.SecureURL, "https://127.0.0.1:"),
		"--insecure-port=" + strings.TrimPrefix(m.InsecureURL, "http://127.0.0.1:"),
	} {
		if !strings.Contains(line, want) {
			t.Errorf("no %q in %q", want, line)
		}
	}
	if config, err := clientcmd.BuildConfigFromFlags("", replica.Kubeconfig); err != nil || config.Host != "https://127.0.0.1:1" {
		t.Errorf("the kubeconfig names the server %v, %v", config, err)
	}
	if err := m.Stop(t.Context(), time.Minute); err != nil || m.ExitCode() != 0 {
		t.Errorf("stop: %v, exit code %d", err, m.ExitCode())
	}
	if _, err := m.WaitForLine(fleet.Context(t), "ended"); err != nil {
		t.Error(err)
	}
}
