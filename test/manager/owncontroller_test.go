// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package manager

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"
	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"
	corev1ac "k8s.io/client-go/applyconfigurations/core/v1"
	metav1ac "k8s.io/client-go/applyconfigurations/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/pkg/app"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/builtin"
	"github.com/quartermaster-dev/quartermaster/pkg/informers"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// painter makes a ConfigMap of the color of each Gadget and reports its replicas in the status. It
// runs on every replica.
type painter struct {
	*controllers.Loop[cache.ObjectName]
	controllers.Host
	pod     string
	gadgets *informers.Informer[*Gadget]
	client  controllers.TypedClient[*Gadget]

	mu      sync.Mutex
	refused []error // writes that were refused since this replica does not lead
}

func paintersEntry(p *painter) controllers.Entry {
	return controllers.Entry{
		Name: "painter", Summary: "paints gadgets", EveryReplica: true,
		AddToScheme: addGadgets,
		Needs: func(controllers.Settings) ([]informers.Need, error) {
			return []informers.Need{
				{Resource: gadgets, Form: informers.Typed},
				{Resource: informers.ConfigMaps, Fields: informers.OwnerReferences},
			}, nil
		},
		Permissions: func(controllers.Settings) []rbacv1.PolicyRule {
			return []rbacv1.PolicyRule{
				{APIGroups: []string{gadgets.Group}, Resources: []string{"gadgets", "gadgets/status"}, Verbs: []string{"get", "list", "watch", "update", "patch"}},
				{APIGroups: []string{""}, Resources: []string{"configmaps"}, Verbs: []string{"get", "list", "watch", "create", "patch"}},
			}
		},
		New: func(h controllers.Host) (_ controllers.Controller, err error) {
			p.Host = h
			p.gadgets = informers.For[*Gadget](h, gadgets)
			p.client = controllers.ClientFor[*Gadget](h, gadgets)
			h.Handle(http.HandlerFunc(p.serve))
			h.LoopOptions.MaxBackoff = 2 * time.Second
			p.Loop, err = controllers.NewLoop(h.LoopOptions, p.reconcile,
				controllers.WatchSelf(p.gadgets, controllers.GenerationChanged),
				controllers.WatchOwner(informers.For[metav1.Object](h, informers.ConfigMaps), p.gadgets, gadgets.GroupVersion().WithKind("Gadget").GroupKind()))
			return p, err
		},
	}
}

func (p *painter) reconcile(ctx context.Context, key cache.ObjectName) (time.Duration, error) {
	g, ok := p.gadgets.Get(key)
	if !ok {
		return 0, nil
	}
	configMap := corev1ac.ConfigMap(g.Name, g.Namespace).WithData(map[string]string{"color": g.Spec.Color}).
		WithOwnerReferences(metav1ac.OwnerReference().WithAPIVersion(gadgets.GroupVersion().String()).WithKind("Gadget").
			WithName(g.Name).WithUID(g.UID).WithController(true))
	err := p.Apply(ctx, configMap)
	if err == nil {
		g = g.DeepCopyObject().(*Gadget)
		g.Status.Painted = g.Spec.Color
		_, err = p.client.Namespace(g.Namespace).UpdateStatus(ctx, g, metav1.UpdateOptions{})
	}
	if controllers.IsNotLeading(err) {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.refused = append(p.refused, err)
	}
	return 0, err
}

// serve lists the colors of the Gadgets in the namespace that is the path.
func (p *painter) serve(w http.ResponseWriter, r *http.Request) {
	for _, g := range p.gadgets.List(strings.Trim(r.URL.Path, "/"), labels.Everything()) {
		fmt.Fprintf(w, "%s is %s", g.Name, g.Spec.Color)
	}
}

// runPainter runs a manager with a painter in this process until stop is called, or the test ends.
func runPainter(ctx context.Context, t *testing.T) (p *painter, url string, stop func()) {
	t.Helper()
	p = &painter{}
	o, err := app.NewOptions(app.With(builtin.Entries()...), app.With(paintersEntry(p)))
	assert.NoError(t, err)
	replica := shared.NewReplica(ctx, t)
	p.pod = replica.Pod
	t.Setenv("POD_NAME", p.pod) // it is read at the start, which has passed when this returns
	o.Client.Kubeconfig = replica.Kubeconfig
	o.Generic.Controllers = []string{"painter"}
	o.Insecure.Port = 0
	o.Secure.BindAddress = net.IPv4(127, 0, 0, 1)
	if o.Secure.BindPort, err = freePort(); err != nil {
		t.Fatal(err)
	}
	running, cancel := context.WithCancel(context.WithoutCancel(ctx))
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		err = app.Run(running, o)
	}()
	stop = sync.OnceFunc(func() {
		cancel()
		<-ended
		if err != nil {
			t.Errorf("the manager of %s ended with %v", p.pod, err)
		}
	})
	t.Cleanup(stop)
	url = fmt.Sprintf("https://127.0.0.1:%d", o.Secure.BindPort)
	fleet.Eventually(ctx, t, func() error { return fleet.Answers(url+"/readyz", "", http.StatusOK) })
	return p, url, stop
}

