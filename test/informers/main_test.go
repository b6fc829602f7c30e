// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package informers tests the shared cache on a real control plane: as part of managers that run as processes, judged
// by the API server's audit log and by what their ports answer, and as a library where no controller uses it yet.
package informers

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/hack/cluster/faultproxy"
	"github.com/quartermaster-dev/quartermaster/pkg/informers"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// patience bounds every wait. It is generous: a test that passes does not use it up.
const patience = 90 * time.Second

// short are the shortest timings that are safe, for tests that wait for another leader.
var short = []string{"--leader-elect-lease-duration=3s", "--leader-elect-renew-deadline=2s", "--leader-elect-retry-period=500ms"}

// shared is the control plane of all tests of the package, with everything of deploy/ but the Deployment.
var (
	shared  *fleet.Fleet
	admin   *kubernetes.Clientset
	objects *dynamic.DynamicClient // as administrator
	program string                 // of a manager with config-reload and the greeter of examples/
	token   string                 // for the paths of managers that need permission
)

func TestMain(m *testing.M) {
	os.Exit(run(m))
}

func run(m *testing.M) int {
	ctx, cancel := context.WithTimeout(context.Background(), 15*time.Minute)
	defer cancel()
	err := setUp(ctx)
	if shared != nil {
		defer func() { _ = shared.Stop() }() // the reaper makes good what fails here
	}
	code := 1
	if err == nil {
		code = m.Run()
		err = shared.Refused(ctx)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "FAIL:", err)
		return 1
	}
	return code
}

func setUp(ctx context.Context) (err error) {
	if program, err = cluster.BuildProgram(ctx, "examples/manager", true); err != nil {
		return err
	}
	if shared, err = fleet.Start(ctx, cluster.Options{}, true); err != nil {
		return err
	}
	admin = shared.Admin
	if objects, err = dynamic.NewForConfig(shared.AdminConfig()); err != nil {
		return err
	}
	if err := shared.ApplyDir(ctx, "../../examples/greeter"); err != nil {
		return err
	}
	return newToken(ctx)
}

// newToken makes a ServiceAccount that may see everything, and a token of it.
func newToken(ctx context.Context) error {
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "observer", Namespace: "default"}}
	if _, err := admin.CoreV1().ServiceAccounts("default").Create(ctx, account, metav1.CreateOptions{}); err != nil {
		return err
	}
	_, err := admin.RbacV1().ClusterRoleBindings().Create(ctx, &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "observer"},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "cluster-admin"},
		Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Name: "observer", Namespace: "default"}},
	}, metav1.CreateOptions{})
	if err != nil {
		return err
	}
	request, err := admin.CoreV1().ServiceAccounts("default").CreateToken(ctx, "observer", &authenticationv1.TokenRequest{}, metav1.CreateOptions{})
	if err != nil {
		return err
	}
	token = request.Status.Token
	return nil
}

// testContext ends with the test, or when patience does.
func testContext(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeoutCause(t.Context(), patience, fmt.Errorf("it took longer than %s", patience))
	t.Cleanup(cancel)
	return ctx
}

// eventually polls until check answers nil.
func eventually(ctx context.Context, t *testing.T, check func() error) {
	t.Helper()
	last := fmt.Errorf("never checked")
	err := wait.PollUntilContextCancel(ctx, 50*time.Millisecond, true, func(context.Context) (bool, error) {
		last = check()
		return last == nil, nil
	})
	if err != nil {
		t.Fatalf("%v: %v", context.Cause(ctx), last)
	}
}

func newProxy(t *testing.T) *faultproxy.Proxy {
	t.Helper()
	proxy, err := faultproxy.Start(shared.AdminConfig())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = proxy.Close() })
	return proxy
}

// behindProxy is a replica that reaches the API server through a proxy of the test's own.
func behindProxy(ctx context.Context, t *testing.T) (*cluster.Replica, *faultproxy.Proxy) {
	t.Helper()
	proxy, r := newProxy(t), shared.NewReplica(ctx, t)
	if err := r.Via(proxy.URL(), proxy.CA()); err != nil {
		t.Fatal(err)
	}
	return r, proxy
}