func freePort() (int, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	defer func() { _ = l.Close() }()
	return l.Addr().(*net.TCPAddr).Port, nil
}

// TestEveryReplicaControllerWritesOnlyOnTheLeader runs two managers in this process. Both read, serve and
// reconcile. The standby's writes are refused by its own fence, and would be by the API server's.
func TestEveryReplicaControllerWritesOnlyOnTheLeader(t *testing.T) {
	ctx := fleet.Context(t)
	serveGadgets(ctx, t)
	ns := shared.NewNamespace(ctx, t, nil)
	shared.Grant(ctx, t, paintersEntry(&painter{}).Permissions(controllers.Settings{})...)
	token, err := shared.AdminToken(ctx)
	assert.NoError(t, err)
	begin := time.Now()
	leader, leaderURL, stopLeader := runPainter(ctx, t)
	fleet.Eventually(ctx, t, func() error {
		if holder := shared.HolderPod(ctx, t); holder != leader.pod {
			return fmt.Errorf("%q leads", holder)
		}
		return nil
	})
	standby, standbyURL, _ := runPainter(ctx, t)

	create := func(name, color string) {
		t.Helper()
		gadget := &unstructured.Unstructured{Object: map[string]any{
			"apiVersion": gadgets.GroupVersion().String(), "kind": "Gadget", "metadata": map[string]any{"name": name},
			"spec": map[string]any{"color": color},
		}}
		if _, err := shared.Objects.Resource(gadgets).Namespace(ns).Create(ctx, gadget, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	checkPainted := func(name, color string) func() error {
		return func() error {
			configMap, err := shared.Admin.CoreV1().ConfigMaps(ns).Get(ctx, name, metav1.GetOptions{})
			if err != nil {
				return err
			}
			gadget, err := shared.Objects.Resource(gadgets).Namespace(ns).Get(ctx, name, metav1.GetOptions{})
			if err != nil {
				return err
			}
			status, _, _ := unstructured.NestedString(gadget.Object, "status", "painted")
			if configMap.Data["color"] != color || status != color {
				return fmt.Errorf("the color is %q, in the status %q, want %q", configMap.Data["color"], status, color)
			}
			if fields := configMap.ManagedFields; len(fields) != 1 || fields[0].Manager != "painter" || fields[0].Operation != metav1.ManagedFieldsOperationApply {
				return fmt.Errorf("its fields are managed by %v", fields)
			}
			return nil
		}
	}
	create("door", "blue")
	fleet.Eventually(ctx, t, checkPainted("door", "blue"))

	// The owner is told of a change of what it owns.
	assert.NoError(t, shared.Admin.CoreV1().ConfigMaps(ns).Delete(ctx, "door", metav1.DeleteOptions{}))
	fleet.Eventually(ctx, t, checkPainted("door", "blue"))

	for replica, url := range map[string]string{"the leader": leaderURL, "the standby": standbyURL} {
		fleet.Eventually(ctx, t, func() error {
			return fleet.Answers(url+"/controllers/painter/"+ns, token, http.StatusOK, "door is blue")
		})
		if err := fleet.Answers(url+"/controllers/painter/"+ns, "", http.StatusForbidden); err != nil {
			t.Errorf("%s, without a permission: %v", replica, err)
		}
		if err := fleet.Answers(url+"/metrics", token, http.StatusOK, `quartermaster_controller_reconciles_total{cluster="",controller="painter"`); err != nil {
			t.Errorf("metrics of %s: %v", replica, err)
		}
	}

	// The fence of the standby has refused its writes, and none was sent.
	fleet.Eventually(ctx, t, func() error {
		standby.mu.Lock()
		defer standby.mu.Unlock()
		if len(standby.refused) == 0 {
			return errors.New("no write of the standby was refused")
		}
		return nil
	})
	if sent := shared.AuditSince(t, begin, func(e auditv1.Event) bool { return fleet.IsControllerWrite(e, standby.pod) }); len(sent) > 0 {
		t.Errorf("the standby has written %s", sent[0].RequestURI)
	}
	// Nor would the API server let it: the same write, with the token of the standby and without its fence.
	if err := writePastFence(ctx, t, standby, ns); !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), "quartermaster-fence") {
		t.Errorf("the API server answered %v to a write of the standby", err)
	}

	stopLeader()
	create("wall", "green")
	fleet.Eventually(ctx, t, checkPainted("wall", "green"))
	if shared.HolderPod(ctx, t) != standby.pod {
		t.Errorf("%s leads, want %s", shared.HolderPod(ctx, t), standby.pod)
	}
}

// writePastFence writes with the credentials of the manager, past its clients.
func writePastFence(ctx context.Context, t *testing.T, p *painter, ns string) error {
	t.Helper()
	config := rest.CopyConfig(p.RESTConfig)
	config.WrapTransport = nil // the fences and what goes with them
	client, err := kubernetes.NewForConfig(config)
	assert.NoError(t, err)
	_, err = client.CoreV1().ConfigMaps(ns).Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "past"}}, metav1.CreateOptions{})
	return err
}