// start starts a manager that looks for changed objects in its cache. It is stopped at the end of the test, with grace,
// so that the next test finds the lease released and the cache has been looked through.
func start(t *testing.T, r *cluster.Replica, o cluster.ManagerOptions) *cluster.Manager {
	t.Helper()
	if o.Binary == "" {
		o.Binary = program
	}
	o.Args = append([]string{"--cache-mutation-detection"}, o.Args...)
	m, err := shared.StartManager(r, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("log of %s:\n%s", m.Pod, m.Tail(60))
		}
		_ = m.Stop(context.Background(), 30*time.Second)
		log, err := os.ReadFile(m.Log)
		if err != nil {
			t.Error(err)
		}
		for _, alarm := range []string{"WARNING: DATA RACE", "A controller changed an object in the cache"} {
			if strings.Contains(string(log), alarm) {
				t.Errorf("%s: %s\n%s", m.Pod, alarm, log)
			}
		}
	})
	return m
}

func startReplica(ctx context.Context, t *testing.T, args ...string) *cluster.Manager {
	t.Helper()
	return start(t, shared.NewReplica(ctx, t), cluster.ManagerOptions{Args: args})
}

// startLeader starts a manager and waits until it leads.
func startLeader(ctx context.Context, t *testing.T, args ...string) *cluster.Manager {
	t.Helper()
	m := startReplica(ctx, t, args...)
	waitForLeader(ctx, t, m)
	return m
}

// waitForLeader waits until the Lease names m.
func waitForLeader(ctx context.Context, t *testing.T, m *cluster.Manager) {
	t.Helper()
	eventually(ctx, t, func() error {
		lease, err := admin.CoordinationV1().Leases("kube-system").Get(ctx, "quartermaster", metav1.GetOptions{})
		if err != nil {
			return err
		}
		if holder, _, _ := strings.Cut(ptr.Deref(lease.Spec.HolderIdentity, ""), "_"); holder != m.Pod {
			return fmt.Errorf("the lease is held by %q, not by %s", holder, m.Pod)
		}
		return nil
	})
}

// get asks a manager for a page, with the observer's token where somebody asks who it is.
func get(url string) (code int, body string, err error) {
	if strings.HasPrefix(url, "https:") {
		return fleet.Get(url, token)
	}
	return fleet.Get(url, "")
}

// answers returns an error unless m answers with the code, and a body that contains all parts, on a path of its plain
// port.
func answers(m *cluster.Manager, path string, want int, parts ...string) error {
	code, body, err := get(m.InsecureURL + path)
	if err != nil {
		return err
	}
	if code != want {
		return fmt.Errorf("%s answers %d, not %d: %s", path, code, want, body)
	}
	for _, part := range parts {
		if !strings.Contains(body, part) {
			return fmt.Errorf("%s does not say %q: %s", path, part, body)
		}
	}
	return nil
}

// status is what m shows on /debug/informers.
func status(m *cluster.Manager) (informers.Status, error) {
	var s informers.Status
	code, body, err := get(m.SecureURL + "/debug/informers?format=json")
	if err != nil {
		return s, err
	}
	if code != http.StatusOK {
		return s, fmt.Errorf("/debug/informers answers %d: %s", code, body)
	}
	return s, json.Unmarshal([]byte(body), &s)
}

func mustStatus(t *testing.T, m *cluster.Manager) informers.Status {
	t.Helper()
	s, err := status(m)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// reads returns the URIs of the lists and watches in all namespaces with which the Pod's manager filled its cache, by
// resource. A watch is in the audit log twice, and counts once. The host's own watches are of single objects: of its
// Lease, and of the ConfigMap that tells how to authenticate those who ask it.
func reads(t *testing.T, pod string) map[string][]string {
	t.Helper()
	seen, uris := map[string]bool{}, map[string][]string{}
	for _, e := range audited(t, pod) {
		if id := string(e.AuditID); (e.Verb == "watch" || e.Verb == "list") && e.ObjectRef.Namespace == "" && !seen[id] {
			seen[id] = true
			uris[e.ObjectRef.Resource] = append(uris[e.ObjectRef.Resource], e.RequestURI)
		}
	}
	return uris
}

// audited returns the audit log's events of requests for objects by the Pod's manager.
func audited(t *testing.T, pod string) []auditv1.Event {
	t.Helper()
	all, err := shared.AuditEvents()
	if err != nil {
		t.Fatal(err)
	}
	var events []auditv1.Event
	for _, e := range all {
		if cluster.AuditPod(e) == pod && e.ObjectRef != nil {
			events = append(events, e)
		}
	}
	return events
}
